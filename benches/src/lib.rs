//! The harness of the benches: worlds of threads, and one bench per operation, transport, number of ranks and size.
//!
//! A bench is called ALGORITHM/OPERATION/TRANSPORT/RANKS/BYTES. It makes calls back to back after a barrier, and
//! reports the time of one call on the slowest rank. The ranks are threads of one process, over real TCP connections,
//! over shared memory, or over the simulated network on the system's clock. `distctl bench` measures processes.

mod world;

use criterion::{BenchmarkId, Criterion, Throughput};
use dist_collectives::algorithms::AlgorithmTable;
use dist_collectives::tuning::{Algorithm, Operation};
use std::time::Duration;

pub use dist_collectives::algorithms::ALGORITHMS;
pub use world::{Case, Network, World};

const RANKS: [usize; 2] = [2, 4];
const BYTES: [usize; 3] = [64, 64 << 10, 1 << 20];

/// Returns the configuration of all benches: a short warm-up, and 20 samples in 0.8 s.
pub fn quick() -> Criterion {
    let criterion = Criterion::default().sample_size(20).without_plots();
    criterion.warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(800))
}

/// Benches every algorithm of these operations that has one of these names in a table.
///
/// # Panics
/// If ranks cannot be started, or a call fails.
pub fn bench(criterion: &mut Criterion, table: AlgorithmTable<'_>, operations: &[Operation], names: &[&str]) {
    for network in [Network::Tcp, Network::Shm, Network::Sim] {
        for ranks in RANKS {
            let mut world = World::start(network, ranks);
            let hosts = World::hosts(ranks);
            for &operation in operations {
                let serves = |algorithm: &Algorithm| match algorithm {
                    Algorithm::Messages(_) => true,
                    Algorithm::TwoLevel(two) => two.supports(&hosts),
                    Algorithm::Direct(_) => network == Network::Shm,
                };
                let named =
                    operation.algorithms_in(table).filter(|algorithm| names.contains(&algorithm.name()));
                for algorithm in named.filter(serves) {
                    points(criterion, &mut world, algorithm);
                }
            }
        }
    }
}

fn points(criterion: &mut Criterion, world: &mut World, algorithm: Algorithm) {
    let operation = Operation::from(algorithm.collective());
    let sizes: &[usize] = if operation == Operation::Barrier { &[0] } else { &BYTES };
    let mut group = criterion.benchmark_group(format!("{algorithm}/{operation}"));
    for &bytes in sizes {
        let case = Case { algorithm, bytes };
        if bytes > 0 {
            group.throughput(Throughput::Bytes(bytes as u64));
        }
        let id = BenchmarkId::new(format!("{}/{}", world.network().name(), world.ranks()), bytes);
        group.bench_function(id, |bencher| bencher.iter_custom(|calls| world.time(case, calls)));
    }
    group.finish();
}
