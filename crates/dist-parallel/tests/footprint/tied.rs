//! The memory of a pipeline whose stages share parameters.

use allocation_counter::measure;
use dist_collectives::Communicator;
use dist_parallel::model::Materialised;
use dist_parallel::pipeline::{Activations, Pipeline, ScheduleKind};
use dist_parallel::{BoxError, Params, Values};
use dist_transport::sim;
use rstest::rstest;

use crate::weights::{Value, batch, initial, model};

/// The one value of an activation.
struct OneValue;

impl Activations<Value> for OneValue {
    fn to_flat(&self, activation: &Value, f: &mut dyn FnMut(&[usize], Values<'_>)) -> Result<(), BoxError> {
        f(&[1], Values::F32(activation));
        Ok(())
    }

    fn unflatten(&self, _: &[usize], values: Values<'_>) -> Result<Value, BoxError> {
        match values {
            Values::F32(&[value]) => Ok([value]),
            other => Err(format!("cannot convert values of {}", other.dtype()).into()),
        }
    }
}

/// Returns the bytes that ten steps leave behind on each rank.
fn left_behind(parameters: usize, kind: ScheduleKind, ranks: usize) -> Vec<i64> {
    let program = move |transport| {
        let mut model = model(&[parameters; 2], Materialised::Copied);
        (0..2).for_each(|index| model.write(index, &mut |values| initial(index, values)).unwrap());
        model.tie("block1", "block0").unwrap();
        let (comm, schedule) = (Communicator::new(transport), kind.schedule(ranks, 4).unwrap());
        let mut pipeline = Pipeline::new(comm, model, schedule, &[0..1, 1..2], OneValue).unwrap();
        let mut step = || {
            let loss = |index, output| batch(index).and_then(|(_, loss)| loss(output));
            pipeline.step(|index| Ok(batch(index)?.0), loss).unwrap();
        };
        (0..2).for_each(|_| step());
        measure(|| (0..10).for_each(|_| step())).bytes_current
    };
    sim::run(1, ranks, program).results
}

#[rstest]
#[case::on_two_ranks(ScheduleKind::OneForwardOneBackward, 2)]
#[case::on_one(ScheduleKind::Interleaved { stages_per_rank: 2 }, 1)]
fn tied_parameters_leak_no_memory_between_steps(#[case] kind: ScheduleKind, #[case] ranks: usize) {
    let [small, large] = [1 << 10, 2 << 10].map(|parameters| left_behind(parameters, kind, ranks));
    assert_eq!(small, large, "the bytes that are left depend on the size of the tied parameter");
}
