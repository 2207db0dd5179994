//! The memory that ranks expose to each other: how this rank tells where its own is, and finds that of others.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Together;
use crate::shm::{self, Exposure, Mapping, Origin};
use crate::tcp::dial;
use crate::tcp::message::Fault;
use crate::tcp::session::lock;
use crate::{Exposed, Grain, Reach, Result};

/// Where bytes of another rank lie.
pub(super) enum Located {
    /// Here, from this byte on.
    Mapped(Arc<Mapping>, usize),
    /// In this process, at this address.
    Process(i32, u64),
}

impl Together {
    /// Tells the others what of this rank's memory is exposed in the current call, and keeps what is lent.
    pub(super) fn expose(&mut self, memory: Exposed<'_>) {
        let exposure = match &memory {
            Exposed::Nothing => Exposure::NOTHING,
            Exposed::Read(bytes) => self.exposure(bytes, false),
            Exposed::Write(lent) => self.exposure(lent.bytes(), true),
        };
        if let Exposed::Write(lent) = memory {
            self.lent = Some(lent);
        }
        self.say_exposed(exposure);
    }

    fn exposure(&self, bytes: &[u8], writable: bool) -> Exposure {
        Exposure { len: bytes.len() as u64, writable, origin: self.origin(bytes) }
    }

    /// Says it to the others, unless they know it from the last call whose turn had this index.
    #[inline]
    pub(super) fn say_exposed(&mut self, exposure: Exposure) {
        let turn = self.current.turn();
        if self.exposures[turn.index()] != exposure {
            self.exposures[turn.index()] = exposure;
            self.memory.expose(self.rank.index(), turn, exposure);
        }
    }

    /// Where exposed memory of this rank lies.
    fn origin(&self, memory: &[u8]) -> Origin {
        match self.membership.session.heap.find(memory) {
            Some((arena, offset)) => Origin::Heap { arena, offset },
            None => Origin::Process { address: memory.as_ptr().expose_provenance() as u64 },
        }
    }

    /// Lets `read` see memory that a rank has exposed.
    ///
    /// # Safety
    /// As said of [`Direct`](crate::Direct).
    #[inline(never)]
    pub(super) unsafe fn view_exposed(
        &mut self,
        rank: usize,
        range: Range<usize>,
        read: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        match self.locate(rank, &range, false)? {
            Located::Mapped(mapping, offset) => {
                // SAFETY: as the caller has promised.
                read(0, unsafe { mapping.bytes(offset, range.len()) });
            }
            Located::Process(process, address) => {
                let mut scratch = std::mem::take(&mut self.scratch);
                scratch.resize(PIECE_BYTES / Grain::BYTES, Grain::ZERO);
                let pieces: &mut [u8] = bytemuck::cast_slice_mut(&mut scratch);
                let outcome = (0..range.len()).step_by(PIECE_BYTES).try_for_each(|start| {
                    let piece = &mut pieces[..PIECE_BYTES.min(range.len() - start)];
                    shm::read_process(process, address + start as u64, piece)?;
                    read(start, piece);
                    Ok(())
                });
                self.scratch = scratch;
                outcome.map_err(|error| self.broken(rank, error))?;
            }
        }
        self.was_open(rank)
    }

    /// Copies into memory that a rank has lent.
    ///
    /// # Safety
    /// As said of [`Direct`](crate::Direct).
    #[inline(never)]
    pub(super) unsafe fn write_lent(
        &mut self,
        rank: usize,
        range: &Range<usize>,
        bytes: &[u8],
    ) -> Result<()> {
        match self.locate(rank, range, true)? {
            // SAFETY: as the caller has promised.
            Located::Mapped(mapping, offset) => unsafe { mapping.copy_in(offset, bytes) },
            Located::Process(_, address) => {
                let process = self.peers[rank].process.as_ref();
                let process = process.ok_or_else(|| self.out_of_reach(rank, range))?;
                // SAFETY: the rank has lent these bytes in this call, and does not free them before it is over for every rank.
                let written = unsafe { process.write(address, bytes) };
                written.map_err(|error| self.broken(rank, error))?;
            }
        }
        Ok(())
    }

    /// Where bytes of memory that a rank has exposed lie.
    pub(super) fn locate(&mut self, rank: usize, range: &Range<usize>, to_write: bool) -> Result<Located> {
        let exposure = self.memory.exposure(rank, self.current.turn());
        let inside = range.start <= range.end && range.end as u64 <= exposure.len;
        let allowed = exposure.writable || !to_write;
        let reach = if to_write { Reach::Write } else { Reach::Read };
        match exposure.origin {
            Origin::Heap { arena, offset } if inside && allowed => {
                let arena = self.arena(rank, arena)?;
                let begin = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(range.start));
                match begin.filter(|&begin| arena.holds(begin, range.len())) {
                    Some(begin) => Ok(Located::Mapped(arena, begin)),
                    None => Err(self.out_of_reach(rank, range)),
                }
            }
            Origin::Process { address } if inside && allowed && self.reach >= reach => {
                let process = self.memory.process(rank).load(Ordering::Relaxed).cast_signed();
                Ok(Located::Process(process, address.wrapping_add(range.start as u64)))
            }
            _ => Err(self.out_of_reach(rank, range)),
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
                let mapped = dial::map_arena(session, member, number, session.watch(self.deadline));
                let mapping = mapped.map_err(|e| {
                    self.fail(self.current.turn(), (rank, Fault::unconnected(e)), self.deadline)
                })?;
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

/// What the system is asked for of another process's memory at once: small enough for the cache.
const PIECE_BYTES: usize = 128 << 10;
