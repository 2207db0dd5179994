//! What this process prints.

use std::io::{self, Write};

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
pub(crate) fn write(mut to: impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes).and_then(|()| to.flush())
}
