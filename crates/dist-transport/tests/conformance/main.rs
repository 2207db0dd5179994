//! What every transport promises, checked of those of this crate.
#![cfg(all(feature = "sim", feature = "shm", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::time::Duration;

use dist_transport::conformance::{Fabric, Program};
use dist_transport::sim;
use dist_transport::tcp::{Config, Coordinator, Medium, TcpTransport};
use dist_transport::{Reach, Runtime, Transport};

/// The in-process network under a simulated runtime, in several interleavings.
struct Simulated;

impl Fabric for Simulated {
    fn run(&self, run: u64, world_size: usize, program: Program) {
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

/// The same where ranks share memory.
struct SimulatedMemory;

impl Fabric for SimulatedMemory {
    fn run(&self, run: u64, world_size: usize, program: Program) {
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

/// The same with links that take their time, and buffers that are finite.
struct SimulatedLinks;

impl Fabric for SimulatedLinks {
    fn run(&self, run: u64, world_size: usize, program: Program) {
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
    fn run(&self, _: u64, world_size: usize, program: Program) {
        let network = sim::network(&Runtime::system(), world_size);
        run_threads(
            network.into_iter().map(|rank| move || -> Box<dyn Transport> { Box::new(rank) }),
            &program,
        );
    }
}

/// Threads of the system that are connected as processes are.
struct Processes(Medium, Reach);

impl Fabric for Processes {
    fn run(&self, _: u64, world_size: usize, program: Program) {
        let coordinator = Coordinator::start("127.0.0.1:0", world_size, "suite", None).unwrap();
        let address = coordinator.address().to_string();
        let joins = (0..world_size).map(|rank| {
            let config = Config::new(rank, world_size, &address).unwrap();
            let config = config.with_job("suite").with_external_coordinator();
            let config = config.with_timeout(Duration::from_secs(60)).with_medium(self.0).with_reach(self.1);
            move || -> Box<dyn Transport> { Box::new(TcpTransport::join(&config).unwrap()) }
        });
        run_threads(joins, &program);
    }
}

/// Runs each rank on a thread of its own, where it joins first.
fn run_threads<J: FnOnce() -> Box<dyn Transport> + Send + 'static>(
    joins: impl Iterator<Item = J>,
    program: &Program,
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

mod threads {
    dist_transport::conformance!(super::Threads);
}

mod tcp {
    dist_transport::conformance!(super::Processes(super::Medium::Tcp, super::Reach::Write));
}

mod shm {
    dist_transport::conformance!(super::Processes(super::Medium::Shm, super::Reach::Write));
}

/// Where the system would not let processes reach into each other's memory, or only let them read it.
mod shm_within_limits {
    use dist_transport::conformance;

    use super::{Medium, Processes, Reach};

    #[test]
    fn memory_that_is_laid_open_is_out_of_reach_but_for_the_heap() {
        conformance::laid_open::memory_that_is_laid_open_is_read_and_written(&Processes(
            Medium::Shm,
            Reach::Slots,
        ));
    }

    #[test]
    fn memory_that_is_laid_open_is_read_only_but_for_the_heap() {
        conformance::laid_open::memory_that_is_laid_open_is_read_and_written(&Processes(
            Medium::Shm,
            Reach::Read,
        ));
    }
}
