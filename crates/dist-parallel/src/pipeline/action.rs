//! What one rank of a pipeline does, action by action.

use std::fmt;

/// One micro-batch in one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Item {
    /// The stage.
    pub stage: usize,
    /// The micro-batch.
    pub micro_batch: usize,
}

impl Item {
    /// This micro-batch in this stage.
    pub const fn new(stage: usize, micro_batch: usize) -> Self {
        Self { stage, micro_batch }
    }
}

/// One entry of a schedule. A stage is named by its number in the whole model, and messages by the stage of the rank
/// that sends or receives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// Compute the stage's output, and keep what its backward needs.
    Forward(Item),
    /// Compute all gradients: of the stage's input and of its parameters.
    Backward(Item),
    /// Compute the gradient of the stage's input, and keep what [`WeightGradient`](Self::WeightGradient) needs.
    InputGradient(Item),
    /// Compute the gradients of the stage's parameters.
    WeightGradient(Item),
    /// Send the stage's output to the next stage.
    SendActivation(Item),
    /// Receive the stage's input from the stage before.
    ReceiveActivation(Item),
    /// Send the gradient of the stage's input to the stage before.
    SendGradient(Item),
    /// Receive the gradient of the stage's output from the next stage.
    ReceiveGradient(Item),
    /// Gather the stage's sharded parameters.
    Gather(usize),
    /// Free what was gathered.
    Free(usize),
    /// Reduce the stage's gradients, which are all summed, with those of other pipelines.
    ReduceGradients(usize),
}

impl Action {
    /// The stage that it is about.
    pub const fn stage(self) -> usize {
        match self.about() {
            Ok(Item { stage, .. }) | Err(stage) => stage,
        }
    }

    /// The micro-batch that it is about; `None` if it is about the stage as a whole.
    pub const fn micro_batch(self) -> Option<usize> {
        match self.about() {
            Ok(item) => Some(item.micro_batch),
            Err(_) => None,
        }
    }

    /// What it is about: a micro-batch in a stage, or else the stage as a whole.
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

    /// Whether it computes: neither communicates nor manages memory.
    pub(crate) const fn is_computation(self) -> bool {
        matches!(
            self,
            Self::Forward(_) | Self::Backward(_) | Self::InputGradient(_) | Self::WeightGradient(_)
        )
    }

    /// What it does, in letters: F, B, I and W compute, SF, RF, SB and RB send and receive, G gathers, X frees, R
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

/// Stage, letters, micro-batch: `2F0` is the forward of micro-batch 0 in stage 2.
impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.stage(), self.abbreviation())?;
        self.micro_batch().map_or(Ok(()), |micro_batch| write!(f, "{micro_batch}"))
    }
}
