//! Warnings that a user sees although the program shows no log.

use std::fmt::Display;
use std::io::{self, Write};

/// Logs a warning. If the program has no `tracing` subscriber, the warning is written to stderr instead.
pub fn show(text: impl Display) {
    tracing::warn!("{text}");
    if !has_subscriber() {
        // If stderr is closed, the warning is lost.
        let _ = writeln!(io::stderr().lock(), "dist: {text}");
    }
}

fn has_subscriber() -> bool {
    tracing::dispatcher::get_default(|dispatch| !dispatch.is::<tracing::subscriber::NoSubscriber>())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const SHOWN: &str = "TEST_WARNING";

    #[test]
    fn a_program_without_a_log_shows_warnings_under_any_launcher() {
        if std::env::var_os(SHOWN).is_some() {
            return show("rank 0 waits");
        }
        let test = std::thread::current().name().unwrap().to_owned();
        let mut command = Command::new(std::env::current_exe().unwrap());
        let command = command.args(["--exact", &test, "--nocapture"]).env(SHOWN, "");
        let output = command.env_remove("DIST_RESTART").output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(told.lines().any(|line| line == "dist: rank 0 waits"), "{told}");
    }
}
