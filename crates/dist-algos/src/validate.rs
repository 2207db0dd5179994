//! The validity of single steps.

use dist_transport::Rank;

use crate::{ChunkLocation, Chunks, Error, ReceiveHalf, Result, SLOTS_MAX, SendHalf, Source, Step};

/// The numbers of chunks of a rank's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkCounts {
    pub(crate) buffer: usize,
    /// 0 if there is no input.
    pub(crate) input: usize,
}

impl Step {
    /// Checks that every peer, chunk and slot of the step exists, and that its halves share no chunk that they must
    /// not share. The runner and the verifier both call this.
    pub(crate) fn validate(self, rank: Rank, step: usize, parts: ChunkCounts) -> Result<()> {
        let check = StepCheck { rank, step, parts };
        match self {
            Self::Exchange { send, receive } => {
                if let Some((peer, chunks)) = self.in_place() {
                    return check.in_place(peer, chunks);
                }
                send.map_or(Ok(()), |send| check.send(send))?;
                receive.map_or(Ok(()), |receive| check.receive(receive))?;
                let overlap = !self.swaps() && halves_overlap(send, receive);
                if overlap { Err(Error::Overlap { rank: rank.index(), step }) } else { Ok(()) }
            }
            Self::Combine { chunk, from, into } => {
                check.chunks(Chunks::one(chunk), parts.buffer)?;
                check.local(ChunkLocation::Slot(from), into)
            }
            Self::Copy { chunk, from, into } => {
                check.chunks(Chunks::one(chunk), parts.buffer)?;
                check.local(from, into)
            }
            Self::Window { first, last } => {
                let world_size = rank.world_size();
                if first == 0 || first > last || last >= world_size {
                    return Err(Error::NoPeer { rank: rank.index(), step, peer: rank.plus(first).index() });
                }
                check.chunks(Chunks::all(world_size), parts.input)?;
                check.chunks(Chunks::all(world_size), parts.buffer)
            }
        }
    }
}

fn halves_overlap(send: Option<SendHalf>, receive: Option<ReceiveHalf>) -> bool {
    let (Some(send), Some(receive)) = (send, receive) else { return false };
    let in_buffer = (send.of, receive.place) == (Source::Buffer, ChunkLocation::Buffer);
    in_buffer && send.chunks.overlap(receive.chunks)
}

/// The step to check and the numbers of chunks.
pub(crate) struct StepCheck {
    pub(crate) rank: Rank,
    pub(crate) step: usize,
    pub(crate) parts: ChunkCounts,
}

impl StepCheck {
    /// Checks an exchange that [`Step::in_place`] recognises.
    #[inline]
    pub(crate) fn in_place(&self, peer: usize, chunks: Chunks) -> Result<()> {
        self.peer(peer)?;
        self.chunks(chunks, self.parts.buffer)
    }

    fn send(&self, send: SendHalf) -> Result<()> {
        self.peer(send.to)?;
        let parts = match send.of {
            Source::Buffer => self.parts.buffer,
            Source::Input => self.parts.input,
        };
        self.chunks(send.chunks, parts)
    }

    fn receive(&self, receive: ReceiveHalf) -> Result<()> {
        self.peer(receive.from)?;
        self.chunks(receive.chunks, self.parts.buffer)?;
        match receive.place {
            ChunkLocation::Buffer => Ok(()),
            ChunkLocation::Slot(slot) => self.slot(slot, receive.chunks.len() == 1),
        }
    }

    /// Checks that two locations are valid and different.
    fn local(&self, from: ChunkLocation, into: ChunkLocation) -> Result<()> {
        for (place, other) in [(from, into), (into, from)] {
            if let ChunkLocation::Slot(slot) = place {
                self.slot(slot, place != other)?;
            }
        }
        let (rank, step) = (self.rank.index(), self.step);
        if from == into { Err(Error::Overlap { rank, step }) } else { Ok(()) }
    }

    #[inline]
    fn peer(&self, peer: usize) -> Result<()> {
        let (rank, step) = (self.rank.index(), self.step);
        let exists = peer < self.rank.world_size() && peer != rank;
        if exists { Ok(()) } else { Err(Error::NoPeer { rank, step, peer }) }
    }

    #[inline]
    fn chunks(&self, chunks: Chunks, parts: usize) -> Result<()> {
        let (rank, step) = (self.rank.index(), self.step);
        if chunks.fit(parts) { Ok(()) } else { Err(Error::NoChunk { rank, step, chunks, parts }) }
    }

    fn slot(&self, slot: usize, sound: bool) -> Result<()> {
        let (rank, step) = (self.rank.index(), self.step);
        if slot < SLOTS_MAX && sound { Ok(()) } else { Err(Error::BadSlot { rank, step, slot }) }
    }
}
