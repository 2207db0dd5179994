//! A network of threads in one process, and a scheduler that runs them in virtual time.
//!
//! [`network`] connects the threads of any [`Runtime`]. [`run`] runs a program once per rank
//! under a simulated one, and [`Network`] does so with links that take their time. Every rank and every task that it spawns is a thread, exactly one runs at a time, and
//! the next is chosen by a generator that the seed begins: the seed is the whole reproduction. When all
//! wait, the clock jumps to the earliest deadline, so a timeout of a minute takes microseconds; computing takes
//! no virtual time.
//!
//! Whoever holds a lock while it parks, unparks, yields, spawns, sends or receives, or waits in any other way than
//! through the runtime, stops the simulation: the running thread waits for one that cannot run. `run` reports
//! that after two minutes, and leaves its threads behind.
//!
//! ```
//! use std::time::Duration;
//! use dist_transport::{Incoming, Sink, Transport, sim};
//!
//! let outcome = sim::run(7, 2, |mut transport| {
//!     let deadline = transport.runtime().deadline(Duration::from_secs(60));
//!     let mut byte = [0];
//!     let peer = 1 - transport.rank().index();
//!     let receive = Incoming { from: peer, len: 1, sink: Sink::Into(&mut byte) };
//!     transport.exchange(None, Some(receive), &deadline.into()).is_err_and(|error| error.peer().is_some())
//! });
//! assert_eq!(outcome.results, [true, true]);
//! assert_eq!(outcome.elapsed, Duration::from_secs(60));
//! ```

mod builder;
mod clock;
mod control;
mod fabric;
mod fault;
mod fault_injector;
mod link;
mod message;
mod network_conditions;
mod random;
mod report;
mod scheduler;
mod shm_group;
mod state;
mod transport;
mod waiting;
mod world;

use std::time::Duration;

pub use builder::{Failed, Network};
pub use fault::{Fault, Ways, When};
pub use link::Link;
pub use transport::SimTransport;

use crate::Runtime;

/// What a simulated run ended with.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Outcome<T> {
    /// What each rank's program returned, in rank order.
    pub results: Vec<T>,
    /// How long the run took by its virtual clock.
    pub elapsed: Duration,
    /// A hash of everything that the scheduler decided and when: equal for equal interleavings.
    pub trace_hash: u64,
    /// How often another thread was given the turn.
    pub switches: u64,
    /// How many operations, which are exchanges, each rank has begun on its transports.
    pub operations: Vec<u64>,
    /// The faults that happened, and when.
    pub faults: Vec<String>,
    /// What every rank waited for when the job was aborted, a line each; empty if it was not.
    pub waits: Vec<String>,
}

/// Runs `program` once per rank, over an in-process network in virtual time, in an order that `seed` decides.
///
/// The run ends when every rank's program has returned, and every task that can go on without the clock
/// moving has ended; tasks that still wait for a deadline are made to unwind.
///
/// # Panics
/// If the world size is 0. With a report that begins with the seed, if a rank panics, if threads wait without a deadline and nobody can
/// wake them (it says which), if all do nothing but yield, or if a thread stops the simulation by waiting outside
/// of the runtime.
pub fn run<T: Send + 'static>(
    seed: u64,
    world_size: usize,
    program: impl Fn(SimTransport) -> T + Send + Sync + 'static,
) -> Outcome<T> {
    Network::new(world_size).with_seed(seed).run(program)
}

/// The in-process network without any cost: one [`Transport`](crate::Transport) per rank, in rank order, over the
/// system's or a simulated runtime.
///
/// # Panics
/// If the world size is 0.
pub fn network(runtime: &Runtime, world_size: usize) -> Vec<SimTransport> {
    Network::new(world_size).connect(runtime)
}

#[cfg(test)]
mod fault_tests;
#[cfg(test)]
mod network_tests;
#[cfg(test)]
mod tests;
