//! Single messages between two ranks, as `distctl bench` measures them, ready to be predicted.

use dist_algos::{ChunkLocation, Chunks, OnArrival, Partition, ReceiveHalf, SendHalf, Step};
use dist_transport::Rank;

use super::candidates::Candidate;
use crate::Error;
use crate::operation::Messages;

/// Returns the candidate for one call of the benchmark. Its time is that of all consecutive messages.
pub(super) fn candidate<'a>(messages: Messages, bytes: usize) -> Result<Candidate<'a>, Error> {
    let buffer = Partition::new(bytes, 1, 1)
        .ok_or_else(|| Error::Usage(format!("a message of {bytes} bytes is too long")))?;
    let trips = messages.trips() as usize;
    // Number of message buffers in the working set of a rank.
    let buffers = if messages == Messages::SendRecv { 2 } else { 1 };
    let steps = move |rank: Rank| {
        let taking_part = if rank.index() < 2 { trips } else { 0 };
        (0..taking_part).map(move |trip| step(messages, rank.index(), trip))
    };
    Ok(Candidate::of_messages(buffer, buffers * bytes, trips, steps))
}

/// Returns a step of rank 0 or 1.
fn step(messages: Messages, rank: usize, trip: usize) -> Step {
    let peer = 1 - rank;
    let send = SendHalf::input(peer, Chunks::one(0));
    let receive = ReceiveHalf {
        from: peer,
        chunks: Chunks::one(0),
        place: ChunkLocation::Buffer,
        then: OnArrival::Replace,
    };
    let sender = if messages == Messages::PingPong { trip } else { 0 };
    match messages {
        Messages::SendRecv => Step::Exchange { send: Some(send), receive: Some(receive) },
        _ if rank == sender => Step::Exchange { send: Some(send), receive: None },
        _ => Step::Exchange { send: None, receive: Some(receive) },
    }
}
