//! `distctl doctor` as a user runs it.
#![allow(clippy::unwrap_used, reason = "what a test prepares must work")]

mod documented;

use std::process::{Command, Output};

use rstest::rstest;
use serde_json::Value;

fn doctor(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_distctl"));
    command.env("DIST_COSTS", "off").env("XDG_RUNTIME_DIR", env!("CARGO_TARGET_TMPDIR"));
    command.arg("doctor").args(arguments).envs(variables.iter().copied()).output().unwrap()
}

/// Returns the findings of a check: rank, text and advice.
fn found(output: &Output, check: &str) -> Vec<(u64, String, Option<String>)> {
    assert!(output.status.success(), "{output:?}");
    let lines = std::str::from_utf8(&output.stdout).unwrap().lines();
    let lines = lines
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .inspect(|line| documented::check("distctl doctor", line));
    let text = |value: &Value| value.as_str().map(str::to_owned);
    lines
        .filter(|line| line["check"] == check)
        .map(|line| (line["rank"].as_u64().unwrap(), text(&line["found"]).unwrap(), text(&line["advice"])))
        .collect()
}

#[cfg(target_os = "linux")]
#[rstest]
#[case("auto", "share no memory", "by memory", false)]
#[case("tcp", "reach", "by TCP", true)]
fn the_medium_between_ranks_is_reported(
    #[case] transport: &str,
    #[case] not_found: &str,
    #[case] way: &str,
    #[case] apart: bool,
) {
    let output = doctor(&["--json", "-n", "3"], &[("DIST_TRANSPORT", transport)]);
    let links = found(&output, "link");
    assert_eq!(links.iter().map(|(rank, ..)| *rank).collect::<Vec<_>>(), [1, 2]);
    assert!(links.iter().all(|(_, found, _)| found.contains(way)), "{links:?}");
    let [(0, memory, advice)] = &found(&output, "memory")[..] else { panic!("{output:?}") };
    assert!(!memory.contains(not_found), "{memory}");
    assert!(advice.is_none() || !apart, "{advice:?}");
    let [(0, ranks, _)] = &found(&output, "ranks")[..] else { panic!("{output:?}") };
    assert!(ranks.starts_with("0, 1, 2 run on this machine"), "{ranks}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_finding_that_can_be_improved_has_advice() {
    let variables = [("DIST_SHM_CMA", "off"), ("DIST_TRANSPRT", "tcp")];
    let output = doctor(&["--json"], &variables);
    let [(0, memory, Some(advice))] = &found(&output, "memory")[..] else { panic!("{output:?}") };
    assert!(memory.contains("cannot reach") && advice.contains("DIST_SHM_CMA"), "{memory}: {advice}");
    let [(0, unknown, Some(_))] = &found(&output, "variables")[..] else { panic!("{output:?}") };
    assert_eq!(unknown, "DIST_TRANSPRT mean nothing here");
    let table = String::from_utf8(doctor(&[], &variables).stdout).unwrap();
    assert!(table.contains("! rank 0    memory      ") && table.contains("\n  rank 1    link "), "{table}");
}

#[test]
fn an_invalid_variable_is_an_error() {
    let output = doctor(&[], &[("DIST_TRANSPORT", "pigeon")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("DIST_TRANSPORT=\"pigeon\" is not"),
        "{output:?}"
    );
}
