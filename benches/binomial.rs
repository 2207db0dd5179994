//! Benches of binomial: trees of logarithmic depth.

use criterion::{Criterion, criterion_group, criterion_main};
use dist_collectives::tuning::Operation;

fn binomial(criterion: &mut Criterion) {
    let operations = [
        Operation::AllReduce,
        Operation::Broadcast,
        Operation::Reduce,
        Operation::Gather,
        Operation::Scatter,
    ];
    benches::bench(criterion, benches::ALGORITHMS, &operations, &["binomial"]);
}

criterion_group! { name = all; config = benches::quick(); targets = binomial }
criterion_main!(all);
