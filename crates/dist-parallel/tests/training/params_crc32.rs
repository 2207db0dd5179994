//! Checksums of trained parameters for each strategy, number of ranks and number of micro-batches. No change of the code
//! may change them. Strategies that sum the same micro-batches in the same order have the same checksum.

use dist_collectives::Communicator;
use dist_parallel::optim::{Momentum, Sgd, SgdOptions};
use dist_parallel::pipeline::PlainVectors;
use dist_parallel::trainer::{Strategy, TrainerOptions};
use dist_parallel::{Block, Error, Result, Sequence, Values};
use dist_transport::sim;
use rstest::rstest;

use crate::plain::{Linear, Relu, Rows, batch};

const RANKS: [usize; 4] = [1, 2, 4, 8];

/// The shares of the last one are no powers of two.
const MICRO_BATCHES: [usize; 3] = [8, 16, 24];

/// Returns a model of sixteen blocks. Parameters are tied between stages, and others are frozen.
fn model() -> Sequence<Rows> {
    let first = Linear::new("first", 3, 3, 1);
    let again = first.sharing_weight("again", 2);
    let mut blocks: Vec<Box<dyn Block<Rows>>> = vec![Box::new(first)];
    for (index, seed) in (3..9).enumerate() {
        let linear = Linear::new(&format!("inner{index}"), 3, 3, seed);
        let linear = if index == 1 { linear.frozen() } else { linear };
        blocks.extend([Box::new(linear) as Box<dyn Block<Rows>>, Box::new(Relu)]);
    }
    let last: [Box<dyn Block<Rows>>; 3] =
        [Box::new(again), Box::new(Relu), Box::new(Linear::new("last", 3, 2, 9))];
    blocks.extend(last);
    let mut model = Sequence::new(blocks).unwrap();
    model.tie("again.weight", "first.weight").unwrap();
    model
}

/// Takes three steps that are clipped. Returns the checksum of all parameters, which is equal on all ranks.
fn trained(comm: Communicator, strategy: Strategy, micro_batches: usize) -> Result<u32> {
    let options = TrainerOptions::new(strategy).with_micro_batches(micro_batches);
    let mut trainer = options.build(comm, model(), PlainVectors)?;
    let momentum = Momentum::Plain(0.9);
    let mut sgd = Sgd::new(SgdOptions { learning_rate: 0.05, momentum, ..SgdOptions::default() })?;
    for step in 0..3 {
        trainer.step(micro_batches, batch(step))?;
        trainer.clip_gradients(0.5)?;
        trainer.update(&mut sgd)?;
    }
    trainer.synchronise_parameters()?;
    let mut parameters = vec![Vec::new(); trainer.infos().len()];
    trainer.for_each_parameter(&mut |index, values| {
        let Values::F32(values) = values else { panic!("the model is not {}", values.dtype()) };
        parameters[index] = bytemuck::cast_slice::<f32, u8>(values).to_vec();
    })?;
    Ok(crc32fast::hash(&parameters.concat()))
}

/// Returns the checksum on all ranks. `None` if the strategy cannot divide the ranks, the blocks or the micro-batches.
fn params_crc32(strategy: Strategy, ranks: usize, micro_batches: usize) -> Option<u32> {
    let outcome = sim::run(3, ranks, move |transport| {
        match trained(Communicator::new(transport), strategy, micro_batches) {
            Ok(checksum) => Some(checksum),
            Err(
                Error::NotWithStrategy { .. }
                | Error::ShardDegree { .. }
                | Error::PipelineShares { .. }
                | Error::NoSchedule { .. },
            ) => None,
            Err(error) => panic!("{strategy} on {ranks} ranks: {error}"),
        }
    });
    assert!(outcome.results.iter().all(|found| *found == outcome.results[0]), "{:?}", outcome.results);
    outcome.results[0]
}

#[rstest]
#[case("single", [
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0, 0, 0],
    [0, 0, 0],
    [0, 0, 0],
])]
#[case("ddp", [
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x49e8_14f8],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x49e8_14f8],
])]
#[case("zero1", [
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x49e8_14f8],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x49e8_14f8],
])]
#[case("zero2", [
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
])]
#[case("fsdp", [
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
])]
#[case("hybrid:2", [
    [0, 0, 0],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x49e8_14f8],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
])]
#[case("pipeline:gpipe", [
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
])]
#[case("pipeline:1f1b", [
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
])]
#[case("pipeline:interleaved", [
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
])]
#[case("pipeline:zb1p", [
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
])]
#[case("pipeline:zbv", [
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
])]
#[case("pipeline:1f1b:2", [
    [0, 0, 0],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x49e8_14f8],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
])]
#[case("pipeline:zbv:2:sharded", [
    [0, 0, 0],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xf040_b12f, 0x6235_0a8d, 0x49e8_14f8],
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
])]
#[case("local_sgd:2", [
    [0xf040_b12f, 0x6235_0a8d, 0x4e5a_eb24],
    [0xc078_5b15, 0x9682_2369, 0x9e57_babe],
    [0x8f8f_037e, 0x9545_af20, 0x9d07_f41e],
    [0x2032_227a, 0xcbdf_123b, 0xc00e_46b9],
])]
#[case("diloco:2", [
    [0xd298_1034, 0x88cd_cd41, 0x7c5b_a379],
    [0xa125_d8e7, 0xaffd_a1df, 0x6da0_6546],
    [0xd8d4_cf47, 0x3db8_9a43, 0xb5c3_ac8c],
    [0xd6ed_ae26, 0x1533_564e, 0xd5cd_1cc7],
])]
fn trained_parameters_have_their_params_crc32(#[case] strategy: &str, #[case] expected: [[u32; 3]; 4]) {
    let of: Strategy = strategy.parse().unwrap();
    // 0 stands for a combination that is refused.
    let found = RANKS.map(|ranks| MICRO_BATCHES.map(|count| params_crc32(of, ranks, count).unwrap_or(0)));
    assert!(found == expected, "#[case(\"{strategy}\", {found:#010x?})]");
}
