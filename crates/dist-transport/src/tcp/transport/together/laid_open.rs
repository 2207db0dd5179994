//! The memory that ranks lay open to each other: how this rank says where its own is, and finds that of others.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Together;
use crate::shm::{Exposure, Mapping, Origin};
use crate::tcp::message::Fault;
use crate::tcp::rendezvous;
use crate::tcp::session::lock;
use crate::{Exposed, Reach, Result};

/// Where bytes of another rank lie.
pub(super) enum Located {
    /// Here, from this byte on.
    Mapped(Arc<Mapping>, usize),
    /// In this process, at this address.
    Process(i32, u64),
}

impl Together {
    /// Says what of this rank's memory is laid open in the current call.
    pub(super) fn expose(&mut self, memory: &Exposed<'_>) {
        let exposure = match memory {
            Exposed::Nothing => Exposure::NOTHING,
            Exposed::Read(bytes) => {
                Exposure { len: bytes.len() as u64, writable: false, origin: self.origin(bytes) }
            }
            Exposed::Write(bytes) => {
                Exposure { len: bytes.len() as u64, writable: true, origin: self.origin(bytes) }
            }
        };
        self.say_exposed(exposure);
    }

    /// Says it to the others, unless they know it from the call before last.
    #[inline]
    pub(super) fn say_exposed(&mut self, exposure: Exposure) {
        let parity = self.current.parity;
        if self.exposures[parity as usize] != exposure {
            self.exposures[parity as usize] = exposure;
            self.memory.expose(self.rank.index(), parity, exposure);
        }
    }

    /// Where laid-open memory of this rank lies.
    fn origin(&self, memory: &[u8]) -> Origin {
        match self.membership.session.heap.find(memory) {
            Some((arena, offset)) => Origin::Heap { arena, offset },
            None => Origin::Process { address: memory.as_ptr().expose_provenance() as u64 },
        }
    }

    /// Where bytes of memory that a rank has laid open lie.
    pub(super) fn locate(&mut self, rank: usize, range: &Range<usize>, to_write: bool) -> Result<Located> {
        let exposure = self.memory.exposure(rank, self.current.parity);
        let inside = range.start <= range.end && range.end as u64 <= exposure.len;
        let allowed = exposure.writable || !to_write;
        let reach = if to_write { Reach::Write } else { Reach::Read };
        match exposure.origin {
            Origin::Heap { arena, offset } if inside && allowed => {
                let offset = usize::try_from(offset).expect("an offset in mapped memory");
                Ok(Located::Mapped(self.arena(rank, arena)?, offset + range.start))
            }
            Origin::Process { address } if inside && allowed && self.reach >= reach => {
                let process = self.memory.process(rank).load(Ordering::Relaxed).cast_signed();
                Ok(Located::Process(process, address + range.start as u64))
            }
            _ => Err(Self::out_of_reach(rank, range)),
        }
    }

    /// An arena of a rank's heap, mapped when it is first asked for.
    fn arena(&mut self, rank: usize, number: u32) -> Result<Arc<Mapping>> {
        let place = number as usize;
        if let Some(Some(mapping)) = self.peers[rank].arenas.get(place) {
            return Ok(mapping.clone());
        }
        let (session, member) = (&*self.membership.session, self.members[rank]);
        let known = lock(&session.arenas).get(&(member, number)).cloned();
        let mapping = match known {
            Some(mapping) => mapping,
            None => {
                let mapped = rendezvous::map_arena(session, member, number, self.deadline);
                let mapping = mapped
                    .map_err(|e| self.fail((rank, Fault::Unconnected(e)), &self.current, self.deadline))?;
                let mapping = Arc::new(mapping);
                lock(&session.arenas).entry((member, number)).or_insert(mapping).clone()
            }
        };
        let arenas = &mut self.peers[rank].arenas;
        arenas.resize(arenas.len().max(place + 1), None);
        arenas[place] = Some(mapping.clone());
        Ok(mapping)
    }
}
