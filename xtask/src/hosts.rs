//! `cargo xtask hosts`: runs a program as ranks on several hosts, which are network namespaces of this machine.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use dist_testkit::hosts::{Hosts, Links};

use crate::command::{Failure, line, output, print_help};

pub(crate) const HELP: &str = "\
cargo xtask hosts [OPTIONS] -- PROGRAM [ARGUMENTS]

Runs PROGRAM as a rank on each of several hosts, for example:
  cargo xtask hosts --hosts 4 --bandwidth 1Gbit --latency 10ms -- target/release/distctl bench all_reduce
The hosts are network namespaces of this machine, each with a link to one switch. A host has processes of its
own and shares memory with no other host. The ranks have the variables of a job on several machines, and a
secret.
  --hosts N          number of hosts [2]
  --ranks N          number of ranks on each host [1]
  --bandwidth RATE   bandwidth of each link in each direction, as in 100Mbit or 1Gbit [not limited]
  --latency TIME     time by which each packet is delayed, as in 500us or 10ms [0]
  --loss PERCENT     packets that are lost at random, as in 0.1 [0]
  --mtu BYTES        largest packet [1500]
tbf limits the bandwidth. This process delays and loses packets, since many kernels have no netem: it needs a
part of a core. DIST_COSTS is off unless it is set. Needs Linux, root, iproute2 and util-linux.";

/// The port of the coordinator, which is free in a new network namespace.
const PORT: u16 = 29_500;

/// The options.
#[derive(Debug, PartialEq)]
struct Wish {
    hosts: usize,
    ranks: usize,
    links: Links,
    program: Vec<std::ffi::OsString>,
}

impl Wish {
    /// Parses the arguments. Returns `None` if help was requested, and prints it.
    fn parse(mut arguments: lexopt::Parser) -> Result<Option<Self>, Failure> {
        let mut wish = Self { hosts: 2, ranks: 1, links: Links::FAST, program: Vec::new() };
        while let Some(argument) = arguments.next()? {
            let name = match argument {
                lexopt::Arg::Long("help") | lexopt::Arg::Short('h') => {
                    print_help(HELP)?;
                    return Ok(None);
                }
                lexopt::Arg::Long(name) => format!("--{name}"),
                lexopt::Arg::Value(program) => {
                    wish.program.push(program);
                    wish.program.extend(arguments.raw_args()?);
                    break;
                }
                other @ lexopt::Arg::Short(_) => return Err(other.unexpected().into()),
            };
            let value = arguments.value()?.to_string_lossy().into_owned();
            let parsed = match name.as_str() {
                "--hosts" => number(&value, 1..=250).map(|hosts| wish.hosts = hosts),
                "--ranks" => number(&value, 1..=1024).map(|ranks| wish.ranks = ranks),
                "--bandwidth" => rate(&value).map(|bandwidth| wish.links.bandwidth = Some(bandwidth)),
                "--latency" => latency(&value).map(|latency| wish.links.latency = latency),
                "--loss" => loss(&value).map(|lost| wish.links.lost_per_million = lost),
                "--mtu" => number(&value, 576..=65_000).map(|mtu| wish.links.mtu = mtu),
                _ => return Err(Failure::Usage(format!("there is no option {name}\n\n{HELP}"))),
            };
            parsed.ok_or_else(|| Failure::Usage(format!("{name} cannot be {value:?}\n\n{HELP}")))?;
        }
        if wish.program.is_empty() {
            return Err(Failure::Usage(format!("no program is given\n\n{HELP}")));
        }
        Ok(Some(wish))
    }
}

fn number<N: std::str::FromStr + PartialOrd>(text: &str, range: std::ops::RangeInclusive<N>) -> Option<N> {
    text.parse().ok().filter(|number| range.contains(number))
}

/// Returns a number and its unit.
fn quantity(text: &str) -> Option<(f64, String)> {
    let unit = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit);
    let number: f64 = number.trim().parse().ok()?;
    (number.is_finite() && number >= 0.0).then(|| (number, unit.to_lowercase()))
}

/// Returns bits per second.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rates are positive and below 1e15"
)]
fn rate(text: &str) -> Option<u64> {
    let (number, unit) = quantity(text)?;
    let unit = unit.strip_suffix("bit").or_else(|| unit.strip_suffix("bps"))?;
    let factor = match unit {
        "" => 1.0,
        "k" => 1e3,
        "m" => 1e6,
        "g" => 1e9,
        _ => return None,
    };
    Some(number * factor).filter(|rate| (8e3..1e12).contains(rate)).map(|rate| rate as u64)
}

fn latency(text: &str) -> Option<Duration> {
    let (number, unit) = quantity(text)?;
    let factor = match unit.as_str() {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ if number == 0.0 => 0.0,
        _ => return None,
    };
    Some(number * factor).filter(|seconds| *seconds <= 10.0).map(Duration::from_secs_f64)
}

/// Returns the packets in a million.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most a million")]
fn loss(text: &str) -> Option<u32> {
    let percent: f64 = text.trim_end_matches('%').parse().ok()?;
    (0.0..=100.0).contains(&percent).then_some((percent * 1e4) as u32)
}

pub(crate) fn run(arguments: lexopt::Parser) -> Result<(), Failure> {
    let Some(wish) = Wish::parse(arguments)? else { return Ok(()) };
    let hosts = Hosts::with_links(wish.hosts, wish.links)
        .map_err(|reason| Failure::Check(format!("this machine cannot have hosts of its own: {reason}")))?;
    let job = Job::new(hosts, wish.ranks)?;
    let command = |rank: usize| {
        let (program, arguments) = wish.program.split_first().expect("a program was given");
        let mut command = job.command(rank, Path::new(program));
        command.args(arguments);
        command
    };
    run_all(command, job.world_size(), false).map(drop)
}

/// A job with the same number of ranks on each host. Its secret is removed when it is dropped.
pub(crate) struct Job {
    hosts: Hosts,
    ranks_per_host: usize,
    secret: PathBuf,
}

impl Job {
    pub(crate) fn new(hosts: Hosts, ranks_per_host: usize) -> Result<Self, Failure> {
        let secret = std::env::temp_dir().join(format!("{}.secret", hosts.prefix()));
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&secret)?;
        // Nobody else is in the network of the hosts, but a secret is needed beyond loopback.
        file.write_all(format!("{:032x}", fastrand::u128(..)).as_bytes())?;
        Ok(Self { hosts, ranks_per_host, secret })
    }

    pub(crate) fn world_size(&self) -> usize {
        self.hosts.count() * self.ranks_per_host
    }

    /// Returns a command that starts this program as a rank on its host.
    pub(crate) fn command(&self, rank: usize, program: &Path) -> Command {
        let per_host = self.ranks_per_host;
        let starter = self.hosts.starter(rank / per_host);
        let mut command = Command::new(&starter[0]);
        command.args(&starter[1..]).arg(program);
        let variables = [
            ("RANK", rank),
            ("WORLD_SIZE", self.world_size()),
            ("LOCAL_RANK", rank % per_host),
            ("LOCAL_WORLD_SIZE", per_host),
            ("MASTER_PORT", PORT.into()),
        ];
        command.envs(variables.map(|(name, value)| (name, value.to_string())));
        command.env("MASTER_ADDR", self.hosts.address(0)).env("DIST_SECRET_FILE", &self.secret);
        if std::env::var_os("DIST_COSTS").is_none() {
            command.env("DIST_COSTS", "off");
        }
        command
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // The folder is one for temporary files.
        let _ = std::fs::remove_file(&self.secret);
    }
}

/// Runs the commands of all ranks, and waits for all that could be started. Returns the output of rank 0 and drops that
/// of the others, if the output is wanted; otherwise all ranks print theirs.
pub(crate) fn run_all(
    command: impl Fn(usize) -> Command,
    count: usize,
    wants_output: bool,
) -> Result<String, Failure> {
    let mut others = Vec::new();
    let started = (1..count).try_for_each(|rank| -> Result<(), Failure> {
        let mut command = command(rank);
        if wants_output {
            command.stdout(Stdio::null());
        }
        others.push((rank, command.stdin(Stdio::null()).spawn()?));
        Ok(())
    });
    // Without one of them, the others wait for it until their deadlines.
    let lines = started.and_then(|()| {
        let mut first = command(0);
        if wants_output { output(&mut first) } else { run_one(&mut first) }
    });
    let ended: Vec<_> = others.into_iter().map(|(rank, mut other)| (rank, other.wait())).collect();
    let lines = lines?;
    for (rank, status) in ended {
        if !status?.success() {
            return Err(Failure::Program(line(&command(rank))));
        }
    }
    Ok(lines)
}

fn run_one(command: &mut Command) -> Result<String, Failure> {
    let status = command.stdin(Stdio::null()).status()?;
    if status.success() { Ok(String::new()) } else { Err(Failure::Program(line(command))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_described_in_the_units_of_tc() {
        let wish = |words: &str| Wish::parse(lexopt::Parser::from_args(words.split(' '))).ok().flatten();
        let full =
            "--hosts 4 --ranks 3 --bandwidth 1Gbit --latency 10ms --loss 0.1 --mtu 9000 -- ls -l --hosts 9";
        let links = Links {
            bandwidth: Some(1_000_000_000),
            latency: Duration::from_millis(10),
            lost_per_million: 1000,
            mtu: 9000,
        };
        let program = ["ls", "-l", "--hosts", "9"].map(Into::into).to_vec();
        assert_eq!(wish(full), Some(Wish { hosts: 4, ranks: 3, links, program }));
        for (text, bits) in [("100mbit", 100_000_000), ("2.5Gbps", 2_500_000_000), ("64kbit", 64_000)] {
            assert_eq!(rate(text), Some(bits));
        }
        for wrong in [
            "ls",
            "--hosts 0 ls",
            "--bandwidth 1GB ls",
            "--bandwidth fast ls",
            "--latency 10 ls",
            "--loss 101 ls",
        ] {
            assert_eq!(wish(wrong).is_some(), wrong == "ls", "{wrong}");
        }
        assert!(matches!(Wish::parse(lexopt::Parser::from_args(["--hosts", "2"])), Err(Failure::Usage(_))));
    }

    /// The variable that makes this test the program of a rank.
    const IS_RANK: &str = "TEST_OF_HOSTS_IS_RANK";
    const LATENCY: Duration = Duration::from_millis(20);
    const TRIPS: u32 = 5;
    /// Bytes that take a quarter of a second at 100 Mbit/s.
    const LEN: usize = 25_000_000 / 8;

    /// One rank of two: bounces a byte, and then sends or receives [`LEN`] bytes.
    #[expect(clippy::disallowed_methods, reason = "it measures links in real time")]
    fn be_a_rank() {
        use std::io::Read;
        use std::net::{TcpListener, TcpStream};
        let variable = |name: &str| std::env::var(name).expect("a rank has all variables");
        assert_eq!((variable("WORLD_SIZE"), variable("LOCAL_WORLD_SIZE")), ("2".to_owned(), "1".to_owned()));
        let address = format!("{}:{}", variable("MASTER_ADDR"), variable("MASTER_PORT"));
        let is_first = variable("RANK") == "0";
        let mut stream = if is_first {
            TcpListener::bind(address)
                .and_then(|listener| listener.accept())
                .expect("the other rank connects")
                .0
        } else {
            // The listener may not be there yet.
            let limit = std::time::Instant::now() + Duration::from_secs(30);
            loop {
                match TcpStream::connect(&address) {
                    Ok(stream) => break stream,
                    Err(error) => assert!(std::time::Instant::now() < limit, "{error}"),
                }
            }
        };
        stream.set_nodelay(true).expect("it is a connection");
        let start = std::time::Instant::now();
        let mut byte = [0];
        for _ in 0..TRIPS {
            if is_first {
                stream.write_all(&byte).expect("the other rank is there");
            }
            stream.read_exact(&mut byte).expect("the other rank is there");
            if !is_first {
                stream.write_all(&byte).expect("the other rank is there");
            }
        }
        let bounced = start.elapsed();
        assert!(bounced >= (2 * TRIPS - 1) * LATENCY, "the links delay no packets: {bounced:?}");
        if is_first {
            stream.write_all(&vec![7; LEN]).expect("the other rank is there");
        } else {
            stream.read_exact(&mut vec![0; LEN]).expect("all bytes arrive");
            let lasted = start.elapsed() - bounced;
            assert!(lasted >= Duration::from_millis(200), "the bandwidth is not limited: {lasted:?}");
        }
    }

    #[test]
    fn a_program_runs_on_hosts_with_slow_links() {
        if std::env::var_os(IS_RANK).is_some() {
            return be_a_rank();
        }
        let program = std::env::current_exe().expect("the system knows it").display().to_string();
        let test = std::thread::current().name().expect("a test has a name").to_owned();
        let run_ranks = |variable: &str| {
            let words = "--hosts 2 --bandwidth 100Mbit --latency 20ms -- env".split(' ');
            let program = [variable, &program, "--exact", &test];
            run(lexopt::Parser::from_args(words.chain(program))).map_err(|failure| failure.to_string())
        };
        match run_ranks(&format!("{IS_RANK}=yes")) {
            Err(reason) if reason.starts_with("this machine cannot have hosts") => {
                return eprintln!("skipped: {reason}");
            }
            ran => assert_eq!(ran, Ok(())),
        }
        assert!(run_ranks("--no-such-option").is_err(), "a program that fails is reported");
    }

    /// Every rank writes a file when it ends.
    #[test]
    fn the_rank_that_failed_is_named_when_all_have_ended() {
        let folder = std::env::temp_dir().join(format!("dist-hosts-{}", std::process::id()));
        std::fs::create_dir(&folder).expect("no other process has this number");
        let of = |failing: usize| {
            let folder = &folder;
            move |rank: usize| {
                let script = "sleep 0.$0; touch $1; echo lines of $0; exit $2";
                let mut command = Command::new("sh");
                command.args(["-c", script, &rank.to_string()]).arg(folder.join(format!("{failing}-{rank}")));
                command.arg(if rank == failing { "7" } else { "0" });
                command
            }
        };
        let ended =
            |failing: usize| (0..4).filter(|rank| folder.join(format!("{failing}-{rank}")).exists()).count();
        assert_eq!(run_all(of(4), 4, true).ok().as_deref(), Some("lines of 0\n"));
        for failing in 0..4 {
            let failed = run_all(of(failing), 4, true).map_err(|failure| failure.to_string());
            let named = format!("{failing}-{failing} 7");
            assert!(failed.as_ref().is_err_and(|text| text.ends_with(&named)), "{failed:?}");
            assert_eq!(ended(failing), 4);
        }
        let missing = |rank: usize| if rank == 2 { Command::new("/no/such/program") } else { of(5)(rank) };
        assert!(matches!(run_all(missing, 3, true), Err(Failure::System(_))));
        assert_eq!(ended(5), 1);
        std::fs::remove_dir_all(&folder).expect("it is there");
    }
}
