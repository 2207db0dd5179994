//! The state of a program that is saved with a checkpoint, in addition to the trainer's state: a safetensors file.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::disk::{Disk, DiskError};
use super::index::{StoredState, TensorName};
use super::rank_request::{ComparedChunk, ComparedValues};
use super::stored_type::StoredType;
use super::{CheckpointError, CheckpointProblem};
use crate::Values;
use crate::flat::Flat;

type Result<T> = std::result::Result<T, CheckpointError>;

/// The state of a program, by name.
#[derive(Debug, Default)]
pub(super) struct ProgramState(BTreeMap<String, StateValue>);

#[derive(Debug)]
enum StateValue {
    /// A value that was encoded as MessagePack, or bytes in a format of the program.
    Bytes(Vec<u8>),
    Tensor {
        shape: Vec<usize>,
        values: Flat,
    },
}

impl ProgramState {
    pub(super) fn set_value(&mut self, name: String, value: &(impl Serialize + ?Sized)) -> Result<()> {
        let encoded = rmp_serde::to_vec_named(value);
        let bytes = encoded.map_err(|error| CheckpointError::malformed("", error).about(&name))?;
        self.set(name, StateValue::Bytes(bytes))
    }

    pub(super) fn set_bytes(&mut self, name: String, bytes: Vec<u8>) -> Result<()> {
        self.set(name, StateValue::Bytes(bytes))
    }

    pub(super) fn set_tensor(&mut self, name: String, shape: &[usize], values: Values<'_>) -> Result<()> {
        if shape.iter().product::<usize>() != values.len() {
            let reason = format!("{} values do not match the shape {shape:?}", values.len());
            return Err(CheckpointError::malformed("", reason).about(name));
        }
        self.set(name, StateValue::Tensor { shape: shape.to_vec(), values: Flat::copy_of(values) })
    }

    fn set(&mut self, name: String, value: StateValue) -> Result<()> {
        if name == METADATA {
            return Err(CheckpointError::malformed("", "the file format uses this name itself").about(name));
        }
        self.0.insert(name, value);
        Ok(())
    }

    pub(super) fn remove(&mut self, name: &str) -> bool {
        self.0.remove(name).is_some()
    }

    pub(super) fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let decoded = rmp_serde::from_slice(self.bytes(name)?);
        decoded.map_err(|error| {
            let (expected, found) = (std::any::type_name::<T>().to_owned(), error.to_string());
            CheckpointError::new("", CheckpointProblem::StateForm { expected, found }).about(name)
        })
    }

    pub(super) fn bytes(&self, name: &str) -> Result<&[u8]> {
        match self.find(name)? {
            StateValue::Bytes(bytes) => Ok(bytes),
            StateValue::Tensor { shape, values } => {
                Err(other_form(name, "a value or bytes", format!("a tensor {shape:?} {}", values.dtype())))
            }
        }
    }

    pub(super) fn tensor(&self, name: &str) -> Result<(&[usize], Values<'_>)> {
        match self.find(name)? {
            StateValue::Tensor { shape, values } => Ok((shape, values.slice(0, values.len()))),
            StateValue::Bytes(bytes) => {
                Err(other_form(name, "a tensor", format!("a value or bytes, {} bytes long", bytes.len())))
            }
        }
    }

    fn find(&self, name: &str) -> Result<&StateValue> {
        let found = self.0.get(name);
        found.ok_or_else(|| CheckpointError::new("", CheckpointProblem::NoState).about(name))
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Returns checksums of all values, which must be equal on all ranks.
    pub(super) fn compared(&self) -> impl Iterator<Item = ComparedChunk> {
        self.0.iter().map(|(name, value)| {
            let (dtype, shape, bytes) = value.parts();
            let crc32 = crc32fast::hash(format!("{dtype:?} {shape:?}").as_bytes());
            ComparedChunk {
                tensor: TensorName::parameter(name),
                offset: 0,
                len: bytes.len(),
                crc32: crc32 ^ crc32fast::hash(bytes),
                values: ComparedValues::State,
            }
        })
    }

    /// Returns the file, or `None` if there is no state.
    pub(super) fn encode(&self) -> Result<Option<Vec<u8>>> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let views = self.0.iter().map(|(name, value)| {
            let (dtype, shape, bytes) = value.parts();
            Ok((name, TensorView::new(dtype, shape, bytes)?))
        });
        let views: std::result::Result<Vec<_>, safetensors::SafeTensorError> = views.collect();
        let encoded = views.and_then(|views| safetensors::serialize(views, None));
        encoded.map(Some).map_err(|error| CheckpointError::malformed("", error))
    }

    /// Writes an encoded state as a file of an unfinished checkpoint, and syncs it to the disk.
    pub(super) fn write(disk: &Disk, directory: &Path, encoded: &[u8]) -> Result<StoredState> {
        let path = directory.join(FILE);
        let failed = |error: DiskError| CheckpointError::unwritten(&path, &error);
        let mut file = disk.create(&path).map_err(failed)?;
        disk.write(&mut file, &path, encoded).map_err(failed)?;
        disk.sync(&file, &path).map_err(failed)?;
        Ok(StoredState {
            name: FILE.to_owned(),
            bytes: encoded.len() as u64,
            crc32: crc32fast::hash(encoded),
        })
    }

    /// Reads and verifies the state of the checkpoint with this index.
    pub(super) fn read(disk: &Disk, index: &Path, stored: Option<&StoredState>) -> Result<Self> {
        let Some(stored) = stored else { return Ok(Self::default()) };
        let path = index.with_file_name(&stored.name);
        let unread = |error: DiskError| CheckpointError::unread(&path, &error);
        let (_, got) = disk.open(&path).map_err(unread)?;
        let bytes = disk.read_all(&path, stored.bytes).map_err(unread)?;
        let Some(bytes) = bytes.filter(|bytes| bytes.len() as u64 == stored.bytes) else {
            let problem = CheckpointProblem::Size { expected: stored.bytes, got };
            return Err(CheckpointError::new(path, problem));
        };
        if crc32fast::hash(&bytes) != stored.crc32 {
            return Err(CheckpointError::new(path, CheckpointProblem::Corrupted));
        }
        let malformed = |error| CheckpointError::malformed(&path, error);
        let tensors = SafeTensors::deserialize(&bytes).map_err(malformed)?;
        Ok(Self(tensors.iter().map(|(name, view)| (name.to_owned(), StateValue::of(&view))).collect()))
    }
}

impl StateValue {
    /// Returns the type, the shape and the bytes in the file.
    fn parts(&self) -> (Dtype, Vec<usize>, &[u8]) {
        match self {
            Self::Bytes(bytes) => (Dtype::U8, vec![bytes.len()], bytes),
            Self::Tensor { shape, values } => {
                let dtype = StoredType::from(values.dtype()).into();
                (dtype, shape.clone(), values.slice(0, values.len()).as_bytes())
            }
        }
    }

    fn of(view: &TensorView<'_>) -> Self {
        let Some(dtype) = StoredType::new(view.dtype()).float() else {
            return Self::Bytes(view.data().to_vec());
        };
        let mut values = Flat::zeros(dtype, view.shape().iter().product());
        let len = values.len();
        values.slice_mut(0, len).as_bytes_mut().copy_from_slice(view.data());
        Self::Tensor { shape: view.shape().to_vec(), values }
    }
}

fn other_form(name: &str, expected: &str, found: String) -> CheckpointError {
    CheckpointError::new("", CheckpointProblem::StateForm { expected: expected.to_owned(), found })
        .about(name)
}

/// The name of the file in a checkpoint's directory.
const FILE: &str = "state.safetensors";

/// The name that the safetensors format reserves.
const METADATA: &str = "__metadata__";
