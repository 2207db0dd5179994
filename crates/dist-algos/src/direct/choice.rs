//! The choice of a direct algorithm, based on measurements on two cores of one host.

use std::str::FromStr;

use super::schedule::SLOTS;
use dist_transport::direct::{GroupLayout, Reach};

use super::{DirectAlgorithm, DirectCollective};

/// The owner and kind of the memory that an operation works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ownership {
    /// Memory of the caller; other ranks may only read it.
    Borrowed,
    /// Ordinary memory of the operation; other ranks may write into it if the system permits.
    Owned,
    /// Memory of the operation that the ranks of a host share.
    Allocated,
}

/// The buffer sizes from which another algorithm is chosen. `None` selects the measured value.
///
/// ```
/// use dist_algos::direct::{Crossovers, DirectAlgorithm, Ownership, DirectCollective};
/// use dist_transport::direct::{Reach, GroupLayout};
///
/// let (memory, shared) = (Ownership::Borrowed, GroupLayout::on_host(Reach::Read));
/// let crossovers: Crossovers = "staged=64K,write_to_all=1M".parse()?;
/// let algorithm = |bytes| DirectAlgorithm::suggest(DirectCollective::AllReduce, 2, bytes, (memory, &shared), crossovers);
/// assert_eq!([algorithm((64 << 10) - 1), algorithm(64 << 10)], [DirectAlgorithm::OneShot, DirectAlgorithm::Staged]);
/// # Ok::<_, dist_algos::direct::CrossoversError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Crossovers {
    /// [`DirectAlgorithm::Staged`] in place of [`DirectAlgorithm::OneShot`]. For all_reduce, 256 KiB with two ranks
    /// and 32 KiB with more. For reduce, where only the root reduces, 4 MiB with more than two ranks.
    pub staged: Option<usize>,
    /// [`DirectAlgorithm::WriteToAll`] of allocated memory in place of these; 8 KiB with two ranks and 16 KiB with
    /// more.
    pub write_to_all: Option<usize>,
    /// [`DirectAlgorithm::ReadFromAll`] of allocated memory in place of [`DirectAlgorithm::OneShot`], for
    /// reduce_scatter, all_to_all and, with two ranks, all_gather; 1 MiB.
    pub read_from_all: Option<usize>,
    /// [`DirectAlgorithm::ReadFromAll`] of ordinary memory that others may read in place of
    /// [`DirectAlgorithm::OneShot`]. It applies to all_to_all and, with two ranks, all_gather, if the buffers of
    /// all ranks have at most 32 MiB together. The value is 1 MiB if the system copies
    /// [fast](GroupLayout::fast_attach); otherwise it is never chosen.
    pub read_ordinary: Option<usize>,
}

/// The size of a block of a large buffer.
const BLOCK_BYTES: usize = 256 << 10;
/// The minimum size of a block, if a buffer is divided into several blocks.
const BLOCK_BYTES_MIN: usize = 64 << 10;

impl DirectAlgorithm {
    /// Returns the fastest algorithm for a buffer of this many bytes, for ranks that share this memory.
    pub fn suggest(
        collective: DirectCollective,
        world_size: usize,
        bytes: usize,
        (ownership, shared): (Ownership, &GroupLayout),
        crossovers: Crossovers,
    ) -> Self {
        let Crossovers { staged, write_to_all, read_from_all, read_ordinary } = crossovers;
        match (collective, ownership) {
            (DirectCollective::AllReduce, Ownership::Allocated)
                if bytes >= write_to_all.unwrap_or_else(|| write_to_all_from(world_size)) =>
            {
                Self::WriteToAll
            }
            (_, Ownership::Allocated)
                if is_read_in_place(collective, world_size)
                    && bytes >= read_from_all.unwrap_or(READ_FROM_ALL_FROM) =>
            {
                Self::ReadFromAll
            }
            (_, Ownership::Borrowed | Ownership::Owned)
                if is_copied_in_place(collective, world_size, bytes, shared)
                    && bytes >= read_ordinary.unwrap_or_else(|| read_ordinary_from(shared)) =>
            {
                Self::ReadFromAll
            }
            (DirectCollective::AllReduce | DirectCollective::Reduce { .. }, _)
                if bytes >= staged.unwrap_or_else(|| staged_from(collective, world_size)) =>
            {
                Self::Staged
            }
            _ => Self::OneShot,
        }
    }

    /// Returns the block size for a buffer of `bytes` bytes. It is the same on all ranks that use the algorithm, no
    /// matter if it was suggested or forced.
    pub fn block_bytes(self, collective: DirectCollective, bytes: usize) -> usize {
        match (self, collective) {
            // Readers begin with the first block while the second one is written, and no slot is written twice.
            (Self::OneShot, DirectCollective::Broadcast { .. } | DirectCollective::Reduce { .. }) => {
                bytes.div_ceil(SLOTS).clamp(BLOCK_BYTES_MIN, BLOCK_BYTES)
            }
            _ => BLOCK_BYTES,
        }
    }
}

/// Returns the size from which it is faster if one rank reduces each part than if every rank reduces everything.
const fn staged_from(collective: DirectCollective, world_size: usize) -> usize {
    match (collective, world_size) {
        (DirectCollective::Reduce { .. }, 2) => usize::MAX,
        (DirectCollective::Reduce { .. }, _) => 4 << 20,
        (_, 2) => 256 << 10,
        _ => 32 << 10,
    }
}

/// Returns the same if the sum is written into the memory of all ranks.
const fn write_to_all_from(world_size: usize) -> usize {
    if world_size == 2 { 8 << 10 } else { 16 << 10 }
}

/// Returns `true` if reading the data in place is faster than publishing it. Data that all ranks read is published
/// once for all of them.
const fn is_read_in_place(collective: DirectCollective, world_size: usize) -> bool {
    match collective {
        DirectCollective::ReduceScatter { .. } | DirectCollective::AllToAll => true,
        DirectCollective::AllGather { .. } => world_size == 2,
        _ => false,
    }
}

/// The size from which data is read in place.
const READ_FROM_ALL_FROM: usize = 1 << 20;

/// Returns `true` if it may be faster to let the system copy the data from its owner than to publish it.
fn is_copied_in_place(
    collective: DirectCollective,
    world_size: usize,
    bytes: usize,
    shared: &GroupLayout,
) -> bool {
    let is_copied = is_read_in_place(collective, world_size)
        && !matches!(collective, DirectCollective::ReduceScatter { .. });
    is_copied && shared.reach >= Reach::Read && bytes.saturating_mul(world_size) <= COPIED_BYTES_MAX
}

/// Returns the size from which ordinary memory is read in place.
const fn read_ordinary_from(shared: &GroupLayout) -> usize {
    if shared.fast_attach { 1 << 20 } else { usize::MAX }
}

/// The maximum size of all ranks' buffers together. Larger buffers are copied through slots with non-temporal
/// stores, which the system's copy does not use.
const COPIED_BYTES_MAX: usize = 32 << 20;

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
    use rstest::rstest;

    use super::*;
    use crate::Source;

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

    #[rstest]
    #[case(DirectCollective::AllReduce, 2, 256 << 10)]
    #[case(DirectCollective::AllReduce, 4, 32 << 10)]
    #[case(DirectCollective::Reduce { root: 0 }, 4, 4 << 20)]
    fn large_buffers_are_staged(
        #[case] collective: DirectCollective,
        #[case] world_size: usize,
        #[case] from: usize,
    ) {
        let memory = (Ownership::Borrowed, &SHARED);
        let algorithm =
            |bytes| DirectAlgorithm::suggest(collective, world_size, bytes, memory, Crossovers::default());
        assert_eq!([from - 1, from].map(algorithm), [DirectAlgorithm::OneShot, DirectAlgorithm::Staged]);
    }

    #[rstest]
    #[case(2, 8 << 10)]
    #[case(4, 16 << 10)]
    fn large_allocated_buffers_are_written_to_all(#[case] world_size: usize, #[case] from: usize) {
        let suggest = |bytes| {
            let memory = (Ownership::Allocated, &SHARED);
            DirectAlgorithm::suggest(
                DirectCollective::AllReduce,
                world_size,
                bytes,
                memory,
                Crossovers::default(),
            )
        };
        assert_eq!([from - 1, from].map(suggest), [DirectAlgorithm::OneShot, DirectAlgorithm::WriteToAll]);
    }

    #[rstest]
    #[case(DirectCollective::ReduceScatter { of: Source::Input }, 2, true)]
    #[case(DirectCollective::ReduceScatter { of: Source::Buffer }, 4, true)]
    #[case(DirectCollective::AllToAll, 4, true)]
    #[case(DirectCollective::AllGather { of: Source::Buffer }, 2, true)]
    #[case(DirectCollective::AllGather { of: Source::Buffer }, 3, false)]
    #[case(DirectCollective::Broadcast { root: 0 }, 2, false)]
    fn large_allocated_inputs_are_read_in_place(
        #[case] collective: DirectCollective,
        #[case] world_size: usize,
        #[case] read: bool,
    ) {
        let suggest = |bytes, ownership| {
            let crossovers = "read_from_all=2M".parse().unwrap();
            DirectAlgorithm::suggest(collective, world_size, bytes, (ownership, &SHARED), crossovers)
        };
        assert_eq!(suggest((2 << 20) - 1, Ownership::Allocated), DirectAlgorithm::OneShot);
        assert_eq!(suggest(2 << 20, Ownership::Owned), DirectAlgorithm::OneShot);
        assert_eq!(suggest(2 << 20, Ownership::Allocated) == DirectAlgorithm::ReadFromAll, read);
        let memory = (Ownership::Allocated, &SHARED);
        let default =
            DirectAlgorithm::suggest(collective, world_size, 1 << 20, memory, Crossovers::default());
        assert_eq!(default == DirectAlgorithm::ReadFromAll, read);
    }

    #[rstest]
    #[case(DirectCollective::AllToAll, 2, Some(16 << 20))]
    #[case(DirectCollective::AllToAll, 4, Some(8 << 20))]
    #[case(DirectCollective::AllGather { of: Source::Input }, 2, Some(16 << 20))]
    #[case(DirectCollective::AllGather { of: Source::Input }, 3, None)]
    #[case(DirectCollective::ReduceScatter { of: Source::Input }, 2, None)]
    #[case(DirectCollective::AllReduce, 2, None)]
    fn large_ordinary_inputs_are_read_in_place_where_the_system_is_fast(
        #[case] collective: DirectCollective,
        #[case] world_size: usize,
        #[case] to: Option<usize>,
        #[values(Ownership::Borrowed, Ownership::Owned)] ownership: Ownership,
    ) {
        let fast = GroupLayout { fast_attach: true, ..GroupLayout::on_host(Reach::Read) };
        let forbidden = GroupLayout { reach: Reach::Slots, ..fast };
        let is_read = |bytes, shared, crossovers| {
            DirectAlgorithm::suggest(collective, world_size, bytes, (ownership, shared), crossovers)
                == DirectAlgorithm::ReadFromAll
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
    #[case(Crossovers::default(), Ownership::Borrowed, [DirectAlgorithm::OneShot, DirectAlgorithm::OneShot, DirectAlgorithm::OneShot])]
    #[case(Crossovers::default(), Ownership::Allocated, [DirectAlgorithm::OneShot, DirectAlgorithm::WriteToAll, DirectAlgorithm::WriteToAll])]
    #[case(
        Crossovers { staged: Some(8192), write_to_all: Some(8193), ..Crossovers::default() },
        Ownership::Allocated,
        [DirectAlgorithm::OneShot, DirectAlgorithm::Staged, DirectAlgorithm::WriteToAll],
    )]
    fn forms_are_chosen_by_size_and_memory(
        #[case] crossovers: Crossovers,
        #[case] ownership: Ownership,
        #[case] expected: [DirectAlgorithm; 3],
    ) {
        let algorithm = |bytes| {
            DirectAlgorithm::suggest(DirectCollective::AllReduce, 2, bytes, (ownership, &SHARED), crossovers)
        };
        assert_eq!([8191, 8192, 8193].map(algorithm), expected);
    }
}
