//! Runs the conformance suite on the transports of this crate.
#![cfg(feature = "sim")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::time::Duration;

use dist_transport::conformance::{Fabric, TransportProgram};
#[cfg(all(feature = "shm", target_os = "linux"))]
use dist_transport::process::WithSharedMemory;
#[cfg(feature = "tcp")]
use dist_transport::process::{Config, Coordinator, Medium, ProcessTransport};
use dist_transport::shm_group::Reach;
use dist_transport::sim;
use dist_transport::{Runtime, Transport};

/// The in-process network in virtual time, in several interleavings.
struct Simulated;

impl Fabric for Simulated {
    fn shared_memory(&self) -> Option<Reach> {
        None
    }

    fn run(&self, run: u64, world_size: usize, program: TransportProgram) {
        let outcome = sim::run(run, world_size, move |transport| program(Box::new(transport)));
        assert_eq!(outcome.results.len(), world_size);
    }

    fn runs(&self) -> u64 {
        8
    }

    fn short(&self) -> Duration {
        Duration::from_secs(59)
    }
}

/// The same with shared memory.
struct SimulatedMemory;

impl Fabric for SimulatedMemory {
    fn shared_memory(&self) -> Option<Reach> {
        Some(Reach::Write)
    }

    fn run(&self, run: u64, world_size: usize, program: TransportProgram) {
        let jitter = Duration::from_micros(1);
        let link = sim::Link::new(Duration::from_micros(1), 10_000_000_000).with_jitter(jitter);
        let network =
            sim::Network::new(world_size).with_seed(run).with_memory_link(link).with_shared_memory();
        let outcome = network.run(move |transport| program(Box::new(transport)));
        assert_eq!(outcome.results.len(), world_size);
    }

    fn runs(&self) -> u64 {
        4
    }

    fn short(&self) -> Duration {
        Duration::from_secs(59)
    }
}

/// The same with links that cost time, and finite buffers.
struct SimulatedLinks;

impl Fabric for SimulatedLinks {
    fn shared_memory(&self) -> Option<Reach> {
        None
    }

    fn run(&self, run: u64, world_size: usize, program: TransportProgram) {
        let jitter = Duration::from_micros(50);
        let link = sim::Link::new(Duration::from_micros(20), 1_000_000_000).with_jitter(jitter);
        let network = sim::Network::new(world_size).with_seed(run).with_memory_link(link).with_window(4096);
        let outcome = network.run(move |transport| program(Box::new(transport)));
        assert_eq!(outcome.results.len(), world_size);
    }

    fn runs(&self) -> u64 {
        4
    }

    fn short(&self) -> Duration {
        Duration::from_secs(59)
    }
}

/// The in-process network between threads of the system.
struct Threads;

impl Fabric for Threads {
    fn shared_memory(&self) -> Option<Reach> {
        None
    }

    fn run(&self, _: u64, world_size: usize, program: TransportProgram) {
        let network = sim::network(&Runtime::system(), world_size);
        run_threads(
            network.into_iter().map(|rank| move || -> Box<dyn Transport> { Box::new(rank) }),
            &program,
        );
    }
}

/// A world of threads that are connected like processes. The number is that of the sockets for each peer.
#[cfg(feature = "tcp")]
struct Processes(Medium, Reach, usize);

#[cfg(feature = "tcp")]
impl Fabric for Processes {
    fn shared_memory(&self) -> Option<Reach> {
        (self.0 == Medium::Shm).then_some(self.1)
    }

    fn run(&self, _: u64, world_size: usize, program: TransportProgram) {
        let coordinator = Coordinator::start("127.0.0.1:0", world_size, "suite", None).unwrap();
        let address = coordinator.address().to_string();
        let joins = (0..world_size).map(|rank| {
            let config = Config::new(rank, world_size, &address).unwrap();
            let config = config.with_job("suite").with_external_coordinator();
            let config = config.with_timeout(Duration::from_secs(60)).with_medium(self.0).with_reach(self.1);
            let config = config.with_sockets_per_peer(self.2);
            move || -> Box<dyn Transport> { Box::new(ProcessTransport::join(&config).unwrap()) }
        });
        run_threads(joins, &program);
    }
}

/// Runs each rank on its own thread, where it joins first.
fn run_threads<J: FnOnce() -> Box<dyn Transport> + Send + 'static>(
    joins: impl Iterator<Item = J>,
    program: &TransportProgram,
) {
    let runtime = Runtime::system();
    let start = |join: J| {
        let program = program.clone();
        runtime.spawn("rank", move || program(join())).unwrap()
    };
    let tasks: Vec<_> = joins.map(start).collect();
    for result in tasks.into_iter().map(|task| task.join()).collect::<Vec<_>>() {
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
}

mod simulated {
    dist_transport::conformance!(super::Simulated);
}

mod simulated_memory {
    dist_transport::conformance!(super::SimulatedMemory);
}

mod simulated_links {
    dist_transport::conformance!(super::SimulatedLinks);
}

/// A world of threads that have shared memory in addition to another transport's messages.
#[cfg(all(feature = "shm", target_os = "linux"))]
struct MemoryBeside;

#[cfg(all(feature = "shm", target_os = "linux"))]
impl Fabric for MemoryBeside {
    fn shared_memory(&self) -> Option<Reach> {
        Some(Reach::Write)
    }

    fn run(&self, run: u64, world_size: usize, program: TransportProgram) {
        self.run_on(run, &vec![0; world_size], program);
    }

    fn run_on(&self, _: u64, hosts: &[u64], program: TransportProgram) {
        let network = sim::Network::new(hosts.len()).with_hosts(hosts).connect(&Runtime::system());
        let joins = network.into_iter().map(|messages| {
            move || -> Box<dyn Transport> {
                let due = messages.runtime().deadline(Duration::from_secs(60)).into();
                Box::new(WithSharedMemory::join(messages, &due).unwrap())
            }
        });
        run_threads(joins, &program);
    }
}

#[cfg(all(feature = "shm", target_os = "linux"))]
mod memory_beside {
    dist_transport::conformance!(super::MemoryBeside);
}

mod threads {
    dist_transport::conformance!(super::Threads);
}

#[cfg(feature = "tcp")]
mod tcp {
    dist_transport::conformance!(super::Processes(super::Medium::Tcp, super::Reach::Write, 1));
}

/// Messages of several segments go over three sockets.
#[cfg(feature = "tcp")]
mod tcp_with_three_sockets {
    dist_transport::conformance!(super::Processes(super::Medium::Tcp, super::Reach::Write, 3));
}

#[cfg(all(feature = "shm", target_os = "linux"))]
mod shm {
    dist_transport::conformance!(super::Processes(super::Medium::Shm, super::Reach::Write, 1));
}

/// The system does not let processes access each other's memory, or only lets them read it.
#[cfg(all(feature = "shm", target_os = "linux"))]
mod shm_within_limits {
    use dist_transport::conformance;

    use super::{Medium, Processes, Reach};

    const EXPOSED: &str = "exposed::memory_that_is_exposed_is_read_and_written";

    #[test]
    fn memory_that_is_exposed_is_out_of_reach_but_for_the_heap() {
        conformance::check(EXPOSED, &Processes(Medium::Shm, Reach::Slots, 1));
    }

    #[test]
    fn memory_that_is_exposed_is_read_only_but_for_the_heap() {
        conformance::check(EXPOSED, &Processes(Medium::Shm, Reach::Read, 1));
    }
}
