//! Warnings that a user sees although the program shows no log.

use std::fmt::Display;
use std::io::{self, Write};

/// Logs a warning. If `distctl run` has started this process and the program has no `tracing` subscriber, the warning is written to
/// stderr instead, which distctl shows.
pub fn show(text: impl Display) {
    tracing::warn!("{text}");
    if is_started_by_distctl() && !has_subscriber() {
        // When nobody listens, nobody has to be told.
        let _ = writeln!(io::stderr().lock(), "dist: {text}");
    }
}

/// `distctl run` sets this variable for each rank.
fn is_started_by_distctl() -> bool {
    std::env::var_os("DIST_RESTART").is_some()
}

fn has_subscriber() -> bool {
    tracing::dispatcher::get_default(|dispatch| !dispatch.is::<tracing::subscriber::NoSubscriber>())
}
