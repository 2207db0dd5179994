//! Progress messages on stderr for commands that take long.

use std::time::Duration;

use dist_transport::Runtime;
use dist_transport::runtime::{Mailbox, Unavailable};

use crate::Error;
use crate::output;

/// Time before the first message. The interval doubles with each message, up to [`BETWEEN_MAX`].
const SILENT_MAX: Duration = Duration::from_secs(2);
/// Maximum interval between two messages.
const BETWEEN_MAX: Duration = Duration::from_secs(60);

/// A thread that periodically prints the current activity and the elapsed time, until this is dropped.
#[derive(Debug)]
pub(crate) struct Progress(Mailbox<String>);

impl Progress {
    /// Starts the thread. It prints nothing before the first call of [`doing`](Self::doing).
    pub(crate) fn start() -> Result<Self, Error> {
        Self::start_with(SILENT_MAX, |words| output::say(&words))
    }

    fn start_with(first: Duration, say: impl Fn(String) + Send + 'static) -> Result<Self, Error> {
        let runtime = Runtime::system();
        let (mailbox, mut inbox) = runtime.mailbox::<String>();
        let clock = runtime.clone();
        let watch = move || {
            let started = clock.now();
            let mut doing = String::new();
            let mut pause = first;
            let mut next = clock.deadline(pause);
            loop {
                match inbox.receive(Some(next)) {
                    Ok(now) => doing = now,
                    Err(Unavailable::TimedOut) => {
                        if !doing.is_empty() {
                            say(format!("{} s: {doing}", (clock.now() - started).as_secs()));
                        }
                        pause = (2 * pause).min(BETWEEN_MAX);
                        next = clock.deadline(pause);
                    }
                    Err(Unavailable::Closed) => return,
                }
            }
        };
        runtime.spawn("progress", watch).map_err(Error::Thread)?;
        Ok(Self(mailbox))
    }

    /// Sets the current activity.
    pub(crate) fn doing(&self, what: impl Into<String>) {
        self.0.send(what.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_long_is_said_again_and_again() {
        let (words, mut said) = Runtime::system().mailbox();
        let progress = Progress::start_with(Duration::from_millis(1), move |text| words.send(text)).unwrap();
        for doing in ["counting", "adding up"] {
            progress.doing(doing);
            let is_said = |said: String| said.ends_with(&format!(" s: {doing}"));
            assert!(std::iter::from_fn(|| said.receive(None).ok()).any(is_said));
        }
        drop(progress);
        assert!(
            std::iter::from_fn(|| said.receive(None).ok()).all(|words: String| words.ends_with("adding up"))
        );
    }
}
