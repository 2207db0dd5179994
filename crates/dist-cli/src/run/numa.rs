//! The NUMA nodes of this machine and their cores.

use std::fs;
use std::path::Path;

/// Folder in which Linux lists the nodes.
pub(super) const FOLDER: &str = "/sys/devices/system/node";

/// A NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NumaNode {
    pub(crate) number: usize,
    pub(crate) cores: Vec<usize>,
}

/// Returns the nodes of this machine, or none if the system does not list them.
pub(crate) fn nodes() -> Vec<NumaNode> {
    nodes_in(Path::new(FOLDER))
}

/// Returns the nodes in a folder with the layout of [`FOLDER`], such as `node0/cpulist`. Nodes without cores
/// are left out.
pub(super) fn nodes_in(folder: &Path) -> Vec<NumaNode> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut nodes: Vec<NumaNode> = entries
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let cores = parse_list(&fs::read_to_string(entry.path().join("cpulist")).ok()?)?;
            Some(NumaNode { number, cores })
        })
        .filter(|node| !node.cores.is_empty())
        .collect();
    nodes.sort_unstable_by_key(|node| node.number);
    nodes
}

/// Parses a list of cores such as `0-3,8`.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    let ranges = text.trim().split(',').filter(|range| !range.is_empty());
    let ranges = ranges.map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse::<usize>().ok()?..=last.parse().ok()?)
    });
    Some(ranges.collect::<Option<Vec<_>>>()?.into_iter().flatten().collect())
}

/// Returns the allowed cores of a rank. Each rank stays within a node, or has whole nodes if there are fewer
/// ranks than nodes. Neighbouring ranks share a node.
pub(super) fn share(nodes: &[NumaNode], allowed: &[usize], rank: usize, ranks: usize) -> Vec<usize> {
    let nodes: Vec<Vec<usize>> = nodes
        .iter()
        .map(|node| node.cores.iter().copied().filter(|core| allowed.contains(core)).collect())
        .filter(|cores: &Vec<usize>| !cores.is_empty())
        .collect();
    let count = nodes.len();
    if ranks < count {
        return nodes[rank * count / ranks..(rank + 1) * count / ranks].concat();
    }
    if count == 0 {
        return super::cores::share(allowed, rank, ranks).to_vec();
    }
    let node_of = |rank: usize| rank * count / ranks;
    let members: Vec<usize> = (0..ranks).filter(|&other| node_of(other) == node_of(rank)).collect();
    super::cores::share(&nodes[node_of(rank)], rank - members[0], members.len()).to_vec()
}

#[cfg(test)]
pub(super) mod tests {
    use rstest::rstest;

    use super::*;

    /// Creates a folder with the layout of [`FOLDER`] and these lists of cores.
    pub(in crate::run) fn topology(lists: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (number, list) in lists.iter().enumerate() {
            let node = folder.path().join(format!("node{number}"));
            fs::create_dir(&node).unwrap();
            fs::write(node.join("cpulist"), format!("{list}\n")).unwrap();
        }
        fs::write(folder.path().join("online"), "0-1\n").unwrap();
        folder
    }

    #[rstest]
    #[case(&["0-3"], &[&[0, 1, 2, 3][..]])]
    #[case(&["0,2,4-5", "1,3,6-7"], &[&[0, 2, 4, 5][..], &[1, 3, 6, 7]])]
    #[case::memory_only(&["0-1", "", "2"], &[&[0, 1][..], &[2]])]
    #[case::not_told(&[], &[])]
    fn nodes_are_read_from_the_layout_of_linux(#[case] lists: &[&str], #[case] expected: &[&[usize]]) {
        let folder = topology(lists);
        let cores: Vec<_> = nodes_in(folder.path()).into_iter().map(|node| node.cores).collect();
        assert_eq!(cores, expected);
    }

    /// Cores are numbered alternately over the nodes, as on many machines.
    #[rstest]
    #[case(1, &[&[0, 2, 4, 6, 1, 3, 5, 7][..]])]
    #[case(2, &[&[0, 2, 4, 6][..], &[1, 3, 5, 7]])]
    #[case(3, &[&[0, 2][..], &[4, 6], &[1, 3, 5, 7]])]
    #[case(4, &[&[0, 2][..], &[4, 6], &[1, 3], &[5, 7]])]
    #[case(8, &[&[0][..], &[2], &[4], &[6], &[1], &[3], &[5], &[7]])]
    #[case(10, &[&[0][..], &[2], &[4], &[6], &[0], &[1], &[3], &[5], &[7], &[1]])]
    fn no_rank_has_cores_of_two_nodes_unless_it_has_both(
        #[case] ranks: usize,
        #[case] expected: &[&[usize]],
    ) {
        let folder = topology(&["0,2,4,6", "1,3,5,7"]);
        let (nodes, allowed) = (nodes_in(folder.path()), (0..8).collect::<Vec<_>>());
        let shares: Vec<_> = (0..ranks).map(|rank| share(&nodes, &allowed, rank, ranks)).collect();
        assert_eq!(shares, expected);
    }

    /// A container may have a part of the machine's cores.
    #[rstest]
    #[case(&["0-3", "4-7"], &[2, 3], &[&[2][..], &[3]])]
    #[case(&["0-3", "4-7"], &[3, 4, 5], &[&[3][..], &[4, 5]])]
    #[case::not_told(&[], &[1, 2], &[&[1][..], &[2]])]
    fn only_allowed_cores_are_shared(
        #[case] lists: &[&str],
        #[case] allowed: &[usize],
        #[case] expected: &[&[usize]],
    ) {
        let folder = topology(lists);
        let nodes = nodes_in(folder.path());
        let shares: Vec<_> = (0..2).map(|rank| share(&nodes, allowed, rank, 2)).collect();
        assert_eq!(shares, expected);
    }
}
