//! A burn model in an ordinary training loop, on one process or several.
//!
//! On one process: `cargo run -p dist-burn --example burn_loop`. On two:
//! `distctl run -n 2 -- target/debug/examples/burn_loop`. Both print the same losses, bit for bit, since a step has
//! four micro-batches on any number of processes.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor};
use dist_burn::DataParallel;
use dist_parallel::{BoxError, Communicator};

#[derive(Module, Debug)]
struct Classifier {
    hidden: Linear,
    output: Linear,
}

impl Classifier {
    fn new(device: &Device) -> Self {
        Self { hidden: LinearConfig::new(2, 16).init(device), output: LinearConfig::new(16, 2).init(device) }
    }

    fn forward(&self, points: Tensor<2>) -> Tensor<2> {
        self.output.forward(relu(self.hidden.forward(points)))
    }
}

/// Returns the points of one micro-batch, and a label for each: 1 if it is in the circle around (0, 0).
fn batch(number: usize, device: &Device) -> (Tensor<2>, Tensor<1, Int>) {
    let points = (0..16).map(|point| {
        let angle = (number * 16 + point) as f32 * 2.4;
        let radius = if point % 2 == 0 { 0.5 } else { 1.5 };
        ([radius * angle.cos(), radius * angle.sin()], i32::from(point % 2 == 0))
    });
    let (points, inside): (Vec<[f32; 2]>, Vec<i32>) = points.unzip();
    let points = Tensor::<1>::from_data(points.as_flattened(), device).reshape([16, 2]);
    (points, Tensor::from_data(&inside[..], device))
}

/// Returns the mean loss of each step.
pub(crate) fn train(comm: Communicator) -> Result<Vec<f32>, BoxError> {
    let device = Device::flex().autodiff();
    device.seed(1);
    let mut model = Classifier::new(&device);
    let mut optimizer = AdamWConfig::new().init();
    let cross_entropy = CrossEntropyLossConfig::new().init(&device);
    let mut dp = DataParallel::new(comm, &mut model)?;
    let mut losses = Vec::new();
    for step in 0..60 {
        let grads = dp.backward_each(4, &model, |number| {
            let (points, inside) = batch(step * 4 + number, &device);
            Ok(cross_entropy.forward(model.forward(points), inside))
        })?;
        model = optimizer.step(0.02, model, grads);
        losses.extend(dp.report().map(|report| report.loss));
    }
    Ok(losses)
}

#[expect(clippy::print_stdout, reason = "a program prints")]
fn main() -> Result<(), BoxError> {
    // A world of one, unless `distctl run` or torchrun has started this process as one of several.
    let comm = Communicator::from_env()?;
    let rank = comm.rank();
    let losses = train(comm)?;
    for (step, loss) in losses.iter().enumerate().filter(|(step, _)| rank == 0 && step % 10 == 9) {
        println!("step {}: loss {loss}", step + 1);
    }
    Ok(())
}
