//! Measurement of the times of blocks.

use std::time::Duration;

use dist_collectives::transport::Runtime;

use super::StageCost;
use crate::{Block, BoxError, Error, Result, Sequence};

/// Measures the time of each block of a model for one micro-batch: the shortest of `rounds` times. `batch` returns an
/// input and a function that computes the loss and its gradient from the model's output.
///
/// StageSums over stages are the costs for a [`Timeline`](super::Timeline), and [`split_by_cost`](super::split_by_cost)
/// uses sums over blocks. Different ranks measure different times: measure on one rank and broadcast the result.
///
/// # Errors
/// `batch`, the loss or a block fails.
pub fn measure_blocks<A, L>(
    model: &mut Sequence<A>,
    runtime: &Runtime,
    rounds: usize,
    mut batch: impl FnMut() -> Result<(A, L), BoxError>,
) -> Result<Vec<StageCost>>
where
    L: FnOnce(A) -> Result<(f32, A), BoxError>,
{
    let longest =
        StageCost { forward: Duration::MAX, input_gradient: Duration::MAX, weight_gradient: Duration::MAX };
    let mut costs = vec![longest; model.blocks().len()];
    for _ in 0..rounds.max(1) {
        let (input, loss) = batch().map_err(Error::compute)?;
        round(model.blocks_mut(), runtime, (input, loss), &mut costs).map_err(Error::compute)?;
    }
    Ok(costs)
}

fn round<A, L>(
    blocks: &mut [Box<dyn Block<A>>],
    runtime: &Runtime,
    (input, loss): (A, L),
    costs: &mut [StageCost],
) -> Result<(), BoxError>
where
    L: FnOnce(A) -> Result<(f32, A), BoxError>,
{
    let lasted = |shortest: &mut Duration, began: Duration| {
        *shortest = (*shortest).min(runtime.now().saturating_sub(began));
    };
    let mut saved = Vec::with_capacity(blocks.len());
    let mut activation = input;
    for (block, cost) in blocks.iter_mut().zip(&mut *costs) {
        let began = runtime.now();
        let (output, kept) = block.forward(activation)?;
        lasted(&mut cost.forward, began);
        saved.push(kept);
        activation = output;
    }
    let (_, gradient) = loss(activation)?;
    let mut gradient = Some(gradient);
    for ((block, cost), kept) in blocks.iter_mut().zip(costs).zip(saved).rev() {
        let Some(output_gradient) = gradient else {
            (cost.input_gradient, cost.weight_gradient) = (Duration::ZERO, Duration::ZERO);
            continue;
        };
        let began = runtime.now();
        let (of_input, half) = block.input_gradient(kept, output_gradient, &mut |_, _| Ok(()))?;
        lasted(&mut cost.input_gradient, began);
        let began = runtime.now();
        block.weight_gradient(half, &mut |_, _| Ok(()))?;
        lasted(&mut cost.weight_gradient, began);
        gradient = of_input;
    }
    Ok(())
}
