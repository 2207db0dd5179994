//! A model with more blocks than stages, and its training in one process.

use dist_collectives::Communicator;
use dist_parallel::optim::{AdamW, AdamWOptions};
use dist_parallel::{Block, Ddp, DdpOptions, Sequence};
use dist_transport::sim;

use crate::plain::{Linear, Relu, Rows, batch, bits};

pub(crate) const STEPS: usize = 2;

/// The result of a training: the parameters, and every step's loss.
pub(crate) type Trained = (Vec<u32>, Vec<u32>);

/// Returns a model of 19 blocks. Four of them, far apart, share one weight; another is frozen.
pub(crate) fn deep(seed: u64) -> Sequence<Rows> {
    let first = Linear::new("l0", 3, 3, seed);
    let mut tied = Vec::new();
    let mut blocks: Vec<Box<dyn Block<Rows>>> = Vec::new();
    for layer in 1..9_u8 {
        let name = format!("l{layer}");
        let linear = match layer {
            2 | 5 | 7 => {
                tied.push(format!("{name}.weight"));
                first.sharing_weight(&name, seed + u64::from(layer))
            }
            4 => Linear::new(&name, 3, 3, seed + u64::from(layer)).frozen(),
            _ => Linear::new(&name, 3, 3, seed + u64::from(layer)),
        };
        blocks.extend([Box::new(linear) as Box<dyn Block<Rows>>, Box::new(Relu)]);
    }
    blocks.insert(0, Box::new(first));
    blocks.insert(1, Box::new(Relu));
    blocks.push(Box::new(Linear::new("last", 3, 2, seed + 9)));
    let mut model = Sequence::new(blocks).unwrap();
    tied.iter().for_each(|name| model.tie(name, "l0.weight").unwrap());
    model
}

pub(crate) const BLOCKS: usize = 19;

pub(crate) fn optimizer() -> AdamW {
    AdamW::new(AdamWOptions { learning_rate: 0.03, ..AdamWOptions::default() }).unwrap()
}

/// Returns the result of one process without a pipeline.
pub(crate) fn alone(micro_batches: usize) -> Trained {
    alone_with(micro_batches, |_| ())
}

/// Returns the same with a change of every step's gradients.
pub(crate) fn alone_with(micro_batches: usize, change: fn(&mut Ddp<Sequence<Rows>>)) -> Trained {
    let mut outcome = sim::run(1, 1, move |transport| {
        let mut ddp = Ddp::new(Communicator::new(transport), deep(7), DdpOptions::default()).unwrap();
        let mut optimizer = optimizer();
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let report = ddp.step(micro_batches, batch(step));
            losses.push(report.unwrap().loss.to_bits());
            change(&mut ddp);
            ddp.update(&mut optimizer).unwrap();
        }
        (bits(ddp.model()), losses)
    });
    outcome.results.remove(0)
}

/// Implements `Params` for a block without parameters.
macro_rules! without_parameters {
    ($block:ty) => {
        impl dist_parallel::Params for $block {
            fn infos(&self) -> &[dist_parallel::ParamInfo] {
                &[]
            }
            fn read(
                &self,
                _: usize,
                _: &mut dyn FnMut(dist_parallel::Values<'_>),
            ) -> Result<(), dist_parallel::BoxError> {
                Err("there are no parameters".into())
            }
            fn write(
                &mut self,
                _: usize,
                _: &mut dyn FnMut(dist_parallel::ValuesMut<'_>),
            ) -> Result<(), dist_parallel::BoxError> {
                Err("there are no parameters".into())
            }
        }
    };
}

pub(crate) use without_parameters;
