//! The computation of micro-batches: by the blocks of the model, or by the user's own code.

use crate::block_range::BlockOf;
use crate::gradients::RoundRole;
use crate::loss::WeightedLoss;
use crate::pipeline::Activations;
use crate::trainer::{BatchFn, Batches, Computation, ComputeFn, Evaluation, LossFn};
use crate::{BoxError, Pass, Sequence};

/// The computation of a call's micro-batches.
pub(crate) enum Work<'c, 's, M, A> {
    /// The user's own code computes a micro-batch with the whole model and reports its gradients.
    OwnCode { weighted: bool, compute: &'c mut ComputeFn<'c, M> },
    /// The user's own code takes a step with the whole model: it updates the parameters too.
    OwnStep(&'c mut (dyn FnMut(&mut M) -> Result<WeightedLoss, BoxError> + 'c)),
    /// The model's blocks run forward and, in a step, backward.
    Blocks {
        weighted: bool,
        block: BlockOf<M, A>,
        source: BatchSource<'s, A>,
        /// The conversion of activations to messages between stages. `None` if the model is not divided.
        activations: Option<&'c dyn Activations<A>>,
    },
}

/// The inputs and losses of blocks.
pub(crate) enum BatchSource<'a, A> {
    /// The micro-batches of a step. `loss` is the function of the one that the model has received last.
    Batches { next: &'a mut BatchFn<'a, A>, loss: Option<LossFn<'a, A>> },
    /// The same as two functions, which different ranks call.
    Stages {
        input: &'a mut (dyn FnMut(usize) -> Result<A, BoxError> + 'a),
        loss: &'a mut (dyn FnMut(usize, A) -> Result<(WeightedLoss, A), BoxError> + 'a),
    },
    /// Forwards without a backward.
    Evaluation {
        input: &'a mut (dyn FnMut(usize) -> Result<A, BoxError> + 'a),
        loss: &'a mut (dyn FnMut(usize, A) -> Result<WeightedLoss, BoxError> + 'a),
    },
}

/// A micro-batch as a call has assigned it to this rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AssignedMicroBatch {
    /// The number by which the caller knows it. `None` if this rank only takes part in those of other ranks.
    pub(crate) index: Option<usize>,
    /// The number in the sums of gradients.
    pub(crate) number: usize,
    pub(crate) role: RoundRole,
    /// The description that the model's blocks receive.
    pub(crate) pass: Pass,
}

impl<'c, 's, M, A> Work<'c, 's, M, A> {
    /// Returns steps of blocks.
    pub(crate) fn of_batches(block: BlockOf<M, A>, batches: Batches<'s, A>) -> Self {
        let Batches { weighted, next } = batches;
        Self::Blocks { weighted, block, source: BatchSource::Batches { next, loss: None }, activations: None }
    }

    /// Returns forwards of blocks without a backward.
    pub(crate) fn of_evaluation(block: BlockOf<M, A>, evaluation: Evaluation<'s, A>) -> Self {
        let Evaluation { weighted, input, loss } = evaluation;
        Self::Blocks { weighted, block, source: BatchSource::Evaluation { input, loss }, activations: None }
    }

    /// Returns the same for a model that is divided into stages.
    pub(crate) fn with_activations(mut self, of_stages: &'c dyn Activations<A>) -> Self {
        if let Self::Blocks { activations, .. } = &mut self {
            *activations = Some(of_stages);
        }
        self
    }

    /// Returns the conversion of activations to messages between stages.
    pub(crate) const fn activations(&self) -> Option<&'c dyn Activations<A>> {
        match *self {
            Self::Blocks { activations, .. } => activations,
            Self::OwnCode { .. } | Self::OwnStep(_) => None,
        }
    }

    /// Returns `true` if the losses have weights.
    pub(crate) const fn weighted(&self) -> bool {
        match *self {
            Self::OwnCode { weighted, .. } | Self::Blocks { weighted, .. } => weighted,
            Self::OwnStep(_) => true,
        }
    }

    /// Returns `true` if the model is trained.
    pub(crate) const fn trains(&self) -> bool {
        !matches!(self, Self::Blocks { source: BatchSource::Evaluation { .. }, .. })
    }
}

impl<'c, 's, A> Work<'c, 's, Sequence<A>, A> {
    /// Returns steps of a model that is divided into stages.
    pub(crate) fn of_stages(
        weighted: bool,
        input: &'s mut dyn FnMut(usize) -> Result<A, BoxError>,
        loss: &'s mut dyn FnMut(usize, A) -> Result<(WeightedLoss, A), BoxError>,
        activations: &'c dyn Activations<A>,
    ) -> Self {
        let source = BatchSource::Stages { input, loss };
        Self::Blocks { weighted, block: Sequence::block, source, activations: Some(activations) }
    }
}

impl<'c, M> From<Computation<'c, M>> for Work<'c, '_, M, ()> {
    fn from(Computation { weighted, compute }: Computation<'c, M>) -> Self {
        Self::OwnCode { weighted, compute }
    }
}

impl<A> BatchSource<'_, A> {
    /// Returns the input of a micro-batch.
    pub(crate) fn input(&mut self, index: usize) -> Result<A, BoxError> {
        match self {
            Self::Batches { next, loss } => {
                let (input, of_input) = next(index)?;
                *loss = Some(of_input);
                Ok(input)
            }
            Self::Stages { input, .. } | Self::Evaluation { input, .. } => input(index),
        }
    }

    /// Computes the loss from the model's output, and its gradient in a step.
    pub(crate) fn loss(&mut self, index: usize, output: A) -> Result<(WeightedLoss, Option<A>), BoxError> {
        let (loss, gradient) = match self {
            Self::Batches { loss, .. } => loss.take().expect("the input came with a loss")(output)?,
            Self::Stages { loss, .. } => loss(index, output)?,
            Self::Evaluation { loss, .. } => return Ok((loss(index, output)?, None)),
        };
        Ok((loss, Some(gradient)))
    }
}
