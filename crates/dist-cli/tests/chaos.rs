//! `distctl chaos` as a user runs it: real processes, real signals.
#![allow(clippy::unwrap_used, reason = "what a test prepares must work")]

mod documented;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};

use rstest::rstest;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

fn chaos(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_distctl"));
    // A folder for files that a killed test leaves behind.
    command.env("XDG_RUNTIME_DIR", env!("CARGO_TARGET_TMPDIR"));
    command.arg("chaos").args(arguments).output().unwrap()
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

#[rstest]
#[case("tcp")]
#[case("auto")]
fn every_other_rank_detects_every_fault(#[case] transport: &str) {
    let output =
        chaos(&["--ranks", "3", "--faults", "10", "--seed", "7", "--transport", transport, "--json"]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (all, faults) = lines.split_last().unwrap();
    documented::check("distctl chaos", all);
    assert_eq!((&all["faults"], &all["right"]), (&10.into(), &10.into()), "{text}");
    for (number, fault) in faults.iter().enumerate() {
        documented::check("distctl chaos", fault);
        assert_eq!((&fault["fault"], &fault["wrong"]), (&number.into(), &Value::Array(Vec::new())));
        let heard = if fault["kind"] == "stall" { 0 } else { 2 };
        assert_eq!(fault["heard_ms"].as_array().unwrap().len(), heard, "{fault}");
    }
    let kinds = ["kill", "terminate", "exit", "panic", "stop", "stall"];
    assert!(kinds.iter().all(|kind| faults.iter().any(|fault| fault["kind"] == *kind)), "{text}");
}

#[test]
fn a_table_has_a_row_for_each_kind_of_fault() {
    let output = chaos(&["--ranks", "2", "--faults", "1", "--seed", "7"]);
    assert!(output.status.success() && told(&output).is_empty(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let [head, row] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
    assert!(head.starts_with("fault ") && row.split_whitespace().skip(1).take(2).eq(["1", "1"]), "{text}");
}

#[test]
fn a_world_of_one_rank_is_rejected() {
    let output = chaos(&["--ranks", "1"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("ranks from 2 to 4096"), "{output:?}");
}

#[test]
fn a_fault_outside_a_job_is_rejected() {
    let output = chaos(&["--fault", "3"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("--faults sets the number of jobs"),
        "{output:?}"
    );
}

#[test]
fn a_signal_ends_the_whole_run_and_not_only_the_current_job() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_distctl"));
    command.env("XDG_RUNTIME_DIR", env!("CARGO_TARGET_TMPDIR"));
    command.args(["chaos", "--ranks", "2", "--faults", "40", "--json"]).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    // The first job is over, so that the signal must also reach later jobs.
    output.read_line(&mut String::new()).unwrap();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::TERM.as_raw()));
    // The faults until then are reported.
    let last = rest.lines().last().unwrap();
    let all: Value = serde_json::from_str(last).unwrap();
    let faults = all["faults"].as_u64().unwrap();
    assert!(faults < 40 && last.starts_with(&format!("{{\"faults\":{faults},\"right\":")), "{last}");
}
