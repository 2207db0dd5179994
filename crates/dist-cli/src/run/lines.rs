//! Output of the ranks. It is forwarded line by line, so that the lines of two ranks do not mix.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, IsTerminal, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use dist_transport::Runtime;
use dist_transport::runtime::{Mailbox, Task};
use serde::{Deserialize, Serialize};

use super::watch::Event;
use crate::{Error, output};

/// Maximum length of a line. Longer lines are cut, so that a rank cannot fill the memory with one line.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// One of the two output streams of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Stream {
    Output,
    Error,
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Output => "output",
            Self::Error => "error output",
        })
    }
}

/// A sink for the output of the ranks and of the launcher.
pub(crate) trait OutputSink: Send + Sync {
    /// Writes one line, which includes its newline.
    ///
    /// # Errors
    /// Returns an error if the line cannot be written. The job then ends, as a pipeline does if its reader
    /// has closed it.
    fn write_line(&self, rank: usize, stream: Stream, line: &[u8]) -> Result<(), Error>;

    /// Writes a message of the launcher.
    fn say(&self, text: &str) {
        output::say(text);
    }
}

/// Passes each line to `sink` until the rank closes its end. Adds a newline to the last line if it has none.
fn read_lines(
    rank: usize,
    source: impl Read,
    sink: impl Fn(&[u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut source = BufReader::new(source);
    let mut line = Vec::new();
    let mut is_cut = false;
    loop {
        let read = (&mut source).take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
        if read.map_err(|source| Error::Printed { rank, source })? == 0 {
            return Ok(());
        }
        // After a cut at the limit, the rest of the line may be only its newline.
        let is_rest = is_cut && line == b"\n";
        is_cut = line.last() != Some(&b'\n');
        if is_cut {
            line.push(b'\n');
        }
        if !is_rest {
            sink(&line)?;
        }
        line.clear();
    }
}

/// A thread that forwards one output stream of a rank.
pub(super) struct Reader {
    pub(super) task: Task<()>,
    /// `true` while it forwards a line; `false` while it waits for the rank.
    pub(super) is_passing: Arc<AtomicBool>,
}

/// Starts the thread of a [`Reader`].
pub(super) fn reader(
    runtime: &Runtime,
    rank: usize,
    stream: Stream,
    mut source: impl Read + Send + 'static,
    events: &Mailbox<Event>,
    sink: &Arc<dyn OutputSink>,
) -> Result<Reader, Error> {
    let is_passing = Arc::new(AtomicBool::new(false));
    let (events, sink, passing) = (events.clone(), sink.clone(), is_passing.clone());
    let read = move || {
        let pass = |line: &[u8]| {
            passing.store(true, Ordering::Relaxed);
            let passed = sink.write_line(rank, stream, line);
            passing.store(false, Ordering::Relaxed);
            passed
        };
        // The pipe is closed only after the event: the rank may end because of the closed pipe.
        if let Err(error) = read_lines(rank, &mut source, pass) {
            events.send(Event::Unwritable(error));
        }
    };
    let task = runtime.spawn("lines", read).map_err(Error::Thread)?;
    Ok(Reader { task, is_passing })
}

/// A file with the output of a rank.
#[derive(Debug)]
struct Log {
    path: PathBuf,
    file: Mutex<File>,
}

/// A sink that forwards lines to the stdout and stderr of this process and to one log per rank.
#[derive(Debug)]
pub(crate) struct Forward {
    tag_output: bool,
    tag_error: bool,
    /// The logs by rank.
    logs: BTreeMap<usize, Log>,
}

impl Forward {
    /// Creates a sink. Lines begin with their rank if `tag` is set, and always on a terminal.
    pub(crate) fn new(tag: bool) -> Self {
        let tag_output = tag || io::stdout().is_terminal();
        Self { tag_output, tag_error: tag || io::stderr().is_terminal(), logs: BTreeMap::new() }
    }

    /// Creates a sink that does not change lines.
    pub(crate) fn untagged() -> Self {
        Self { tag_output: false, tag_error: false, logs: BTreeMap::new() }
    }

    /// Also writes the output of each rank to a file in this folder.
    pub(crate) fn with_logs(mut self, folder: &Path, ranks: Range<usize>) -> Result<Self, Error> {
        let failed = |source| Error::LogFolder { folder: folder.to_owned(), source };
        std::fs::create_dir_all(folder).map_err(failed)?;
        for rank in ranks {
            let path = folder.join(format!("r{rank}.log"));
            let file = Mutex::new(File::create(&path).map_err(failed)?);
            self.logs.insert(rank, Log { path, file });
        }
        Ok(self)
    }
}

impl OutputSink for Forward {
    fn write_line(&self, rank: usize, stream: Stream, line: &[u8]) -> Result<(), Error> {
        if let Some(Log { path, file }) = self.logs.get(&rank) {
            let written = file.lock().unwrap_or_else(PoisonError::into_inner).write_all(line);
            written.map_err(|source| Error::Write { path: path.clone(), source })?;
        }
        let tagged =
            |tag: bool| if tag { [format!("[r{rank}] ").as_bytes(), line].concat() } else { line.to_vec() };
        let written = match stream {
            Stream::Output => output::write(io::stdout().lock(), &tagged(self.tag_output)),
            Stream::Error => output::write(io::stderr().lock(), &tagged(self.tag_error)),
        };
        written.map_err(|source| Error::Forward { stream, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_of(text: &[u8]) -> Vec<Vec<u8>> {
        let lines = Mutex::new(Vec::new());
        let keep = |line: &[u8]| {
            lines.lock().unwrap().push(line.to_vec());
            Ok(())
        };
        read_lines(0, text, keep).unwrap();
        lines.into_inner().unwrap()
    }

    #[test]
    fn text_is_forwarded_line_by_line_and_the_last_line_gets_a_newline() {
        assert_eq!(lines_of(b"one\n\ntwo"), [b"one\n".to_vec(), b"\n".to_vec(), b"two\n".to_vec()]);
        assert!(lines_of(b"").is_empty());
    }

    #[test]
    fn bytes_that_are_not_utf8_are_forwarded() {
        assert_eq!(lines_of(b"\xff\x00\n"), [b"\xff\x00\n".to_vec()]);
    }

    #[test]
    fn an_endless_line_is_cut() {
        let lines = lines_of(&vec![b'x'; 3 << 19]);
        assert_eq!(lines.iter().map(Vec::len).collect::<Vec<_>>(), [(1 << 20) + 1, (1 << 19) + 1]);
        // A line of exactly the maximum length is not cut.
        let whole = [&[b'x'; 1 << 20][..], b"\n\n"].concat();
        assert_eq!(lines_of(&whole).iter().map(Vec::len).collect::<Vec<_>>(), [(1 << 20) + 1, 1]);
    }
}
