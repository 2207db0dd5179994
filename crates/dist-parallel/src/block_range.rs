//! Some blocks of a model, one after another.

use std::ops::Range;

use crate::{Block, BoxError, Error, Ready, Saved, Values};

/// A function that returns the block of a model with this number, and the range of its parameters.
pub(crate) type BlockOf<M, A> = for<'m> fn(&'m mut M, usize) -> (&'m mut (dyn Block<A> + 'm), Range<usize>);

/// Returns a model that is one block.
pub(crate) fn whole<A, M: Block<A>>(model: &mut M, _: usize) -> (&mut dyn Block<A>, Range<usize>) {
    let parameters = 0..model.infos().len();
    (model, parameters)
}

/// Some blocks of a model, one after another.
pub(crate) struct BlockRange<'m, M, A> {
    pub(crate) model: &'m mut M,
    pub(crate) block: BlockOf<M, A>,
    /// The numbers of the blocks.
    pub(crate) range: Range<usize>,
}

impl<M, A> BlockRange<'_, M, A> {
    /// Returns the output. `keep` receives the activations that each block saves, before the next block begins.
    pub(crate) fn forward(self, input: A, mut keep: impl FnMut(Saved)) -> Result<A, BoxError> {
        let Self { model, block, range } = self;
        let mut activation = input;
        for index in range {
            let (output, kept) = block(model, index).0.forward(activation)?;
            keep(kept);
            activation = output;
        }
        Ok(activation)
    }

    /// Reports the gradients of the parameters, and returns that of the input.
    pub(crate) fn backward(
        self,
        saved: Vec<Saved>,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<Option<A>, BoxError> {
        let Self { model, block, range } = self;
        let mut gradient = Some(output_gradient);
        for (index, kept) in range.zip(saved).rev() {
            // If a block's input has no gradient, earlier blocks have none either.
            let Some(output_gradient) = gradient else { break };
            let (block, parameters) = block(model, index);
            gradient = block.backward(kept, output_gradient, &mut of_block(parameters, ready))?;
        }
        Ok(gradient)
    }

    /// Computes the gradient of the input. Returns the data for the weight gradients too.
    pub(crate) fn input_gradient(
        self,
        saved: Vec<Saved>,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<(Option<A>, SplitBackward), BoxError> {
        let Self { model, block, range } = self;
        let mut halves = SplitBackward::with_capacity(saved.len());
        let mut gradient = Some(output_gradient);
        for (index, kept) in range.zip(saved).rev() {
            let Some(output_gradient) = gradient else { break };
            let (block, parameters) = block(model, index);
            let mut ready = of_block(parameters, ready);
            let (of_input, left) = block.input_gradient(kept, output_gradient, &mut ready)?;
            halves.push((index, left));
            gradient = of_input;
        }
        Ok((gradient, halves))
    }
}

/// For each block that has computed its input gradient, last to first: its number, and the data for its weight
/// gradients.
pub(crate) type SplitBackward = Vec<(usize, Saved)>;

/// Computes the gradients of the parameters.
pub(crate) fn weight_gradients<M, A>(
    model: &mut M,
    block: BlockOf<M, A>,
    halves: SplitBackward,
    ready: &mut Ready<'_>,
) -> Result<(), BoxError> {
    for (index, left) in halves {
        let (block, parameters) = block(model, index);
        block.weight_gradient(left, &mut of_block(parameters, ready))?;
    }
    Ok(())
}

/// Returns a callback for the gradients of one block, which checks that the block has the parameter.
fn of_block(
    parameters: Range<usize>,
    ready: &mut Ready<'_>,
) -> impl FnMut(usize, Values<'_>) -> Result<(), BoxError> {
    let (start, count) = (parameters.start, parameters.len());
    move |index, values| {
        if index >= count {
            return Err(Error::NoSuchParameter { index, count }.into());
        }
        ready(start + index, values)
    }
}
