//! `cargo xtask predict`: what is measured here beside what is predicted for it.

mod hosts;
mod tables;

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::command::{Failure, cargo, output, target_folder};
use hosts::{Hosts, Shape};
use tables::Line;

pub(crate) use hosts::{FORWARD, forward};

pub(crate) const HELP: &str = "\
cargo xtask predict [--filter NAME] [--ranks N] [--operation OP] [--kept]

Measures every algorithm of the collectives by distctl bench, and puts predictions of distctl sim beside:
  loopback   2, 4 and 8 ranks that share this host; one model is fitted to all of them
  100mbit, 1gbit     2 and 4 hosts made of network namespaces, whose links tbf holds to this
  1ms, 10ms, 50ms    the same with links that are so long: a process keeps their packets
What has links of its own is predicted from them and from the work of ranks that was fitted to this host.
A byte takes there what tbf lets it, and the latency is that of 8 bytes from one host to another and back.
--filter takes one of these names, --ranks one of the numbers, --operation one of the operations. What is
measured is added to what is kept in the target folder under predict/, the tables are made of all of it, and
medians count; --kept measures nothing. Namespaces need root, ip and tc, and are skipped with a reason
otherwise. Other load on the machine spoils all of it.";

const OPERATIONS: [&str; 5] = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"];

/// What links are measured by.
const PING_PONG: &str = "pingpong";

/// Where ranks are, and what is between them.
struct Place {
    name: &'static str,
    /// None for ranks that share this host.
    links: Option<Links>,
    ranks: &'static [usize],
    sizes: &'static str,
}

/// Links between hosts of their own.
struct Links {
    shape: Shape,
    /// What a byte takes, if it is held to anything.
    byte_ns: Option<f64>,
}

/// Of the bytes of a frame, so many are data.
const FRAME: f64 = 1514.0 / 1448.0;

impl Place {
    const fn slow(rate: &'static str, burst: &'static str, byte_ns: f64, sizes: &'static str) -> Self {
        let byte_ns = Some(byte_ns * FRAME);
        let links = Links { shape: Shape::Rate(rate, burst), byte_ns };
        Self { name: rate, links: Some(links), ranks: &[2, 4], sizes }
    }

    /// What a byte takes is not held to anything, so only small sizes can be predicted.
    const fn long(name: &'static str, milliseconds: u64) -> Self {
        let links = Links { shape: Shape::Latency(milliseconds), byte_ns: None };
        Self { name, links: Some(links), ranks: &[2, 4], sizes: "8,1K,8K" }
    }
}

const PLACES: [Place; 6] = [
    Place { name: "loopback", links: None, ranks: &[2, 4, 8], sizes: "8,1K,64K,1M,16M" },
    Place::slow("100mbit", "20kb", 80.0, "8,64K,1M"),
    Place::slow("1gbit", "20kb", 8.0, "8,64K,1M,8M"),
    Place::long("1ms", 1),
    Place::long("10ms", 10),
    Place::long("50ms", 50),
];

/// What was asked for: all of what is not said.
#[derive(Default)]
struct Wish {
    place: Option<String>,
    ranks: Option<String>,
    operation: Option<String>,
    kept: bool,
}

impl Wish {
    /// `None` when help was asked for and printed.
    fn parse(mut arguments: lexopt::Parser) -> Result<Option<Self>, Failure> {
        let mut wish = Self::default();
        while let Some(argument) = arguments.next()? {
            let value = match argument {
                lexopt::Arg::Long("help") | lexopt::Arg::Short('h') => {
                    println!("{HELP}");
                    return Ok(None);
                }
                lexopt::Arg::Long("filter") => &mut wish.place,
                lexopt::Arg::Long("ranks") => &mut wish.ranks,
                lexopt::Arg::Long("operation") => &mut wish.operation,
                lexopt::Arg::Long("kept") => {
                    wish.kept = true;
                    continue;
                }
                other => return Err(other.unexpected().into()),
            };
            *value = Some(arguments.value()?.to_string_lossy().into_owned());
        }
        if let Some(name) = &wish.place
            && PLACES.iter().all(|place| place.name != name)
        {
            return Err(Failure::Usage(format!("there are no links {name:?}\n\n{HELP}")));
        }
        Ok(Some(wish))
    }
}

fn wanted(wish: Option<&String>, name: &str) -> bool {
    wish.is_none_or(|wish| wish == name)
}

pub(crate) fn run(arguments: lexopt::Parser) -> Result<(), Failure> {
    let Some(wish) = Wish::parse(arguments)? else { return Ok(()) };
    output(&mut cargo("build --quiet --release --package dist-cli"))?;
    let target = target_folder()?;
    let folder = target.join("predict");
    fs::create_dir_all(&folder)?;
    let bench = Bench { program: target.join("release/distctl"), folder };
    for place in PLACES.iter().filter(|place| wanted(wish.place.as_ref(), place.name)) {
        if !wish.kept {
            match place.links.as_ref().and_then(|_| Hosts::missing()) {
                Some(reason) => eprintln!("     {}: skipped, {reason}", place.name),
                None => bench.measure(place, &wish)?,
            }
        }
        let lines = bench.compare(place)?;
        print!("{}", tables::of(place.name, &lines));
    }
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

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// What was measured of an operation, or will be.
    fn lines(&self, place: &Place, ranks: usize, operation: &str) -> PathBuf {
        self.path(&format!("{}-{ranks}-{operation}.jsonl", place.name))
    }

    /// Measures what is wanted of a place, and keeps it.
    fn measure(&self, place: &Place, wish: &Wish) -> Result<(), Failure> {
        for &ranks in place.ranks.iter().filter(|ranks| wanted(wish.ranks.as_ref(), &ranks.to_string())) {
            let hosts = match &place.links {
                Some(links) => Some(Hosts::new(ranks, links.shape)?),
                None => None,
            };
            if let Some(hosts) = &hosts {
                let ping_pong = self.bench(Some(hosts), ranks, &[PING_PONG, "--bytes", "8", "--json"])?;
                self.keep(&self.lines(place, ranks, PING_PONG), &ping_pong)?;
            }
            for operation in OPERATIONS.into_iter().filter(|name| wanted(wish.operation.as_ref(), name)) {
                let mut lines = String::new();
                for algorithm in self.algorithms(operation, ranks)? {
                    eprintln!("     {}, {ranks} ranks: {operation} by {algorithm}", place.name);
                    let order = ["--order", "any", "--json"];
                    let what = [operation, "--algorithm", &algorithm, "--bytes", place.sizes];
                    lines += &self.bench(hosts.as_ref(), ranks, &[&what[..], &order].concat())?;
                }
                self.keep(&self.lines(place, ranks, operation), &lines)?;
            }
        }
        Ok(())
    }

    /// Adds to what is kept.
    fn keep(&self, path: &Path, lines: &str) -> Result<(), Failure> {
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(file.write_all(lines.as_bytes())?)
    }

    fn bench(&self, hosts: Option<&Hosts>, ranks: usize, arguments: &[&str]) -> Result<String, Failure> {
        if let Some(hosts) = hosts {
            return hosts.run(&self.program, &self.folder, arguments);
        }
        let mut command = self.distctl();
        command.args(["bench", "--transport", "tcp", "--ranks", &ranks.to_string()]);
        output(command.args(arguments))
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

    /// All that is kept of a place, beside predictions: from what fits best to ranks that share this host; from what
    /// links are and the work of such ranks, where they have hosts of their own.
    fn compare(&self, place: &Place) -> Result<Vec<Line>, Failure> {
        let of_ranks = |&ranks| OPERATIONS.map(|operation| self.lines(place, ranks, operation));
        let kept: Vec<PathBuf> = place.ranks.iter().flat_map(of_ranks).filter(|path| path.exists()).collect();
        if kept.is_empty() {
            return Ok(Vec::new());
        }
        let fitted = self.path("loopback.model");
        let mut command = self.distctl();
        command.args(["sim", "compare", "--json"]).args(kept);
        match &place.links {
            None => command.arg("--fit-to").arg(fitted),
            Some(links) => command.arg("--apart").arg("--model").arg(self.model(place, links, &fitted)?),
        };
        let lines = output(&mut command)?;
        Ok(lines.lines().map(serde_json::from_str).collect::<Result<_, _>>().map_err(std::io::Error::from)?)
    }

    /// Writes down what links are, beside the work of ranks of this host.
    fn model(&self, place: &Place, links: &Links, fitted: &Path) -> Result<PathBuf, Failure> {
        let text = fs::read_to_string(fitted)
            .map_err(|_| Failure::Check("nothing is fitted yet: --filter loopback comes first".to_owned()))?;
        let mut model: Value = serde_json::from_str(&text).map_err(std::io::Error::from)?;
        let ends = 2.0 * model["message_us"].as_f64().unwrap_or(0.0);
        if let Some(trip_us) = self.trip_us(place)? {
            model["latency_us"] = (trip_us - ends).max(0.0).into();
        }
        if let Some(byte_ns) = links.byte_ns {
            model["byte_ns"] = byte_ns.into();
        }
        let path = self.path(&format!("{}.model", place.name));
        fs::write(&path, model.to_string())?;
        Ok(path)
    }

    /// What a message of 8 bytes took, from one end to the other.
    fn trip_us(&self, place: &Place) -> Result<Option<f64>, Failure> {
        let mut trips = Vec::new();
        for &ranks in place.ranks {
            let Ok(text) = fs::read_to_string(self.lines(place, ranks, PING_PONG)) else { continue };
            for line in text.lines() {
                let line: Value = serde_json::from_str(line).map_err(std::io::Error::from)?;
                trips.extend(line["median_us"].as_f64());
            }
        }
        trips.sort_by(f64::total_cmp);
        Ok(trips.get(trips.len() / 2).copied())
    }
}

/// A file that only this user may read, as secrets are.
fn private(path: &Path, text: &str) -> Result<(), Failure> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    Ok(file.write_all(text.as_bytes())?)
}
