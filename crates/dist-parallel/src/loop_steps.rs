//! The steps of a training in the user's own loop.

use dist_transport::show_warning;

/// The steps of a training in the user's own loop, for the crates that wrap a framework's loop. It decides in which steps
/// all ranks compare what they must have alike.
///
/// If it is dropped before the first step on one of several ranks, it shows a warning: then the loop has probably used the
/// gradients of its own rank.
#[doc(hidden)]
#[derive(Debug)]
pub struct LoopSteps {
    taken: u64,
    ranks: usize,
    /// `true` if a training without a step makes sense, for example because values were loaded.
    was_used: bool,
    rank: usize,
}

impl LoopSteps {
    /// Returns the steps of a training that begins, on this rank of `ranks`.
    pub const fn new(rank: usize, ranks: usize) -> Self {
        Self { taken: 0, ranks, was_used: false, rank }
    }

    /// Returns `true` if the ranks compare their batches in the next step: in the first three.
    pub const fn compares_batches(&self) -> bool {
        self.ranks > 1 && self.taken < FIRST_CHECKS
    }

    /// Returns `true` if the ranks compare their parameters in the next step: in the first three and in every 64th.
    pub const fn compares_parameters(&self) -> bool {
        self.ranks > 1 && (self.taken < FIRST_CHECKS || self.taken.is_multiple_of(CHECK_EVERY))
    }

    /// Counts a step.
    pub const fn add(&mut self) {
        self.taken += 1;
    }

    /// Begins again at step 0, after values were loaded.
    pub const fn restart(&mut self) {
        (self.taken, self.was_used) = (0, true);
    }

    /// Ends the training on purpose, so that nothing is reported.
    pub const fn end(&mut self) {
        self.was_used = true;
    }

    /// Returns the warning for a training that ends now; `None` if it is not worth one.
    fn warning(&self) -> Option<String> {
        (self.ranks > 1 && self.taken == 0 && !self.was_used).then(|| {
            format!(
                "rank {} ended its DataParallel without a step: each rank has trained alone, if at all. Take the gradients \
                 from DataParallel::backward and give them to the optimizer's step, in place of backward_step or \
                 loss.backward()",
                self.rank
            )
        })
    }
}

impl Drop for LoopSteps {
    fn drop(&mut self) {
        if !std::thread::panicking()
            && let Some(text) = self.warning()
        {
            show_warning(text);
        }
    }
}

/// The number of first steps in which ranks compare their parameters and batches.
const FIRST_CHECKS: u64 = 3;

/// Later, ranks compare their parameters in one of this many steps.
const CHECK_EVERY: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_training_on_several_ranks_that_ends_without_a_step_is_reported() {
        assert!(
            LoopSteps::new(1, 2)
                .warning()
                .unwrap()
                .starts_with("rank 1 ended its DataParallel without a step")
        );
        assert_eq!(LoopSteps::new(0, 1).warning(), None);
        let changes: [fn(&mut LoopSteps); 3] = [LoopSteps::add, LoopSteps::restart, LoopSteps::end];
        for change in changes {
            let mut steps = LoopSteps::new(0, 2);
            change(&mut steps);
            assert_eq!(steps.warning(), None);
        }
    }

    #[test]
    fn parameters_are_compared_in_the_first_three_steps_and_in_every_64th() {
        let mut steps = LoopSteps::new(0, 2);
        let compared = (0..130).filter(|_| {
            let compares = steps.compares_parameters();
            assert_eq!(steps.compares_batches(), steps.taken < 3);
            steps.add();
            compares
        });
        assert_eq!(Vec::from_iter(compared), [0, 1, 2, 64, 128]);
        assert!(!LoopSteps::new(0, 1).compares_parameters());
    }
}
