//! Weights of other programs, with other names, types and files than the model's.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use half::{bf16, f16};
use rstest::rstest;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::holder::{DIVISIONS, Holder, ModelDivision};
use super::{on_ranks, same_fault};
use crate::checkpoint::disk::{Disk, DiskOperation};
use crate::checkpoint::{CheckpointProblem, Shards, WeightOptions, weights};
use crate::{Values, load_weights};

/// A tensor: its name, type, shape and bytes.
type Tensor = (&'static str, Dtype, Vec<usize>, Vec<u8>);

fn numbers(count: u8) -> impl Iterator<Item = f32> {
    (0..count).map(f32::from)
}

/// Returns the tensors of a program that uses names `model.NAME`, other types and another head.
fn tensors() -> Vec<Tensor> {
    let halves = numbers(15).flat_map(|number| bf16::from_f32(number).to_le_bytes()).collect();
    let singles = numbers(14).flat_map(f32::to_le_bytes).collect();
    let integers = (0..11_i64).flat_map(i64::to_le_bytes).collect();
    vec![
        ("model.embed", Dtype::BF16, vec![5, 3], halves),
        ("model.half.weight", Dtype::F32, vec![7, 2], singles),
        ("model.nothing", Dtype::F32, vec![0, 4], Vec::new()),
        ("model.scale", Dtype::F32, Vec::new(), 2.5_f32.to_le_bytes().to_vec()),
        ("model.frozen", Dtype::I64, vec![11], integers),
        ("model.position_ids", Dtype::I64, vec![1, 2], vec![0; 16]),
        ("lm_head.weight", Dtype::F32, vec![2, 2], vec![0; 16]),
    ]
}

fn write(path: &Path, tensors: &[Tensor]) {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Writes three files and their index.
fn write_sharded(directory: &Path, tensors: &[Tensor]) {
    let mut places = Vec::new();
    for (number, tensors) in tensors.chunks(3).enumerate() {
        let name = format!("model-{number:05}-of-00003.safetensors");
        write(&directory.join(&name), tensors);
        places.extend(tensors.iter().map(|(tensor, ..)| format!("{tensor:?}: {name:?}")));
    }
    let index = format!("{{\"metadata\": {{\"total_size\": 1}}, \"weight_map\": {{{}}}}}", places.join(", "));
    fs::write(directory.join("model.safetensors.index.json"), index).unwrap();
}

fn options() -> WeightOptions {
    WeightOptions::new()
        .rename("model.", "")
        .convert()
        .ignore("lm_head.")
        .ignore("model.position_ids")
        .keep("unused")
}

/// Returns `true` if a rank has the values of the files, and those of step 5 for missing tensors.
fn is_loaded(holder: &mut Holder) -> bool {
    let mut expected = Vec::new();
    let before: Vec<Vec<f64>> =
        holder.values.iter().map(|values| as_f64(values.slice(0, values.len()))).collect();
    let (trainer, _) = holder.parts();
    let infos = trainer.infos().to_vec();
    for (chunk, before) in trainer.parameters().chunks.into_iter().zip(before) {
        let whole: Vec<f64> = match &*infos[chunk.parameter].name {
            "scale" => vec![2.5],
            "unused" => {
                expected.push(before);
                continue;
            }
            _ => (0..u8::try_from(infos[chunk.parameter].len()).unwrap()).map(f64::from).collect(),
        };
        expected.push(whole[chunk.offset..chunk.offset + chunk.len].to_vec());
    }
    let values = holder.values.iter();
    let is_as_expected = values.map(|values| as_f64(values.slice(0, values.len()))).eq(expected);
    is_as_expected && holder.loaded == 1
}

fn as_f64(values: Values<'_>) -> Vec<f64> {
    match values {
        Values::F32(values) => values.iter().map(|&value| value.into()).collect(),
        Values::F64(values) => values.to_vec(),
        Values::F16(values) => values.iter().copied().map(f16::to_f64).collect(),
        Values::Bf16(values) => values.iter().copied().map(bf16::to_f64).collect(),
    }
}

#[rstest]
fn weights_of_another_program_are_renamed_converted_and_left_out_as_the_user_says(
    #[values(1, 2, 3)] ranks: usize,
    #[values(0, 1, 2, 3, 4)] division: usize,
    #[values("model.safetensors", "model.safetensors.index.json", "")] name: &str,
) {
    let directory = tempfile::tempdir().unwrap();
    if name == "model.safetensors" {
        write(&directory.path().join(name), &tensors());
    } else {
        write_sharded(directory.path(), &tensors());
    }
    let path = directory.path().join(name);
    let reports = on_ranks(ranks, DIVISIONS[division], move |holder| {
        holder.fill(5);
        let report = load_weights(&path, &mut holder.parts().0, &options()).unwrap();
        assert!(is_loaded(holder));
        report
    });
    assert!(reports.iter().all(|report| *report == reports[0]));
    let mut loaded: Vec<(&str, &str, Option<&str>)> = reports[0]
        .loaded
        .iter()
        .map(|loaded| (&*loaded.tensor, &*loaded.parameter, loaded.converted_from.as_deref()))
        .collect();
    loaded.sort_unstable();
    let expected = [
        ("model.embed", "embed", Some("bf16")),
        ("model.frozen", "frozen", Some("i64")),
        ("model.half.weight", "half.weight", Some("f32")),
        ("model.nothing", "nothing", None),
        ("model.scale", "scale", Some("f32")),
    ];
    assert_eq!(loaded, expected);
    let mut left_out = reports[0].left_out.clone();
    left_out.sort_unstable();
    assert_eq!(left_out, ["lm_head.weight", "model.position_ids"]);
    assert_eq!(reports[0].kept, ["unused"]);
}

#[rstest]
#[case::extra(|o: WeightOptions| o, None, "the model does not")]
#[case::renamed_extra(|o: WeightOptions| o.rename("", "a."), Some("(renamed to a.model."), "the model does not")]
#[case::missing(|o: WeightOptions| o.rename("model.", "").ignore_extra().convert(), Some("unused"), "the checkpoint does not")]
#[case::types(|o: WeightOptions| o.rename("model.", "").ignore_extra().keep_missing(), None, "in the model and")]
#[case::twice(|o: WeightOptions| o.map_names(|_| "embed".to_owned()), Some("embed"), "would be loaded into it")]
fn tensors_that_no_option_allows_are_refused(
    #[case] change: fn(WeightOptions) -> WeightOptions,
    #[case] tensor: Option<&str>,
    #[case] reason: &str,
) {
    let directory = tempfile::tempdir().unwrap();
    write_sharded(directory.path(), &tensors());
    let fault = refused(directory.path(), change(WeightOptions::new()));
    let named = fault.tensor.as_deref().unwrap_or("");
    assert!(tensor.is_none_or(|tensor| named.contains(tensor)) && !named.is_empty(), "{fault}");
    assert!(fault.to_string().contains(reason), "{fault}");
}

#[test]
fn everything_that_does_not_fit_can_be_left_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    write_sharded(directory.path(), &tensors());
    let path = directory.path().to_owned();
    let loaded = on_ranks(2, ModelDivision::Even, move |holder| {
        holder.fill(5);
        let options = WeightOptions::new().ignore_extra().keep_missing();
        let report = load_weights(&path, &mut holder.parts().0, &options).unwrap();
        (report.loaded.len(), report.left_out.len(), report.kept.len(), holder.is_of(5, true))
    });
    assert_eq!(loaded, [(0, 7, 6, true); 2]);
}

#[rstest]
#[case::a_value_that_does_not_fit(("model.frozen", Dtype::F32, vec![11], [70_000_f32; 11].map(f32::to_le_bytes).concat()), "the value 70000 cannot be converted to f16")]
#[case::another_shape(("model.frozen", Dtype::F32, vec![1, 11], vec![0; 44]), "[11] f16 in the model and [1, 11] f32")]
#[case::a_type_of_no_numbers(("model.frozen", Dtype::C64, vec![11], vec![0; 88]), "[11] c64 in the checkpoint")]
fn a_tensor_that_cannot_be_converted_is_named(#[case] tensor: Tensor, #[case] reason: &str) {
    let directory = tempfile::tempdir().unwrap();
    let mut tensors = tensors();
    tensors[4] = tensor;
    write_sharded(directory.path(), &tensors);
    let fault = refused(directory.path(), options());
    assert!(fault.to_string().contains(reason), "{fault}");
    assert_eq!(fault.path, directory.path().join("model-00001-of-00003.safetensors"));
}

type IndexChange = fn(&Path);

#[rstest]
#[case::a_file_is_missing(|d: &Path| fs::remove_file(d.join("model-00002-of-00003.safetensors")).unwrap(), "it does not exist")]
#[case::a_file_is_elsewhere(|d: &Path| replace(d, "model-00002", "../model-00002"), "is not a file name")]
#[case::a_tensor_is_nowhere(|d: &Path| replace(d, "lm_head.weight", "lm_head.weights"), "the file that it names does not")]
#[case::no_map(|d: &Path| replace(d, "weight_map", "weights"), "weight_map")]
#[case::neither(|d: &Path| fs::remove_file(d.join("model.safetensors.index.json")).unwrap(), "contains neither")]
fn an_index_that_is_wrong_is_refused(#[case] harm: IndexChange, #[case] reason: &str) {
    let directory = tempfile::tempdir().unwrap();
    write_sharded(directory.path(), &tensors());
    harm(directory.path());
    let fault = refused(directory.path(), options());
    assert!(fault.to_string().contains(reason), "{fault}");
}

fn replace(directory: &Path, from: &str, to: &str) {
    let path = directory.join("model.safetensors.index.json");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(from));
    fs::write(path, text.replace(from, to)).unwrap();
}

#[test]
fn an_index_of_another_name_is_reported_as_an_index() {
    let directory = tempfile::tempdir().unwrap();
    write_sharded(directory.path(), &tensors());
    let path = directory.path().join("model.safetensors");
    fs::rename(directory.path().join("model.safetensors.index.json"), &path).unwrap();
    let fault = refused(&path, options());
    assert!(fault.to_string().contains("it is JSON; an index"), "{fault}");
}

#[test]
fn ranks_with_different_options_get_an_error() {
    let directory = tempfile::tempdir().unwrap();
    write_sharded(directory.path(), &tensors());
    let path = directory.path().to_owned();
    let results = on_ranks(3, ModelDivision::Even, move |holder| {
        holder.fill(5);
        let options =
            if holder.comm.rank() == 2 { options().keep_missing().ignore("model.frozen") } else { options() };
        let options = if holder.comm.rank() == 2 { options.keep("frozen") } else { options };
        let loaded = load_weights(&path, &mut holder.parts().0, &options);
        assert!(holder.is_of(5, true) && holder.loaded == 0, "nothing is changed");
        loaded
    });
    let fault = same_fault(results);
    assert!(matches!(fault.problem, CheckpointProblem::RanksDiffer { rank: 2, other: 0, .. }), "{fault}");
}

/// Returns the error that all ranks get, and checks that nothing changes.
fn refused(path: &Path, options: WeightOptions) -> crate::CheckpointError {
    let path = path.to_owned();
    same_fault(on_ranks(2, ModelDivision::Even, move |holder| {
        holder.fill(5);
        let loaded = load_weights(&path, &mut holder.parts().0, &options);
        assert!(holder.is_of(5, true) && holder.loaded == 0, "nothing is changed");
        loaded
    }))
}

/// No process needs memory for the whole of a sharded model.
#[test]
fn a_rank_reads_only_its_own_values() {
    let directory = tempfile::tempdir().unwrap();
    write_sharded(directory.path(), &tensors());
    let path = directory.path().to_owned();
    let read = on_ranks(3, ModelDivision::Even, move |holder| {
        let bytes = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&bytes);
        let mutation_check = move |act, _: &Path| {
            if let DiskOperation::Read { bytes } = act {
                counted.fetch_add(bytes as u64, Ordering::Relaxed);
            }
            Ok(())
        };
        let disk = Disk { mutation_check: Some(Arc::new(mutation_check)), ..Disk::default() };
        weights::load(&disk, &path, &mut holder.parts().0, &options()).unwrap();
        bytes.load(Ordering::Relaxed)
    });
    let headers: u64 = (0..3)
        .map(|number| {
            let file = directory.path().join(format!("model-{number:05}-of-00003.safetensors"));
            8 + u64::from_le_bytes(*fs::read(file).unwrap().first_chunk().unwrap())
        })
        .sum();
    let values = (2 * 15 + 4 * 14 + 4 + 8 * 11) as u64;
    assert_eq!(read.iter().sum::<u64>(), headers + values, "{read:?}");
    assert!(read[1..].iter().all(|&bytes| bytes < values / 3 * 2), "{read:?}");
}
