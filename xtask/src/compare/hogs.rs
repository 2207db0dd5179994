//! Busy processes during a measurement, as external load.

use std::io;
use std::process::{Child, Command};

/// A set of busy processes. Drop kills them.
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
            // `kill` fails if the process has ended by itself.
            let _ = hog.kill().and_then(|()| hog.wait());
        }
    }
}
