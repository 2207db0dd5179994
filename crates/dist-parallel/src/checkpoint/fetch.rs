//! Reading ranges of tensors with minimal file access.

use std::collections::HashSet;
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;

use super::disk::Disk;
use super::index::{CHECKED_BYTES, StoredRun, StoredTensor};
use super::load::Checkpoint;
use super::part::WriteBytes;
use super::{CheckpointError, CheckpointProblem};

/// A range of a tensor's values that is needed, and its bytes once they have been read.
pub(super) struct Wanted<'i> {
    pub(super) tensor: &'i StoredTensor,
    offset: usize,
    pub(super) bytes: Vec<u8>,
}

impl<'i> Wanted<'i> {
    pub(super) fn new(tensor: &'i StoredTensor, offset: usize, len: usize) -> Self {
        Self { tensor, offset, bytes: vec![0; len * tensor.dtype.size()] }
    }

    fn len(&self) -> usize {
        self.bytes.len() / self.tensor.dtype.size()
    }
}

/// The bytes of a run that are needed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Read<'i> {
    run: &'i StoredRun,
    /// The range in the run.
    from: Range<u64>,
    /// The index of the needed range, and the offset in its bytes.
    wanted: usize,
    at: usize,
}

/// Returns the reads, in the order of the files.
fn reads<'i>(wanted: &[Wanted<'i>]) -> Vec<Read<'i>> {
    let mut reads = Vec::new();
    for (number, want) in wanted.iter().enumerate() {
        let size = want.tensor.dtype.size();
        let (start, end) = (want.offset, want.offset + want.len());
        let runs = &want.tensor.runs;
        let first = runs.partition_point(|run| run.offset + run.len <= start);
        for run in runs[first..].iter().take_while(|run| run.offset < end) {
            let (from, to) = (start.max(run.offset), end.min(run.offset + run.len));
            if from == to {
                continue;
            }
            let byte = |value: usize| ((value - run.offset) * size) as u64;
            reads.push(Read { run, from: byte(from)..byte(to), wanted: number, at: (from - start) * size });
        }
    }
    reads.sort_by_key(|read| (read.run.file, read.run.at, read.from.start));
    reads
}

/// Reads the needed ranges and verifies their checksums. Also checks this rank's share of the files that it does not
/// read.
pub(super) fn fetch(
    checkpoint: Checkpoint<'_>,
    wanted: &mut [Wanted<'_>],
    rank: usize,
    world_size: usize,
) -> Result<(), CheckpointError> {
    let mut scratch = Vec::new();
    let mut looked_at = HashSet::new();
    let mut open: Option<OpenFile<'_>> = None;
    for read in reads(wanted) {
        let Wanted { tensor, bytes, .. } = &mut wanted[read.wanted];
        let file = OpenFile::next(open.take(), checkpoint, read.run.file, &mut scratch)
            .map_err(|error| error.about(&tensor.name))?;
        looked_at.insert(file.number);
        let mut rest = &mut bytes[read.at..];
        file.read(tensor, read.run, &read.from, &mut scratch, &mut |bytes| {
            let (into, others) = std::mem::take(&mut rest).split_at_mut(bytes.len());
            into.copy_from_slice(bytes);
            rest = others;
            Ok(())
        })?;
        open = Some(file);
    }
    let share = (0..checkpoint.index.files.len()).filter(|number| number % world_size == rank);
    for number in share.filter(|number| !looked_at.contains(number)) {
        OpenFile::open(checkpoint, number, &mut scratch)?;
    }
    Ok(())
}

/// An open file of a checkpoint, whose size and header were verified.
pub(super) struct OpenFile<'a> {
    disk: &'a Disk,
    number: usize,
    path: PathBuf,
    file: File,
}

impl<'a> OpenFile<'a> {
    fn open(
        checkpoint: Checkpoint<'a>,
        number: usize,
        scratch: &mut Vec<u8>,
    ) -> Result<Self, CheckpointError> {
        let stored = &checkpoint.index.files[number];
        let path = checkpoint.path.with_file_name(&stored.name);
        let (file, got) =
            checkpoint.disk.open(&path).map_err(|error| CheckpointError::unread(&path, &error))?;
        if got != stored.bytes {
            let problem = CheckpointProblem::Size { expected: stored.bytes, got };
            return Err(CheckpointError::new(path, problem));
        }
        let opened = Self { disk: checkpoint.disk, number, path, file };
        if let Some(expected) = stored.header_crc32 {
            opened.check_header(stored.header_bytes, expected, scratch)?;
        }
        Ok(opened)
    }

    /// Returns the file of this number, which may be the open one.
    pub(super) fn next(
        open: Option<Self>,
        checkpoint: Checkpoint<'a>,
        number: usize,
        scratch: &mut Vec<u8>,
    ) -> Result<Self, CheckpointError> {
        match open {
            Some(file) if file.number == number => Ok(file),
            _ => Self::open(checkpoint, number, scratch),
        }
    }

    fn check_header(&self, bytes: u64, expected: u32, scratch: &mut Vec<u8>) -> Result<(), CheckpointError> {
        let mut hasher = crc32fast::Hasher::new();
        let mut at = 0;
        while at < bytes {
            let len = (bytes - at).min(BLOCK);
            hasher.update(self.read_at(at, len, scratch)?);
            at += len;
        }
        if hasher.finalize() == expected { Ok(()) } else { Err(self.corrupted()) }
    }

    /// Passes a range of the bytes of a run of `tensor` to `sink` in pieces. Each is passed after the checksum of its
    /// block was verified.
    pub(super) fn read(
        &self,
        tensor: &StoredTensor,
        run: &StoredRun,
        range: &Range<u64>,
        scratch: &mut Vec<u8>,
        sink: &mut WriteBytes<'_>,
    ) -> Result<(), CheckpointError> {
        let run_bytes = (run.len * tensor.dtype.size()) as u64;
        let mut at = range.start;
        while at < range.end {
            let block = at / BLOCK;
            let (from, to) = match run.crc32 {
                Some(_) => (block * BLOCK, run_bytes.min((block + 1) * BLOCK)),
                None => (at, range.end.min(at + BLOCK)),
            };
            let about = |error: CheckpointError| error.about(&tensor.name);
            let bytes = self.read_at(run.at + from, to - from, scratch).map_err(about)?;
            let expected = run.crc32.as_ref().map(|checksums| checksums[in_memory(block)]);
            if expected.is_some_and(|expected| crc32fast::hash(bytes) != expected) {
                return Err(about(self.corrupted()));
            }
            let end = to.min(range.end);
            sink(&bytes[in_memory(at - from)..in_memory(end - from)])?;
            at = end;
        }
        Ok(())
    }

    /// Reads at most [`CHECKED_BYTES`].
    fn read_at<'s>(&self, at: u64, len: u64, scratch: &'s mut Vec<u8>) -> Result<&'s [u8], CheckpointError> {
        scratch.resize(in_memory(len.min(BLOCK)), 0);
        let read = self.disk.read_at(&self.file, &self.path, at, scratch);
        read.map_err(|error| CheckpointError::unread(&self.path, &error))?;
        Ok(scratch)
    }

    fn corrupted(&self) -> CheckpointError {
        CheckpointError::new(&self.path, CheckpointProblem::Corrupted)
    }
}

const BLOCK: u64 = CHECKED_BYTES as u64;

/// Converts a number of bytes or blocks that the index lists.
fn in_memory(count: u64) -> usize {
    usize::try_from(count).expect("it counts something that lies in memory")
}
