//! Benches of chain: each rank forwards the chunks to the next rank.

use criterion::{Criterion, criterion_group, criterion_main};
use dist_collectives::tuning::Operation;

fn chain(criterion: &mut Criterion) {
    let operations = [Operation::Broadcast];
    benches::bench(criterion, benches::ALGORITHMS, &operations, &["chain"]);
}

criterion_group! { name = all; config = benches::quick(); targets = chain }
criterion_main!(all);
