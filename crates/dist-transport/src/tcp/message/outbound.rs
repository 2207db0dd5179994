//! A message on its way out.

use std::io::IoSlice;

use socket2::Socket;

use super::{
    COPIED_BYTES_MAX, Fault, HEADER_BYTES, LENT_MAGIC, MAGIC, PUBLISH_BYTES_MAX, SEND_BYTES_MAX, encode,
};
use crate::Fingerprint;
use crate::shm::Memory;
use crate::tcp::link::Link;
use crate::tcp::scratch::Scratch;
use crate::tcp::socket;

/// Pieces of a message that one system call takes.
const PARTS_MAX: usize = 16;

/// A message on its way out.
#[derive(Debug)]
pub(in crate::tcp) struct Outbound {
    header: [u8; HEADER_BYTES],
    sent: usize,
    total: usize,
    pub(super) loan: Loan,
}

/// Whether a message is lent in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loan {
    /// It is not.
    None,
    /// It is to be if that goes.
    Wanted,
    /// The peer may be copying it.
    Open,
}

impl Outbound {
    pub(in crate::tcp) fn new(length: usize, call: &Fingerprint) -> Self {
        let (header, total) = (encode(length as u64, call), HEADER_BYTES + length);
        Self { header, sent: 0, total, loan: Loan::None }
    }

    /// The same, but in memory it may be lent if this is so.
    pub(in crate::tcp) const fn lent_if(self, lent: bool) -> Self {
        let loan = if lent { Loan::Wanted } else { Loan::None };
        Self { loan, ..self }
    }

    pub(in crate::tcp) fn done(&self) -> bool {
        self.sent == self.total
    }

    /// Whether the peer may have something of it.
    pub(in crate::tcp) fn has_begun(&self) -> bool {
        self.sent > 0 || self.loan == Loan::Open
    }

    /// Bytes of the payload that have left.
    pub(super) fn payload_sent(&self) -> usize {
        self.sent.saturating_sub(HEADER_BYTES)
    }

    /// Sends what the connection takes; `true` if it took something.
    pub(in crate::tcp) fn push(
        &mut self,
        link: &mut Link,
        scratch: &mut Scratch,
        parts: &[&[u8]],
    ) -> Result<bool, Fault> {
        match link {
            Link::Socket(stream) => self.push_to_socket(stream, scratch, parts),
            Link::Memory(memory) => self.push_to_memory(memory, parts),
        }
    }

    fn push_to_memory(&mut self, memory: &mut Memory, parts: &[&[u8]]) -> Result<bool, Fault> {
        let mut moved = false;
        if self.sent == 0 && self.lay_down(memory, parts)? {
            return Ok(true);
        }
        match (self.loan, parts) {
            (Loan::Wanted, &[message]) => {
                let lent = memory.lend(&self.lending(), message)?;
                self.loan = if lent { Loan::Open } else { Loan::None };
                if lent {
                    return Ok(true);
                }
            }
            (Loan::Open, _) => {
                let Some(taken) = memory.taken(self.total - HEADER_BYTES)? else { return Ok(false) };
                self.loan = Loan::None;
                self.sent = HEADER_BYTES + taken;
                moved = true;
            }
            _ => {}
        }
        // No more in one go than a socket takes: the peer may take it as fast as it comes, and the deadline is looked at
        // in between.
        let enough = self.total.min(self.sent + SEND_BYTES_MAX);
        while self.sent < enough && self.push_piece(memory, parts)? {
            moved = true;
        }
        Ok(moved)
    }

    /// Hands the whole message over on the tray, if that can be.
    fn lay_down(&mut self, memory: &mut Memory, parts: &[&[u8]]) -> Result<bool, Fault> {
        let about = &self.header[MAGIC.len()..];
        let laid = memory.lay_down(about, parts, self.total - HEADER_BYTES)?;
        self.sent = if laid { self.total } else { 0 };
        Ok(laid)
    }

    /// The header of a message that is lent.
    fn lending(&self) -> [u8; HEADER_BYTES] {
        let mut header = self.header;
        header[..LENT_MAGIC.len()].copy_from_slice(&LENT_MAGIC);
        header
    }

    /// Copies and publishes what there is room for, but no more than the peer should wait for.
    fn push_piece(&mut self, memory: &mut Memory, parts: &[&[u8]]) -> Result<bool, Fault> {
        let wanted = (self.total - self.sent).min(PUBLISH_BYTES_MAX);
        let count = memory.room(wanted)?.min(wanted);
        let (mut written, mut skip) = (0, self.sent);
        for part in std::iter::once(&self.header[..]).chain(parts.iter().copied()) {
            if written == count {
                break;
            }
            let rest = &part[skip.min(part.len())..];
            skip -= part.len() - rest.len();
            let piece = &rest[..rest.len().min(count - written)];
            memory.write(written, piece);
            written += piece.len();
        }
        if count > 0 {
            memory.publish(count);
        }
        self.sent += count;
        Ok(count > 0)
    }

    fn push_to_socket(
        &mut self,
        stream: &Socket,
        scratch: &mut Scratch,
        parts: &[&[u8]],
    ) -> Result<bool, Fault> {
        let sent = if self.total <= COPIED_BYTES_MAX {
            let message = &mut scratch.outgoing;
            message.clear();
            message.extend_from_slice(&self.header);
            parts.iter().for_each(|part| message.extend_from_slice(part));
            socket::send(stream, &message[self.sent..])?
        } else {
            self.push_pieces(stream, parts)?
        };
        self.sent += sent.unwrap_or(0);
        Ok(sent.is_some())
    }

    fn push_pieces(&self, stream: &Socket, parts: &[&[u8]]) -> Result<Option<usize>, Fault> {
        let mut pieces = [IoSlice::new(&[]); PARTS_MAX];
        let mut count = 0;
        let mut room = SEND_BYTES_MAX;
        let mut skip = self.sent;
        for part in std::iter::once(&self.header[..]).chain(parts.iter().copied()) {
            let rest = &part[skip.min(part.len())..];
            skip -= part.len() - rest.len();
            if !rest.is_empty() {
                pieces[count] = IoSlice::new(&rest[..rest.len().min(room)]);
                room -= pieces[count].len();
                count += 1;
            }
            if count == PARTS_MAX || room == 0 {
                break;
            }
        }
        Ok(match &pieces[..count] {
            [one] => socket::send(stream, one)?,
            several => socket::send_pieces(stream, several)?,
        })
    }
}
