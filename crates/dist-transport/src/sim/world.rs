//! The shared state of all transports of one simulated network.

use std::sync::Arc;
use std::time::Duration;

use super::clock::Skew;
use super::fabric::SimFabric;
use super::fault_injector::{Effects, ThreadAction};
use super::scheduler::Scheduler;
use super::sim_shm_group::Segments;
use super::transport::SimTransport;
use super::waiting::wake;
use crate::runtime::Unparker;
use crate::{ChannelId, Rank, Runtime};

/// The shared state of all transports of a network.
#[derive(Debug)]
pub(super) struct World {
    pub(super) fabric: SimFabric,
    /// The clock of the links.
    pub(super) clock: Runtime,
    /// The scheduler, which stops and ends the threads of ranks; `None` on the system's runtime.
    pub(super) scheduler: Option<Scheduler>,
    /// The host of each rank.
    pub(super) hosts: Vec<u64>,
    /// The most bytes to one peer that may be unreceived when a send returns.
    pub(super) window: Option<usize>,
    /// The memory of groups; `None` if they share none.
    pub(super) segments: Option<Segments>,
    /// The ranks whose allocations fail.
    pub(super) without_heap: Vec<usize>,
}

impl World {
    /// Creates the transport of this rank, on the channel of all ranks.
    pub(super) fn enter(self: &Arc<Self>, runtime: Runtime, skew: Skew, rank: Rank) -> SimTransport {
        let members = (0..rank.world_size()).collect();
        SimTransport::enter(self.clone(), (runtime, skew), rank, [ChannelId::WORLD; 2], members)
    }

    /// Applies due events at their times, forever.
    pub(super) fn keep_time(&self) {
        loop {
            let (effects, next) = self.fabric.apply_due(self.clock.now(), self.clock.unparker());
            self.perform(effects);
            let until = |next: Duration| self.clock.deadline(next.saturating_sub(self.clock.now()));
            self.clock.park(next.map(until));
        }
    }

    /// Performs effects. Returns `true` if threads were ended or stopped.
    pub(super) fn perform(&self, effects: Effects) -> bool {
        let has_changed_threads = !effects.thread_actions.is_empty();
        if let Some(scheduler) = &self.scheduler {
            for (rank, action) in effects.thread_actions {
                match action {
                    ThreadAction::Unwind => scheduler.kill(rank),
                    ThreadAction::Stop { for_ever } => scheduler.stall(rank, for_ever),
                    ThreadAction::Continue => scheduler.resume(rank),
                }
            }
        }
        wake(effects.woken);
        effects.timer.iter().for_each(Unparker::unpark);
        has_changed_threads
    }
}
