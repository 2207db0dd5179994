//! Padding of flat parameters stays zero. Shards are read in place if memory is shared.

use std::{fs, slice};

use dist_collectives::Communicator;
use dist_transport::sim;
use rstest::rstest;

use super::*;
use crate::{AdamW, AdamWOptions, Block, BoxError, Checkpoints, FloatType, ParamInfo, Ready, Saved, Slot};

/// Adds to the input the sum of all parameters, each times its index.
struct Weighted {
    infos: [ParamInfo; 1],
    slot: Slot,
}

impl Weighted {
    fn new(name: &str, len: u8) -> Self {
        let slot = Slot::from((0..len).map(f32::from).collect::<Vec<_>>());
        Self { infos: [ParamInfo::new(name, [usize::from(len)], FloatType::F32)], slot }
    }
}

impl Params for Weighted {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn slots(&self) -> &[Slot] {
        slice::from_ref(&self.slot)
    }

    fn slots_mut(&mut self) -> &mut [Slot] {
        slice::from_mut(&mut self.slot)
    }
}

impl Block<f32> for Weighted {
    fn forward(&mut self, input: f32) -> Result<(f32, Saved), BoxError> {
        let Values::F32(values) = self.slot.values()? else { return Err("this model is f32".into()) };
        let sum = values.iter().zip(1_u8..).map(|(value, number)| value * f32::from(number)).sum::<f32>();
        Ok((input + sum, Saved::new(())))
    }

    fn backward(&mut self, _: Saved, gradient: f32, ready: &mut Ready<'_>) -> Result<Option<f32>, BoxError> {
        let len = u8::try_from(self.infos[0].len())?;
        let own: Vec<f32> = (1..=len).map(|number| gradient * f32::from(number)).collect();
        ready(0, own[..].into())?;
        Ok(Some(gradient))
    }
}

/// The lengths of the units. They reuse memory of 8 values on 4 ranks; most ranks have no value of the fourth.
const LENS: [u8; 5] = [8, 5, 7, 1, 6];

fn model() -> Sequence<f32> {
    let block = |(index, len): (usize, u8)| -> Box<dyn Block<f32>> {
        Box::new(Weighted::new(&format!("p{index}"), len))
    };
    Sequence::new(LENS.into_iter().enumerate().map(block).collect()).unwrap()
}

fn all_zero(part: Values<'_>, from: usize) -> bool {
    let Values::F32(values) = part else { return false };
    values[from..].iter().all(|value| value.to_bits() == 0)
}

/// Returns the number of values in the files of a checkpoint: the parameters and AdamW's two numbers for each.
fn values_in_files(directory: &std::path::Path) -> usize {
    let mut paths = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let step = paths.find(|path| path.is_dir()).unwrap();
    let mut values = 0;
    for entry in fs::read_dir(step).unwrap() {
        let bytes = fs::read(entry.unwrap().path()).unwrap();
        let Ok(file) = safetensors::SafeTensors::deserialize(&bytes) else { continue };
        let floats = file.iter().filter(|(_, tensor)| tensor.dtype() == safetensors::Dtype::F32);
        values += floats.map(|(_, tensor)| tensor.shape().iter().product::<usize>()).sum::<usize>();
    }
    values
}

#[rstest]
#[case(ShardingStrategy::FullShard)]
#[case(ShardingStrategy::ShardGradOp)]
#[case(ShardingStrategy::ShardOptimizer)]
#[case(ShardingStrategy::HybridShard { shard_degree: 2 })]
fn padding_stays_zero_and_is_in_no_norm_and_no_checkpoint(
    #[case] strategy: ShardingStrategy,
    #[values(false, true)] shares: bool,
) {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_owned();
    let program = move |transport| {
        let options = FsdpOptions::new(strategy).with_prefetch(1);
        let mut fsdp = Fsdp::new(Communicator::new(transport), model(), &options).unwrap();
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        let mut norms = Vec::new();
        for _ in 0..100 {
            fsdp.step(8, |index| Ok((index as f32, |output: f32| Ok((output * output, 2.0 * output)))))
                .unwrap();
            norms.push(fsdp.gradient_norm().unwrap().to_bits());
            fsdp.update(&mut optimizer).unwrap();
            let (layout, rank) = (&fsdp.engine.stage().plan.layout, fsdp.engine.groups.shards.rank());
            for ((unit, index), flat_param) in layout.flat_params() {
                let used =
                    flat_param.len().saturating_sub(rank * flat_param.shard_len).min(flat_param.shard_len);
                let kept = fsdp.engine.stage().parameters.part(unit, index, flat_param.shard_len).into_iter();
                let gradients =
                    fsdp.engine.stage().gradients.means().nth(unit).map(|part| part.slice(0, part.len()));
                let mut parts = kept.chain(gradients);
                assert!(parts.all(|part| all_zero(part, used)), "unit {unit} on rank {rank}");
            }
        }
        Checkpoints::at(&directory).save(&mut fsdp, Some(&optimizer), 100).unwrap();
        norms
    };
    let network = sim::Network::new(4);
    let network = if shares { network.with_shared_memory() } else { network };
    let norms = network.run(program).results;
    let alone = sim::run(1, 1, |transport| {
        let mut ddp =
            crate::Ddp::new(Communicator::new(transport), model(), crate::DdpOptions::default()).unwrap();
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        let step = |_| {
            ddp.step(8, |index| Ok((index as f32, |output: f32| Ok((output * output, 2.0 * output)))))
                .unwrap();
            let norm = ddp.gradient_norm().unwrap().to_bits();
            ddp.update(&mut optimizer).unwrap();
            norm
        };
        (0..100).map(step).collect::<Vec<_>>()
    });
    assert_eq!(norms, vec![alone.results[0].clone(); 4]);
    assert_eq!(values_in_files(folder.path()), 3 * LENS.iter().map(|&len| usize::from(len)).sum::<usize>());
}

/// Returns the bytes that a rank sends in a step, if it sends only parameters and gradients.
fn bytes_of_step(network: sim::Network, options: &FsdpOptions, reads: bool) -> u64 {
    let options = options.clone();
    let gathers_updates = !reads && options.strategy == ShardingStrategy::ShardGradOp;
    let program = move |transport| {
        let mut fsdp = Fsdp::new(Communicator::new(transport), model(), &options).unwrap();
        assert_eq!(fsdp.engine.stage().parameters.are_read(), reads);
        assert_eq!(fsdp.engine.stage().parameters.gathers_updates_in_place(), gathers_updates);
        let before = fsdp.tensor_bytes_sent();
        fsdp.step(2, |_| Ok((1.0, |output: f32| Ok((output, 1.0))))).unwrap();
        fsdp.tensor_bytes_sent() - before
    };
    network.run(program).results[0]
}

#[test]
fn parameters_of_one_type_are_read_where_memory_is_shared_and_nothing_is_sent_of_them() {
    let network = || sim::Network::new(2).with_shared_memory();
    let full = FsdpOptions::new(ShardingStrategy::FullShard);
    let gradients: usize = LENS.iter().map(|&len| usize::from(len).div_ceil(2) * size_of::<f32>()).sum();
    assert_eq!(bytes_of_step(network(), &full, true), gradients as u64);
    assert!(bytes_of_step(sim::Network::new(2), &full, false) > gradients as u64);
    // Other ranks can read private memory there as well.
    assert_eq!(bytes_of_step(network().without_heap(1), &full, true), gradients as u64);
    for strategy in [ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
        bytes_of_step(network(), &FsdpOptions::new(strategy), false);
    }
    let wide = Precision { master: Some(FloatType::F64), ..Precision::default() };
    bytes_of_step(network(), &full.with_precision(wide), false);
}

/// A model that claims to have filled its two values, and calls back with `len` values, or never.
struct Careless {
    infos: [ParamInfo; 1],
    called_with: Option<usize>,
}

impl Params for Careless {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn fill(&mut self, _: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<bool, BoxError> {
        if let Some(len) = self.called_with {
            f(ValuesMut::F32(&mut vec![0.0; len]));
        }
        Ok(true)
    }
}

#[rstest]
#[case(None, false)]
#[case(Some(1), false)]
#[case(Some(3), false)]
#[case(Some(2), true)]
fn a_model_that_does_not_fill_its_memory_as_declared_is_refused(
    #[case] called_with: Option<usize>,
    #[case] fine: bool,
) {
    let mut model = Careless { infos: [ParamInfo::new("p", [2], FloatType::F32)], called_with };
    let filled = params::fill(&mut model, 0, |_| Ok(()));
    match filled {
        Ok(filled) => assert!(filled && fine),
        Err(error) => assert!(matches!(&error, Error::Model { .. }) && !fine, "{error}"),
    }
}

#[test]
fn no_rank_waits_for_all_that_another_does_with_units() {
    let each = std::time::Duration::from_secs(40);
    let network = sim::Network::new(2).with_shared_memory();
    let outcome = network.run(move |transport| {
        let comm = Communicator::new(transport);
        let (rank, runtime) = (comm.rank(), comm.runtime().clone());
        let options = FsdpOptions::new(ShardingStrategy::FullShard);
        let mut fsdp = Fsdp::new(comm, model(), &options).unwrap();
        assert!(fsdp.engine.stage().parameters.are_read());
        // All units together take far longer than the timeout of one call.
        let read = fsdp.for_each_parameter(|_, _| {
            if rank == 0 {
                runtime.sleep(each);
            }
        });
        read.unwrap();
    });
    assert!(outcome.elapsed > std::time::Duration::from_secs(60), "{:?}", outcome.elapsed);
}
