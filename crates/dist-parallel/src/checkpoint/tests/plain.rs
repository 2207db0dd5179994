//! Plain safetensors files, for the exchange of parameters with other programs.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fs, io};

use rstest::rstest;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::holder::{ModelDivision, infos};
use super::{on_ranks, same_fault, saved};
use crate::checkpoint::{CheckpointProblem, Checkpoints, WeightOptions, load_weights};

#[rstest]
fn a_consolidated_checkpoint_is_a_file_that_the_safetensors_crate_reads(
    #[values(1, 3, 4)] ranks: usize,
    #[values(ModelDivision::Replicated, ModelDivision::Even, ModelDivision::Scattered)]
    division: ModelDivision,
) {
    let directory = tempfile::tempdir().unwrap();
    let checkpoints = directory.path().join("checkpoints");
    saved(&checkpoints, ranks, division, &[3, 4]);
    for (step, expected) in [(None, 4), (Some(3), 3)] {
        let file = directory.path().join(format!("{expected}.safetensors"));
        Checkpoints::at(&checkpoints).consolidate(step, &file).unwrap();
        let bytes = fs::read(&file).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let mut names = tensors.names();
        names.sort_unstable();
        assert_eq!(names, ["embed", "frozen", "half.weight", "nothing", "scale", "unused"]);
        assert_eq!(tensors.tensor("half.weight").unwrap().shape(), [7, 2]);
        assert_eq!(tensors.tensor("scale").unwrap().dtype(), Dtype::F64);
        let loaded = on_ranks(3, ModelDivision::Even, move |holder| {
            let (mut trainer, _) = holder.parts();
            load_weights(&file, &mut trainer, &WeightOptions::new()).unwrap();
            (holder.is_of(expected, false), holder.loaded)
        });
        assert_eq!(loaded, [(true, 1); 3]);
    }
    let left = fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(left, 3, "the checkpoints, and a file for each step");
}

#[test]
fn a_changed_byte_is_not_consolidated() {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), 2, ModelDivision::Even, &[1]);
    let part = directory.path().join("checkpoint-1-step-1/part-2-of-2.safetensors");
    let mut bytes = fs::read(&part).unwrap();
    let header = 8 + usize::try_from(u64::from_le_bytes(*bytes.first_chunk().unwrap())).unwrap();
    let file = directory.path().join("all.safetensors");
    let mut faults = Vec::new();
    for place in header..bytes.len() {
        bytes[place] ^= 1;
        fs::write(&part, &bytes).unwrap();
        bytes[place] ^= 1;
        if let Err(crate::Error::Checkpoint(fault)) =
            Checkpoints::at(directory.path()).consolidate(None, &file)
        {
            assert_eq!((&fault.path, &fault.problem), (&part, &CheckpointProblem::Corrupted), "byte {place}");
            assert!(!file.exists());
            faults.push(fault.tensor.unwrap());
        } else {
            fs::remove_file(&file).unwrap();
        }
    }
    // The optimizer state is not read.
    let parameters: usize = ["scale", "frozen", "unused", "half.weight", "embed"]
        .iter()
        .filter(|name| faults.iter().any(|fault| fault == *name))
        .count();
    assert!(parameters >= 3 && !faults.iter().any(|name| name.contains('/')), "{faults:?}");
}

/// Every operation fails once. The file is then complete or missing, without leftovers.
#[test]
fn a_failure_at_any_moment_leaves_no_unfinished_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("all.safetensors");
    let mut checkpoints = Checkpoints::at(directory.path().join("checkpoints"));
    saved(&directory.path().join("checkpoints"), 2, ModelDivision::Even, &[1]);
    let mut left_behind = Vec::new();
    for moment in 0.. {
        let acts = Arc::new(AtomicUsize::new(0));
        let counted = acts.clone();
        checkpoints.disk.mutation_check = Some(Arc::new(move |_, _| {
            let now = counted.fetch_add(1, Ordering::Relaxed) == moment;
            if now { Err(io::Error::other("no space left")) } else { Ok(()) }
        }));
        let outcome = checkpoints.consolidate(None, &file);
        let names = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
        names.retain(|name| name != "checkpoints");
        if acts.load(Ordering::Relaxed) <= moment {
            assert!(outcome.is_ok() && names == ["all.safetensors"], "{outcome:?}, {names:?}");
            break;
        }
        assert!(outcome.unwrap_err().to_string().contains("no space left"));
        left_behind.push(names);
        let _removed = fs::remove_file(&file);
    }
    // The file gets its name before the name is synced, which opens and syncs the directory.
    assert_eq!(left_behind.split_off(left_behind.len() - 2), [["all.safetensors"]; 2]);
    assert!(left_behind.len() >= 10 && left_behind.iter().all(Vec::is_empty), "{left_behind:?}");
}

#[test]
fn a_file_that_cannot_be_written_is_not_removed() {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), 1, ModelDivision::Even, &[1]);
    let inside = directory.path().join("all.safetensors.tmp/inside");
    fs::create_dir_all(&inside).unwrap();
    let file = directory.path().join("all.safetensors");
    assert!(Checkpoints::at(directory.path()).consolidate(None, &file).is_err());
    assert!(inside.exists());
}

/// The types and shapes of tensors by name.
type Tensors = HashMap<String, (Dtype, Vec<usize>)>;

/// Writes tensors as another program would.
fn write(path: &Path, change: impl FnOnce(&mut Tensors)) {
    let mut tensors: Tensors = infos()
        .into_iter()
        .filter(|info| info.same_as.is_none())
        .map(|info| {
            let dtype = match info.dtype.size() {
                8 => Dtype::F64,
                4 => Dtype::F32,
                _ if info.name == "frozen" => Dtype::F16,
                _ => Dtype::BF16,
            };
            (info.name, (dtype, info.shape))
        })
        .collect();
    change(&mut tensors);
    let zeros = [0; 1000];
    let views: Vec<(String, TensorView<'_>)> = tensors
        .into_iter()
        .map(|(name, (dtype, shape))| {
            let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (name, TensorView::new(dtype, shape, &zeros[..bytes]).unwrap())
        })
        .collect();
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

type TensorChange = fn(&mut Tensors);

#[rstest]
#[case::missing(|t: &mut Tensors| drop(t.remove("scale")), Some("scale"), "the checkpoint does not")]
#[case::unknown(|t: &mut Tensors| drop(t.insert("more".into(), (Dtype::F32, vec![1]))), Some("more"), "the model does not")]
#[case::shape(|t: &mut Tensors| t.get_mut("embed").unwrap().1 = vec![15], Some("embed"), "[5, 3] f32 in the model")]
#[case::dtype(|t: &mut Tensors| t.get_mut("embed").unwrap().0 = Dtype::F16, Some("embed"), "f16 in the checkpoint")]
#[case::integers(|t: &mut Tensors| t.get_mut("embed").unwrap().0 = Dtype::I32, Some("embed"), "[5, 3] i32 in the checkpoint")]
fn a_file_of_another_model_is_refused(
    #[case] change: TensorChange,
    #[case] tensor: Option<&str>,
    #[case] reason: &str,
) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    write(&path, change);
    let fault = refused(&path);
    assert_eq!((&fault.path, fault.tensor.as_deref()), (&path, tensor), "{fault}");
    assert!(fault.to_string().contains(reason), "{fault}");
}

#[test]
fn a_tied_tensor_can_be_present_or_missing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    for with in [false, true] {
        write(&path, |tensors| {
            if with {
                tensors.insert("head".to_owned(), (Dtype::F32, vec![5, 3]));
            }
        });
        let path = path.clone();
        on_ranks(2, ModelDivision::Even, move |holder| {
            let (mut trainer, _) = holder.parts();
            load_weights(&path, &mut trainer, &WeightOptions::new()).unwrap();
        });
    }
}

#[test]
fn other_values_for_another_name_of_an_earlier_one_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    write(&path, |tensors| drop(tensors.insert("head".to_owned(), (Dtype::F32, vec![5, 3]))));
    let mut bytes = fs::read(&path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let (_, end) = header.info("head").unwrap().data_offsets;
    let start = 8 + usize::try_from(u64::from_le_bytes(*bytes.first_chunk().unwrap())).unwrap();
    bytes[start + end - 1] = 1;
    fs::write(&path, bytes).unwrap();
    let fault = refused(&path);
    let tied = CheckpointProblem::Tied { same_as: "embed".to_owned() };
    assert_eq!((fault.tensor.as_deref(), fault.problem), (Some("head"), tied));
}

#[rstest]
#[case::nothing(|_: Vec<u8>| Vec::new())]
#[case::short(|mut bytes: Vec<u8>| { bytes.pop(); bytes })]
#[case::long(|mut bytes: Vec<u8>| { bytes.push(0); bytes })]
#[case::a_huge_header(|mut bytes: Vec<u8>| { bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes()); bytes })]
#[case::a_long_header(|mut bytes: Vec<u8>| { bytes[..8].copy_from_slice(&90_000_000_u64.to_le_bytes()); bytes })]
#[case::no_json(|mut bytes: Vec<u8>| { bytes[9] = b'!'; bytes })]
fn a_file_that_is_none_is_refused(#[case] change: fn(Vec<u8>) -> Vec<u8>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    write(&path, |_| {});
    fs::write(&path, change(fs::read(&path).unwrap())).unwrap();
    assert_eq!(refused(&path).path, path);
}

#[test]
fn a_missing_file_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let fault = refused(&path);
    assert_eq!((fault.path, fault.problem), (path, CheckpointProblem::Missing));
}

/// Returns the error that all ranks get, and checks that nothing changes.
fn refused(path: &Path) -> crate::CheckpointError {
    let path = path.to_owned();
    same_fault(on_ranks(2, ModelDivision::Even, move |holder| {
        holder.fill(5);
        let (mut trainer, _) = holder.parts();
        let loaded = load_weights(&path, &mut trainer, &WeightOptions::new());
        assert!(holder.is_of(5, true) && holder.loaded == 0, "nothing is changed");
        loaded
    }))
}

#[test]
fn a_rank_that_comes_later_is_waited_for_as_by_every_other_call_that_loads() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("all.safetensors");
    write(&file, |_| ());
    let loaded = on_ranks(2, ModelDivision::Even, move |holder| {
        if holder.comm.rank() == 0 {
            holder.comm.runtime().sleep(std::time::Duration::from_secs(300));
        }
        let (mut trainer, _) = holder.parts();
        load_weights(&file, &mut trainer, &WeightOptions::new()).unwrap();
        holder.loaded
    });
    assert_eq!(loaded, [1; 2]);
}
