//! Tests with a process for each rank.
//!
//! A test calls [`ranks`], which runs the same test again in each of several processes, with the environment
//! of a job. In these processes [`rank`] returns the rank.
//!
//! ```no_run
//! use std::time::Duration;
//! use dist_testkit::process;
//!
//! // #[test]
//! fn ranks_agree() {
//!     match process::rank() {
//!         None => process::ranks(2, "ranks_agree", Duration::from_secs(30)).assert_success(),
//!         Some(rank) => println!("this is rank {rank}"),
//!     }
//! }
//! ```
#![allow(clippy::disallowed_methods, reason = "processes of tests use the system's clock and threads")]

use std::io::{self, Read};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A Python program that forbids the system calls for `read` or `write` of other processes' memory, which its
/// first argument selects. It then executes the program in its remaining arguments.
pub const FORBID_ATTACH: &str = include_str!("forbid_attach.py");

/// The end of one rank.
#[derive(Debug)]
pub struct Ended {
    /// The rank.
    pub rank: usize,
    /// Its exit status; `None` if it was killed at the time limit.
    pub status: Option<ExitStatus>,
    /// Its stdout, followed by its stderr.
    pub output: String,
}

/// The end of all ranks of a job.
#[derive(Debug)]
pub struct Job {
    /// The ranks in order.
    pub ranks: Vec<Ended>,
}

impl Job {
    /// Asserts that all ranks succeeded.
    ///
    /// # Panics
    /// If a rank failed, with the output of each failed rank.
    #[track_caller]
    pub fn assert_success(&self) {
        let succeeded = |ended: &&Ended| ended.status.is_some_and(|status| status.success());
        let failed: Vec<String> = self.ranks.iter().filter(|ended| !succeeded(ended)).map(describe).collect();
        assert!(
            failed.is_empty(),
            "{} of {} ranks failed\n{}",
            failed.len(),
            self.ranks.len(),
            failed.join("\n")
        );
    }
}

fn describe(ended: &Ended) -> String {
    let how = ended.status.map_or("was killed at the limit".to_owned(), |status| status.to_string());
    format!("rank {} {how}:\n{}", ended.rank, ended.output)
}

/// Returns the rank of this process if [`ranks`] started it.
pub fn rank() -> Option<usize> {
    std::env::var(MARK).ok()?;
    std::env::var("RANK").ok()?.parse().ok()
}

/// Runs the test `test_name` of this test binary once in each of `n` processes, with the environment of a
/// job. Kills the processes that have not ended after `limit`. The name includes the modules, as the test
/// runner prints it.
///
/// # Panics
/// If a process cannot be started.
pub fn ranks(n: usize, test_name: &str, limit: Duration) -> Job {
    ranks_with(n, test_name, limit, &[])
}

/// Runs ranks as [`ranks`] does, with additional environment variables.
///
/// # Panics
/// If a process cannot be started.
pub fn ranks_with(n: usize, test_name: &str, limit: Duration, variables: &[(&str, &str)]) -> Job {
    ranks_through(n, test_name, limit, variables, |_| Vec::new())
}

/// Runs ranks as [`ranks_with`] does, through another program. `starter` returns the words of that program
/// for a rank, which precede the rank's command. Without words, the rank is started directly.
///
/// # Panics
/// If a process cannot be started.
pub fn ranks_through(
    n: usize,
    test_name: &str,
    limit: Duration,
    variables: &[(&str, &str)],
    starter: impl Fn(usize) -> Vec<String>,
) -> Job {
    let port = Port::reserve();
    let id = format!("test-{}-{}", std::process::id(), JOBS.fetch_add(1, Ordering::Relaxed));
    let mut running: Vec<Running> = (0..n)
        .map(|rank| {
            let mut command = behind(&starter(rank), command(test_name));
            command
                .env("RANK", rank.to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env("WORLD_SIZE", n.to_string())
                .env("LOCAL_WORLD_SIZE", n.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.number.to_string())
                .env("DIST_JOB_ID", &id)
                .envs(variables.iter().copied());
            Running::start(rank, &mut command)
        })
        .collect();
    let end = Instant::now() + limit;
    while Instant::now() < end && running.iter_mut().any(|rank| rank.status().is_none()) {
        thread::sleep(POLL);
    }
    Job { ranks: running.into_iter().map(Running::end).collect() }
}

/// Returns a command that runs one test of this binary, without the variables of a surrounding job.
fn command(test_name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a test knows its own binary"));
    command.args(["--exact", test_name, "--nocapture", "--test-threads=1"]);
    for (name, _) in std::env::vars_os() {
        let foreign = name.to_string_lossy();
        if foreign.starts_with("DIST_") || foreign.starts_with("TORCHELASTIC_") {
            command.env_remove(&name);
        }
    }
    // Other tests disturb measurements of costs, which are therefore not stored.
    command.env("DIST_COSTS", "off");
    command.env(MARK, "1").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Returns a command that starts `command` through the program `starter`.
fn behind(starter: &[String], command: Command) -> Command {
    let [program, arguments @ ..] = starter else { return command };
    let mut started = Command::new(program);
    started.args(arguments).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => started.env(name, value),
            None => started.env_remove(name),
        };
    }
    started.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    started
}

/// The process of one rank. Drop kills it.
struct Running {
    rank: usize,
    child: Child,
    readers: Vec<JoinHandle<String>>,
}

impl Running {
    fn start(rank: usize, command: &mut Command) -> Self {
        let mut child = command.spawn().expect("the test binary can be run once more");
        let stdout = child.stdout.take().map(read);
        let stderr = child.stderr.take().map(read);
        Self { rank, child, readers: stdout.into_iter().chain(stderr).collect() }
    }

    fn status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("the process is ours to wait for")
    }

    fn end(mut self) -> Ended {
        let status = self.status();
        self.kill();
        let read = |reader: JoinHandle<String>| reader.join().expect("reading does not panic");
        let mut output: String = self.readers.drain(..).map(read).collect();
        // With a name that no test has, the test runner succeeds with zero tests.
        let ran = output.contains("running 1 test");
        if !ran {
            output.insert_str(0, "no such test was run\n");
        }
        Ended { rank: self.rank, status: status.filter(|_| ran), output }
    }

    fn kill(&mut self) {
        // `kill` fails if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reads the pipe on a thread of its own, so that it does not fill up.
fn read(mut pipe: impl Read + Send + 'static) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let outcome = pipe.read_to_end(&mut bytes);
        let mut text = String::from_utf8_lossy(&bytes).into_owned();
        if let Err(error) = outcome {
            text.push_str(&format!("\n(reading failed: {error})"));
        }
        text
    })
}

/// A port for a coordinator. The next port stays bound while this lives, and other tests skip pairs with a
/// bound port. Thus the first port belongs to one test, although it is free until the coordinator listens on
/// it.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _held: TcpListener,
}

impl Port {
    /// Returns a free loopback port that no other test gets while this lives.
    ///
    /// # Panics
    /// If no port is free.
    pub fn reserve() -> Self {
        let seed = JOBS.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9)
            ^ u64::from(std::process::id()) << 4;
        let pairs = (PORTS_END - PORTS_START) / 2;
        let first = u16::try_from(seed % u64::from(pairs)).expect("less than the number of ports");
        let candidates = (0..pairs).map(|step| PORTS_START + 2 * ((first + step) % pairs));
        for number in candidates {
            if let Ok(held) = listen(number + 1)
                && listen(number).is_ok()
            {
                return Self { number, _held: held };
            }
        }
        panic!("no two free ports side by side between {PORTS_START} and {PORTS_END}");
    }

    /// Returns the port number.
    pub const fn number(&self) -> u16 {
        self.number
    }
}

/// Returns the first of several loopback ports side by side, all of which are free now. A job whose starts use one port
/// each begins with it.
///
/// # Panics
/// If none are found.
pub fn free_ports(count: u16) -> u16 {
    let firsts = PORTS_START..PORTS_END - count;
    let are_free = |first: &u16| (0..count).all(|next| listen(first + next).is_ok());
    let mut attempts = std::iter::repeat_with(|| fastrand::u16(firsts.clone())).take(1000);
    attempts.find(are_free).expect("some ports are free")
}

fn listen(port: u16) -> io::Result<TcpListener> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port))
}

/// Variable that is set in the processes of ranks.
const MARK: &str = "TESTKIT_RANK_PROCESS";
/// Interval between two checks of the processes.
const POLL: Duration = Duration::from_millis(5);
/// The range is below the ports that Linux uses for outgoing connections, which cannot be excluded.
const PORTS_START: u16 = 12_000;
const PORTS_END: u16 = 32_000;

static JOBS: AtomicU64 = AtomicU64::new(0);

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn every_rank_runs_the_test_with_its_own_rank() {
        let Some(rank) = rank() else {
            let job = ranks(3, "process::tests::every_rank_runs_the_test_with_its_own_rank", MINUTE);
            job.assert_success();
            let said = |ended: &Ended| ended.output.contains(&format!("I am {} of 3 ", ended.rank));
            assert!(job.ranks.iter().all(said), "{job:?}");
            return;
        };
        let port: u16 = std::env::var("MASTER_PORT").unwrap().parse().unwrap();
        if rank == 0 {
            TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        }
        println!("I am {rank} of {} ", std::env::var("WORLD_SIZE").unwrap());
    }

    #[test]
    fn a_rank_that_fails_or_hangs_is_named() {
        match rank() {
            None => {
                let name = "process::tests::a_rank_that_fails_or_hangs_is_named";
                let job = ranks_with(3, name, Duration::from_secs(5), &[("GREETING", "hello")]);
                assert!(job.ranks[0].status.unwrap().success());
                assert!(!job.ranks[1].status.unwrap().success());
                assert!(job.ranks[1].output.contains("rank 1 says hello"));
                assert_eq!(job.ranks[2].status, None);
                let failure = std::panic::catch_unwind(|| job.assert_success()).unwrap_err();
                let message = failure.downcast_ref::<String>().unwrap();
                assert!(message.contains("2 of 3 ranks failed"), "{message}");
                assert!(message.contains("rank 2 was killed at the limit"), "{message}");
            }
            Some(0) => {}
            Some(1) => panic!("rank 1 says {}", std::env::var("GREETING").unwrap()),
            Some(_) => loop {
                thread::park();
            },
        }
    }

    #[test]
    fn a_name_that_no_test_has_is_a_failure() {
        let job = ranks(1, "no::such::test", MINUTE);
        assert_eq!(job.ranks[0].status, None);
    }

    #[test]
    fn jobs_at_the_same_time_have_ports_of_their_own() {
        let ports: Vec<Port> = (0..20).map(|_| Port::reserve()).collect();
        let distinct: std::collections::HashSet<u16> = ports.iter().map(|port| port.number).collect();
        assert_eq!(distinct.len(), ports.len());
    }
}
