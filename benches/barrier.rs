//! Benches of barrier: a token that passes twice round the ring, and dissemination.

use criterion::{Criterion, criterion_group, criterion_main};
use dist_collectives::tuning::Operation;

fn barrier(criterion: &mut Criterion) {
    let operations = [Operation::Barrier];
    benches::bench(criterion, benches::ALGORITHMS, &operations, &["ring", "dissemination"]);
}

criterion_group! { name = all; config = benches::quick(); targets = barrier }
criterion_main!(all);
