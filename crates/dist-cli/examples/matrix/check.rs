//! Runs cases: inputs, the call, and the comparison with the oracle.

use std::any::Any;
use std::collections::HashMap;

use dist_collectives::error::ReduceKind;
use dist_collectives::{Communicator, Complex, DType, Element, ReduceOp, ReductionOrder};
use dist_groups::{CommunicatorExt, Mesh};
use dist_testkit::oracle::{self, Number, Reduction};
use half::{bf16, f16};
use num_traits::FromPrimitive;

use crate::BoxError;
use crate::cases::{Action, Case};

/// Period of the contents of long buffers, so that the oracle's work stays small. It is a prime number, so
/// that no two chunk boundaries have the same offset in the pattern.
const PERIOD: usize = 4099;
const PRIME: usize = 1009;
const LARGE_BYTES: usize = 1 << 20;

/// An element type of the matrix.
trait Probe: Element + Number + FromPrimitive {}
impl<T: Element + Number + FromPrimitive> Probe for T {}

/// Runs the cases of one world. The oracle's results are cached.
pub(crate) struct Checker {
    world_size: usize,
    known: HashMap<Question, Box<dyn Any>>,
}

/// The key of an oracle result: type, operation, kind of input, contributing ranks, length.
type Question = (DType, ReduceKind, Inputs, Vec<usize>, usize);

/// The result of a rank and the expected result.
type Answer<T> = (Vec<T>, Vec<T>);

/// The inputs of the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Inputs {
    /// Values whose reduction depends on the order.
    Rough,
    /// 1 and 2, whose reduction is exact in any order.
    Exact,
}

impl Inputs {
    fn of(case: Case) -> Self {
        let in_order = case.order == ReductionOrder::Canonical
            || !matches!(case.op, ReduceOp::Sum | ReduceOp::Mean | ReduceOp::Product);
        if in_order || !case.action.reduces() { Self::Rough } else { Self::Exact }
    }

    /// Returns the input of one rank without repetition.
    fn sample<T: Probe>(self, rank: usize, len: usize) -> Vec<T> {
        match self {
            Self::Rough => oracle::sample(1, rank, len),
            Self::Exact => oracle::sample::<u8>(1, rank, len)
                .into_iter()
                .map(|noise| T::from_u8(1 + noise % 2).expect("every type has a 1 and a 2"))
                .collect(),
        }
    }

    /// Returns the input of a rank, repeated to its length.
    fn long<T: Probe>(self, rank: usize, len: usize) -> Vec<T> {
        repeated(&self.sample(rank, len.min(PERIOD)), len)
    }
}

fn repeated<T: Copy>(pattern: &[T], len: usize) -> Vec<T> {
    pattern.iter().copied().cycle().take(len).collect()
}

impl Checker {
    pub(crate) fn new(world_size: usize) -> Self {
        Self { world_size, known: HashMap::new() }
    }

    /// Returns the lengths of a case: elements of one rank's buffer, or of its part.
    pub(crate) fn lengths(&self, case: Case) -> Vec<usize> {
        let n = self.world_size;
        let parts = match case.action {
            Action::AllReduce | Action::Reduce | Action::Broadcast | Action::Message => 1,
            _ => n,
        };
        let large = LARGE_BYTES / case.dtype.size() / parts;
        let mut lengths = vec![0, 1, n - 1, n, n + 1, PRIME, large];
        lengths.sort_unstable();
        lengths.dedup();
        if case.action.is_barrier() { vec![0] } else { lengths }
    }

    /// Runs every call of a case. Returns `true` if all results on all ranks are right.
    pub(crate) fn check(&mut self, comm: &mut Communicator, case: Case) -> Result<bool, BoxError> {
        let held = match case.dtype {
            DType::F32 => self.calls::<f32>(comm, case),
            DType::F64 => self.calls::<f64>(comm, case),
            DType::F16 => self.calls::<f16>(comm, case),
            DType::Bf16 => self.calls::<bf16>(comm, case),
            DType::I8 => self.calls::<i8>(comm, case),
            DType::I32 => self.calls::<i32>(comm, case),
            DType::I64 => self.calls::<i64>(comm, case),
            DType::U8 => self.calls::<u8>(comm, case),
            DType::U32 => self.calls::<u32>(comm, case),
            DType::U64 => self.calls::<u64>(comm, case),
            DType::ComplexF32 => self.calls::<Complex<f32>>(comm, case),
            DType::ComplexF64 => self.calls::<Complex<f64>>(comm, case),
            other => Err(format!("the matrix does not support {other}").into()),
        }?;
        let mut agreed = [u8::from(held)];
        comm.all_reduce(&mut agreed, ReduceOp::Min)?;
        Ok(agreed[0] == 1)
    }

    fn calls<T: Probe>(&mut self, comm: &mut Communicator, case: Case) -> Result<bool, BoxError> {
        let rank = comm.rank();
        let mut held = true;
        for (turn, len) in self.lengths(case).into_iter().enumerate() {
            let root = turn % self.world_size;
            let mut scoped = comm.with_order(case.order);
            let Some((got, expected)) = (match case.algorithm {
                Some(algorithm) => self.call::<T>(&mut scoped.with_algorithm(algorithm), case, len, root)?,
                None => self.call::<T>(&mut scoped, case, len, root)?,
            }) else {
                continue;
            };
            let wrong = got.iter().zip(&expected).position(|(got, expected)| !got.same(*expected));
            if let Some(index) = wrong {
                let (got, expected) = (got[index], expected[index]);
                let place = format!("{case}, {len} elements, rank {rank} of {}", self.world_size);
                eprintln!("{place}: element {index} is {got:?}, not {expected:?}");
                held = false;
            }
            assert_eq!(got.len(), expected.len(), "{case}: the oracle's result has another length");
        }
        Ok(held)
    }

    /// Makes one call. Returns `None` on ranks without a result.
    fn call<T: Probe>(
        &mut self,
        comm: &mut Communicator,
        case: Case,
        len: usize,
        root: usize,
    ) -> Result<Option<Answer<T>>, BoxError> {
        let (rank, n) = (comm.rank(), self.world_size);
        let inputs = Inputs::of(case);
        let everyone: Vec<usize> = (0..n).collect();
        let mut own = inputs.long::<T>(rank, len);
        Ok(Some(match case.action {
            Action::AllReduce => {
                comm.all_reduce(&mut own, case.op)?;
                (own, self.reduced(case, &everyone, len))
            }
            Action::StartAllReduce => {
                let pending = comm.start_all_reduce(own, case.op);
                (pending.wait()?.into_vec(), self.reduced(case, &everyone, len))
            }
            Action::SubgroupAllReduce | Action::SplitAllReduce | Action::MeshAllReduce => {
                let Some((mut group, members)) = group(comm, case.action, root)? else { return Ok(None) };
                group.all_reduce(&mut own, case.op)?;
                (own, self.reduced(case, &members, len))
            }
            Action::Reduce => {
                comm.reduce(&mut own, case.op, root)?;
                if rank != root {
                    return Ok(None);
                }
                (own, self.reduced(case, &everyone, len))
            }
            Action::ReduceScatter => {
                let mut output = inputs.long::<T>(n, len);
                comm.reduce_scatter(&inputs.long::<T>(rank, len * n), &mut output, case.op)?;
                let all = self.reduced(case, &everyone, len * n);
                (output, all[rank * len..(rank + 1) * len].to_vec())
            }
            Action::ReduceScatterV => {
                let counts = uneven(len, n);
                let mut output = inputs.long::<T>(n, counts[rank]);
                let input = inputs.long::<T>(rank, counts.iter().sum());
                comm.reduce_scatter_v(&input, &counts, &mut output, case.op)?;
                (output, part(&self.reduced(case, &everyone, input.len()), &counts, rank))
            }
            Action::Scan => {
                comm.scan(&mut own, case.op)?;
                (own, self.reduced(case, &everyone[..=rank], len))
            }
            Action::ExclusiveScan => {
                comm.exclusive_scan(&mut own, case.op)?;
                if rank == 0 {
                    return Ok(None);
                }
                (own, self.reduced(case, &everyone[..rank], len))
            }
            action => return self.moved(comm, action, len, root).map(Some),
        }))
    }

    /// Makes one call of an action that does not reduce.
    fn moved<T: Probe>(
        &self,
        comm: &mut Communicator,
        action: Action,
        len: usize,
        root: usize,
    ) -> Result<Answer<T>, BoxError> {
        let (rank, n) = (comm.rank(), self.world_size);
        let inputs = |rank, len| Inputs::Rough.long::<T>(rank, len);
        let all = |len| (0..n).flat_map(|rank| inputs(rank, len)).collect::<Vec<_>>();
        let at_root = |elements: Vec<T>| if rank == root { elements } else { Vec::new() };
        let (counts, mut own) = (uneven(len, n), inputs(rank, len));
        Ok(match action {
            Action::AllGather => {
                let mut output = inputs(n, len * n);
                comm.all_gather(&own, &mut output)?;
                (output, all(len))
            }
            Action::AllGatherV => {
                let mut output = inputs(n, counts.iter().sum());
                comm.all_gather_v(&inputs(rank, counts[rank]), &counts, &mut output)?;
                (output, (0..n).flat_map(|rank| inputs(rank, counts[rank])).collect())
            }
            Action::Broadcast => {
                comm.broadcast(&mut own, root)?;
                (own, inputs(root, len))
            }
            Action::Gather => {
                let mut output = at_root(inputs(n, len * n));
                comm.gather(&own, &mut output, root)?;
                (output, at_root(all(len)))
            }
            Action::Scatter => {
                comm.scatter(&at_root(all(len)), &mut own, root)?;
                (own, inputs(rank, len))
            }
            Action::AllToAll => {
                let mut output = inputs(n, len * n);
                comm.all_to_all(&inputs(rank, len * n), &mut output)?;
                let parts = (0..n).flat_map(|sender| inputs(sender, len * n)[rank * len..][..len].to_vec());
                (output, parts.collect())
            }
            Action::AllToAllV => {
                let total = counts.iter().sum();
                let mut output = inputs(n, counts[rank] * n);
                comm.all_to_all_v(&inputs(rank, total), &counts, &mut output, &vec![counts[rank]; n])?;
                (output, (0..n).flat_map(|sender| part(&inputs(sender, total), &counts, rank)).collect())
            }
            Action::Message => {
                let (left, right) = ((rank + n - 1) % n, (rank + 1) % n);
                let mut received = inputs(n, len);
                comm.send_recv(&own, right, &mut received, left)?;
                (received, inputs(left, len))
            }
            Action::MonitoredBarrier => {
                comm.monitored_barrier()?;
                (Vec::new(), Vec::new())
            }
            _ => {
                comm.barrier()?;
                (Vec::new(), Vec::new())
            }
        })
    }

    /// Returns the oracle's result of a reduction over these ranks.
    fn reduced<T: Probe>(&mut self, case: Case, members: &[usize], len: usize) -> Vec<T> {
        let (inputs, period) = (Inputs::of(case), len.min(PERIOD));
        let reduction = Reduction::parse(case.op.name()).expect("the oracle supports every operation");
        let key = (T::DTYPE, case.op.kind(), inputs, members.to_vec(), period);
        let pattern = self.known.entry(key).or_insert_with(|| {
            let contributions: Vec<_> =
                members.iter().map(|&rank| inputs.sample::<T>(rank, period)).collect();
            Box::new(oracle::all_reduce(&contributions, reduction))
        });
        repeated(pattern.downcast_ref::<Vec<T>>().expect("the key has the type"), len)
    }
}

/// Returns the group of this rank for an action, if it is in one, and the members of the group.
fn group(
    comm: &mut Communicator,
    action: Action,
    turn: usize,
) -> Result<Option<(Communicator, Vec<usize>)>, BoxError> {
    let (rank, n) = (comm.rank(), comm.world_size());
    Ok(match action {
        Action::SplitAllReduce => {
            // If there are three or more ranks, the last is in no group.
            let colour = |rank: usize| (n < 3 || rank + 1 < n).then_some(u32::from(rank % 2 == 1));
            let group = comm.split(colour(rank), -i64::try_from(rank)?)?;
            let alike = (0..n).rev().filter(|&other| colour(other) == colour(rank));
            group.map(|group| (group.into_communicator(), alike.collect()))
        }
        Action::MeshAllReduce => {
            let rows = (2..n).find(|rows| n.is_multiple_of(*rows)).unwrap_or(1);
            let width = n / rows;
            let mut mesh = Mesh::new(comm.fork()?, [("row", rows), ("column", width)])?;
            // Ranks of a row are consecutive. The distance between ranks of a column is the length of a row.
            let (axis, members): (_, Vec<_>) = if turn.is_multiple_of(2) {
                ("column", (rank / width * width..).take(width).collect())
            } else {
                ("row", (rank % width..n).step_by(width).collect())
            };
            Some((mesh.take(axis)?.into_communicator(), members))
        }
        _ => {
            let members: Vec<_> = (0..n).step_by(2).collect();
            comm.subgroup(&members)?.map(|group| (group, members))
        }
    })
}

/// Returns the sizes of unequal parts, some of which are empty.
fn uneven(len: usize, world_size: usize) -> Vec<usize> {
    (0..world_size).map(|rank| len * ((rank + 1) % 3)).collect()
}

/// Returns the part of one rank.
fn part<T: Copy>(elements: &[T], counts: &[usize], rank: usize) -> Vec<T> {
    let start: usize = counts[..rank].iter().sum();
    elements[start..start + counts[rank]].to_vec()
}
