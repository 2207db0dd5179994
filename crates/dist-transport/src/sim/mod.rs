//! A simulated network: threads in one process, and a scheduler that runs them in virtual time.
//!
//! [`network`] connects the threads of any [`Runtime`]. [`run`] runs a program once per rank in virtual time,
//! and [`Network`] does so with links that cost time. Every rank, and every task that it spawns, is a thread.
//! Exactly one runs at a time, and a seeded generator chooses the next: the seed reproduces the whole run.
//! When all threads wait, the clock jumps to the earliest deadline, so a timeout of a minute takes
//! microseconds. Computing takes no virtual time.
//!
//! A thread must not hold a lock while it parks, unparks, yields, spawns, sends or receives. It must also not
//! wait in any other way than through the runtime. Otherwise the running thread waits for one that cannot
//! run, and the simulation stops. `run` reports that after two minutes, and leaves its threads behind.
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
mod sim_shm_group;
mod state;
mod store;
mod transport;
mod waiting;
mod world;

use std::time::Duration;

pub use builder::{Network, SimulationError};
pub use fault::{Directions, Fault, When};
pub use link::Link;
pub use transport::SimTransport;

use crate::Runtime;

/// The result of a simulated run.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Outcome<T> {
    /// The return values of the ranks' programs, in rank order.
    pub results: Vec<T>,
    /// The length of the run by its virtual clock.
    pub elapsed: Duration,
    /// A hash of all decisions of the scheduler and their times: equal for equal interleavings.
    pub trace_hash: u64,
    /// The number of switches from one thread to another.
    pub switches: u64,
    /// The number of operations (exchanges) that each rank has begun on its transports.
    pub operations: Vec<u64>,
    /// The faults that happened, with their times.
    pub faults: Vec<String>,
    /// The wait of every rank when the job was aborted, one line each; empty if it was not.
    pub waits: Vec<String>,
}

/// Runs `program` once per rank, over an in-process network in virtual time, in an order that depends on
/// `seed`.
///
/// The run ends when every rank's program has returned, and every task that can run without the clock moving
/// has ended. Tasks that still wait for a deadline unwind.
///
/// # Panics
/// If the world size is 0. The other panics begin with the seed: if a rank panics, if threads wait without a
/// deadline and no thread can wake them, if all threads only yield, or if a thread stops the simulation by
/// waiting outside the runtime.
pub fn run<T: Send + 'static>(
    seed: u64,
    world_size: usize,
    program: impl Fn(SimTransport) -> T + Send + Sync + 'static,
) -> Outcome<T> {
    Network::new(world_size).with_seed(seed).run(program)
}

/// Creates the in-process network without any cost: one [`Transport`](crate::Transport) per rank, in rank
/// order, on the system's runtime or a simulated one.
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
