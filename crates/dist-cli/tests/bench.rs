//! `distctl bench` as a user runs it: points are measured and checked between real processes.
#![allow(clippy::unwrap_used, reason = "what a test prepares must work")]

mod documented;

use std::process::{Command, Output};

use rstest::rstest;
use serde_json::Value;

fn distctl(arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_distctl"));
    command.env("DIST_COSTS", "off");
    command.args(arguments.split_whitespace()).output().unwrap()
}

/// Returns stderr without progress messages, which appear on a busy machine.
fn told(output: &Output) -> String {
    let is_progress = |line: &&str| {
        let seconds = line.strip_prefix("distctl: ").and_then(|line| line.split_once(" s: "));
        seconds.is_some_and(|(seconds, _)| seconds.parse::<u64>().is_ok())
    };
    let text = String::from_utf8_lossy(&output.stderr);
    text.split_inclusive('\n').filter(|line| !is_progress(line)).collect()
}

#[track_caller]
fn lines(arguments: &str) -> Vec<Value> {
    let output = distctl(arguments);
    assert!(output.status.success(), "{output:?}");
    assert!(told(&output).is_empty(), "{output:?}");
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[rstest]
#[case("all_reduce --dtype f32 --op sum", &[8, 1024])]
#[case("all_reduce --dtype bf16 --op mean --order any --algorithm ring", &[8, 1024])]
#[case("all_reduce --dtype i8 --op product", &[8, 1024])]
#[case("all_reduce --transport shm --buffers shared --algorithm direct/write_to_all", &[8, 1024])]
#[case("reduce_scatter --dtype f64", &[0, 1008])]
#[case("all_gather --dtype u32", &[8, 1024])]
#[case("broadcast --dtype f16", &[8, 1024])]
#[case("reduce --dtype i64 --op min", &[8, 1024])]
#[case("gather --dtype u8", &[8, 1024])]
#[case("scatter --dtype f32", &[0, 1020])]
#[case("all_to_all --dtype i32 --algorithm bruck", &[0, 1020])]
#[case("scan --dtype f64 --op max", &[8, 1024])]
#[case("barrier", &[0])]
#[case("pingpong", &[8, 1024])]
#[case("stream", &[8, 1024])]
#[case("sendrecv", &[8, 1024])]
fn each_point_is_a_checked_line(#[case] what: &str, #[case] bytes: &[u64]) {
    let lines = lines(&format!("bench {what} --ranks 3 --bytes 8,1K --check --json"));
    assert_eq!(lines.iter().map(|line| line["bytes"].as_u64().unwrap()).collect::<Vec<_>>(), bytes);
    for line in &lines {
        // A barrier has nothing to check.
        let checked = line["op"] != "barrier";
        assert_eq!(
            (&line["peer"], &line["ranks"], &line["checked"]),
            (&"dist".into(), &3.into(), &checked.into())
        );
        assert_eq!(what.split(' ').next(), line["op"].as_str());
        assert!((7..=21).contains(&line["samples"].as_u64().unwrap()), "{line}");
        let time = |field: &str| line[field].as_f64().unwrap();
        assert!(time("min_us") > 0.0, "{line}");
        assert!(time("min_us") <= time("median_us") && time("median_us") <= time("max_us"), "{line}");
    }
}

#[test]
fn measured_costs_are_stored_for_the_next_run() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("costs");
    let distctl = |arguments: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_distctl"));
        let output = command.args(arguments.split_whitespace()).env("DIST_COSTS", &file).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        output.stdout
    };
    let measured: Value = serde_json::from_slice(&distctl("tune --ranks 3 --json")).unwrap();
    documented::check("distctl tune", &measured);
    assert_eq!((&measured["ranks"], measured["file"].as_str()), (&3.into(), file.to_str()));
    let kept = std::fs::read_to_string(&file).unwrap();
    let costs = ["round_ps", "byte_ps", "reduced_byte_ps"].map(|field| measured[field].to_string()).join(" ");
    assert_eq!(kept.lines().last(), Some(format!("shm 3 1 {costs}").as_str()));
    // These costs cannot be measured: a new measurement would change the file.
    let quickest = kept.replace(&costs, "1 1 1");
    std::fs::write(&file, &quickest).unwrap();
    distctl("bench barrier --ranks 3");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), quickest, "the stored costs are measured again");
    assert!(
        String::from_utf8(distctl("tune")).unwrap().starts_with("2 ranks, transport shm: a round takes ")
    );
}

#[rstest]
#[case(0, false)]
#[case(1, true)]
fn rank_0_decides_whether_costs_are_measured(#[case] off: usize, #[case] measured: bool) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("costs");
    let program = env!("CARGO_BIN_EXE_distctl");
    let script = format!("test $RANK = {off} && export DIST_COSTS=off; exec {program} bench barrier");
    let mut launcher = Command::new(program);
    launcher.args(["run", "-n", "2", "--", "sh", "-c", &script]).env("DIST_COSTS", &file);
    let output = launcher.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(file.exists(), measured);
}

#[test]
fn costs_that_cannot_be_written_are_reported_without_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("costs");
    std::fs::write(&file, "something else").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_distctl"));
    let output = command.args(["tune", "--json"]).env("DIST_COSTS", &file).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let fields = r#"{"transport":"shm","ranks":2,"round_ps":"#;
    let line = String::from_utf8(output.stdout).unwrap();
    assert!(line.starts_with(fields) && line.ends_with(",\"file\":null}\n"), "{line}");
    let told = format!("cannot write {}: it holds something else", file.display());
    assert!(String::from_utf8(output.stderr).unwrap().contains(&told));
}

#[rstest]
#[case("bench barrier")]
#[case("doctor")]
#[case("tune")]
fn a_number_of_ranks_that_contradicts_the_job_is_rejected(#[case] command: &str) {
    let program = env!("CARGO_BIN_EXE_distctl");
    let arguments = format!("run -n 2 -- {program} {command} -n 3");
    let mut launcher = Command::new(program);
    launcher.args(arguments.split_whitespace()).env_remove("DIST_COSTS");
    let output = launcher.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR")).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stderr)
            .contains("--ranks 3 contradicts the size of the current job, 2"),
        "{output:?}"
    );
}

#[test]
fn inside_a_job_only_rank_0_prints() {
    let program = env!("CARGO_BIN_EXE_distctl");
    let lines = lines(&format!("run -n 4 -- {program} bench broadcast --bytes 64K --touch --json"));
    let [line] = &lines[..] else { panic!("{lines:?}") };
    assert_eq!((&line["ranks"], &line["touch"]), (&4.into(), &true.into()));
}

#[test]
fn without_json_there_is_a_table() {
    let output = distctl("bench all_reduce --ranks 1 --bytes 8,1K");
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 4, "{text}");
    assert!(text.starts_with("all_reduce, 1 ranks, auto, f32, canonical order\n"), "{text}");
}

#[rstest]
#[case("bench all_reduce --dtype i32 --op mean", "mean does not support i32")]
#[case("bench scan --op mean", "scan does not support mean")]
#[case("bench all_reduce --bytes 6", "6 bytes are not a whole number of f32 elements")]
#[case("bench all_reduce --bytes 1.5M", "a size is a whole number")]
#[case("bench all_reduce --dtype f8", "[possible values: f32, f64, ")]
#[case("bench all_reduce --op avg", "[possible values: sum, mean, ")]
#[case("bench all_reduce --order some", "[possible values: canonical, any]")]
#[case("bench all_reduce --algorithm best", "has the algorithms auto, recursive_doubling, ")]
#[case("bench all_reduce --ranks 3 --algorithm ring", "ring does not reduce in canonical order on 3 ranks")]
#[case("bench pingpong --ranks 1", "pingpong needs 2 ranks")]
#[case("bench all_gather --ranks 5 --bytes 4294967296G", "bytes for each of 5 ranks are too many")]
#[case(
    "bench all_reduce --ranks 200 --dtype bf16 --check",
    "--check needs exact results, and sum over 200 ranks is not exact in bf16"
)]
#[case("bench all_reduce --transport carrier_pigeon", "possible values: auto, tcp, shm")]
fn invalid_arguments_are_reported_once_before_anything_starts(#[case] arguments: &str, #[case] words: &str) {
    let output = distctl(arguments);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert_eq!(text.matches(words).count(), 1, "{text}");
}

#[test]
fn a_buffer_that_exceeds_the_memory_is_rejected() {
    let output = distctl("bench all_reduce --ranks 1 --bytes 9999999G");
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8(output.stderr).unwrap();
    let words = "cannot allocate 10737417166258176 bytes";
    assert!(told.contains(words) && !told.contains("panicked"), "{told}");
}
