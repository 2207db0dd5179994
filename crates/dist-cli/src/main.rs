#![doc = include_str!("../README.md")]
#![allow(clippy::print_stdout, reason = "a program prints")]

mod address;
mod bench;
mod chaos;
mod doctor;
mod error;
mod operation;
mod outcome;
mod output;
mod parse;
mod progress;
mod quantity;
mod reference;
mod run;
mod sim;
mod tune;
mod variables;
mod verify;

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser};
use dist_transport::process::Config;
use error::Error;
use output::{BlockingWriter, print, say, write};
use tracing_subscriber::EnvFilter;

/// Starts, measures and checks distributed programs.
#[derive(Debug, Parser)]
#[command(name = "distctl", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Start a program once for each rank on this machine, and end all ranks when one fails
    Run(run::RunArguments),
    /// Measure a collective in the current job, or start a job to measure it
    Bench(bench::BenchArguments),
    /// Measure the costs of messages here again; algorithms are chosen by these costs
    Tune(tune::TuneArguments),
    /// Report the environment of the ranks, the speed between them, and what could be improved
    Doctor(doctor::DoctorArguments),
    /// Start jobs, kill, stop or delay one rank of each, and check the errors of the other ranks
    Chaos(chaos::ChaosArguments),
    /// Prove every schedule for all world sizes up to a limit, and check that wrong schedules are rejected
    Verify(verify::VerifyArguments),
    /// Predict the times of collectives on a network that you describe
    Sim(Box<sim::SimArguments>),
    /// Print completions for a shell
    Completions(reference::CompletionsArguments),
    /// Print the manual page, or write one page for each command
    Man(reference::ManArguments),
    /// Print the page of the guide that lists all commands
    #[command(hide = true)]
    Reference,
    /// Run the ranks of one host; `run --hosts` starts this on each host
    #[command(name = run::PART, hide = true)]
    RunPart,
    /// Become a rank's program; `run` starts every rank this way
    #[command(name = run::EXEC, hide = true)]
    ExecRank {
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
}

/// Log filter if `DIST_LOG` is not set. It drops the coordinator's warnings, because `distctl` prints the
/// reason why a job ended in any case.
const LOG_FILTER_DEFAULT: &str = "warn,dist_transport::coordinator=error";

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(filter())
        .with_writer(|| BlockingWriter(io::stderr().lock()))
        .init();
    let parsed = parser().try_get_matches().and_then(|matches| Arguments::from_arg_matches(&matches));
    let arguments = match parsed {
        Ok(arguments) => arguments,
        Err(error) => return print_clap_error(&error),
    };
    let outcome = match arguments.command {
        Command::Run(arguments) => run::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Tune(arguments) => tune::run(&arguments),
        Command::Chaos(arguments) => chaos::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Sim(arguments) => sim::run(&arguments),
        Command::Completions(arguments) => reference::completions(parser(), &arguments),
        Command::Man(arguments) => reference::man(parser(), &arguments),
        Command::Reference => reference::markdown(parser()),
        Command::ExecRank { command } => Err(run::become_program(&command)),
        Command::RunPart => run::run_part(),
    };
    match outcome {
        Ok(outcome) => outcome.end(),
        Err(error) => end_with(&error),
    }
}

/// Returns the parser of all arguments.
fn parser() -> clap::Command {
    reference::with_variables(Arguments::command())
}

fn end_with(error: &Error) -> ExitCode {
    if !error.is_unread() {
        say(&error.with_causes());
    }
    ExitCode::from(error.exit_code())
}

/// Prints help, or an error in the arguments. On a terminal clap prints it, in colours.
fn print_clap_error(error: &clap::Error) -> ExitCode {
    let is_terminal =
        if error.use_stderr() { io::stderr().is_terminal() } else { io::stdout().is_terminal() };
    if is_terminal {
        error.exit();
    }
    let text = error.render().to_string();
    if error.use_stderr() {
        // If stderr is closed, the message is lost.
        let _ = write(io::stderr().lock(), text.as_bytes());
        return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(u8::MAX));
    }
    print(&text).map_or_else(|error| end_with(&error), |()| ExitCode::SUCCESS)
}

/// Returns the log filter from `DIST_LOG`, or the default.
fn filter() -> EnvFilter {
    let usual = || EnvFilter::new(LOG_FILTER_DEFAULT);
    let Some(wanted) = std::env::var_os("DIST_LOG") else { return usual() };
    EnvFilter::try_new(wanted.to_string_lossy()).unwrap_or_else(|error| {
        // The launcher has already reported it.
        if !Config::is_in_env() && !run::is_launcher() {
            say(&format!("DIST_LOG={wanted:?} is ignored: {error}"));
        }
        usual()
    })
}
