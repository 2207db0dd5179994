//! Steps in virtual time take the predicted time and hold the proven number of activations.

use std::time::Duration;

use dist_collectives::Communicator;
use dist_collectives::transport::Runtime;
use dist_parallel::model::{Ready, Saved};
use dist_parallel::pipeline::{
    Costs, Pipeline, PlainVectors, ScheduleKind, StageCost, Timeline, measure_blocks, split_by_cost,
    split_into_stages,
};
use dist_parallel::{Block, BoxError, Sequence};
use dist_transport::sim;
use rstest::rstest;

use crate::model::without_parameters;
use crate::plain::Numbers;

/// A block that only takes time.
struct Sleeper {
    runtime: Runtime,
    cost: StageCost,
}

without_parameters!(Sleeper);

impl Block<Vec<f32>> for Sleeper {
    fn forward(&mut self, input: Vec<f32>) -> Result<(Vec<f32>, Saved), BoxError> {
        self.runtime.sleep(self.cost.forward);
        Ok((input, Saved::new(())))
    }
    fn backward(
        &mut self,
        _: Saved,
        gradient: Vec<f32>,
        _: &mut Ready<'_>,
    ) -> Result<Option<Vec<f32>>, BoxError> {
        self.runtime.sleep(self.cost.input_gradient + self.cost.weight_gradient);
        Ok(Some(gradient))
    }
    fn input_gradient(
        &mut self,
        _: Saved,
        gradient: Vec<f32>,
        _: &mut Ready<'_>,
    ) -> Result<(Option<Vec<f32>>, Saved), BoxError> {
        self.runtime.sleep(self.cost.input_gradient);
        Ok((Some(gradient), Saved::new(())))
    }
    fn weight_gradient(&mut self, _: Saved, _: &mut Ready<'_>) -> Result<(), BoxError> {
        self.runtime.sleep(self.cost.weight_gradient);
        Ok(())
    }
}

pub(crate) fn sleepers(costs: &[StageCost], runtime: &Runtime) -> Sequence<Vec<f32>> {
    let block = |&cost: &StageCost| Box::new(Sleeper { runtime: runtime.clone(), cost }) as Box<dyn Block<_>>;
    Sequence::new(costs.iter().map(block).collect()).unwrap()
}

/// Returns pseudo-random times, 1 to 64 milliseconds.
pub(crate) fn random_costs(stages: usize, seed: u64) -> Vec<StageCost> {
    let mut numbers = Numbers(seed);
    let mut time = || Duration::from_millis(1) + Duration::from_millis(63).mul_f32(numbers.next().abs());
    (0..stages)
        .map(|_| StageCost { forward: time(), input_gradient: time(), weight_gradient: time() })
        .collect()
}

#[rstest]
fn a_step_takes_exactly_as_long_as_is_predicted(
    #[values(1, 2, 3, 4)] ranks: usize,
    #[values(1, 4, 7)] micro_batches: usize,
) {
    for kind in ScheduleKind::ALL {
        let schedule = kind.schedule(ranks, micro_batches).unwrap();
        let costs = random_costs(schedule.stages(), (100 * ranks + micro_batches) as u64);
        let predicted = Timeline::predict(&schedule, &Costs::new(costs.clone()));
        let proof = schedule.validate().unwrap();
        let (again, predicted_stages) = (schedule.clone(), schedule.stages());
        let outcome = sim::run(1, ranks, move |transport| {
            let comm = Communicator::new(transport);
            let model = sleepers(&costs, comm.runtime());
            let stages = split_into_stages(costs.len(), costs.len()).unwrap();
            let mut pipeline = Pipeline::new(comm, model, schedule.clone(), &stages, PlainVectors).unwrap();
            let report = pipeline.step(|_| Ok(vec![1.0]), |_, output| Ok((1.0, output))).unwrap();
            (pipeline.kept(), report.elapsed, pipeline.timeline().unwrap())
        });
        let last = outcome.results.iter().map(|(_, elapsed, _)| *elapsed).max();
        assert_eq!(last, Some(predicted.makespan()));
        for (rank, (kept, _, measured)) in outcome.results.into_iter().enumerate() {
            assert_eq!(measured, predicted, "{kind} on {ranks} ranks, {micro_batches}");
            let costs = Costs::new(measured.stage_costs(predicted_stages));
            assert_eq!(Timeline::predict(&again, &costs), predicted);
            assert_eq!(kept, proof.kept[rank]);
        }
    }
}

#[test]
fn messages_travel_while_ranks_compute() {
    let unit = Duration::from_millis(10);
    let stage = StageCost { forward: unit, input_gradient: unit, weight_gradient: unit };
    let latency = Duration::from_millis(4);
    let schedule = ScheduleKind::Gpipe.schedule(2, 8).unwrap();
    let costs = Costs::uniform(2, stage).with_message(latency);
    let predicted = Timeline::predict(&schedule, &costs);
    let link = sim::Link::new(latency, u64::MAX);
    let outcome = sim::Network::new(2).with_memory_link(link).run(move |transport| {
        let comm = Communicator::new(transport);
        let model = sleepers(&[stage; 2], comm.runtime());
        let mut pipeline = Pipeline::new(comm, model, schedule.clone(), &[0..1, 1..2], PlainVectors).unwrap();
        let mut step = || {
            pipeline.communicator_mut().barrier().unwrap();
            pipeline.step(|_| Ok(vec![1.0]), |_, output| Ok((1.0, output))).unwrap();
            pipeline.timeline().unwrap()
        };
        // The first step also sends shapes and opens links.
        step();
        step()
    });
    // Ranks wait only for the first message in each direction; the others overlap with computation.
    let measured = &outcome.results[0];
    assert!(
        measured.ranks[1][1..8]
            .iter()
            .zip(&measured.ranks[1])
            .all(|(later, before)| later.start == before.end)
    );
    let late = measured.makespan().saturating_sub(predicted.makespan());
    assert!(late < latency, "{late:?} later than predicted");
}

#[test]
fn blocks_are_measured_and_divided_by_their_cost() {
    let outcome = sim::run(1, 1, |transport| {
        let comm = Communicator::new(transport);
        let costs = random_costs(6, 3);
        let mut model = sleepers(&costs, comm.runtime());
        let measured =
            measure_blocks(&mut model, comm.runtime(), 3, || Ok((vec![1.0], |output| Ok((1.0, output)))));
        assert_eq!(measured.unwrap(), costs);
        let whole: Vec<Duration> =
            costs.iter().map(|cost| cost.forward + cost.input_gradient + cost.weight_gradient).collect();
        split_by_cost(&whole, 3).unwrap().len()
    });
    assert_eq!(outcome.results, [3]);
}

#[test]
fn stages_wait_for_the_timeout_of_the_communicator() {
    const MINUTE: Duration = Duration::from_secs(60);
    let cost = StageCost { forward: 2 * MINUTE, ..StageCost::default() };
    let outcome = sim::run(1, 2, move |transport| {
        let comm = Communicator::new(transport);
        let model = sleepers(&[cost; 2], comm.runtime());
        let schedule = ScheduleKind::Gpipe.schedule(2, 1).unwrap();
        let mut pipeline = Pipeline::new(comm, model, schedule, &[0..1, 1..2], PlainVectors).unwrap();
        pipeline.communicator_mut().set_timeout(10 * MINUTE);
        pipeline.step(|_| Ok(vec![1.0]), |_, output| Ok((1.0, output))).unwrap();
        pipeline.evaluate(1, |_| Ok(vec![1.0]), |_, _| Ok(1.0)).unwrap();
    });
    assert_eq!(outcome.elapsed, 8 * MINUTE);
}
