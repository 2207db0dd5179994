//! Parameters from safetensors files of other programs: one file, or several with an index in Hugging Face's format.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::tensor::Metadata;
use serde::{Deserialize, Serialize};

use super::agree::Ranks;
use super::checkpoints::TIMEOUT;
use super::disk::{Disk, DiskError};
use super::index::{Index, StoredFile, StoredRun, StoredTensor, TensorName};
use super::load::{Allowed, Checkpoint, States};
use super::rank_request::RankRequest;
use super::stored_type::StoredType;
use super::{CheckpointError, CheckpointProblem, INDEX_BYTES_MAX, Shards};
use crate::{ParamInfo, Result, agreement};

/// The options of [`load_weights`] for tensors that do not match the model's parameters. By default names, shapes and
/// types must match, with no tensor missing and none unused.
///
/// ```
/// use dist_parallel::checkpoint::WeightOptions;
///
/// // The names of the file begin with "model."; its values are rounded to the model's types; a new head replaces the old.
/// let options = WeightOptions::new().rename("model.", "").convert().ignore("lm_head.").keep("head.");
/// ```
#[derive(Clone, Default)]
pub struct WeightOptions {
    renames: Vec<(String, String)>,
    map: Option<Arc<Map>>,
    converts: bool,
    ignored: Vec<String>,
    ignores_extra: bool,
    kept: Vec<String>,
    keeps_missing: bool,
}

type Map = dyn Fn(&str) -> String + Send + Sync;

impl WeightOptions {
    /// Returns the options that rename, convert and ignore nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Replaces the prefix `from` of tensor names by `to`. The first of several renames that matches is used.
    #[must_use]
    pub fn rename(mut self, from: impl Into<String>, to: impl Into<String>) -> Self {
        self.renames.push((from.into(), to.into()));
        self
    }

    /// Maps tensor names in the file with `map`, after [renames](Self::rename). All ranks must map alike.
    #[must_use]
    pub fn map_names(self, map: impl Fn(&str) -> String + Send + Sync + 'static) -> Self {
        Self { map: Some(Arc::new(map)), ..self }
    }

    /// Converts values to the types of the parameters, rounded to nearest even. Integers must stay exact. A finite
    /// value that would become infinite is an error.
    #[must_use]
    pub fn convert(self) -> Self {
        Self { converts: true, ..self }
    }

    /// Ignores all tensors whose names in the file begin with this prefix.
    #[must_use]
    pub fn ignore(mut self, prefix: impl Into<String>) -> Self {
        self.ignored.push(prefix.into());
        self
    }

    /// Ignores all tensors that the model lacks.
    #[must_use]
    pub fn ignore_extra(self) -> Self {
        Self { ignores_extra: true, ..self }
    }

    /// Keeps parameters whose names begin with this prefix unchanged, if there is no tensor for them.
    #[must_use]
    pub fn keep(mut self, prefix: impl Into<String>) -> Self {
        self.kept.push(prefix.into());
        self
    }

    /// Keeps all parameters unchanged that have no tensor in the files.
    #[must_use]
    pub fn keep_missing(self) -> Self {
        Self { keeps_missing: true, ..self }
    }

    /// Returns the name of a tensor's parameter.
    fn parameter(&self, tensor: &str) -> String {
        let mut renames = self.renames.iter();
        let renamed = renames.find_map(|(from, to)| Some(format!("{to}{}", tensor.strip_prefix(&**from)?)));
        let renamed = renamed.unwrap_or_else(|| tensor.to_owned());
        self.map.as_ref().map_or_else(|| renamed.clone(), |map| map(&renamed))
    }

    fn ignores(&self, tensor: &str) -> bool {
        self.ignored.iter().any(|prefix| tensor.starts_with(&**prefix))
    }

    fn keeps(&self, parameter: &str) -> bool {
        self.keeps_missing || self.kept.iter().any(|prefix| parameter.starts_with(&**prefix))
    }
}

impl fmt::Debug for WeightOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeightOptions")
            .field("renames", &self.renames)
            .field("converts", &self.converts)
            .field("ignored", &self.ignored)
            .field("ignores_extra", &self.ignores_extra)
            .field("kept", &self.kept)
            .field("keeps_missing", &self.keeps_missing)
            .finish_non_exhaustive()
    }
}

/// The result of [`load_weights`], the same on every rank.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct WeightReport {
    /// The loaded tensors.
    pub loaded: Vec<LoadedTensor>,
    /// The ignored tensors, by their names in the files.
    pub left_out: Vec<String>,
    /// The parameters that stay unchanged.
    pub kept: Vec<String>,
}

/// A loaded tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadedTensor {
    /// The name in the file.
    pub tensor: String,
    /// The parameter.
    pub parameter: String,
    /// The original type such as `bf16`, if the values were converted.
    pub converted_from: Option<String>,
}

/// Loads the parameters of safetensors files of any program on all ranks, and reports the result. All ranks call this
/// with the same options and see the same files.
///
/// `path` is a safetensors file, an index of several such as Hugging Face's `model.safetensors.index.json`, or a
/// directory with such an index or a `model.safetensors`. Each rank reads only the values that it holds, so no
/// process needs memory for the whole model. A tied parameter can be missing, or have the same values. Optimizer
/// state is unchanged.
///
/// These files have no checksums: headers and sizes are checked, values are not. Nothing changes until every rank has
/// read its values. Ranks wait ten minutes for each other.
///
/// # Errors
/// A file is unreadable or contradicts itself; tensors do not match and no option covers it; the ranks have different
/// options: every rank gets the error, with the tensor, and nothing changes on any rank. Communication fails.
pub fn load_weights(
    path: impl AsRef<Path>,
    shards: &mut dyn Shards,
    options: &WeightOptions,
) -> Result<WeightReport> {
    load(&Disk::default(), path.as_ref(), shards, options)
}

pub(super) fn load(
    disk: &Disk,
    path: &Path,
    shards: &mut dyn Shards,
    options: &WeightOptions,
) -> Result<WeightReport> {
    let mut ranks = Ranks::of(shards, TIMEOUT, "load_weights")?;
    ranks.compare(path, Ok(RankRequest::of_weights("")))?;
    let headers =
        if ranks.is_first() { WeightHeaders::read(disk, path) } else { Ok(WeightHeaders::default()) };
    let headers = ranks.agree(headers)?;
    let told = ranks.share(serde_json::to_vec(&headers).expect("it is made of numbers and text"))?;
    let plan = WeightPlan::new(path, &told, shards.infos(), options);
    let plan = ranks.agree(plan)?;
    let WeightPlan { first, index, allowed, report } = &plan;
    let way = agreement::fingerprint(&(report, options.converts));
    let how = format!(
        " with options by which {} tensors are loaded, {} left out and {} parameters kept (digest {way:016x})",
        report.loaded.len(),
        report.left_out.len(),
        report.kept.len()
    );
    ranks.compare(path, Ok(RankRequest::of_weights(&how)))?;
    let checkpoint = Checkpoint { disk, path: first, index, allowed };
    checkpoint.put_in_place(&mut ranks, shards, States::LeaveOut)?;
    Ok(plan.report)
}

/// The headers of all files, which the first rank reads and broadcasts.
#[derive(Debug, Default, Serialize, Deserialize)]
struct WeightHeaders {
    /// The directory of the files.
    directory: PathBuf,
    files: Vec<FileHeader>,
    /// The file of each tensor, if there is an index.
    places: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct FileHeader {
    name: String,
    bytes: u64,
    /// The header without its length.
    header: String,
}

/// The index of several safetensors files in Hugging Face's format.
#[derive(Deserialize)]
struct WeightMap {
    weight_map: BTreeMap<String, String>,
}

impl WeightHeaders {
    fn read(disk: &Disk, path: &Path) -> Result<Self, CheckpointError> {
        let path = &if path.is_dir() { in_directory(path)? } else { path.to_owned() };
        let directory = path.parent().unwrap_or(Path::new("")).to_owned();
        if path.extension().is_none_or(|extension| extension != "json") {
            let files = vec![FileHeader::read(disk, path)?];
            return Ok(Self { directory, files, places: None });
        }
        let bytes =
            disk.read_all(path, INDEX_BYTES_MAX).map_err(|error| CheckpointError::unread(path, &error))?;
        let bytes =
            bytes.ok_or_else(|| CheckpointError::malformed(path, "it is longer than an index can be"))?;
        let WeightMap { weight_map } =
            serde_json::from_slice(&bytes).map_err(|error| CheckpointError::malformed(path, error))?;
        let names: BTreeSet<&String> = weight_map.values().collect();
        let mut files = Vec::with_capacity(names.len());
        for name in names {
            let is_plain = Path::new(name).file_name().is_some_and(|file| file == &**name);
            if !is_plain {
                let reason = format!("{name:?} is not a file name in its directory");
                return Err(CheckpointError::malformed(path, reason));
            }
            files.push(FileHeader::read(disk, &directory.join(name))?);
        }
        Ok(Self { directory, files, places: Some(weight_map) })
    }
}

/// Returns the index or the file of a model in a directory.
fn in_directory(directory: &Path) -> Result<PathBuf, CheckpointError> {
    let candidates = ["model.safetensors.index.json", "model.safetensors"].map(|name| directory.join(name));
    let found = candidates.into_iter().find(|path| path.exists());
    found.ok_or_else(|| {
        let reason = "the directory contains neither model.safetensors.index.json nor model.safetensors";
        CheckpointError::malformed(directory, reason)
    })
}

impl FileHeader {
    fn read(disk: &Disk, path: &Path) -> Result<Self, CheckpointError> {
        let failed = |error: DiskError| CheckpointError::unread(path, &error);
        let malformed = |reason: String| CheckpointError::malformed(path, reason);
        let (file, bytes) = disk.open(path).map_err(failed)?;
        let mut len = [0; 8];
        disk.read_at(&file, path, 0, &mut len).map_err(failed)?;
        if len.trim_ascii_start().starts_with(b"{") && len[4..] != [0; 4] {
            return Err(malformed(
                "it is JSON; an index of safetensors files has a name that ends in .json".to_owned(),
            ));
        }
        let len = u64::from_le_bytes(len);
        if len > HEADER_BYTES_MAX || len + 8 > bytes {
            return Err(malformed(format!(
                "it is not a safetensors file: its header cannot have {len} bytes"
            )));
        }
        let mut header = vec![0; usize::try_from(len).expect("the length was looked at")];
        disk.read_at(&file, path, 8, &mut header).map_err(failed)?;
        let header = String::from_utf8(header).map_err(|error| malformed(error.to_string()))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { name, bytes, header })
    }
}

/// A tensor of a file.
struct FileTensor {
    name: String,
    tensor: StoredTensor,
}

/// The tensors to load, and the ones to ignore.
struct WeightPlan {
    /// A file of the common directory.
    first: PathBuf,
    index: Index,
    allowed: Allowed,
    report: WeightReport,
}

impl WeightPlan {
    fn new(
        path: &Path,
        headers: &[u8],
        infos: &[ParamInfo],
        options: &WeightOptions,
    ) -> Result<Self, CheckpointError> {
        let headers: WeightHeaders =
            serde_json::from_slice(headers).map_err(|error| CheckpointError::malformed(path, error))?;
        let WeightHeaders { directory, files, places } = &headers;
        let first = files.first().map_or_else(|| path.to_owned(), |file| directory.join(&file.name));
        let mut plan = Self {
            first,
            index: Index {
                step: 0,
                steps: 0,
                optimizer: None,
                rank_optimizer: None,
                files: Vec::new(),
                tensors: Vec::new(),
                state: None,
            },
            allowed: Allowed { converts: options.converts, ..Allowed::default() },
            report: WeightReport::default(),
        };
        let mut missing: BTreeSet<&str> = places.iter().flatten().map(|(tensor, _)| &**tensor).collect();
        let known: HashMap<&str, &ParamInfo> = infos.iter().map(|info| (&*info.name, info)).collect();
        let mut given: HashMap<String, String> = HashMap::new();
        for (number, file) in files.iter().enumerate() {
            let path = directory.join(&file.name);
            for found in file.tensors(&path, number)? {
                let is_elsewhere = |place: &String| *place != file.name;
                if places.as_ref().and_then(|places| places.get(&found.name)).is_some_and(is_elsewhere) {
                    // The index names another file for this tensor.
                    plan.report.left_out.push(format!("{} in {}", found.name, file.name));
                    continue;
                }
                missing.remove(&*found.name);
                plan.add(&path, found, &known, &mut given, options)?;
            }
            let header_bytes = 8 + file.header.len() as u64;
            plan.index.files.push(StoredFile {
                name: file.name.clone(),
                bytes: file.bytes,
                header_bytes,
                header_crc32: None,
            });
        }
        if let Some(tensor) = missing.first() {
            let reason = "the index has it, but the file that it names does not";
            return Err(CheckpointError::malformed(path, reason).about(tensor));
        }
        for info in infos.iter().filter(|info| info.same_as.is_none() && !given.contains_key(&info.name)) {
            if !options.keeps(&info.name) {
                let missing = CheckpointError::new(&plan.first, CheckpointProblem::NotInCheckpoint);
                return Err(missing.about(&info.name));
            }
            plan.allowed.kept.insert(info.name.clone());
            plan.report.kept.push(info.name.clone());
        }
        Ok(plan)
    }

    /// Adds a tensor, or ignores it.
    fn add(
        &mut self,
        path: &Path,
        FileTensor { name, tensor }: FileTensor,
        known: &HashMap<&str, &ParamInfo>,
        given: &mut HashMap<String, String>,
        options: &WeightOptions,
    ) -> Result<(), CheckpointError> {
        let parameter = options.parameter(&name);
        let Some(info) = known.get(&*parameter).filter(|_| !options.ignores(&name)) else {
            if !options.ignores(&name) && !options.ignores_extra {
                let about = if parameter == name { name } else { format!("{name} (renamed to {parameter})") };
                return Err(CheckpointError::new(path, CheckpointProblem::NotInModel).about(about));
            }
            self.report.left_out.push(name);
            return Ok(());
        };
        if let Some(other) = given.insert(parameter.clone(), name.clone()) {
            let reason = format!("both {other} and {name} would be loaded into it");
            return Err(CheckpointError::malformed(path, reason).about(parameter));
        }
        let is_converted = tensor.dtype != info.dtype.into();
        let converted_from = is_converted.then(|| tensor.dtype.to_string());
        self.index.tensors.push(StoredTensor { name: TensorName::parameter(&parameter), ..tensor });
        self.report.loaded.push(LoadedTensor { tensor: name, parameter, converted_from });
        Ok(())
    }
}

impl FileHeader {
    /// Returns the tensors of this file, which has number `file`, in the form of a checkpoint without checksums.
    fn tensors(&self, path: &Path, file: usize) -> Result<Vec<FileTensor>, CheckpointError> {
        // This checks that the tensors tile the file, and that each has the bytes of its type and shape.
        let metadata: Metadata =
            serde_json::from_str(&self.header).map_err(|error| CheckpointError::malformed(path, error))?;
        let header_bytes = 8 + self.header.len() as u64;
        let expected = header_bytes.saturating_add(metadata.data_len() as u64);
        if self.bytes != expected {
            return Err(CheckpointError::new(path, CheckpointProblem::Size { expected, got: self.bytes }));
        }
        let names = metadata.offset_keys().into_iter();
        let found = names.map(|name| {
            let info = metadata.info(&name).expect("the name is from the list");
            let (from, _) = info.data_offsets;
            let len = info.shape.iter().product();
            let run = StoredRun { offset: 0, len, file, at: header_bytes + from as u64, crc32: None };
            let tensor = StoredTensor {
                name: TensorName::parameter(&name),
                dtype: StoredType::new(info.dtype),
                shape: info.shape.clone(),
                runs: if len > 0 { vec![run] } else { Vec::new() },
            };
            FileTensor { name, tensor }
        });
        Ok(found.collect())
    }
}

/// The size limit of a safetensors header.
const HEADER_BYTES_MAX: u64 = 100_000_000;
