//! What all transports of one simulated network share.

use std::sync::Arc;
use std::time::Duration;

use super::clock::Skew;
use super::fabric::SimFabric;
use super::fault_injector::{Effects, ThreadAction};
use super::scheduler::Scheduler;
use super::shm_group::Segments;
use super::transport::SimTransport;
use super::waiting::wake;
use crate::runtime::Unparker;
use crate::{ChannelId, Rank, Runtime};

/// What all transports of a network share.
#[derive(Debug)]
pub(super) struct World {
    pub(super) fabric: SimFabric,
    /// The clock that messages take their time by.
    pub(super) clock: Runtime,
    /// What can end and hold up ranks, where something can.
    pub(super) scheduler: Option<Scheduler>,
    /// Where each rank runs.
    pub(super) hosts: Vec<u64>,
    /// So many bytes to one peer may be under way or unreceived when a send returns.
    pub(super) window: Option<usize>,
    /// The memory that groups share; `None` where they share none.
    pub(super) segments: Option<Segments>,
    /// The ranks that are given no memory.
    pub(super) without_heap: Vec<usize>,
}

impl World {
    /// The transport of this rank, on the channel of all.
    pub(super) fn enter(self: &Arc<Self>, runtime: Runtime, skew: Skew, rank: Rank) -> SimTransport {
        let members = (0..rank.world_size()).collect();
        SimTransport::enter(self.clone(), (runtime, skew), rank, [ChannelId::WORLD; 2], members)
    }

    /// Does what is due at its time, for ever.
    pub(super) fn keep_time(&self) {
        loop {
            let (effects, next) = self.fabric.apply_due(self.clock.now(), self.clock.unparker());
            self.perform(effects);
            let until = |next: Duration| self.clock.deadline(next.saturating_sub(self.clock.now()));
            self.clock.park(next.map(until));
        }
    }

    /// Whether threads were ended or held up.
    pub(super) fn perform(&self, effects: Effects) -> bool {
        let has_changed_threads = !effects.thread_actions.is_empty();
        if let Some(scheduler) = &self.scheduler {
            for (rank, action) in effects.thread_actions {
                match action {
                    ThreadAction::Unwind => scheduler.kill(rank),
                    ThreadAction::StandStill { for_ever } => scheduler.stall(rank, for_ever),
                    ThreadAction::GoOn => scheduler.resume(rank),
                }
            }
        }
        wake(effects.woken);
        effects.timer.iter().for_each(Unparker::unpark);
        has_changed_threads
    }
}
