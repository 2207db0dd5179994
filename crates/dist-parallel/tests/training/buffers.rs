//! State that a block changes by itself: equal under every strategy, saved once, and never lost without an error.

use std::path::Path;

use dist_collectives::Communicator;
use dist_parallel::checkpoint::{CheckpointProblem, Checkpoints, Saving};
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy, Units};
use dist_parallel::local_sgd::{LocalSgd, LocalSgdOptions};
use dist_parallel::model::{BufferSync, Ready, Saved, Slot};
use dist_parallel::optim::{Sgd, SgdOptions};
use dist_parallel::pipeline::{Pipeline, PlainVectors, ScheduleKind, split_into_stages};
use dist_parallel::trainer::Trainer;
use dist_parallel::{
    Block, BoxError, Ddp, DdpOptions, Error, FloatType, ParamInfo, Params, Sequence, Values, ValuesMut,
};
use dist_transport::sim;
use rstest::rstest;

use crate::checkpoint::{TrainingWay, WAYS};
use crate::join::STRATEGIES;
use crate::plain::params_in_slots;

/// A block that adds a weight to the first two input values, counts its forwards and sums its inputs.
struct Counter {
    infos: [ParamInfo; 3],
    slots: [Slot; 3],
    /// The forward from which on it changes the parameter with this index, too.
    meddles: Option<(usize, f32)>,
}

const WEIGHT: usize = 0;
const COUNT: usize = 1;
const FROZEN: usize = 2;

impl Counter {
    fn new(name: &str, sync: BufferSync, dtype: FloatType) -> Self {
        let named = |what: &str| format!("{name}.{what}");
        let frozen = ParamInfo::new(named("frozen"), [3], FloatType::F32);
        let infos = [
            ParamInfo::new(named("weight"), [5], FloatType::F32),
            ParamInfo::buffer(named("count"), [2], dtype).with_sync(sync),
            ParamInfo { trainable: false, ..frozen },
        ];
        let count = match dtype {
            FloatType::F64 => Slot::from(vec![0.0_f64; 2]),
            _ => Slot::from(vec![0.0_f32; 2]),
        };
        let slots = [Slot::from(vec![1.0_f32; 5]), count, Slot::from(vec![7.0_f32; 3])];
        Self { infos, slots, meddles: None }
    }

    fn forwards(&self) -> f64 {
        match self.slots[COUNT].values().unwrap() {
            Values::F32(values) => values[0].into(),
            Values::F64(values) => values[0],
            other => panic!("{other:?}"),
        }
    }

    fn add(&mut self, index: usize, place: usize, addend: f32) -> Result<(), BoxError> {
        self.slots[index].write(&mut |values| match values {
            ValuesMut::F32(values) => values[place] += addend,
            ValuesMut::F64(values) => values[place] += f64::from(addend),
            other => panic!("{other:?}"),
        })
    }
}

params_in_slots!(Counter);

impl Block<Vec<f32>> for Counter {
    fn forward(&mut self, input: Vec<f32>) -> Result<(Vec<f32>, Saved), BoxError> {
        self.add(COUNT, 0, 1.0)?;
        self.add(COUNT, 1, input[0])?;
        if let Some((index, from)) = self.meddles
            && self.forwards() >= f64::from(from)
        {
            self.add(index, 0, 1.0)?;
        }
        Ok((input, Saved::new(())))
    }

    fn backward(
        &mut self,
        _: Saved,
        gradient: Vec<f32>,
        ready: &mut Ready<'_>,
    ) -> Result<Option<Vec<f32>>, BoxError> {
        ready(WEIGHT, Values::F32(&[1.0; 5]))?;
        Ok(Some(gradient))
    }
}

fn model(sync: BufferSync, dtype: FloatType) -> Sequence<Vec<f32>> {
    let block = |name| -> Box<dyn Block<Vec<f32>>> { Box::new(Counter::new(name, sync, dtype)) };
    Sequence::new(vec![block("a"), block("b")]).unwrap()
}

fn meddling(index: usize, from: f32) -> Sequence<Vec<f32>> {
    let meddles = Some((index, from));
    let second = Counter { meddles, ..Counter::new("b", BufferSync::Broadcast, FloatType::F32) };
    let first = Counter::new("a", BufferSync::Broadcast, FloatType::F32);
    Sequence::new(vec![Box::new(first), Box::new(second)]).unwrap()
}

type Batch = (Vec<f32>, fn(Vec<f32>) -> Result<(f32, Vec<f32>), BoxError>);

/// Returns a micro-batch whose input is its number plus one.
fn batch(number: usize) -> Result<Batch, BoxError> {
    Ok((vec![f32::from(u8::try_from(number)?) + 1.0], |output| Ok((0.0, output))))
}

fn sgd() -> Sgd {
    Sgd::new(SgdOptions::default()).unwrap()
}

fn f64s(values: Values<'_>) -> Vec<f64> {
    match values {
        Values::F32(values) => values.iter().map(|&value| value.into()).collect(),
        Values::F64(values) => values.to_vec(),
        other => panic!("{other:?}"),
    }
}

/// Returns the counts of the second block.
fn count_of(model: &Sequence<Vec<f32>>) -> Vec<f64> {
    let mut found = Vec::new();
    model.read(3 + COUNT, &mut |values| found = f64s(values)).unwrap();
    found
}

/// Returns all parameters in order.
fn parameters(trainer: &mut dyn Trainer<Vec<f32>>) -> Vec<(usize, Vec<f64>)> {
    let mut found = Vec::new();
    trainer.for_each_parameter(&mut |index, values| found.push((index, f64s(values)))).unwrap();
    found.sort_by_key(|(index, _)| *index);
    found
}

/// Returns the number of forwards in a step and the sum of its inputs for each rank.
fn of_ranks(way: TrainingWay, ranks: usize, micro_batches: usize) -> Vec<[f64; 2]> {
    let in_turns = !matches!(
        way,
        TrainingWay::Ddp | TrainingWay::Sharded(ShardingStrategy::ShardOptimizer | ShardingStrategy::NoShard)
    );
    let mut of_ranks = vec![[0.0; 2]; ranks];
    for number in 0..micro_batches {
        let rank = match way {
            // Two replicas, each with half of the micro-batches, alternating between its ranks.
            TrainingWay::Sharded(ShardingStrategy::HybridShard { .. }) => {
                2 * (number / (micro_batches / 2)) + number % 2
            }
            _ if in_turns => number % ranks,
            _ => number / (micro_batches / ranks),
        };
        of_ranks[rank][0] += 1.0;
        of_ranks[rank][1] += number as f64 + 1.0;
    }
    of_ranks
}

#[rstest]
fn a_block_that_counts_its_forwards_counts_the_same_under_every_strategy(
    #[values(0, 1, 2, 3, 4, 5)] way: usize,
    #[values(BufferSync::Broadcast, BufferSync::Mean, BufferSync::Local)] sync: BufferSync,
    #[values(FloatType::F32, FloatType::F64)] dtype: FloatType,
) {
    let way = WAYS[way];
    let outcome = sim::run(1, 4, move |transport| {
        let (comm, model) = (Communicator::new(transport), model(sync, dtype));
        let mut trainer = way.trainer(comm, model, FsdpOptions::default());
        let mut optimizer = sgd();
        for _ in 0..3 {
            trainer.step(8, batch).unwrap();
            trainer.update(&mut optimizer).unwrap();
        }
        count_of(trainer.model().unwrap())
    });
    let of_ranks = of_ranks(way, 4, 8);
    let mean = |place: usize| of_ranks.iter().map(|of_rank| of_rank[place]).sum::<f64>() / 4.0;
    for (rank, found) in outcome.results.iter().enumerate() {
        let each = match sync {
            BufferSync::Broadcast => of_ranks[0],
            BufferSync::Mean => [mean(0), mean(1)],
            BufferSync::Local => of_ranks[rank],
        };
        assert_eq!(*found, each.map(|each| 3.0 * each), "rank {rank}");
    }
    // Each rank computes the same number under every assignment.
    assert!(sync == BufferSync::Local || outcome.results.iter().all(|found| found[0] == 6.0));
}

/// A pipeline computes all micro-batches on every stage, as one process does.
#[rstest]
fn a_block_in_a_pipeline_counts_as_in_one_process(#[values(1, 2)] ranks: usize) {
    let alone = sim::run(1, 1, |transport| {
        let model = model(BufferSync::Broadcast, FloatType::F64);
        let mut ddp = Ddp::new(Communicator::new(transport), model, DdpOptions::default()).unwrap();
        for _ in 0..3 {
            ddp.step(8, batch).unwrap();
            ddp.update(&mut sgd()).unwrap();
        }
        count_of(ddp.model())
    });
    let outcome = sim::run(1, ranks, move |transport| {
        let (comm, model) = (Communicator::new(transport), model(BufferSync::Broadcast, FloatType::F64));
        let schedule = ScheduleKind::OneForwardOneBackward.schedule(ranks, 8).unwrap();
        let stages = split_into_stages(2, ranks).unwrap();
        let mut pipeline = Pipeline::new(comm, model, schedule, &stages, PlainVectors).unwrap();
        for _ in 0..3 {
            pipeline.step(|number| Ok(batch(number)?.0), |_, output| Ok((0.0, output))).unwrap();
            pipeline.update(&mut sgd()).unwrap();
        }
        let mut found = Vec::new();
        let mut keep = |index, values: Values<'_>| {
            if index == 3 + COUNT {
                found = f64s(values);
            }
        };
        pipeline.for_each_parameter(&mut keep).unwrap();
        found
    });
    assert_eq!(alone.results[0], [24.0, 108.0]);
    assert_eq!(outcome.results, vec![alone.results[0].clone(); ranks]);
}

#[rstest]
fn buffers_are_whole_and_in_memory_between_steps(#[values(0, 1, 2, 3, 4)] strategy: usize) {
    let outcome = sim::run(1, 4, move |transport| {
        let model = model(BufferSync::Broadcast, FloatType::F32);
        let options = FsdpOptions::new(STRATEGIES[strategy]).with_units(Units::OneForAll);
        let mut fsdp = Fsdp::new(Communicator::new(transport), model, &options).unwrap();
        fsdp.step(4, batch).unwrap();
        assert_eq!(count_of(fsdp.model()), [1.0, 1.0]);
        assert_eq!(fsdp.gradient(COUNT), None);
        let mut seen = Vec::new();
        fsdp.for_each_parameter(|index, values| seen.push((index, values.len()))).unwrap();
        seen.sort_unstable();
        assert_eq!(seen, [(0, 5), (1, 2), (2, 3), (3, 5), (4, 2), (5, 3)]);
        // Blocks have their buffers in an evaluation too, and keep its counts.
        fsdp.forward(vec![0.0]).unwrap();
        assert_eq!(count_of(fsdp.model()), [2.0, 1.0]);
        count_of(&fsdp.into_parts().unwrap().1)
    });
    assert_eq!(outcome.results, vec![vec![2.0, 1.0]; 4]);
}

/// Rank 0 has run out of micro-batches, or a step has fewer than there are ranks.
#[rstest]
fn buffers_come_from_ranks_that_have_gone_forward(
    #[values(0, 1, 2, 3, 4, 5)] way: usize,
    #[values(false, true)] joins: bool,
    #[values(BufferSync::Broadcast, BufferSync::Mean)] sync: BufferSync,
) {
    let way = WAYS[way];
    let outcome = sim::run(1, 4, move |transport| {
        let comm = Communicator::new(transport);
        let own = usize::from(comm.rank() >= 2);
        let mut trainer = way.trainer(comm, model(sync, FloatType::F32), FsdpOptions::default());
        if joins {
            trainer.join(own, batch).unwrap().unwrap();
        } else {
            trainer.step(1, batch).unwrap();
        }
        count_of(trainer.model().unwrap())
    });
    assert_eq!(outcome.results, vec![vec![1.0, 1.0]; 4]);
}

#[test]
fn accumulated_micro_batches_synchronise_buffers_too() {
    let outcome = sim::run(1, 2, |transport| {
        let model = model(BufferSync::Broadcast, FloatType::F32);
        let mut ddp = Ddp::new(Communicator::new(transport), model, DdpOptions::default()).unwrap();
        ddp.accumulate(4, batch).unwrap();
        ddp.synchronise().unwrap();
        count_of(ddp.model())
    });
    assert_eq!(outcome.results, vec![vec![2.0, 3.0]; 2]);
}

#[rstest]
#[case(BufferSync::Broadcast, [[1.0, 1.0], [1.0, 1.0]])]
#[case(BufferSync::Mean, [[1.0, 1.5], [1.0, 1.5]])]
#[case(BufferSync::Local, [[1.0, 1.0], [1.0, 2.0]])]
fn local_sgd_synchronises_buffers_at_synchronisation_points(
    #[case] sync: BufferSync,
    #[case] expected: [[f64; 2]; 2],
    #[values(false, true)] diloco: bool,
) {
    let outcome = sim::run(1, 2, move |transport| {
        let comm = Communicator::new(transport);
        let number = comm.rank();
        let options = if diloco { LocalSgdOptions::diloco(1) } else { LocalSgdOptions::average(1) };
        let mut local = LocalSgd::new(comm, model(sync, FloatType::F32), options).unwrap();
        let step = |model: &mut Sequence<Vec<f32>>| {
            model.forward(batch(number)?.0)?;
            Ok(1.0)
        };
        local.step_with(step).unwrap();
        count_of(local.model())
    });
    assert_eq!(outcome.results, expected.map(Vec::from));
}

fn save(directory: &Path, way: TrainingWay, ranks: usize) -> Vec<Vec<(usize, Vec<f64>)>> {
    let directory = directory.to_owned();
    let program = move |transport| {
        let (comm, model) = (Communicator::new(transport), model(BufferSync::Local, FloatType::F64));
        let mut trainer = way.trainer(comm, model, FsdpOptions::default());
        trainer.step(8, batch).unwrap();
        trainer.update(&mut sgd()).unwrap();
        trainer.save(&mut Checkpoints::at(&directory), Some(&sgd()), 1).unwrap();
        parameters(&mut *trainer)
    };
    sim::run(1, ranks, program).results
}

#[rstest]
fn a_checkpoint_has_rank_0_s_buffers_and_gives_them_to_every_rank_of_any_strategy(
    #[values(0, 1, 2, 3, 4, 5)] saved_by: usize,
    #[values(0, 1, 2, 3, 4, 5)] loaded_by: usize,
    #[values(2, 4)] ranks: usize,
) {
    let folder = tempfile::tempdir().unwrap();
    let saved = save(folder.path(), WAYS[saved_by], 4);
    assert_ne!(saved[0][COUNT], saved[3][COUNT], "each rank has its own");
    let (directory, way) = (folder.path().to_owned(), WAYS[loaded_by]);
    let loaded = sim::run(1, ranks, move |transport| {
        let (comm, model) = (Communicator::new(transport), model(BufferSync::Local, FloatType::F64));
        let mut trainer = way.trainer(comm, model, FsdpOptions::default());
        trainer.load(&mut Checkpoints::at(&directory), Some(&mut sgd())).unwrap();
        parameters(&mut *trainer)
    });
    for (rank, found) in loaded.results.iter().enumerate() {
        assert_eq!(*found, saved[0], "rank {rank}");
    }
}

/// If every rank trains all parameters, each can have changed a frozen one: a checkpoint has those of rank 0. If
/// ranks shard parameters, a checkpoint would be a mixture, or the change would be lost.
#[rstest]
fn a_frozen_parameter_that_differs_is_that_of_rank_0_or_an_error(#[values(0, 1, 2, 3, 4, 5)] way: usize) {
    let way = WAYS[way];
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_owned();
    let is_lost = !matches!(way, TrainingWay::Ddp | TrainingWay::Sharded(ShardingStrategy::NoShard));
    let outcome = sim::run(1, 4, move |transport| {
        let comm = Communicator::new(transport);
        let is_first = comm.rank() == 0;
        let model = meddling(FROZEN, if is_first { 1.0 } else { 2.0 });
        let mut trainer = way.trainer(comm, model, FsdpOptions::default());
        trainer.step(4, batch)?;
        trainer.update(&mut sgd()).unwrap();
        trainer.save(&mut Checkpoints::at(&directory), Some(&sgd()), 1).unwrap();
        Ok(())
    });
    if is_lost {
        let named = |result: &Result<(), Error>| matches!(result, Err(Error::ChangedByBlock { parameter }) if parameter == "b.frozen");
        assert!(outcome.results.iter().any(named), "{:?}", outcome.results);
        assert!(outcome.results.iter().all(Result::is_err), "{:?}", outcome.results);
        return;
    }
    assert!(outcome.results.iter().all(Result::is_ok), "{:?}", outcome.results);
    let file = folder.path().join("one.safetensors");
    Checkpoints::at(folder.path()).consolidate(None, &file).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let frozen = tensors.tensor("b.frozen").unwrap();
    let frozen: Vec<f32> =
        frozen.data().chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
    assert_eq!(frozen, [8.0, 7.0, 7.0]);
}

/// The change is found at once, or some time after a block has started it.
#[rstest]
#[case::full(ShardingStrategy::FullShard, FROZEN)]
#[case::full_trained(ShardingStrategy::FullShard, WEIGHT)]
#[case::hybrid(ShardingStrategy::HybridShard { shard_degree: 2 }, FROZEN)]
#[case::hybrid_trained(ShardingStrategy::HybridShard { shard_degree: 2 }, WEIGHT)]
#[case::gradients(ShardingStrategy::ShardGradOp, FROZEN)]
#[case::gradients_trained(ShardingStrategy::ShardGradOp, WEIGHT)]
#[case::optimizer(ShardingStrategy::ShardOptimizer, FROZEN)]
#[case::optimizer_trained(ShardingStrategy::ShardOptimizer, WEIGHT)]
fn a_change_of_a_parameter_by_a_block_is_an_error_if_it_would_be_lost(
    #[case] strategy: ShardingStrategy,
    #[case] index: usize,
    #[values(1.0, 20.0)] from: f32,
    #[values(false, true)] shares_memory: bool,
) {
    let network = sim::Network::new(4);
    let network = if shares_memory { network.with_shared_memory() } else { network };
    let outcome = network.run(move |transport| {
        let comm = Communicator::new(transport);
        let mut fsdp = Fsdp::new(comm, meddling(index, from), &FsdpOptions::new(strategy)).unwrap();
        let mut steps = 0;
        let error = loop {
            steps += 1;
            assert!(steps < 100, "the difference was not detected");
            if let Err(error) = fsdp.step(4, batch) {
                break error;
            }
        };
        (steps, error)
    });
    let expected = if index == FROZEN { "b.frozen" } else { "b.weight" };
    let named = |error: &Error| matches!(error, Error::ChangedByBlock { parameter } if parameter == expected);
    assert!(outcome.results.iter().any(|(_, error)| named(error)), "{:?}", outcome.results);
    assert!(from > 1.0 || outcome.results.iter().all(|(steps, _)| *steps == 1));
}

/// An evaluation changes it. If every rank has all parameters, evaluations are not checked.
#[rstest]
fn frozen_parameters_that_differ_are_found_before_they_are_saved_in_parts(
    #[values(ShardingStrategy::ShardGradOp, ShardingStrategy::ShardOptimizer)] strategy: ShardingStrategy,
    #[values(false, true)] copied: bool,
) {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_owned();
    let outcome = sim::run(1, 3, move |transport| {
        let comm = Communicator::new(transport);
        let from = if comm.rank() == 2 { 1.0 } else { 9.0 };
        let mut fsdp = Fsdp::new(comm, meddling(FROZEN, from), &FsdpOptions::new(strategy)).unwrap();
        fsdp.forward(vec![1.0]).unwrap();
        let mut checkpoints = Checkpoints::at(&directory);
        if copied {
            checkpoints.start_save(&mut fsdp, None, 1).and_then(Saving::wait)
        } else {
            checkpoints.save(&mut fsdp, None, 1)
        }
    });
    for result in outcome.results {
        let Err(Error::Checkpoint(error)) = result else { panic!("{result:?}") };
        assert_eq!(error.tensor.as_deref(), Some("b.frozen"));
        assert_eq!(error.problem, CheckpointProblem::FrozenDiffers { rank: 2, other: 0 });
    }
    assert!(Checkpoints::at(folder.path()).steps().unwrap().is_empty());
}

#[rstest]
fn first_values_that_differ_between_ranks_are_an_error_on_every_rank(
    #[values(0, 1, 2, 3, 4)] strategy: usize,
    #[values(WEIGHT, COUNT, FROZEN)] other: usize,
) {
    let outcome = sim::run(1, 4, move |transport| {
        let comm = Communicator::new(transport);
        let odd = comm.rank() == 2;
        let values = move |parameter: usize, values: ValuesMut<'_>| {
            let ValuesMut::F32(values) = values else { panic!("the model is f32") };
            values.fill(if odd && parameter == other { 2.0 } else { 1.0 });
        };
        let model = model(BufferSync::Broadcast, FloatType::F32);
        Fsdp::with_values(comm, model, &FsdpOptions::new(STRATEGIES[strategy]), values).map(drop)
    });
    let name = ["a.weight", "a.count", "a.frozen"][other];
    let named = |result: &Result<(), Error>| matches!(result, Err(Error::InitialValuesDiffer { rank: 2, parameter }) if parameter == name);
    assert!(outcome.results.iter().all(named), "{:?}", outcome.results);
}

#[test]
fn a_buffer_cannot_be_trained_and_is_tied_to_buffers_only() {
    let mut trained = Counter::new("a", BufferSync::Local, FloatType::F32);
    trained.infos[COUNT].trainable = true;
    let refused = Sequence::new(vec![Box::new(trained) as Box<dyn Block<Vec<f32>>>]).unwrap_err();
    assert!(matches!(&refused, Error::TrainableBuffer { name } if name == "a.count"), "{refused}");
    let mut other = Counter::new("b", BufferSync::Mean, FloatType::F32);
    other.infos[FROZEN].shape = vec![2];
    let first = Counter::new("a", BufferSync::Local, FloatType::F32);
    let blocks: Vec<Box<dyn Block<Vec<f32>>>> = vec![Box::new(first), Box::new(other)];
    let mut model = Sequence::new(blocks).unwrap();
    for other in ["b.count", "b.frozen"] {
        let refused = model.tie(other, "a.count").unwrap_err();
        assert!(matches!(&refused, Error::CannotTie { .. }), "{refused}");
    }
}

#[test]
fn ranks_with_different_buffers_get_an_error() {
    let outcome = sim::run(1, 2, |transport| {
        let comm = Communicator::new(transport);
        let sync = if comm.rank() == 0 { BufferSync::Mean } else { BufferSync::Local };
        let options = FsdpOptions::new(ShardingStrategy::FullShard);
        Fsdp::new(comm, model(sync, FloatType::F32), &options).map(drop).unwrap_err().to_string()
    });
    for error in outcome.results {
        assert!(error.contains("a.count") && error.contains("(Mean) on rank 0"), "{error}");
    }
}
