//! Ranks that compute with more threads than their share of the cores.

use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;
use std::thread;

use dist_collectives::Communicator;

use super::{END, distctl};

const THREADS: &str = "RAYON_NUM_THREADS";
const RANKS: usize = 3;

#[cfg(target_os = "linux")]
#[test]
fn each_rank_with_too_many_threads_warns_once_without_a_logger() {
    if let Ok(test) = std::env::var(END) {
        return compute(&test);
    }
    let program = std::env::current_exe().unwrap().display().to_string();
    let test = thread::current().name().unwrap().to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let threads = thread::available_parallelism().unwrap().get() + 1;
    let ranks = RANKS.to_string();
    let mut command = distctl(&["run", "-n", &ranks, "--", &program, "--exact", &test, "--nocapture"]);
    command.env(END, listener.local_addr().unwrap().to_string()).env(THREADS, threads.to_string());
    let mut job = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let ends: Vec<TcpStream> = (0..RANKS).map(|_| listener.accept().unwrap().0).collect();
    let mut lines = BufReader::new(job.stderr.take().unwrap()).lines().map(Result::unwrap);
    let warned = |line: &String| line.contains(&format!("computes with {threads} threads"));
    let mut warnings: Vec<_> = lines.by_ref().filter(warned).take(RANKS).collect();
    // The ranks wait until here.
    drop(ends);
    warnings.extend(lines.filter(warned));
    warnings.sort();
    assert!(job.wait().unwrap().success());
    assert_eq!(warnings.len(), RANKS, "{warnings:#?}");
    for (rank, warning) in warnings.iter().enumerate() {
        assert!(warning.starts_with(&format!("dist: rank {rank} computes with")), "{warning}");
        assert!(warning.contains(&format!("Set {THREADS}=1 for each rank")) || threads > RANKS, "{warning}");
    }
}

/// The program of a rank: it runs the given number of threads until the test closes the pipe.
fn compute(test: &str) {
    let mut comm = Communicator::from_env().unwrap();
    comm.barrier().unwrap();
    let threads: usize = std::env::var(THREADS).unwrap().parse().unwrap();
    let runtime = comm.runtime().clone();
    let wait = |_| {
        let (end, mut ended) = runtime.mailbox::<()>();
        let work = move || {
            let _ = ended.receive(None);
        };
        drop(runtime.spawn("compute", work).unwrap());
        end
    };
    let _until_the_end: Vec<_> = (0..threads).map(wait).collect();
    let mut test = TcpStream::connect(test).unwrap();
    assert_eq!(test.read(&mut [0]).unwrap(), 0);
    comm.barrier().unwrap();
}
