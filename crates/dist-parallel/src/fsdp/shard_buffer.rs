//! This rank's parts of all strips, as the optimizer changes them, and those of others where they lie.
//!
//! ShardBuffer of one type lie in one buffer. Where ranks can read each other's, nothing is gathered: whoever loads a strip reads
//! it in windows, which are open from a pass's first load until all ranks are through with it.

use dist_collectives::Communicator;

use super::groups::follow;
use crate::flat::{Flat, FlatWindow};
use crate::{Error, FloatType, Result, Values, ValuesMut};

#[derive(Debug, Default)]
pub(crate) struct ShardBuffer(Vec<TypedBuffer>);

/// The parts of one type.
#[derive(Debug)]
struct TypedBuffer {
    dtype: FloatType,
    len: usize,
    memory: BufferState,
}

#[derive(Debug)]
enum BufferState {
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
pub(crate) struct ShardOffset {
    /// Its type, by the place in the list.
    buffer: usize,
    offset: usize,
}

impl ShardBuffer {
    /// Makes room for a part of so many values, behind the others.
    pub(crate) fn reserve(&mut self, dtype: FloatType, len: usize) -> ShardOffset {
        let place = self.buffer(dtype);
        let buffer = &mut self.0[place];
        let start = ShardOffset { buffer: place, offset: buffer.len };
        buffer.len += len;
        start
    }

    /// Makes room for a part of so many values where others have been before.
    pub(crate) fn reserve_in_turn(&mut self, dtype: FloatType, len: usize) -> ShardOffset {
        let place = self.buffer(dtype);
        let buffer = &mut self.0[place];
        buffer.len = buffer.len.max(len);
        ShardOffset { buffer: place, offset: 0 }
    }

    /// The place of a type in the list.
    fn buffer(&mut self, dtype: FloatType) -> usize {
        self.0.iter().position(|buffer| buffer.dtype == dtype).unwrap_or_else(|| {
            self.0.push(TypedBuffer { dtype, len: 0, memory: BufferState::Nowhere });
            self.0.len() - 1
        })
    }

    /// Gives the parts memory of this rank's own, all zero.
    pub(crate) fn allocate(&mut self) {
        for TypedBuffer { dtype, len, memory } in &mut self.0 {
            *memory = BufferState::Closed(Flat::zeros(*dtype, *len));
        }
    }

    /// Gives the parts memory, all zero, in which the ranks can read each other's, if there is such memory for all.
    pub(crate) fn allocate_together(&mut self, comm: &mut Communicator) -> Result<()> {
        let mut all_open = true;
        for TypedBuffer { dtype, len, memory } in &mut self.0 {
            let (mut opener, flat) =
                (comm.fork().map_err(Error::communication)?, Flat::allocated(comm, *dtype, *len)?);
            all_open &= flat.can_open(&mut opener)?;
            *memory = BufferState::Openable(flat, opener);
        }
        if !all_open {
            self.allocate();
        }
        Ok(())
    }

    /// Opens from now on in the manner of the communicator that ranks share the model by.
    pub(crate) fn follow(&mut self, comm: &Communicator) {
        for buffer in &mut self.0 {
            if let BufferState::Openable(_, opener) = &mut buffer.memory {
                follow(opener, comm);
            }
        }
    }

    /// Whether ranks read each other's parts.
    pub(crate) fn are_read(&self) -> bool {
        self.0.iter().any(|buffer| matches!(buffer.memory, BufferState::Openable(..) | BufferState::Open(_)))
    }

    /// Values of this rank's own parts.
    pub(crate) fn slice(&self, start: ShardOffset, at: usize, len: usize) -> Result<Values<'_>> {
        let offset = start.offset + at;
        match &self.0[start.buffer].memory {
            BufferState::Closed(flat) | BufferState::Openable(flat, _) => Ok(flat.slice(offset, len)),
            BufferState::Open(window) => Ok(window.own(offset, len)),
            BufferState::Nowhere => Err(Error::Freed),
        }
    }

    /// The same, to change.
    pub(crate) fn slice_mut(&mut self, start: ShardOffset, at: usize, len: usize) -> Result<ValuesMut<'_>> {
        // It is closed at the end of each pass, unless that has failed.
        self.close()?;
        match &mut self.0[start.buffer].memory {
            BufferState::Closed(flat) | BufferState::Openable(flat, _) => {
                Ok(flat.slice_mut(start.offset + at, len))
            }
            BufferState::Open(_) | BufferState::Nowhere => Err(Error::Freed),
        }
    }

    /// Copies a rank's values of a part that is open.
    pub(crate) fn read(
        &mut self,
        rank: usize,
        start: ShardOffset,
        at: usize,
        into: ValuesMut<'_>,
    ) -> Result<()> {
        match &mut self.0[start.buffer].memory {
            BufferState::Open(window) => window.read(rank, start.offset + at, into),
            _ => Err(Error::Freed),
        }
    }

    /// Lets the others read this rank's parts, and waits until theirs may be read, unless they may already. Every rank calls
    /// this.
    pub(crate) fn open(&mut self) -> Result<()> {
        self.transition(|memory| match memory {
            BufferState::Openable(flat, comm) => flat.open(comm).map(BufferState::Open),
            other => Ok(other),
        })
    }

    /// Waits until nobody reads this rank's parts any more, if somebody may. Every rank calls this.
    pub(crate) fn close(&mut self) -> Result<()> {
        self.transition(|memory| match memory {
            BufferState::Open(window) => window.close().map(|(comm, flat)| BufferState::Openable(flat, comm)),
            other => Ok(other),
        })
    }

    /// Turns the memory of each type into another, up to the first at which that fails: what this rank has there stays.
    fn transition(
        &mut self,
        transition: impl Fn(BufferState) -> Result<BufferState, (Flat, Error)>,
    ) -> Result<()> {
        self.0.iter_mut().try_for_each(|TypedBuffer { memory, .. }| {
            let (now, done) = match transition(std::mem::replace(memory, BufferState::Nowhere)) {
                Ok(now) => (now, Ok(())),
                Err((flat, error)) => (BufferState::Closed(flat), Err(error)),
            };
            *memory = now;
            done
        })
    }
}
