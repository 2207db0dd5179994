//! Divides a buffer into the pieces that a step reads and those that it writes.

use std::ops::Range;

use smallvec::SmallVec;

use crate::{Chunks, Partition};

/// The pieces of memory of a message; one, if its chunks are contiguous. More than four pieces mean many ranks and
/// messages, so that an allocation does not matter.
pub(crate) type Pieces<'a> = SmallVec<[&'a [u8]; 4]>;

/// The pieces of memory that a message is received into.
pub(crate) type PiecesMut<'a> = SmallVec<[&'a mut [u8]; 4]>;

/// Returns the pieces that are sent and the pieces that are received into. Returns `None` if a byte is in both.
pub(crate) fn split<'a>(
    buffer: &'a mut [u8],
    partition: &Partition<'_>,
    send: Chunks,
    receive: Chunks,
) -> Option<(Pieces<'a>, PiecesMut<'a>)> {
    let (mut sent, mut received) = (Pieces::new(), PiecesMut::new());
    let (mut sends, mut receives) = (ranges(partition, send), ranges(partition, receive));
    let (mut send, mut receive) = (sends.next(), receives.next());
    let (mut rest, mut partition) = (buffer, 0);
    loop {
        let is_send = match (&send, &receive) {
            (None, None) => return Some((sent, received)),
            (Some(send), Some(receive)) => send.start < receive.start,
            (send, _) => send.is_some(),
        };
        let range = if is_send {
            std::mem::replace(&mut send, sends.next())
        } else {
            std::mem::replace(&mut receive, receives.next())
        };
        let range = range.expect("the chosen side is not at its end");
        let (_, after) = rest.split_at_mut(range.start.checked_sub(partition)?);
        let (piece, after) = after.split_at_mut(range.len());
        (rest, partition) = (after, range.end);
        if is_send {
            sent.push(piece);
        } else {
            received.push(piece);
        }
    }
}

/// Returns the pieces of the buffer that are sent, for a step that receives nothing into the buffer.
pub(crate) fn read<'a>(buffer: &'a [u8], partition: &Partition<'_>, chunks: Chunks) -> Pieces<'a> {
    ranges(partition, chunks).map(|range| &buffer[range]).collect()
}

/// Returns the pieces of memory in these ranges, which ascend and do not overlap.
pub(crate) fn cut_out(
    memory: &mut [u8],
    ranges: impl Iterator<Item = Range<usize>>,
) -> impl Iterator<Item = &mut [u8]> {
    let (mut rest, mut partition) = (memory, 0);
    ranges.map(move |range| {
        let (_, after) = std::mem::take(&mut rest).split_at_mut(range.start - partition);
        let (piece, after) = after.split_at_mut(range.len());
        (rest, partition) = (after, range.end);
        piece
    })
}

/// Returns the byte ranges of a set of chunks without the empty ones; one range if the chunks are contiguous.
pub(crate) fn ranges(partition: &Partition<'_>, chunks: Chunks) -> impl Iterator<Item = Range<usize>> {
    chunks.contiguous().map(|run| partition.span(run)).filter(|range| !range.is_empty())
}

/// A destination that distributes the bytes of an arriving message to several pieces of memory.
pub(crate) struct ScatteredPieces<'a> {
    parts: PiecesMut<'a>,
    /// The piece that is being filled, and the number of bytes in it.
    part: usize,
    filled: usize,
    /// The number of bytes that have arrived.
    arrived: usize,
    in_order: bool,
}

impl<'a> ScatteredPieces<'a> {
    pub(crate) fn new(parts: PiecesMut<'a>) -> Self {
        Self { parts, part: 0, filled: 0, arrived: 0, in_order: true }
    }

    /// Passes each range of memory and the bytes for it to `apply`.
    pub(crate) fn scatter(&mut self, offset: usize, bytes: &[u8], apply: &mut dyn FnMut(&mut [u8], &[u8])) {
        self.in_order &= offset == self.arrived;
        self.arrived += bytes.len();
        let mut bytes = bytes;
        while self.in_order && !bytes.is_empty() {
            let Some(part) = self.parts.get_mut(self.part) else { break };
            let memory = &mut part[self.filled..];
            let len = memory.len().min(bytes.len());
            let (now, later) = bytes.split_at(len);
            apply(&mut memory[..len], now);
            (bytes, self.filled) = (later, self.filled + len);
            if self.filled == part.len() {
                (self.part, self.filled) = (self.part + 1, 0);
            }
        }
    }

    /// Returns `true` if all bytes have arrived in order.
    pub(crate) fn complete(&self) -> bool {
        self.in_order && self.arrived == self.parts.iter().map(|part| part.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strided_sets_come_apart_in_order() {
        let mut buffer: Vec<u8> = (0..8).collect();
        let partition = Partition::new(8, 1, 8).unwrap();
        let (odd, even) = (Chunks::strided(1, 2, 4), Chunks::strided(0, 2, 4));
        let (sent, received) = split(&mut buffer, &partition, odd, even).unwrap();
        assert_eq!(sent.concat(), [1, 3, 5, 7]);
        assert_eq!(received.concat(), [0, 2, 4, 6]);
    }

    #[test]
    fn sets_that_share_a_byte_do_not_come_apart() {
        let mut buffer = [0; 8];
        let partition = Partition::new(8, 1, 4).unwrap();
        let (low, high) = (Chunks::range(0, 3), Chunks::range(2, 2));
        assert!(split(&mut buffer, &partition, low, high).is_none());
        assert!(split(&mut buffer, &partition, high, low).is_none());
        assert!(split(&mut buffer, &partition, low, Chunks::one(1)).is_none());
        assert!(split(&mut buffer, &partition, low, Chunks::one(3)).is_some());
    }

    /// Distributes the pieces of a message to places of these lengths, and returns the content of the places.
    fn scatter(places: &[usize], pieces: &[(usize, &[u8])]) -> Option<Vec<Vec<u8>>> {
        let mut memory: Vec<Vec<u8>> = places.iter().map(|&len| vec![0; len]).collect();
        let mut scatter = ScatteredPieces::new(memory.iter_mut().map(Vec::as_mut_slice).collect());
        for (offset, bytes) in pieces {
            scatter.scatter(*offset, bytes, &mut |place, bytes| place.copy_from_slice(bytes));
        }
        let complete = scatter.complete();
        drop(scatter);
        complete.then_some(memory)
    }

    #[test]
    fn a_message_is_distributed_to_its_pieces_in_any_division() {
        let pieces: [(usize, &[u8]); 4] = [(0, &[1, 2]), (2, &[3, 4, 5]), (5, &[]), (5, &[6, 7, 8])];
        let memory = scatter(&[3, 1, 4], &pieces).unwrap();
        assert_eq!(memory, [&[1, 2, 3][..], &[4], &[5, 6, 7, 8]]);
    }

    #[test]
    fn wrong_amounts_and_bytes_out_of_order_are_noticed() {
        assert_eq!(scatter(&[2], &[(0, &[1, 2, 3])]), None);
        assert_eq!(scatter(&[2], &[(0, &[1])]), None);
        assert_eq!(scatter(&[2], &[(1, &[1, 2])]), None);
        assert!(scatter(&[2], &[(0, &[1, 2])]).is_some());
        assert!(scatter(&[], &[]).is_some());
    }
}
