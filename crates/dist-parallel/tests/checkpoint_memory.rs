//! The additional memory of a rank that saves or loads: none, a copy of its file, or a copy of its state.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use dist_collectives::Communicator;
use dist_parallel::checkpoint::Checkpoints;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::model::{Ready, Saved, Slot};
use dist_parallel::optim::{AdamW, AdamWOptions, Momentum, OptimizerState as _, Sgd, SgdOptions};
use dist_parallel::trainer::Trainer;
use dist_parallel::{
    Block, BoxError, Ddp, DdpOptions, FloatType, ParamInfo, Params, Sequence, Values, ValuesMut,
};
use dist_transport::sim;
use rstest::rstest;

/// A model of 8 MiB in two parameters.
struct Model {
    infos: Vec<ParamInfo>,
    values: Vec<Vec<f32>>,
}

impl Model {
    fn new() -> Self {
        let info = |name| ParamInfo::new(name, [LEN], FloatType::F32);
        Self { infos: ["first", "second"].map(info).into(), values: vec![vec![1.0; LEN]; 2] }
    }
}

impl Params for Model {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn read(&self, index: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        f(Values::F32(&self.values[index]));
        Ok(())
    }

    fn write(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        f(ValuesMut::F32(&mut self.values[index]));
        Ok(())
    }
}

#[test]
fn a_rank_copies_its_file_to_save_and_its_state_to_load() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let peaks = sim::run(1, 2, move |transport| {
        let mut ddp = Ddp::new(Communicator::new(transport), Model::new(), DdpOptions::default()).unwrap();
        let momentum = Momentum::Plain(0.9);
        let mut sgd = Sgd::new(SgdOptions { momentum, ..SgdOptions::default() }).unwrap();
        ddp.step_with(2, |model, _, ready| {
            (0..2).try_for_each(|index| ready(index, Values::F32(&model.values[index])))?;
            Ok(0.0)
        })
        .unwrap();
        ddp.update(&mut sgd).unwrap();
        let mut checkpoints = Checkpoints::at(&path);
        let saved = peak(|| checkpoints.save(&mut ddp, Some(&sgd), 1).unwrap());
        let copied = peak(|| {
            checkpoints.start_save(&mut ddp, Some(&sgd), 2).unwrap().wait().unwrap();
        });
        let loaded = peak(|| assert_eq!(checkpoints.load(&mut ddp, Some(&mut sgd)).unwrap(), Some(2)));
        assert_eq!(sgd.states().unwrap().get(0).unwrap().arrays()[0].len(), LEN);
        [saved, copied, loaded]
    });
    // The velocities are as large as the parameters, and each of two ranks writes half of both.
    for [saved, copied, loaded] in peaks.results {
        assert!(saved < ROOM, "{saved} bytes");
        assert!((MODEL..MODEL + ROOM).contains(&copied), "{copied} bytes");
        assert!((2 * MODEL..2 * MODEL + ROOM).contains(&loaded), "{loaded} bytes");
    }
}

/// A model of parameters with two values each, all with gradients of one.
struct Small {
    infos: Vec<ParamInfo>,
    slots: Vec<Slot>,
}

impl Small {
    fn new(tensors: usize) -> Self {
        let info = |number| ParamInfo::new(format!("layer.{number}.bias"), [2], FloatType::F32);
        let slots = (0..tensors).map(|_| Slot::from(vec![1.0_f32; 2])).collect();
        Self { infos: (0..tensors).map(info).collect(), slots }
    }
}

impl Params for Small {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn slots(&self) -> &[Slot] {
        &self.slots
    }

    fn slots_mut(&mut self) -> &mut [Slot] {
        &mut self.slots
    }
}

impl Block<Vec<f32>> for Small {
    fn forward(&mut self, input: Vec<f32>) -> Result<(Vec<f32>, Saved), BoxError> {
        Ok((input, Saved::new(())))
    }

    fn backward(
        &mut self,
        saved: Saved,
        gradient: Vec<f32>,
        ready: &mut Ready<'_>,
    ) -> Result<Option<Vec<f32>>, BoxError> {
        saved.take::<()>()?;
        (0..self.infos.len()).try_for_each(|index| ready(index, Values::F32(&[1.0; 2])))?;
        Ok(Some(gradient))
    }
}

/// Returns the bytes that one of two ranks allocates to start, train, save and load with `tensors` tensors.
fn allocated(tensors: usize, strategy: Option<ShardingStrategy>) -> [u64; 4] {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let outcome = sim::run(1, 2, move |transport| {
        let comm = Communicator::new(transport);
        let mut adamw = AdamW::new(AdamWOptions::default()).unwrap();
        let mut checkpoints = Checkpoints::at(&path);
        let measure = |program: &mut dyn FnMut()| allocation_counter::measure(program).bytes_total;
        let (mut comm, mut trainer) = (Some(comm), None);
        let begun = measure(&mut || {
            let comm = comm.take().unwrap();
            let model = Sequence::new(vec![Box::new(Small::new(tensors)) as Box<dyn Block<_>>]).unwrap();
            trainer = Some(match strategy {
                None => {
                    Box::new(Ddp::new(comm, model, DdpOptions::default()).unwrap()) as Box<dyn Trainer<_>>
                }
                Some(strategy) => Box::new(Fsdp::new(comm, model, &FsdpOptions::new(strategy)).unwrap()),
            });
        });
        let mut trainer = trainer.unwrap();
        let trained = measure(&mut || {
            trainer.step(2, |_| Ok((vec![0.0], |out: Vec<f32>| Ok((0.0_f32, out))))).unwrap();
            trainer.update(&mut adamw).unwrap();
        });
        let saved = measure(&mut || trainer.save(&mut checkpoints, Some(&adamw), 1).unwrap());
        let loaded = measure(&mut || {
            assert_eq!(trainer.load(&mut checkpoints, Some(&mut adamw)).unwrap(), Some(1));
        });
        [begun, trained, saved, loaded]
    });
    outcome.results[1]
}

/// Searching or creating a list for each tensor would take four times as much for twice as many.
#[rstest]
fn memory_for_many_tensors_grows_linearly_with_their_number(
    #[values(
        None,
        Some(ShardingStrategy::FullShard),
        Some(ShardingStrategy::ShardGradOp),
        Some(ShardingStrategy::ShardOptimizer),
        Some(ShardingStrategy::NoShard)
    )]
    strategy: Option<ShardingStrategy>,
) {
    let (few, many) = (allocated(1000, strategy), allocated(2000, strategy));
    for (what, (few, many)) in ["begin", "train", "save", "load"].into_iter().zip(few.into_iter().zip(many)) {
        assert!(2 * many < 5 * few, "{what}: {few} bytes for 1000 tensors, {many} for 2000");
    }
}

/// Returns the peak memory of this thread above its previous use.
fn peak(program: impl FnOnce()) -> u64 {
    allocation_counter::measure(program).bytes_max
}

const LEN: usize = 1 << 20;
const MODEL: u64 = 2 * 4 * LEN as u64;
/// For a block of reading, the index, and the messages between ranks.
const ROOM: u64 = 1 << 19;
