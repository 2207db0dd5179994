//! What this process prints: all of it, also where whoever shares its output has made that non-blocking.

use std::io::{self, Write};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, poll};

use crate::Error;

/// Prints what was asked for.
pub(crate) fn print(text: &str) -> Result<(), Error> {
    write(io::stdout().lock(), text.as_bytes()).map_err(Error::Output)
}

/// Says something beside it.
pub(crate) fn say(text: &str) {
    // When nobody listens, nobody has to be told.
    let _ = write(io::stderr().lock(), format!("distctl: {text}\n").as_bytes());
}

/// Writes all bytes, and leaves none of them in a buffer.
pub(crate) fn write(to: impl Write + AsFd, bytes: &[u8]) -> io::Result<()> {
    let mut to = Patient(to);
    to.write_all(bytes).and_then(|()| to.flush())
}

/// What waits, where there is no room, until there is.
#[derive(Debug)]
pub(crate) struct Patient<W>(pub(crate) W);

impl<W: Write + AsFd> Patient<W> {
    fn when_there_is_room<T>(&mut self, mut attempt: impl FnMut(&mut W) -> io::Result<T>) -> io::Result<T> {
        loop {
            match attempt(&mut self.0) {
                // What it did not take is still to be written.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let room = || poll(&mut [PollFd::new(&self.0, PollFlags::OUT)], None);
                    rustix::io::retry_on_intr(room)?;
                }
                done => return done,
            }
        }
    }
}

impl<W: Write + AsFd> Write for Patient<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.when_there_is_room(|to| to.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.when_there_is_room(W::flush)
    }
}
