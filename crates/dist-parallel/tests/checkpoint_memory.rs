//! What saving and loading add to a rank's memory: nothing, a copy of what it writes, or a copy of what it holds.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use dist_collectives::Communicator;
use dist_parallel::{
    BoxError, Checkpoints, Ddp, DdpOptions, FloatType, Momentum, Optimizer, ParamInfo, Params, Sgd,
    SgdOptions, Values, ValuesMut,
};
use dist_transport::sim;

/// 8 MiB in two parameters.
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
fn a_rank_copies_what_it_writes_to_go_on_and_what_it_holds_to_load_it() {
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
        assert_eq!(sgd.state(0).unwrap().arrays[0].len(), LEN);
        [saved, copied, loaded]
    });
    // The velocities are as large as the parameters, and each of two ranks writes half of both.
    for [saved, copied, loaded] in peaks.results {
        assert!(saved < ROOM, "{saved} bytes");
        assert!((MODEL..MODEL + ROOM).contains(&copied), "{copied} bytes");
        assert!((2 * MODEL..2 * MODEL + ROOM).contains(&loaded), "{loaded} bytes");
    }
}

/// The most memory that this thread has had at a time, beyond what it had before.
fn peak(program: impl FnOnce()) -> u64 {
    allocation_counter::measure(program).bytes_max
}

const LEN: usize = 1 << 20;
const MODEL: u64 = 2 * 4 * LEN as u64;
/// For a block to read into, the index, and what is said between ranks.
const ROOM: u64 = 1 << 19;
