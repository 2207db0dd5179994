//! `distctl run`: one program, started once per rank on this machine.

mod child;
mod cores;
mod job;
mod lines;
mod secret;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use child::{EXEC, become_program};
pub(crate) use cores::Bind;
pub(crate) use job::{Job, Outcome};
pub(crate) use lines::Forward;

use crate::Error;
use child::check_program;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// How many processes to start
    #[arg(short = 'n', long = "ranks", value_name = "N", value_parser = crate::parse::ranks)]
    ranks: usize,
    /// Keep each rank's output in this folder too, as r0.log, r1.log ...
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// How long a rank may take to end when it is asked to, before it is killed
    #[arg(long, value_name = "SECONDS", default_value = "5", allow_negative_numbers = true, value_parser = crate::parse::seconds)]
    grace: Duration,
    /// Begin each line with its rank, as in `[r3]`; this is what a terminal gets anyway
    #[arg(long)]
    tag: bool,
    /// What each rank is bound to
    #[arg(long, value_enum, default_value = "cores", value_name = "WHAT")]
    bind: Bind,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Runs the job to its end; the exit code is the first failing rank's.
pub(crate) fn run(arguments: &Arguments) -> Result<Outcome, Error> {
    let (program, rest) = arguments.command.split_first().expect("clap asks for a program");
    check_program(program)?;
    let mut forward = Forward::new(arguments.tag);
    if let Some(folder) = &arguments.log_dir {
        forward = forward.with_logs(folder, arguments.ranks)?;
    }
    let job = Job {
        ranks: arguments.ranks,
        program: program.clone(),
        arguments: rest.to_vec(),
        grace: arguments.grace,
        bind: arguments.bind,
    };
    job.run(Arc::new(forward))
}
