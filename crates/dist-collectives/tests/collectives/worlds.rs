//! One program on every rank, on each kind of network.

use std::sync::Arc;

use dist_collectives::Communicator;
#[cfg(feature = "tcp")]
use dist_collectives::transport::process::Medium;
use dist_transport::runtime::Runtime;
use dist_transport::sim;

/// The network that connects the ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Network {
    /// One thread at a time, in virtual time.
    Simulated,
    /// The simulated network with this seed, and memory that all ranks share.
    SharedMemory(u64),
    /// The system's threads and clock.
    Threads,
    /// Sockets between the system's threads.
    #[cfg(feature = "tcp")]
    Tcp,
    /// Memory between the system's threads.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    Shm,
}

impl Network {
    /// Every network.
    pub(crate) const ALL: &[Self] = &[
        Self::Simulated,
        Self::SharedMemory(7),
        Self::Threads,
        #[cfg(feature = "tcp")]
        Self::Tcp,
        #[cfg(all(feature = "shm", target_os = "linux"))]
        Self::Shm,
    ];

    /// The networks whose ranks share memory.
    pub(crate) const SHARING: &[Self] = &[
        Self::SharedMemory(7),
        #[cfg(all(feature = "shm", target_os = "linux"))]
        Self::Shm,
    ];
}

/// Runs the program on every rank of a world and returns the results in rank order.
pub(crate) fn run<T: Send + 'static>(
    network: Network,
    world_size: usize,
    program: impl Fn(Communicator) -> T + Send + Sync + 'static,
) -> Vec<T> {
    match network {
        Network::Simulated => {
            sim::run(world_size as u64, world_size, move |transport| program(Communicator::new(transport)))
                .results
        }
        Network::SharedMemory(seed) => {
            let network = sim::Network::new(world_size).with_seed(seed).with_shared_memory();
            network.run(move |transport| program(Communicator::new(transport))).results
        }
        Network::Threads => {
            let transports = sim::network(&Runtime::system(), world_size);
            let starts = transports.into_iter().map(|transport| move || Communicator::new(transport));
            on_threads(starts.collect(), program)
        }
        #[cfg(feature = "tcp")]
        Network::Tcp => processes(Medium::Tcp, world_size, program),
        #[cfg(all(feature = "shm", target_os = "linux"))]
        Network::Shm => processes(Medium::Shm, world_size, program),
    }
}

fn on_threads<T: Send + 'static>(
    starts: Vec<impl FnOnce() -> Communicator + Send + 'static>,
    program: impl Fn(Communicator) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let runtime = Runtime::system();
    let program = Arc::new(program);
    let spawn = |(rank, start): (usize, _)| {
        let program = program.clone();
        let work = move || program(call(start));
        runtime.spawn(&format!("rank {rank}"), work).expect("a thread is to be had")
    };
    let direct_calls: Vec<_> = starts.into_iter().enumerate().map(spawn).collect();
    direct_calls.into_iter().map(|task| task.join().expect("no rank panics")).collect()
}

fn call<T>(start: impl FnOnce() -> T) -> T {
    start()
}

#[cfg(feature = "tcp")]
fn processes<T: Send + 'static>(
    medium: Medium,
    world_size: usize,
    program: impl Fn(Communicator) -> T + Send + Sync + 'static,
) -> Vec<T> {
    use dist_collectives::Config;
    use dist_transport::process::Coordinator;
    let coordinator =
        Coordinator::start("127.0.0.1:0", world_size, "collectives", None).expect("some port is free");
    let address = coordinator.address().to_string();
    let start = |rank| {
        let config = Config::new(rank, world_size, &address).expect("the arguments make sense");
        let config = config.with_job("collectives").with_external_coordinator().with_medium(medium);
        move || Communicator::join(&config).expect("every rank comes")
    };
    on_threads((0..world_size).map(start).collect(), program)
}
