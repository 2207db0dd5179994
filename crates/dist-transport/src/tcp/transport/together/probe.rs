//! Finding out how far ranks reach into each other's memory: by reaching into it.
//!
//! Whether the system lets one process read and write another's memory depends on users, namespaces, capabilities and
//! filters, and cannot be asked for. So every rank reads a number of every other's, and writes it back there; one failure
//! anywhere, and nobody does it.

use super::Together;
use crate::{Direct, Due, Exposed, Owned, Place, Reach, Result, Slots, Traffic, auth, shm};

impl Together {
    /// Agrees with the others on how far ranks reach, which is not beyond `limit`.
    pub(in crate::tcp::transport) fn probe(&mut self, limit: Reach, due: &Due<'_>) -> Result<Reach> {
        if limit > Reach::Slots {
            let found = self.try_reach(limit, due)?;
            self.reach = self.least(found, due)?;
            // None of it was anybody's.
            self.traffic = Traffic::default();
        }
        Ok(self.reach)
    }

    /// How far this rank reaches into every other's memory, and every other into its own.
    fn try_reach(&mut self, limit: Reach, due: &Due<'_>) -> Result<Reach> {
        let [number, ..]: [u64; 4] = bytemuck::pod_read_unaligned(&auth::random_bytes()?);
        let me = self.rank.index();
        // A cell for the number, and one for each rank to write it back to.
        let mut cells = Owned::from(vec![0_u64; 1 + self.rank.world_size()]);
        cells[0] = number;
        self.enter(2, Slots::Unused, Exposed::Write(cells.lend()), due)?;
        self.publish(Place::Line, 0, &number.to_ne_bytes());
        self.post();
        let (mut reads, mut writes) = (true, limit == Reach::Write);
        for peer in self.others() {
            self.wait(peer, 1, due)?;
            let (mut told, mut found) = ([0; 8], [0; 8]);
            self.read(peer, Place::Line, 0, &mut told)?;
            reads &=
                self.reach_into(peer, |process, address| shm::read_process(process, address, &mut found));
            reads &= found == told;
            // Nothing is written where this was not the peer's memory.
            writes &= reads
                && self.reach_into(peer, |process, address| {
                    shm::write_process(process, address + 8 * (1 + me as u64), &told)
                });
        }
        self.post();
        self.others().try_for_each(|peer| self.wait(peer, 2, due))?;
        self.settle();
        writes &= self.others().all(|peer| cells[1 + peer] == number);
        cells.reclaim(self);
        Ok(match (reads, writes) {
            (true, true) => Reach::Write,
            (true, false) => Reach::Read,
            _ => Reach::Slots,
        })
    }

    fn reach_into(&self, peer: usize, reach: impl FnOnce(i32, u64) -> std::io::Result<()>) -> bool {
        let shm::Origin::Process { address } = self.memory.exposure(peer, self.current.turn()).origin else {
            return false;
        };
        let process = self.memory.process(peer).load(std::sync::atomic::Ordering::Relaxed).cast_signed();
        let reached = reach(process, address);
        if let Err(error) = &reached {
            tracing::info!(peer = self.members[peer], %error, "this rank's memory is out of reach");
        }
        reached.is_ok()
    }

    /// The least of what all ranks have found.
    fn least(&mut self, found: Reach, due: &Due<'_>) -> Result<Reach> {
        const ALL: [Reach; 3] = [Reach::Slots, Reach::Read, Reach::Write];
        let mut least = found;
        self.enter(1, Slots::Unused, Exposed::Nothing, due)?;
        self.publish(Place::Line, 0, &[found as u8]);
        self.post();
        for peer in self.others() {
            self.wait(peer, 1, due)?;
            let mut theirs = [0];
            self.read(peer, Place::Line, 0, &mut theirs)?;
            least = least.min(ALL.get(usize::from(theirs[0])).copied().unwrap_or(Reach::Slots));
        }
        self.settle();
        Ok(least)
    }
}
