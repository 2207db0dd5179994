//! One group's collectives, done by whoever holds the engine: the caller's thread, or the worker's.
//!
//! A collective is always the same: check the arguments, choose the algorithm, tell the transport which call it
//! is, run the schedule.

use dist_algos::{Memory, Partition, RunError, Scratch, Step};
use dist_transport::{Combine, Deadline, Incoming, Outgoing, Rank, Sink, Transport};

use crate::settings::Settings;
use crate::{Algorithm, Call, Element, Error, Operation, ReduceOp, Result, combine, divide_by_count};

/// How one call is done: with which settings, and until when.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manner {
    pub(crate) settings: Settings,
    pub(crate) deadline: Deadline,
}

#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) transport: Box<dyn Transport>,
    /// Collectives so far.
    sequence: u64,
    /// Messages so far, to and from each rank.
    messages: Vec<Messages>,
    scratch: Scratch,
    /// A copy of an input that must stay as it is; words, so that every element is aligned.
    copy: Vec<u64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Messages {
    sent: u64,
    received: u64,
}

impl Engine {
    pub(crate) fn new(transport: Box<dyn Transport>) -> Self {
        Self { transport, sequence: 0, messages: Vec::new(), scratch: Scratch::new(), copy: Vec::new() }
    }

    pub(crate) fn rank(&self) -> Rank {
        self.transport.rank()
    }

    fn world_size(&self) -> usize {
        self.rank().world_size()
    }

    pub(crate) fn manner(&self, settings: &Settings) -> Manner {
        Manner { settings: *settings, deadline: self.transport.runtime().deadline(settings.timeout) }
    }

    pub(crate) fn all_reduce<T: Element>(
        &mut self,
        buffer: &mut [T],
        op: ReduceOp,
        manner: Manner,
    ) -> Result<()> {
        check_op::<T>(op)?;
        let world_size = self.world_size();
        let algorithm = manner.settings.all_reduce(world_size, size_of_val(buffer))?;
        let call = self.begin(self.reduction::<T>(algorithm, buffer.len(), op, manner));
        let partition = partition::<T>(buffer.len(), algorithm.chunks(world_size));
        let phases = algorithm.phases(self.rank());
        let combine = &mut combine_bytes::<T>(op);
        self.run(&call, phases.reduce, buffer, partition, combine, manner.deadline)?;
        if op == ReduceOp::Mean {
            for chunk in phases.owned.indices() {
                let bytes = partition.range(chunk);
                finish_mean(
                    &mut buffer[bytes.start / size_of::<T>()..bytes.end / size_of::<T>()],
                    world_size,
                );
            }
        }
        self.run(&call, phases.gather, buffer, partition, combine, manner.deadline)
    }

    pub(crate) fn reduce_scatter<T: Element>(
        &mut self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
        manner: Manner,
    ) -> Result<()> {
        self.check_parts(Operation::ReduceScatter, input.len(), output.len())?;
        check_op::<T>(op)?;
        let (rank, world_size) = (self.rank(), self.world_size());
        let algorithm = manner.settings.reduce_scatter(world_size, size_of_val(input))?;
        let schedule = algorithm.schedule(rank).expect("settings choose what the world supports");
        let call = self.begin(self.reduction::<T>(algorithm, output.len(), op, manner));
        let partition = partition::<T>(input.len(), world_size);
        let mut copy = std::mem::take(&mut self.copy);
        let buffer = copy_of(&mut copy, input);
        let done = self.run(&call, schedule, buffer, partition, &mut combine_bytes::<T>(op), manner.deadline);
        if done.is_ok() {
            output.copy_from_slice(&buffer[rank.index() * output.len()..][..output.len()]);
            if op == ReduceOp::Mean {
                finish_mean(output, world_size);
            }
        }
        self.copy = copy;
        done
    }

    pub(crate) fn all_gather<T: Element>(
        &mut self,
        input: &[T],
        output: &mut [T],
        manner: Manner,
    ) -> Result<()> {
        self.check_parts(Operation::AllGather, output.len(), input.len())?;
        let (rank, world_size) = (self.rank(), self.world_size());
        let algorithm = manner.settings.all_gather(world_size, size_of_val(output))?;
        let schedule = algorithm.schedule(rank).expect("settings choose what the world supports");
        let call = self.begin(self.collective::<T>(algorithm, input.len()));
        output[rank.index() * input.len()..][..input.len()].copy_from_slice(input);
        let partition = partition::<T>(output.len(), world_size);
        self.run(&call, schedule, output, partition, &mut nothing_to_combine, manner.deadline)
    }

    pub(crate) fn broadcast<T: Element>(
        &mut self,
        buffer: &mut [T],
        root: usize,
        manner: Manner,
    ) -> Result<()> {
        let root_code = self.check_root(Operation::Broadcast, root)?;
        let world_size = self.world_size();
        let algorithm = manner.settings.broadcast(world_size, size_of_val(buffer))?;
        let call = Call { root: Some(root_code), ..self.collective::<T>(algorithm, buffer.len()) };
        let call = self.begin(call);
        let partition = partition::<T>(buffer.len(), algorithm.chunks(world_size));
        let schedule = algorithm.schedule(self.rank(), root);
        self.run(&call, schedule, buffer, partition, &mut nothing_to_combine, manner.deadline)
    }

    pub(crate) fn reduce<T: Element>(
        &mut self,
        buffer: &mut [T],
        op: ReduceOp,
        root: usize,
        manner: Manner,
    ) -> Result<()> {
        let root_code = self.check_root(Operation::Reduce, root)?;
        check_op::<T>(op)?;
        let (rank, world_size) = (self.rank(), self.world_size());
        let algorithm = manner.settings.reduce(world_size, size_of_val(buffer))?;
        let call = Call { root: Some(root_code), ..self.reduction::<T>(algorithm, buffer.len(), op, manner) };
        let call = self.begin(call);
        let partition = partition::<T>(buffer.len(), algorithm.chunks(world_size));
        let schedule = algorithm.schedule(rank, root);
        self.run(&call, schedule, buffer, partition, &mut combine_bytes::<T>(op), manner.deadline)?;
        if op == ReduceOp::Mean && rank.index() == root {
            finish_mean(buffer, world_size);
        }
        Ok(())
    }

    pub(crate) fn barrier(&mut self, manner: Manner) -> Result<()> {
        let algorithm = manner.settings.barrier(self.world_size())?;
        let call = self.begin(Call { dtype: None, ..self.collective::<u8>(algorithm, 0) });
        let schedule = algorithm.schedule(self.rank());
        self.run::<u8>(
            &call,
            schedule,
            &mut [],
            partition::<u8>(0, 1),
            &mut nothing_to_combine,
            manner.deadline,
        )
    }

    pub(crate) fn send<T: Element>(&mut self, elements: &[T], to: usize, manner: Manner) -> Result<()> {
        self.check_rank(to)?;
        let sequence = next(&mut self.messages_with(to).sent);
        let call = self.begin_message::<T>(self.rank().index(), sequence, elements.len());
        let parts = [bytemuck::cast_slice(elements)];
        let sent = self.transport.exchange(Some(Outgoing { to, parts: &parts }), None, manner.deadline);
        sent.map_err(|source| Error::in_call(call, source))
    }

    pub(crate) fn receive<T: Element>(
        &mut self,
        elements: &mut [T],
        from: usize,
        manner: Manner,
    ) -> Result<()> {
        self.check_rank(from)?;
        let sequence = next(&mut self.messages_with(from).received);
        let call = self.begin_message::<T>(from, sequence, elements.len());
        let memory = bytemuck::cast_slice_mut(elements);
        let incoming = Incoming { from, len: memory.len(), sink: Sink::Into(memory) };
        let received = self.transport.exchange(None, Some(incoming), manner.deadline);
        received.map_err(|source| Error::in_call(call, source))
    }

    /// The next collective, as far as all of them have it in common.
    fn collective<T: Element>(&self, algorithm: impl Into<Algorithm>, count: usize) -> Call {
        let algorithm = algorithm.into();
        Call {
            epoch: 0,
            channel: self.transport.channel().get(),
            sequence: self.sequence,
            operation: algorithm.operation(),
            dtype: Some(T::DTYPE),
            count: count as u64,
            op: None,
            root: None,
            algorithm: Some(algorithm),
            order: None,
        }
    }

    fn reduction<T: Element>(
        &self,
        algorithm: impl Into<Algorithm>,
        count: usize,
        op: ReduceOp,
        manner: Manner,
    ) -> Call {
        Call { op: Some(op), order: Some(manner.settings.order), ..self.collective::<T>(algorithm, count) }
    }

    /// From here on the call counts, and every message belongs to it.
    fn begin(&mut self, call: Call) -> Call {
        next(&mut self.sequence);
        self.announce(&call);
        call
    }

    fn announce(&mut self, call: &Call) {
        tracing::trace!(rank = self.rank().index(), channel = call.channel, "{call}");
        self.transport.begin(call.encode());
    }

    /// A message has a number of its own kind: the ranks that it is not between do not count it.
    fn begin_message<T: Element>(&mut self, sender: usize, sequence: u64, count: usize) -> Call {
        let call = Call {
            epoch: 0,
            channel: self.transport.channel().get(),
            sequence,
            operation: Operation::Message,
            dtype: Some(T::DTYPE),
            count: count as u64,
            op: None,
            root: Some(number(sender)),
            algorithm: None,
            order: None,
        };
        self.announce(&call);
        call
    }

    fn messages_with(&mut self, peer: usize) -> &mut Messages {
        let world_size = self.world_size();
        self.messages.resize(world_size, Messages::default());
        &mut self.messages[peer]
    }

    fn run<T: Element>(
        &mut self,
        call: &Call,
        steps: impl IntoIterator<Item = Step>,
        buffer: &mut [T],
        partition: Partition<'_>,
        combine: &mut Combine<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        let memory = Memory::new(bytemuck::cast_slice_mut(buffer), partition);
        dist_algos::run(&mut *self.transport, steps, memory, combine, &mut self.scratch, deadline).map_err(
            |error| match error {
                RunError::Transport { source, .. } => Error::in_call(*call, source),
                RunError::Schedule(source) => {
                    Error::Schedule { call: Box::new(*call), source: Box::new(source) }
                }
                _ => unreachable!("a run fails by its transport or by its schedule"),
            },
        )
    }

    fn check_rank(&self, rank: usize) -> Result<()> {
        let world_size = self.world_size();
        if rank < world_size { Ok(()) } else { Err(Error::RankOutOfRange { rank, world_size }) }
    }

    /// The root as it stands in the call.
    fn check_root(&self, operation: Operation, root: usize) -> Result<u32> {
        let world_size = self.world_size();
        if root < world_size {
            Ok(number(root))
        } else {
            Err(Error::RootOutOfRange { operation, root, world_size })
        }
    }

    fn check_parts(&self, operation: Operation, whole: usize, part: usize) -> Result<()> {
        let world_size = self.world_size();
        if part.checked_mul(world_size) == Some(whole) {
            Ok(())
        } else {
            Err(Error::Parts { operation, whole, part, world_size })
        }
    }
}

fn check_op<T: Element>(op: ReduceOp) -> Result<()> {
    if op == ReduceOp::Mean && !T::DTYPE.is_float() { Err(Error::NoMean { dtype: T::DTYPE }) } else { Ok(()) }
}

fn combine_bytes<T: Element>(op: ReduceOp) -> impl FnMut(&mut [u8], &[u8]) {
    move |into, from| combine::<T>(op, bytemuck::cast_slice_mut(into), bytemuck::cast_slice(from))
}

/// For schedules whose messages only replace.
fn nothing_to_combine(_: &mut [u8], _: &[u8]) {}

fn finish_mean<T: Element>(sums: &mut [T], count: usize) {
    let divided = divide_by_count(sums, count);
    debug_assert!(divided, "a mean of integers was refused before");
}

fn partition<T: Element>(len: usize, parts: usize) -> Partition<'static> {
    Partition::new(len, size_of::<T>(), parts)
        .expect("a slice exists, elements divide 64 and a world has a rank")
}

/// Copies the input to the front of memory that is kept between calls.
fn copy_of<'a, T: Element>(memory: &'a mut Vec<u64>, input: &[T]) -> &'a mut [T] {
    let words = size_of_val(input).div_ceil(size_of::<u64>());
    if memory.len() < words {
        memory.resize(words, 0);
    }
    let copy = &mut bytemuck::cast_slice_mut(&mut memory[..words])[..input.len()];
    copy.copy_from_slice(input);
    copy
}

fn number(rank: usize) -> u32 {
    u32::try_from(rank).expect("a world has fewer than 2^32 ranks")
}

/// The counter's value, which it then leaves behind.
fn next(counter: &mut u64) -> u64 {
    let value = *counter;
    *counter += 1;
    value
}
