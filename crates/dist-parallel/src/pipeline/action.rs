//! The actions of one rank of a pipeline.

use std::fmt;

/// A micro-batch in a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Item {
    /// The stage.
    pub stage: usize,
    /// The micro-batch.
    pub micro_batch: usize,
}

impl Item {
    /// Returns this micro-batch in this stage.
    pub const fn new(stage: usize, micro_batch: usize) -> Self {
        Self { stage, micro_batch }
    }
}

/// One entry of a schedule. A stage has its number in the whole model. A message has the stage of the rank that sends
/// or receives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// Computes the stage's output and saves the activations for the backward.
    Forward(Item),
    /// Computes all gradients: of the stage's input and of its parameters.
    Backward(Item),
    /// Computes the gradient of the stage's input and saves the data for [`WeightGradient`](Self::WeightGradient).
    InputGradient(Item),
    /// Computes the gradients of the stage's parameters.
    WeightGradient(Item),
    /// Sends the stage's output to the next stage.
    SendActivation(Item),
    /// Receives the stage's input from the previous stage.
    ReceiveActivation(Item),
    /// Sends the gradient of the stage's input to the previous stage.
    SendGradient(Item),
    /// Receives the gradient of the stage's output from the next stage.
    ReceiveGradient(Item),
    /// Gathers the stage's sharded parameters.
    Gather(usize),
    /// Frees the gathered parameters.
    Free(usize),
    /// Reduces the stage's gradients, which are summed over all micro-batches, with those of other pipelines.
    ReduceGradients(usize),
}

impl Action {
    /// Returns the stage.
    pub const fn stage(self) -> usize {
        match self.about() {
            Ok(Item { stage, .. }) | Err(stage) => stage,
        }
    }

    /// Returns the micro-batch. `None` if the action concerns the whole stage.
    pub const fn micro_batch(self) -> Option<usize> {
        match self.about() {
            Ok(item) => Some(item.micro_batch),
            Err(_) => None,
        }
    }

    /// Returns the micro-batch in a stage, or the stage as the error if the action concerns the whole stage.
    const fn about(self) -> Result<Item, usize> {
        match self {
            Self::Gather(stage) | Self::Free(stage) | Self::ReduceGradients(stage) => Err(stage),
            Self::Forward(item)
            | Self::Backward(item)
            | Self::InputGradient(item)
            | Self::WeightGradient(item)
            | Self::SendActivation(item)
            | Self::ReceiveActivation(item)
            | Self::SendGradient(item)
            | Self::ReceiveGradient(item) => Ok(item),
        }
    }

    /// Returns `true` for a computation, `false` for communication and memory management.
    pub(crate) const fn is_computation(self) -> bool {
        matches!(
            self,
            Self::Forward(_) | Self::Backward(_) | Self::InputGradient(_) | Self::WeightGradient(_)
        )
    }

    /// Returns the abbreviation: F, B, I and W compute, SF, RF, SB and RB send and receive, G gathers, X frees, R
    /// reduces.
    pub const fn abbreviation(self) -> &'static str {
        match self {
            Self::Forward(_) => "F",
            Self::Backward(_) => "B",
            Self::InputGradient(_) => "I",
            Self::WeightGradient(_) => "W",
            Self::SendActivation(_) => "SF",
            Self::ReceiveActivation(_) => "RF",
            Self::SendGradient(_) => "SB",
            Self::ReceiveGradient(_) => "RB",
            Self::Gather(_) => "G",
            Self::Free(_) => "X",
            Self::ReduceGradients(_) => "R",
        }
    }
}

/// Formats stage, abbreviation and micro-batch: `2F0` is the forward of micro-batch 0 in stage 2.
impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.stage(), self.abbreviation())?;
        self.micro_batch().map_or(Ok(()), |micro_batch| write!(f, "{micro_batch}"))
    }
}
