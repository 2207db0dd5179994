//! One step of a direct schedule.
//!
//! A step names parts and blocks of a rank's memory as a [`DirectPlan`](super::Plan) cuts it, and knows no bytes, no element
//! type and no operation.

use std::fmt;

use dist_transport::Place;

use crate::Source;

/// What a rank does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectStep {
    /// Copies one block of these parts of its memory to where others find them.
    Publish {
        /// The parts.
        parts: PartSet,
        /// Their block.
        block: usize,
        /// Of which memory.
        of: Source,
        /// Where they are put: the line, the sheet, or a slot.
        place: Place,
    },
    /// Says that all its steps so far are done.
    Post,
    /// Waits until these ranks have posted so often in this call.
    Await {
        /// Which ranks.
        ranks: PeerSet,
        /// How often.
        posts: u32,
    },
    /// Reduces what all other ranks have for a cell of the buffer into it, in canonical order, and finishes the sum.
    Reduce {
        /// The part.
        part: usize,
        /// Its block.
        block: usize,
        /// Where the others have it.
        of: Place,
        /// Where the sum goes besides.
        into: SumTarget,
    },
    /// Copies a cell into the buffer that another rank has, or that lies in a slot of this one.
    Take {
        /// The rank that has it.
        from: usize,
        /// Its part.
        part: usize,
        /// The block.
        block: usize,
        /// Where that rank has it.
        of: Place,
        /// The part of the own buffer that it becomes.
        into: usize,
    },
    /// Copies a cell of the input into the buffer: what this rank has for itself.
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

/// Where a sum goes, beside the buffer of the rank that computes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumTarget {
    /// Nowhere.
    Buffer,
    /// Back to where these ranks' contributions lay: in slots of theirs, or in the memory that they have lent.
    Back(PeerSet),
}

impl PartSet {
    /// The indices, of so many parts.
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
    /// The ranks, seen by one of so many, beginning with its right neighbour.
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
    /// As in a drawing, a part and its block as `1.0`: `s0=1.0` publishes it in slot 0, `s0=i¬1.0` all parts of the input but
    /// that; `!` posts, `?2×1` waits for a post of rank 2 and `?*×1` for one of every other; `+1.0(s0)` reduces it from the
    /// slots 0, `+1.0(s0→2)` back into that of rank 2 too, and `+1.0(m→*)` from all ranks' memory and back into all of it;
    /// `=1.0←2(s0)` copies it from slot 0 of rank 2, `=1.0←2(m:0)` from what is part 0 there, and `=1.0←i` from the input.
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
            Self::Post => f.write_str("!"),
            Self::Await { ranks: PeerSet::One(rank), posts } => write!(f, "?{rank}×{posts}"),
            Self::Await { ranks: PeerSet::Others, posts } => write!(f, "?*×{posts}"),
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

fn name(place: Place) -> String {
    match place {
        Place::FlagLine => "line".to_owned(),
        Place::EagerBuffer => "sheet".to_owned(),
        Place::Slot(slot) => format!("s{slot}"),
        Place::Memory => "m".to_owned(),
    }
}
