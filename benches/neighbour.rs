//! Benches of neighbour exchange: two chunks to the left and to the right in turn.

use criterion::{Criterion, criterion_group, criterion_main};
use dist_collectives::tuning::Operation;

fn neighbour(criterion: &mut Criterion) {
    let operations = [Operation::AllGather];
    benches::bench(criterion, benches::ALGORITHMS, &operations, &["neighbour_exchange"]);
}

criterion_group! { name = all; config = benches::quick(); targets = neighbour }
criterion_main!(all);
