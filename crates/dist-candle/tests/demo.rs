//! The demo in real processes: its results, its output, and its errors.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use dist_transport::process::Coordinator;
use rstest::rstest;
use serde_json::Value;
use tempfile::TempDir;

/// Returns the path of the example; `cargo test` builds examples next to the tests.
fn program() -> PathBuf {
    let test = std::env::current_exe().expect("this test has a path");
    let program = test.ancestors().nth(2).expect("tests lie in deps").join("examples/train_lm");
    assert!(
        program.exists(),
        "{} is missing: cargo build -p dist-candle --example train_lm",
        program.display()
    );
    program
}

/// Returns a folder with a text.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let text = (0..400).map(|line| format!("line {line}: the same words, {} of them\n", line * line % 97));
    fs::write(folder.path().join("text"), text.collect::<String>()).expect("a writable folder");
    folder
}

/// Returns the command for a small model on the text in `folder`, with JSON output and without the variables of a
/// surrounding job.
fn demo(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.env("DIST_COSTS", "off");
    command.args(["--json", "--samples", "2", "--context", "16", "--width", "16", "--layers", "1"]);
    command.arg("--text").arg(folder.join("text")).arg("--out").arg(folder.join("out")).args(arguments);
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RAYON_NUM_THREADS"] {
        command.env_remove(name);
    }
    command
}

#[track_caller]
fn lines(mut command: Command) -> Vec<Value> {
    let Output { status, stdout, stderr } = command.output().expect("the program starts");
    let stderr = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{status}: {stderr}");
    assert_eq!(stderr, "");
    let stdout = String::from_utf8(stdout).expect("JSON is UTF-8");
    stdout.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

/// Returns the `loss_bits` of every step, then the `params_crc32`.
#[track_caller]
fn result(command: Command) -> Vec<u64> {
    let lines = lines(command);
    let (last, steps) = lines.split_last().expect("at least one line");
    let bits = steps.iter().map(|line| line["loss_bits"].as_u64().expect("a number"));
    bits.chain([last["params_crc32"].as_u64().expect("a number")]).collect()
}

#[rstest]
#[case(&["--ranks", "1"])]
#[case(&["--ranks", "2"])]
#[case(&["--ranks", "4"])]
fn any_number_of_processes_computes_the_bits_of_one(#[case] ranks: &[&str]) {
    let folder = folder();
    let steps = ["--steps", "4"];
    let single = result(demo(folder.path(), &[&steps[..], &["--strategy", "single"]].concat()));
    assert_eq!(single.len(), 5);
    assert_eq!(result(demo(folder.path(), &[&steps[..], ranks].concat())), single);
    let other = [&steps[..], &["--strategy", "single", "--seed", "1"]].concat();
    assert_ne!(result(demo(folder.path(), &other)), single);
}

#[rstest]
#[case(&["--ranks", "2", "--strategy", "fsdp"])]
#[case(&["--ranks", "4", "--strategy", "fsdp"])]
#[case(&["--ranks", "2", "--strategy", "zero1"])]
#[case(&["--ranks", "2", "--strategy", "zero2"])]
#[case(&["--ranks", "4", "--strategy", "hybrid"])]
#[case(&["--ranks", "4", "--strategy", "pipeline"])]
#[case(&["--ranks", "2", "--strategy", "pipeline", "--schedule", "gpipe"])]
#[case(&["--ranks", "3", "--strategy", "pipeline", "--schedule", "interleaved"])]
#[case(&["--ranks", "4", "--strategy", "pipeline", "--schedule", "zb1p"])]
#[case(&["--ranks", "2", "--strategy", "pipeline", "--schedule", "zbv"])]
fn every_strategy_computes_the_bits_of_one_process(#[case] strategy: &[&str]) {
    let folder = folder();
    let steps = ["--steps", "4"];
    let single = result(demo(folder.path(), &[&steps[..], &["--strategy", "single"]].concat()));
    assert_eq!(result(demo(folder.path(), &[&steps[..], strategy].concat())), single);
}

#[rstest]
#[case(&["--strategy", "ddp"])]
#[case(&["--strategy", "fsdp"])]
fn the_bits_do_not_depend_on_the_transport(
    #[case] strategy: &[&str],
    #[values("auto", "shm", "tcp")] transport: &str,
) {
    let folder = folder();
    let steps = ["--steps", "4"];
    let single = result(demo(folder.path(), &[&steps[..], &["--strategy", "single"]].concat()));
    let mut command = demo(folder.path(), &[&steps[..], &["--ranks", "2"], strategy].concat());
    command.env("DIST_TRANSPORT", transport);
    assert_eq!(result(command), single);
}

/// The newest checkpoint is removed, so that some steps remain.
#[rstest]
#[case(&["--ranks", "2"], &["--ranks", "4", "--strategy", "fsdp"])]
#[case(&["--ranks", "4", "--strategy", "zero1"], &["--strategy", "single"])]
#[case(&["--ranks", "2", "--strategy", "fsdp"], &["--ranks", "4", "--strategy", "hybrid"])]
fn training_goes_on_from_a_checkpoint_by_another_strategy_with_the_same_bits(
    #[case] before: &[&str],
    #[case] after: &[&str],
) {
    let folder = folder();
    let checkpoints = folder.path().join("checkpoints");
    let directory = checkpoints.to_str().expect("a path in UTF-8");
    let steps = ["--steps", "6"];
    let whole = result(demo(
        folder.path(),
        &[&steps[..], before, &["--save", directory, "--save-every", "2"]].concat(),
    ));
    let mut kept: Vec<String> = fs::read_dir(&checkpoints)
        .expect("checkpoints")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    kept.sort_unstable();
    assert_eq!(kept, ["checkpoint-2-step-4", "checkpoint-3-step-6", "owner.json"]);
    let finished = result(demo(folder.path(), &[&steps[..], after, &["--load", directory]].concat()));
    assert_eq!(finished, whole[6..], "no step is left");
    fs::remove_dir_all(checkpoints.join("checkpoint-3-step-6")).expect("it is there");
    let resumed = result(demo(folder.path(), &[&steps[..], after, &["--load", directory]].concat()));
    assert_eq!(resumed, whole[4..]);
}

#[test]
fn compressed_trainings_are_compared_with_their_sent_bytes() {
    let folder = folder();
    let forms = ["none", "bf16", "int8", "topk:0.01", "powersgd:4"];
    let arguments = ["--ranks", "2", "--steps", "30", "--width", "32", "--compress", &forms.join(",")];
    let mut command = demo(folder.path(), &arguments);
    // Ranks that share memory send no messages.
    command.env("DIST_TRANSPORT", "tcp");
    let lines = lines(command);
    assert_eq!(lines.len(), forms.len() * 31);
    let mut bytes = Vec::new();
    let mut last = Vec::new();
    for (form, lines) in forms.iter().zip(lines.chunks(31)) {
        assert!(lines.iter().all(|line| line["compress"] == *form));
        let sent = lines[0]["bytes_sent"].as_u64().expect("a number");
        assert!(lines[..30].iter().all(|line| line["bytes_sent"] == sent));
        assert!(lines[30]["params_crc32"].is_u64());
        bytes.push(sent as f64);
        last.push(lines[29]["loss"].as_f64().expect("a number"));
    }
    // Parts of gradients that compression sends in later steps are still missing after so few steps.
    for (index, largest, behind) in [(1, 0.51, 0.1), (2, 0.27, 0.1), (3, 0.05, 3.0), (4, 0.6, 1.0)] {
        assert!(bytes[index] < largest * bytes[0], "{}: {bytes:?}", forms[index]);
        assert!(last[index] < last[0] + behind, "{}: {last:?}", forms[index]);
    }
    let picture = fs::read_to_string(folder.path().join("out/loss.svg")).unwrap();
    assert!(forms.iter().all(|form| picture.contains(&format!(">{form}: "))), "{picture}");
}

/// The variables that torchrun sets for its own job.
const TORCHRUN: [(&str, &str); 4] = [
    ("DIST_PORT", "1"),
    ("TORCHELASTIC_RUN_ID", "other"),
    ("TORCHELASTIC_RESTART_COUNT", "1"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
];

#[test]
fn processes_join_in_spite_of_the_variables_of_a_surrounding_job() {
    let folder = folder();
    let mut command = demo(folder.path(), &["--ranks", "2", "--steps", "1"]);
    command.envs(TORCHRUN);
    assert_eq!(lines(command).len(), 2);
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let folder = folder();
    // Matrices large enough that candle divides them among threads.
    let arguments =
        ["--steps", "2", "--micro-batches", "2", "--samples", "8", "--context", "64", "--width", "96"];
    let results = [1, 2, 4].map(|threads| {
        let mut command = demo(folder.path(), &[]);
        command.args(arguments).args(["--strategy", "single"]).env("RAYON_NUM_THREADS", threads.to_string());
        result(command)
    });
    assert_eq!(results[0], results[1]);
    assert_eq!(results[0], results[2]);
}

#[test]
fn the_loss_falls_below_the_entropy_of_the_bytes_and_everything_is_reported() {
    let folder = folder();
    let lines = lines(demo(folder.path(), &["--steps", "40", "--width", "32"]));
    assert_eq!(lines.len(), 41);
    for (step, line) in (1..).zip(&lines[..40]) {
        let fields: Vec<_> = line.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(fields, ["loss", "loss_bits", "step", "tokens_per_s"]);
        assert_eq!(line["step"], step);
        let bits = u32::try_from(line["loss_bits"].as_u64().unwrap()).unwrap();
        assert_eq!(serde_json::from_value::<f32>(line["loss"].clone()).unwrap().to_bits(), bits);
        assert!(line["tokens_per_s"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(lines[40].as_object().unwrap().keys().collect::<Vec<_>>(), ["params_crc32"]);

    let text = fs::read(folder.path().join("text")).unwrap();
    let count = |byte| text.iter().filter(|&&other| other == byte).count() as f64 / text.len() as f64;
    let shares = (0..=u8::MAX).map(count).filter(|&share| share > 0.0);
    let entropy: f64 = shares.map(|share| -share * share.ln()).sum();
    let last = lines[39]["loss"].as_f64().unwrap();
    assert!(last < 0.7 * entropy, "loss {last}, entropy {entropy}");

    for (picture, word) in [("loss.svg", "entropy of the bytes"), ("timeline.svg", "rank 1")] {
        let picture = fs::read_to_string(folder.path().join("out").join(picture)).unwrap();
        assert!(picture.contains(word) && picture.ends_with("</svg>\n"), "{picture}");
    }
}

#[track_caller]
fn refused(mut command: Command) -> String {
    let Output { status, stdout, stderr } = command.output().expect("the program starts");
    assert_eq!(status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&stdout), "");
    String::from_utf8(stderr).expect("an error message")
}

#[test]
fn a_text_that_cannot_be_learned_is_named_once() {
    let folder = folder();
    let path = folder.path().join("text");
    let name = path.display();
    let with_text = |text: &str| {
        fs::write(&path, text).expect("a writable folder");
        refused(demo(folder.path(), &["--ranks", "2"]))
    };
    assert_eq!(with_text(""), format!("train_lm: {name} is empty\n"));
    assert_eq!(
        with_text("brief"),
        format!("train_lm: [{path:?}]: 5 bytes in all, where one sample has 17\n")
    );
    fs::remove_file(&path).expect("it was just written");
    let missing = refused(demo(folder.path(), &["--ranks", "2"]));
    assert!(missing.starts_with(&format!("train_lm: cannot read {name}: ")), "{missing}");
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let folder = folder();
    let heads = refused(demo(folder.path(), &["--heads", "3"]));
    assert_eq!(heads, "train_lm: a width of 16 cannot be divided among 3 heads\n");
    let sharded = refused(demo(folder.path(), &["--strategy", "fsdp", "--compress", "bf16"]));
    assert_eq!(
        sharded,
        "train_lm: --compress is for --strategy ddp or single: parts of gradients are not compressed\n"
    );
    for ratio in ["0", "-1", "NaN", "1.5"] {
        let refused = demo(folder.path(), &["--compress", &format!("topk:{ratio}")]).output().unwrap();
        assert_eq!(refused.status.code(), Some(2));
    }
    let none = demo(folder.path(), &["--micro-batches", "0"]).output().unwrap();
    assert_eq!(none.status.code(), Some(2));
}

/// Starts a job whose launcher is this test: one process per list of arguments.
fn job(folder: &Path, ranks: &[&[&str]]) -> Vec<Output> {
    let coordinator = Coordinator::start("127.0.0.1:0", ranks.len(), "test", None).expect("a free port");
    let start = |(rank, arguments): (usize, &&[&str])| {
        let mut command = demo(folder, &["--steps", "2"]);
        command.args(*arguments).env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.len().to_string());
        command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", ranks.len().to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", coordinator.address().port().to_string());
        command.env("DIST_COORDINATOR", "external").env("DIST_JOB_ID", "test");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts")
    };
    let children: Vec<Child> = ranks.iter().enumerate().map(start).collect();
    children.into_iter().map(|child| child.wait_with_output().expect("output")).collect()
}

#[test]
fn in_a_job_it_is_one_rank_and_only_rank_0_speaks() {
    let folder = folder();
    let outputs = job(folder.path(), &[&[], &[], &[]]);
    for (rank, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {}", String::from_utf8_lossy(&output.stderr));
        let lines = String::from_utf8_lossy(&output.stdout).lines().count();
        assert_eq!(lines, if rank == 0 { 3 } else { 0 }, "rank {rank}");
    }
}

#[rstest]
#[case(&["--seed", "7"], "rank 1 has other options than rank 0")]
#[case(&["--text", "src"], "rank 1 has other text than rank 0")]
fn ranks_that_disagree_are_named_on_every_rank(#[case] odd: &[&str], #[case] expected: &str) {
    let folder = folder();
    for (rank, output) in job(folder.path(), &[&[], odd]).into_iter().enumerate() {
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert_eq!(message, format!("train_lm: rank {rank}: {expected}\n"));
    }
}

#[test]
fn a_job_of_another_size_than_asked_for_is_refused() {
    let folder = folder();
    for (arguments, expected) in [
        (["--ranks", "3"], "--ranks 3 was asked for, and this job has 2"),
        (["--strategy", "single"], "--strategy single is for one process, and this job has 2"),
    ] {
        for output in job(folder.path(), &[&arguments, &arguments]) {
            let message = String::from_utf8_lossy(&output.stderr);
            assert!(message.contains(expected), "{message}");
        }
    }
}

/// Starts a demo that trains for longer than any test waits, and returns after its first step.
#[cfg(target_os = "linux")]
fn endless(folder: &Path) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut command = demo(folder, &["--steps", "1000000", "--ranks", "2"]);
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    stdout.read_line(&mut line).expect("a first step");
    assert!(line.starts_with("{\"step\":1,"), "{line}");
    (child, stdout)
}

#[cfg(target_os = "linux")]
fn kill(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it runs");
}

#[cfg(target_os = "linux")]
#[rstest]
fn a_rank_that_dies_is_named_and_the_rest_is_ended(#[values(0, 1)] rank: usize) {
    let folder = folder();
    let (child, mut stdout) = endless(folder.path());
    let pid = child.id();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let ranks: Vec<u32> = children.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
    assert_eq!(ranks.len(), 2);
    kill(ranks[rank]);
    // The output ends when every process that could write to it has ended.
    stdout.read_to_string(&mut String::new()).unwrap();
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(128 + 9), "{message}");
    assert!(
        message.contains(&format!("rank {rank} failed (signal: 9 (SIGKILL)): the rest is ended")),
        "{message}"
    );
}

#[cfg(target_os = "linux")]
#[test]
fn no_process_outlives_the_one_that_started_it() {
    let folder = folder();
    let (mut child, mut stdout) = endless(folder.path());
    child.kill().unwrap();
    child.wait().unwrap();
    stdout.read_to_string(&mut String::new()).unwrap();
}
