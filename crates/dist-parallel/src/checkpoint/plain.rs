//! The parameters of a checkpoint as one plain safetensors file, for other programs.

use std::path::Path;

use super::disk::{Disk, DiskError};
use super::fetch::OpenFile;
use super::index::{Index, StoredTensor};
use super::load::{Allowed, Checkpoint, find};
use super::part::{self, Entry, WriteBytes};
use super::{CheckpointError, CheckpointProblem, INDEX};

/// Writes the parameters of a checkpoint as one file.
pub(super) fn consolidate(
    disk: &Disk,
    directory: &Path,
    step: Option<u64>,
    to: &Path,
) -> Result<(), CheckpointError> {
    let found = find(disk, directory, step)?;
    let (name, bytes) = found.ok_or_else(|| CheckpointError::new(directory, CheckpointProblem::Missing))?;
    let path = directory.join(name.directory()).join(INDEX);
    let index = Index::decode(&path, &bytes)?;
    let checkpoint = Checkpoint { disk, path: &path, index: &index, allowed: &Allowed::default() };
    let parameters = index.tensors.iter().filter(|tensor| tensor.name.state.is_none());
    let mut entries: Vec<Entry<&StoredTensor>> = parameters.map(whole).collect();
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.dtype.size()));
    let mut name = to.file_name().unwrap_or_default().to_os_string();
    name.push(".tmp");
    let temporary = to.with_file_name(name);
    let mut reader = TensorReader { checkpoint, open: None, scratch: Vec::new() };
    let written = part::write(disk, &temporary, &entries, |entry, write| reader.read(entry.source, write));
    let failed = |error: DiskError| CheckpointError::unwritten(to, &error);
    let renamed = written.and_then(|_| disk.rename(&temporary, to).map_err(failed));
    renamed.inspect_err(|_| {
        if let Err(error) = disk.remove_file(&temporary) {
            tracing::debug!(%error, path = %temporary.display(), "an unfinished file cannot be removed");
        }
    })?;
    disk.sync_name(to).map_err(failed)
}

fn whole(tensor: &StoredTensor) -> Entry<&StoredTensor> {
    Entry {
        tensor: tensor.name.clone(),
        dtype: tensor.dtype.float().expect("the index was checked"),
        shape: tensor.shape.clone(),
        offset: 0,
        len: tensor.runs.iter().map(|run| run.len).sum(),
        source: tensor,
    }
}

/// A reader of whole tensors, one after the other.
struct TensorReader<'a> {
    checkpoint: Checkpoint<'a>,
    open: Option<OpenFile<'a>>,
    scratch: Vec<u8>,
}

impl TensorReader<'_> {
    fn read(&mut self, tensor: &StoredTensor, write: &mut WriteBytes<'_>) -> Result<(), CheckpointError> {
        for run in &tensor.runs {
            let file = OpenFile::next(self.open.take(), self.checkpoint, run.file, &mut self.scratch)
                .map_err(|error| error.about(&tensor.name))?;
            let all = 0..(run.len * tensor.dtype.size()) as u64;
            file.read(tensor, run, &all, &mut self.scratch, write)?;
            self.open = Some(file);
        }
        Ok(())
    }
}
