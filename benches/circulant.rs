//! Benches of circulant: distances p/2, p/4, …, or 1, 2, 4, ….

use criterion::{Criterion, criterion_group, criterion_main};
use dist_collectives::tuning::Operation;

fn circulant(criterion: &mut Criterion) {
    let operations = [
        Operation::AllReduce,
        Operation::ReduceScatter,
        Operation::AllGather,
        Operation::Broadcast,
        Operation::AllToAll,
    ];
    benches::bench(criterion, benches::ALGORITHMS, &operations, &["circulant", "bruck", "scatter_circulant"]);
}

criterion_group! { name = all; config = benches::quick(); targets = circulant }
criterion_main!(all);
