//! The description of a forward that blocks receive, and the counter of steps that makes it.

/// The description of the forward that a model is about to compute. [`Params::begin_forward`] receives it.
///
/// A block that draws random numbers, such as a dropout, seeds them with the step and the micro-batch. The numbers are
/// then the same on any number of ranks, under every strategy.
///
/// [`Params::begin_forward`]: crate::Params::begin_forward
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pass {
    /// `true` in a step of training, `false` in an evaluation.
    pub training: bool,
    /// The number of steps that the trainer took before. Loading a checkpoint restores it.
    pub step: u64,
    /// The number of the micro-batch in the step or evaluation, among those of all ranks. Accumulated micro-batches
    /// count first. The k-th micro-batch of rank r in a join of N ranks has the number k · N + r.
    pub micro_batch: usize,
}

/// The number of a trainer's steps, and the mode of its forwards outside of steps.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Passes {
    steps: u64,
    trains: bool,
}

impl Passes {
    /// Returns the forward of a micro-batch in the present step.
    pub(crate) const fn in_step(&self, micro_batch: usize) -> Pass {
        Pass { training: true, step: self.steps, micro_batch }
    }

    /// Returns the forward of a micro-batch in an evaluation.
    pub(crate) const fn in_evaluation(&self, micro_batch: usize) -> Pass {
        Pass { training: false, step: self.steps, micro_batch }
    }

    /// Returns a forward outside of steps and evaluations.
    pub(crate) const fn outside(&self) -> Pass {
        Pass { training: self.trains, step: self.steps, micro_batch: 0 }
    }

    /// Sets the mode of forwards outside of steps and evaluations, and returns such a forward.
    pub(crate) const fn set_training(&mut self, training: bool) -> Pass {
        self.trains = training;
        self.outside()
    }

    /// Counts a step, and returns a forward outside of it.
    pub(crate) const fn end_step(&mut self) -> Pass {
        self.steps += 1;
        self.outside()
    }

    /// Returns the number of steps.
    pub(crate) const fn steps(&self) -> u64 {
        self.steps
    }

    /// Continues after this number of steps, and returns a forward outside of steps.
    pub(crate) const fn set_steps(&mut self, steps: u64) -> Pass {
        self.steps = steps;
        self.outside()
    }
}
