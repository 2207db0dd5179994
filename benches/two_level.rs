//! Benches of two-level algorithms, with two ranks on each declared host.

use criterion::{Criterion, criterion_group, criterion_main};
use dist_collectives::tuning::Operation;

fn two_level(criterion: &mut Criterion) {
    let operations = [
        Operation::AllReduce,
        Operation::ReduceScatter,
        Operation::AllGather,
        Operation::Broadcast,
        Operation::Reduce,
    ];
    benches::bench(
        criterion,
        benches::ALGORITHMS,
        &operations,
        &["two_level", "two_level/parts/ring", "two_level/leaders/recursive_doubling", "two_level/binomial"],
    );
}

criterion_group! { name = all; config = benches::quick(); targets = two_level }
criterion_main!(all);
