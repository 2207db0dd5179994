//! Execution of other programs, and the output about it.

use std::fmt;
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The error of a command of the tool.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The arguments make no sense.
    Usage(String),
    /// A program could not be started or files not be read.
    System(std::io::Error),
    /// A program ran and failed.
    Program(String),
    /// A check found something.
    Check(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(text) | Self::Check(text) => f.write_str(text),
            Self::System(error) => write!(f, "{error}"),
            Self::Program(line) => write!(f, "this failed: {line}"),
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::System(error)
    }
}

impl From<lexopt::Error> for Failure {
    fn from(error: lexopt::Error) -> Self {
        Self::Usage(error.to_string())
    }
}

/// Prints text. If its reader has closed the pipe, as `head` does, the process ends silently with the code
/// that a shell reports for SIGPIPE.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut to = std::io::stdout().lock();
    match to.write_all(text.as_bytes()).and_then(|()| to.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(128 + 13),
        done => Ok(done?),
    }
}

/// Prints the help of a command.
pub(crate) fn print_help(help: &str) -> Result<(), Failure> {
    print(&format!("{help}\n"))
}

/// Returns the folder of the workspace's manifest.
pub(crate) fn workspace_root() -> PathBuf {
    let mut path = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    path.pop();
    path
}

/// Returns the cargo that runs this tool, with arguments separated by blanks.
pub(crate) fn cargo(arguments: &str) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments.split_whitespace());
    // Tests disturb measurements of costs, which are therefore not stored.
    command.env("DIST_COSTS", "off");
    command
}

/// Prints the command, and runs it to its end.
pub(crate) fn show(command: &mut Command) -> Result<(), Failure> {
    eprintln!("     $ {}", line(command));
    let status = command.stdin(Stdio::null()).status()?;
    if status.success() { Ok(()) } else { Err(Failure::Program(line(command))) }
}

/// Runs a program to its end and returns its stdout. Its stderr is not captured.
pub(crate) fn output(command: &mut Command) -> Result<String, Failure> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(Failure::Program(line(command)))
    }
}

/// Returns cargo's target folder.
pub(crate) fn target_folder() -> Result<PathBuf, Failure> {
    let metadata = output(&mut cargo("metadata --no-deps --format-version 1"))?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata).map_err(std::io::Error::from)?;
    let folder = metadata["target_directory"].as_str();
    folder.map(Into::into).ok_or_else(|| Failure::Check("cargo metadata names no target folder".to_owned()))
}

/// Returns the command as a person would type it.
pub(crate) fn line(command: &Command) -> String {
    let program = PathBuf::from(command.get_program());
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let settings = command
        .get_envs()
        .filter_map(|(name, value)| value.map(|value| format!("{}={:?}", name.to_string_lossy(), value)));
    let arguments = command.get_args().map(|argument| argument.to_string_lossy().into_owned());
    settings.chain([name]).chain(arguments).collect::<Vec<_>>().join(" ")
}

/// A list of named steps that run one after the other, each with its time.
#[derive(Default)]
pub(crate) struct Steps(Vec<(&'static str, Duration)>);

impl Steps {
    /// Runs one step.
    #[expect(
        clippy::disallowed_methods,
        reason = "these are minutes for a person to read; nothing is simulated"
    )]
    pub(crate) fn step(
        &mut self,
        name: &'static str,
        work: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        eprintln!("==== {name}");
        let start = Instant::now();
        let result = work();
        let time = start.elapsed();
        eprintln!("==== {name}: {:.1} s{}", time.as_secs_f64(), if result.is_ok() { "" } else { ", failed" });
        self.0.push((name, time));
        result
    }

    /// Prints the time of each step and their sum.
    pub(crate) fn summary(&self) {
        eprintln!("==== done");
        for (name, time) in &self.0 {
            eprintln!("{:>9.1} s  {name}", time.as_secs_f64());
        }
        let sum: Duration = self.0.iter().map(|(_, time)| *time).sum();
        eprintln!("{:>9.1} s  in all", sum.as_secs_f64());
    }
}
