//! One step of a direct schedule.
//!
//! A step names parts and blocks of a rank's memory as a [`DirectPlan`](super::DirectPlan) divides it. It does not
//! depend on bytes, element types or operations.

use std::fmt;

use dist_transport::shm_group::MemoryArea;

use crate::Source;

/// The next step of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectStep {
    /// Copies one block of these parts of its memory to a place that other ranks can read.
    Publish {
        /// The parts.
        parts: PartSet,
        /// Their block.
        block: usize,
        /// The memory that holds the parts.
        of: Source,
        /// The destination: the flag line, the eager buffer or a slot.
        place: MemoryArea,
    },
    /// Signals that all steps so far are done.
    Signal,
    /// Waits until these ranks have signalled this many times in this call.
    Wait {
        /// The ranks.
        ranks: PeerSet,
        /// The number of signals.
        signals: u32,
    },
    /// Reduces the data of all other ranks for a cell into the buffer, in canonical order, and finishes the sum.
    Reduce {
        /// The part.
        part: usize,
        /// Its block.
        block: usize,
        /// The place of the other ranks' data.
        of: MemoryArea,
        /// The second destination of the sum.
        into: SumTarget,
    },
    /// Copies a cell into the buffer, from another rank's memory or from a slot of this rank.
    Take {
        /// The rank whose data it is.
        from: usize,
        /// Its part.
        part: usize,
        /// The block.
        block: usize,
        /// The place of that rank's data.
        of: MemoryArea,
        /// The destination part of this rank's buffer.
        into: usize,
    },
    /// Copies a cell of the input into the buffer: the data of this rank for itself.
    Keep {
        /// The part.
        part: usize,
        /// Its block.
        block: usize,
    },
}

/// Some parts of a rank's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartSet {
    /// This one.
    One(usize),
    /// All but this one.
    Others(usize),
}

/// Some of the other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerSet {
    /// This one.
    One(usize),
    /// All of them.
    Others,
}

/// The second destination of a sum, in addition to the buffer of the rank that computes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumTarget {
    /// None.
    Buffer,
    /// The contributions of these ranks: in slots, or in the memory that they have lent.
    Back(PeerSet),
}

impl PartSet {
    /// Returns the indices of the parts.
    #[inline]
    pub(super) fn indices(self, count: usize) -> impl Iterator<Item = usize> {
        let (range, but) = match self {
            Self::One(part) => (part..part + 1, None),
            Self::Others(part) => (0..count, Some(part)),
        };
        range.filter(move |&part| Some(part) != but)
    }
}

impl PeerSet {
    /// Returns the ranks, beginning with the right neighbour of `rank`.
    #[inline]
    pub(super) fn ranks(self, rank: usize, world_size: usize) -> impl Iterator<Item = usize> {
        let (one, others) = match self {
            Self::One(peer) => (Some(peer), 1..1),
            Self::Others => (None, rank + 1..rank + world_size),
        };
        one.into_iter()
            .chain(others.map(move |peer| if peer < world_size { peer } else { peer - world_size }))
    }
}

impl fmt::Display for DirectStep {
    /// Writes the step as in drawings. A part and its block are `1.0`.
    ///
    /// - `s0=1.0` publishes it in slot 0; `s0=i¬1.0` publishes all other parts of the input.
    /// - `!` signals; `?2×1` waits for one signal of rank 2, `?*×1` for one of every other rank.
    /// - `+1.0(s0)` reduces it from the slots 0; `+1.0(s0→2)` also writes it back into the slot of rank 2;
    ///   `+1.0(m→*)` reduces it from all ranks' memory and writes it back into all of it.
    /// - `=1.0←2(s0)` copies it from slot 0 of rank 2; `=1.0←2(m:0)` copies part 0 of its memory; `=1.0←i` copies
    ///   it from the input.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Publish { parts, block, of, place } => {
                let input = if of == Source::Input { "i" } else { "" };
                let (all_but, part) = match parts {
                    PartSet::One(part) => ("", part),
                    PartSet::Others(part) => ("¬", part),
                };
                write!(f, "{}={input}{all_but}{part}.{block}", name(place))
            }
            Self::Signal => f.write_str("!"),
            Self::Wait { ranks: PeerSet::One(rank), signals } => write!(f, "?{rank}×{signals}"),
            Self::Wait { ranks: PeerSet::Others, signals } => write!(f, "?*×{signals}"),
            Self::Reduce { part, block, of, into } => {
                let back = match into {
                    SumTarget::Buffer => String::new(),
                    SumTarget::Back(PeerSet::One(rank)) => format!("→{rank}"),
                    SumTarget::Back(PeerSet::Others) => "→*".to_owned(),
                };
                write!(f, "+{part}.{block}({}{back})", name(of))
            }
            Self::Take { from, part, block, of, into } => {
                let there = if part == into { String::new() } else { format!(":{part}") };
                write!(f, "={into}.{block}←{from}({}{there})", name(of))
            }
            Self::Keep { part, block } => write!(f, "={part}.{block}←i"),
        }
    }
}

fn name(place: MemoryArea) -> String {
    match place {
        MemoryArea::FlagLine => "line".to_owned(),
        MemoryArea::EagerBuffer => "eager".to_owned(),
        MemoryArea::Slot(slot) => format!("s{slot}"),
        MemoryArea::Exposed => "m".to_owned(),
    }
}
