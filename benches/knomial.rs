//! Benches of k-nomial: a tree of radix 4, with half the depth of a binomial tree.

use criterion::{Criterion, criterion_group, criterion_main};
use dist_collectives::tuning::Operation;

fn knomial(criterion: &mut Criterion) {
    let operations = [Operation::Broadcast];
    benches::bench(criterion, benches::ALGORITHMS, &operations, &["knomial"]);
}

criterion_group! { name = all; config = benches::quick(); targets = knomial }
criterion_main!(all);
