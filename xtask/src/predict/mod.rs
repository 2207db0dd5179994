//! `cargo xtask predict`: compares predictions with measurements on this machine.

mod tables;

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use dist_testkit::hosts::{Hosts, Links as HostLinks};
use serde_json::Value;

use crate::command::{Failure, cargo, output, print, print_help, target_folder};
use crate::hosts::{Job, run_all};
use tables::Line;

pub(crate) const HELP: &str = "\
cargo xtask predict [--filter NAME] [--ranks N] [--operation OP] [--rounds N] [--distctl FILE] [--kept]

Measures every algorithm with distctl bench and prints the predictions of distctl sim beside the results, for
  loopback, memory   2, 4 and 8 ranks on this host, over TCP and through shared memory
  100mbit, 1gbit     2 and 4 network namespaces as hosts, whose links tbf limits to this bandwidth
  1ms, 10ms, 50ms    the same with this latency: a process delays the packets
Ranks on this host are predicted from a model that is fitted to single messages between two of them and to a
barrier, not to the predicted operations. Hosts are predicted from their links and from the CPU time of ranks
on loopback. The bandwidth is the limit of tbf; the latency is measured with 8 bytes there and back.
  --filter NAME      one of the names above
  --ranks N          one of the numbers of ranks
  --operation OP     one of the operations
  --rounds N         measure each algorithm N times, in turns [1]
  --distctl FILE     measure with this program, and build none
  --kept             measure nothing; print the tables of earlier results
Results are stored in target/predict, and the tables show medians of all of them. Results on this host are
discarded if a message between two ranks took more than 1.3 times the lowest time at that moment.
Namespaces need root, ip and tc; otherwise they are skipped with a reason. Use an otherwise idle machine.";

const OPERATIONS: [&str; 5] = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"];

/// The operation that measures the latency of links.
const PING_PONG: &str = "pingpong";

/// The operations to which the model of ranks on this host is fitted: single messages between two ranks, and a barrier of
/// two ranks for the cost of a collective besides its messages.
const MESSAGES: [&str; 4] = [PING_PONG, "sendrecv", "stream", BARRIER];
const BARRIER: &str = "barrier";
/// The arguments of the barrier. It has one size only, so it gets more samples.
const BARRIER_ARGUMENTS: [&str; 5] = [BARRIER, "--algorithm", "dissemination", "--samples", "200"];
const MESSAGE_SIZES: &str = "8,1K,16K,64K,256K,1M,4M,16M";

/// A place to measure: the ranks, and the network between them.
struct Place {
    name: &'static str,
    between: Between,
    ranks: &'static [usize],
    sizes: &'static str,
}

/// The number of samples on slowed links, where times vary little.
const SAMPLES: &str = "5";

/// Sizes that are measured first and do not count. For some tenths of a second after the start, the system may run all
/// ranks on one core.
const SETTLING: &str = "64K,64K,64K";

/// Maximum number of repetitions of a disturbed measurement.
const TRIES: usize = 2;

/// A measurement is disturbed if a message takes this many times as long as the fastest one.
const DISTURBED: f64 = 1.3;

/// The network between ranks.
enum Between {
    /// The ranks share this host, and use this medium.
    Medium(&'static str),
    Links(Links),
}

/// The links between hosts with one rank each.
struct Links {
    shape: HostLinks,
    /// The time of a byte, if the bandwidth is limited.
    byte_ns: Option<f64>,
}

/// The bytes of a full frame per byte of data.
const FRAME: f64 = 1514.0 / 1448.0;

impl Place {
    const fn slow(name: &'static str, bandwidth: u64, sizes: &'static str) -> Self {
        let byte_ns = Some(8e9 / bandwidth as f64 * FRAME);
        let links = Links { shape: HostLinks { bandwidth: Some(bandwidth), ..HostLinks::FAST }, byte_ns };
        Self { name, between: Between::Links(links), ranks: &[2, 4], sizes }
    }

    /// Returns a place with this latency. Its bandwidth is not limited, so only small sizes can be predicted.
    const fn long(name: &'static str, milliseconds: u64) -> Self {
        let latency = Duration::from_millis(milliseconds);
        let links = Links { shape: HostLinks { latency, mtu: 1400, ..HostLinks::FAST }, byte_ns: None };
        Self { name, between: Between::Links(links), ranks: &[2, 4], sizes: "8,1K,8K" }
    }

    const fn here(name: &'static str, medium: &'static str) -> Self {
        Self { name, between: Between::Medium(medium), ranks: &[2, 4, 8], sizes: "8,1K,64K,1M,16M" }
    }

    const fn links(&self) -> Option<&Links> {
        match &self.between {
            Between::Medium(_) => None,
            Between::Links(links) => Some(links),
        }
    }
}

const PLACES: [Place; 7] = [
    Place::here("loopback", "tcp"),
    Place::here("memory", "shm"),
    Place::slow("100mbit", 100_000_000, "8,64K,1M"),
    Place::slow("1gbit", 1_000_000_000, "8,64K,1M,8M"),
    Place::long("1ms", 1),
    Place::long("10ms", 10),
    Place::long("50ms", 50),
];

/// The options. Without an option, all of its values are measured.
#[derive(Default)]
struct Wish {
    place: Option<String>,
    ranks: Option<String>,
    operation: Option<String>,
    rounds: Option<String>,
    distctl: Option<String>,
    kept: bool,
}

impl Wish {
    /// Parses the arguments. Returns `None` if help was requested, and prints it.
    fn parse(mut arguments: lexopt::Parser) -> Result<Option<Self>, Failure> {
        let mut wish = Self::default();
        while let Some(argument) = arguments.next()? {
            let value = match argument {
                lexopt::Arg::Long("help") | lexopt::Arg::Short('h') => {
                    print_help(HELP)?;
                    return Ok(None);
                }
                lexopt::Arg::Long("filter") => &mut wish.place,
                lexopt::Arg::Long("ranks") => &mut wish.ranks,
                lexopt::Arg::Long("operation") => &mut wish.operation,
                lexopt::Arg::Long("rounds") => &mut wish.rounds,
                lexopt::Arg::Long("distctl") => &mut wish.distctl,
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
        if let Some(name) = wish.operation.as_ref().filter(|name| !OPERATIONS.contains(&name.as_str())) {
            return Err(Failure::Usage(format!("{name:?} is not measured\n\n{HELP}")));
        }
        if let Some(number) = &wish.ranks
            && !wish.places().any(|place| place.ranks.iter().any(|ranks| ranks.to_string() == *number))
        {
            return Err(Failure::Usage(format!("there are no {number:?} ranks at these links\n\n{HELP}")));
        }
        Ok(Some(wish))
    }

    fn places(&self) -> impl Iterator<Item = &'static Place> {
        PLACES.iter().filter(|place| wanted(self.place.as_ref(), place.name))
    }

    fn rounds(&self) -> Result<usize, Failure> {
        let Some(text) = &self.rounds else { return Ok(1) };
        text.parse().map_err(|_| Failure::Usage(format!("{text:?} is not a number of rounds")))
    }
}

fn wanted(wish: Option<&String>, name: &str) -> bool {
    wish.is_none_or(|wish| wish == name)
}

pub(crate) fn run(arguments: lexopt::Parser) -> Result<(), Failure> {
    let Some(wish) = Wish::parse(arguments)? else { return Ok(()) };
    let target = target_folder()?;
    let program = match &wish.distctl {
        Some(path) => PathBuf::from(path),
        None => {
            output(&mut cargo("build --quiet --release --package dist-cli"))?;
            target.join("release/distctl")
        }
    };
    let folder = target.join("predict");
    fs::create_dir_all(&folder)?;
    let bench = Bench { program, folder };
    for place in wish.places() {
        if !wish.kept {
            bench.measure(place, &wish)?;
        }
        let lines = bench.compare(place)?;
        print(&tables::of(place.name, &lines))?;
    }
    Ok(())
}

/// The program that measures, and the folder of its results.
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

    /// Returns the file with the results of an operation.
    fn lines(&self, place: &Place, ranks: usize, operation: &str) -> PathBuf {
        self.path(&format!("{}-{ranks}-{operation}.jsonl", place.name))
    }

    /// Measures the requested operations of a place, and stores the results.
    fn measure(&self, place: &Place, wish: &Wish) -> Result<(), Failure> {
        let (messages, sizes) = match &place.between {
            Between::Medium(_) => (&MESSAGES[..], MESSAGE_SIZES),
            Between::Links(_) => (&MESSAGES[..1], "8"),
        };
        for &ranks in place.ranks.iter().filter(|ranks| wanted(wish.ranks.as_ref(), &ranks.to_string())) {
            let job = match place.links() {
                Some(links) => match Hosts::with_links(ranks, links.shape) {
                    Ok(hosts) => Some(Job::new(hosts, 1)?),
                    Err(reason) => {
                        eprintln!("     {}: skipped, {reason}", place.name);
                        return Ok(());
                    }
                },
                None => None,
            };
            for _ in 0..wish.rounds()? {
                // Single messages involve only two ranks.
                for name in messages.iter().filter(|_| ranks == place.ranks[0] || job.is_some()) {
                    let (arguments, sizes): (&[&str], _) = match *name {
                        BARRIER => (&BARRIER_ARGUMENTS, "0"),
                        _ => (&[name], sizes),
                    };
                    let lines = self.steady(place, job.as_ref(), ranks, (arguments, sizes))?;
                    self.keep(&self.lines(place, ranks, name), &lines)?;
                }
                for operation in OPERATIONS.into_iter().filter(|name| wanted(wish.operation.as_ref(), name)) {
                    eprintln!("     {}, {ranks} ranks: {operation}", place.name);
                    for algorithm in self.algorithms(operation, ranks)? {
                        let arguments = [operation, "--algorithm", &algorithm, "--order", "any"];
                        let lines = self.steady(place, job.as_ref(), ranks, (&arguments, place.sizes))?;
                        self.keep(&self.lines(place, ranks, operation), &lines)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Appends lines to a file.
    fn keep(&self, path: &Path, lines: &str) -> Result<(), Failure> {
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(file.write_all(lines.as_bytes())?)
    }

    /// Measures an operation. On this host, repeats the measurement until a message before and after it is about as fast
    /// as ever. The cores of a virtual machine may be several times as far apart for minutes. Returns nothing if all
    /// tries were disturbed.
    fn steady(
        &self,
        place: &Place,
        job: Option<&Job>,
        ranks: usize,
        wanted: (&[&str], &str),
    ) -> Result<String, Failure> {
        if job.is_some() {
            return self.bench(place, job, ranks, wanted);
        }
        for _ in 0..TRIES {
            let before = self.probe(place)?;
            let lines = self.bench(place, job, ranks, wanted)?;
            let slowest = before.max(self.probe(place)?);
            if slowest < DISTURBED * self.fastest(place) {
                return with_probe(&lines, slowest);
            }
        }
        eprintln!("     the machine is disturbed: {} is left out", wanted.0.join(" "));
        Ok(String::new())
    }

    /// Measures the current time of a message between two ranks of this host, in microseconds.
    fn probe(&self, place: &Place) -> Result<f64, Failure> {
        let text = self.bench(place, None, 2, (&[PING_PONG, "--samples", "5"], "64K"))?;
        let line: Value = serde_json::from_str(&text).map_err(std::io::Error::from)?;
        let us = line["median_us"].as_f64().unwrap_or(f64::INFINITY);
        if us < self.fastest(place) {
            fs::write(self.path(&format!("{}.fastest", place.name)), us.to_string())?;
        }
        Ok(us)
    }

    /// Returns the lowest time of a message so far.
    fn fastest(&self, place: &Place) -> f64 {
        let path = self.path(&format!("{}.fastest", place.name));
        let kept = fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok());
        kept.unwrap_or(f64::INFINITY)
    }

    /// Writes the results that were not disturbed to a separate file, and returns its path. A later, faster message can
    /// show that an earlier result was disturbed.
    fn undisturbed(&self, place: &Place, path: &Path) -> Result<PathBuf, Failure> {
        let limit = DISTURBED * self.fastest(place);
        let mut lines = String::new();
        for line in fs::read_to_string(path)?.lines() {
            let value: Value = serde_json::from_str(line).map_err(std::io::Error::from)?;
            if value["probe_us"].as_f64().is_none_or(|us| us < limit) {
                lines += &(line.to_owned() + "\n");
            }
        }
        let steady = path.with_extension("steady");
        fs::write(&steady, lines)?;
        Ok(steady)
    }

    fn bench(
        &self,
        place: &Place,
        job: Option<&Job>,
        ranks: usize,
        (arguments, sizes): (&[&str], &str),
    ) -> Result<String, Failure> {
        if let Some(job) = job {
            let clock = ["--start", "clock", "--samples", SAMPLES, "--json", "--bytes", sizes];
            let command = |rank: usize| {
                let mut command = job.command(rank, &self.program);
                command.arg("bench").args(arguments).args(clock);
                command
            };
            return run_all(command, job.world_size(), true);
        }
        let Between::Medium(medium) = place.between else { return Ok(String::new()) };
        let mut command = self.distctl();
        command.args(["bench", "--json", "--transport", medium, "--ranks", &ranks.to_string()]);
        let text = output(command.args(arguments).args(["--bytes", &format!("{SETTLING},{sizes}")]))?;
        let lines: Vec<_> = text.lines().map(|line| line.to_owned() + "\n").collect();
        let settled = lines.len().saturating_sub(sizes.split(',').count());
        Ok(lines[settled..].concat())
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

    /// Compares all results of a place with predictions. On this host they come from the model that best fits
    /// single messages. Between hosts they come from the links, and from the CPU time of ranks on this host.
    fn compare(&self, place: &Place) -> Result<Vec<Line>, Failure> {
        let kept = |names: &[&str]| -> Result<Vec<PathBuf>, Failure> {
            let of_ranks = |&ranks| names.iter().map(move |name| self.lines(place, ranks, name));
            let files = place.ranks.iter().flat_map(of_ranks).filter(|path| path.exists());
            files.map(|path| self.undisturbed(place, &path)).collect()
        };
        let lines = kept(&OPERATIONS)?;
        if lines.is_empty() {
            return Ok(Vec::new());
        }
        let model = self.path(&format!("{}.model", place.name));
        let mut command = self.distctl();
        command.args(["sim", "compare", "--json"]).args(lines).arg("--model").arg(&model);
        match place.links() {
            None => {
                let mut fit = self.distctl();
                fit.args(["sim", "compare", "--reduce", &self.reduce_speed(place)?, "--fit-to"]).arg(&model);
                output(fit.args(kept(&MESSAGES)?))?;
            }
            Some(links) => {
                self.write_model(place, links, &model)?;
                command.arg("--apart");
            }
        }
        let lines = output(&mut command)?;
        Ok(lines.lines().map(serde_json::from_str).collect::<Result<_, _>>().map_err(std::io::Error::from)?)
    }

    /// Returns the highest reduction speed of a core that `distctl tune` has measured so far.
    fn reduce_speed(&self, place: &Place) -> Result<String, Failure> {
        let Between::Medium(medium) = place.between else { return Ok(String::new()) };
        let mut command = self.distctl();
        command.env("DIST_TRANSPORT", medium).env("DIST_COSTS", self.path("costs"));
        let text = output(command.args(["tune", "--ranks", "2", "--json"]))?;
        let line: Value = serde_json::from_str(&text).map_err(std::io::Error::from)?;
        let path = self.path("reduce.fastest");
        let before = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
        let byte_ps = line["reduced_byte_ps"].as_f64().unwrap_or(100.0).min(before.unwrap_or(f64::INFINITY));
        fs::write(path, byte_ps.to_string())?;
        Ok(format!("{}GB/s", 1e3 / byte_ps))
    }

    /// Writes a model with these links and the CPU time of ranks on this host.
    fn write_model(&self, place: &Place, links: &Links, path: &Path) -> Result<(), Failure> {
        let text = fs::read_to_string(self.path("loopback.model"))
            .map_err(|_| Failure::Check("nothing is fitted yet: --filter loopback comes first".to_owned()))?;
        let mut model: Value = serde_json::from_str(&text).map_err(std::io::Error::from)?;
        let ends: f64 = ["send_us", "receive_us"].iter().filter_map(|end| model[end].as_f64()).sum();
        if let Some(trip_us) = self.trip_us(place)? {
            model["latency_us"] = (trip_us - ends).max(0.0).into();
        }
        if let Some(byte_ns) = links.byte_ns {
            model["byte_ns"] = byte_ns.into();
        }
        model["twice_bytes"] = 0.into();
        Ok(fs::write(path, model.to_string())?)
    }

    /// Returns the measured time of a message of 8 bytes in one direction.
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

/// Adds the time of the probe message to each result.
fn with_probe(lines: &str, us: f64) -> Result<String, Failure> {
    let noted = lines.lines().map(|line| -> Result<String, Failure> {
        let mut value: Value = serde_json::from_str(line).map_err(std::io::Error::from)?;
        value["probe_us"] = us.into();
        Ok(value.to_string() + "\n")
    });
    noted.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_measurements_are_rejected() {
        let wish = |words: &[&str]| Wish::parse(lexopt::Parser::from_args(words.iter().copied()));
        for right in [&["--operation", "reduce"][..], &["--ranks", "8"], &["--filter", "1ms", "--ranks", "4"]]
        {
            assert!(wish(right).is_ok_and(|wish| wish.is_some()), "{right:?}");
        }
        for wrong in [
            &["--operation", "allreduce"][..],
            &["--ranks", "3"],
            &["--filter", "1ms", "--ranks", "8"],
            &["--filter", "2ms"],
        ] {
            assert!(matches!(wish(wrong), Err(Failure::Usage(_))), "{wrong:?}");
        }
    }
}
