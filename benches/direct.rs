//! Benches of direct schedules, whose ranks access each other's memory.

use criterion::{Criterion, criterion_group, criterion_main};
use dist_collectives::tuning::Operation;

fn direct(criterion: &mut Criterion) {
    let operations = [
        Operation::AllReduce,
        Operation::ReduceScatter,
        Operation::AllGather,
        Operation::Broadcast,
        Operation::Reduce,
        Operation::AllToAll,
        Operation::Barrier,
    ];
    let forms = ["direct/one_shot", "direct/staged", "direct/read_from_all", "direct/write_to_all"];
    benches::bench(criterion, benches::ALGORITHMS, &operations, &forms);
}

criterion_group! { name = all; config = benches::quick(); targets = direct }
criterion_main!(all);
