//! [`Call`]: one call of a communicator on the memory of tensors.

use std::borrow::Cow;

use dist_collectives::{Communicator, DType, Element, Error, ReduceOp, bf16, f16};

use crate::error::Failure;
use crate::memory::TensorMemory;

/// A call of a communicator, with the element type of its tensors.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) dtype: DType,
    pub(crate) action: Action,
}

/// What the call does, and the memory on which it does it.
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
        to: usize,
        tag: u64,
    },
    Receive {
        buffer: TensorMemory,
        from: usize,
        tag: u64,
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

    /// Returns `true` if the elements of all tensors have the size of the call's type.
    pub(crate) fn fits(&self) -> bool {
        self.action.memory().iter().all(|memory| memory.element_size() == self.dtype.size())
    }
}

impl Action {
    fn memory(&self) -> Vec<&TensorMemory> {
        match self {
            Self::AllReduce { buffers, .. } => buffers.iter().collect(),
            Self::Broadcast { buffer, .. }
            | Self::Reduce { buffer, .. }
            | Self::Send { buffer, .. }
            | Self::Receive { buffer, .. } => vec![buffer],
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
            Self::Send { buffer, to, tag } => {
                comm.send(&[tag], to)?;
                comm.send(buffer.read::<T>(), to)?;
            }
            Self::Receive { mut buffer, from, tag } => receive(comm, buffer.write::<T>(), from, tag)?,
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

/// Receives the oldest message of a rank, which must have this tag.
fn receive<T: Element>(
    comm: &mut Communicator,
    buffer: &mut [T],
    from: usize,
    tag: u64,
) -> Result<(), Failure> {
    let mut sent = [0];
    comm.recv(&mut sent, from)?;
    if sent == [tag] {
        return Ok(comm.recv(buffer, from)?);
    }
    let why = format!(
        "rank {} receives tag {tag} from rank {from}, whose oldest message has tag {}: messages between two ranks \
         are received in the order of their sends, whatever their tags",
        comm.rank(),
        sent[0]
    );
    comm.abort(&why);
    Err(Failure::unsupported(why))
}
