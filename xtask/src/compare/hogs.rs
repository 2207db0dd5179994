//! Busy processes beside a measurement, as external load.

use std::io;
use std::process::{Child, Command};

/// Busy processes, which are killed when this is dropped.
#[derive(Debug)]
pub(super) struct Hogs(Vec<Child>);

impl Hogs {
    pub(super) fn start(count: usize) -> io::Result<Self> {
        let mut hogs = Self(Vec::new());
        for _ in 0..count {
            hogs.0.push(Command::new("sh").args(["-c", "while :; do :; done"]).spawn()?);
        }
        Ok(hogs)
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        for hog in &mut self.0 {
            // One that has ended by itself needs no more.
            let _ = hog.kill().and_then(|()| hog.wait());
        }
    }
}
