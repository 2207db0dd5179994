//! Models with parameters in half types, which are used, reduced, updated and saved in them, with the bits of one
//! process.

use dist_collectives::Communicator;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::model::{Ready, Saved, Slot};
use dist_parallel::trainer::Trainer;
use dist_parallel::{Block, BoxError, Ddp, DdpOptions, FloatType, ParamInfo, Sequence};
use dist_transport::sim;
use rstest::rstest;

use crate::ddp::train_steps;
use crate::plain::{Linear, Numbers, Rows, bits, floats, params_in_slots, rounded};

/// A block that scales each column by a parameter of any type, used as f32.
pub(crate) struct Scale {
    infos: [ParamInfo; 1],
    slots: [Slot; 1],
    columns: usize,
}

impl Scale {
    pub(crate) fn new(name: &str, columns: usize, dtype: FloatType, seed: u64) -> Self {
        let infos = [ParamInfo::new(format!("{name}.scale"), [columns], dtype)];
        Self { infos, slots: [rounded(dtype, &Numbers(seed).take(columns))], columns }
    }

    fn factors(&self) -> Result<Vec<f32>, BoxError> {
        Ok(floats(self.slots[0].values()?))
    }
}

params_in_slots!(Scale);

impl Block<Rows> for Scale {
    fn forward(&mut self, input: Rows) -> Result<(Rows, Saved), BoxError> {
        let factors = self.factors()?;
        let output = input.chunks(self.columns).flat_map(|row| row.iter().zip(&factors).map(|(x, w)| x * w));
        Ok((output.collect(), Saved::new(input)))
    }

    fn backward(
        &mut self,
        saved: Saved,
        gradient: Rows,
        ready: &mut Ready<'_>,
    ) -> Result<Option<Rows>, BoxError> {
        let (input, factors): (Rows, _) = (saved.take()?, self.factors()?);
        let mut own = vec![0.0; self.columns];
        for (row, of_row) in input.chunks(self.columns).zip(gradient.chunks(self.columns)) {
            own.iter_mut().zip(row).zip(of_row).for_each(|((own, x), g)| *own += x * g);
        }
        ready(0, rounded(self.infos[0].dtype, &own).values()?)?;
        let of_input = gradient.chunks(self.columns);
        Ok(Some(of_input.flat_map(|row| row.iter().zip(&factors).map(|(g, w)| g * w)).collect()))
    }
}

/// Returns a model with both half types in one unit, together with f32. No number of parameters is divisible
/// by the ranks.
fn model(seed: u64) -> Sequence<Rows> {
    let scale = |name: &str, columns, dtype, more| Scale::new(name, columns, dtype, seed + more);
    let blocks: Vec<Box<dyn Block<Rows>>> = vec![
        Box::new(scale("first", 3, FloatType::Bf16, 10)),
        Box::new(Linear::new("middle", 3, 5, seed)),
        Box::new(scale("second", 5, FloatType::F16, 11)),
        Box::new(scale("third", 5, FloatType::Bf16, 12)),
        Box::new(Linear::new("last", 5, 2, seed + 1)),
    ];
    Sequence::new(blocks).unwrap()
}

/// Returns the parameters after 100 steps of AdamW with clipping, on every rank.
fn trained(network: sim::Network, options: Option<FsdpOptions>) -> Vec<Vec<u32>> {
    let program = move |transport| {
        let comm = Communicator::new(transport);
        let model = model(7 + comm.rank() as u64);
        let trainer: Box<dyn Trainer<Rows>> = match &options {
            Some(options) => Box::new(Fsdp::new(comm, model, options).unwrap()),
            None => Box::new(Ddp::new(comm, model, DdpOptions::default()).unwrap()),
        };
        let ((parameters, _), _) = train_steps(trainer, (100, 4), "adamw", Some(0.4));
        parameters
    };
    network.run(program).results
}

fn alone() -> Vec<u32> {
    trained(sim::Network::new(1), None).remove(0)
}

#[test]
fn ddp_trains_half_types_as_one_process() {
    let alone = alone();
    assert_ne!(alone, bits(&model(7)));
    assert_eq!(trained(sim::Network::new(4), None), vec![alone; 4]);
}

#[rstest]
#[case(ShardingStrategy::FullShard)]
#[case(ShardingStrategy::ShardGradOp)]
#[case(ShardingStrategy::ShardOptimizer)]
#[case(ShardingStrategy::NoShard)]
#[case(ShardingStrategy::HybridShard { shard_degree: 2 })]
fn sharded_training_trains_half_types_as_one_process(#[case] strategy: ShardingStrategy) {
    let options = FsdpOptions::new(strategy).with_prefetch(1);
    let alone = alone();
    let units = options.clone().with_units(dist_parallel::fsdp::Units::Blocks(vec![2, 3]));
    for (options, shares) in [(options, false), (units.clone(), false), (units, true)] {
        let network = sim::Network::new(4);
        let network = if shares { network.with_shared_memory() } else { network };
        assert_eq!(trained(network, Some(options)), vec![alone.clone(); 4]);
    }
}
