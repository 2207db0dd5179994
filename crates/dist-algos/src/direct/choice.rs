//! The values that the choice of a direct algorithm depends on. The measurements were made on two cores of one host.

use std::str::FromStr;

/// The owner and kind of the memory that an operation works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ownership {
    /// Memory of the caller; other ranks may only read it.
    Borrowed,
    /// Ordinary memory of the operation; other ranks may write into it if the system permits.
    Owned,
    /// Memory of the operation that the ranks of a host share.
    Allocated,
    /// Ordinary memory of the operation, in place of shared memory that this rank could not get. The other ranks may
    /// have got theirs, so the algorithm is chosen as for allocated memory.
    Substitute,
}

impl Ownership {
    /// Returns the kind of memory that the choice of the algorithm depends on. It is the same on all ranks.
    #[inline]
    #[must_use]
    pub const fn expected(self) -> Self {
        match self {
            Self::Substitute => Self::Allocated,
            _ => self,
        }
    }
}

/// The buffer sizes from which another algorithm is chosen. `None` selects the measured value.
///
/// ```
/// use dist_algos::direct::{Crossovers, DirectCase, Ownership};
/// use dist_algos::{ALGORITHMS, CollectiveKind};
/// use dist_transport::shm_group::{GroupLayout, Reach};
///
/// let (ownership, shared) = (Ownership::Borrowed, &GroupLayout::on_host(Reach::Read));
/// let crossovers: Crossovers = "staged=64K,write_to_all=1M".parse()?;
/// let algorithm = |bytes| {
///     let case = DirectCase { world_size: 2, bytes, ownership, shared, crossovers };
///     ALGORITHMS.suggest_direct(CollectiveKind::AllReduce, &case).unwrap().name
/// };
/// assert_eq!([algorithm((64 << 10) - 1), algorithm(64 << 10)], ["direct/one_shot", "direct/staged"]);
/// # Ok::<_, dist_algos::direct::CrossoversError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Crossovers {
    /// The size from which [`staged`](super::staged) replaces [`one_shot`](super::one_shot). Measured: 256 KiB for
    /// all_reduce with two ranks, 32 KiB with more; 4 MiB for reduce with more than two ranks, where only the root
    /// reduces.
    pub staged: Option<usize>,
    /// The size from which [`write_to_all`](super::write_to_all) replaces both on allocated memory. Measured: 8 KiB
    /// with two ranks, 16 KiB with more.
    pub write_to_all: Option<usize>,
    /// The size from which [`read_from_all`](super::read_from_all) replaces [`one_shot`](super::one_shot) on allocated
    /// memory, for reduce_scatter, all_to_all and, with two ranks, all_gather. Measured: 1 MiB.
    pub read_from_all: Option<usize>,
    /// The size from which [`read_from_all`](super::read_from_all) replaces [`one_shot`](super::one_shot) on ordinary
    /// memory that other ranks may read. It applies to all_to_all and, with two ranks, all_gather, if the buffers of
    /// all ranks have at most 32 MiB together. The value is 1 MiB if the system copies
    /// [fast](dist_transport::shm_group::GroupLayout::fast_attach); otherwise it is never chosen.
    pub read_ordinary: Option<usize>,
}

impl FromStr for Crossovers {
    type Err = CrossoversError;

    /// Parses names of algorithms and bytes, for example `staged=64K,write_to_all=1M`.
    fn from_str(text: &str) -> Result<Self, CrossoversError> {
        let mut crossovers = Self::default();
        for part in text.split(',') {
            let wrong = || CrossoversError(part.to_owned());
            let (name, bytes) = part.split_once('=').ok_or_else(wrong)?;
            let crossover = match name {
                "staged" => &mut crossovers.staged,
                "write_to_all" => &mut crossovers.write_to_all,
                "read_from_all" => &mut crossovers.read_from_all,
                "read_ordinary" => &mut crossovers.read_ordinary,
                _ => return Err(wrong()),
            };
            *crossover = Some(parse_bytes(bytes).ok_or_else(wrong)?);
        }
        Ok(crossovers)
    }
}

/// The error for a text that is no valid [`Crossovers`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is none of staged=BYTES, write_to_all=BYTES, read_from_all=BYTES and read_ordinary=BYTES")]
pub struct CrossoversError(String);

/// Parses a number of bytes, for example `8`, `64K`, `1M` or `2G`.
fn parse_bytes(text: &str) -> Option<usize> {
    let units = [('K', 10), ('M', 20), ('G', 30)];
    let unit = units.iter().find_map(|&(unit, shift)| Some((text.strip_suffix(unit)?, shift)));
    let (digits, shift) = unit.unwrap_or((text, 0));
    digits.parse::<usize>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use dist_transport::shm_group::{GroupLayout, Reach};
    use rstest::rstest;

    use super::super::DirectCase;
    use super::*;
    use crate::{ALGORITHMS, CollectiveKind};

    const SHARED: GroupLayout = GroupLayout::on_host(Reach::Write);

    #[rstest]
    #[case("staged=64K", Some((Some(64 << 10), None)))]
    #[case("write_to_all=1M,staged=0", Some((Some(0), Some(1 << 20))))]
    #[case("staged=7,staged=2G", Some((Some(2 << 30), None)))]
    #[case("", None)]
    #[case("staged", None)]
    #[case("staged=", None)]
    #[case("staged=-1", None)]
    #[case("staged=64K,", None)]
    #[case("one_shot=64K", None)]
    #[case("staged=18446744073709551615G", None)]
    fn crossovers_are_names_and_bytes(
        #[case] text: &str,
        #[case] expected: Option<(Option<usize>, Option<usize>)>,
    ) {
        let expected = expected.map(|(staged, write_to_all)| Crossovers {
            staged,
            write_to_all,
            ..Crossovers::default()
        });
        assert_eq!(text.parse().ok(), expected);
    }

    /// Returns the name of the algorithm of an operation on this many bytes.
    fn suggest(
        collective: CollectiveKind,
        world_size: usize,
        bytes: usize,
        (ownership, shared): (Ownership, &GroupLayout),
        crossovers: Crossovers,
    ) -> &'static str {
        let case = DirectCase { world_size, bytes, ownership, shared, crossovers };
        ALGORITHMS.suggest_direct(collective, &case).unwrap().short_name()
    }

    #[rstest]
    #[case(CollectiveKind::AllReduce, 2, 256 << 10)]
    #[case(CollectiveKind::AllReduce, 4, 32 << 10)]
    #[case(CollectiveKind::Reduce, 4, 4 << 20)]
    fn large_buffers_are_staged(
        #[case] collective: CollectiveKind,
        #[case] world_size: usize,
        #[case] from: usize,
    ) {
        let memory = (Ownership::Borrowed, &SHARED);
        let algorithm = |bytes| suggest(collective, world_size, bytes, memory, Crossovers::default());
        assert_eq!([from - 1, from].map(algorithm), ["one_shot", "staged"]);
    }

    #[rstest]
    #[case(2, 8 << 10)]
    #[case(4, 16 << 10)]
    fn large_allocated_buffers_are_written_to_all(#[case] world_size: usize, #[case] from: usize) {
        let memory = (Ownership::Allocated, &SHARED);
        let algorithm =
            |bytes| suggest(CollectiveKind::AllReduce, world_size, bytes, memory, Crossovers::default());
        assert_eq!([from - 1, from].map(algorithm), ["one_shot", "write_to_all"]);
    }

    #[rstest]
    #[case(CollectiveKind::ReduceScatter, 2, true)]
    #[case(CollectiveKind::ReduceScatter, 4, true)]
    #[case(CollectiveKind::AllToAll, 4, true)]
    #[case(CollectiveKind::AllGather, 2, true)]
    #[case(CollectiveKind::AllGather, 3, false)]
    #[case(CollectiveKind::Broadcast, 2, false)]
    fn large_allocated_inputs_are_read_in_place(
        #[case] collective: CollectiveKind,
        #[case] world_size: usize,
        #[case] read: bool,
    ) {
        let from_2_mib = |bytes, ownership| {
            let crossovers = "read_from_all=2M".parse().unwrap();
            suggest(collective, world_size, bytes, (ownership, &SHARED), crossovers)
        };
        assert_eq!(from_2_mib((2 << 20) - 1, Ownership::Allocated), "one_shot");
        assert_eq!(from_2_mib(2 << 20, Ownership::Owned), "one_shot");
        assert_eq!(from_2_mib(2 << 20, Ownership::Allocated) == "read_from_all", read);
        let memory = (Ownership::Allocated, &SHARED);
        let default = suggest(collective, world_size, 1 << 20, memory, Crossovers::default());
        assert_eq!(default == "read_from_all", read);
    }

    #[rstest]
    #[case(CollectiveKind::AllToAll, 2, Some(16 << 20))]
    #[case(CollectiveKind::AllToAll, 4, Some(8 << 20))]
    #[case(CollectiveKind::AllGather, 2, Some(16 << 20))]
    #[case(CollectiveKind::AllGather, 3, None)]
    #[case(CollectiveKind::ReduceScatter, 2, None)]
    #[case(CollectiveKind::AllReduce, 2, None)]
    fn large_ordinary_inputs_are_read_in_place_where_the_system_is_fast(
        #[case] collective: CollectiveKind,
        #[case] world_size: usize,
        #[case] to: Option<usize>,
        #[values(Ownership::Borrowed, Ownership::Owned)] ownership: Ownership,
    ) {
        let fast = GroupLayout { fast_attach: true, ..GroupLayout::on_host(Reach::Read) };
        let forbidden = GroupLayout { reach: Reach::Slots, ..fast };
        let is_read = |bytes, shared, crossovers| {
            suggest(collective, world_size, bytes, (ownership, shared), crossovers) == "read_from_all"
        };
        let by_default = |bytes, shared| is_read(bytes, shared, Crossovers::default());
        for bytes in [(1 << 20) - 1, 1 << 20, 16 << 20, (16 << 20) + 1] {
            let expected = bytes >= 1 << 20 && to.is_some_and(|to| bytes <= to);
            assert_eq!(by_default(bytes, &fast), expected, "{bytes}");
            assert!(!by_default(bytes, &SHARED), "{bytes}");
            assert!(!by_default(bytes, &forbidden), "{bytes}");
        }
        let said = "read_ordinary=64K".parse().unwrap();
        assert_eq!(is_read(64 << 10, &SHARED, said), to.is_some());
        assert!(!is_read((64 << 10) - 1, &fast, said));
    }

    #[rstest]
    #[case(Crossovers::default(), Ownership::Borrowed, ["one_shot", "one_shot", "one_shot"])]
    #[case(Crossovers::default(), Ownership::Allocated, ["one_shot", "write_to_all", "write_to_all"])]
    #[case(
        Crossovers { staged: Some(8192), write_to_all: Some(8193), ..Crossovers::default() },
        Ownership::Allocated,
        ["one_shot", "staged", "write_to_all"],
    )]
    fn algorithms_are_chosen_by_size_and_memory(
        #[case] crossovers: Crossovers,
        #[case] ownership: Ownership,
        #[case] expected: [&str; 3],
    ) {
        let memory = (ownership, &SHARED);
        let algorithm = |bytes| suggest(CollectiveKind::AllReduce, 2, bytes, memory, crossovers);
        assert_eq!([8191, 8192, 8193].map(algorithm), expected);
    }
}
