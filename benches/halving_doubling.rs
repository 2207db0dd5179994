//! Benches of halving-doubling: exchanges of halves, quarters, eighths, …, and the same in reverse order.

use criterion::{Criterion, criterion_group, criterion_main};
use dist_collectives::tuning::Operation;

fn halving_doubling(criterion: &mut Criterion) {
    let operations = [Operation::AllReduce, Operation::ReduceScatter];
    benches::bench(criterion, benches::ALGORITHMS, &operations, &["halving_doubling"]);
}

criterion_group! { name = all; config = benches::quick(); targets = halving_doubling }
criterion_main!(all);
