//! Measurement: all ranks make the same calls, each rank times them, and the time of the slowest rank counts.

use std::time::Duration;

use dist_collectives::tuning::Operation as Collective;
use dist_collectives::{Buffer, Communicator, Complex, Element, ReduceOp, bf16, f16};
use dist_transport::Runtime;

use super::exact::{self, Exact};
use super::line::{MeasuredLine, Times};
use super::operation::Operation;
use super::start::Starter;
use super::{BenchPlan, BenchReport, BufferKind, sample};
use crate::Error;
use crate::operation::Messages;
use crate::outcome::Outcome;
use crate::progress::Progress;

/// Measures all points of a plan with elements of its type.
pub(super) fn points(
    plan: &BenchPlan,
    mut comm: Communicator,
    report: &mut BenchReport,
) -> Result<Outcome, Error> {
    use dist_collectives::DType;
    let mut scoped;
    let comm: &mut Communicator = match plan.algorithm {
        Some(algorithm) => {
            scoped = comm.with_algorithm(algorithm);
            &mut scoped
        }
        None => &mut comm,
    };
    let starter = Starter::new(comm, plan.start)?;
    let mut bench = Bench { plan, comm, starter };
    match plan.dtype {
        DType::F32 => bench.points::<f32>(report),
        DType::F64 => bench.points::<f64>(report),
        DType::F16 => bench.points::<f16>(report),
        DType::Bf16 => bench.points::<bf16>(report),
        DType::I8 => bench.points::<i8>(report),
        DType::I32 => bench.points::<i32>(report),
        DType::I64 => bench.points::<i64>(report),
        DType::U8 => bench.points::<u8>(report),
        DType::U32 => bench.points::<u32>(report),
        DType::U64 => bench.points::<u64>(report),
        DType::ComplexF32 => bench.points::<Complex<f32>>(report),
        DType::ComplexF64 => bench.points::<Complex<f64>>(report),
        dtype => Err(Error::Usage(format!("{dtype} cannot be measured"))),
    }
}

struct Bench<'a> {
    plan: &'a BenchPlan,
    comm: &'a mut Communicator,
    starter: Starter,
}

/// The buffers of one point, and the root of the next call.
struct Buffers<T: Element> {
    input: Buffer<T>,
    output: Vec<T>,
    next_root: usize,
}

/// Minimum size at which `--touch` rewrites the buffer.
const TOUCH_BYTES_MIN: usize = 64 << 10;

impl Bench<'_> {
    fn points<T: Exact>(&mut self, report: &mut BenchReport) -> Result<Outcome, Error> {
        let mut outcome = Outcome::Success;
        // Only rank 0 reports progress.
        let progress = (self.comm.rank() == 0).then(Progress::start).transpose()?;
        for &len in &self.plan.lengths {
            if let Some(progress) = &progress {
                let (operation, bytes) = (self.plan.operation, len * size_of::<T>());
                progress.doing(format!("measuring {operation} of {bytes} bytes"));
            }
            let output = self.plan.operation.output_len(len, self.comm.world_size());
            let input = match self.plan.buffers {
                BufferKind::Shared => self.comm.alloc(len)?,
                BufferKind::Private | BufferKind::Borrowed => Buffer::from(zeros::<T>(len)?),
            };
            let mut buffers = Buffers { input, output: zeros(output)?, next_root: 0 };
            if self.plan.check && !self.check(&mut buffers, report)? {
                outcome = Outcome::Code(1);
                continue;
            }
            let times = self.times(&mut buffers)?;
            report.line(&self.line::<T>(len, times)?)?;
        }
        Ok(outcome)
    }

    fn line<T: Element>(&self, len: usize, times: Vec<f64>) -> Result<MeasuredLine, Error> {
        let BenchPlan { operation, order, check, .. } = *self.plan;
        let (world_size, bytes) = (self.comm.world_size(), len * size_of::<T>());
        let carried = if operation.reduces() { self.plan.op.partial_dtype(T::DTYPE) } else { T::DTYPE };
        let medium = self.plan.medium.name();
        let transport = match order {
            dist_collectives::ReductionOrder::Any if operation.reduces() => format!("{medium}-any"),
            _ => medium.to_owned(),
        };
        let kind = self.plan.buffers;
        let transport = match kind {
            BufferKind::Private => transport,
            BufferKind::Shared | BufferKind::Borrowed => format!("{transport}-{}", kind.name()),
        };
        Ok(MeasuredLine {
            peer: "dist",
            transport,
            op: operation.name(),
            ranks: world_size,
            bytes,
            times: Times::of(times, bytes, operation.bus_factor(world_size)),
            dtype: T::DTYPE.name(),
            algorithm: operation.algorithm(self.comm, len * carried.size(), kind.ownership())?,
            order: order.name(),
            buffers: kind.name(),
            start: self.plan.start.name(),
            touch: self.touches(bytes),
            checked: check && !operation.is_barrier(),
        })
    }

    fn touches(&self, bytes: usize) -> bool {
        self.plan.touch && bytes >= TOUCH_BYTES_MIN
    }

    /// Returns the time of one call in microseconds for each sample, on the slowest rank.
    fn times<T: Exact>(&mut self, buffers: &mut Buffers<T>) -> Result<Vec<f64>, Error> {
        buffers.input.fill(T::whole(0));
        buffers.output.fill(T::whole(0));
        let runtime = self.comm.runtime().clone();
        let mut one = 0.0;
        for _ in 0..WARMUPS {
            let start = self.starter.begin(self.comm)?;
            self.call(buffers)?;
            one = us(runtime.now().saturating_sub(start));
        }
        let one = self.agree(&[one], ReduceOp::Max)?[0];
        let calls = sample::calls_per_sample(one);
        let mut times = Vec::new();
        for _ in 0..sample::samples(one, calls, self.plan.samples) {
            let spent = us(self.spent(buffers, calls, &runtime)?);
            times.push(spent / f64::from(calls) / f64::from(self.plan.operation.trips()));
        }
        Ok(self.agree(&times, ReduceOp::Max)?.to_vec())
    }

    /// Reduces values over all ranks, in a buffer that every measured algorithm supports.
    fn agree<N: Element>(&mut self, values: &[N], op: ReduceOp) -> Result<Buffer<N>, Error> {
        let mut agreed = self.comm.alloc(values.len())?;
        agreed.copy_from_slice(values);
        self.comm.all_reduce_buffer(&mut agreed, op)?;
        Ok(agreed)
    }

    /// Returns the time of this many calls: back to back, or one by one if buffers are touched.
    fn spent<T: Exact>(
        &mut self,
        buffers: &mut Buffers<T>,
        calls: u32,
        runtime: &Runtime,
    ) -> Result<Duration, Error> {
        if !self.touches(size_of_val(&*buffers.input)) {
            let start = self.starter.begin(self.comm)?;
            for _ in 0..calls {
                self.call(buffers)?;
            }
            return Ok(runtime.now().saturating_sub(start));
        }
        let mut spent = Duration::ZERO;
        for _ in 0..calls {
            // Without the barrier, a rank that has finished would rewrite its buffer while another rank on
            // the same core is timed.
            self.comm.barrier()?;
            if self.takes_part() {
                buffers.input.fill(T::whole(1));
            }
            let start = self.starter.begin(self.comm)?;
            self.call(buffers)?;
            spent += runtime.now().saturating_sub(start);
        }
        Ok(spent)
    }

    /// Returns `true` if this rank takes part in a call.
    fn takes_part(&self) -> bool {
        self.comm.rank() < 2 || !self.plan.operation.between_two()
    }

    /// Makes one call of the operation.
    fn call<T: Element>(&mut self, buffers: &mut Buffers<T>) -> Result<(), Error> {
        let Buffers { input, output, next_root } = buffers;
        let root = *next_root;
        *next_root = if root + 1 == self.comm.world_size() { 0 } else { root + 1 };
        let (comm, op) = (&mut *self.comm, self.plan.op);
        let collective = match self.plan.operation {
            Operation::Collective(collective) => collective,
            Operation::Messages(messages) => return exchange(messages, comm, input, output),
        };
        match collective {
            Collective::AllReduce if self.plan.buffers == BufferKind::Borrowed => {
                comm.all_reduce(input, op)?
            }
            Collective::AllReduce => comm.all_reduce_buffer(input, op)?,
            Collective::ReduceScatter => comm.reduce_scatter_buffer(input, output, op)?,
            Collective::AllGather => comm.all_gather_buffer(input, output)?,
            Collective::Broadcast => comm.broadcast(input, root)?,
            Collective::Reduce => comm.reduce(input, op, root)?,
            Collective::Gather => comm.gather(input, output, root)?,
            Collective::Scatter => comm.scatter(input, output, root)?,
            Collective::AllToAll => comm.all_to_all_buffer(input, output)?,
            Collective::Scan => comm.scan(input, op)?,
            Collective::Barrier => comm.barrier()?,
            _ => unreachable!("the arguments name no other operation"),
        }
        Ok(())
    }

    /// Checks the results of the operation on every rank, with every root.
    fn check<T: Exact>(&mut self, buffers: &mut Buffers<T>, report: &BenchReport) -> Result<bool, Error> {
        let (rank, world_size) = (self.comm.rank(), self.comm.world_size());
        let roots = if self.plan.operation.is_rooted() { world_size } else { 1 };
        let mut right = true;
        for root in 0..roots {
            for (index, element) in buffers.input.iter_mut().enumerate() {
                *element = T::whole(exact::input(rank, index));
            }
            buffers.output.fill(T::whole(0));
            if self.plan.operation == Operation::Messages(Messages::PingPong) && rank == 0 {
                // The clear makes sure that rank 0 checks the bytes that come back.
                self.comm.send(&buffers.input, 1)?;
                buffers.input.fill(T::whole(0));
                self.comm.recv(&mut buffers.input, 1)?;
            } else {
                self.call(buffers)?;
            }
            if let Some(exact::Wrong { index, got, expected }) = self.wrong(buffers, root) {
                let bytes = size_of_val(&*buffers.input);
                let point = format!("{} of {bytes} bytes, rank {rank}", self.plan.operation);
                report.wrong(&format!("{point}: element {index} is {got:?}, not {expected:?}"));
                right = false;
            }
        }
        buffers.next_root = 0;
        Ok(self.agree(&[i32::from(right)], ReduceOp::Min)?[0] == 1)
    }

    /// Returns the first wrong element of this rank's result.
    fn wrong<T: Exact>(&self, buffers: &Buffers<T>, root: usize) -> Option<exact::Wrong<T>> {
        let (rank, world_size) = (self.comm.rank(), self.comm.world_size());
        let Buffers { input, output, .. } = buffers;
        let reduced = |index| exact::reduced(self.plan.op, world_size, index);
        let of = |rank: usize| move |index| T::whole(exact::input(rank, index));
        let collective = match self.plan.operation {
            Operation::Collective(collective) => collective,
            Operation::Messages(_) if rank >= 2 => return None,
            Operation::Messages(Messages::SendRecv) => return exact::compare(output, of(1 - rank)),
            Operation::Messages(_) => return exact::compare(input, of(0)),
        };
        match collective {
            Collective::AllReduce => exact::compare(input, reduced),
            Collective::Reduce if rank == root => exact::compare(input, reduced),
            Collective::ReduceScatter => exact::compare(output, |index| reduced(rank * output.len() + index)),
            Collective::Scan => exact::compare(input, |index| exact::reduced(self.plan.op, rank + 1, index)),
            Collective::AllGather => {
                exact::compare(output, |index| of(index / input.len())(index % input.len()))
            }
            Collective::Gather if rank == root => {
                exact::compare(output, |index| of(index / input.len())(index % input.len()))
            }
            Collective::Scatter => exact::compare(output, |index| of(root)(rank * output.len() + index)),
            Collective::AllToAll => {
                let part = output.len() / world_size;
                exact::compare(output, |index| of(index / part)(rank * part + index % part))
            }
            Collective::Broadcast => exact::compare(input, of(root)),
            Collective::Reduce | Collective::Gather | Collective::Barrier => None,
            _ => unreachable!("the arguments name no other operation"),
        }
    }
}

/// Exchanges the messages of one call between ranks 0 and 1; other ranks do nothing.
fn exchange<T: Element>(
    messages: Messages,
    comm: &mut Communicator,
    input: &mut [T],
    output: &mut [T],
) -> Result<(), Error> {
    match (messages, comm.rank()) {
        (_, 2..) => {}
        (Messages::SendRecv, rank) => comm.send_recv(input, 1 - rank, output, 1 - rank)?,
        (Messages::PingPong, 0) => {
            comm.send(input, 1)?;
            comm.recv(input, 1)?;
        }
        (Messages::PingPong, _) => {
            comm.recv(input, 0)?;
            comm.send(input, 0)?;
        }
        (Messages::Stream, rank) => {
            for _ in 0..messages.trips() {
                if rank == 0 { comm.send(input, 1)? } else { comm.recv(input, 0)? }
            }
        }
    }
    Ok(())
}

/// Allocates a vector and writes zeros to all of it.
fn zeros<T: Exact>(len: usize) -> Result<Vec<T>, Error> {
    let mut zeros = Vec::new();
    let failed = |source| Error::Memory { bytes: len * size_of::<T>(), source };
    zeros.try_reserve_exact(len).map_err(failed)?;
    zeros.resize(len, T::whole(0));
    Ok(zeros)
}

/// Calls before the first sample. The time of the last one determines the number of calls in a sample.
const WARMUPS: usize = 3;

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
