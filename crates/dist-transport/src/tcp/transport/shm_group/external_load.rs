//! Telling a stranger from a rank that computes, by who has had processors.

use std::sync::atomic::Ordering;
use std::time::Duration;

use smallvec::SmallVec;

use crate::shm::{self, GroupMemory};
use crate::{Rank, Runtime};

/// How long one watch is good for.
const GOOD_FOR: Duration = Duration::from_millis(1);

/// The ranks of one core, from when one of them began to give it away.
///
/// To begin takes a microsecond of system calls, as long as a short wait. So one watch is good for all waits of a
/// millisecond, unless the rank sleeps in one. Where its program slept between two calls, or it was moved to another core,
/// up to that millisecond counts as lost if the core is then away for longer than that.
///
/// Threads count with their process: a rank whose threads compute on other cores, or that shares its process with other
/// ranks, may take a stranger for one of them.
#[derive(Debug)]
pub(super) struct ExternalLoad {
    since: Duration,
    processes: SmallVec<[i32; 8]>,
    used: Duration,
}

impl ExternalLoad {
    /// Begins now; `None` if the system does not tell who has had processors.
    pub(super) fn begin(memory: &GroupMemory, rank: Rank, runtime: &Runtime) -> Option<Self> {
        let processes = processes_here(memory, rank);
        let used = processor_time(&processes)?;
        // In this order: a rank may take the core meanwhile, and what it used must not be missing.
        Some(Self { since: runtime.now(), processes, used })
    }

    /// Whether the next wait had better begin anew.
    pub(super) fn is_old(&self, now: Duration) -> bool {
        now > self.since + GOOD_FOR
    }

    /// For how long until now none of them had the core.
    pub(super) fn lost(&self, now: Duration) -> Option<Duration> {
        let used = processor_time(&self.processes)?.saturating_sub(self.used);
        Some((now - self.since).saturating_sub(used))
    }
}

/// The processes of the ranks that were last seen on this rank's core.
fn processes_here(memory: &GroupMemory, rank: Rank) -> SmallVec<[i32; 8]> {
    let me = rank.index();
    let core = memory.note_core(me);
    let number = |rank: usize| memory.process(rank).load(Ordering::Relaxed).cast_signed();
    let own = std::process::id().cast_signed();
    let mut processes = SmallVec::from_slice(&[own]);
    // Processes are numbered as the rank sees them that has made the memory: of another namespace, they are not those here.
    if number(me) == own {
        for peer in (0..rank.world_size()).filter(|&peer| memory.is_on(peer, core)) {
            let process = number(peer);
            if process != 0 && !processes.contains(&process) {
                processes.push(process);
            }
        }
    }
    processes
}

fn processor_time(processes: &[i32]) -> Option<Duration> {
    processes.iter().map(|&process| shm::processor_time(process).ok()).sum()
}
