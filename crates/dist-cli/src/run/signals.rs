//! Signals to this process, as events.

use dist_transport::Runtime;
use dist_transport::runtime::Mailbox;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use super::child;
use super::watch::Event;
use crate::Error;

/// A thread that tells of signals.
pub(super) fn watch_signals(runtime: &Runtime, events: &Mailbox<Event>) -> Result<(), Error> {
    // Before any is watched for: what whoever started this process ignored.
    let ignored = child::ignored_signals();
    // Behind nohup, or in the background of a script, a job goes on as any other program does.
    let heeded = [SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2].into_iter();
    let heeded = heeded.filter(|signal| ignored >> (signal - 1) & 1 == 0);
    // Where that is ignored, the system itself reaps a process that has ended, and nobody learns how.
    let mut signals = Signals::new(heeded.chain([SIGTERM, SIGTSTP, SIGCHLD])).map_err(Error::Signals)?;
    let events = events.clone();
    let watch = move || {
        let told = signals.forever().filter(|&signal| signal != SIGCHLD);
        told.for_each(|signal| events.send(Event::Signalled(signal)));
    };
    runtime.spawn("signals", watch).map(drop).map_err(Error::Thread)
}
