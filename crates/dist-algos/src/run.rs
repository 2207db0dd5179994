//! The runner, which executes steps as messages.

use std::borrow::Borrow;
use std::ops::Range;

use dist_transport::cpu::copy;
use dist_transport::{Combine, Incoming, LazyDeadline, Outgoing, Progress, Rank, Sink};
use smallvec::{SmallVec, smallvec};

use crate::pieces::{self, Pieces, PiecesMut, ScatteredPieces};
use crate::validate::ChunkCounts;
use crate::{
    ChunkLocation, Chunks, Error, OnArrival, Partition, ReceiveHalf, RingTransport, RunError, Scratch,
    SendHalf, Source, Step,
};

/// The memory of one rank that a schedule works on.
#[derive(Debug)]
pub struct Memory<'a> {
    /// The memory that steps send, receive and reduce.
    pub buffer: &'a mut [u8],
    /// The partition of the buffer, for which the schedule was made.
    pub partition: Partition<'a>,
    /// An input that steps only send from, and its partition, if the schedule has such steps.
    pub input: Option<(&'a [u8], Partition<'a>)>,
}

impl<'a> Memory<'a> {
    /// Returns the memory of a buffer without an input.
    pub const fn new(buffer: &'a mut [u8], partition: Partition<'a>) -> Self {
        Self { buffer, partition, input: None }
    }

    fn check(&self) -> Result<(), Error> {
        let (expected, got) = (self.partition.bytes(), self.buffer.len());
        if expected != got {
            return Err(Error::BufferLength { expected, got });
        }
        match self.input {
            Some((input, partition)) if input.len() != partition.bytes() => {
                Err(Error::InputLength { expected: partition.bytes(), got: input.len() })
            }
            _ => Ok(()),
        }
    }

    fn parts(&self) -> ChunkCounts {
        ChunkCounts {
            buffer: self.partition.parts(),
            input: self.input.map_or(0, |(_, partition)| partition.parts()),
        }
    }
}

/// The steps of one rank, validated once. [`run_validated`] executes them.
#[derive(Debug)]
pub struct ValidatedSteps {
    rank: Rank,
    steps: Vec<Step>,
    /// The numbers of chunks of the memory for which the steps are valid.
    parts: ChunkCounts,
}

impl ValidatedSteps {
    /// Validates the steps of a rank for a buffer and an input of these numbers of chunks. The input is only needed
    /// if steps send from it.
    ///
    /// # Errors
    /// If a step names an invalid rank, chunk or slot.
    pub fn new(rank: Rank, steps: Vec<Step>, [buffer, input]: [usize; 2]) -> Result<Self, Error> {
        let from_input = |step: &Step| match step {
            Step::Exchange { send, .. } => send.is_some_and(|send| send.of == Source::Input),
            Step::Window { .. } => true,
            Step::Combine { .. } | Step::Copy { .. } => false,
        };
        let input = if steps.iter().any(from_input) { input } else { 0 };
        let valid = Self { rank, steps, parts: ChunkCounts { buffer, input } };
        valid.check(valid.parts)?;
        Ok(valid)
    }

    /// Returns the number of steps.
    pub const fn len(&self) -> usize {
        self.steps.len()
    }

    /// Returns `true` if there are no steps.
    pub const fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Returns `true` if steps send from the input.
    pub const fn send_from_input(&self) -> bool {
        self.parts.input > 0
    }

    fn check(&self, parts: ChunkCounts) -> Result<(), Error> {
        let mut steps = self.steps.iter().enumerate();
        steps.try_for_each(|(index, step)| step.validate(self.rank, index, parts))
    }
}

/// The function that reduces whole elements: it combines its two arguments into the first one.
pub enum Reduce<'a, 'f> {
    /// The operation is commutative.
    AnySide(&'a mut Combine<'f>),
    /// The function is told on which side of the first argument the second one is. By a schedule with canonical order,
    /// operands are in the order of the ranks.
    Sided(&'a mut SidedCombine<'f>),
}

/// A function that combines its second argument, which is on this side of the first one, into the first one.
pub type SidedCombine<'f> = dyn FnMut(&mut [u8], &[u8], OperandSide) + 'f;

/// The side of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandSide {
    /// The operand comes from lower ranks than the other one.
    Left,
    /// The operand comes from higher ranks than the other one.
    Right,
}

impl OperandSide {
    /// Returns the side of an operand that came from one rank, if the other operand came from another one.
    const fn of(from: usize, other: usize) -> Self {
        if from < other { Self::Left } else { Self::Right }
    }
}

impl<'f> Reduce<'_, 'f> {
    /// Returns the same function for a shorter time.
    pub fn reborrow(&mut self) -> Reduce<'_, 'f> {
        match self {
            Self::AnySide(combine) => Reduce::AnySide(&mut **combine),
            Self::Sided(combine) => Reduce::Sided(&mut **combine),
        }
    }

    fn combine(&mut self, into: &mut [u8], from: &[u8], side: OperandSide) {
        match self {
            Self::AnySide(combine) => combine(into, from),
            Self::Sided(combine) => combine(into, from, side),
        }
    }
}

impl std::fmt::Debug for Reduce<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::AnySide(_) => "AnySide",
            Self::Sided(_) => "Sided",
        })
    }
}

/// Executes a range of validated steps as [`run`] does, without checking each of them again.
///
/// # Errors
/// If the transport fails. If the memory has other numbers of chunks than the steps were validated for, they are
/// validated for it first.
pub fn run_validated<T: RingTransport + ?Sized>(
    transport: &mut T,
    (valid, range): (&ValidatedSteps, Range<usize>),
    memory: Memory<'_>,
    reduce: Reduce<'_, '_>,
    scratch: &mut Scratch,
    due: &LazyDeadline<'_>,
) -> Result<(), RunError<T::Error>> {
    let (rank, parts) = (transport.rank(), memory.parts());
    if rank != valid.rank {
        let check = |index: usize, step: &Step| step.validate(rank, index, parts);
        return run_steps(transport, &valid.steps[range], memory, reduce, scratch, due, check);
    }
    if parts.buffer != valid.parts.buffer || parts.input < valid.parts.input {
        valid.check(parts)?;
    }
    run_steps(transport, &valid.steps[range], memory, reduce, scratch, due, |_, _| Ok(()))
}

/// Executes the steps of this rank in order, on memory with the partition of the schedule.
///
/// `reduce` adds its second argument into its first. It gets whole elements if the partition knows their size. If
/// the buffer is aligned for elements of that size, both arguments are too.
///
/// After an error the buffer's contents are unspecified.
///
/// # Errors
/// If the transport fails, or a step names an invalid rank, chunk or slot.
pub fn run<T: RingTransport + ?Sized>(
    transport: &mut T,
    steps: impl IntoIterator<Item = impl Borrow<Step>>,
    memory: Memory<'_>,
    reduce: &mut Combine<'_>,
    scratch: &mut Scratch,
    due: &LazyDeadline<'_>,
) -> Result<(), RunError<T::Error>> {
    let (rank, parts, reduce) = (transport.rank(), memory.parts(), Reduce::AnySide(reduce));
    run_steps(transport, steps, memory, reduce, scratch, due, |index, step| step.validate(rank, index, parts))
}

/// Executes steps, each after it has passed the check.
#[inline(always)]
fn run_steps<T: RingTransport + ?Sized>(
    transport: &mut T,
    steps: impl IntoIterator<Item = impl Borrow<Step>>,
    mut memory: Memory<'_>,
    reduce: Reduce<'_, '_>,
    scratch: &mut Scratch,
    due: &LazyDeadline<'_>,
    check: impl Fn(usize, &Step) -> Result<(), Error>,
) -> Result<(), RunError<T::Error>> {
    memory.check()?;
    let rank = transport.rank();
    let slots_from = PerPeer::new();
    let mut runner =
        ExchangeRunner { transport, rank, memory: &mut memory, reduce, scratch, slots_from, due };
    for (index, step) in steps.into_iter().enumerate() {
        let step = step.borrow();
        check(index, step)?;
        match step.in_place() {
            Some((peer, chunks)) => runner.exchange_in_place(index, peer, chunks)?,
            None => runner.step(index, *step)?,
        }
    }
    Ok(())
}

/// One value for each of a few peers, without an allocation.
type PerPeer<T> = SmallVec<[T; 4]>;

struct ExchangeRunner<'a, 'memory, 'reduce, T: ?Sized> {
    transport: &'a mut T,
    rank: Rank,
    memory: &'a mut Memory<'memory>,
    reduce: Reduce<'a, 'reduce>,
    scratch: &'a mut Scratch,
    /// The rank from which the content of each slot first arrived.
    slots_from: PerPeer<usize>,
    due: &'a LazyDeadline<'a>,
}

impl<T: RingTransport + ?Sized> ExchangeRunner<'_, '_, '_, T> {
    /// Executes an exchange of the kind that [`Step::in_place`] recognises. A small all_reduce consists of such
    /// steps, so this path avoids all other work.
    #[inline(always)]
    fn exchange_in_place(
        &mut self,
        index: usize,
        peer: usize,
        chunks: Chunks,
    ) -> Result<(), RunError<T::Error>> {
        if !self.memory.partition.divides_cache_lines() {
            return self.step(index, Step::exchange_in_place(peer, chunks));
        }
        self.transport.set_progress(Progress { step: index, receives: Some((chunks.first(), chunks.len())) });
        let shared = &mut self.memory.buffer[self.memory.partition.span(chunks)];
        let exchanged = match &mut self.reduce {
            Reduce::AnySide(combine) => self.transport.exchange_in_place(peer, shared, *combine, self.due),
            Reduce::Sided(combine) => {
                let side = OperandSide::of(peer, self.rank.index());
                let combine = &mut |into: &mut [u8], from: &[u8]| combine(into, from, side);
                self.transport.exchange_in_place(peer, shared, combine, self.due)
            }
        };
        exchanged.map_err(|source| RunError::Transport { step: index, source })
    }

    /// Executes any other step.
    #[inline(never)]
    fn step(&mut self, index: usize, step: Step) -> Result<(), RunError<T::Error>> {
        self.transport.set_progress(Progress { step: index, receives: step.receives() });
        match step {
            Step::Exchange { send, receive: Some(receive) }
                if step.swaps() || self.divides_elements(receive) =>
            {
                self.exchange_staged(index, send, receive)
            }
            Step::Exchange { send, receive: None } => self.send(index, send),
            Step::Exchange { send, receive: Some(receive) } => match receive.place {
                ChunkLocation::Buffer => self.exchange(index, send, receive),
                ChunkLocation::Slot(slot) => self.exchange_into_slot(index, send, receive, slot),
            },
            Step::Combine { chunk, from, into } => {
                self.combine(chunk, from, into);
                Ok(())
            }
            Step::Copy { chunk, from, into } => {
                self.copy(chunk, from, into);
                Ok(())
            }
            Step::Window { .. } => self.window(index, step),
        }
    }

    fn send(&mut self, index: usize, send: Option<SendHalf>) -> Result<(), RunError<T::Error>> {
        let Some(send) = send else { return Ok(()) };
        let Memory { buffer, partition, input } = &*self.memory;
        let pieces = outgoing(buffer, *partition, *input, send);
        self.transport
            .exchange(Some(Outgoing { to: send.to, parts: &pieces }), None, self.due)
            .map_err(|source| RunError::Transport { step: index, source })
    }

    fn exchange(
        &mut self,
        index: usize,
        send: Option<SendHalf>,
        receive: ReceiveHalf,
    ) -> Result<(), RunError<T::Error>> {
        let rank = self.rank.index();
        let Memory { buffer, partition, input } = &mut *self.memory;
        let of_buffer =
            send.filter(|send| send.of == Source::Buffer).map_or(Chunks::NONE, |send| send.chunks);
        let (pieces, places) = pieces::split(buffer, partition, of_buffer, receive.chunks)
            .ok_or(Error::Overlap { rank, step: index })?;
        let send = send.map(|send| match send.of {
            Source::Buffer => (send.to, pieces),
            Source::Input => (send.to, outgoing(&[], *partition, *input, send)),
        });
        let (from, due, transport) = (receive.from, self.due, &mut *self.transport);
        let mut exchange = PieceExchange { transport, send, from, due, step: index };
        let (reduce, side) = (&mut self.reduce, OperandSide::of(from, rank));
        exchange.receive(receive.then, places, &mut |into, from| reduce.combine(into, from, side))
    }

    /// Returns `true` if the message is reduced, and the pieces in which a transport delivers it may end inside of
    /// elements.
    fn divides_elements(&self, receive: ReceiveHalf) -> bool {
        receive.then == OnArrival::Reduce && !self.memory.partition.divides_cache_lines()
    }

    /// Executes an exchange that uses the received data only after all of it has arrived in a second buffer.
    /// This is needed if the data replaces chunks that are sent, or if its pieces end inside of elements.
    fn exchange_staged(
        &mut self,
        index: usize,
        send: Option<SendHalf>,
        receive: ReceiveHalf,
    ) -> Result<(), RunError<T::Error>> {
        let side = self.side(receive);
        let Memory { buffer, partition, input } = &mut *self.memory;
        let len = partition.bytes_of(receive.chunks);
        let (slots, arrived) = self.scratch.slots_and_staged(len);
        let send = send.map(|send| (send.to, outgoing(buffer, *partition, *input, send)));
        let sent = send.as_ref().map(|(to, parts)| Outgoing { to: *to, parts });
        let incoming = Incoming { from: receive.from, len, sink: Sink::Into(arrived) };
        self.transport
            .exchange(sent, Some(incoming), self.due)
            .map_err(|source| RunError::Transport { step: index, source })?;
        drop(send);
        let mut apply = |place: &mut [u8], piece: &[u8]| match receive.then {
            OnArrival::Replace => copy(piece, place),
            OnArrival::Reduce => self.reduce.combine(place, piece, side),
        };
        if let ChunkLocation::Slot(slot) = receive.place {
            apply(slots.slot(slot, partition.chunk_bytes_max(), len), arrived);
            return Ok(());
        }
        let mut arrived = &*arrived;
        for range in pieces::ranges(partition, receive.chunks) {
            let (piece, rest) = arrived.split_at(range.len());
            apply(&mut buffer[range], piece);
            arrived = rest;
        }
        Ok(())
    }

    /// Sends from the input and receives into the buffer, with several peers at once.
    fn window(&mut self, index: usize, step: Step) -> Result<(), RunError<T::Error>> {
        let Memory { buffer, partition, input } = &mut *self.memory;
        let (sends, mut receives) = step.halves(self.rank);
        let pieces: PerPeer<Pieces<'_>> =
            sends.iter().map(|send| outgoing(&[], *partition, *input, *send)).collect();
        let sends: PerPeer<Outgoing<'_>> =
            sends.iter().zip(&pieces).map(|(send, parts)| Outgoing { to: send.to, parts }).collect();
        receives.sort_unstable_by_key(|receive| receive.chunks.first());
        let ranges = receives.iter().map(|receive| partition.span(receive.chunks));
        let places = pieces::cut_out(buffer, ranges);
        let mut receives: PerPeer<Incoming<'_>> = receives
            .iter()
            .zip(places)
            .map(|(receive, place)| Incoming {
                from: receive.from,
                len: place.len(),
                sink: Sink::Into(place),
            })
            .collect();
        self.transport
            .exchange_all(&sends, &mut receives, self.due)
            .map_err(|source| RunError::Transport { step: index, source })
    }

    fn exchange_into_slot(
        &mut self,
        index: usize,
        send: Option<SendHalf>,
        receive: ReceiveHalf,
        slot: usize,
    ) -> Result<(), RunError<T::Error>> {
        let side = self.side(receive);
        if receive.then == OnArrival::Replace {
            self.fill_slot(slot, receive.from);
        }
        let Memory { buffer, partition, input } = &*self.memory;
        let place =
            self.scratch.slots().slot(slot, partition.chunk_bytes_max(), partition.bytes_of(receive.chunks));
        let send = send.map(|send| (send.to, outgoing(buffer, *partition, *input, send)));
        let (from, due, transport) = (receive.from, self.due, &mut *self.transport);
        let mut exchange = PieceExchange { transport, send, from, due, step: index };
        let reduce = &mut self.reduce;
        exchange.receive(receive.then, smallvec![place], &mut |into, from| reduce.combine(into, from, side))
    }

    /// Returns the side of a message that is reduced.
    fn side(&self, receive: ReceiveHalf) -> OperandSide {
        OperandSide::of(receive.from, self.from(receive.place))
    }

    /// Returns the rank from which the content of a location first arrived.
    fn from(&self, place: ChunkLocation) -> usize {
        match place {
            ChunkLocation::Buffer => self.rank.index(),
            ChunkLocation::Slot(slot) => self.slots_from.get(slot).copied().unwrap_or_default(),
        }
    }

    /// Remembers the rank from which the content of a slot arrived.
    fn fill_slot(&mut self, slot: usize, from: usize) {
        if self.slots_from.len() <= slot {
            self.slots_from.resize(slot + 1, 0);
        }
        self.slots_from[slot] = from;
    }

    fn copy(&mut self, chunk: usize, from: ChunkLocation, into: ChunkLocation) {
        if let ChunkLocation::Slot(slot) = into {
            self.fill_slot(slot, self.from(from));
        }
        let range = self.memory.partition.range(chunk);
        let (slot_bytes, len) = (self.memory.partition.chunk_bytes_max(), range.len());
        let buffer = &mut self.memory.buffer[range];
        match (from, into) {
            _ if len == 0 => {}
            (ChunkLocation::Buffer, ChunkLocation::Buffer) => {}
            (ChunkLocation::Buffer, ChunkLocation::Slot(slot)) => {
                copy(buffer, self.scratch.slots().slot(slot, slot_bytes, len))
            }
            (ChunkLocation::Slot(slot), ChunkLocation::Buffer) => {
                copy(self.scratch.slots().slot(slot, slot_bytes, len), buffer)
            }
            (ChunkLocation::Slot(from), ChunkLocation::Slot(into)) => {
                let (from, into) = self.scratch.slots().two_slots((from, into), slot_bytes, len);
                copy(from, into);
            }
        }
    }

    fn combine(&mut self, chunk: usize, from: usize, into: ChunkLocation) {
        let side = OperandSide::of(self.from(ChunkLocation::Slot(from)), self.from(into));
        let range = self.memory.partition.range(chunk);
        let slot_bytes = self.memory.partition.chunk_bytes_max();
        match into {
            _ if range.is_empty() => {}
            ChunkLocation::Buffer => {
                let held = self.scratch.slots().slot(from, slot_bytes, range.len());
                self.reduce.combine(&mut self.memory.buffer[range], held, side);
            }
            ChunkLocation::Slot(slot) => {
                let (held, memory) = self.scratch.slots().two_slots((from, slot), slot_bytes, range.len());
                self.reduce.combine(memory, held, side);
            }
        }
    }
}

/// One exchange, with the memory that it works on divided into pieces.
struct PieceExchange<'a, T: ?Sized> {
    transport: &'a mut T,
    send: Option<(usize, Pieces<'a>)>,
    from: usize,
    due: &'a LazyDeadline<'a>,
    step: usize,
}

impl<T: RingTransport + ?Sized> PieceExchange<'_, T> {
    fn receive(
        &mut self,
        then: OnArrival,
        mut memory: PiecesMut<'_>,
        reduce: &mut Combine<'_>,
    ) -> Result<(), RunError<T::Error>> {
        let len = memory.iter().map(|part| part.len()).sum();
        match (then, memory.as_mut_slice()) {
            (OnArrival::Replace, []) => self.call(len, Sink::Into(&mut [])),
            (OnArrival::Replace, [whole]) => self.call(len, Sink::Into(whole)),
            (OnArrival::Replace, _) => {
                self.receive_pieces(len, memory, &mut |place, bytes| copy(bytes, place))
            }
            (OnArrival::Reduce, _) => self.receive_pieces(len, memory, reduce),
        }
    }

    /// Receives piece by piece.
    fn receive_pieces(
        &mut self,
        len: usize,
        memory: PiecesMut<'_>,
        apply: &mut Combine<'_>,
    ) -> Result<(), RunError<T::Error>> {
        let mut scatter = ScatteredPieces::new(memory);
        self.call(len, Sink::Each(&mut |offset, bytes| scatter.scatter(offset, bytes, apply)))?;
        if scatter.complete() {
            Ok(())
        } else {
            Err(Error::Delivery { rank: self.transport.rank().index(), step: self.step }.into())
        }
    }

    fn call(&mut self, len: usize, sink: Sink<'_>) -> Result<(), RunError<T::Error>> {
        let send = self.send.as_ref().map(|(to, parts)| Outgoing { to: *to, parts });
        let receive = Incoming { from: self.from, len, sink };
        self.transport
            .exchange(send, Some(receive), self.due)
            .map_err(|source| RunError::Transport { step: self.step, source })
    }
}

/// Returns the pieces of a message, for a step that receives nothing into the buffer.
fn outgoing<'a>(
    buffer: &'a [u8],
    partition: Partition<'_>,
    input: Option<(&'a [u8], Partition<'_>)>,
    send: SendHalf,
) -> Pieces<'a> {
    match (send.of, input) {
        (Source::Input, Some((input, partition))) => pieces::read(input, &partition, send.chunks),
        (Source::Input, None) => Pieces::new(),
        (Source::Buffer, _) => pieces::read(buffer, &partition, send.chunks),
    }
}
