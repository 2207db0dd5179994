//! A world of ranks on threads, which execute calls and report their times.

use std::time::Duration;

use dist_collectives::tuning::{Algorithm, CostModel, Hosts, Operation};
use dist_collectives::{Buffer, Communicator, ReduceOp, ReductionOrder, Result};
use dist_transport::process::{Config, Coordinator, Medium, ProcessTransport};
use dist_transport::runtime::{Mailbox, Receiver, Task};
use dist_transport::{Runtime, sim};

/// The network between the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// TCP connections over loopback.
    Tcp,
    /// Memory that two ranks share.
    Shm,
    /// The simulated network, on the system's clock.
    Sim,
}

impl Network {
    /// Returns the name in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Shm => "shm",
            Self::Sim => "sim",
        }
    }

    /// Returns the medium of messages; `None` on the simulated network.
    fn medium(self) -> Option<Medium> {
        match self {
            Self::Tcp => Some(Medium::Tcp),
            Self::Shm => Some(Medium::Shm),
            Self::Sim => None,
        }
    }
}

/// A point to measure: an algorithm, and the bytes of each rank's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// The algorithm, which determines the operation.
    pub algorithm: Algorithm,
    /// Bytes of each rank's input, of `f32`.
    pub bytes: usize,
}

/// A world of ranks, each on its own thread. The threads end when it is dropped.
#[derive(Debug)]
pub struct World {
    network: Network,
    orders: Vec<Mailbox<(Case, u64)>>,
    times: Receiver<Duration>,
    tasks: Vec<Task<()>>,
    /// The coordinator of worlds over TCP and shared memory.
    _coordinator: Option<Coordinator>,
}

impl World {
    /// Starts the ranks.
    ///
    /// # Panics
    /// If the system has no threads or ports left.
    pub fn start(network: Network, ranks: usize) -> Self {
        let runtime = Runtime::system();
        let (done, times) = runtime.mailbox();
        let (mut orders, mut tasks) = (Vec::new(), Vec::new());
        let coordinator = match network {
            Network::Sim => None,
            Network::Tcp | Network::Shm => {
                let started = Coordinator::start("127.0.0.1:0", ranks, JOB, None);
                Some(started.expect("there is a free port on loopback"))
            }
        };
        let joins = match coordinator.as_ref().zip(network.medium()) {
            None => simulated(&runtime, ranks),
            Some((coordinator, medium)) => connected(coordinator, medium, ranks),
        };
        for join in joins {
            let (order, mut inbox) = runtime.mailbox();
            let done = done.clone();
            let rank = move || {
                let mut comm = join();
                comm.set_order(ReductionOrder::Any);
                comm.set_topology(Self::hosts(ranks), CostModel::default()).expect("a host for every rank");
                while let Ok((case, calls)) = inbox.receive(None) {
                    done.send(time(&mut comm, case, calls).expect("the ranks are in the same call"));
                }
            };
            tasks.push(runtime.spawn("rank", rank).expect("a thread for each rank"));
            orders.push(order);
        }
        Self { network, orders, times, tasks, _coordinator: coordinator }
    }

    /// Returns the declared hosts for two-level algorithms: two neighbouring ranks on each.
    pub fn hosts(ranks: usize) -> Hosts {
        let hosts: Vec<u64> = (0..ranks).map(|rank| rank as u64 / 2).collect();
        Hosts::new(&hosts)
    }

    /// Returns the network between the ranks.
    pub fn network(&self) -> Network {
        self.network
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.orders.len()
    }

    /// Makes this many calls and returns their time on the slowest rank.
    ///
    /// # Panics
    /// If a call failed.
    pub fn time(&mut self, case: Case, calls: u64) -> Duration {
        self.orders.iter().for_each(|order| order.send((case, calls)));
        let times = self.orders.iter().map(|_| self.times.receive(None).expect("every rank answers"));
        times.max().expect("there is a rank")
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.orders.clear();
        for task in self.tasks.drain(..) {
            // A rank's panic message has already been printed.
            let _ = task.join();
        }
    }
}

/// A function that creates a rank's communicator on the rank's own thread.
type Join = Box<dyn FnOnce() -> Communicator + Send>;

fn simulated(runtime: &Runtime, ranks: usize) -> Vec<Join> {
    let transports = sim::network(runtime, ranks).into_iter();
    transports.map(|transport| Box::new(|| Communicator::new(transport)) as Join).collect()
}

fn connected(coordinator: &Coordinator, medium: Medium, ranks: usize) -> Vec<Join> {
    let address = coordinator.address().to_string();
    let join = |rank| {
        let config = Config::new(rank, ranks, &address).expect("the rank is in the world");
        let config = config.with_job(JOB).with_external_coordinator().with_medium(medium);
        Box::new(move || Communicator::new(ProcessTransport::join(&config).expect("all ranks come"))) as Join
    };
    (0..ranks).map(join).collect()
}

const JOB: &str = "bench";

/// A zero whose bytes are not all zero, and which does not change when it is added to itself.
const WRITTEN: f32 = -0.0;

/// Makes calls back to back after a barrier, and returns their time.
fn time(comm: &mut Communicator, case: Case, calls: u64) -> Result<Duration> {
    let len = case.bytes / size_of::<f32>();
    let world_size = comm.world_size();
    // Unwritten memory would be mapped to one shared page of zeros.
    let mut input = vec![WRITTEN; len];
    let operation = Operation::from(case.algorithm.collective());
    let mut output = match operation {
        Operation::ReduceScatter | Operation::Scatter => vec![WRITTEN; len / world_size],
        Operation::AllGather | Operation::Gather => vec![WRITTEN; len * world_size],
        Operation::AllToAll => vec![WRITTEN; len / world_size * world_size],
        _ => Vec::new(),
    };
    let writes = case.algorithm.name() == "direct/write_to_all";
    let mut shared = if writes { comm.alloc(len)? } else { Buffer::from(Vec::<f32>::new()) };
    shared.fill(WRITTEN);
    // The elements that are divided into one part for each rank.
    let parts = len / world_size * world_size;
    let runtime = comm.runtime().clone();
    comm.barrier()?;
    let mut comm = comm.with_algorithm(case.algorithm);
    let start = runtime.now();
    for call in 0..calls {
        let root = usize::try_from(call).map_or(0, |call| call % world_size);
        match operation {
            Operation::AllReduce if writes => comm.all_reduce_buffer(&mut shared, ReduceOp::Sum)?,
            Operation::AllReduce => comm.all_reduce(&mut input, ReduceOp::Sum)?,
            Operation::ReduceScatter => {
                comm.reduce_scatter(&input[..parts], &mut output, ReduceOp::Sum)?;
            }
            Operation::Scatter => comm.scatter(&input[..parts], &mut output, root)?,
            Operation::Gather => comm.gather(&input, &mut output, root)?,
            Operation::AllToAll => comm.all_to_all(&input[..parts], &mut output)?,
            Operation::Scan => comm.scan(&mut input, ReduceOp::Sum)?,
            Operation::AllGather => comm.all_gather(&input, &mut output)?,
            Operation::Broadcast => comm.broadcast(&mut input, root)?,
            Operation::Reduce => comm.reduce(&mut input, ReduceOp::Sum, root)?,
            Operation::Barrier => comm.barrier()?,
            operation => unreachable!("{operation} has no algorithm"),
        }
    }
    Ok(runtime.now() - start)
}
