//! The buffers of this rank's shards of all flat parameters, in the types of the master values.
//!
//! There is one buffer per type. If ranks can read each other's buffers, nothing is gathered: a rank reads a flat
//! parameter through windows. They are open from the first use in a pass until all ranks have finished with it.

use dist_collectives::Communicator;

use super::groups::{Groups, follow};
use crate::flat::{Flat, FlatWindow};
use crate::flat_storage::Allocator;
use crate::{Error, FloatType, Result, Values, ValuesMut};

#[derive(Debug, Default)]
pub(crate) struct ShardBuffer(Vec<TypedBuffer>);

/// The shards of one type.
#[derive(Debug)]
struct TypedBuffer {
    dtype: FloatType,
    len: usize,
    memory: BufferState,
}

#[derive(Debug)]
enum BufferState {
    /// The memory is private.
    Closed(Flat),
    /// The memory is private for now. The communicator can open it for reading by the other ranks.
    Openable(Flat, Communicator),
    Open(FlatWindow),
    /// It has not been allocated.
    Nowhere,
}

/// The offset of a shard.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShardOffset {
    /// The index of the buffer, one per type.
    buffer: usize,
    offset: usize,
}

impl ShardBuffer {
    /// Reserves `len` values behind the other shards.
    pub(crate) fn reserve(&mut self, dtype: FloatType, len: usize) -> ShardOffset {
        let place = self.buffer(dtype);
        let buffer = &mut self.0[place];
        let start = ShardOffset { buffer: place, offset: buffer.len };
        buffer.len += len;
        start
    }

    /// Reserves `len` values that overlap with earlier reservations. A later call with these values has the same result.
    pub(crate) fn reserve_in_turn(&mut self, dtype: FloatType, len: usize) -> ShardOffset {
        let place = self.buffer(dtype);
        let buffer = &mut self.0[place];
        buffer.len = buffer.len.max(len);
        ShardOffset { buffer: place, offset: 0 }
    }

    /// Returns the index of the buffer of a type.
    fn buffer(&mut self, dtype: FloatType) -> usize {
        self.0.iter().position(|buffer| buffer.dtype == dtype).unwrap_or_else(|| {
            self.0.push(TypedBuffer { dtype, len: 0, memory: BufferState::Nowhere });
            self.0.len() - 1
        })
    }

    /// Allocates private memory, all zero.
    pub(crate) fn allocate(&mut self, allocator: &Allocator) {
        for TypedBuffer { dtype, len, memory } in &mut self.0 {
            *memory = BufferState::Closed(allocator.zeros(*dtype, *len));
        }
    }

    /// Allocates zeroed memory that all ranks can read, if that is possible for every type. Otherwise allocates
    /// private memory.
    pub(crate) fn allocate_together(&mut self, groups: &mut Groups) -> Result<()> {
        let mut all_open = true;
        for TypedBuffer { dtype, len, memory } in &mut self.0 {
            let mut opener = groups.shards.fork().map_err(Error::communication)?;
            let flat = groups.allocate(*dtype, *len)?;
            all_open &= flat.can_open(&mut opener)?;
            *memory = BufferState::Openable(flat, opener);
        }
        if !all_open {
            self.allocate(&groups.allocator);
        }
        Ok(())
    }

    /// Inherits the timeout and the reduction order of the communicator of the replica.
    pub(crate) fn follow(&mut self, comm: &Communicator) {
        for buffer in &mut self.0 {
            if let BufferState::Openable(_, opener) = &mut buffer.memory {
                follow(opener, comm);
            }
        }
    }

    /// Returns `true` if ranks read each other's shards.
    pub(crate) fn are_read(&self) -> bool {
        self.0.iter().any(|buffer| matches!(buffer.memory, BufferState::Openable(..) | BufferState::Open(_)))
    }

    /// Returns values of this rank's own shard.
    pub(crate) fn slice(&self, start: ShardOffset, at: usize, len: usize) -> Result<Values<'_>> {
        let offset = start.offset + at;
        match &self.0[start.buffer].memory {
            BufferState::Closed(flat) | BufferState::Openable(flat, _) => Ok(flat.slice(offset, len)),
            BufferState::Open(window) => Ok(window.own(offset, len)),
            BufferState::Nowhere => Err(Error::Freed),
        }
    }

    /// Returns values of this rank's own shard, to change them.
    pub(crate) fn slice_mut(&mut self, start: ShardOffset, at: usize, len: usize) -> Result<ValuesMut<'_>> {
        // Each pass closes the windows at its end, unless it has failed.
        self.close()?;
        match &mut self.0[start.buffer].memory {
            BufferState::Closed(flat) | BufferState::Openable(flat, _) => {
                Ok(flat.slice_mut(start.offset + at, len))
            }
            BufferState::Open(_) | BufferState::Nowhere => Err(Error::Freed),
        }
    }

    /// Copies values of another rank's shard, through an open window.
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

    /// Opens the windows: the others can read this rank's shards, and this rank can read theirs. Does nothing if they
    /// are open. Every rank calls this.
    pub(crate) fn open(&mut self) -> Result<()> {
        self.transition(|memory| match memory {
            BufferState::Openable(flat, comm) => flat.open(comm).map(BufferState::Open),
            other => Ok(other),
        })
    }

    /// Waits until no rank reads this rank's shards, and closes the windows. Every rank calls this.
    pub(crate) fn close(&mut self) -> Result<()> {
        self.transition(|memory| match memory {
            BufferState::Open(window) => window.close().map(|(comm, flat)| BufferState::Openable(flat, comm)),
            other => Ok(other),
        })
    }

    /// Changes the state of each buffer, up to the first failure. A failed buffer becomes private and keeps its
    /// values.
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
