//! [`Call`]: one call of a communicator on the memory of tensors.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

use dist_collectives::{Communicator, Complex, DType, Element, ReduceOp, bf16, f16};
use pyo3::prelude::*;

use crate::error::Failure;
use crate::memory::TensorMemory;
use crate::messages::{AnySource, RECEIVER, SENDER};

/// A call of a communicator, and the tensors on which it works.
#[derive(Debug)]
pub(crate) struct Call {
    action: Action,
    /// The type of the elements of all tensors.
    dtype: DType,
    /// One tensor if the call works in place, the input and the output if it does not, and none for barriers.
    tensors: Vec<TensorMemory>,
}

/// The operation of a call, with its arguments.
#[derive(Debug)]
pub(crate) enum Action {
    /// Reduces one tensor, or several as one operation.
    AllReduce {
        op: ReduceOp,
    },
    Broadcast {
        root: usize,
    },
    Reduce {
        op: ReduceOp,
        root: usize,
    },
    AllGather {
        counts: Option<Vec<usize>>,
    },
    ReduceScatter {
        op: ReduceOp,
        counts: Option<Vec<usize>>,
    },
    AllToAll {
        counts: Option<[Vec<usize>; 2]>,
    },
    Gather {
        root: usize,
    },
    Scatter {
        root: usize,
    },
    Barrier,
    /// A barrier whose error names all absent ranks, or only the first.
    MonitoredBarrier {
        names_all: bool,
    },
    Send {
        tag: u32,
    },
    Receive {
        tag: u32,
    },
    ReceiveAny {
        tag: u32,
        sources: AnySource,
    },
}

impl Action {
    /// Returns the cell of the sender that a receive from any source will have found.
    pub(crate) fn sender(&self) -> Option<Arc<OnceLock<usize>>> {
        match self {
            Self::ReceiveAny { sources, .. } => Some(sources.sender()),
            _ => None,
        }
    }
}

impl Call {
    /// Returns the call, or refuses elements of another size and tensors that share memory.
    pub(crate) fn new(action: Action, dtype: &str, tensors: Vec<TensorMemory>) -> Result<Self, Failure> {
        let Some(dtype) = DType::parse(dtype) else {
            return Err(Failure::arguments(format!("{dtype} is no type of elements")));
        };
        if tensors.iter().any(|tensor| tensor.element_size() != dtype.size()) {
            return Err(Failure::arguments(format!(
                "the elements of the tensors do not have the size of {dtype}"
            )));
        }
        if matches!(action, Action::AllReduce { .. }) && tensors.len() > 1 {
            let mut tensors: Vec<_> = tensors.iter().collect();
            tensors.sort_unstable_by_key(|tensor| tensor.range().start);
            if tensors.windows(2).any(|pair| pair[0].overlaps(pair[1])) {
                return Err(Failure::arguments(
                    "two tensors of one call share memory: give each of them once",
                ));
            }
        }
        Ok(Self { action, dtype, tensors })
    }

    /// Prepares the call for being made after the function that starts it has returned.
    pub(crate) fn hold_storages(&mut self, py: Python<'_>) -> PyResult<()> {
        self.tensors.iter_mut().try_for_each(|tensor| tensor.hold_storage(py))
    }

    /// Makes the call.
    pub(crate) fn run(self, comm: &mut Communicator) -> Result<(), Failure> {
        match self.dtype {
            DType::F32 => self.run_on::<f32>(comm),
            DType::F64 => self.run_on::<f64>(comm),
            DType::F16 => self.run_on::<f16>(comm),
            DType::Bf16 => self.run_on::<bf16>(comm),
            DType::I8 => self.run_on::<i8>(comm),
            DType::I32 => self.run_on::<i32>(comm),
            DType::I64 => self.run_on::<i64>(comm),
            DType::U8 => self.run_on::<u8>(comm),
            DType::U32 => self.run_on::<u32>(comm),
            DType::U64 => self.run_on::<u64>(comm),
            DType::ComplexF32 => self.run_on::<Complex<f32>>(comm),
            DType::ComplexF64 => self.run_on::<Complex<f64>>(comm),
            other => Err(Failure::unsupported(format!("elements of type {other} are not supported"))),
        }
    }

    fn run_on<T: Element>(self, comm: &mut Communicator) -> Result<(), Failure> {
        let mut tensors = self.tensors;
        match self.action {
            Action::AllReduce { op } => all_reduce::<T>(comm, &mut tensors, op)?,
            Action::Broadcast { root } => comm.broadcast::<T>(only(&mut tensors)?.write(), root)?,
            Action::Reduce { op, root } => comm.reduce::<T>(only(&mut tensors)?.write(), op, root)?,
            Action::AllGather { counts } => all_gather::<T>(comm, &mut tensors, counts)?,
            Action::ReduceScatter { op, counts } => {
                let (input, output) = separate::<T>(&mut tensors)?;
                match counts {
                    None => comm.reduce_scatter(&input, output, op)?,
                    Some(counts) => comm.reduce_scatter_v(&input, &counts, output, op)?,
                }
            }
            Action::AllToAll { counts } => {
                let (input, output) = separate::<T>(&mut tensors)?;
                match counts {
                    None => comm.all_to_all(&input, output)?,
                    Some([sent, received]) => comm.all_to_all_v(&input, &sent, output, &received)?,
                }
            }
            Action::Gather { root } => {
                let (input, output) = separate::<T>(&mut tensors)?;
                comm.gather(&input, output, root)?;
            }
            Action::Scatter { root } => {
                let (input, output) = separate::<T>(&mut tensors)?;
                comm.scatter(&input, output, root)?;
            }
            Action::Barrier => comm.barrier()?,
            Action::MonitoredBarrier { names_all } => {
                let result = comm.monitored_barrier();
                result.map_err(|error| Failure::of_monitored_barrier(error, comm.rank(), names_all))?;
            }
            Action::Send { tag } => comm.with_tag(tag).send(only(&mut tensors)?.read::<T>(), RECEIVER)?,
            Action::Receive { tag } => comm.with_tag(tag).recv(only(&mut tensors)?.write::<T>(), SENDER)?,
            Action::ReceiveAny { tag, sources } => {
                sources.receive(comm, only(&mut tensors)?.write::<T>(), tag)?
            }
        }
        Ok(())
    }
}

fn all_reduce<T: Element>(
    comm: &mut Communicator,
    tensors: &mut [TensorMemory],
    op: ReduceOp,
) -> Result<(), Failure> {
    if let [tensor] = tensors {
        return Ok(comm.all_reduce::<T>(tensor.write(), op)?);
    }
    let mut buffers: Vec<&mut [T]> = tensors.iter_mut().map(TensorMemory::write).collect();
    Ok(comm.all_reduce_coalesced(&mut buffers, op)?)
}

/// Gathers. FSDP passes an input that already is this rank's part of the output.
fn all_gather<T: Element>(
    comm: &mut Communicator,
    tensors: &mut [TensorMemory],
    counts: Option<Vec<usize>>,
) -> Result<(), Failure> {
    if let ([input, output], None) = (&mut *tensors, &counts)
        && input.is_part(comm.rank(), comm.world_size(), output)
    {
        return Ok(comm.all_gather_in_place::<T>(output.write())?);
    }
    let (input, output) = separate::<T>(tensors)?;
    match counts {
        None => comm.all_gather(&input, output)?,
        Some(counts) => comm.all_gather_v(&input, &counts, output)?,
    }
    Ok(())
}

/// Returns the only tensor of a call.
fn only(tensors: &mut [TensorMemory]) -> Result<&mut TensorMemory, Failure> {
    match tensors {
        [tensor] => Ok(tensor),
        tensors => Err(wrong_count(tensors.len())),
    }
}

/// Returns the elements of the input and of the output of a call. If they share memory, the input is copied.
fn separate<T: Element>(tensors: &mut [TensorMemory]) -> Result<(Cow<'_, [T]>, &mut [T]), Failure> {
    let [input, output] = tensors else { return Err(wrong_count(tensors.len())) };
    let elements = input.read();
    let input = if input.overlaps(output) { Cow::Owned(elements.to_vec()) } else { Cow::Borrowed(elements) };
    Ok((input, output.write()))
}

fn wrong_count(tensors: usize) -> Failure {
    Failure::arguments(format!("the call does not work on {tensors} tensors"))
}
