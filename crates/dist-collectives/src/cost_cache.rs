//! A file that keeps measured costs between runs.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};

use dist_algos::CostModel;

/// A file of measured costs, with one line for each kind of world.
///
/// A line names the transport, the number of ranks, the number of hosts, and the costs of a round, a byte and a
/// reduced byte in picoseconds: `tcp 4 1 31000000 190 55`. A world of several hosts with several ranks each has two lines,
/// for the transports `tcp-inside` and `tcp-across`. Empty lines and lines that begin with `#` are ignored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CostCache {
    /// `None` if nothing is stored.
    path: Option<PathBuf>,
}

impl CostCache {
    /// Uses this file, which need not exist.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: Some(path.into()) }
    }

    /// Creates a cache that stores nothing.
    pub const fn disabled() -> Self {
        Self { path: None }
    }

    /// Returns the file of this user and host: the value of `DIST_COSTS`, or `dist/costs-HOST` in the user's cache
    /// directory. If there is no such directory, nothing is stored. Returns `None` if `DIST_COSTS` is `off`.
    pub fn for_user() -> Option<Self> {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        match variable("DIST_COSTS") {
            Some(off) if off == "off" => None,
            Some(path) => Some(Self::at(path)),
            None => {
                let cache = variable("XDG_CACHE_HOME").map(PathBuf::from);
                let cache = cache.or_else(|| Some(Path::new(&variable("HOME")?).join(".cache")));
                let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
                let path = cache.map(|cache| cache.join("dist").join(format!("costs-{}", host.trim())));
                Some(Self { path })
            }
        }
    }

    /// Returns the path of the file; `None` if nothing is stored.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns all costs in the file, by kind of world.
    ///
    /// # Errors
    /// If the file exists and cannot be read, or a line is malformed.
    pub fn read(&self) -> io::Result<BTreeMap<TopologyKey, CostModel>> {
        let Some(path) = &self.path else { return Ok(BTreeMap::new()) };
        // A pipe could block this read forever.
        if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            return Ok(BTreeMap::new());
        }
        match fs::read_to_string(path) {
            Ok(text) => parse(&text),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
            Err(e) => Err(e),
        }
    }

    pub(crate) fn find(&self, topology: &TopologyKey) -> Option<CostModel> {
        let cache = self.read().inspect_err(|e| self.log_failure("read", e)).ok()?;
        cache.get(topology).copied()
    }

    /// Stores these costs and replaces earlier ones. If two processes do this at the same time, the costs of one of
    /// them may be lost.
    ///
    /// # Errors
    /// If the file cannot be written or was not written by this type.
    pub fn save(&self, topology: &TopologyKey, costs: CostModel) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        // Replaces the target of a symbolic link and not the link.
        let path = &fs::canonicalize(path).unwrap_or_else(|_| path.clone());
        if !is_ours(path)? {
            let message = "it holds something else, and stays as it is";
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        let mut cache = self.read().unwrap_or_default();
        cache.insert(topology.clone(), costs);
        let mut text = HEADER.to_owned();
        for (topology, CostModel { round_ps, byte_ps, reduced_byte_ps }) in cache {
            text.push_str(&format!("{topology} {round_ps} {byte_ps} {reduced_byte_ps}\n"));
        }
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        // The rename is atomic: a concurrent reader sees the old file or the new one.
        let new = beside(path);
        let cache = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
        if cache.is_err() {
            // Removes the temporary file after a failure.
            let _ = fs::remove_file(&new);
        }
        cache
    }

    pub(crate) fn log_failure(&self, what: &str, error: &io::Error) {
        tracing::warn!(path = ?self.path, %error, "cannot {what} the kept costs");
    }
}

/// A kind of world. Worlds of one kind have the same costs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TopologyKey {
    transport: String,
    ranks: usize,
    hosts: usize,
}

impl TopologyKey {
    /// Returns the key of a world with these hosts, one for each rank as `Communicator::hosts` returns them.
    /// `transport` names what moves the bytes, for example `tcp`.
    pub fn new(transport: &str, hosts: &[u64]) -> Self {
        let mut distinct = hosts.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        // The name must be one word and must not begin a comment.
        let transport = transport.replace(|c: char| c.is_whitespace() || c == '#', "_");
        let transport = if transport.is_empty() { "_".to_owned() } else { transport };
        Self { transport, ranks: hosts.len(), hosts: distinct.len() }
    }

    /// Returns the keys of messages inside hosts and of messages between hosts, in a world in which
    /// [both are measured](crate::Communicator::tune).
    pub fn of_levels(transport: &str, hosts: &[u64]) -> [Self; 2] {
        ["inside", "across"].map(|level| Self::new(&format!("{transport}-{level}"), hosts))
    }

    /// Returns the number of ranks.
    pub const fn ranks(&self) -> usize {
        self.ranks
    }
}

impl fmt::Display for TopologyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.transport, self.ranks, self.hosts)
    }
}

fn parse(text: &str) -> io::Result<BTreeMap<TopologyKey, CostModel>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let wrong = |number: usize| {
        let message = format!("line {} is not: transport, ranks, hosts, and three times", number + 1);
        io::Error::new(io::ErrorKind::InvalidData, message)
    };
    lines.map(|(number, line)| parse_line(line).ok_or_else(|| wrong(number))).collect()
}

fn parse_line(line: &str) -> Option<(TopologyKey, CostModel)> {
    let mut words = line.split_ascii_whitespace();
    let transport = words.next()?.to_owned();
    let mut number = || words.next()?.parse::<u64>().ok();
    let (ranks, hosts) = (usize::try_from(number()?).ok()?, usize::try_from(number()?).ok()?);
    let costs = CostModel { round_ps: number()?, byte_ps: number()?, reduced_byte_ps: number()? };
    words.next().is_none().then_some((TopologyKey { transport, ranks, hosts }, costs))
}

/// Returns a unique temporary name in the same directory. The name is random, because processes of several hosts or
/// containers can share the directory and may have the same process id.
fn beside(path: &Path) -> PathBuf {
    let random = RandomState::new().hash_one(std::process::id());
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{random:016x}.new"));
    path.with_file_name(name)
}

/// Returns `true` if the file does not exist yet, or was written by this type. Other files, and devices, must not be
/// replaced. Malformed lines in a file of this type may be dropped.
fn is_ours(path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Ok(found) => Ok(found.is_file() && {
            let bytes = fs::read(path)?;
            bytes.is_empty() || bytes.starts_with(HEADER.as_bytes())
        }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(e) => Err(e),
    }
}

const HEADER: &str =
    "# What messages take, as dist measured it: what moves the bytes, ranks, hosts, then the picoseconds
# that a round, a byte and a reduced byte take.
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_found_again_with_any_name_of_a_transport() {
        let folder = tempfile::tempdir().unwrap();
        let cache = CostCache::at(folder.path().join("costs"));
        for name in ["", "#", "my net", "tcp"] {
            cache.save(&TopologyKey::new(name, &[1, 1]), FAST).unwrap();
        }
        for name in ["", "#", "my net", "tcp"] {
            assert_eq!(cache.find(&TopologyKey::new(name, &[1, 1])), Some(FAST), "{name:?}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_link_is_followed_and_a_directory_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let topology = TopologyKey::new("tcp", &[1, 1]);
        CostCache::at(&link).save(&topology, FAST).unwrap();
        assert!(link.is_symlink());
        assert_eq!(CostCache::at(&file).find(&topology), Some(FAST));
        let directory = CostCache::at(folder.path());
        assert!(directory.save(&topology, FAST).is_err());
        assert_eq!(directory.find(&topology), None);
    }

    #[test]
    fn temporary_files_have_unique_names_beside_the_file() {
        let path = Path::new("/shared/costs-node.cluster");
        let (one, other) = (beside(path), beside(path));
        for new in [&one, &other] {
            let name = new.to_str().unwrap();
            assert!(name.starts_with("/shared/costs-node.cluster.") && name.ends_with(".new"), "{name}");
        }
        assert_ne!(one, other);
    }

    const FAST: CostModel = CostModel { round_ps: 1, byte_ps: 2, reduced_byte_ps: 3 };
    const SLOW: CostModel = CostModel { round_ps: 1_000_000, byte_ps: 200, reduced_byte_ps: u64::MAX };

    #[test]
    fn stored_costs_are_found_by_the_kind_of_world() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CostCache::at(directory.path().join("not/there/yet"));
        let (two, four) = (TopologyKey::new("tcp", &[7, 7]), TopologyKey::new("tcp", &[7, 8, 8, 7]));
        assert_eq!(cache.find(&two), None);
        cache.save(&two, SLOW).unwrap();
        cache.save(&four, SLOW).unwrap();
        cache.save(&two, FAST).unwrap();
        assert_eq!((cache.find(&two), cache.find(&four)), (Some(FAST), Some(SLOW)));
        assert_eq!(cache.find(&TopologyKey::new("shm", &[7, 7])), None);
        assert_eq!(four.to_string(), "tcp 4 2");
        let left = fs::read_dir(cache.path().unwrap().parent().unwrap()).unwrap().count();
        assert_eq!(left, 1, "nothing but the file itself stays");
    }

    #[test]
    fn a_malformed_line_is_named_and_replaced_by_the_next_measurement() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CostCache::at(directory.path().join("costs"));
        let topology = TopologyKey::new("tcp", &[0]);
        for line in ["tcp 1 1 2 3", "tcp 1 1 2 3 4 5", "tcp one 1 2 3 4", "tcp 1 1 2 3 -4"] {
            fs::write(cache.path().unwrap(), format!("{HEADER}\n{line}\n")).unwrap();
            let error = cache.read().unwrap_err().to_string();
            assert!(error.starts_with("line 4 is not"), "{error}");
            assert_eq!(cache.find(&topology), None);
        }
        cache.save(&topology, FAST).unwrap();
        assert_eq!(cache.read().unwrap().into_iter().collect::<Vec<_>>(), [(topology, FAST)]);
    }

    #[test]
    fn a_file_that_holds_something_else_stays_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CostCache::at(directory.path().join("thesis.tex"));
        fs::write(cache.path().unwrap(), "years of work").unwrap();
        cache.save(&TopologyKey::new("tcp", &[0]), FAST).unwrap_err();
        assert_eq!(fs::read_to_string(cache.path().unwrap()).unwrap(), "years of work");
    }
}
