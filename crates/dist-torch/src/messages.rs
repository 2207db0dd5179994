//! [`MessageStreams`]: the streams of the messages between this rank and the other ranks of a group.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use dist_collectives::{Communicator, Element};

use crate::error::Failure;
use crate::owned_by_process::OwnedByProcess;
use crate::stream::{Stream, lock};

/// A fork of a group's communicator, on which smaller groups are made, and through which another thread aborts the job.
pub(crate) type Parent = Mutex<OwnedByProcess<Communicator>>;

/// The streams of the messages to each rank and from each rank.
///
/// Every direction between two ranks has a stream of its own, so that no message waits for one of another rank. A stream
/// is made at its first message. Its communicator has two ranks, and the sender is rank 0 of it.
pub(crate) struct MessageStreams {
    parent: Arc<Parent>,
    rank: usize,
    sends: Mutex<Vec<Option<Arc<Stream>>>>,
    receives: Mutex<Vec<Option<Arc<Stream>>>>,
    /// The stream of the receives from any source.
    any_source: Mutex<Option<Arc<Stream>>>,
    /// The rank at which the next receive from any source begins to look.
    next_source: Arc<AtomicUsize>,
}

impl MessageStreams {
    pub(crate) fn new(parent: Arc<Parent>, rank: usize, world_size: usize) -> Self {
        Self {
            parent,
            rank,
            sends: Mutex::new(vec![None; world_size]),
            receives: Mutex::new(vec![None; world_size]),
            any_source: Mutex::default(),
            next_source: Arc::default(),
        }
    }

    /// Returns the stream of the messages to this rank.
    pub(crate) fn sends_to(&self, peer: usize) -> Result<Arc<Stream>, Failure> {
        self.get(&self.sends, peer, [self.rank, peer])
    }

    /// Returns the stream of the messages from this rank.
    pub(crate) fn receives_from(&self, peer: usize) -> Result<Arc<Stream>, Failure> {
        self.get(&self.receives, peer, [peer, self.rank])
    }

    /// Returns the stream of the receives from any source, and the sources of one of them.
    pub(crate) fn receives_from_any(&self) -> Result<(Arc<Stream>, AnySource), Failure> {
        let ranks = lock(&self.receives).len();
        if ranks == 1 {
            return Err(Failure::arguments("a group of one rank has no other rank to receive from"));
        }
        let others = (0..ranks).filter(|&peer| peer != self.rank);
        let streams =
            others.map(|peer| Ok((peer, self.receives_from(peer)?))).collect::<Result<_, Failure>>()?;
        let mut any_source = lock(&self.any_source);
        let stream = match &*any_source {
            Some(stream) => Arc::clone(stream),
            None => any_source.insert(self.make(&[self.rank])?).clone(),
        };
        let sources = AnySource { streams, next: Arc::clone(&self.next_source), sender: Arc::default() };
        Ok((stream, sources))
    }

    fn get(
        &self,
        streams: &Mutex<Vec<Option<Arc<Stream>>>>,
        peer: usize,
        members: [usize; 2],
    ) -> Result<Arc<Stream>, Failure> {
        let mut streams = lock(streams);
        let ranks = streams.len();
        match streams.get_mut(peer).filter(|_| peer != self.rank) {
            Some(Some(stream)) => Ok(Arc::clone(stream)),
            Some(none) => Ok(Arc::clone(none.insert(self.make(&members)?))),
            None => Err(Failure::arguments(format!(
                "rank {peer} is this rank itself or outside a group of {ranks}"
            ))),
        }
    }

    /// Makes a stream of a group of these members. Only they make it.
    fn make(&self, members: &[usize]) -> Result<Arc<Stream>, Failure> {
        match lock(&self.parent).get() {
            Some(parent) => Ok(Stream::new(parent.subgroup_local(members, 0)?)),
            None => Err(Failure::destroyed()),
        }
    }

    /// Ends all streams.
    pub(crate) fn close(&self) {
        for streams in [&self.sends, &self.receives] {
            let streams: Vec<_> = lock(streams).iter().flatten().cloned().collect();
            streams.iter().for_each(|stream| stream.close());
        }
        let any_source = lock(&self.any_source).clone();
        any_source.iter().for_each(|stream| stream.close());
    }
}

/// The ranks from which a receive takes the first message.
pub(crate) struct AnySource {
    streams: Vec<(usize, Arc<Stream>)>,
    next: Arc<AtomicUsize>,
    sender: Arc<OnceLock<usize>>,
}

impl AnySource {
    /// Returns the cell that has the sender once the message was received.
    pub(crate) fn sender(&self) -> Arc<OnceLock<usize>> {
        Arc::clone(&self.sender)
    }

    /// Receives a message with this tag from the first rank that has sent one. A rank from which the program receives
    /// by name at this moment is left out until that receive is done.
    pub(crate) fn receive<T: Element>(
        &self,
        comm: &mut Communicator,
        buffer: &mut [T],
        tag: u32,
    ) -> Result<(), Failure> {
        let runtime = comm.runtime().clone();
        let deadline = runtime.deadline(comm.timeout());
        for round in 0_usize.. {
            let first = self.next.load(Ordering::Relaxed);
            for index in 0..self.streams.len() {
                let (rank, stream) = &self.streams[(first + index) % self.streams.len()];
                let limit = runtime.remaining(deadline);
                if stream.with_idle(|comm| receive_arrived(comm, buffer, tag, limit)).unwrap_or(Ok(false))? {
                    self.next.store(first + index + 1, Ordering::Relaxed);
                    let _ = self.sender.set(*rank);
                    return Ok(());
                }
            }
            if self.streams.iter().any(|(_, stream)| stream.is_closed()) {
                return Err(Failure::destroyed());
            }
            if runtime.expired(deadline) {
                break;
            }
            if round > POLLS_BEFORE_SLEEP {
                runtime.sleep(POLL);
            } else {
                std::thread::yield_now();
            }
        }
        let ranks: Vec<String> = self.streams.iter().map(|(rank, _)| rank.to_string()).collect();
        let why = format!(
            "receiving tag {tag} from any source: none of the ranks [{}] sent a message with this tag within {:?}; if \
             they only need longer, set a longer timeout",
            ranks.join(", "),
            comm.timeout()
        );
        // As after every deadline, the other ranks learn why, and do not wait for this one.
        comm.abort(&why);
        Err(Failure::timed_out(format!("dist: Timed out waiting: {why}")))
    }
}

impl fmt::Debug for AnySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnySource").field("ranks", &self.streams.len()).finish_non_exhaustive()
    }
}

/// The number of looks for a message from any source before a receive sleeps between two looks.
const POLLS_BEFORE_SLEEP: usize = 100;

/// The time between two looks.
const POLL: Duration = Duration::from_micros(50);

/// Receives a message with this tag, if one has arrived. Returns `true` if so.
fn receive_arrived<T: Element>(
    comm: &mut Communicator,
    buffer: &mut [T],
    tag: u32,
    limit: Duration,
) -> Result<bool, Failure> {
    comm.set_timeout(limit);
    match comm.with_tag(tag).try_probe(SENDER)? {
        Some(message) => message.recv(buffer)?,
        None => return Ok(false),
    }
    Ok(true)
}

/// The ranks of the communicator of a stream of messages.
pub(crate) const SENDER: usize = 0;
pub(crate) const RECEIVER: usize = 1;
