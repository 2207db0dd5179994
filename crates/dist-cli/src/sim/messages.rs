//! Single messages between two ranks, as `distctl bench` measures them, ready to be predicted.

use dist_algos::{Chunks, Partition, Place, ReceiveHalf, SendHalf, Step, Then};
use dist_transport::Rank;

use super::candidates::Candidate;
use crate::Error;

/// Which of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Messages {
    /// To rank 1 and back.
    PingPong,
    /// To each other at the same time.
    SendRecv,
    /// To rank 1, one after the other.
    Stream,
}

impl Messages {
    pub(super) fn parse(name: &str) -> Option<Self> {
        match name {
            "pingpong" => Some(Self::PingPong),
            "sendrecv" => Some(Self::SendRecv),
            "stream" => Some(Self::Stream),
            _ => None,
        }
    }

    /// One call of the benchmark. Its time is that of all its messages that follow one another.
    pub(super) fn candidate<'a>(self, bytes: usize) -> Result<Candidate<'a>, Error> {
        let buffer = Partition::new(bytes, 1, 1)
            .ok_or_else(|| Error::Usage(format!("a message of {bytes} bytes is too long")))?;
        let trips = self.trips();
        let steps = move |rank: Rank| {
            let taking_part = if rank.index() < 2 { trips } else { 0 };
            (0..taking_part).map(move |trip| self.step(rank.index(), trip))
        };
        Ok(Candidate::of_messages(buffer, self.buffers() * bytes, trips, steps))
    }

    /// How many buffers of a message's size a rank works on.
    const fn buffers(self) -> usize {
        match self {
            Self::SendRecv => 2,
            Self::PingPong | Self::Stream => 1,
        }
    }

    /// Messages of a call.
    const fn trips(self) -> usize {
        match self {
            Self::PingPong => 2,
            Self::SendRecv => 1,
            Self::Stream => 32,
        }
    }

    /// What rank 0 or 1 does.
    fn step(self, rank: usize, trip: usize) -> Step {
        let peer = 1 - rank;
        let send = SendHalf::input(peer, Chunks::one(0));
        let receive =
            ReceiveHalf { from: peer, chunks: Chunks::one(0), place: Place::Buffer, then: Then::Replace };
        let sender = if self == Self::PingPong { trip } else { 0 };
        match self {
            Self::SendRecv => Step::Exchange { send: Some(send), receive: Some(receive) },
            _ if rank == sender => Step::Exchange { send: Some(send), receive: None },
            _ => Step::Exchange { send: None, receive: Some(receive) },
        }
    }
}
