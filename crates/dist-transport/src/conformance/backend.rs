//! What the suite is run on.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::Transport;

/// A kind of transport: what [`conformance`](mod@crate::conformance) is to check.
pub trait Fabric: Sync {
    /// Connects a world of this size by new transports and runs `program` once on each, every one on a thread of its
    /// own, until all have returned. `run` is the number of this run of the program.
    ///
    /// # Panics
    /// If `program` panics on some rank, with what that rank panicked with.
    fn run(&self, run: u64, world_size: usize, program: RankProgram);

    /// How many runs each program is to have. Those of a network that is simulated may all differ.
    fn runs(&self) -> u64 {
        1
    }

    /// A timeout for waits that must run out. Long enough for a message to arrive in the meantime, if one is sent.
    fn short(&self) -> Duration {
        Duration::from_millis(50)
    }
}

/// What each rank does.
pub type RankProgram = Arc<dyn Fn(Box<dyn Transport>) + Send + Sync>;

/// A fabric, with what the suite asks of it.
#[derive(Clone, Copy)]
pub(super) struct Backend(pub(super) &'static dyn Fabric);

impl Backend {
    /// Runs `program` on every rank, and `verify` on what the ranks return, in rank order.
    pub(super) fn check<T: Send + 'static>(
        self,
        world_size: usize,
        program: impl Fn(Box<dyn Transport>) -> T + Send + Sync + 'static,
        verify: impl Fn(Vec<T>),
    ) {
        let program = Arc::new(program);
        for run in 0..self.0.runs() {
            let results: Arc<Mutex<Vec<Option<T>>>> =
                Arc::new(Mutex::new((0..world_size).map(|_| None).collect()));
            let (program, of_ranks) = (program.clone(), results.clone());
            let keep = move |transport: Box<dyn Transport>| {
                let rank = transport.rank().index();
                let result = program(transport);
                of_ranks.lock().unwrap_or_else(PoisonError::into_inner)[rank] = Some(result);
            };
            self.0.run(run, world_size, Arc::new(keep));
            let results = std::mem::take(&mut *results.lock().unwrap_or_else(PoisonError::into_inner));
            verify(
                results
                    .into_iter()
                    .map(|result| result.expect("the program has run on every rank"))
                    .collect(),
            );
        }
    }

    /// A timeout for a wait that must run out.
    pub(super) fn short(self) -> Duration {
        self.0.short()
    }
}

/// A timeout that runs out when all others have been waiting for long, and have said so.
pub(super) const AFTER_ALL_WAIT: Duration = Duration::from_secs(2);

/// A timeout for what must not run out.
pub(super) const LONG: Duration = Duration::from_secs(60);
