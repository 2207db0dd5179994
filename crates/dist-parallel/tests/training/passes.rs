//! Blocks know the mode, the step and the micro-batch of each forward, under every strategy.

use std::sync::{Arc, Mutex};

use dist_collectives::Communicator;
use dist_parallel::checkpoint::Checkpoints;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::local_sgd::{LocalSgd, LocalSgdOptions};
use dist_parallel::model::{Pass, Ready, Saved, Slot};
use dist_parallel::optim::{Sgd, SgdOptions};
use dist_parallel::pipeline::{Pipeline, PlainVectors, ScheduleKind, split_into_stages};
use dist_parallel::trainer::Trainer;
use dist_parallel::{Block, BoxError, Ddp, DdpOptions, FloatType, ParamInfo, Params, Sequence, Values};
use dist_transport::sim;
use rstest::rstest;

use crate::checkpoint::{TrainingWay, WAYS};
use crate::plain::floats;

/// The forwards of the first block of a model.
type Seen = Arc<Mutex<Vec<Pass>>>;

/// A block that multiplies its input by a weight, and in training by a number that depends on step and micro-batch.
/// Its backward computes that number again.
struct Noisy {
    infos: [ParamInfo; 1],
    slots: [Slot; 1],
    pass: Option<Pass>,
    seen: Seen,
}

impl Noisy {
    fn new(name: &str, seen: &Seen) -> Self {
        let infos = [ParamInfo::new(name, [1], FloatType::F32)];
        Self { infos, slots: [Slot::from(vec![0.7_f32])], pass: None, seen: Arc::clone(seen) }
    }

    fn weight(&self) -> Result<f32, BoxError> {
        match self.slots[0].values()? {
            Values::F32(weight) => Ok(weight[0]),
            other => panic!("{other:?}"),
        }
    }
}

fn noise(pass: Pass) -> f32 {
    if !pass.training {
        return 1.0;
    }
    let number = 7 * pass.step + 3 * pass.micro_batch as u64;
    1.0 + (number % 11) as f32 / 8.0
}

impl Params for Noisy {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn begin_forward(&mut self, pass: Pass) {
        self.pass = Some(pass);
    }

    fn slots(&self) -> &[Slot] {
        &self.slots
    }

    fn slots_mut(&mut self) -> &mut [Slot] {
        &mut self.slots
    }
}

impl Block<Vec<f32>> for Noisy {
    fn forward(&mut self, input: Vec<f32>) -> Result<(Vec<f32>, Saved), BoxError> {
        let pass = self.pass.ok_or("the trainer has not described the forward")?;
        self.seen.lock().unwrap().push(pass);
        let factor = self.weight()? * noise(pass);
        Ok((input.iter().map(|x| x * factor).collect(), Saved::new((input, pass))))
    }

    fn backward(
        &mut self,
        saved: Saved,
        gradient: Vec<f32>,
        ready: &mut Ready<'_>,
    ) -> Result<Option<Vec<f32>>, BoxError> {
        let (input, pass): (Vec<f32>, Pass) = saved.take()?;
        let products = input.iter().zip(&gradient).map(|(x, g)| x * g);
        ready(0, Values::F32(&[products.sum::<f32>() * noise(pass)]))?;
        let factor = self.weight()? * noise(pass);
        Ok(Some(gradient.iter().map(|g| g * factor).collect()))
    }
}

fn model() -> (Sequence<Vec<f32>>, Seen) {
    let seen = Seen::default();
    let blocks: [Box<dyn Block<Vec<f32>>>; 2] =
        [Box::new(Noisy::new("a", &seen)), Box::new(Noisy::new("b", &Seen::default()))];
    (Sequence::new(blocks.into()).unwrap(), seen)
}

fn input(micro_batch: usize) -> Vec<f32> {
    vec![0.1 * micro_batch as f32, 0.3]
}

fn loss(output: Vec<f32>) -> Result<(f32, Vec<f32>), BoxError> {
    let squares = output.iter().map(|y| (y - 1.0) * (y - 1.0));
    Ok((squares.sum(), output.iter().map(|y| 2.0 * (y - 1.0)).collect()))
}

fn sgd() -> Sgd {
    Sgd::new(SgdOptions { learning_rate: 0.05, ..SgdOptions::default() }).unwrap()
}

const MICRO_BATCHES: usize = 4;

/// Trains a model in this way. Returns the weights' bits afterwards and the forwards of the first block.
fn trained(
    way: TrainingWay,
    comm: Communicator,
    train: impl FnOnce(&mut dyn Trainer<Vec<f32>>),
) -> (Bits, Vec<Pass>) {
    let (model, seen) = model();
    let mut trainer = way.trainer(comm, model, FsdpOptions::default());
    train(&mut *trainer);
    let mut bits = Vec::new();
    trainer.for_each_parameter(&mut |index, values| bits.push((index, floats(values)[0].to_bits()))).unwrap();
    bits.sort_unstable();
    (bits, Vec::clone(&seen.lock().unwrap()))
}

/// Takes steps of this many accumulated micro-batches and the others.
fn take_steps(trainer: &mut dyn Trainer<Vec<f32>>, steps: usize, accumulated: usize) {
    for _ in 0..steps {
        if accumulated > 0 {
            trainer.accumulate(accumulated, |index| Ok((input(index), loss))).unwrap();
        }
        let rest = MICRO_BATCHES - accumulated;
        trainer.step(rest, |index| Ok((input(accumulated + index), loss))).unwrap();
        trainer.update(&mut sgd()).unwrap();
    }
}

type Bits = Vec<(usize, u32)>;

fn expected(steps: usize) -> Bits {
    let alone = sim::run(1, 1, move |transport| {
        let comm = Communicator::new(transport);
        trained(TrainingWay::Ddp, comm, |trainer| take_steps(trainer, steps, 0)).0
    });
    alone.results.into_iter().next().unwrap()
}

#[rstest]
fn a_block_that_depends_on_its_pass_trains_the_same_bits_on_any_number_of_ranks(
    #[values(0, 1, 2, 3, 4, 5)] way: usize,
    #[values(1, 2, 4)] ranks: usize,
    #[values(0, MICRO_BATCHES / 2)] accumulated: usize,
) {
    let is_hybrid = matches!(WAYS[way], TrainingWay::Sharded(ShardingStrategy::HybridShard { .. }));
    // Two shards need two ranks. Two accumulated micro-batches are no equal shares of four ranks.
    if (is_hybrid && ranks == 1) || (accumulated > 0 && ranks == 4) {
        return;
    }
    let outcome = sim::run(1, ranks, move |transport| {
        trained(WAYS[way], Communicator::new(transport), |trainer| take_steps(trainer, 3, accumulated))
    });
    let mut seen: Vec<(u64, usize)> = Vec::new();
    for (bits, passes) in outcome.results {
        assert_eq!(bits, expected(3));
        assert!(passes.iter().all(|pass| pass.training));
        seen.extend(passes.iter().map(|pass| (pass.step, pass.micro_batch)));
    }
    seen.sort_unstable();
    let all = (0..3).flat_map(|step| (0..MICRO_BATCHES).map(move |micro_batch| (step, micro_batch)));
    assert_eq!(seen, Vec::from_iter(all), "each micro-batch is computed once");
}

#[rstest]
fn a_pipeline_tells_every_stage_the_pass_of_each_micro_batch(
    #[values(ScheduleKind::Gpipe, ScheduleKind::OneForwardOneBackward)] kind: ScheduleKind,
    #[values((1, 1), (2, 1), (2, 2))] (stages, pipelines): (usize, usize),
) {
    let outcome = sim::run(1, stages * pipelines, move |transport| {
        let mut world = Communicator::new(transport);
        let (pipeline, stage) = (world.rank() / stages, world.rank() % stages);
        let own: Vec<usize> = (0..stages).map(|stage| pipeline * stages + stage).collect();
        let own = world.subgroup(&own).unwrap().unwrap();
        let beside: Vec<usize> = (0..pipelines).map(|pipeline| pipeline * stages + stage).collect();
        let beside = world.subgroup(&beside).unwrap().unwrap();
        let schedule = kind.schedule(stages, MICRO_BATCHES / pipelines).unwrap();
        let ranges = split_into_stages(2, stages).unwrap();
        let (model, seen) = model();
        let mut pipeline = Pipeline::new(own, model, schedule, &ranges, PlainVectors).unwrap();
        pipeline.reduce_over(beside).unwrap();
        for _ in 0..3 {
            pipeline.step(|index| Ok(input(index)), |_, output| loss(output)).unwrap();
            pipeline.update(&mut sgd()).unwrap();
        }
        pipeline.evaluate(2, |index| Ok(input(index)), |_, output| Ok(loss(output)?.0)).unwrap();
        let mut bits = Vec::new();
        pipeline.for_each_parameter(|index, values| bits.push((index, floats(values)[0].to_bits()))).unwrap();
        (bits, Vec::clone(&seen.lock().unwrap()))
    });
    let mut bits: Bits = outcome.results.iter().flat_map(|(bits, _)| bits.clone()).collect();
    bits.sort_unstable();
    bits.dedup();
    assert_eq!(bits, expected(3));
    let seen: Vec<Pass> = outcome.results.into_iter().flat_map(|(_, seen)| seen).collect();
    let evaluated = seen.iter().filter(|pass| !pass.training);
    let mut evaluated: Vec<(u64, usize)> = evaluated.map(|pass| (pass.step, pass.micro_batch)).collect();
    evaluated.sort_unstable();
    assert_eq!(evaluated, [(3, 0), (3, 1)]);
}

/// Takes steps, and goes forward outside of them, in both modes.
macro_rules! use_modes {
    ($trainer:expr) => {
        let mut trainer = $trainer;
        trainer.forward(input(0)).unwrap();
        trainer.train();
        trainer.forward(input(0)).unwrap();
        trainer.step(2, |index| Ok((input(index), loss))).unwrap();
        trainer.eval();
        trainer.step(2, |index| Ok((input(index), loss))).unwrap();
        trainer.forward(input(0)).unwrap();
    };
}

#[rstest]
fn steps_train_and_evaluations_do_not_whatever_the_mode_outside_of_them(
    #[values(0, 1, 2, 3, 4, 5)] way: usize,
) {
    let outcome = sim::run(1, 2, move |transport| {
        let (comm, (model, seen)) = (Communicator::new(transport), model());
        match WAYS[way] {
            TrainingWay::Ddp => {
                use_modes!(Ddp::new(comm, model, DdpOptions::default()).unwrap());
            }
            TrainingWay::Sharded(strategy) => {
                use_modes!(Fsdp::new(comm, model, &FsdpOptions::new(strategy)).unwrap());
            }
        }
        Vec::clone(&seen.lock().unwrap())
    });
    for (rank, seen) in outcome.results.into_iter().enumerate() {
        let pass = |training, step, micro_batch| Pass { training, step, micro_batch };
        let passes = [
            pass(false, 0, 0),
            pass(true, 0, 0),
            pass(true, 0, rank),
            pass(true, 1, rank),
            pass(false, 2, 0),
        ];
        assert_eq!(seen, passes);
    }
}

#[rstest]
fn an_evaluation_is_never_in_training_mode(#[values(0, 1, 2, 3, 4, 5)] way: usize) {
    let outcome = sim::run(1, 2, move |transport| {
        trained(WAYS[way], Communicator::new(transport), |trainer| {
            trainer.train();
            trainer.evaluate(4, |index| Ok(input(index)), |_, output| Ok(loss(output)?.0)).unwrap();
        })
        .1
    });
    let mut seen: Vec<Pass> = outcome.results.into_iter().flatten().collect();
    seen.sort_unstable_by_key(|pass| pass.micro_batch);
    let pass = |micro_batch| Pass { training: false, step: 0, micro_batch };
    assert_eq!(seen, [0, 1, 2, 3].map(pass));
}

#[rstest]
fn a_join_gives_each_micro_batch_a_number_of_its_own(#[values(0, 1, 2, 3, 4, 5)] way: usize) {
    let outcome = sim::run(1, 2, move |transport| {
        let comm = Communicator::new(transport);
        let own = 1 + comm.rank();
        trained(WAYS[way], comm, |trainer| {
            trainer.join(own, |index| Ok((input(index), loss))).unwrap().unwrap();
        })
        .1
    });
    let numbers = |rank: usize| Vec::from_iter(outcome.results[rank].iter().map(|pass| pass.micro_batch));
    assert_eq!([numbers(0), numbers(1)], [vec![0], vec![1, 3]]);
}

/// The program calls its checkpoint step 100: passes count the steps of the trainer.
#[rstest]
fn passes_continue_when_a_checkpoint_is_loaded(
    #[values(0, 1, 2, 3, 4, 5)] saved_by: usize,
    #[values(0, 1, 3)] loaded_by: usize,
) {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_owned();
    let saved = sim::run(1, 4, move |transport| {
        trained(WAYS[saved_by], Communicator::new(transport), |trainer| {
            take_steps(trainer, 2, 0);
            trainer.save(&mut Checkpoints::at(&directory), None, 100).unwrap();
        })
        .0
    });
    assert_eq!(saved.results, vec![expected(2); 4]);
    let directory = folder.path().to_owned();
    let continued = sim::run(1, 2, move |transport| {
        trained(WAYS[loaded_by], Communicator::new(transport), |trainer| {
            assert_eq!(trainer.load(&mut Checkpoints::at(&directory), None).unwrap(), Some(100));
            take_steps(trainer, 1, 0);
        })
        .0
    });
    assert_eq!(continued.results, vec![expected(3); 2]);
}

#[test]
fn ranks_that_train_by_themselves_count_alike_and_differ_in_the_micro_batch() {
    let folder = tempfile::tempdir().unwrap();
    let outcome = sim::run(1, 2, move |transport| {
        let comm = Communicator::new(transport);
        let (model, seen) = model();
        let mut local = LocalSgd::new(comm, model, LocalSgdOptions::average(2)).unwrap();
        let step = |model: &mut Sequence<Vec<f32>>| Ok(loss(model.forward(input(0))?.0)?.0);
        for _ in 0..3 {
            local.step_with(step).unwrap();
        }
        local.synchronise().unwrap();
        let mut checkpoints = Checkpoints::at(folder.path());
        local.save(&mut checkpoints, None, 7).unwrap();
        local.step_with(step).unwrap();
        local.synchronise().unwrap();
        local.load(&mut checkpoints, None).unwrap();
        local.step_with(step).unwrap();
        local.model_mut().forward(input(0)).unwrap();
        Vec::clone(&seen.lock().unwrap())
    });
    for (rank, seen) in outcome.results.into_iter().enumerate() {
        let of_step = |step| Pass { training: true, step, micro_batch: rank };
        let outside = Pass { training: false, step: 5, micro_batch: 0 };
        let passes = [of_step(0), of_step(1), of_step(2), of_step(4), of_step(4), outside];
        assert_eq!(seen, passes);
    }
}
