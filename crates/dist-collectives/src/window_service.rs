//! Windows whose memory threads serve, as between hosts: a thread of each rank serves the requests of the other ranks on
//! its memory.
//!
//! Each rank has a channel of all ranks on which only its thread receives. Requests of one rank are served in the order
//! in which it has sent them. Before a rank ends an epoch, the threads of all other ranks have served its requests and
//! know that no more follow. So no thread receives a request of the next epoch.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytemuck::Pod;
use dist_transport::runtime::{Deadline, Task};
use dist_transport::shm_group::{WordSize, WordUpdate};
use dist_transport::{Cause, Chain, Runtime};

use crate::call::WindowStep;
use crate::engine::{CallOptions, Engine};
use crate::settings::Settings;
use crate::{Buffer, Call, Communicator, Error, Result};

/// The channels of windows that threads serve. A communicator keeps them between windows.
pub(crate) struct ServiceChannels {
    /// The channel to the thread of each other rank.
    to: Vec<Option<Box<Engine>>>,
    /// The channel of this rank's thread.
    own: Box<Engine>,
}

/// An epoch of a window: a thread serves this rank's memory. If it is dropped before its [end](Self::end), the job is
/// aborted, because the other ranks would wait for this one.
pub(crate) struct WindowService<M> {
    to: Vec<Option<Box<Engine>>>,
    /// `None` after the end.
    running: Option<RunningThread<M>>,
    /// The call that began the epoch, which errors name.
    pub(crate) call: Call,
}

/// A thread that serves requests, and the memory that it serves.
struct RunningThread<M> {
    task: Task<Result<Box<Engine>>>,
    memory: Arc<M>,
}

/// Memory that serves requests.
pub(crate) trait ServedMemory: Send + Sync + 'static {
    /// Serves a request on elements from this byte on. Returns `None` if the memory has no such elements.
    fn serve(&self, request: WindowRequest, payload: &[u8]) -> Option<Vec<u8>>;
}

/// A request of a rank to the thread of another rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WindowRequest {
    /// Stores the payload from this byte on. There is no reply.
    Put { start: u64 },
    /// Changes the word at this byte. The reply is the word from before.
    Update { start: u64, update: WordUpdate },
    /// The reply is this many bytes from this byte on.
    Read { start: u64, bytes: u64 },
    /// The rank makes no more requests in this epoch. The empty reply says that all its requests were served.
    End,
}

/// The bytes of an encoded request.
const REQUEST_BYTES: usize = 32;

/// The tags of requests and replies.
const REQUEST: u32 = 1;
const REPLY: u32 = 2;

/// The timeout of a thread that waits for requests: longer than any job. The end of the job ends the wait.
const IDLE: Duration = Duration::from_secs(1 << 34);

impl WindowRequest {
    fn encode(self) -> [u8; REQUEST_BYTES] {
        let words: [u64; 4] = match self {
            Self::Put { start } => [0, start, 0, 0],
            Self::Update { start, update: WordUpdate::Add(amount) } => [1, start, amount, 0],
            Self::Update { start, update: WordUpdate::CompareAndSwap { expected, new } } => {
                [2, start, expected, new]
            }
            Self::Read { start, bytes } => [3, start, bytes, 0],
            Self::End => [4, 0, 0, 0],
        };
        let mut encoded = [0; REQUEST_BYTES];
        for (bytes, word) in encoded.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        encoded
    }

    /// Returns the request and its payload; `None` if the bytes are no request.
    fn decode(message: &[u8]) -> Option<(Self, &[u8])> {
        let (words, payload) = message.split_at_checked(REQUEST_BYTES)?;
        let word = |index: usize| words[8 * index..][..8].try_into().map(u64::from_le_bytes).ok();
        let (start, first, second) = (word(1)?, word(2)?, word(3)?);
        let request = match word(0)? {
            0 => Self::Put { start },
            1 => Self::Update { start, update: WordUpdate::Add(first) },
            2 => Self::Update { start, update: WordUpdate::CompareAndSwap { expected: first, new: second } },
            3 => Self::Read { start, bytes: first },
            4 => Self::End,
            _ => return None,
        };
        Some((request, payload))
    }
}

impl ServiceChannels {
    /// Creates the channels. Every rank calls this. Nothing is communicated.
    fn new(comm: &mut Communicator) -> Result<Self> {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let mut to = (0..ranks).map(|_| comm.fork_for_messages().map(Some)).collect::<Result<Vec<_>>>()?;
        let own = to[rank].take().expect("it was just created");
        Ok(Self { to, own })
    }
}

impl<M: ServedMemory> WindowService<M> {
    /// Starts to serve this memory, in the epoch that this call has begun on all ranks.
    pub(crate) fn start(call: Call, memory: M, comm: &mut Communicator) -> Result<Self, (M, Error)> {
        let channels = comm.window_channels.take().map_or_else(|| ServiceChannels::new(comm), Ok);
        let ServiceChannels { to, own } = match channels {
            Ok(channels) => channels,
            Err(error) => {
                comm.abort(Chain(&error));
                return Err((memory, error));
            }
        };
        let (rank, memory) = (comm.rank(), Arc::new(memory));
        let server = WindowServer {
            engine: own,
            memory: memory.clone(),
            ended: (0..to.len()).map(|other| other == rank).collect(),
            settings: comm.settings.of_child(),
            runtime: comm.runtime.clone(),
        };
        match comm.runtime.spawn(&format!("dist-window-{rank}"), move || server.run()) {
            Ok(task) => Ok(Self { to, running: Some(RunningThread { task, memory }), call }),
            Err(source) => {
                let error = Error::Worker(source);
                comm.abort(Chain(&error));
                Err((Arc::into_inner(memory).expect("no thread has it"), error))
            }
        }
    }

    /// Returns the memory of this rank.
    pub(crate) fn memory(&self) -> &M {
        &self.running.as_ref().expect("it has not ended").memory
    }

    /// Serves a request, or sends it to the thread of another rank. Returns the reply, which is empty for
    /// [`WindowRequest::Put`].
    pub(crate) fn request(
        &mut self,
        rank: usize,
        request: WindowRequest,
        payload: &[u8],
        comm: &Communicator,
    ) -> Result<Vec<u8>> {
        if self.to[rank].is_none() {
            // A simulated rank that polls its own memory must not stop the clock, by which messages arrive.
            comm.runtime.let_time_pass();
            return Ok(self.memory().serve(request, payload).unwrap_or_default());
        }
        let limits = (comm.settings, comm.runtime.deadline(comm.settings.timeout));
        self.send(rank, &[&request.encode()[..], payload].concat(), limits)?;
        match request {
            WindowRequest::Put { .. } => Ok(Vec::new()),
            _ => self.receive_reply(rank, limits),
        }
    }

    /// Ends the epoch, after all ranks' requests on all memories are served. Returns the call that ends it, and the memory.
    /// Every rank calls this with the same `step`.
    pub(crate) fn end<T: Pod + Send + Sync>(
        mut self,
        (len, step): (usize, WindowStep),
        comm: &mut Communicator,
    ) -> Result<(Call, M)> {
        let others: Vec<usize> = (0..self.to.len()).filter(|&rank| self.to[rank].is_some()).collect();
        let end = WindowRequest::End.encode();
        let (settings, deadline) = (comm.settings, comm.runtime.deadline(comm.settings.timeout));
        others.iter().try_for_each(|&rank| self.send(rank, &end, (settings, deadline)))?;
        others.iter().try_for_each(|&rank| self.receive_reply(rank, (settings, deadline)).map(drop))?;
        let options = CallOptions::until(&settings, deadline);
        let call = comm.call(|engine, _| engine.end_epoch::<T>((len, step), &options))?;
        // All ranks have the replies of this rank's thread, so it has ended or is about to.
        let RunningThread { task, memory } = self.running.take().expect("it has not ended");
        let own = task.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        comm.window_channels = Some(ServiceChannels { to: std::mem::take(&mut self.to), own });
        Ok((call, Arc::into_inner(memory).expect("the thread has dropped its memory")))
    }

    /// Sends an encoded request to the thread of another rank.
    fn send(&mut self, rank: usize, request: &[u8], (settings, due): (Settings, Deadline)) -> Result<()> {
        let settings = settings.of_child().with_tag(REQUEST);
        let sent = self.channel(rank).send(request, rank, &CallOptions::until(&settings, due));
        sent.map_err(|error| error.in_other_call(&self.call))
    }

    /// Receives a reply of the thread of another rank.
    fn receive_reply(&mut self, rank: usize, (settings, due): (Settings, Deadline)) -> Result<Vec<u8>> {
        let settings = settings.of_child().with_tag(REPLY);
        let reply = self.channel(rank).receive_vec(Some(rank), &CallOptions::until(&settings, due));
        reply.map(|(_, reply)| reply).map_err(|error| error.in_other_call(&self.call))
    }

    /// Returns the channel to the thread of another rank.
    fn channel(&mut self, rank: usize) -> &mut Engine {
        self.to[rank].as_mut().expect("every other rank has a thread")
    }
}

impl<M> Drop for WindowService<M> {
    fn drop(&mut self) {
        let Some(RunningThread { task, .. }) = self.running.take() else { return };
        let is_panicking = std::thread::panicking();
        let cause = if is_panicking { Cause::Panicked } else { Cause::gave_up(DROPPED) };
        if let Some(engine) = self.to.iter_mut().flatten().next() {
            engine.transport.abort(cause);
        }
        if !is_panicking {
            // The abort ends the thread's wait.
            let _ended = task.join();
        }
    }
}

const DROPPED: &str = "its window was dropped before it was closed";

/// The thread that serves requests.
struct WindowServer<M> {
    engine: Box<Engine>,
    memory: Arc<M>,
    /// For each rank `true` if it makes no more requests in this epoch.
    ended: Vec<bool>,
    settings: Settings,
    runtime: Runtime,
}

impl<M: ServedMemory> WindowServer<M> {
    /// Serves requests until every other rank has ended the epoch. Returns the channel.
    fn run(mut self) -> Result<Box<Engine>> {
        let requests = self.settings.with_tag(REQUEST).with_timeout(IDLE);
        let replies = self.settings.with_tag(REPLY);
        while self.ended.contains(&false) {
            let options = CallOptions::new(&requests, &self.runtime);
            let (from, message) = self.engine.receive_vec::<u8>(None, &options)?;
            let Some((request, reply)) = self.serve(&message) else {
                let error = Error::Request { from };
                self.engine.transport.abort(Cause::gave_up(&error));
                return Err(error);
            };
            if !matches!(request, WindowRequest::Put { .. }) {
                self.engine.send(&reply, from, &CallOptions::new(&replies, &self.runtime))?;
            }
            if matches!(request, WindowRequest::End) {
                self.ended[from] = true;
            }
        }
        Ok(self.engine)
    }

    /// Serves an encoded request. Returns the reply; `None` if the request is invalid.
    fn serve(&self, message: &[u8]) -> Option<(WindowRequest, Vec<u8>)> {
        let (request, payload) = WindowRequest::decode(message)?;
        let reply = match request {
            WindowRequest::End => Vec::new(),
            _ => self.memory.serve(request, payload)?,
        };
        Some((request, reply))
    }
}

/// The buffer of an epoch of updates.
pub(crate) struct ServedUpdates<T>(pub(crate) Mutex<Buffer<T>>);

impl<T> ServedUpdates<T> {
    pub(crate) fn into_buffer(self) -> Buffer<T> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Pod + Send + Sync> ServedMemory for ServedUpdates<T> {
    fn serve(&self, request: WindowRequest, payload: &[u8]) -> Option<Vec<u8>> {
        let mut buffer = lock(&self.0);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut buffer);
        match request {
            WindowRequest::Put { start } => {
                part_mut(bytes, start, payload.len() as u64)?.copy_from_slice(payload);
                Some(Vec::new())
            }
            WindowRequest::Update { start, update } => {
                let size = WordSize::of_element(size_of::<T>());
                let word = part_mut(bytes, start, size.bytes() as u64)?;
                let mut before = [0; 8];
                before[..word.len()].copy_from_slice(word);
                let after = update.apply(u64::from_le_bytes(before), size).to_le_bytes();
                word.copy_from_slice(&after[..size.bytes()]);
                Some(before.to_vec())
            }
            WindowRequest::Read { .. } | WindowRequest::End => None,
        }
    }
}

/// The buffer of an epoch in which ranks read.
pub(crate) struct ServedReads<T>(pub(crate) Buffer<T>);

impl<T: Pod + Send + Sync> ServedMemory for ServedReads<T> {
    fn serve(&self, request: WindowRequest, _: &[u8]) -> Option<Vec<u8>> {
        let WindowRequest::Read { start, bytes } = request else { return None };
        let all: &[u8] = bytemuck::cast_slice(&self.0[..]);
        let (start, bytes) = (usize::try_from(start).ok()?, usize::try_from(bytes).ok()?);
        Some(all.get(start..start.checked_add(bytes)?)?.to_vec())
    }
}

fn part_mut(all: &mut [u8], start: u64, bytes: u64) -> Option<&mut [u8]> {
    let (start, bytes) = (usize::try_from(start).ok()?, usize::try_from(bytes).ok()?);
    all.get_mut(start..start.checked_add(bytes)?)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
