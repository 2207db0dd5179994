//! Ends waiting calls when the user presses Ctrl-C.
//!
//! A thread that waits in a call of Rust does not see signals of Python. So SIGINT aborts the job of every group in
//! which this process waits, if Python would raise `KeyboardInterrupt`.

use std::sync::{Arc, Mutex, Weak};

use dist_transport::Runtime;
use pyo3::prelude::*;
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;

use crate::messages::Parent;
use crate::stream::lock;

static GROUPS: Mutex<Vec<Weak<Parent>>> = Mutex::new(Vec::new());

/// Aborts the job of this group at SIGINT, as long as it lives.
pub(crate) fn abort_at_interrupt(group: &Arc<Parent>) {
    let mut groups = lock(&GROUPS);
    groups.retain(|group| group.strong_count() > 0);
    groups.push(Arc::downgrade(group));
    drop(groups);
    // A child of `fork` has the memory of its parent, and none of its threads.
    static WATCHED: Mutex<Option<u32>> = Mutex::new(None);
    let own = Some(std::process::id());
    if std::mem::replace(&mut *lock(&WATCHED), own) != own
        && let Ok(mut signals) = Signals::new([SIGINT])
    {
        let watch = move || signals.forever().for_each(|_| abort_all());
        let _ = Runtime::system().spawn("dist-interrupt", watch);
    }
}

fn abort_all() {
    if !Python::attach(|py| is_default(py).unwrap_or(false)) {
        return;
    }
    let groups: Vec<_> = lock(&GROUPS).iter().filter_map(Weak::upgrade).collect();
    for group in groups {
        if let Some(communicator) = lock(&group).get() {
            communicator.abort("it was interrupted (SIGINT)");
        }
    }
}

/// Returns `true` if Python raises `KeyboardInterrupt` at SIGINT.
fn is_default(py: Python<'_>) -> PyResult<bool> {
    let signal = py.import("signal")?;
    let handler = signal.call_method1("getsignal", (SIGINT,))?;
    Ok(handler.is(signal.getattr("default_int_handler")?))
}
