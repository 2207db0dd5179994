//! The started messages of an engine. Each waits for its own peer only.
//!
//! They are a list beside the messages that are kept. Every thread that has the engine moves them: the thread that waits
//! for one of them, a blocking call of the communicator, or the [worker](crate::worker).

use std::any::Any;
use std::fmt;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::Pod;
use dist_transport::runtime::Deadline;
use dist_transport::{Cause, Error as TransportError, Fingerprint, Interrupt, Refusal, Traffic};

use super::Engine;
use super::messages::{ByteVector, Claimant, KeptMatch, Receive};
use crate::{Buffer, Call, ElementType, Error, ReceivedMessage, Result};

/// The memory of a started message.
pub(crate) trait MessageMemory: Any + Send {
    fn bytes(&self) -> &[u8];

    fn bytes_mut(&mut self) -> &mut [u8];

    /// Prepares the memory for a message of this rank with this length in bytes.
    fn accept(&mut self, from: usize, len: usize) -> Result<(), Refusal>;
}

impl<T: Pod + Send> MessageMemory for Buffer<T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self)
    }

    fn accept(&mut self, _from: usize, len: usize) -> Result<(), Refusal> {
        let expected = self.bytes().len();
        if len == expected { Ok(()) } else { Err(Refusal::Length(expected)) }
    }
}

/// A vector takes the length of its message.
impl<T: Pod + Send> MessageMemory for Vec<T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self)
    }

    fn accept(&mut self, _from: usize, len: usize) -> Result<(), Refusal> {
        self.resize_bytes(len)
    }
}

impl<M: MessageMemory> MessageMemory for ReceivedMessage<M> {
    fn bytes(&self) -> &[u8] {
        self.elements.bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.elements.bytes_mut()
    }

    fn accept(&mut self, from: usize, len: usize) -> Result<(), Refusal> {
        self.elements.accept(from, len)?;
        self.from = Some(from);
        Ok(())
    }
}

/// Returns the memory in its type.
pub(crate) fn into_memory<M: MessageMemory>(memory: Box<dyn MessageMemory>) -> M {
    let any: Box<dyn Any> = memory;
    *any.downcast().expect("the memory of a message keeps its type")
}

/// A message that a program starts.
pub(crate) struct NewMessage {
    pub(crate) direction: Direction,
    pub(crate) tag: u32,
    pub(crate) element: ElementType,
    pub(crate) memory: Box<dyn MessageMemory>,
}

impl NewMessage {
    /// Creates a message with this memory, of elements of type `T`.
    pub(crate) fn new<T: Pod>(direction: Direction, tag: u32, memory: impl MessageMemory) -> Self {
        Self { direction, tag, element: ElementType::of::<T>(), memory: Box::new(memory) }
    }
}

/// The direction of a message, with its peer.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Direction {
    To(usize),
    From(usize),
    FromAny,
}

impl Direction {
    /// Returns the other rank, if it is known.
    pub(crate) const fn peer(self) -> Option<usize> {
        match self {
            Self::To(peer) | Self::From(peer) => Some(peer),
            Self::FromAny => None,
        }
    }
}

/// Takes the memory of the messages, and the result of the operation.
pub(crate) type FinishMessages = Box<dyn FnOnce(Vec<Box<dyn MessageMemory>>, Result<()>) + Send>;

/// Messages that were started together.
pub(crate) struct NewOperation {
    /// The number of the operation among those that were started.
    pub(crate) number: u64,
    pub(crate) deadline: Deadline,
    pub(crate) messages: Vec<NewMessage>,
    pub(crate) finish: FinishMessages,
}

/// The requests of other threads to the thread that has the engine for messages.
#[derive(Default)]
pub(crate) struct MessageCommands {
    list: Mutex<Vec<MessageCommand>>,
    /// `true` if the list has commands. It is changed with the lock, and read without.
    has_commands: AtomicBool,
    /// Ends the wait of the thread that has the engine.
    pub(crate) interrupt: Interrupt,
    /// `true` if the communicator waits for the engine.
    is_wanted: AtomicBool,
}

pub(crate) enum MessageCommand {
    Start(NewOperation),
    Cancel(Cancellation),
}

/// A request to cancel an operation. Clones are the same request.
#[derive(Clone)]
pub(crate) struct Cancellation {
    number: u64,
    answer: Arc<AtomicU8>,
}

/// The answer to a [`Cancellation`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum CancelAnswer {
    Open,
    Cancelled,
    /// The operation goes on, because a message has matched, or it has ended.
    Refused,
}

impl Cancellation {
    pub(crate) fn new(number: u64) -> Self {
        Self { number, answer: Arc::new(AtomicU8::new(CancelAnswer::Open as u8)) }
    }

    pub(crate) fn answer(&self) -> CancelAnswer {
        match self.answer.load(Ordering::Acquire) {
            0 => CancelAnswer::Open,
            1 => CancelAnswer::Cancelled,
            _ => CancelAnswer::Refused,
        }
    }
}

impl MessageCommands {
    pub(crate) fn push(&self, command: MessageCommand) {
        let mut list = self.lock();
        list.push(command);
        self.has_commands.store(true, Ordering::Release);
    }

    pub(crate) fn is_empty(&self) -> bool {
        !self.has_commands.load(Ordering::Acquire)
    }

    /// Takes all commands. A command that is pushed later interrupts again.
    fn take(&self) -> Vec<MessageCommand> {
        self.interrupt.clear();
        let mut list = self.lock();
        self.has_commands.store(false, Ordering::Release);
        mem::take(&mut *list)
    }

    pub(crate) fn is_wanted(&self) -> bool {
        self.is_wanted.load(Ordering::Acquire)
    }

    pub(crate) fn set_wanted(&self, is_wanted: bool) {
        self.is_wanted.store(is_wanted, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<MessageCommand>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The started messages that have not ended.
#[derive(Default)]
pub(super) struct StartedMessages {
    /// In the order of their starts.
    pub(super) sends: Vec<StartedSend>,
    pub(super) receives: Vec<StartedReceive>,
    operations: Vec<StartedOperation>,
    /// The traffic of the messages that have ended.
    pub(super) traffic: Traffic,
    /// The requests of other threads, once a message was started.
    pub(super) commands: Option<Arc<MessageCommands>>,
    /// `true` if the transport waits for nothing, because all messages are receives from this rank.
    is_stalled: bool,
    /// The number of receives so far.
    receives_started: u64,
}

/// A message that is sent, of a started operation.
pub(super) struct StartedSend {
    pub(super) operation: u64,
    /// The position of the message in its operation.
    position: usize,
    pub(super) to: usize,
    pub(super) encoded: Fingerprint,
    call: Call,
    pub(super) memory: Box<dyn MessageMemory>,
}

/// A message that is received, of a started operation.
pub(super) struct StartedReceive {
    /// The number of the receive among those that were started.
    pub(super) id: u64,
    pub(super) operation: u64,
    position: usize,
    /// The sender; `None` for any rank.
    pub(super) from: Option<usize>,
    pub(super) encoded: Fingerprint,
    pub(super) call: Call,
    pub(super) memory: Box<dyn MessageMemory>,
    pub(super) state: ReceiveState,
}

/// The state of a started receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReceiveState {
    /// No message has matched it.
    Open,
    /// Its message is arriving.
    Matched,
    Complete,
}

struct StartedOperation {
    number: u64,
    deadline: Deadline,
    /// The number of messages that have not ended.
    open: usize,
    /// The call of the first message.
    call: Call,
    /// The memory of the messages that have ended.
    memories: Vec<Option<Box<dyn MessageMemory>>>,
    finish: FinishMessages,
}

impl StartedReceive {
    /// Prepares the receive for a message of this rank with this length in bytes.
    pub(super) fn accept(&mut self, from: usize, len: usize) -> Result<(), Refusal> {
        self.memory.accept(from, len)?;
        self.state = ReceiveState::Matched;
        Ok(())
    }

    /// Returns `true` if no message has matched the receive, and it takes one of this rank.
    pub(super) fn is_open_for(&self, from: usize) -> bool {
        self.state == ReceiveState::Open && self.from.is_none_or(|wanted| wanted == from)
    }

    /// Returns `true` if no message has matched the receive, and it takes one of any rank.
    pub(super) fn is_open_for_any(&self) -> bool {
        self.state == ReceiveState::Open && self.from.is_none()
    }
}

impl StartedMessages {
    /// Returns `true` if there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Returns the earliest deadline, and the number of its operation.
    pub(super) fn earliest(&self) -> Option<(Deadline, u64)> {
        let deadlines = self.operations.iter().map(|operation| (operation.deadline, operation.number));
        deadlines.reduce(|first, next| if first.0.earlier(next.0) == first.0 { first } else { next })
    }

    /// Returns the number of the operation of a receive.
    pub(super) fn operation_of(&self, id: u64) -> Option<u64> {
        self.receives.iter().find(|receive| receive.id == id).map(|receive| receive.operation)
    }

    /// Returns the number of messages that have not ended.
    fn open(&self) -> usize {
        self.sends.len() + self.receives.len()
    }

    /// Returns `true` if another thread asks for something.
    fn is_interrupted(&self) -> bool {
        self.commands.as_ref().is_some_and(|commands| commands.interrupt.is_requested())
    }

    /// Ends the sends at these positions, and the receives that are complete.
    fn end_messages(&mut self, mut sent: Vec<usize>) {
        sent.sort_unstable();
        for index in sent.into_iter().rev() {
            let send = self.sends.remove(index);
            self.traffic.messages_sent += 1;
            self.traffic.bytes_sent += send.memory.bytes().len() as u64;
            self.end_message((send.operation, send.position), send.memory);
        }
        let is_complete = |receive: &mut StartedReceive| receive.state == ReceiveState::Complete;
        let complete: Vec<_> = self.receives.extract_if(.., is_complete).collect();
        for receive in complete {
            self.traffic.messages_received += 1;
            self.traffic.bytes_received += receive.memory.bytes().len() as u64;
            self.end_message((receive.operation, receive.position), receive.memory);
        }
    }

    fn end_message(&mut self, (number, position): (u64, usize), memory: Box<dyn MessageMemory>) {
        let Some(index) = self.operations.iter().position(|operation| operation.number == number) else {
            return;
        };
        let operation = &mut self.operations[index];
        operation.memories[position] = Some(memory);
        operation.open -= 1;
        if operation.open == 0 {
            self.operations.remove(index).end(Ok(()));
        }
    }

    /// Ends an operation with all its messages.
    fn end_operation(&mut self, number: u64, result: Result<()>) {
        let Some(index) = self.operations.iter().position(|operation| operation.number == number) else {
            return;
        };
        let mut operation = self.operations.remove(index);
        for send in self.sends.extract_if(.., |send| send.operation == number) {
            operation.memories[send.position] = Some(send.memory);
        }
        for receive in self.receives.extract_if(.., |receive| receive.operation == number) {
            operation.memories[receive.position] = Some(receive.memory);
        }
        operation.end(result);
    }

    /// Returns `true` if an operation has only receives, and no message has matched one of them.
    fn may_cancel(&self, number: u64) -> bool {
        let receives = self.receives.iter().filter(|receive| receive.operation == number);
        let operation = self.operations.iter().find(|operation| operation.number == number);
        let open = receives.filter(|receive| receive.state == ReceiveState::Open).count();
        operation.is_some_and(|operation| operation.memories.len() == open)
    }

    /// Returns the operation that a failure with this peer belongs to: one that names the peer, or a receive from any
    /// rank.
    fn operation_with(&self, is_meant: impl Fn(usize) -> bool) -> Option<u64> {
        let receive = self.receives.iter().find(|receive| receive.from.is_some_and(&is_meant));
        let send = || self.sends.iter().find(|send| is_meant(send.to)).map(|send| send.operation);
        let any = || self.receives.iter().find(|receive| receive.is_open_for_any());
        let receive = receive.map(|receive| receive.operation);
        receive.or_else(send).or_else(|| any().map(|receive| receive.operation))
    }

    /// Returns the receive from any rank of an operation, if no message has matched it.
    pub(super) fn open_any(&self, number: u64) -> Option<&StartedReceive> {
        self.receives.iter().find(|receive| receive.operation == number && receive.is_open_for_any())
    }
}

impl StartedOperation {
    fn end(self, result: Result<()>) {
        let memories = self.memories.into_iter().map(|memory| memory.expect("its messages have ended"));
        (self.finish)(memories.collect(), result);
    }
}

impl fmt::Debug for StartedMessages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StartedMessages({} sends, {} receives)", self.sends.len(), self.receives.len())
    }
}

/// The work that started messages need.
#[derive(Debug, Clone, Copy)]
pub(crate) enum StartedWork {
    Nothing,
    /// Nothing before this deadline.
    Until(Deadline),
    Ready,
}

impl Engine {
    /// Sets the requests of other threads, before the first message is started.
    pub(crate) fn set_message_commands(&mut self, commands: &Arc<MessageCommands>) {
        self.messages.started.commands = Some(Arc::clone(commands));
    }

    /// Returns the traffic of the started messages that have ended.
    pub(crate) fn started_traffic(&self) -> Traffic {
        self.messages.started.traffic
    }

    /// Returns the work that started messages need.
    pub(crate) fn started_work(&self) -> StartedWork {
        let started = &self.messages.started;
        if started.commands.as_ref().is_some_and(|commands| !commands.is_empty()) {
            return StartedWork::Ready;
        }
        match started.earliest() {
            None => StartedWork::Nothing,
            Some((deadline, _)) if started.is_stalled && !self.transport.runtime().expired(deadline) => {
                StartedWork::Until(deadline)
            }
            Some(_) => StartedWork::Ready,
        }
    }

    /// Moves started messages until `is_over` returns `true`, none is left, or the communicator wants the engine.
    pub(crate) fn drive_started(&mut self, is_over: &dyn Fn() -> bool) {
        loop {
            self.execute_commands();
            let started = &self.messages.started;
            let is_wanted = started.commands.as_ref().is_some_and(|commands| commands.is_wanted());
            let Some((deadline, first)) = started.earliest().filter(|_| !is_wanted && !is_over()) else {
                return;
            };
            let only = self.transport.runtime().expired(deadline).then_some(first);
            self.begin_started(only);
            let before = self.messages.started.open();
            self.move_started(only, deadline);
            let is_late = self.transport.runtime().expired(deadline);
            let started = &mut self.messages.started;
            started.is_stalled = started.open() == before && !started.is_interrupted() && !is_late;
            if started.is_stalled {
                return;
            }
        }
    }

    /// Tells the transport the call of the first started message, or of this operation.
    fn begin_started(&mut self, only: Option<u64>) {
        let started = &self.messages.started;
        let is_meant = |operation: u64| only.is_none_or(|only| only == operation);
        let receive = started.receives.iter().find(|receive| is_meant(receive.operation));
        let send = || started.sends.iter().find(|send| is_meant(send.operation)).map(|send| send.encoded);
        if let Some(encoded) = receive.map(|receive| receive.encoded).or_else(send) {
            self.transport.begin(&encoded);
        }
    }

    /// Executes the requests of other threads.
    pub(crate) fn execute_commands(&mut self) {
        let Some(commands) = &self.messages.started.commands else { return };
        if !commands.interrupt.is_requested() && commands.is_empty() {
            return;
        }
        for command in commands.clone().take() {
            self.messages.started.is_stalled = false;
            match command {
                MessageCommand::Start(operation) => self.add_operation(operation),
                MessageCommand::Cancel(cancellation) => {
                    let may_cancel = self.messages.started.may_cancel(cancellation.number);
                    if may_cancel {
                        self.messages.started.end_operation(cancellation.number, Ok(()));
                    }
                    let answer = if may_cancel { CancelAnswer::Cancelled } else { CancelAnswer::Refused };
                    cancellation.answer.store(answer as u8, Ordering::Release);
                }
            }
        }
    }

    fn add_operation(&mut self, operation: NewOperation) {
        self.prepare_queues();
        let NewOperation { number, deadline, messages, finish } = operation;
        let call = match messages.first() {
            Some(message) => self.call_of_message(message),
            None => return finish(Vec::new(), Ok(())),
        };
        let memories = messages.iter().map(|_| None).collect();
        let open = messages.len();
        self.messages.started.operations.push(StartedOperation {
            number,
            deadline,
            open,
            call,
            memories,
            finish,
        });
        for (position, message) in messages.into_iter().enumerate() {
            let call = self.call_of_message(&message);
            let encoded = call.encode();
            let NewMessage { direction, memory, .. } = message;
            match direction {
                Direction::To(to) => {
                    let send = StartedSend { operation: number, position, to, encoded, call, memory };
                    self.messages.started.sends.push(send);
                }
                Direction::From(_) | Direction::FromAny => self.add_receive(StartedReceive {
                    id: self.messages.started.receives_started,
                    operation: number,
                    position,
                    from: direction.peer(),
                    encoded,
                    call,
                    memory,
                    state: ReceiveState::Open,
                }),
            }
        }
        self.messages.started.end_messages(Vec::new());
    }

    /// Adds a receive, which gets the oldest kept message that it matches.
    fn add_receive(&mut self, mut started: StartedReceive) {
        self.messages.started.receives_started += 1;
        let (id, number) = (started.id, started.operation);
        let mut receive = Receive::started(started.from, started.call, started.encoded, &mut *started.memory);
        let matched = self.match_kept(Claimant::Started(id), &mut receive);
        let failed = match matched {
            Ok(KeptMatch::Nothing) => None,
            Ok(KeptMatch::Filled) => {
                started.state = ReceiveState::Complete;
                None
            }
            Ok(KeptMatch::Claimed) => {
                started.state = ReceiveState::Matched;
                None
            }
            Err(error) => Some(error),
        };
        self.messages.started.receives.push(started);
        if let Some(error) = failed {
            self.fail_started(Some((number, error)));
        }
    }

    fn call_of_message(&self, message: &NewMessage) -> Call {
        let sender = match message.direction {
            Direction::To(_) => Some(self.rank().index()),
            Direction::From(_) | Direction::FromAny => message.direction.peer(),
        };
        let count = message.memory.bytes().len() / message.element.size();
        self.message_call_of(message.element, count, sender, message.tag)
    }

    /// Ends what has ended after a call of the transport. `sent` has the positions of started sends.
    pub(super) fn end_started(&mut self, sent: Vec<usize>) {
        self.messages.started.end_messages(sent);
    }

    /// Ends an operation with an error, and all others because the job is aborted.
    pub(super) fn fail_started(&mut self, first: Option<(u64, Error)>) {
        if let Some((number, error)) = first {
            self.messages.started.end_operation(number, Err(error));
        }
        while let Some(operation) = self.messages.started.operations.first() {
            let (number, error) = (operation.number, self.aborted(&operation.call));
            self.messages.started.end_operation(number, Err(error));
        }
    }

    /// Returns the error of a call that ends because another message failed.
    pub(super) fn aborted(&self, call: &Call) -> Error {
        let abort = self.transport.aborted().unwrap_or_else(|| dist_transport::Abort {
            cause: Cause::gave_up("a message failed"),
            rank: self.in_world(self.rank().index()),
            reporter: self.in_world(self.rank().index()),
            call: call.encode(),
        });
        Error::in_call(*call, TransportError::Aborted(abort))
    }

    /// Returns the started operation that an error of the transport belongs to.
    pub(super) fn started_with(&self, source: &TransportError) -> Option<u64> {
        let named = source.peer();
        self.messages.started.operation_with(|peer| named == Some(self.in_world(peer)))
    }

    /// Returns the senders and calls of the open receives of an operation, and its first call.
    pub(super) fn started_calls(&self, number: u64) -> (Vec<(Option<usize>, Call)>, Option<Call>) {
        let started = &self.messages.started;
        let receives = started.receives.iter().filter(|receive| receive.operation == number);
        let open = receives.filter(|receive| receive.state == ReceiveState::Open);
        let sends = started.sends.iter().filter(|send| send.operation == number);
        let operation = started.operations.iter().find(|operation| operation.number == number);
        let first = sends.map(|send| send.call).next();
        let first = first.or_else(|| operation.map(|operation| operation.call));
        (open.map(|receive| (receive.from, receive.call)).collect(), first)
    }
}
