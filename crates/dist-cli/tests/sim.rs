//! `distctl sim` as a user runs it.
#![allow(clippy::unwrap_used, reason = "what a test prepares must work")]

mod documented;

use std::process::{Command, Output};

use rstest::rstest;
use serde_json::Value;

fn distctl(arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_distctl"));
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
fn text(arguments: &str) -> String {
    let output = distctl(arguments);
    assert!(output.status.success() && told(&output).is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn lines(arguments: &str) -> Vec<Value> {
    text(arguments).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A ring of 16 ranks with 64 MiB has 30 rounds of 4 MiB at 1.25 GB/s, 25 us and twice 2 us.
#[test]
fn a_prediction_agrees_with_a_calculation_by_hand() {
    let lines = lines("sim all_reduce --ranks 16 --bytes 64M --algorithm ring --json");
    let [line] = &lines[..] else { panic!("{lines:?}") };
    let expected = 30.0 * (25.0 + 2.0 * 2.0 + 4_194_304.0 / 1250.0);
    let got = line["predicted_us"].as_f64().unwrap();
    assert!((got / expected - 1.0).abs() < 1e-6, "{got} {expected}");
    assert_eq!((&line["rounds"], &line["engine"]), (&30.into(), &"queues".into()));
    assert_eq!(line["sent_max_bytes"], 30 * 4_194_304);
}

#[rstest]
#[case("all_reduce")]
#[case("reduce_scatter")]
#[case("all_gather")]
#[case("broadcast")]
#[case("reduce")]
#[case("all_to_all")]
#[case("gather")]
#[case("scatter")]
#[case("scan")]
#[case("barrier")]
fn all_algorithms_of_an_operation_are_predicted(#[case] operation: &str) {
    for ranks in [1, 2, 6, 16] {
        let lines = lines(&format!("sim {operation} --ranks {ranks} --bytes 4K --json"));
        let count = |field: &str| lines.iter().filter(|line| line[field] == true).count();
        assert_eq!((count("chosen"), count("fastest")), (1, 1), "{lines:?}");
        for line in &lines {
            assert_eq!(line["op"], operation);
            assert_eq!(line["predicted_us"].as_f64().unwrap() > 0.0, ranks > 1, "{line}");
        }
    }
}

#[test]
fn lines_and_table_agree_with_the_documentation() {
    let arguments =
        "sim all_reduce --ranks 8 --hosts 2 --bytes 1M --straggler 3:+1ms --algorithm two_level/parts/ring";
    insta::assert_snapshot!(text(&format!("{arguments} --json")), @r#"{"op":"all_reduce","ranks":8,"hosts":2,"bytes":1048576,"algorithm":"two_level/parts/ring","order":"canonical","chosen":false,"fastest":true,"engine":"queues","predicted_us":2444.363,"algbw_GBps":0.429,"busbw_GBps":0.7507,"rounds":null,"sent_max_bytes":1835008,"sent_total_bytes":14680064,"host_sent_max_bytes":1048576,"skipped":null}"#);
    insta::assert_snapshot!(text(arguments), @r"
    all_reduce of 1 MiB, 8 ranks on 2 hosts
    algorithm                                    time   busbw GB/s    rounds   rank sends   host sends  order     engine
    two_level/parts/ring *                    2.44 ms        0.751         -      1.8 MiB        1 MiB  canonical queues
    ");
    documented::check("distctl sim OP", &lines(&format!("{arguments} --json"))[0]);
}

/// Eight ranks in two racks: in the last round, four messages take the link of a rack at once.
#[test]
fn hosts_of_a_rack_share_its_link() {
    let racks = "--racks 2 --rack-latency 100us --rack-bandwidth 10Gbps";
    let arguments = "sim all_reduce --ranks 8 --bytes 1M --algorithm recursive_doubling";
    let us = |racks: &str| {
        lines(&format!("{arguments} --json {racks}")).remove(0)["predicted_us"].as_f64().unwrap()
    };
    let bytes_us = 1_048_576.0 / 1250.0;
    let difference = us(racks) - us("");
    assert!((difference - 100.0 - 3.0 * bytes_us).abs() < 0.01, "{difference}");
    assert_eq!(us("--racks 1"), us(""));
    assert!(text(&format!("{arguments} {racks}")).contains("8 ranks on 8 hosts in 2 racks\n"));
    let memory = "sim train --params 1M --compute 1ms --strategy hybrid --ranks 8 --hosts 4 --json";
    let step = |racks: &str| lines(&format!("{memory} {racks}")).remove(0)["step_ms"].as_f64().unwrap();
    assert!(step(racks) > step("") + 0.1, "messages between hosts are also between racks");
}

#[test]
fn training_steps_agree_with_the_documentation() {
    let arguments = "sim train --params 1M --compute 10ms --ranks 4 --strategy fsdp --units 4";
    insta::assert_snapshot!(text(&format!("{arguments} --json")), @r#"{"strategy":"fsdp","ranks":4,"hosts":4,"params":1000000,"collectives":11,"compute_ms":10.0,"step_ms":11.37,"exposed_ms":1.37,"communication_ms":7.454,"efficiency":0.8795,"memory_bytes":7000000,"sent_max_bytes":8250000,"skipped":null}"#);
    insta::assert_snapshot!(text(arguments), @r"
    1000000 parameters of 4 bytes, 10.0 ms of computing per step and rank
    strategy    ranks   hosts        step     exposed     sending efficiency       memory   rank sends
    fsdp            4       4     11.4 ms     1.37 ms     7.45 ms     87.9 %      6.7 MiB      7.9 MiB
    ");
    documented::check("distctl sim train", &lines(&format!("{arguments} --json"))[0]);
}

/// 100 million parameters in buckets of 25 MiB: the last bucket is ready when all computation has ended.
#[test]
fn exposed_communication_agrees_with_a_calculation_by_hand() {
    let step = |arguments: &str| lines(&format!("sim train --params 100M --json {arguments}")).remove(0);
    let number = |line: &Value, field: &str| line[field].as_f64().unwrap();
    let alone = step("--compute 120ms --ranks 1");
    assert_eq!((number(&alone, "step_ms"), number(&alone, "efficiency")), (120.0, 1.0));
    assert_eq!((&alone["memory_bytes"], &alone["collectives"]), (&1_600_000_000_u64.into(), &0.into()));
    // Very long computing hides all buckets but the last, which holds 400,000,000 mod 26,214,400 bytes.
    let long = step("--compute 1000s --ranks 2 --latency 0s --overhead 0s");
    assert_eq!(long["collectives"], 16);
    assert!((number(&long, "exposed_ms") / (6_784_000.0 * 0.8e-6) - 1.0).abs() < 1e-3, "{long}");
    // Very short computing hides nothing.
    let short = step("--compute 1ns --ranks 2");
    assert!(number(&short, "exposed_ms") / number(&short, "communication_ms") > 0.999, "{short}");
    // Sharding moves 1.5 times as many bytes.
    let sharded = step("--compute 1ns --ranks 16 --strategy fsdp --latency 0s --overhead 0s --order any");
    let reduced = step("--compute 1ns --ranks 16 --strategy ddp --latency 0s --overhead 0s --order any");
    let ratio = number(&sharded, "sent_max_bytes") / number(&reduced, "sent_max_bytes");
    assert!((ratio - 1.5).abs() < 0.05, "{ratio}");
}

/// With P bytes of parameters on N ranks and k micro-batches on each, sent bytes are in units of (N − 1) / N
/// · P. The last unit of the forward is not gathered again for the backward.
#[rstest]
#[case("ddp", 1, 2.0)]
#[case("ddp", 3, 2.0)]
#[case("zero1", 3, 2.0)]
#[case("zero2", 1, 2.0)]
#[case("zero2", 3, 1.0 + 3.0)]
#[case("fsdp --units 64", 1, 3.0 - 1.0 / 64.0)]
#[case("fsdp --units 64", 3, 3.0 * (3.0 - 1.0 / 64.0))]
fn sent_bytes_agree_with_the_formulas(
    #[case] strategy: &str,
    #[case] micro_batches: u32,
    #[case] times: f64,
) {
    let bytes = 4.0 * 65_536_000.0;
    let line = lines(&format!(
        "sim train --params 65536000 --compute 1s --ranks 8 --micro-batches {micro_batches} --json --strategy {strategy}"
    ))
    .remove(0);
    let expected = times * 7.0 / 8.0 * bytes;
    let sent = line["sent_max_bytes"].as_f64().unwrap();
    assert!((sent / expected - 1.0).abs() < 1e-6, "{sent} for {expected}: {line}");
}

/// A simulation of each of these steps would take hours.
#[rstest]
#[case("--strategy ddp --params 7B --bucket-bytes 1", true)]
#[case("--strategy zero2 --params 1B --bucket-bytes 1M --micro-batches 4096", true)]
#[case("--strategy fsdp --params 1B --units 10000 --micro-batches 4096", false)]
fn steps_with_too_many_collectives_are_skipped(#[case] arguments: &str, #[case] has_memory: bool) {
    let line = lines(&format!("sim train {arguments} --compute 1s --ranks 2 --json")).remove(0);
    assert_eq!(
        (&line["step_ms"], &line["skipped"]),
        (&Value::Null, &"more than 10000000 collectives".into())
    );
    // The memory of a sharded step is predicted by executing it, which would take minutes.
    assert_eq!(line["memory_bytes"].as_u64().is_some_and(|bytes| bytes > 0), has_memory, "{line}");
}

#[rstest]
#[case("--bucket-bytes 0", "a bucket has at least one byte")]
#[case("--units 10001", "this is not a number of units from 1 to 10000")]
fn bucket_size_and_number_of_units_are_limited(#[case] option: &str, #[case] words: &str) {
    let output = distctl(&format!("sim train --params 1M --compute 1s {option}"));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8(output.stderr).unwrap().contains(words));
}

#[test]
fn efficiency_over_ranks_is_drawn() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("efficiency.svg");
    let picture = format!("--svg {}", file.display());
    text(&format!("sim train --params 1M --compute 10ms --ranks 1..16 --strategy ddp,fsdp {picture}"));
    let svg = std::fs::read_to_string(file).unwrap();
    assert!(svg.starts_with("<svg") && svg.matches("<polyline").count() == 2, "{svg}");
}

#[test]
fn pipeline_steps_agree_with_the_documentation() {
    let arguments = "sim pipeline --stages 3 --micro-batches 4 --weight-gradient 2ms";
    insta::assert_snapshot!(text(&format!("{arguments} --json")), @r#"{"schedule":"1f1b","ranks":3,"stages":3,"micro_batches":4,"step_ms":24.0,"computing_ms":48.0,"bubble":0.5,"bubble_formula":0.5,"kept":[3,2,1],"kept_formula":[3,2,1],"messages":16}"#);
    insta::assert_snapshot!(text(arguments), @r"
    1f1b: 3 stages on 3 ranks, 4 micro-batches, 24 ms, bubble 0.5000 (formula: 0.5000)
    activations kept, by rank: 3 2 1 (formula: 3 2 1); 16 messages
    rank 0  F0 F1 F2 .  .  .  .  .  .  B0------ F3 B1------ .  B2------ .  B3------
    rank 1  .  F0 F1 .  .  .  B0------ F2 B1------ F3 B2------ .  B3------ .  .  .
    rank 2  .  .  F0 B0------ F1 B1------ F2 B2------ F3 B3------ .  .  .  .  .  .
    ");
    documented::check("distctl sim pipeline", &lines(&format!("{arguments} --json"))[0]);
    insta::assert_snapshot!(text("sim pipeline --stages 2 --micro-batches 1 --actions"), @r"
    rank 0: 0F0 0SF0 0RB0 0B0 0R
    rank 1: 1RF0 1F0 1B0 1SB0 1R
    ");
}

#[test]
fn pipelines_are_compared_and_drawn_in_one_picture() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("pipeline.svg");
    let arguments = "sim pipeline --schedule interleaved,zbv --stages 8 --ranks 4 --micro-batches 8 --json";
    let lines = lines(&format!("{arguments} --svg {}", file.display()));
    assert_eq!([&lines[0]["step_ms"], &lines[1]["step_ms"]], [57.0, 51.0]);
    assert_eq!([&lines[0]["bubble_formula"], &lines[1]["bubble_formula"]], [0.1875, 0.0625]);
    let svg = std::fs::read_to_string(file).unwrap();
    // Forward and backward, or forward and two halves of the backward, of 8 micro-batches in 8 stages.
    assert_eq!(svg.matches("<title>").count(), (2 + 3) * 64);
}

#[test]
fn measurements_are_compared_with_predictions() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let measured: String = [(8, 20.0), (1 << 20, 400.0)]
        .map(|(bytes, us)| {
            format!(
                r#"{{"op":"all_reduce","ranks":2,"bytes":{bytes},"algorithm":"ring","median_us":{us},"peer":"dist"}}"#
            ) + "\n"
        })
        .concat();
    std::fs::write(path("measured"), measured).unwrap();
    let compare = format!("sim compare {} --cores 2", path("measured"));
    let lines = lines(&format!("{compare} --fit-to {} --json", path("model")));
    assert_eq!(lines.len(), 2);
    documented::check("distctl sim compare", &lines[0]);
    for line in &lines {
        assert!(line["error"].as_f64().unwrap().abs() < 0.1, "{line}");
    }
    let again = text(&format!("{compare} --model {}", path("model")));
    assert!(again.contains("2 ranks: 2 points, median error "), "{again}");
}

#[rstest]
#[case("tcp ring, shm ring", "", "measured over tcp and others over shm")]
#[case("shm direct/staged", "--pace-to F --fit-to", "--fit-to: none of these lines measures messages")]
#[case("shm ring", "--pace-to", "--pace-to: none of these lines measures a direct schedule")]
fn lines_without_data_for_a_fit_are_rejected(
    #[case] measured: &str,
    #[case] option: &str,
    #[case] words: &str,
) {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let line = |(transport, algorithm)| {
        let call = r#"{"op":"all_reduce","ranks":2,"bytes":1024,"median_us":5"#;
        format!(r#"{call},"transport":"{transport}","algorithm":"{algorithm}"}}"#) + "\n"
    };
    let measured: String = measured.split(", ").map(|line| line.split_once(' ').unwrap()).map(line).collect();
    std::fs::write(path("measured"), measured).unwrap();
    let option = option.replace('F', &path("pace"));
    let to = if option.is_empty() { String::new() } else { path("fitted") };
    let output = distctl(&format!("sim compare {} {option} {to}", path("measured")));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && text.contains(words), "{text}");
    assert!(!directory.path().join("fitted").exists());
}

#[test]
fn a_line_with_too_many_ranks_is_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("measured").display().to_string();
    let line = r#"{"op":"all_reduce","ranks":1000000000000,"bytes":8,"median_us":5,"algorithm":"ring"}"#;
    std::fs::write(&file, line).unwrap();
    let output = distctl(&format!("sim compare {file}"));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(told(&output), format!("distctl: {file}, line 1: more than 10000000 ranks\n"));
}

#[test]
fn direct_schedules_are_predicted_from_the_costs_of_shared_memory() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let measured: String = [("one_shot", 8, 0.2), ("staged", 65_536, 4.0), ("staged", 1 << 20, 50.0)]
        .map(|(form, bytes, us)| {
            format!(
                r#"{{"op":"all_reduce","ranks":2,"bytes":{bytes},"algorithm":"direct/{form}","median_us":{us}}}"#
            ) + "\n"
        })
        .concat();
    std::fs::write(path("measured"), measured).unwrap();
    let compared = lines(&format!("sim compare {} --pace-to {} --json", path("measured"), path("pace")));
    assert_eq!(compared.len(), 3);
    for line in &compared {
        assert!(line["error"].as_f64().unwrap().abs() < 0.2 && line["algorithm"] != "ring", "{line}");
    }
    let again = lines(&format!("sim compare {} --pace {} --json", path("measured"), path("pace")));
    assert_eq!(again, compared);

    let predict = format!("sim all_reduce --bytes 1M --json --pace {}", path("pace"));
    let on_a_host = lines(&format!("{predict} --ranks 2 --hosts 1"));
    let direct = |line: &&Value| line["engine"] == "direct";
    assert_eq!(on_a_host.iter().filter(direct).count(), 4);
    let chosen: Vec<_> = on_a_host.iter().filter(|line| line["chosen"] == true).collect();
    assert!(chosen.len() == 1 && chosen[0]["algorithm"] == "direct/staged", "{chosen:?}");
    assert_eq!(chosen[0]["predicted_us"], compared[2]["predicted_us"]);
    assert!(on_a_host.iter().any(|line| line["algorithm"] == "ring"), "messages are predicted too");
    let one = lines(&format!("{predict} --ranks 2 --hosts 1 --algorithm direct/one_shot"));
    assert_eq!(one.len(), 1);
    assert_eq!(
        lines(&format!("{predict} --ranks 2")).iter().filter(direct).count(),
        0,
        "direct schedules between two hosts"
    );
}

#[test]
fn the_engine_depends_on_the_network() {
    let engine = |arguments: &str| {
        let lines = lines(&format!("sim all_reduce {arguments} --json"));
        lines[0]["engine"].as_str().unwrap().to_owned()
    };
    assert_eq!(engine("--ranks 100000 --algorithm ring"), "symmetric");
    assert_eq!(engine("--ranks 1000 --algorithm binomial"), "wavefront");
    assert_eq!(engine("--ranks 1000 --algorithm recursive_doubling --straggler 5:x3"), "wavefront");
    assert_eq!(engine("--ranks 1000 --hosts 250 --algorithm recursive_doubling"), "queues");
    assert_eq!(engine("--ranks 16 --hosts 1 --cores 2 --algorithm ring"), "queues");
}

#[rstest]
#[case("all_reduce", &["two_level/leaders/ring", "two_level/parts/ring"])]
#[case("reduce_scatter", &["two_level"])]
#[case("all_gather", &["two_level"])]
#[case("broadcast", &["two_level/binomial", "two_level/chain"])]
#[case("reduce", &["two_level/binomial"])]
#[case("barrier", &["two_level/dissemination"])]
fn ranks_that_share_hosts_have_two_level_algorithms(#[case] operation: &str, #[case] names: &[&str]) {
    let on_hosts = lines(&format!("sim {operation} --ranks 8 --hosts 2 --bytes 64K --json"));
    let alone = lines(&format!("sim {operation} --ranks 8 --bytes 64K --json"));
    for name in names {
        let is_it = |line: &&Value| line["algorithm"] == *name;
        let line = on_hosts.iter().find(is_it).unwrap();
        assert!(line["predicted_us"].as_f64().unwrap() > 0.0 && line["rounds"].is_null(), "{line}");
        assert_eq!(alone.iter().find(is_it), None);
    }
}

#[test]
fn a_schedule_with_too_many_steps_is_skipped_with_the_reason() {
    let lines = lines("sim all_reduce --ranks 100000 --straggler 5:x3 --algorithm ring --json");
    let skipped = lines[0]["skipped"].as_str().unwrap();
    assert!(skipped.contains("more than 500000000 steps"), "{skipped}");
    assert_eq!(lines[0]["predicted_us"], Value::Null);
    assert!(text("sim all_reduce --ranks 100000 --straggler 5:x3 --algorithm ring").contains(skipped));
}

#[test]
fn links_and_costs_are_read_from_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    std::fs::write(path("links"), "# to the other building\n0-1 50ms 100Mbps\n").unwrap();
    std::fs::write(path("costs"), "tcp 4 1 31000000 190 0\n").unwrap();
    let seconds = |arguments: &str| {
        let lines = lines(&format!("sim broadcast --algorithm binomial --bytes 0 --json {arguments}"));
        lines[0]["predicted_us"].as_f64().unwrap() / 1e6
    };
    let far = seconds(&format!("--ranks 2 --links {}", path("links")));
    assert!((far - 0.050_004).abs() < 1e-9, "{far}");
    let kept = seconds(&format!("--ranks 4 --model {}", path("costs")));
    assert!((kept - 62e-6).abs() < 1e-9, "{kept}");
    let fitted =
        r#"{"latency_us":5,"byte_ns":1,"send_us":0,"receive_us":0,"copy_byte_ns":0,"reduce_byte_ns":0"#;
    for (more, us) in [("", 10.0), (r#","call_us":7"#, 17.0)] {
        std::fs::write(path("model"), format!("{fitted}{more}}}")).unwrap();
        let got = 1e6 * seconds(&format!("--ranks 4 --model {}", path("model")));
        assert!((got - us).abs() < 1e-3, "the cost of a call is not added once: {got}");
    }
}

#[rstest]
#[case("sim all_reduce", "required arguments were not provided")]
#[case("sim", "required arguments were not provided")]
#[case("sim train --params 100M --compute 1ms --ranks 8..2", "8 is more than 2")]
#[case("sim train --params none --compute 1ms", "a model has between 1 and 10^13 parameters")]
#[case("sim train --params 100M --compute 1ms --element-bytes 3", "a parameter has 2, 4 or 8 bytes")]
#[case(
    "sim train --params 1M --compute 1ms --ranks 4 --strategy hybrid --straggler 1:x2",
    "--straggler is not predicted"
)]
#[case(
    "sim train --params 1M --compute 1ms --ranks 4 --strategy hybrid --links /dev/null",
    "--links is not predicted"
)]
#[case(
    "sim train --params 1M --compute 1ms --ranks 4 --strategy hybrid --cores 1",
    "--cores is not predicted"
)]
#[case("sim pipeline --stages 0 --micro-batches 4", "not a number of stages from 1 to")]
#[case("sim all_reduce --ranks 0", "not a number of ranks from 1 to")]
#[case("sim all_reduce --ranks 99999999", "not a number of ranks from 1 to 10000000")]
#[case("sim all_reduce --ranks 8 --hosts 3", "8 ranks cannot be divided equally over 3 hosts")]
#[case("sim all_reduce --ranks 8 --hosts 4 --racks 3", "4 hosts cannot be divided equally over 3 racks")]
#[case("sim all_reduce --ranks 8 --latency 5", "a time is a number and a unit")]
#[case("sim all_reduce --ranks 8 --bandwidth 10G", "a speed is a number and a unit")]
#[case("sim all_reduce --ranks 8 --algorithm star", "has the algorithms all, auto, recursive_doubling, ")]
#[case("sim all_reduce --ranks 8 --straggler 8:x2", "there is no rank 8: the 8 ranks")]
#[case("sim all_reduce --ranks 8 --straggler 7", "a straggler is a rank with a delay or a factor")]
#[case("sim pipeline --stages 3 --micro-batches 4 --schedule zbv", "3 stages on 1 ranks: zbv has 2 on each")]
#[case("sim pipeline --stages 1 --micro-batches 4 --schedule zbv", "1 stages on 1 ranks: zbv has 2 on each")]
#[case(
    "sim pipeline --stages 5 --ranks 2 --micro-batches 4 --schedule interleaved",
    "5 stages on 2 ranks: interleaved has as many on each"
)]
#[case(
    "sim pipeline --stages 2 --ranks 4 --micro-batches 4 --schedule interleaved",
    "2 stages on 4 ranks: interleaved has as many on each"
)]
#[case("sim pipeline --stages 4 --micro-batches 10000000", "cannot make a pipeline schedule of 4 ranks")]
#[case("sim pipeline --stages 4 --micro-batches 30000 --svg picture", "--svg draws at most 100000 pairs")]
#[case("sim pipeline --stages 4 --micro-batches 4 --schedule 2f2b", "a schedule is one of gpipe, 1f1b, ")]
#[case("sim all_gather --ranks 10000000 --bytes 1G", "bytes for each of 10000000 ranks are too many")]
#[case("sim all_reduce --ranks 8 --bytes 9999999G", "bytes for each of 8 ranks are too many")]
fn invalid_arguments_are_reported_once(#[case] arguments: &str, #[case] words: &str) {
    let output = distctl(arguments);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert_eq!(text.matches(words).count(), 1, "{text}");
}

/// The links between hosts are not used.
#[rstest]
#[case("--latency 1ms", "halving_doubling")]
#[case("--local-latency 1ms", "recursive_doubling")]
fn on_one_host_the_choice_depends_on_local_links(#[case] link: &str, #[case] algorithm: &str) {
    let lines = lines(&format!("sim all_reduce --ranks 8 --hosts 1 --bytes 64K --json {link}"));
    let chosen: Vec<_> = lines.iter().filter(|line| line["chosen"] == true).collect();
    assert!(chosen.len() == 1 && chosen[0]["algorithm"] == algorithm, "{chosen:?}");
}

#[test]
fn a_model_of_one_host_applies_to_hybrid_training() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("model").display().to_string();
    let sending = |latency_us: f64| {
        let model = format!(
            r#"{{"latency_us":{latency_us},"byte_ns":1,"send_us":0,"receive_us":0,"copy_byte_ns":0,"reduce_byte_ns":0}}"#
        );
        std::fs::write(&file, model).unwrap();
        let train = "sim train --params 1M --compute 1ms --ranks 4 --hosts 1 --strategy hybrid --json";
        lines(&format!("{train} --model {file}"))[0]["communication_ms"].as_f64().unwrap()
    };
    // Each message takes one second.
    assert!(sending(1e6) - sending(0.0) > 1000.0);
}

#[rstest]
#[case("--links", "0-9 1ms 1Gbps", "line 1: there is no host 9: the 8 hosts")]
#[case("--model", "{}", "is not a model of a network: missing field")]
fn an_invalid_file_is_named(#[case] option: &str, #[case] content: &str, #[case] words: &str) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, content).unwrap();
    let output = distctl(&format!("sim all_reduce --ranks 8 {option} {}", file.display()));
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains(words) && text.contains(&file.display().to_string()), "{text}");
}
