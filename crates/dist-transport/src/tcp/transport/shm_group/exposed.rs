//! Exposed memory: publishes the location of this rank's memory, and finds the memory of other ranks.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::ShmGroup;
use crate::bootstrap::dial;
use crate::bootstrap::session::lock;
use crate::link::message::LinkError;
use crate::shm::{self, Mapping, RegionOrigin, RemoteRegion};
use crate::{ExposedRegion, Grain, Reach, Result};

/// The location of another rank's bytes.
pub(super) enum Located {
    /// In a mapping of this process, from this byte on.
    Mapped(Arc<Mapping>, usize),
    /// In another process, at this address.
    Process(i32, u64),
}

impl ShmGroup {
    /// Publishes the region that this rank exposes in the current call, and keeps lent memory.
    pub(super) fn expose(&mut self, memory: ExposedRegion<'_>) {
        let region = match &memory {
            ExposedRegion::Nothing => RemoteRegion::NOTHING,
            ExposedRegion::Read(bytes) => self.region(bytes, false),
            ExposedRegion::Write(lent) => self.region(lent.bytes(), true),
        };
        if let ExposedRegion::Write(lent) = memory {
            self.lent = Some(lent);
        }
        self.store_region(region);
    }

    fn region(&self, bytes: &[u8], writable: bool) -> RemoteRegion {
        RemoteRegion { len: bytes.len() as u64, writable, origin: self.origin(bytes) }
    }

    /// Stores the region for the other ranks, unless they have it from the last call with the same index.
    #[inline]
    pub(super) fn store_region(&mut self, region: RemoteRegion) {
        let generation = self.current.generation();
        if self.regions[generation.index()] != region {
            self.regions[generation.index()] = region;
            self.memory.expose(self.rank.index(), generation, region);
        }
    }

    /// Returns the location of exposed memory of this rank.
    fn origin(&self, memory: &[u8]) -> RegionOrigin {
        match self.membership.session.heap.find(memory) {
            Some((arena, offset)) => RegionOrigin::Heap { arena, offset },
            None => RegionOrigin::Process { address: memory.as_ptr().expose_provenance() as u64 },
        }
    }

    /// Calls `read` with memory that a rank has exposed.
    ///
    /// # Safety
    /// See the contract of [`Direct`](crate::Direct).
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
                outcome.map_err(|error| self.system_error(rank, error))?;
            }
        }
        self.check_not_failed(rank)
    }

    /// Copies bytes into memory that a rank has lent.
    ///
    /// # Safety
    /// See the contract of [`Direct`](crate::Direct).
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
                // SAFETY: the rank has lent these bytes in this call, and frees them only after the call is
                // over for every rank.
                let written = unsafe { process.write(address, bytes) };
                written.map_err(|error| self.system_error(rank, error))?;
            }
        }
        Ok(())
    }

    /// Returns the location of a range that a rank has exposed.
    pub(super) fn locate(&mut self, rank: usize, range: &Range<usize>, to_write: bool) -> Result<Located> {
        let region = self.memory.region(rank, self.current.generation());
        let inside = range.start <= range.end && range.end as u64 <= region.len;
        let allowed = region.writable || !to_write;
        let reach = if to_write { Reach::Write } else { Reach::Read };
        match region.origin {
            RegionOrigin::Heap { arena, offset } if inside && allowed => {
                let arena = self.arena(rank, arena)?;
                let begin = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(range.start));
                match begin.filter(|&begin| arena.holds(begin, range.len())) {
                    Some(begin) => Ok(Located::Mapped(arena, begin)),
                    None => Err(self.out_of_reach(rank, range)),
                }
            }
            RegionOrigin::Process { address } if inside && allowed && self.reach >= reach => {
                let process = self.memory.process(rank).load(Ordering::Relaxed).cast_signed();
                Ok(Located::Process(process, address.wrapping_add(range.start as u64)))
            }
            _ => Err(self.out_of_reach(rank, range)),
        }
    }

    /// Returns an arena of a rank's heap, and maps it at the first access.
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
                    self.fail(self.current.generation(), (rank, LinkError::unconnected(e)), self.deadline)
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

/// Bytes that one system call reads from another process: small enough for the cache.
const PIECE_BYTES: usize = 128 << 10;
