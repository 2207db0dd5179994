//! The runner: the one place where steps become messages.

use dist_transport::{Combine, Deadline, Incoming, Outgoing, Sink};
use smallvec::smallvec;

use crate::pieces::{self, Parts, PartsMut, Scatter};
use crate::{
    Chunks, Error, Partition, Place, ReceiveHalf, RingTransport, RunError, Scratch, SendHalf, Step, Then,
};

/// Does the steps of this rank, one after the other, on a buffer that `partition` has cut into the chunks that
/// the schedule was made for.
///
/// `reduce` adds its second argument into its first. It is given whole elements, if `partition` knows their
/// size; both arguments are aligned as elements of that size are, if the buffer is.
///
/// After an error the buffer's contents are unspecified.
///
/// # Errors
/// If the transport fails, or a step names a rank, chunk or slot that makes no sense.
pub fn run<T: RingTransport + ?Sized>(
    transport: &mut T,
    steps: impl IntoIterator<Item = Step>,
    buffer: &mut [u8],
    partition: &Partition,
    reduce: &mut Combine<'_>,
    scratch: &mut Scratch,
    deadline: Deadline,
) -> Result<(), RunError<T::Error>> {
    if buffer.len() != partition.bytes() {
        return Err(Error::BufferLength { expected: partition.bytes(), got: buffer.len() }.into());
    }
    let mut runner = Runner { transport, buffer, partition, reduce, scratch, deadline };
    for (index, step) in steps.into_iter().enumerate() {
        runner.step(index, step)?;
    }
    Ok(())
}

struct Runner<'a, 'reduce, T: ?Sized> {
    transport: &'a mut T,
    buffer: &'a mut [u8],
    partition: &'a Partition,
    reduce: &'a mut Combine<'reduce>,
    scratch: &'a mut Scratch,
    deadline: Deadline,
}

impl<T: RingTransport + ?Sized> Runner<'_, '_, T> {
    fn step(&mut self, index: usize, step: Step) -> Result<(), RunError<T::Error>> {
        step.validate(self.transport.rank(), index, self.partition.parts())?;
        if let Some((peer, chunks)) = step.in_place() {
            let memory = &mut self.buffer[self.partition.span(chunks)];
            return self
                .transport
                .exchange_in_place(peer, memory, self.reduce, self.deadline)
                .map_err(|source| RunError::Transport { step: index, source });
        }
        match step {
            Step::Exchange { send, receive: None } => self.send(index, send),
            Step::Exchange { send, receive: Some(receive) } => match receive.place {
                Place::Buffer => self.exchange(index, send, receive),
                Place::Slot(slot) => self.exchange_into_slot(index, send, receive, slot),
            },
            Step::Combine { chunk, from, into } => {
                self.combine(chunk, from, into);
                Ok(())
            }
        }
    }

    fn send(&mut self, index: usize, send: Option<SendHalf>) -> Result<(), RunError<T::Error>> {
        let Some(send) = send else { return Ok(()) };
        let parts = pieces::read(self.buffer, self.partition, send.chunks);
        self.transport
            .exchange(Some(Outgoing { to: send.to, parts: &parts }), None, self.deadline)
            .map_err(|source| RunError::Transport { step: index, source })
    }

    fn exchange(
        &mut self,
        index: usize,
        send: Option<SendHalf>,
        receive: ReceiveHalf,
    ) -> Result<(), RunError<T::Error>> {
        let rank = self.transport.rank().index();
        let sent = send.map_or(Chunks::NONE, |send| send.chunks);
        let (parts, memory) = pieces::split(self.buffer, self.partition, sent, receive.chunks)
            .ok_or(Error::Overlap { rank, step: index })?;
        let mut exchange = Exchange {
            transport: &mut *self.transport,
            send: send.map(|send| (send.to, parts)),
            from: receive.from,
            deadline: self.deadline,
            step: index,
        };
        exchange.receive(receive.then, memory, self.reduce)
    }

    fn exchange_into_slot(
        &mut self,
        index: usize,
        send: Option<SendHalf>,
        receive: ReceiveHalf,
        slot: usize,
    ) -> Result<(), RunError<T::Error>> {
        let len = self.partition.bytes_of(receive.chunks);
        let memory = self.scratch.slot(slot, self.partition.chunk_bytes_max(), len);
        let mut exchange = Exchange {
            transport: &mut *self.transport,
            send: send.map(|send| (send.to, pieces::read(self.buffer, self.partition, send.chunks))),
            from: receive.from,
            deadline: self.deadline,
            step: index,
        };
        exchange.receive(receive.then, smallvec![memory], self.reduce)
    }

    fn combine(&mut self, chunk: usize, from: usize, into: Place) {
        let range = self.partition.range(chunk);
        let slot_bytes = self.partition.chunk_bytes_max();
        match into {
            _ if range.is_empty() => {}
            Place::Buffer => {
                let held = self.scratch.slot(from, slot_bytes, range.len());
                (self.reduce)(&mut self.buffer[range], held);
            }
            Place::Slot(slot) => {
                let (held, memory) = self.scratch.two_slots((from, slot), slot_bytes, range.len());
                (self.reduce)(memory, held);
            }
        }
    }
}

/// One exchange, with the memory that it works on taken apart.
struct Exchange<'a, T: ?Sized> {
    transport: &'a mut T,
    send: Option<(usize, Parts<'a>)>,
    from: usize,
    deadline: Deadline,
    step: usize,
}

impl<T: RingTransport + ?Sized> Exchange<'_, T> {
    fn receive(
        &mut self,
        then: Then,
        mut memory: PartsMut<'_>,
        reduce: &mut Combine<'_>,
    ) -> Result<(), RunError<T::Error>> {
        let len = memory.iter().map(|part| part.len()).sum();
        match (then, memory.as_mut_slice()) {
            (Then::Replace, []) => self.call(len, Sink::Into(&mut [])),
            (Then::Replace, [whole]) => self.call(len, Sink::Into(whole)),
            (Then::Replace, _) => self.deal(len, memory, &mut |place, bytes| place.copy_from_slice(bytes)),
            (Then::Reduce, _) => self.deal(len, memory, reduce),
        }
    }

    /// Receives piece by piece.
    fn deal(
        &mut self,
        len: usize,
        memory: PartsMut<'_>,
        apply: &mut Combine<'_>,
    ) -> Result<(), RunError<T::Error>> {
        let mut scatter = Scatter::new(memory);
        self.call(len, Sink::Each(&mut |offset, bytes| scatter.deal(offset, bytes, apply)))?;
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
            .exchange(send, Some(receive), self.deadline)
            .map_err(|source| RunError::Transport { step: self.step, source })
    }
}
