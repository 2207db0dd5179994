//! How long a schedule takes on a network that need not exist.
//!
//! The steps are those that [`run`](crate::run()) does; nothing is sent, and only clocks are kept. Three engines do
//! it, and [`predict`] chooses between them:
//!
//! - [`symmetric`]: one rank stands for all. For schedules in which every rank does the same, on links that are
//!   alike: a ring over 10⁶ ranks is 2·10⁶ steps, not 2·10¹².
//! - [`wavefront`]: one clock per rank, in any order that lets messages come before they are needed. For slow ranks,
//!   hosts and links that differ, in memory for the ranks and what is on its way.
//! - [`queues`]: events in the order of time. For what messages and ranks share: the links of hosts and racks, and cores.
//!
//! The model: a rank is busy for [`MessageCosts::send`] and [`MessageCosts::sent`] or [`MessageCosts::receive`] with each message, for [`MessageCosts::byte`] with each byte
//! that it sends or receives, and for [`MessageCosts::reduce`] with each byte that it reduces or copies, while more may be on its
//! way; where ranks [share memory](Work::shared) with the longer of the two. A link
//! lets one message after the other through at [`LinkModel::byte`] per byte and delivers it [`LinkModel::latency`] later. A
//! send is over when its last byte has left; it does not wait for its receiver. Messages that leave a host at once for
//! several others [share its link](Network::with_shared_uplinks), as TCP connections do, and so do those that leave a
//! [rack](Network::in_racks_of). All times are in seconds.
//!
//! ```
//! use dist_algos::predict::{Method, LinkModel, NetworkModel, Workload, MessageCosts, predict};
//! use dist_algos::{Partition, ring};
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
//! # Ok::<(), dist_algos::Error>(())
//! ```

mod clock;
mod events;
mod links;
mod message_queues;
mod network;
mod queues;
mod symmetric;
mod wavefront;

use dist_transport::Rank;

use crate::{Chunks, Partition, Result, SendHalf, Source, Step};

pub use network::{LinkModel, MessageCosts, NetworkModel, Straggler};
pub use queues::{QUEUE_STEPS_MAX, queues, timeline};
pub use symmetric::symmetric;
pub use wavefront::wavefront;

/// A schedule for every rank, and the sizes of what it moves.
#[derive(Clone, Copy, Debug)]
pub struct Workload<'a, F> {
    /// The steps of a rank.
    pub steps: F,
    /// How the buffer of each rank is cut.
    pub buffer: Partition<'a>,
    /// How the input is cut, where steps send from one.
    pub input: Option<Partition<'a>>,
}

/// What was found out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// From the start to the end of the last rank.
    pub seconds: f64,
    /// Who found it out.
    pub engine: Method,
    /// Bytes that the busiest rank sends.
    pub sent_max: u64,
    /// Bytes that all ranks send together.
    pub sent_total: u64,
    /// Bytes that leave the host that most leave, for other hosts.
    pub host_sent_max: u64,
}

/// A way to predict.
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
    /// The name in tables and lines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Symmetric => "symmetric",
            Self::Wavefront => "wavefront",
            Self::Queues => "queues",
        }
    }
}

/// Steps of all ranks together, beyond which an engine that follows each of them gives up.
pub const STEPS_MAX: u64 = 500_000_000;

/// From this number of ranks on, one may stand for all. Below, each is followed to the last element.
const SYMMETRIC_RANKS_MIN: usize = 512;

/// Predicts how long the schedules take that `plan` has for the ranks of a network.
///
/// # Errors
/// If the schedules do not fit together, or have more than [`STEPS_MAX`] steps that have to be followed, where ranks
/// share something [`QUEUE_STEPS_MAX`].
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
    /// How the memory is cut that is sent from.
    fn cut_of(&self, send: &SendHalf) -> &Partition<'_> {
        match send.of {
            Source::Buffer => &self.buffer,
            Source::Input => self.input.as_ref().unwrap_or(&self.buffer),
        }
    }

    /// Bytes of chunks that are sent.
    fn bytes_sent(&self, send: &SendHalf) -> u64 {
        bytes(self.cut_of(send), send.chunks)
    }

    /// Bytes of chunks of the buffer.
    fn bytes(&self, chunks: Chunks) -> u64 {
        bytes(&self.buffer, chunks)
    }
}

/// Runs that are measured one by one. More than that get their share of the buffer.
const RUNS_EXACT_MAX: usize = 64;

fn bytes(partition: &Partition<'_>, chunks: Chunks) -> u64 {
    if chunks.is_contiguous() || chunks.len() <= RUNS_EXACT_MAX {
        return partition.bytes_of(chunks) as u64;
    }
    let share = chunks.len() as u128 * partition.bytes() as u128 / partition.parts() as u128;
    u64::try_from(share).unwrap_or(u64::MAX)
}
