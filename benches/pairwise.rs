//! Benches of pairwise: every pair of ranks exchanges once, and the owner of a chunk reduces it.

use criterion::{Criterion, criterion_group, criterion_main};
use dist_collectives::tuning::Operation;

fn pairwise(criterion: &mut Criterion) {
    let operations = [Operation::AllReduce, Operation::ReduceScatter, Operation::Reduce, Operation::AllToAll];
    benches::bench(
        criterion,
        benches::ALGORITHMS,
        &operations,
        &["pairwise", "pairwise_circulant", "pairwise_gather", "windowed"],
    );
}

criterion_group! { name = all; config = benches::quick(); targets = pairwise }
criterion_main!(all);
