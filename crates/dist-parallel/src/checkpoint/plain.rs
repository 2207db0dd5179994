//! Parameters as one plain safetensors file, which other programs read and write too.

use std::io;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::agree::Ranks;
use super::checkpoints::TIMEOUT;
use super::disk::Disk;
use super::fetch::OpenFile;
use super::index::{Index, Run, StoredFile, StoredTensor, TensorName};
use super::load::{Checkpoint, find};
use super::part::{self, Entry, WriteBytes};
use super::{CheckpointError, CheckpointProblem, INDEX, Shards};
use crate::{FloatType, Result};

/// Puts the parameters of one safetensors file in place of what all ranks hold, by whatever program it was written. All
/// ranks call this, and see the same file. Its tensors are the model's parameters, by name, shape and type; a
/// parameter that is another name of an earlier one can be left out. What an optimizer keeps is left as it is.
///
/// Such a file has no checksums, so that a change of values is not noticed, unlike one of the list of tensors. Nothing
/// is changed until every rank has read all that it needs, for which ranks wait ten minutes for each other.
///
/// # Errors
/// On every rank, with the tensor at fault, if the file cannot be read, contradicts itself, or is of another model; then
/// nothing is changed on any rank. If communication fails.
pub fn load_safetensors(path: impl AsRef<Path>, shards: &mut dyn Shards) -> Result<()> {
    let (disk, path) = (Disk::default(), path.as_ref());
    let mut ranks = Ranks::of(shards, TIMEOUT)?;
    let header = if ranks.is_first() { read_header(&disk, path) } else { Ok((0, Vec::new())) };
    let (size, header) = ranks.agree(header)?;
    let told = ranks.share([&size.to_le_bytes()[..], &header].concat())?;
    let (&size, header) = told.split_first_chunk().expect("the first rank shares eight bytes and more");
    let index = ranks.agree(index(path, u64::from_le_bytes(size), header))?;
    Checkpoint { disk: &disk, path, index: &index }.put_in_place(&mut ranks, shards, None)
}

/// The size of a file, and its header without the length.
fn read_header(disk: &Disk, path: &Path) -> Result<(u64, Vec<u8>), CheckpointError> {
    let failed = |error: io::Error| CheckpointError::unread(path, &error);
    let (file, size) = disk.open(path).map_err(failed)?;
    let mut len = [0; 8];
    disk.read_at(&file, path, 0, &mut len).map_err(failed)?;
    let len = u64::from_le_bytes(len);
    if len > HEADER_BYTES_MAX || len + 8 > size {
        let reason = format!("its header cannot have {len} bytes");
        return Err(CheckpointError::malformed(path, reason));
    }
    let mut header = vec![0; usize::try_from(len).expect("the length was looked at")];
    disk.read_at(&file, path, 8, &mut header).map_err(failed)?;
    Ok((size, header))
}

/// What a safetensors file contains, as if it were a checkpoint without checksums.
fn index(path: &Path, size: u64, header: &[u8]) -> Result<Index, CheckpointError> {
    let malformed = |reason: &dyn std::fmt::Display| CheckpointError::malformed(path, reason);
    let metadata: Metadata = serde_json::from_slice(header).map_err(|error| malformed(&error))?;
    let header_bytes = 8 + header.len() as u64;
    let expected = header_bytes.saturating_add(metadata.data_len() as u64);
    if size != expected {
        return Err(CheckpointError::new(path, CheckpointProblem::Size { expected, got: size }));
    }
    let mut tensors = Vec::new();
    for name in metadata.offset_keys() {
        let TensorInfo { dtype, shape, data_offsets: (from, to) } =
            metadata.info(&name).expect("the name is from the list").clone();
        let float_type = float_type(dtype)
            .ok_or_else(|| malformed(&format!("parameters cannot be of the type {dtype:?}")).about(&name))?;
        let run = Run {
            offset: 0,
            len: (to - from) / float_type.size(),
            file: 0,
            at: header_bytes + from as u64,
            crc32: None,
        };
        let runs = if run.len > 0 { vec![run] } else { Vec::new() };
        tensors.push(StoredTensor { name: TensorName::parameter(&name), dtype: float_type, shape, runs });
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let files = vec![StoredFile { name, bytes: size, header_bytes, header_crc32: None }];
    let index = Index { step: 0, optimizer: None, files, tensors };
    index.check(path)?;
    Ok(index)
}

/// `None` if parameters cannot be of this type.
const fn float_type(dtype: Dtype) -> Option<FloatType> {
    match dtype {
        Dtype::F32 => Some(FloatType::F32),
        Dtype::F64 => Some(FloatType::F64),
        Dtype::F16 => Some(FloatType::F16),
        Dtype::BF16 => Some(FloatType::Bf16),
        _ => None,
    }
}

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
    let checkpoint = Checkpoint { disk, path: &path, index: &index };
    let parameters = index.tensors.iter().filter(|tensor| tensor.name.state.is_none());
    let mut entries: Vec<Entry<&StoredTensor>> = parameters.map(whole).collect();
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.dtype.size()));
    let mut name = to.file_name().unwrap_or_default().to_os_string();
    name.push(".tmp");
    let temporary = to.with_file_name(name);
    let mut reader = Reader { checkpoint, open: None, scratch: Vec::new() };
    let written = part::write(disk, &temporary, &entries, |entry, write| reader.read(entry.source, write));
    let failed = |error: io::Error| CheckpointError::unwritten(to, &error);
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
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        offset: 0,
        len: tensor.runs.iter().map(|run| run.len).sum(),
        source: tensor,
    }
}

/// Reads whole tensors, one after the other.
struct Reader<'a> {
    checkpoint: Checkpoint<'a>,
    open: Option<OpenFile<'a>>,
    scratch: Vec<u8>,
}

impl Reader<'_> {
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

const HEADER_BYTES_MAX: u64 = 100_000_000;
