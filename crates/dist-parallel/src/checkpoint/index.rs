//! The index of a checkpoint: the place of each value in the files.
//!
//! The file has two lines of JSON. The first names the format and has the length and the checksum of the second,
//! which is an [`Index`]. [`Index::check`] verifies it: every run lies inside its file, the runs of a tensor tile it,
//! and the tensors tile the files.

use std::collections::HashSet;
use std::fmt;
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};

use super::stored_type::StoredType;
use super::{CheckpointError, CheckpointProblem};

/// The contents of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    pub(super) step: u64,
    /// The number of steps that the trainer had taken. The step in the checkpoint's name is the program's own count.
    #[serde(default)]
    pub(super) steps: u64,
    /// The kind of the optimizer whose state is included.
    pub(super) optimizer: Option<String>,
    /// The kind of the ranks' own optimizers whose states are included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) rank_optimizer: Option<String>,
    pub(super) files: Vec<StoredFile>,
    pub(super) tensors: Vec<StoredTensor>,
    /// The file with the state of the program, if there is any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) state: Option<StoredState>,
}

/// A file that consists of a header and runs. `header_crc32` is the checksum of the header.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredFile {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) header_bytes: u64,
    /// `None` only for files that do not belong to a checkpoint.
    pub(super) header_crc32: Option<u32>,
}

/// The file with the state of the program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredState {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// The checksum of the whole file.
    pub(super) crc32: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredTensor {
    pub(super) name: TensorName,
    pub(super) dtype: StoredType,
    pub(super) shape: Vec<usize>,
    /// Sorted by their offsets.
    pub(super) runs: Vec<StoredRun>,
}

/// The name of a parameter, or of an optimizer's state for a parameter.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TensorName {
    pub(super) parameter: String,
    /// The optimizer's name for the state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) state: Option<String>,
}

/// A contiguous range of a tensor's values in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredRun {
    /// The index of the first value in the tensor.
    pub(super) offset: usize,
    /// The number of values.
    pub(super) len: usize,
    /// The number of the file.
    pub(super) file: usize,
    /// The offset of the first byte in the file.
    pub(super) at: u64,
    /// The checksums of each [`CHECKED_BYTES`] of the run; the last block can be shorter. `None` only for files that
    /// do not belong to a checkpoint.
    pub(super) crc32: Option<Vec<u32>>,
}

impl TensorName {
    pub(super) fn parameter(name: &str) -> Self {
        Self { parameter: name.to_owned(), state: None }
    }

    pub(super) fn state(parameter: &str, state: &str) -> Self {
        Self { parameter: parameter.to_owned(), state: Some(state.to_owned()) }
    }
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            None => f.write_str(&self.parameter),
            Some(state) => write!(f, "optimizer/{state}/{}", self.parameter),
        }
    }
}

impl Index {
    /// Returns `true` if the checkpoint has the state of this kind of optimizer, which all ranks share, and no states of
    /// ranks.
    pub(super) fn has_shared_state_alone(&self, kind: &str) -> bool {
        self.rank_optimizer.is_none() && self.optimizer.as_deref() == Some(kind)
    }

    pub(super) fn encode(&self) -> Result<Vec<u8>, serde_json::Error> {
        let body = serde_json::to_vec(self)?;
        let mut bytes = serde_json::to_vec(&Front::of(&body))?;
        bytes.push(b'\n');
        bytes.extend(body);
        Ok(bytes)
    }

    /// Decodes and checks an index. `path` is for errors.
    pub(super) fn decode(path: &Path, bytes: &[u8]) -> Result<Self, CheckpointError> {
        let malformed = |reason: String| CheckpointError::malformed(path, reason);
        let end = bytes.iter().position(|&byte| byte == b'\n');
        let (front, body) = bytes.split_at(end.unwrap_or(bytes.len()));
        let body = body.get(1..).unwrap_or_default();
        let said: Front = serde_json::from_slice(front)
            .map_err(|error| malformed(format!("its first line is invalid: {error}")))?;
        if said.format != FORMAT {
            return Err(malformed(format!("its format is {:?}", said.format)));
        }
        if said.version > VERSION {
            return Err(CheckpointError::new(path, CheckpointProblem::Version(said.version)));
        }
        let is = Front::of(body);
        if said.bytes != is.bytes {
            let (expected, got) = (said.bytes, is.bytes);
            return Err(CheckpointError::new(path, CheckpointProblem::Size { expected, got }));
        }
        // The first line must be equal byte for byte, which detects changes in it.
        if serde_json::to_vec(&is).is_ok_and(|is| is != front) {
            return Err(CheckpointError::new(path, CheckpointProblem::Corrupted));
        }
        let index: Self = serde_json::from_slice(body).map_err(|error| malformed(error.to_string()))?;
        if index.files.iter().any(|file| file.header_crc32.is_none()) {
            return Err(malformed("a file has no checksum".to_owned()));
        }
        if let Some(tensor) = index.tensors.iter().find(|tensor| tensor.dtype.float().is_none()) {
            let reason = format!("no parameter can have the type {}", tensor.dtype);
            return Err(malformed(reason).about(&tensor.name));
        }
        index.check(path)?;
        Ok(index)
    }

    /// Returns an error unless all values have valid places and none occurs twice.
    pub(super) fn check(&self, path: &Path) -> Result<(), CheckpointError> {
        let mut names = HashSet::new();
        let unlike = |name: &str, reason: &str| {
            Err(CheckpointError::malformed(path, format!("file {name:?} {reason}")))
        };
        let of_state = self.state.iter().map(|state| &*state.name);
        for name in self.files.iter().map(|file| &*file.name).chain(of_state) {
            let plain = Path::new(name).components().map(|part| matches!(part, Component::Normal(_)));
            if !names.insert(name) || plain.collect::<Vec<_>>() != [true] {
                return unlike(name, "is not a unique file name in this directory");
            }
        }
        if let Some(file) = self.files.iter().find(|file| file.header_bytes > file.bytes) {
            return unlike(&file.name, "has a header that is longer than the file");
        }
        let mut places = vec![Vec::new(); self.files.len()];
        let mut names = HashSet::new();
        for tensor in &self.tensors {
            let fault = if names.insert(&tensor.name) {
                self.check_tensor(tensor, &mut places)
            } else {
                Err("it occurs twice".to_owned())
            };
            fault.map_err(|reason| CheckpointError::malformed(path, reason).about(&tensor.name))?;
        }
        for (file, mut places) in self.files.iter().zip(places) {
            places.sort_unstable();
            let mut end = file.header_bytes;
            for (from, to) in places {
                if from != end {
                    let problem = if from < end { "is used twice" } else { "belongs to no tensor" };
                    let reason = format!("byte {} of {:?} {problem}", from.min(end), file.name);
                    return Err(CheckpointError::malformed(path, reason));
                }
                end = to;
            }
            if end != file.bytes {
                let reason = format!("byte {end} of {:?} belongs to no tensor", file.name);
                return Err(CheckpointError::malformed(path, reason));
            }
        }
        Ok(())
    }

    /// Returns an error unless the runs tile the tensor and lie inside their files. Appends their places.
    fn check_tensor(&self, tensor: &StoredTensor, places: &mut [Vec<(u64, u64)>]) -> Result<(), String> {
        let len = tensor.shape.iter().try_fold(1_usize, |len, &dim| len.checked_mul(dim));
        let len = len.ok_or_else(|| format!("{:?} values do not fit into memory", tensor.shape))?;
        let mut end = 0;
        for run in &tensor.runs {
            if run.offset != end || run.len == 0 {
                let problem = if run.offset < end { "occurs twice" } else { "is missing" };
                return Err(format!("value {} {problem}", run.offset.min(end)));
            }
            end = run.offset.checked_add(run.len).ok_or("its values exceed the largest number")?;
            let (from, to) = self.place(tensor, run).ok_or_else(|| {
                format!("values {} to {end} do not lie in file number {}", run.offset, run.file)
            })?;
            let needed =
                self.files[run.file].header_crc32.map(|_| (to - from).div_ceil(CHECKED_BYTES as u64));
            if run.crc32.as_ref().map(|checksums| checksums.len() as u64) != needed {
                return Err(format!("values {} to {end} have the wrong number of checksums", run.offset));
            }
            places[run.file].push((from, to));
        }
        if end == len { Ok(()) } else { Err(format!("value {} is {}", end.min(len), extra(end, len))) }
    }

    /// Returns the byte range of a run, if it lies inside its file and behind the header.
    fn place(&self, tensor: &StoredTensor, run: &StoredRun) -> Option<(u64, u64)> {
        let file = self.files.get(run.file)?;
        let bytes = (run.len as u64).checked_mul(tensor.dtype.size() as u64)?;
        let end = run.at.checked_add(bytes)?;
        (run.at >= file.header_bytes && end <= file.bytes).then_some((run.at, end))
    }
}

fn extra(end: usize, len: usize) -> &'static str {
    if end < len { "missing" } else { "more than its shape has" }
}

/// The first line.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Front {
    format: String,
    version: u64,
    /// The length of the second line.
    bytes: u64,
    crc32: u32,
}

impl Front {
    fn of(body: &[u8]) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            bytes: body.len() as u64,
            crc32: crc32fast::hash(body),
        }
    }
}

/// The number of bytes of a run that share one checksum. It is the smallest unit of reading.
pub(super) const CHECKED_BYTES: usize = 1 << 18;

const FORMAT: &str = "dist-checkpoint";
const VERSION: u64 = 1;
