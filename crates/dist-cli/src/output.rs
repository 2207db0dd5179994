//! Output of this process. It is written completely, also to a file description that another process has made
//! non-blocking.

use std::io::{self, Write};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, poll};

use crate::Error;

/// Prints a result to stdout.
pub(crate) fn print(text: &str) -> Result<(), Error> {
    write(io::stdout().lock(), text.as_bytes()).map_err(Error::Output)
}

/// Prints a message to stderr.
pub(crate) fn say(text: &str) {
    // If stderr is closed, the message is lost.
    let _ = write(io::stderr().lock(), format!("distctl: {text}\n").as_bytes());
}

/// Writes all bytes and flushes them.
pub(crate) fn write(to: impl Write + AsFd, bytes: &[u8]) -> io::Result<()> {
    let mut to = BlockingWriter(to);
    to.write_all(bytes).and_then(|()| to.flush())
}

/// A writer that waits until its file can be written, instead of failing with `WouldBlock`.
#[derive(Debug)]
pub(crate) struct BlockingWriter<W>(pub(crate) W);

impl<W: Write + AsFd> BlockingWriter<W> {
    fn retry_until_writable<T>(&mut self, mut attempt: impl FnMut(&mut W) -> io::Result<T>) -> io::Result<T> {
        loop {
            match attempt(&mut self.0) {
                // Bytes that were not accepted are written in the next attempt.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let writable = || poll(&mut [PollFd::new(&self.0, PollFlags::OUT)], None);
                    rustix::io::retry_on_intr(writable)?;
                }
                done => return done,
            }
        }
    }
}

impl<W: Write + AsFd> Write for BlockingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.retry_until_writable(|to| to.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.retry_until_writable(W::flush)
    }
}
