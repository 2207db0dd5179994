//! Benches of gather and scatter by linear algorithms: the root exchanges messages with every rank.

use criterion::{Criterion, criterion_group, criterion_main};
use dist_collectives::tuning::Operation;

fn linear(criterion: &mut Criterion) {
    let operations = [Operation::Gather, Operation::Scatter];
    benches::bench(criterion, benches::ALGORITHMS, &operations, &["linear"]);
}

criterion_group! { name = all; config = benches::quick(); targets = linear }
criterion_main!(all);
