//! `cargo xtask predict`: what is measured here beside what is predicted for it.

mod hosts;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::command::{Failure, cargo, output, target_folder};
use hosts::{Hosts, Shape};

pub(crate) use hosts::{FORWARD, forward};

pub(crate) const HELP: &str = "\
cargo xtask predict [--filter NAME]

Measures every algorithm of the collectives by distctl bench, and puts predictions of distctl sim beside:
  loopback   2, 4 and 8 ranks that share this host; one model is fitted to all of them
  100mbit, 1gbit     2 and 4 hosts made of network namespaces, whose links tbf holds to this
  1ms, 10ms, 50ms    the same with links that are so long: a process keeps their packets
What has links of its own is predicted from them and from the work of ranks that was fitted to this host.
--filter takes one of these names. Namespaces need root, ip and tc, and are skipped with a reason otherwise.
The lines and the models are kept in the target folder under predict/. Other load on the machine spoils
all of it.";

const OPERATIONS: [&str; 5] = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"];

/// Links between hosts of their own.
struct Links {
    name: &'static str,
    shape: Shape,
    latency_us: Option<f64>,
    byte_ns: Option<f64>,
    sizes: &'static str,
}

/// Of the bytes of a frame, so many are data.
const FRAME: f64 = 1514.0 / 1448.0;

impl Links {
    const fn slow(rate: &'static str, burst: &'static str, byte_ns: f64, sizes: &'static str) -> Self {
        let byte_ns = Some(byte_ns * FRAME);
        Self { name: rate, shape: Shape::Rate(rate, burst), latency_us: None, byte_ns, sizes }
    }

    /// What a byte takes is not held to anything, so only small sizes can be predicted.
    const fn long(name: &'static str, milliseconds: u64) -> Self {
        let latency_us = Some(1000.0 * milliseconds as f64);
        Self { name, shape: Shape::Latency(milliseconds), latency_us, byte_ns: None, sizes: "8,1K,8K" }
    }
}

const ALL: [Links; 5] = [
    Links::slow("100mbit", "4kb", 80.0, "8,64K,1M"),
    Links::slow("1gbit", "16kb", 8.0, "8,64K,1M,8M"),
    Links::long("1ms", 1),
    Links::long("10ms", 10),
    Links::long("50ms", 50),
];

pub(crate) fn run(filter: &str) -> Result<(), Failure> {
    let named = |name: &str| filter.is_empty() || filter == name;
    if !filter.is_empty() && filter != "loopback" && ALL.iter().all(|links| links.name != filter) {
        return Err(Failure::Usage(format!("there are no links {filter:?}\n\n{HELP}")));
    }
    output(&mut cargo("build --quiet --release --package dist-cli"))?;
    let target = target_folder()?;
    let folder = target.join("predict");
    fs::create_dir_all(&folder)?;
    let bench = Bench { program: target.join("release/distctl"), folder };
    if named("loopback") || !bench.model().exists() {
        loopback(&bench)?;
    }
    for links in ALL.iter().filter(|links| named(links.name)) {
        match Hosts::missing() {
            Some(reason) => eprintln!("     {}: skipped, {reason}", links.name),
            None => apart(&bench, links)?,
        }
    }
    Ok(())
}

/// Ranks that share this host.
fn loopback(bench: &Bench) -> Result<(), Failure> {
    let mut lines = String::new();
    for ranks in [2, 4, 8] {
        lines += &bench.every_algorithm(ranks, "8,1K,64K,1M,16M", |arguments| {
            let mut command = bench.distctl();
            command.args(["bench", "--ranks", &ranks.to_string()]).args(arguments);
            output(&mut command)
        })?;
    }
    let measured = bench.keep("loopback.jsonl", &lines)?;
    let mut compare = bench.distctl();
    compare.args(["sim", "compare"]).arg(measured).arg("--fit-to").arg(bench.model());
    println!("loopback\n{}", output(&mut compare)?);
    Ok(())
}

/// One rank on each of some hosts: predicted from what their links are, and from the work that ranks of this host
/// were found to have.
fn apart(bench: &Bench, links: &Links) -> Result<(), Failure> {
    let mut lines = String::new();
    for ranks in [2, 4] {
        let hosts = Hosts::new(ranks, links.shape)?;
        lines += &bench.every_algorithm(ranks, links.sizes, |arguments| {
            hosts.run(&bench.program, &bench.folder, arguments)
        })?;
    }
    let measured = bench.keep(&format!("{}.jsonl", links.name), &lines)?;
    let text = fs::read_to_string(bench.model())?;
    let mut model: Value = serde_json::from_str(&text).map_err(std::io::Error::from)?;
    for (field, value) in [("latency_us", links.latency_us), ("byte_ns", links.byte_ns)] {
        if let Some(value) = value {
            model[field] = value.into();
        }
    }
    let model = bench.keep(&format!("{}.model", links.name), &model.to_string())?;
    let mut compare = bench.distctl();
    compare.args(["sim", "compare", "--apart"]).arg(measured).arg("--model").arg(model);
    println!("{}\n{}", links.name, output(&mut compare)?);
    Ok(())
}

/// What measures, and where that is kept.
struct Bench {
    program: PathBuf,
    folder: PathBuf,
}

impl Bench {
    fn distctl(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env("DIST_COSTS", "off");
        command
    }

    /// The model that was fitted to ranks of this host.
    fn model(&self) -> PathBuf {
        self.folder.join("loopback.model")
    }

    fn keep(&self, name: &str, text: &str) -> Result<PathBuf, Failure> {
        let path = self.folder.join(name);
        fs::write(&path, text)?;
        Ok(path)
    }

    /// The lines of all algorithms of all operations, measured as told.
    fn every_algorithm(
        &self,
        ranks: usize,
        sizes: &str,
        measure: impl Fn(&[&str]) -> Result<String, Failure>,
    ) -> Result<String, Failure> {
        let mut lines = String::new();
        for operation in OPERATIONS {
            for algorithm in self.algorithms(operation, ranks)? {
                eprintln!("     {ranks} ranks: {operation} by {algorithm}");
                let order = ["--order", "any", "--json"];
                let what = [operation, "--algorithm", &algorithm, "--bytes", sizes];
                lines += &measure(&[&what[..], &order[..]].concat())?;
            }
        }
        Ok(lines)
    }

    fn algorithms(&self, operation: &str, ranks: usize) -> Result<Vec<String>, Failure> {
        let mut command = self.distctl();
        command.args(["sim", operation, "--ranks", &ranks.to_string(), "--json"]);
        let name = |line: &str| {
            let line: Value = serde_json::from_str(line).ok()?;
            Some(line["algorithm"].as_str()?.to_owned())
        };
        Ok(output(&mut command)?.lines().filter_map(name).collect())
    }
}

/// A file that only this user may read, as secrets are.
fn private(path: &Path, text: &str) -> Result<(), Failure> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    Ok(file.write_all(text.as_bytes())?)
}
