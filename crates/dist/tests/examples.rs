//! Every example runs as its first lines say, and does what it is there to show.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use dist_testkit::process::Port;
use rstest::rstest;

/// Returns the path of a program or example; `cargo test` builds examples next to the tests.
fn built(name: &str, how: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).expect("tests lie in deps").join(name);
    assert!(program.exists(), "{} is missing: cargo build {how}", program.display());
    program
}

fn example(name: &str) -> PathBuf {
    built(&format!("examples/{name}"), &format!("-p dist --all-features --example {name}"))
}

/// Returns a command without the variables of a surrounding job.
fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let foreign = name.to_string_lossy();
        if ["DIST_", "DISTCTL_", "TORCHELASTIC_"].iter().any(|start| foreign.starts_with(start)) {
            command.env_remove(&name);
        }
    }
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RAYON_NUM_THREADS"] {
        command.env_remove(name);
    }
    command.env("DIST_COSTS", "off").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn distctl(arguments: &[&str]) -> Command {
    let mut command = command(&built("distctl", "-p dist-cli"));
    command.arg("run").args(arguments);
    command
}

/// Returns the lines that a job printed. The order of lines of different ranks varies.
#[track_caller]
fn lines_of(job: Child) -> Vec<String> {
    let output = job.wait_with_output().unwrap();
    let [stdout, stderr] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(output.status.success(), "{}: {stderr}", output.status);
    assert_eq!(stderr, "");
    stdout.lines().map(str::to_owned).collect()
}

/// Returns the lines in the order of the alphabet.
fn sorted(mut lines: Vec<String>) -> Vec<String> {
    lines.sort_unstable();
    lines
}

/// Runs an example as this many processes, and returns the lines that they printed, without times.
#[track_caller]
fn run(ranks: usize, name: &str, arguments: &[&str]) -> Vec<String> {
    let mut command = distctl(&["-n", &ranks.to_string(), "--"]);
    let mut lines = lines_of(command.arg(example(name)).args(arguments).spawn().unwrap());
    lines.retain(|line| !line.ends_with(" ms"));
    lines
}

/// Checks that an example prints this line on any number of ranks.
#[track_caller]
fn prints(name: &str, expected: &str) {
    for ranks in RANKS {
        assert_eq!(run(ranks, name, &[]), [expected], "{name} on {ranks} ranks");
    }
}

/// The numbers of ranks that programs are checked on: one, powers of two, and others.
const RANKS: [usize; 5] = [1, 2, 3, 4, 7];

/// Returns the losses that a training printed, in order.
fn losses(lines: &[String]) -> Vec<f32> {
    let loss = |line: &String| line.split_once("loss ")?.1.split([',', ' ']).next()?.parse().ok();
    lines.iter().filter_map(loss).collect()
}

#[test]
fn all_ranks_print_hello() {
    let lines = sorted(run(3, "hello", &[]));
    assert_eq!(lines[..3], ["hello from rank 0 of 3", "hello from rank 1 of 3", "hello from rank 2 of 3"]);
    assert!(lines[3].starts_with("the processes are ["));
    let alone = lines_of(command(&example("hello")).spawn().unwrap());
    assert_eq!(alone[0], "hello from rank 0 of 1");
}

#[test]
fn all_reduce_gives_sums_maxima_and_means() {
    let lines = sorted(run(4, "all_reduce", &[]));
    assert_eq!(lines, ["4 ranks: sum 10, largest 3, mean 1.5", "meanwhile rank 0 computed 21065.833"]);
}

#[test]
fn kmeans_finds_the_centres_on_any_number_of_ranks() {
    let alone = sorted(run(1, "kmeans", &[]));
    assert_eq!(alone.len(), 4, "{alone:?}");
    for (line, near) in alone.iter().zip([[0.0, 0.0], [0.0, 10.0], [10.0, 0.0]]) {
        let numbers = line.trim_matches(['(', ')']).split(", ").map(|number| number.parse::<f64>().unwrap());
        assert!(numbers.zip(near).all(|(number, near)| (number - near).abs() < 0.1), "{line}");
    }
    for ranks in RANKS {
        assert_eq!(sorted(run(ranks, "kmeans", &[])), alone);
    }
}

#[test]
fn halo_has_the_same_bits_on_any_number_of_ranks() {
    let alone = run(1, "halo", &[]);
    assert!(alone[0].starts_with("heat 3200.000, "), "{alone:?}");
    for ranks in RANKS {
        assert_eq!(run(ranks, "halo", &[]), alone);
    }
}

/// Arbitrary bits that depend only on the number (SplitMix64).
fn mixed(number: usize) -> u64 {
    let mixed = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[test]
fn sample_sort_sorts_as_one_thread_does() {
    let mut keys: Vec<u64> = (0..20_000).map(mixed).collect();
    keys.sort_unstable();
    let sum =
        keys.iter().zip(1_u64..).fold(0_u64, |sum, (key, place)| sum.wrapping_add(key.wrapping_mul(place)));
    prints("sample_sort", &format!("20000 keys, checksum {sum:016x}"));
}

#[test]
fn hash_join_finds_the_pairs_of_nested_loops() {
    let rows = 20_000;
    let mut numbers = BTreeMap::<u64, [Vec<u64>; 2]>::new();
    for number in 0..rows {
        for table in 0..2 {
            numbers.entry(mixed(2 * number + table) % rows as u64).or_default()[table].push(number as u64);
        }
    }
    let (mut pairs, mut sum) = (0_u64, 0_u64);
    for [left, right] in numbers.values() {
        for (left, right) in left.iter().flat_map(|left| right.iter().map(move |right| (left, right))) {
            (pairs, sum) = (pairs + 1, sum.wrapping_add(left ^ right));
        }
    }
    prints("hash_join", &format!("{pairs} pairs, checksum {sum:x}"));
}

#[test]
fn summa_multiplies_as_three_loops_do() {
    let (n, mut sum, mut weighted) = (60, 0, 0);
    for (row, column) in (0..n).flat_map(|row| (0..n).map(move |column| (row, column))) {
        let product: usize = (0..n).map(|k| (7 * row + 3 * k) % 10 * ((5 * k + column) % 10)).sum();
        (sum, weighted) = (sum + product, weighted + product * ((row + 2 * column) % 13));
    }
    prints("summa", &format!("sum {sum}, weighted {weighted}"));
}

#[test]
fn argmax_finds_the_first_of_the_largest() {
    let height = |point: usize| ((point * 7919 % 10_007) as f64).sqrt();
    let mut best = 0;
    for point in 1..100_000 {
        best = if height(point) > height(best) { point } else { best };
    }
    prints("argmax", &format!("{:.6} at {best}", height(best)));
}

#[test]
fn welford_has_the_mean_and_the_variance_of_two_passes() {
    let numbers: Vec<f64> =
        (0..100_000).map(|index| f64::from(index + 1) * 0.618_033_988_749_895 % 1.0).collect();
    let mean = numbers.iter().sum::<f64>() / 1e5;
    let variance = numbers.iter().map(|number| (number - mean).powi(2)).sum::<f64>() / (1e5 - 1.0);
    prints("welford", &format!("100000 numbers, mean {:.6}, variance {variance:.6}", 1e6 + mean));
}

/// The steps from a number to 1, if even numbers are halved and odd ones tripled and increased by 1.
fn steps(mut number: u64) -> u64 {
    let mut steps = 0;
    while number > 1 {
        number = if number.is_multiple_of(2) { number / 2 } else { 3 * number + 1 };
        steps += 1;
    }
    steps
}

#[test]
fn task_farm_has_the_results_of_all_tasks() {
    prints("task_farm", &format!("{} steps", (0..6_400).map(steps).sum::<u64>()));
}

#[test]
fn table_is_read_everywhere() {
    let entry =
        |number: u64| mixed(usize::try_from(mixed(usize::try_from(number).unwrap()) % (1 << 16)).unwrap());
    let sum = (0..20_000).map(entry).fold(0, u64::wrapping_add);
    prints("table", &format!("20000 reads, sum {sum:x}"));
}

#[test]
fn dynamic_counts_every_round_once() {
    prints("dynamic", &format!("{} steps", (0..5_000).map(steps).sum::<u64>()));
}

#[test]
fn two_machines_are_one_world() {
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    fs::write(&secret, [7; 32]).unwrap();
    fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
    let port = Port::reserve();
    let address = format!("127.0.0.1:{}", port.number());
    let machines = ["0", "1"].map(|machine| {
        let arguments = ["-n", "2", "--nnodes", "2", "--node-rank", machine, "--rdzv", &address, "--"];
        let mut command = distctl(&arguments);
        // Else both would be known for the one machine that they are.
        command.env("DIST_HOST_ID", machine).env("DIST_SECRET_FILE", &secret);
        // It warns that no other machine reaches this address.
        command.env("DIST_LOG", "error");
        command.arg(example("two_machines")).spawn().unwrap()
    });
    let [first, second] = machines.map(lines_of).map(sorted);
    let sums = "is the first of 2 here; the sums of the machines are [1, 5]";
    assert_eq!(first, ["2 machines, sum of the ranks 6, sum of ones 4".to_owned(), format!("rank 0 {sums}")]);
    assert_eq!(second, [format!("rank 2 {sums}")]);
}

#[test]
fn simulated_ranks_name_the_one_that_died() {
    let lines = lines_of(command(&example("simulated")).spawn().unwrap());
    assert!(lines[0].starts_with("all ranks have 1.5 after"), "{lines:?}");
    assert!(lines[1].starts_with("rank 2 died, and the others were told so after"), "{lines:?}");
}

#[rstest]
#[case::whole("blocks", 2, 10)]
#[case::sharded("sharded", 2, 3)]
#[case::by_a_pipeline("pipeline", 4, 4)]
#[case::on_a_mesh("mesh", 8, 2)]
fn trainings_learn(#[case] name: &str, #[case] ranks: usize, #[case] printed: usize) {
    let lines = run(ranks, name, &[]);
    let losses = losses(&lines);
    assert_eq!(losses.len(), printed, "{lines:?}");
    assert!(losses[printed - 1] < losses[0], "{lines:?}");
}

#[test]
fn resume_has_the_bits_of_a_training_that_was_never_interrupted() {
    let folder = tempfile::tempdir().unwrap();
    let train = |ranks, directory: &str, until: &str| {
        let directory = folder.path().join(directory);
        run(ranks, "resume", &[directory.to_str().unwrap(), until]).remove(0)
    };
    let whole = train(1, "whole", "12");
    let expected = whole.strip_prefix("from step 0 to 12").unwrap();
    assert!(train(4, "parts", "9").starts_with("from step 0 to 9"));
    assert_eq!(train(2, "parts", "12"), format!("from step 9 to 12{expected}"));
}

const LINES_MAX: usize = 80;

#[test]
fn every_example_is_short_and_is_run_by_a_test() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut names = BTreeSet::new();
    for path in paths {
        let text = fs::read_to_string(&path).unwrap();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        assert!(text.lines().count() <= LINES_MAX, "{name} has more than {LINES_MAX} lines");
        assert!(include_str!("examples.rs").contains(&format!("\"{name}\"")), "no test runs {name}");
        assert!(
            include_str!("../README.md").contains(&format!("(examples/{name}.rs)")),
            "README has no {name}"
        );
        names.insert(name);
    }
    assert!(names.len() >= 11, "{names:?}");
}
