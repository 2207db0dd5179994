//! Flat buffers of any type of parameter, and communication with them.

use dist_collectives::{Buffer, Communicator, Element, Failed, Pending, ReduceOp, Window};
use half::{bf16, f16};

use crate::flat_storage::{CountedBuffer, FlatStorage, PendingStorage};
use crate::number::Number;
use crate::values::{map_values, with_values};
use crate::{Error, FloatType, Result, Values, ValuesMut};

/// A flat buffer for communication.
#[derive(Debug)]
pub(crate) enum Flat {
    F32(FlatStorage<f32>),
    F64(FlatStorage<f64>),
    F16(FlatStorage<f16>),
    Bf16(FlatStorage<bf16>),
}

impl Flat {
    pub(crate) fn zeros(dtype: FloatType, len: usize) -> Self {
        match dtype {
            FloatType::F32 => Self::F32(vec![0.0; len].into()),
            FloatType::F64 => Self::F64(vec![0.0; len].into()),
            FloatType::F16 => Self::F16(vec![f16::ZERO; len].into()),
            FloatType::Bf16 => Self::Bf16(vec![bf16::ZERO; len].into()),
        }
    }

    /// Allocates zeros in memory that the ranks of this host share, if there is any.
    pub(crate) fn allocated(comm: &mut Communicator, dtype: FloatType, len: usize) -> Result<Self> {
        Ok(match dtype {
            FloatType::F32 => Self::F32(comm.alloc(len).map_err(Error::communication)?.into()),
            FloatType::F64 => Self::F64(comm.alloc(len).map_err(Error::communication)?.into()),
            FloatType::F16 => Self::F16(comm.alloc(len).map_err(Error::communication)?.into()),
            FloatType::Bf16 => Self::Bf16(comm.alloc(len).map_err(Error::communication)?.into()),
        })
    }

    /// Returns a buffer without memory.
    pub(crate) const fn counted(dtype: FloatType, counted: CountedBuffer) -> Self {
        match dtype {
            FloatType::F32 => Self::F32(FlatStorage::Counted(counted)),
            FloatType::F64 => Self::F64(FlatStorage::Counted(counted)),
            FloatType::F16 => Self::F16(FlatStorage::Counted(counted)),
            FloatType::Bf16 => Self::Bf16(FlatStorage::Counted(counted)),
        }
    }

    pub(crate) fn dtype(&self) -> FloatType {
        self.slice(0, 0).dtype()
    }

    pub(crate) fn len(&self) -> usize {
        with_values!(Flat, self, |buffer| buffer.len())
    }

    /// Returns `len` values from `offset` on, or none of a [counted](Self::counted) buffer.
    pub(crate) fn slice(&self, offset: usize, len: usize) -> Values<'_> {
        let range = offset..offset + len;
        map_values!(Flat => Values, self, |buffer| buffer.part(range))
    }

    /// Returns the same values, to change them.
    pub(crate) fn slice_mut(&mut self, offset: usize, len: usize) -> ValuesMut<'_> {
        let range = offset..offset + len;
        map_values!(Flat => ValuesMut, self, |buffer| buffer.part_mut(range))
    }

    /// Adds a buffer of the same type and length.
    pub(crate) fn add(&mut self, other: &Self) {
        let len = self.len();
        self.slice_mut(0, len).add(other.slice(0, len)).expect("buffers of one bucket look the same");
    }

    /// Returns a copy of a part, converted to a type.
    pub(crate) fn part(&self, dtype: FloatType, offset: usize, len: usize) -> Self {
        let values = self.slice(offset, len);
        if (values.dtype(), values.len()) == (dtype, len) {
            return Self::copy_of(values);
        }
        let mut part = with_values!(Flat, self, |buffer| buffer.allocator()).zeros(dtype, len);
        part.slice_mut(0, len).convert_from(values);
        part
    }

    /// Reduces the buffers of all ranks.
    pub(crate) fn all_reduce(&mut self, comm: &mut Communicator, op: ReduceOp) -> Result<()> {
        with_values!(Flat, self, |buffer| comm.all_reduce(buffer, op)).map_err(Error::communication)
    }

    /// Replaces the values by `other` minus them.
    pub(crate) fn subtract_from(&mut self, other: &Self) {
        match (self, other) {
            (Self::F32(own), Self::F32(other)) => subtract(own, other),
            (Self::F64(own), Self::F64(other)) => subtract(own, other),
            (Self::F16(own), Self::F16(other)) => subtract(own, other),
            (Self::Bf16(own), Self::Bf16(other)) => subtract(own, other),
            _ => unreachable!("buffers of one bucket look the same"),
        }
    }

    /// Starts to sum the buffers of all ranks.
    pub(crate) fn start_sum(self, comm: &mut Communicator) -> PendingFlat {
        map_values!(Flat => PendingFlat, self, |buffer| buffer.start(|buffer| comm.start_all_reduce(buffer, ReduceOp::Sum)))
    }

    /// Starts a reduce-scatter: each rank gets the sum of its own part.
    pub(crate) fn start_scattered_sum(self, comm: &mut Communicator) -> PendingFlat {
        map_values!(Flat => PendingFlat, self, |buffer| buffer.start(|buffer| comm.start_reduce_scatter_in_place(buffer, ReduceOp::Sum)))
    }

    /// Starts an all-gather in place.
    pub(crate) fn start_gather(self, comm: &mut Communicator) -> PendingFlat {
        map_values!(Flat => PendingFlat, self, |buffer| buffer.start(|buffer| comm.start_all_gather_in_place(buffer)))
    }

    /// Returns `true` if all ranks can read each other's buffers. The result is the same on all ranks.
    pub(crate) fn can_open(&self, comm: &mut Communicator) -> Result<bool> {
        with_values!(Flat, self, |buffer| match buffer {
            FlatStorage::Memory(buffer) => comm.can_open(buffer).map_err(Error::communication),
            FlatStorage::Counted(_) => Ok(false),
        })
    }

    /// Opens the buffer for reading by all ranks.
    pub(crate) fn open(self, comm: Communicator) -> Result<FlatWindow, (Self, Error)> {
        Ok(match self {
            Self::F32(buffer) => {
                FlatWindow::F32(comm.open(buffer.into_buffer()).map_err(|failed| kept(failed, Self::F32))?)
            }
            Self::F64(buffer) => {
                FlatWindow::F64(comm.open(buffer.into_buffer()).map_err(|failed| kept(failed, Self::F64))?)
            }
            Self::F16(buffer) => {
                FlatWindow::F16(comm.open(buffer.into_buffer()).map_err(|failed| kept(failed, Self::F16))?)
            }
            Self::Bf16(buffer) => {
                FlatWindow::Bf16(comm.open(buffer.into_buffer()).map_err(|failed| kept(failed, Self::Bf16))?)
            }
        })
    }
}

/// Computes `own = other − own`, rounded once; half types in `f32`.
fn subtract<T: Number>(own: &mut [T], other: &[T]) {
    for (own, other) in own.iter_mut().zip(other) {
        *own = T::narrow(other.widen() - own.widen());
    }
}

/// Messages between two ranks.
impl Flat {
    /// Returns a copy of these values.
    pub(crate) fn copy_of(values: Values<'_>) -> Self {
        map_values!(Values => Flat, values, |values| values.to_vec().into())
    }

    /// Starts to send the buffer.
    pub(crate) fn start_send(self, comm: &mut Communicator, to: usize) -> PendingFlat {
        map_values!(Flat => PendingFlat, self, |buffer| buffer.start(|buffer| comm.start_send(buffer, to)))
    }

    /// Starts to receive into the whole buffer.
    pub(crate) fn start_receive(self, comm: &mut Communicator, from: usize) -> PendingFlat {
        map_values!(Flat => PendingFlat, self, |buffer| buffer.start(|buffer| comm.start_recv(buffer, from)))
    }

    /// Sends the buffer.
    pub(crate) fn send(&self, comm: &mut Communicator, to: usize) -> Result<()> {
        with_values!(Flat, self, |buffer| comm.send(buffer, to)).map_err(Error::communication)
    }

    /// Receives into the whole buffer.
    pub(crate) fn receive(&mut self, comm: &mut Communicator, from: usize) -> Result<()> {
        with_values!(Flat, self, |buffer| comm.recv(buffer, from)).map_err(Error::communication)
    }

    /// Sets one value to 1.
    pub(crate) fn set_one(&mut self, index: usize) {
        with_values!(Flat, self, |buffer| buffer[index] = Number::of(1.0));
    }

    /// Returns `true` if a value is 1.
    pub(crate) fn is_one(&self, index: usize) -> bool {
        with_values!(Flat, self, |buffer| buffer[index].to_f64() == 1.0)
    }
}

/// A flat buffer with an operation in flight.
#[derive(Debug)]
pub(crate) enum PendingFlat {
    F32(PendingStorage<f32>),
    F64(PendingStorage<f64>),
    F16(PendingStorage<f16>),
    Bf16(PendingStorage<bf16>),
}

impl PendingFlat {
    /// Returns `true` if `wait` would not block.
    pub(crate) fn is_done(&mut self) -> bool {
        with_values!(PendingFlat, self, |pending| pending.is_done())
    }

    pub(crate) fn wait(self) -> Result<Flat> {
        Ok(map_values!(PendingFlat => Flat, self, |pending| pending.wait()?))
    }
}

/// Waits for an operation and drops the buffer if it failed.
pub(crate) fn wait<B>(pending: Pending<B>) -> Result<B> {
    pending.wait().map_err(|failed| Error::communication(*failed.error))
}

/// The buffers of all ranks while all of them can read them.
#[derive(Debug)]
pub(crate) enum FlatWindow {
    F32(Window<f32>),
    F64(Window<f64>),
    F16(Window<f16>),
    Bf16(Window<bf16>),
}

impl FlatWindow {
    /// Returns this rank's own values.
    pub(crate) fn own(&self, offset: usize, len: usize) -> Values<'_> {
        let range = offset..offset + len;
        map_values!(FlatWindow => Values, self, |window| &window[range])
    }

    /// Copies values of a rank from an offset on. The types must be equal.
    pub(crate) fn read(&mut self, rank: usize, offset: usize, into: ValuesMut<'_>) -> Result<()> {
        match (self, into) {
            (Self::F32(window), ValuesMut::F32(into)) => window.read(rank, offset, into),
            (Self::F64(window), ValuesMut::F64(into)) => window.read(rank, offset, into),
            (Self::F16(window), ValuesMut::F16(into)) => window.read(rank, offset, into),
            (Self::Bf16(window), ValuesMut::Bf16(into)) => window.read(rank, offset, into),
            _ => unreachable!("values that are read in place have the model's type"),
        }
        .map_err(Error::communication)
    }

    /// Waits until no rank reads any more, and closes the window.
    pub(crate) fn close(self) -> Result<(Communicator, Flat), (Flat, Error)> {
        Ok(match self {
            Self::F32(window) => closed(window, Flat::F32)?,
            Self::F64(window) => closed(window, Flat::F64)?,
            Self::F16(window) => closed(window, Flat::F16)?,
            Self::Bf16(window) => closed(window, Flat::Bf16)?,
        })
    }
}

fn closed<T: Element>(
    window: Window<T>,
    flat: fn(FlatStorage<T>) -> Flat,
) -> Result<(Communicator, Flat), (Flat, Error)> {
    let (comm, buffer) = window.close().map_err(|failed| kept(failed, flat))?;
    Ok((comm, flat(buffer.into())))
}

/// Returns the buffer of a window that failed.
fn kept<T>(failed: Failed<Buffer<T>>, flat: fn(FlatStorage<T>) -> Flat) -> (Flat, Error) {
    (flat(failed.buffer.into()), Error::communication(*failed.error))
}
