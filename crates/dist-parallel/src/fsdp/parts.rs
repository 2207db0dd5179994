//! This rank's parts of all strips, as the optimizer changes them, and those of others where they lie.
//!
//! Parts of one type lie in one buffer. Where ranks can read each other's, nothing is gathered: whoever loads a strip reads
//! it in windows, which are open from a pass's first load until all ranks are through with it.

use dist_collectives::Communicator;

use super::groups::follow;
use crate::flat::{Flat, FlatWindow};
use crate::{Error, FloatType, Result, Values, ValuesMut};

#[derive(Debug, Default)]
pub(crate) struct Parts(Vec<OfType>);

/// The parts of one type.
#[derive(Debug)]
struct OfType {
    dtype: FloatType,
    len: usize,
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    /// It is this rank's alone.
    Closed(Flat),
    /// So it is now; others can be let read it by this communicator.
    Openable(Flat, Communicator),
    Open(FlatWindow),
    /// There is none yet.
    Nowhere,
}

/// Where the part of a strip begins.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spot {
    /// Its type, by the place in the list.
    of_type: usize,
    offset: usize,
}

impl Parts {
    /// Makes room for a part of so many values, behind the others.
    pub(crate) fn reserve(&mut self, dtype: FloatType, len: usize) -> Spot {
        let place = self.of_type(dtype);
        let of_type = &mut self.0[place];
        let spot = Spot { of_type: place, offset: of_type.len };
        of_type.len += len;
        spot
    }

    /// Makes room for a part of so many values where others have been before.
    pub(crate) fn reserve_in_turn(&mut self, dtype: FloatType, len: usize) -> Spot {
        let place = self.of_type(dtype);
        let of_type = &mut self.0[place];
        of_type.len = of_type.len.max(len);
        Spot { of_type: place, offset: 0 }
    }

    /// The place of a type in the list.
    fn of_type(&mut self, dtype: FloatType) -> usize {
        self.0.iter().position(|of_type| of_type.dtype == dtype).unwrap_or_else(|| {
            self.0.push(OfType { dtype, len: 0, memory: Memory::Nowhere });
            self.0.len() - 1
        })
    }

    /// Gives the parts memory of this rank's own, all zero.
    pub(crate) fn allocate(&mut self) {
        for OfType { dtype, len, memory } in &mut self.0 {
            *memory = Memory::Closed(Flat::zeros(*dtype, *len));
        }
    }

    /// Gives the parts memory, all zero, in which the ranks can read each other's, if there is such memory for all.
    pub(crate) fn allocate_together(&mut self, comm: &mut Communicator) -> Result<()> {
        let mut all_open = true;
        for OfType { dtype, len, memory } in &mut self.0 {
            let (mut opener, flat) =
                (comm.fork().map_err(Error::communication)?, Flat::allocated(comm, *dtype, *len)?);
            all_open &= flat.can_open(&mut opener)?;
            *memory = Memory::Openable(flat, opener);
        }
        if !all_open {
            self.allocate();
        }
        Ok(())
    }

    /// Opens from now on in the manner of the communicator that ranks share the model by.
    pub(crate) fn follow(&mut self, comm: &Communicator) {
        for of_type in &mut self.0 {
            if let Memory::Openable(_, opener) = &mut of_type.memory {
                follow(opener, comm);
            }
        }
    }

    /// Whether ranks read each other's parts.
    pub(crate) fn are_read(&self) -> bool {
        self.0.iter().any(|of_type| matches!(of_type.memory, Memory::Openable(..) | Memory::Open(_)))
    }

    /// Values of this rank's own parts.
    pub(crate) fn slice(&self, spot: Spot, at: usize, len: usize) -> Result<Values<'_>> {
        let offset = spot.offset + at;
        match &self.0[spot.of_type].memory {
            Memory::Closed(flat) | Memory::Openable(flat, _) => Ok(flat.slice(offset, len)),
            Memory::Open(window) => Ok(window.own(offset, len)),
            Memory::Nowhere => Err(Error::Freed),
        }
    }

    /// The same, to change.
    pub(crate) fn slice_mut(&mut self, spot: Spot, at: usize, len: usize) -> Result<ValuesMut<'_>> {
        // It is closed at the end of each pass, unless that has failed.
        self.close()?;
        match &mut self.0[spot.of_type].memory {
            Memory::Closed(flat) | Memory::Openable(flat, _) => Ok(flat.slice_mut(spot.offset + at, len)),
            Memory::Open(_) | Memory::Nowhere => Err(Error::Freed),
        }
    }

    /// Copies a rank's values of a part that is open.
    pub(crate) fn read(&mut self, rank: usize, spot: Spot, at: usize, into: ValuesMut<'_>) -> Result<()> {
        match &mut self.0[spot.of_type].memory {
            Memory::Open(window) => window.read(rank, spot.offset + at, into),
            _ => Err(Error::Freed),
        }
    }

    /// Lets the others read this rank's parts, and waits until theirs may be read, unless they may already. Every rank calls
    /// this.
    pub(crate) fn open(&mut self) -> Result<()> {
        self.turn(|memory| match memory {
            Memory::Openable(flat, comm) => flat.open(comm).map(Memory::Open),
            other => Ok(other),
        })
    }

    /// Waits until nobody reads this rank's parts any more, if somebody may. Every rank calls this.
    pub(crate) fn close(&mut self) -> Result<()> {
        self.turn(|memory| match memory {
            Memory::Open(window) => window.close().map(|(comm, flat)| Memory::Openable(flat, comm)),
            other => Ok(other),
        })
    }

    /// Turns the memory of each type into another, up to the first at which that fails: what this rank has there stays.
    fn turn(&mut self, turn: impl Fn(Memory) -> Result<Memory, (Flat, Error)>) -> Result<()> {
        self.0.iter_mut().try_for_each(|OfType { memory, .. }| {
            let (now, done) = match turn(std::mem::replace(memory, Memory::Nowhere)) {
                Ok(now) => (now, Ok(())),
                Err((flat, error)) => (Memory::Closed(flat), Err(error)),
            };
            *memory = now;
            done
        })
    }
}
