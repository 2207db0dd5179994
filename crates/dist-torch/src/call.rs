//! [`Call`]: one call of a communicator on the memory of tensors.

use std::borrow::Cow;

use dist_collectives::{Communicator, DType, Element, Error, ReduceOp, bf16, f16};
use pyo3::prelude::*;

use crate::error::Failure;
use crate::memory::TensorMemory;
use crate::messages::{AnySource, RECEIVER, SENDER};

/// A call of a communicator, with the element type of its tensors.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) dtype: DType,
    pub(crate) action: Action,
}

/// The operation and its memory.
#[derive(Debug)]
pub(crate) enum Action {
    AllReduce {
        buffers: Vec<TensorMemory>,
        op: ReduceOp,
    },
    Broadcast {
        buffer: TensorMemory,
        root: usize,
    },
    Reduce {
        buffer: TensorMemory,
        op: ReduceOp,
        root: usize,
    },
    AllGather {
        input: TensorMemory,
        output: TensorMemory,
        counts: Option<Vec<usize>>,
    },
    ReduceScatter {
        input: TensorMemory,
        output: TensorMemory,
        counts: Option<Vec<usize>>,
        op: ReduceOp,
    },
    AllToAll {
        input: TensorMemory,
        output: TensorMemory,
        counts: Option<[Vec<usize>; 2]>,
    },
    Gather {
        input: TensorMemory,
        output: TensorMemory,
        root: usize,
    },
    Scatter {
        input: TensorMemory,
        output: TensorMemory,
        root: usize,
    },
    Send {
        buffer: TensorMemory,
        tag: u32,
    },
    Receive {
        buffer: TensorMemory,
        tag: u32,
    },
    ReceiveAny {
        buffer: TensorMemory,
        tag: u32,
        sources: AnySource,
    },
    Barrier,
    /// A barrier whose error names all absent ranks, or only the first.
    MonitoredBarrier {
        names_all: bool,
    },
}

impl Call {
    /// Makes the call.
    pub(crate) fn run(self, comm: &mut Communicator) -> Result<(), Failure> {
        match self.dtype {
            DType::F32 => self.action.run::<f32>(comm),
            DType::F64 => self.action.run::<f64>(comm),
            DType::F16 => self.action.run::<f16>(comm),
            DType::Bf16 => self.action.run::<bf16>(comm),
            DType::I8 => self.action.run::<i8>(comm),
            DType::I32 => self.action.run::<i32>(comm),
            DType::I64 => self.action.run::<i64>(comm),
            DType::U8 => self.action.run::<u8>(comm),
            DType::U32 => self.action.run::<u32>(comm),
            DType::U64 => self.action.run::<u64>(comm),
            other => Err(Failure::unsupported(format!("elements of type {other} are not supported"))),
        }
    }

    /// Refuses elements of another size, and buffers that share memory.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let size = self.dtype.size();
        if self.action.memory().iter().any(|memory| memory.element_size() != size) {
            let dtype = self.dtype;
            return Err(Failure::arguments(format!(
                "the elements of the tensors do not have the size of {dtype}"
            )));
        }
        let Action::AllReduce { buffers, .. } = &self.action else { return Ok(()) };
        let mut buffers: Vec<_> = buffers.iter().collect();
        buffers.sort_unstable_by_key(|buffer| buffer.range().start);
        if buffers.windows(2).any(|pair| pair[0].overlaps(pair[1])) {
            return Err(Failure::arguments("two tensors of one call share memory: give each of them once"));
        }
        Ok(())
    }

    /// Prepares the call for being made after the function that starts it has returned.
    pub(crate) fn hold_storages(&mut self, py: Python<'_>) -> PyResult<()> {
        self.action.memory_mut().into_iter().try_for_each(|memory| memory.hold_storage(py))
    }
}

impl Action {
    fn memory(&self) -> Vec<&TensorMemory> {
        match self {
            Self::AllReduce { buffers, .. } => buffers.iter().collect(),
            Self::Broadcast { buffer, .. }
            | Self::Reduce { buffer, .. }
            | Self::Send { buffer, .. }
            | Self::Receive { buffer, .. }
            | Self::ReceiveAny { buffer, .. } => vec![buffer],
            Self::AllGather { input, output, .. }
            | Self::ReduceScatter { input, output, .. }
            | Self::AllToAll { input, output, .. }
            | Self::Gather { input, output, .. }
            | Self::Scatter { input, output, .. } => vec![input, output],
            Self::Barrier | Self::MonitoredBarrier { .. } => Vec::new(),
        }
    }

    fn memory_mut(&mut self) -> Vec<&mut TensorMemory> {
        match self {
            Self::AllReduce { buffers, .. } => buffers.iter_mut().collect(),
            Self::Broadcast { buffer, .. }
            | Self::Reduce { buffer, .. }
            | Self::Send { buffer, .. }
            | Self::Receive { buffer, .. }
            | Self::ReceiveAny { buffer, .. } => vec![buffer],
            Self::AllGather { input, output, .. }
            | Self::ReduceScatter { input, output, .. }
            | Self::AllToAll { input, output, .. }
            | Self::Gather { input, output, .. }
            | Self::Scatter { input, output, .. } => vec![input, output],
            Self::Barrier | Self::MonitoredBarrier { .. } => Vec::new(),
        }
    }

    /// Makes the call on elements of type `T`.
    fn run<T: Element>(self, comm: &mut Communicator) -> Result<(), Failure> {
        match self {
            Self::AllReduce { mut buffers, op } => {
                let mut buffers: Vec<&mut [T]> = buffers.iter_mut().map(TensorMemory::write).collect();
                match buffers.as_mut_slice() {
                    [buffer] => comm.all_reduce(buffer, op)?,
                    buffers => comm.all_reduce_coalesced(buffers, op)?,
                }
            }
            Self::Broadcast { mut buffer, root } => comm.broadcast::<T>(buffer.write(), root)?,
            Self::Reduce { mut buffer, op, root } => comm.reduce::<T>(buffer.write(), op, root)?,
            Self::AllGather { input, mut output, counts } => {
                all_gather::<T>(comm, &input, &mut output, counts.as_deref())?;
            }
            Self::ReduceScatter { input, mut output, counts, op } => {
                let (input, output) = separate::<T>(&input, &mut output);
                match counts {
                    None => comm.reduce_scatter(&input, output, op)?,
                    Some(counts) => comm.reduce_scatter_v(&input, &counts, output, op)?,
                }
            }
            Self::AllToAll { input, mut output, counts } => {
                let (input, output) = separate::<T>(&input, &mut output);
                match counts {
                    None => comm.all_to_all(&input, output)?,
                    Some([sent, received]) => comm.all_to_all_v(&input, &sent, output, &received)?,
                }
            }
            Self::Gather { input, mut output, root } => {
                let (input, output) = separate::<T>(&input, &mut output);
                comm.gather(&input, output, root)?;
            }
            Self::Scatter { input, mut output, root } => {
                let (input, output) = separate::<T>(&input, &mut output);
                comm.scatter(&input, output, root)?;
            }
            Self::Send { buffer, tag } => comm.with_tag(tag).send(buffer.read::<T>(), RECEIVER)?,
            Self::Receive { mut buffer, tag } => comm.with_tag(tag).recv(buffer.write::<T>(), SENDER)?,
            Self::ReceiveAny { mut buffer, tag, sources } => {
                sources.receive(comm, buffer.write::<T>(), tag)?;
            }
            Self::Barrier => comm.barrier()?,
            Self::MonitoredBarrier { names_all } => {
                let result = comm.monitored_barrier();
                result.map_err(|error| Failure::of_monitored_barrier(error, comm.rank(), names_all))?;
            }
        }
        Ok(())
    }
}

/// Gathers. FSDP passes an input that already is this rank's part of the output.
fn all_gather<T: Element>(
    comm: &mut Communicator,
    input: &TensorMemory,
    output: &mut TensorMemory,
    counts: Option<&[usize]>,
) -> Result<(), Error> {
    if counts.is_none() && input.is_part(comm.rank(), comm.world_size(), output) {
        return comm.all_gather_in_place::<T>(output.write());
    }
    let (input, output) = separate::<T>(input, output);
    match counts {
        None => comm.all_gather(&input, output),
        Some(counts) => comm.all_gather_v(&input, counts, output),
    }
}

/// Returns the input and the output as slices. If they share memory, the input is copied.
fn separate<'a, T: Element>(
    input: &'a TensorMemory,
    output: &'a mut TensorMemory,
) -> (Cow<'a, [T]>, &'a mut [T]) {
    let elements = input.read();
    let input = if input.overlaps(output) { Cow::Owned(elements.to_vec()) } else { Cow::Borrowed(elements) };
    (input, output.write())
}
