//! Benches of recursive doubling: exchanges of the whole buffer with ranks at distance 1, 2, 4, ….

use criterion::{Criterion, criterion_group, criterion_main};
use dist_collectives::tuning::Operation;

fn recursive_doubling(criterion: &mut Criterion) {
    let operations = [Operation::AllReduce, Operation::AllGather, Operation::Scan];
    benches::bench(criterion, benches::ALGORITHMS, &operations, &["recursive_doubling"]);
}

criterion_group! { name = all; config = benches::quick(); targets = recursive_doubling }
criterion_main!(all);
