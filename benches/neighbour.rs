//! Benches of neighbour exchange: two chunks, alternately to the left and to the right neighbour.

use criterion::{Criterion, criterion_group, criterion_main};
use dist_collectives::tuning::Operation;

fn neighbour(criterion: &mut Criterion) {
    let operations = [Operation::AllGather];
    benches::bench(criterion, benches::ALGORITHMS, &operations, &["neighbour_exchange"]);
}

criterion_group! { name = all; config = benches::quick(); targets = neighbour }
criterion_main!(all);
