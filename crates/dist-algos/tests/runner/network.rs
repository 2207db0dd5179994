//! The networks for tests of the runner.

use std::sync::Arc;
use std::time::Duration;

use dist_algos::RingTransport;
use dist_transport::sim::{self, SimTransport};
use dist_transport::{
    Combine, Deadline, Incoming, LazyDeadline, Outgoing, Rank, Runtime, Traffic, Transport,
};

use crate::link::{self, Link, LinkError};

/// A kind of network.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Network {
    /// Threads and [`Link`]s, with the default exchange in place.
    Mailboxes,
    /// The simulated network; the seed decides who runs when.
    Simulated { seed: u64 },
}

/// One rank's end of either.
pub(crate) enum End {
    Link(Link),
    Simulated(Box<SimTransport>),
}

/// The error of either network.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EndError {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Simulated(#[from] dist_transport::Error),
}

impl Network {
    /// Returns the result of `program` on each rank, in rank order.
    pub(crate) fn run<T: Send + 'static>(
        self,
        world_size: usize,
        program: impl Fn(&mut End, Deadline) -> T + Send + Sync + 'static,
    ) -> Vec<T> {
        let limit = Duration::from_secs(20);
        match self {
            Self::Simulated { seed } => {
                let program = move |transport: SimTransport| {
                    let deadline = transport.runtime().deadline(limit);
                    program(&mut End::Simulated(Box::new(transport)), deadline)
                };
                sim::run(seed, world_size, program).results
            }
            Self::Mailboxes => {
                let (runtime, program) = (Runtime::system(), Arc::new(program));
                let deadline = runtime.deadline(limit);
                let start = |link| {
                    let program = program.clone();
                    let task = move || program(&mut End::Link(link), deadline);
                    runtime.spawn("rank", task).expect("a thread")
                };
                let tasks: Vec<_> = link::network(&runtime, world_size).into_iter().map(start).collect();
                tasks.into_iter().map(|task| task.join().expect("no rank panics")).collect()
            }
        }
    }
}

impl End {
    pub(crate) fn traffic(&self) -> Traffic {
        match self {
            Self::Link(link) => link.traffic(),
            Self::Simulated(transport) => transport.traffic(),
        }
    }
}

impl RingTransport for End {
    type Error = EndError;

    fn rank(&self) -> Rank {
        match self {
            Self::Link(link) => RingTransport::rank(link),
            Self::Simulated(transport) => RingTransport::rank(&**transport),
        }
    }

    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<(), EndError> {
        match self {
            Self::Link(link) => Ok(RingTransport::exchange(link, send, receive, due)?),
            Self::Simulated(transport) => Ok(RingTransport::exchange(&mut **transport, send, receive, due)?),
        }
    }

    fn exchange_in_place(
        &mut self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<(), EndError> {
        match self {
            Self::Link(link) => Ok(link.exchange_in_place(peer, buffer, combine, due)?),
            Self::Simulated(transport) => {
                Ok(RingTransport::exchange_in_place(&mut **transport, peer, buffer, combine, due)?)
            }
        }
    }

    fn exchange_all(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        due: &LazyDeadline<'_>,
    ) -> Result<(), EndError> {
        match self {
            Self::Link(link) => Ok(link.exchange_all(sends, receives, due)?),
            Self::Simulated(transport) => {
                Ok(RingTransport::exchange_all(&mut **transport, sends, receives, due)?)
            }
        }
    }
}
