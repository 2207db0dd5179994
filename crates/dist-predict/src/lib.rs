//! Predicts the duration of a schedule on a described network.
//!
//! The steps are those that [`dist_algos::run`](dist_algos::run()) executes. Nothing is sent: only simulated clocks
//! advance. There are three methods, and [`predict`] chooses between them:
//!
//! - [`symmetric`]: one rank stands for all. It applies if every rank does the same and all links are alike. For a
//!   ring over 10⁶ ranks it takes 2·10⁶ steps, not 2·10¹².
//! - [`wavefront`]: one clock per rank, advanced in any order that produces messages before they are needed. It
//!   applies if ranks, hosts or links differ. Its memory grows with the ranks and the messages in flight.
//! - [`queues`]: events in the order of time. It applies if messages or ranks share resources: the links of hosts
//!   and racks, and cores.
//!
//! The model:
//!
//! - A rank is busy for [`MessageCosts::send`] and [`MessageCosts::sent`] or [`MessageCosts::receive`] with each
//!   message, and for [`MessageCosts::byte`] with each byte that it sends or receives.
//! - It is busy for [`MessageCosts::reduce`] with each byte that it reduces or copies, while more data may be in
//!   flight. If ranks [share memory](MessageCosts::shared), only the longer of the two counts.
//! - A link transmits one message after the other with [`LinkModel::byte`] per byte, and delivers it
//!   [`LinkModel::latency`] later.
//! - A send is over when its last byte has left; it does not wait for its receiver.
//! - Messages that leave a host at the same time for several others [share its
//!   link](NetworkModel::with_shared_uplinks), as TCP connections do. The same holds for messages that leave a
//!   [rack](NetworkModel::in_racks_of).
//!
//! All times are in seconds.
//!
//! ```
//! use dist_algos::{Partition, ring};
//! use dist_predict::{LinkModel, MessageCosts, Method, NetworkModel, Workload, predict};
//!
//! let world_size = 1_000_000;
//! let ten_gigabit = LinkModel { latency: 25e-6, byte: 0.8e-9 };
//! let work = MessageCosts { send: 2e-6, receive: 2e-6, byte: 0.1e-9, reduce: 0.1e-9, ..MessageCosts::NONE };
//! let network = NetworkModel::new(world_size, ten_gigabit, work);
//! // A gather of 4 MB, 4 bytes from every rank.
//! let buffer = Partition::new(world_size, 4, world_size).unwrap();
//! let prediction = predict(&Workload { steps: ring::all_gather, buffer, input: None }, &network)?;
//! assert_eq!(prediction.engine, Method::Symmetric);
//! assert!((29.0..30.0).contains(&prediction.seconds));
//! # Ok::<(), dist_predict::Error>(())
//! ```

mod clock;
mod error;
mod events;
mod links;
mod message_queues;
mod network;
mod queues;
mod symmetric;
mod wavefront;

use dist_algos::{Chunks, Partition, SendHalf, Source, Step};
use dist_transport::Rank;

pub use error::{Error, Result};
pub use network::{LinkModel, MessageCosts, NetworkModel, Straggler};
pub use queues::{QUEUE_STEPS_MAX, queues, timeline};
pub use symmetric::symmetric;
pub use wavefront::wavefront;

/// A schedule for every rank, and the sizes of its data.
#[derive(Clone, Copy, Debug)]
pub struct Workload<'a, F> {
    /// The function that returns the steps of a rank.
    pub steps: F,
    /// The partition of each rank's buffer.
    pub buffer: Partition<'a>,
    /// The partition of the input, if steps send from one.
    pub input: Option<Partition<'a>>,
}

/// The result of a prediction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// The time from the start to the end of the last rank.
    pub seconds: f64,
    /// The method of the prediction.
    pub engine: Method,
    /// Bytes that the busiest rank sends.
    pub sent_max: u64,
    /// Bytes that all ranks send together.
    pub sent_total: u64,
    /// Bytes that leave the busiest host for other hosts.
    pub host_sent_max: u64,
}

/// A method of prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// One rank stands for all.
    Symmetric,
    /// One clock per rank.
    Wavefront,
    /// Events in the order of time.
    Queues,
}

impl Method {
    /// Returns the name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Symmetric => "symmetric",
            Self::Wavefront => "wavefront",
            Self::Queues => "queues",
        }
    }
}

/// Maximum number of steps of all ranks together for methods that follow each of them.
pub const STEPS_MAX: u64 = 500_000_000;

/// Minimum number of ranks for the symmetric method. With fewer ranks, each is followed to the last element.
const SYMMETRIC_RANKS_MIN: usize = 512;

/// Predicts the duration of the schedules that `plan` has for the ranks of a network.
///
/// # Errors
/// If the schedules do not fit together, or if more than [`STEPS_MAX`] steps have to be followed. If ranks share
/// resources, the limit is [`QUEUE_STEPS_MAX`].
pub fn predict<F, I>(plan: &Workload<'_, F>, network: &NetworkModel) -> Result<Prediction>
where
    F: Fn(Rank) -> I,
    I: Iterator<Item = Step>,
{
    if network.is_shared() {
        return queues(plan, network);
    }
    if network.world_size() >= SYMMETRIC_RANKS_MIN
        && let Some(prediction) = symmetric(plan, network)
    {
        return Ok(prediction);
    }
    wavefront(plan, network)
}

impl<F> Workload<'_, F> {
    /// Returns the partition of the memory that is sent from.
    fn cut_of(&self, send: &SendHalf) -> &Partition<'_> {
        match send.of {
            Source::Buffer => &self.buffer,
            Source::Input => self.input.as_ref().unwrap_or(&self.buffer),
        }
    }

    /// Returns the number of bytes of chunks that are sent.
    fn bytes_sent(&self, send: &SendHalf) -> u64 {
        bytes(self.cut_of(send), send.chunks)
    }

    /// Returns the number of bytes of chunks of the buffer.
    fn bytes(&self, chunks: Chunks) -> u64 {
        bytes(&self.buffer, chunks)
    }
}

/// Maximum number of runs of chunks that are measured one by one. More runs are assumed to hold their share of the
/// buffer.
const RUNS_EXACT_MAX: usize = 64;

fn bytes(partition: &Partition<'_>, chunks: Chunks) -> u64 {
    if chunks.is_contiguous() || chunks.len() <= RUNS_EXACT_MAX {
        return partition.bytes_of(chunks) as u64;
    }
    let share = chunks.len() as u128 * partition.bytes() as u128 / partition.parts() as u128;
    u64::try_from(share).unwrap_or(u64::MAX)
}
