//! Trains a byte-level transformer on several processes: `cargo demo` in the workspace.
//!
//! Without a launcher, the program starts one process per rank on this machine. Under `distctl run` or torchrun,
//! which set environment variables, it is one rank of their job.

mod checkpoint;
mod curves;
mod model;
mod options;
mod processes;
mod random;
mod report;
mod sample;
mod text;
mod trace;
mod train;

use std::env;
use std::error::Error;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use dist_collectives::Communicator;
use dist_collectives::error::TransportError;
use dist_collectives::transport::Chain;
use dist_parallel::BoxError;
use tracing_subscriber::EnvFilter;

use crate::options::{Options, StrategyName};
use crate::text::Text;

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("error"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).init();
    match demo(&Options::parse()) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            let rank = variable("RANK").map_or_else(String::new, |rank| format!(" rank {rank}:"));
            eprintln!("train_lm:{rank} {}", Chain(&error));
            if is_collateral(&error) { ExitCode::from(processes::COLLATERAL) } else { ExitCode::FAILURE }
        }
    }
}

/// An error of the demo.
#[derive(Debug, thiserror::Error)]
enum DemoError {
    #[error(transparent)]
    Text(#[from] text::TextError),
    #[error(transparent)]
    Process(#[from] processes::ProcessError),
    #[error("a width of {width} cannot be divided among {heads} heads")]
    Heads { width: usize, heads: usize },
    #[error("--strategy single is for one process, and this job has {world_size}")]
    NotAlone { world_size: usize },
    #[error("--compress is for --strategy ddp or single: parts of gradients are not compressed")]
    NotWhole,
    #[error("--save and --load are for one training, and --compress names several")]
    OneCheckpoint,
    #[error("--ranks {asked} was asked for, and this job has {world_size}")]
    Ranks { asked: usize, world_size: usize },
    #[error("rank {rank} has other {what} than rank 0")]
    Differ { rank: usize, what: &'static str },
    #[error("the ranks cannot talk to each other")]
    Communication(#[from] dist_collectives::Error),
    #[error("training failed")]
    Training(#[from] dist_parallel::Error),
    #[error("the model failed")]
    Model(#[source] BoxError),
    #[error("cannot write {}", path.display())]
    Picture { path: PathBuf, source: io::Error },
    #[error("cannot report")]
    Report(#[from] io::Error),
}

fn demo(options: &Options) -> Result<u8, DemoError> {
    let Options { width, heads, .. } = *options;
    if !width.is_multiple_of(heads) {
        return Err(DemoError::Heads { width, heads });
    }
    if options.compresses_shards() {
        return Err(DemoError::NotWhole);
    }
    if options.compress.len() > 1 && (options.save.is_some() || options.load.is_some()) {
        return Err(DemoError::OneCheckpoint);
    }
    if let Some(launcher) = options.started_by {
        processes::end_with(launcher);
    }
    let paths = if options.text.is_empty() { vec![text::workspace()] } else { options.text.clone() };
    let read_text = || Text::read(&paths, options.sample_len());
    if variable("RANK").is_none() {
        let ranks = options.ranks_to_start();
        if ranks > 1 {
            // An unusable text is reported once, not by every rank.
            read_text()?;
            let code = processes::launch(ranks)?;
            if code == 0 && !options.json {
                print_next_steps()?;
            }
            return Ok(code);
        }
        processes::limit_threads(1)?;
    } else {
        let local_ranks = variable("LOCAL_WORLD_SIZE").and_then(|number| number.parse().ok());
        processes::limit_threads(local_ranks.unwrap_or(1).max(1))?;
    }
    let text = read_text()?;
    let comm = Communicator::from_env()?;
    check_world(options, comm.world_size())?;
    train::train(options, &text, comm)?;
    Ok(0)
}

/// Prints suggestions for further runs.
fn print_next_steps() -> io::Result<()> {
    writeln!(io::stdout().lock(), "{WHAT_NEXT}")
}

const WHAT_NEXT: &str = "
Try next:
  cargo demo -- --ranks 4               the same parameters, to the bit (the same params_crc32), on 4 processes
  cargo demo -- --strategy fsdp         the same with parameters and optimizer in parts
  cargo demo -- --help                  all options
  cargo install --path crates/dist-cli && distctl bench all_reduce --ranks 2     how fast processes talk here
The guide is in docs/book/src; docs/book/src/own-loop.md trains a candle model of your own.";

/// Fails if the job does not match the options.
fn check_world(options: &Options, world_size: usize) -> Result<(), DemoError> {
    match (options.strategy, options.ranks) {
        (StrategyName::Single, _) if world_size > 1 => Err(DemoError::NotAlone { world_size }),
        (_, Some(asked)) if options.strategy != StrategyName::Single && asked != world_size => {
            Err(DemoError::Ranks { asked, world_size })
        }
        _ => Ok(()),
    }
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// Returns `true` if this process failed only because another rank did.
fn is_collateral(error: &(dyn Error + 'static)) -> bool {
    let own_rank = variable("RANK").and_then(|rank| rank.parse().ok());
    sources(error).filter_map(|error| error.downcast_ref()).any(|error| match error {
        dist_collectives::Error::Aborted { rank, .. } => Some(*rank) != own_rank,
        dist_collectives::Error::Transport { source, .. } | dist_collectives::Error::Join(source) => {
            match &**source {
                TransportError::Aborted(abort) => Some(abort.rank) != own_rank,
                TransportError::Closed { .. } => true,
                _ => false,
            }
        }
        _ => false,
    })
}

fn sources<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}
