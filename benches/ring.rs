//! Benches of ring: neighbours in a ring.

use criterion::{Criterion, criterion_group, criterion_main};
use dist_collectives::tuning::Operation;

fn ring(criterion: &mut Criterion) {
    let operations = [Operation::AllReduce, Operation::ReduceScatter, Operation::AllGather];
    benches::bench(criterion, benches::ALGORITHMS, &operations, &["ring"]);
}

criterion_group! { name = all; config = benches::quick(); targets = ring }
criterion_main!(all);
