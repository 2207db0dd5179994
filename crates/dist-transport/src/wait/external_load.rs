//! Distinguishes external load from a computing rank by the CPU time of the ranks' processes.

use std::sync::atomic::Ordering;
use std::time::Duration;

use smallvec::SmallVec;

use crate::host_memory::{self, GroupMemory};
use crate::{Rank, Runtime};

/// The time for which one measurement is used.
const GOOD_FOR: Duration = Duration::from_millis(1);

/// The CPU time of the ranks on one core, since one of them began to yield.
///
/// Starting a measurement takes about 1 µs of system calls, as long as a short wait. Therefore one
/// measurement serves all waits of a millisecond, unless the rank sleeps in one. If the program slept between
/// two calls, or moved to another core, up to that millisecond counts as lost time.
///
/// CPU time is counted per process. If a rank has threads on other cores, or shares its process with other
/// ranks, external load may be taken for one of them.
#[derive(Debug)]
pub(crate) struct ExternalLoad {
    since: Duration,
    processes: SmallVec<[i32; 8]>,
    used: Duration,
}

impl ExternalLoad {
    /// Starts a measurement now. Returns `None` if the system does not report CPU times.
    pub(crate) fn begin(memory: &GroupMemory, rank: Rank, runtime: &Runtime) -> Option<Self> {
        let processes = processes_here(memory, rank);
        let used = processor_time(&processes)?;
        // Read after the CPU times: a rank may take the core in between, and its time must not be missing.
        Some(Self { since: runtime.now(), processes, used })
    }

    /// Returns `true` if the next wait should start a new measurement.
    pub(crate) fn is_old(&self, now: Duration) -> bool {
        now > self.since + GOOD_FOR
    }

    /// Returns how long none of the ranks had the core until now.
    pub(crate) fn lost(&self, now: Duration) -> Option<Duration> {
        let used = processor_time(&self.processes)?.saturating_sub(self.used);
        Some((now - self.since).saturating_sub(used))
    }
}

/// Returns the processes of the ranks that were last seen on this rank's core.
fn processes_here(memory: &GroupMemory, rank: Rank) -> SmallVec<[i32; 8]> {
    let me = rank.index();
    let core = memory.record_core(me);
    let number = |rank: usize| memory.process(rank).load(Ordering::Relaxed).cast_signed();
    let own = std::process::id().cast_signed();
    let mut processes = SmallVec::from_slice(&[own]);
    // Process numbers are those that the creator of the memory sees. In another PID namespace they mean other
    // processes.
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
    processes.iter().map(|&process| host_memory::processor_time(process).ok()).sum()
}
