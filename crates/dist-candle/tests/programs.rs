//! Examples in candle's style that were changed for many processes, run in real processes.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use candle_core::{Device, Tensor};
use dist_parallel::checkpoint::Checkpoints;
use dist_transport::process::Coordinator;
use rstest::rstest;

/// Returns the path of an example; `cargo test` builds examples next to the tests.
fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this test has a path");
    let program = test.ancestors().nth(2).expect("tests lie in deps").join("examples").join(name);
    assert!(
        program.exists(),
        "{} is missing: cargo build -p dist-candle --example {name}",
        program.display()
    );
    program
}

/// Returns the command of an example, without the variables of a surrounding job.
fn command(name: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program(name));
    command.args(arguments).env("DIST_COSTS", "off").env("RAYON_NUM_THREADS", "1");
    for variable in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"] {
        command.env_remove(variable);
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Returns the output of each rank of an example. A single rank runs without a launcher.
#[track_caller]
fn run(name: &str, ranks: usize, arguments: &[&str]) -> Vec<String> {
    if ranks == 1 {
        return vec![stdout(command(name, arguments).output().expect("the program starts"))];
    }
    let coordinator = Coordinator::start("127.0.0.1:0", ranks, "test", None).expect("a free port");
    let start = |rank: usize| {
        let mut command = command(name, arguments);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
        command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", ranks.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", coordinator.address().port().to_string());
        command.env("DIST_COORDINATOR", "external").env("DIST_JOB_ID", "test");
        command.spawn().expect("the program starts")
    };
    let children: Vec<Child> = (0..ranks).map(start).collect();
    children.into_iter().map(|child| stdout(child.wait_with_output().expect("output"))).collect()
}

#[track_caller]
fn stdout(Output { status, stdout, stderr }: Output) -> String {
    assert!(status.success(), "{status}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).expect("text")
}

/// Returns the lines of a program without its description.
fn lines(name: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name).with_extension("rs");
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().filter(|line| !line.starts_with("//!")).map(str::to_owned).collect()
}

/// Returns the number of removed and added lines between two texts.
fn diff(before: &[String], after: &[String]) -> usize {
    // The comparison computes the longest common subsequence, row by row.
    let mut common = vec![0; after.len() + 1];
    for line in before {
        let mut diagonal = 0;
        for (index, other) in after.iter().enumerate() {
            let above = common[index + 1];
            common[index + 1] = if line == other { diagonal + 1 } else { above.max(common[index]) };
            diagonal = above;
        }
    }
    before.len() + after.len() - 2 * common[after.len()]
}

#[test]
fn at_most_6_lines_of_a_candle_program_are_removed_or_added() {
    let (before, after) = (lines("digits_alone"), lines("digits"));
    let count = diff(&before, &after);
    assert!((1..=6).contains(&count), "{count} lines");
    let texts = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
    assert_eq!(diff(&texts(&["a", "b", "c"]), &texts(&["a", "x", "c", "d"])), 3);
    assert_eq!(diff(&texts(&[]), &texts(&["a"])), 1);
}

/// Returns the values of a file that candle has saved.
fn saved(path: &Path) -> BTreeMap<String, Vec<f32>> {
    let tensors: HashMap<String, Tensor> = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let values = |tensor: Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    tensors.into_iter().map(|(name, tensor)| (name, values(tensor))).collect()
}

/// Writes a file with initial values of the digits' network that are the same in every run. candle's own are random.
fn first_values(path: &Path) {
    run("digits_alone", 1, &["0", "0", path.to_str().unwrap()]);
    let drawn: HashMap<String, Tensor> = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let fixed = |(name, tensor): (String, Tensor)| {
        let size =
            if tensor.rank() == 1 { 0.0 } else { (6.0 / tensor.get(0).unwrap().elem_count() as f64).sqrt() };
        let phase = name.bytes().map(f64::from).sum::<f64>();
        let values = Tensor::arange(0f32, tensor.elem_count() as f32, &Device::Cpu).unwrap();
        let values = values.affine(1.7, phase).unwrap().sin().unwrap().affine(size, 0.0).unwrap();
        (name, values.reshape(tensor.shape()).unwrap())
    };
    let fixed: HashMap<String, Tensor> = drawn.into_iter().map(fixed).collect();
    candle_core::safetensors::save(&fixed, path).unwrap();
}

/// Without dropout, because candle's random numbers cannot be seeded.
#[rstest]
fn the_program_trains_the_same_on_many_processes_as_alone(#[values(1, 2, 4)] ranks: usize) {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["alone", "together"].map(|name| folder.path().join(name));
    let files = paths.each_ref().map(|path| path.to_str().unwrap());
    first_values(&paths[0]);
    std::fs::copy(&paths[0], &paths[1]).unwrap();
    let first = saved(&paths[0]);
    let alone = run("digits_alone", 1, &["1", "0", files[0]]);
    let together = run("digits", ranks, &["1", "0", files[1]]);
    let (expected, found) = (saved(&paths[0]), saved(&paths[1]));
    assert!(expected.keys().eq(found.keys()));
    if ranks == 1 {
        assert_eq!((together, found), (alone, expected), "the bits of candle alone");
        return;
    }
    let difference = |name: &str, values: &[f32]| {
        let differences =
            values.iter().zip(&expected[name]).map(|(value, expected)| (value - expected).abs());
        differences.fold(0.0, f32::max)
    };
    for (name, values) in &found {
        assert!(difference(name, values) < 1e-2, "{name} differs by {}", difference(name, values));
        assert!(difference(name, &first[name]) > 2e-2, "{name} was not trained");
    }
}

#[test]
fn the_program_learns_on_two_processes_with_dropout() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("values");
    first_values(&path);
    let outputs = run("digits", 2, &["6", "0.25", path.to_str().unwrap()]);
    let right = |output: &String| -> f32 {
        let last = output.lines().last().unwrap();
        last.split(", ").nth(1).unwrap().trim_end_matches(" % right").parse().unwrap()
    };
    assert!(right(&outputs[0]) > 50.0, "{}", outputs[0]);
    assert_eq!(right(&outputs[0]), right(&outputs[1]), "both have the same model");
}

#[test]
fn the_example_of_an_own_loop_is_short_and_goes_on_where_it_stopped_on_any_number_of_processes() {
    assert!(lines("own_loop").len() <= 80);
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [whole, parts] = folders.each_ref().map(|folder| folder.path().to_str().unwrap());
    // candle's initial values are random, so both start from one checkpoint.
    run("own_loop", 1, &["100", whole]);
    let copy = Command::new("cp").args(["-r", &format!("{whole}/."), parts]).status().unwrap();
    assert!(copy.success());
    let expected = run("own_loop", 1, &["300", whole]);
    run("own_loop", 4, &["200", parts]);
    let found = run("own_loop", 2, &["300", parts]);
    assert_eq!(found[1], "");
    let loss = |output: &str| output.split_whitespace().nth(1).unwrap().parse::<f32>().unwrap();
    let trained = [whole, parts].map(|directory| {
        let file = Path::new(directory).join("trained");
        Checkpoints::at(directory).consolidate(Some(300), &file).unwrap();
        saved(&file)
    });
    assert_eq!(trained[0], trained[1], "the bits of one process");
    assert!((loss(&found[0]) - loss(&expected[0])).abs() < 1e-4, "{found:?} instead of {expected:?}");
    assert!(loss(&expected[0]) < 0.05, "{expected:?}");
}
