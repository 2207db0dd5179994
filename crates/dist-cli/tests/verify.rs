//! `distctl verify` as a user runs it.
#![allow(clippy::unwrap_used, reason = "what a test prepares must work")]

mod documented;

use std::process::{Command, Output};

use dist_algos::ALGORITHMS;
use serde_json::Value;

fn verify(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_distctl")).arg("verify").args(arguments).output().unwrap()
}

#[test]
fn every_algorithm_has_a_line_and_mutants_come_last() {
    let output = verify(&["--max-ranks", "6", "--json"]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    lines.iter().for_each(|line| documented::check("distctl verify", line));
    for algorithm in ALGORITHMS.messages() {
        let is_its = |line: &&Value| {
            line["operation"] == algorithm.collective.name() && line["algorithm"] == algorithm.name
        };
        let line = lines.iter().find(is_its).unwrap();
        let supported = (1..=6).filter(|&world_size| algorithm.supports(world_size)).count();
        assert_eq!((&line["worlds"], &line["wrong"]), (&supported.into(), &Value::Null));
        let largest = &line["largest"];
        documented::check("distctl verify", largest);
        assert!(largest["buffers"].as_f64() >= largest["buffers_min"].as_f64(), "{line}");
    }
    let two_levels: Vec<&Value> = lines.iter().filter(|line| line["algorithm"] == "two_levels").collect();
    assert_eq!(two_levels.len(), 6);
    // 2 and 3 hosts of 2 ranks, 2 hosts of 3.
    assert!(two_levels.iter().all(|line| line["worlds"] == 3), "{two_levels:?}");
    for direct in ALGORITHMS.direct() {
        let (operation, algorithm) = (direct.collective.name(), direct.name);
        let is_its = |line: &&Value| line["operation"] == operation && line["algorithm"] == algorithm;
        let line = lines.iter().find(is_its).unwrap();
        assert_eq!((&line["worlds"], &line["wrong"]), (&6.into(), &Value::Null));
    }
    let mutants = lines.last().unwrap();
    let count = |field: &str| mutants[field].as_u64().unwrap();
    assert!(count("rejected") * 100 >= count("mutants") * 99 && count("mutants") > 10_000, "{text}");
}

#[test]
fn a_bound_without_a_schedule_to_mutate_is_rejected() {
    let output = verify(&["--max-ranks", "1"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("this is not a number of ranks from 2 to 4096"), "{text}");
    assert!(verify(&["--max-ranks", "2"]).status.success());
}
