//! The transports that the suite is run on.

use std::sync::Arc;
use std::time::Duration;

use dist_transport::sim;
use dist_transport::tcp::{Config, Coordinator, TcpTransport};
use dist_transport::{Runtime, Transport};

/// A transport, and where its ranks live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    /// The in-process network under a simulated runtime, in several interleavings.
    Sim,
    /// The in-process network between threads of the system.
    Local,
    /// TCP between threads of the system.
    Tcp,
}

impl Backend {
    /// Runs `program` on every rank, and `verify` on what the ranks return, in rank order.
    pub(crate) fn check<T: Send + 'static>(
        self,
        world_size: usize,
        program: impl Fn(Box<dyn Transport>) -> T + Send + Sync + 'static,
        verify: impl Fn(Vec<T>),
    ) {
        match self {
            Self::Sim => {
                let program = Arc::new(program);
                for seed in 0..SEEDS {
                    let program = program.clone();
                    verify(sim::run(seed, world_size, move |rank| program(Box::new(rank))).results);
                }
            }
            Self::Local => {
                let network = sim::network(&Runtime::system(), world_size);
                let joins = network.into_iter().map(|rank| move || -> Box<dyn Transport> { Box::new(rank) });
                verify(run_threads(joins, program));
            }
            Self::Tcp => {
                let coordinator = Coordinator::start("127.0.0.1:0", world_size, "suite", None).unwrap();
                let address = coordinator.address().to_string();
                let joins = (0..world_size).map(|rank| {
                    let config = Config::new(rank, world_size, &address).unwrap();
                    let config = config.with_job("suite").with_external_coordinator().with_timeout(LONG);
                    move || -> Box<dyn Transport> { Box::new(TcpTransport::join(&config).unwrap()) }
                });
                verify(run_threads(joins, program));
            }
        }
    }

    /// A timeout for a wait that must run out. Where time is virtual it is long.
    pub(crate) fn short(self) -> Duration {
        match self {
            Self::Sim => Duration::from_secs(59),
            _ => Duration::from_millis(50),
        }
    }
}

/// A timeout for what must not run out.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// How many interleavings of each program are simulated.
const SEEDS: u64 = 8;

/// Runs each rank on a thread of its own, where it joins first.
fn run_threads<T: Send + 'static, J: FnOnce() -> Box<dyn Transport> + Send + 'static>(
    joins: impl Iterator<Item = J>,
    program: impl Fn(Box<dyn Transport>) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let (runtime, program) = (Runtime::system(), Arc::new(program));
    let start = |join: J| {
        let program = program.clone();
        runtime.spawn("rank", move || program(join())).unwrap()
    };
    let tasks: Vec<_> = joins.map(start).collect();
    let results = tasks.into_iter().map(|task| task.join());
    results.map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
}
