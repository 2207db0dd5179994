//! Probes how far ranks reach into each other's memory, by reading and writing it.
//!
//! The system lets one process access another's memory depending on users, namespaces, capabilities and
//! filters, and does not say whether it will. So every rank reads a random number from every other rank and
//! writes it back. If one access fails anywhere, no rank uses it.
//!
//! A rank that finds the number has the right process. It keeps a descriptor of the process, because the
//! number of an ended process may be reused.

use super::ShmGroup;
use crate::bootstrap::auth;
use crate::shm::Process;
use crate::{
    CallEntry, Direct, ExposedRegion, LazyDeadline, Owned, Place, Reach, Result, SlotUse, Traffic, shm,
};

impl ShmGroup {
    /// Agrees with the other ranks how far ranks reach, at most up to `limit`.
    pub(in crate::tcp::transport) fn probe(&mut self, limit: Reach, due: &LazyDeadline<'_>) -> Result<Reach> {
        if limit > Reach::Slots {
            let found = self.try_reach(limit, due)?;
            self.reach = self.least(found, due)?;
            // Probing does not count as traffic.
            self.traffic = Traffic::default();
        }
        Ok(self.reach)
    }

    /// Returns how far this rank reaches into the memory of all others, and they into its own.
    fn try_reach(&mut self, limit: Reach, due: &LazyDeadline<'_>) -> Result<Reach> {
        let [number, ..]: [u64; 4] = bytemuck::pod_read_unaligned(&auth::random_bytes()?);
        let me = self.rank.index();
        // One cell for the number, and one for each rank to write it back.
        let mut cells = vec![0_u64; 1 + self.rank.world_size()];
        cells[0] = number;
        let entry = CallEntry { rank: self.rank, plan_digest: 0, signals: 2, slots: SlotUse::Unused };
        // SAFETY: all ranks do these steps. Each writes its own flag line before its first signal. In another
        // rank's memory it writes only its own cell, after that rank's first signal and before its own last.
        unsafe { self.enter(entry, ExposedRegion::Write(Owned::from(cells).lend()), due) }?;
        // SAFETY: as above.
        unsafe { self.publish(Place::FlagLine, 0, &number.to_ne_bytes()) };
        // SAFETY: as above.
        unsafe { self.signal() };
        let (mut reads, mut writes) = (true, limit == Reach::Write);
        for peer in self.others() {
            self.wait(peer, 1, due)?;
            let (mut told, mut found) = ([0; 8], [0; 8]);
            // SAFETY: as above; the rank has signalled.
            unsafe { self.read(peer, Place::FlagLine, 0, &mut told) }?;
            let mut process = None;
            reads &= self.reach_into(peer, |number, address| {
                // Opened before the number is read, so that the number is not found in another process.
                process = Process::open(number).ok();
                shm::read_process(number, address, &mut found)
            });
            reads &= found == told;
            // Nothing is written unless this was the peer's memory.
            writes &= reads
                && process.is_some_and(|process| {
                    let written = self.reach_into(peer, |_, address| {
                        // SAFETY: the rank has lent its cells in this call, of which this is the one for this rank.
                        unsafe { process.write(address + 8 * (1 + me as u64), &told) }
                    });
                    self.peers[peer].process = Some(process);
                    written
                });
        }
        // SAFETY: as above.
        unsafe { self.signal() };
        self.others().try_for_each(|peer| self.wait(peer, 2, due))?;
        self.wake_waiters();
        let lent = self.reclaim().expect("all have signalled for the last time");
        let cells = lent.into_owned::<u64>().expect("they are what was lent");
        writes &= self.others().all(|peer| cells[1 + peer] == number);
        Ok(match (reads, writes) {
            (true, true) => Reach::Write,
            (true, false) => Reach::Read,
            _ => Reach::Slots,
        })
    }

    fn reach_into(&self, peer: usize, reach: impl FnOnce(i32, u64) -> std::io::Result<()>) -> bool {
        let shm::RegionOrigin::Process { address } =
            self.memory.region(peer, self.current.generation()).origin
        else {
            return false;
        };
        let process = self.memory.process(peer).load(std::sync::atomic::Ordering::Relaxed).cast_signed();
        let reached = reach(process, address);
        if let Err(error) = &reached {
            tracing::info!(peer = self.members[peer], %error, "this rank's memory is out of reach");
        }
        reached.is_ok()
    }

    /// Returns the least reach that any rank has found.
    fn least(&mut self, found: Reach, due: &LazyDeadline<'_>) -> Result<Reach> {
        const ALL: [Reach; 3] = [Reach::Slots, Reach::Read, Reach::Write];
        let mut least = found;
        let entry = CallEntry { rank: self.rank, plan_digest: 0, signals: 1, slots: SlotUse::Unused };
        // SAFETY: all ranks do these steps: each writes its own line before its signal, and reads others' after theirs.
        unsafe { self.enter(entry, ExposedRegion::Nothing, due) }?;
        // SAFETY: as above.
        unsafe { self.publish(Place::FlagLine, 0, &[found as u8]) };
        // SAFETY: as above.
        unsafe { self.signal() };
        for peer in self.others() {
            self.wait(peer, 1, due)?;
            let mut theirs = [0];
            // SAFETY: as above; the rank has signalled.
            unsafe { self.read(peer, Place::FlagLine, 0, &mut theirs) }?;
            least = least.min(ALL.get(usize::from(theirs[0])).copied().unwrap_or(Reach::Slots));
        }
        self.wake_waiters();
        Ok(least)
    }
}
