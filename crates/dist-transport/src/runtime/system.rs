//! The runtime of the operating system.
#![allow(clippy::disallowed_methods, reason = "this is the runtime seam")]

use std::io;
use std::sync::Arc;
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use super::{Executor, Wake};

pub(super) struct System {
    start: Instant,
}

impl System {
    pub(super) fn new() -> Self {
        Self { start: Instant::now() }
    }
}

impl Executor for System {
    fn name(&self) -> &'static str {
        "system"
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn spawn(&self, name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
    }

    fn park(&self, until: Option<Duration>) {
        match until {
            None => thread::park(),
            Some(until) => thread::park_timeout(until.saturating_sub(self.now())),
        }
    }

    fn current(&self) -> Arc<dyn Wake> {
        Arc::new(Waker(thread::current()))
    }

    fn yield_now(&self) {
        thread::yield_now();
    }
}

struct Waker(Thread);

impl Wake for Waker {
    fn wake(&self) {
        self.0.unpark();
    }
}
