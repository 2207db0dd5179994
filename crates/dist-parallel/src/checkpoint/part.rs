//! The safetensors file that one rank writes, and its metadata for the index.

use std::collections::HashSet;
use std::fs::File;
use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use super::agree::Ranks;
use super::assignment::assign;
use super::disk::{Disk, DiskError};
use super::index::{CHECKED_BYTES, StoredFile, StoredRun, TensorName};
use super::rank_request::{ComparedChunk, ComparedValues};
use super::stored_type::StoredType;
use super::{CheckpointError, CheckpointProblem, Chunk, ShardMetadata, Shards, Slice};
use crate::{FloatType, OptimizerState, ParamInfo, SliceStates};

/// A contiguous range of a tensor's values that a rank writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry<S = EntrySource> {
    pub(super) tensor: TensorName,
    pub(super) dtype: FloatType,
    /// The shape of the whole tensor.
    pub(super) shape: Vec<usize>,
    pub(super) offset: usize,
    pub(super) len: usize,
    /// The source of the values.
    pub(super) source: S,
}

/// The source of the values of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EntrySource {
    /// A chunk of a parameter, from this value on.
    Parameter { chunk: Chunk, start: usize },
    /// An array of an optimizer's state of a slice, from this value on.
    Array { owner: StateOwner, slice: usize, array: usize, start: usize },
    /// A scalar of an optimizer's state of a slice.
    Scalar { owner: StateOwner, slice: usize, scalar: usize },
}

/// The optimizer that a state belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StateOwner {
    /// The optimizer of all ranks, each of which updates its shards.
    Shared,
    /// The optimizer of this rank alone, which updates its own copy of the model.
    Rank(usize),
}

impl StateOwner {
    /// Returns the tensor of a parameter's state.
    pub(super) fn tensor(self, parameter: &str, state: &str) -> TensorName {
        match self {
            Self::Shared => TensorName::state(parameter, state),
            Self::Rank(rank) => TensorName::state(parameter, &format!("{RANK}{rank}/{state}")),
        }
    }

    /// Returns the owner of a tensor's state and the optimizer's name for it. `None` for a parameter.
    pub(super) fn of(tensor: &TensorName) -> Option<(Self, &str)> {
        let state = tensor.state.as_deref()?;
        let of_rank = state.strip_prefix(RANK).and_then(|rest| {
            let (rank, state) = rest.split_once('/')?;
            Some((Self::Rank(rank.parse().ok()?), state))
        });
        Some(of_rank.unwrap_or((Self::Shared, state)))
    }
}

/// The beginning of a state's name in a checkpoint, if each rank has an optimizer of its own.
const RANK: &str = "rank:";

/// The states of optimizers that a checkpoint has.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SavedStates<'a> {
    /// The state of the optimizer of all ranks.
    pub(crate) shared: Option<&'a SliceStates>,
    /// The state of this rank's own optimizer.
    pub(crate) own: Option<&'a SliceStates>,
}

impl<'a> SavedStates<'a> {
    pub(crate) fn of(optimizer: Option<&'a dyn OptimizerState>) -> Self {
        Self { shared: optimizer.and_then(OptimizerState::states), own: None }
    }

    /// Returns the kinds of both optimizers.
    pub(super) fn kinds(self) -> [Option<&'static str>; 2] {
        [self.shared, self.own].map(|states| states.map(SliceStates::optimizer))
    }
}

impl<S> Entry<S> {
    pub(super) fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Returns the name and the shape in the file. A part of a tensor is one-dimensional.
    fn in_file(&self) -> (String, Vec<usize>) {
        if self.len == self.shape.iter().product::<usize>() {
            return (self.tensor.to_string(), self.shape.clone());
        }
        let end = self.offset + self.len;
        (format!("{}[{}..{end}]", self.tensor, self.offset), vec![self.len])
    }
}

/// Returns the entries that this rank writes, in the order of the file.
pub(super) fn entries(
    shards: &dyn Shards,
    states: SavedStates<'_>,
    only_trained: bool,
) -> Result<Vec<Entry>, CheckpointError> {
    if let Some(what) = shards.unsaved() {
        return Err(CheckpointError::new("", CheckpointProblem::Unsaved(what)));
    }
    let infos = shards.infos();
    let check = |chunks: &[Chunk]| {
        let problem = chunks.iter().find_map(|chunk| chunk.parameter(infos).err());
        problem.map_or(Ok(()), |problem| Err(CheckpointError::new("", problem)))
    };
    let ShardMetadata { chunks, copy, copies } = shards.parameters();
    check(&chunks)?;
    let trained: Vec<usize> =
        (0..chunks.len()).filter(|&number| infos[chunks[number].parameter].trainable).collect();
    let shared: Vec<Chunk> = trained.iter().map(|&number| chunks[number]).collect();
    let dealt = assign(&shared, copy, copies).into_iter();
    let dealt = dealt.map(|(place, part)| (chunks[trained[place]], part));
    // Frozen parameters and buffers can differ between ranks. One rank writes all values of each, to avoid a mixture.
    let untrained = shards.untrained_to_save();
    check(&untrained)?;
    let is_saved = |chunk: &Chunk| chunk.len > 0 && !(only_trained && infos[chunk.parameter].is_constant());
    let untrained = untrained.into_iter().filter(is_saved).map(|chunk| (chunk, chunk));
    let mut entries: Vec<Entry> = dealt
        .chain(untrained)
        .map(|(chunk, Chunk { parameter, offset, len })| Entry {
            tensor: TensorName::parameter(&infos[parameter].name),
            dtype: infos[parameter].dtype,
            shape: infos[parameter].shape.clone(),
            offset,
            len,
            source: EntrySource::Parameter { chunk, start: offset - chunk.offset },
        })
        .collect();
    if let Some(states) = states.shared {
        let ShardMetadata { chunks: slices, copy, copies } = shards.slices();
        let chunks: Vec<Chunk> = slices.iter().map(|slice| slice.chunk).collect();
        check(&chunks)?;
        check_states(&slices, states)?;
        for (number, chunk) in assign(&chunks, copy, copies) {
            entries.extend(state_entries(infos, states, slices[number], chunk, StateOwner::Shared));
        }
    }
    if let Some(states) = states.own {
        let ShardMetadata { chunks: slices, copy, .. } = shards.slices();
        check_states(&slices, states)?;
        for slice in slices.into_iter().filter(|slice| slice.chunk.len > 0) {
            entries.extend(state_entries(infos, states, slice, slice.chunk, StateOwner::Rank(copy)));
        }
    }
    // Larger types come first, so that each is aligned in memory if the file is.
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.dtype.size()));
    Ok(entries)
}

/// Returns an error if a trained parameter has a value that is not finite, among those that this rank writes.
pub(super) fn check_finite(shards: &dyn Shards, entries: &[Entry]) -> Result<(), CheckpointError> {
    entries.iter().try_for_each(|entry| {
        let EntrySource::Parameter { chunk, start } = entry.source else { return Ok(()) };
        if !shards.infos()[chunk.parameter].trainable {
            return Ok(());
        }
        let mut found = None;
        let read = shards.read(chunk, &mut |values| {
            let end = values.len().min(start + entry.len);
            found = values.part(start.min(end)..end).first_not_finite();
        });
        read.map_err(|error| trainer(&entry.tensor, error.to_string()))?;
        let Some((at, value)) = found else { return Ok(()) };
        let problem = CheckpointProblem::NotFinite { index: entry.offset + at, value: value.to_string() };
        Err(CheckpointError::new("", problem).about(&entry.tensor))
    })
}

/// Returns an error unless all optimizer state is saved.
fn check_states(slices: &[Slice], states: &SliceStates) -> Result<(), CheckpointError> {
    let listed: HashSet<usize> = slices.iter().map(|slice| slice.number).collect();
    match states.iter().find(|(number, _)| !listed.contains(number)) {
        Some((slice, _)) => Err(CheckpointError::new("", CheckpointProblem::UnlistedState { slice })),
        None => Ok(()),
    }
}

/// Returns the entries of a slice's state. This rank writes `chunk` of each.
fn state_entries(
    infos: &[ParamInfo],
    states: &SliceStates,
    slice: Slice,
    chunk: Chunk,
    owner: StateOwner,
) -> Vec<Entry> {
    let info = &infos[chunk.parameter];
    if states.get(slice.number).is_none() {
        return Vec::new();
    }
    let start = chunk.offset - slice.chunk.offset;
    let arrays = states.arrays(info.dtype).enumerate().map(|(array, (name, dtype))| Entry {
        tensor: owner.tensor(&info.name, name),
        dtype,
        shape: info.shape.clone(),
        offset: chunk.offset,
        len: chunk.len,
        source: EntrySource::Array { owner, slice: slice.number, array, start },
    });
    // Scalars belong to the whole parameter. The rank with its first value writes them.
    let scalars = states.scalars().enumerate().filter(|_| chunk.offset == 0);
    let scalars = scalars.map(|(scalar, name)| Entry {
        tensor: owner.tensor(&info.name, name),
        dtype: FloatType::F64,
        shape: Vec::new(),
        offset: 0,
        len: 1,
        source: EntrySource::Scalar { owner, slice: slice.number, scalar },
    });
    arrays.chain(scalars).collect()
}

/// Calls `write` with the values of an entry.
pub(super) fn read(
    shards: &dyn Shards,
    states: SavedStates<'_>,
    entry: &Entry,
    write: &mut WriteBytes<'_>,
) -> Result<(), CheckpointError> {
    let bytes_from = |start: usize| start * entry.dtype.size()..start * entry.dtype.size() + entry.bytes();
    let state = |owner, slice| {
        let of_owner = if owner == StateOwner::Shared { states.shared } else { states.own };
        of_owner.and_then(|states| states.get(slice)).expect(PLANNED)
    };
    match entry.source {
        EntrySource::Parameter { chunk, start } => {
            let mut outcome = Ok(());
            let handed_out = shards.read(chunk, &mut |values| {
                outcome =
                    values.as_bytes().get(bytes_from(start)).map_or_else(|| Err(unlike(entry)), &mut *write);
            });
            handed_out.map_err(|error| trainer(&entry.tensor, error.to_string()))?;
            outcome
        }
        EntrySource::Array { owner, slice, array, start } => {
            let arrays = state(owner, slice).arrays();
            let values = arrays.get(array).filter(|values| values.dtype() == entry.dtype);
            values
                .and_then(|values| values.as_bytes().get(bytes_from(start)))
                .map_or_else(|| Err(unlike(entry)), write)
        }
        EntrySource::Scalar { owner, slice, scalar } => state(owner, slice)
            .scalars()
            .get(scalar)
            .map_or_else(|| Err(unlike(entry)), |number| write(&number.to_le_bytes())),
    }
}

/// A callback that writes bytes.
pub(super) type WriteBytes<'a> = dyn FnMut(&[u8]) -> Result<(), CheckpointError> + 'a;

fn unlike(entry: &Entry) -> CheckpointError {
    trainer(
        &entry.tensor,
        format!("the trainer returned fewer values than the {} to be saved, or another type", entry.len),
    )
}

pub(super) fn trainer(tensor: &TensorName, reason: String) -> CheckpointError {
    CheckpointError::new("", CheckpointProblem::Trainer(reason)).about(tensor)
}

/// Returns the parameters that this rank and others hold, with checksums: trained parameters, and frozen parameters
/// that each rank holds in full and saves in part.
///
/// Other frozen parameters and buffers, such as a running mean, can differ between ranks. The first replica's values
/// are saved.
pub(super) fn held(shards: &dyn Shards, ranks: &Ranks) -> Result<Vec<ComparedChunk>, CheckpointError> {
    let infos = shards.infos();
    let ShardMetadata { chunks, copies, .. } = shards.parameters();
    let mut held = Vec::new();
    for &chunk in chunks.iter().filter(|_| copies > 1 || ranks.has_replicas()) {
        let Ok(info) = chunk.parameter(infos) else { continue };
        if info.trainable {
            let (tensor, mut crc32) = (TensorName::parameter(&info.name), 0);
            let read = shards.read(chunk, &mut |values| crc32 = crc32fast::hash(values.as_bytes()));
            read.map_err(|error| trainer(&tensor, error.to_string()))?;
            let values = ComparedValues::Trained;
            held.push(ComparedChunk { tensor, offset: chunk.offset, len: chunk.len, crc32, values });
        }
    }
    let frozen = shards.frozen_checksums();
    let frozen =
        frozen.map_err(|error| CheckpointError::new("", CheckpointProblem::Trainer(error.to_string())))?;
    held.extend(frozen.into_iter().filter_map(|(parameter, crc32)| {
        let info = infos.get(parameter)?;
        let (tensor, values) = (TensorName::parameter(&info.name), ComparedValues::Frozen);
        Some(ComparedChunk { tensor, offset: 0, len: info.len(), crc32, values })
    }));
    Ok(held)
}

/// The metadata of a rank's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartMeta {
    pub(super) file: StoredFile,
    pub(super) tensors: Vec<PartTensor>,
}

/// A tensor with one run in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartTensor {
    pub(super) name: TensorName,
    pub(super) dtype: FloatType,
    pub(super) shape: Vec<usize>,
    /// The run. Its file number is not set yet.
    pub(super) run: StoredRun,
}

/// Writes entries as a safetensors file and syncs it to the disk. `read` returns the values of each entry.
pub(super) fn write<S>(
    disk: &Disk,
    path: &Path,
    entries: &[Entry<S>],
    mut read: impl FnMut(&Entry<S>, &mut WriteBytes<'_>) -> Result<(), CheckpointError>,
) -> Result<(StoredFile, Vec<PartTensor>), CheckpointError> {
    let header = header(path, entries)?;
    let failed = |error: DiskError| CheckpointError::unwritten(path, &error);
    let file = disk.create(path).map_err(failed)?;
    let mut file = PartFile { disk, file, path, buffer: Vec::with_capacity(BUFFER_BYTES) };
    file.write(&header)?;
    let mut at = header.len() as u64;
    let mut tensors = Vec::with_capacity(entries.len());
    for entry in entries {
        let mut checksums = Checksums::default();
        read(entry, &mut |bytes| {
            checksums.add(bytes);
            file.write(bytes)
        })?;
        tensors.push(PartTensor {
            name: entry.tensor.clone(),
            dtype: entry.dtype,
            shape: entry.shape.clone(),
            run: StoredRun {
                offset: entry.offset,
                len: entry.len,
                file: 0,
                at,
                crc32: Some(checksums.finish()),
            },
        });
        at += entry.bytes() as u64;
    }
    file.finish()?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let header_crc32 = Some(crc32fast::hash(&header));
    Ok((StoredFile { name, bytes: at, header_bytes: header.len() as u64, header_crc32 }, tensors))
}

/// Returns the header of a safetensors file with these entries.
fn header<S>(path: &Path, entries: &[Entry<S>]) -> Result<Vec<u8>, CheckpointError> {
    let mut names = HashSet::from(["__metadata__".to_owned()]);
    let mut end = 0;
    let mut tensors = Vec::with_capacity(entries.len());
    for entry in entries {
        let (name, shape) = entry.in_file();
        if !names.insert(name.clone()) {
            return Err(CheckpointError::malformed(path, "another tensor has this name").about(name));
        }
        let data_offsets = (end, end + entry.bytes());
        end = data_offsets.1;
        tensors.push((name, TensorInfo { dtype: StoredType::from(entry.dtype).into(), shape, data_offsets }));
    }
    let json = Metadata::new(None, tensors)
        .map_err(|error| error.to_string())
        .and_then(|metadata| serde_json::to_vec(&metadata).map_err(|error| error.to_string()));
    let mut json = json.map_err(|reason| CheckpointError::malformed(path, reason))?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok(header)
}

/// A file that is being written. Small runs are buffered, so that a model of many small tensors needs few system
/// calls.
struct PartFile<'a> {
    disk: &'a Disk,
    file: File,
    path: &'a Path,
    buffer: Vec<u8>,
}

impl PartFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        if self.buffer.len() + bytes.len() > BUFFER_BYTES {
            self.flush()?;
        }
        if bytes.len() > BUFFER_BYTES {
            let written = self.disk.write(&mut self.file, self.path, bytes);
            return written.map_err(|error| CheckpointError::unwritten(self.path, &error));
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    /// Writes the buffered bytes.
    fn flush(&mut self) -> Result<(), CheckpointError> {
        if !self.buffer.is_empty() {
            let written = self.disk.write(&mut self.file, self.path, &self.buffer);
            written.map_err(|error| CheckpointError::unwritten(self.path, &error))?;
            self.buffer.clear();
        }
        Ok(())
    }

    /// Syncs the file to the disk.
    fn finish(mut self) -> Result<(), CheckpointError> {
        self.flush()?;
        let synced = self.disk.sync(&self.file, self.path);
        synced.map_err(|error| CheckpointError::unwritten(self.path, &error))
    }
}

/// A computation of one checksum for every [`CHECKED_BYTES`].
#[derive(Default)]
struct Checksums {
    complete: Vec<u32>,
    hasher: crc32fast::Hasher,
    hashed: usize,
}

impl Checksums {
    fn add(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(CHECKED_BYTES - self.hashed));
            self.hasher.update(now);
            self.hashed += now.len();
            bytes = later;
            if self.hashed == CHECKED_BYTES {
                self.end_block();
            }
        }
    }

    fn end_block(&mut self) {
        self.complete.push(std::mem::take(&mut self.hasher).finalize());
        self.hashed = 0;
    }

    fn finish(mut self) -> Vec<u32> {
        if self.hashed > 0 {
            self.end_block();
        }
        self.complete
    }
}

/// The size of the write buffer.
const BUFFER_BYTES: usize = 1 << 16;

const PLANNED: &str = "only what the optimizer has kept is planned to be written";
