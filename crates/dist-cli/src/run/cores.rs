//! The cores that each rank is bound to, and its number of threads.

use std::path::Path;
use std::process::Command;

#[cfg(target_os = "linux")]
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

use super::numa;

/// Environment variable with the cores of a rank, such as `0,1`.
pub(super) const CORES: &str = "DISTCTL_CORES";

/// The resource that `distctl run` binds ranks to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
pub(crate) enum Bind {
    /// An equal share of the cores that distctl may use; with more ranks than cores, ranks share cores evenly
    Cores,
    /// Like cores, but each rank stays within a NUMA node and uses the memory of that node
    Numa,
    /// Not bound: the system chooses the cores
    None,
}

/// Returns a rank's share of these cores.
pub(super) fn share(cores: &[usize], rank: usize, ranks: usize) -> &[usize] {
    if ranks > cores.len() {
        return &cores[rank % cores.len()..][..1];
    }
    &cores[rank * cores.len() / ranks..(rank + 1) * cores.len() / ranks]
}

/// Returns the value of [`CORES`] for a rank; `None` if the rank is not bound, or the system does not list
/// the cores.
pub(super) fn of_rank(bind: Bind, rank: usize, ranks: usize) -> Option<String> {
    let cores = allowed().filter(|cores| !cores.is_empty())?;
    share_in(Path::new(numa::FOLDER), &cores, bind, (rank, ranks))
}

/// Returns the value of [`CORES`] for a rank that shares these cores, with the NUMA nodes in a folder.
fn share_in(nodes: &Path, cores: &[usize], bind: Bind, (rank, ranks): (usize, usize)) -> Option<String> {
    let share = match bind {
        Bind::Cores => share(cores, rank, ranks).to_vec(),
        Bind::Numa => numa::share(&numa::nodes_in(nodes), cores, rank, ranks),
        Bind::None => return None,
    };
    Some(share.iter().map(usize::to_string).collect::<Vec<_>>().join(","))
}

/// Environment variable with the number of rayon's threads in a rank.
const THREADS: &str = "RAYON_NUM_THREADS";
/// The same number if a launcher has chosen it. A nested launcher divides it among its own ranks.
const CHOSEN_THREADS: &str = "DISTCTL_THREADS";

/// Sets the number of threads for one of `ranks` ranks on this machine, unless the user has set it.
pub(super) fn set_threads(command: &mut Command, ranks: usize) {
    if command.get_envs().any(|(name, _)| name == THREADS) {
        return;
    }
    let [set, chosen] = [THREADS, CHOSEN_THREADS].map(std::env::var_os);
    if set.is_none() || set == chosen {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // A rank that was given a number of threads may not be bound to as many cores.
        let own = set.and_then(|threads| threads.to_str()?.parse().ok()).map_or(cores, |own| cores.min(own));
        let threads = (own / ranks).max(1).to_string();
        command.env(THREADS, &threads).env(CHOSEN_THREADS, &threads);
    }
}

/// Returns the cores that this process may use.
#[cfg(target_os = "linux")]
pub(crate) fn allowed() -> Option<Vec<usize>> {
    let allowed = sched_getaffinity(None).ok()?;
    Some((0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect())
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn allowed() -> Option<Vec<usize>> {
    None
}

/// Binds this process to the cores in [`CORES`]. Binding only affects speed: if it fails, the rank runs
/// unbound.
#[cfg(target_os = "linux")]
pub(super) fn bind() {
    if let Ok(cores) = std::env::var(CORES) {
        bind_to(&cores);
    }
}

/// Binds this thread, and threads that it starts later, to cores such as `0,1`.
#[cfg(target_os = "linux")]
fn bind_to(cores: &str) {
    let mut set = CpuSet::new();
    let cores = cores.split(',').filter_map(|core| core.parse().ok());
    cores.filter(|&core| core < CpuSet::MAX_CPU).for_each(|core| set.set(core));
    let _ = sched_setaffinity(None, &set);
}

#[cfg(not(target_os = "linux"))]
pub(super) const fn bind() {}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::run::numa::tests::topology;

    /// The cores of the nodes are numbered alternately, or one node after the other.
    #[rstest]
    #[case::two_nodes(&["0,2,4,6", "1,3,5,7"], &[("0,2", "0,1"), ("4,6", "2,3"), ("1,3", "4,5"), ("5,7", "6,7")])]
    #[case::four_nodes(&["0,4", "1,5", "2,6", "3,7"], &[("0,4", "0,1"), ("1,5", "2,3"), ("2,6", "4,5"), ("3,7", "6,7")])]
    #[case::more_ranks_than_nodes(&["0,4", "1,5", "2,6", "3,7"], &[
        ("0", "0"), ("4", "1"), ("1", "2"), ("5", "3"), ("2", "4"), ("6", "5"), ("3", "6"), ("7", "7"),
    ])]
    #[case::fewer_ranks_than_nodes(&["0,4", "1,5", "2,6", "3,7"], &[("0,4,1,5", "0,1,2,3"), ("2,6,3,7", "4,5,6,7")])]
    #[case::no_nodes(&[], &[("0,1,2,3", "0,1,2,3"), ("4,5,6,7", "4,5,6,7")])]
    fn a_rank_bound_to_a_node_gets_cores_of_that_node(
        #[case] nodes: &[&str],
        #[case] expected: &[(&str, &str)],
    ) {
        let (folder, cores) = (topology(nodes), (0..8).collect::<Vec<_>>());
        let ranks = expected.len();
        for (rank, (by_node, by_core)) in expected.iter().enumerate() {
            let bound = |bind| share_in(folder.path(), &cores, bind, (rank, ranks));
            assert_eq!(bound(Bind::Numa).as_deref(), Some(*by_node), "rank {rank}");
            assert_eq!(bound(Bind::Cores).as_deref(), Some(*by_core), "rank {rank}");
            assert_eq!(bound(Bind::None), None);
        }
    }

    /// The cores of this machine are on two nodes. The last of them is alone on its node.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_rank_runs_on_the_cores_of_its_node() {
        let cores = allowed().unwrap();
        let Some((last, others)) = cores.split_last().filter(|(_, others)| !others.is_empty()) else {
            return;
        };
        let list = others.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let folder = topology(&[&list, &last.to_string()]);
        for (rank, expected) in [(0, others), (1, &[*last][..])] {
            let value = share_in(folder.path(), &cores, Bind::Numa, (rank, 2)).unwrap();
            let bound = std::thread::scope(|scope| {
                let bind = || {
                    bind_to(&value);
                    allowed().unwrap()
                };
                scope.spawn(bind).join().unwrap()
            });
            assert_eq!(bound, expected, "rank {rank}");
        }
    }

    #[test]
    fn shares_are_equal_and_cover_all_cores() {
        let cores = [1, 2, 5, 6, 7];
        let shares = |ranks| (0..ranks).map(|rank| share(&cores, rank, ranks)).collect::<Vec<_>>();
        assert_eq!(shares(1), [&cores]);
        assert_eq!(shares(2), [&[1, 2][..], &[5, 6, 7]]);
        assert_eq!(shares(5), [[1], [2], [5], [6], [7]]);
        assert_eq!(shares(7), [[1], [2], [5], [6], [7], [1], [2]]);
    }
}
