//! Indexes that contradict themselves, and models that do not match the checkpoint.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use rstest::rstest;

use super::holder::{Holder, ModelDivision, infos};
use super::{load, same_fault, saved};
use crate::checkpoint::index::Index;
use crate::checkpoint::{CheckpointError, CheckpointProblem, Checkpoints, INDEX};
use crate::{Communicator, FloatType, ParamInfo};

/// Each case has the damage, the tensor and a part of the message.
#[rstest]
#[case::a_gap(|i: &mut Index| i.tensors[1].runs[1].offset += 1, "half.weight", "value 6 is missing")]
#[case::an_overlap(|i: &mut Index| i.tensors[1].runs[1].offset -= 1, "half.weight", "value 5 occurs twice")]
#[case::too_short(|i: &mut Index| drop(i.tensors[1].runs.pop()), "half.weight", "value 6 is missing")]
#[case::too_long(|i: &mut Index| i.tensors[1].shape = vec![13], "half.weight", "value 13 is more than its shape has")]
#[case::no_values(|i: &mut Index| i.tensors[1].runs[0].len = 0, "half.weight", "value 0 is missing")]
#[case::past_the_end(|i: &mut Index| i.tensors[1].runs[1].at += 1 << 20, "half.weight", "do not lie in file number 1")]
#[case::in_the_header(|i: &mut Index| i.tensors[1].runs[1].at = 3, "half.weight", "do not lie in file number 1")]
#[case::a_huge_place(|i: &mut Index| i.tensors[1].runs[1].at = u64::MAX, "half.weight", "do not lie in file number 1")]
#[case::a_huge_run(|i: &mut Index| i.tensors[1].runs[1].len = usize::MAX, "half.weight", "exceed the largest number")]
#[case::a_huge_shape(|i: &mut Index| i.tensors[1].shape = vec![usize::MAX, 3], "half.weight", "do not fit into memory")]
#[case::no_such_file(|i: &mut Index| i.tensors[1].runs[1].file = 2, "half.weight", "do not lie in file number 2")]
#[case::no_checksum(|i: &mut Index| i.tensors[1].runs[1].crc32 = None, "half.weight", "the wrong number of checksums")]
#[case::too_many_checksums(|i: &mut Index| i.tensors[1].runs[1].crc32 = Some(vec![1, 2]), "half.weight", "the wrong number of checksums")]
#[case::twice(|i: &mut Index| i.tensors.push(i.tensors[1].clone()), "half.weight", "it occurs twice")]
#[case::wider(|i: &mut Index| i.tensors[1].dtype = FloatType::F64.into(), "half.weight", "do not lie in file")]
#[case::in_the_way(|i: &mut Index| i.tensors[1].runs[1].at -= 4, "", "is used twice")]
#[case::unused(|i: &mut Index| drop(i.tensors.pop()), "", "belongs to no tensor")]
#[case::no_header_checksum(|i: &mut Index| i.files[0].header_crc32 = None, "", "has no checksum")]
#[case::elsewhere(|i: &mut Index| i.files[0].name = "../part".to_owned(), "", "is not a unique file name")]
#[case::absolute(|i: &mut Index| i.files[0].name = "/etc/passwd".to_owned(), "", "is not a unique file name")]
#[case::one_file_twice(|i: &mut Index| i.files[0].name = i.files[1].name.clone(), "", "is not a unique file name")]
#[case::a_long_header(|i: &mut Index| i.files[0].header_bytes = u64::MAX, "", "longer than the file")]
fn an_index_that_lies_is_refused(#[case] lie: fn(&mut Index), #[case] tensor: &str, #[case] reason: &str) {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), 2, ModelDivision::Even, &[1]);
    rewrite(directory.path(), lie);
    let fault = refused(directory.path(), infos());
    assert_eq!(fault.tensor.as_deref().unwrap_or(""), tensor, "{fault}");
    assert!(fault.to_string().contains(reason), "{fault}");
}

/// Changes the index and updates its checksum.
fn rewrite(directory: &Path, change: impl FnOnce(&mut Index)) {
    let path = directory.join("checkpoint-1-step-1").join(INDEX);
    let mut index = Index::decode(&path, &fs::read(&path).unwrap()).unwrap();
    change(&mut index);
    fs::write(path, index.encode().unwrap()).unwrap();
}

/// Returns the error that two ranks with this model get, and checks that nothing changes.
#[track_caller]
fn refused(directory: &Path, infos: Vec<ParamInfo>) -> CheckpointError {
    let path = directory.to_owned();
    let results = dist_transport::sim::run(1, 2, move |transport| {
        let comm = Communicator::new(transport);
        let mut holder = Holder::with_infos(comm, ModelDivision::Even, infos.clone());
        holder.fill(5);
        let loaded = load(&mut Checkpoints::at(&path), &mut holder);
        assert!(holder.is_of(5, true) && holder.loaded == 0, "nothing is changed");
        loaded
    });
    same_fault(results.results)
}

#[rstest]
#[case::shape(|m: &mut Vec<ParamInfo>| m[0].shape = vec![3, 5], "embed", "[3, 5] f32 in the model and [5, 3] f32 in the checkpoint")]
#[case::dtype(|m: &mut Vec<ParamInfo>| m[6].dtype = FloatType::F64, "unused", "[2] f64 in the model and [2] f32 in the checkpoint")]
#[case::new(|m: &mut Vec<ParamInfo>| m.push(ParamInfo::new("new", [1], FloatType::F32)), "new", "the checkpoint does not")]
#[case::gone(|m: &mut Vec<ParamInfo>| drop(m.pop()), "unused", "the model does not")]
#[case::renamed(|m: &mut Vec<ParamInfo>| m[3].name = "gauge".to_owned(), "gauge", "the checkpoint does not")]
#[case::untied(|m: &mut Vec<ParamInfo>| m[5].same_as = None, "head", "the checkpoint does not")]
fn a_foreign_model_is_refused(
    #[case] change: fn(&mut Vec<ParamInfo>),
    #[case] tensor: &str,
    #[case] reason: &str,
) {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), 2, ModelDivision::Even, &[1]);
    let mut infos = infos();
    change(&mut infos);
    let fault = refused(directory.path(), infos);
    assert_eq!(fault.tensor.as_deref(), Some(tensor), "{fault}");
    assert!(fault.to_string().contains(reason), "{fault}");
}

/// A parameter has all tensors of the optimizer state or none.
#[rstest]
#[case::missing(|i: &mut Index| i.tensors.retain(|t| t.name.to_string() != "optimizer/beta2_power/scale"), "optimizer/beta2_power/scale", "checkpoint does not")]
#[case::foreign(|i: &mut Index| rename(i, "optimizer/mean/scale", "median"), "optimizer/median/scale", "the model does not")]
#[case::of_another_shape(|i: &mut Index| find(i, "optimizer/mean/embed").shape = vec![15], "optimizer/mean/embed", "[5, 3] f32 in the model")]
fn a_foreign_state_is_refused(#[case] change: fn(&mut Index), #[case] tensor: &str, #[case] reason: &str) {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), 1, ModelDivision::Even, &[1]);
    let checkpoint = directory.path().join("checkpoint-1-step-1");
    rewrite(directory.path(), |index| {
        change(index);
        // The tensors tile the file again, so only the list of the optimizer is wrong.
        tile(index, &checkpoint);
    });
    let fault = refused(directory.path(), infos());
    assert_eq!(fault.tensor.as_deref(), Some(tensor), "{fault}");
    assert!(fault.to_string().contains(reason), "{fault}");
}

fn find<'i>(index: &'i mut Index, name: &str) -> &'i mut crate::checkpoint::index::StoredTensor {
    index.tensors.iter_mut().find(|tensor| tensor.name.to_string() == name).unwrap()
}

fn rename(index: &mut Index, name: &str, state: &str) {
    find(index, name).name.state = Some(state.to_owned());
}

/// Places the runs next to each other, and truncates the file at their end.
fn tile(index: &mut Index, checkpoint: &Path) {
    let file = &mut index.files[0];
    let mut end = file.header_bytes;
    for tensor in &mut index.tensors {
        for run in &mut tensor.runs {
            run.at = end;
            end += (run.len * tensor.dtype.size()) as u64;
        }
    }
    file.bytes = end;
    let opened = fs::File::options().write(true).open(checkpoint.join(&file.name)).unwrap();
    opened.set_len(end).unwrap();
}

#[test]
fn a_newer_version_is_named() {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), 1, ModelDivision::Even, &[1]);
    let path = directory.path().join("checkpoint-1-step-1").join(INDEX);
    let text = fs::read_to_string(&path).unwrap().replacen("\"version\":1", "\"version\":2", 1);
    fs::write(&path, text).unwrap();
    assert_eq!(refused(directory.path(), infos()).problem, CheckpointProblem::Version(2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// An index with arbitrary numbers is refused, or all its values have valid places.
    #[test]
    fn an_index_of_any_numbers_is_refused_or_right(
        runs in prop::collection::vec((any_number(), any_number(), any_number(), any_number()), 0..4),
        shape in prop::collection::vec(any_number(), 0..3),
        files in prop::collection::vec((any_number(), any_number()), 0..3),
    ) {
        use crate::checkpoint::index::{StoredRun, StoredFile, StoredTensor, TensorName};
        let count = |number: u64| usize::try_from(number).unwrap();
        let index = Index {
            step: 0,
            steps: 0,
            optimizer: None,
            rank_optimizer: None,
            files: files
                .into_iter()
                .enumerate()
                .map(|(name, (bytes, header_bytes))| {
                    StoredFile { name: name.to_string(), bytes, header_bytes, header_crc32: Some(0) }
                })
                .collect(),
            state: None,
            tensors: vec![StoredTensor {
                name: TensorName::parameter("w"),
                dtype: FloatType::F32.into(),
                shape: shape.into_iter().map(count).collect(),
                runs: runs
                    .into_iter()
                    .map(|(offset, len, file, at)| {
                        let crc32 = Some(vec![0; usize::from(len > 0)]);
                        StoredRun { offset: count(offset), len: count(len), file: count(file), at, crc32 }
                    })
                    .collect(),
            }],
        };
        if index.check(Path::new("index")).is_ok() {
            let tensor = &index.tensors[0];
            let values: u128 = tensor.shape.iter().map(|&dim| dim as u128).product();
            prop_assert_eq!(tensor.runs.iter().map(|run| run.len as u128).sum::<u128>(), values);
            for run in &tensor.runs {
                let file = &index.files[run.file];
                prop_assert!(run.at >= file.header_bytes);
                prop_assert!(u128::from(run.at) + 4 * run.len as u128 <= u128::from(file.bytes));
            }
            let sizes: u128 = index.files.iter().map(|file| u128::from(file.bytes - file.header_bytes)).sum();
            prop_assert_eq!(sizes, 4 * values);
        }
    }

    /// Decoding arbitrary bytes returns an error.
    #[test]
    fn any_bytes_are_no_index(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Index::decode(Path::new("index"), &bytes).is_err());
    }
}

/// Returns small numbers, which often fit together, and the largest ones.
fn any_number() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => 0..9_u64,
        2 => (0..9_u64).prop_map(|number| 4 * number),
        1 => Just(u64::MAX),
        1 => (u64::MAX / 4 - 2)..(u64::MAX / 4 + 3),
    ]
}
