//! A link of mailboxes: a minimal `RingTransport`.

use dist_algos::{RingTransport, Scratch};
use dist_transport::runtime::{Mailbox, Receiver, Unavailable};
use dist_transport::{Incoming, LazyDeadline, Outgoing, Rank, Runtime, Sink, Traffic};

/// One rank's end: a mailbox to every rank and from every rank.
pub(crate) struct Link {
    rank: Rank,
    to: Vec<Mailbox<Vec<u8>>>,
    from: Vec<Receiver<Vec<u8>>>,
    arrived: Scratch,
    traffic: Traffic,
}

/// The reason why a link failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("nothing came from rank {0}: {1:?}")]
    Nothing(usize, Unavailable),
    #[error("rank {0} sent {1} bytes, not {2}")]
    Length(usize, usize, usize),
}

pub(crate) fn network(runtime: &Runtime, world_size: usize) -> Vec<Link> {
    let mut to: Vec<Vec<_>> = (0..world_size).map(|_| Vec::new()).collect();
    let mut from: Vec<Vec<_>> = (0..world_size).map(|_| Vec::new()).collect();
    for to in &mut to {
        for from in &mut from {
            let (sender, receiver) = runtime.mailbox();
            to.push(sender);
            from.push(receiver);
        }
    }
    Rank::all(world_size)
        .zip(to.into_iter().zip(from))
        .map(|(rank, (to, from))| Link {
            rank,
            to,
            from,
            arrived: Scratch::new(),
            traffic: Traffic::default(),
        })
        .collect()
}

impl Link {
    pub(crate) fn traffic(&self) -> Traffic {
        self.traffic
    }
}

impl RingTransport for Link {
    type Error = LinkError;

    fn rank(&self) -> Rank {
        self.rank
    }

    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<(), LinkError> {
        if let Some(send) = send {
            self.to[send.to].send(send.parts.concat());
            self.traffic.messages_sent += 1;
            self.traffic.bytes_sent += send.len() as u64;
        }
        let Some(Incoming { from, len, sink }) = receive else { return Ok(()) };
        let message = self.from[from]
            .receive(Some(due.deadline()))
            .map_err(|reason| LinkError::Nothing(from, reason))?;
        if message.len() != len {
            return Err(LinkError::Length(from, message.len(), len));
        }
        self.traffic.messages_received += 1;
        self.traffic.bytes_received += len as u64;
        match sink {
            Sink::Into(memory) => memory.copy_from_slice(&message),
            Sink::Each(deliver) => {
                // Pieces of one line, two lines, three lines, and so on.
                let (mut offset, mut piece) = (0, 64);
                while offset < len {
                    let end = len.min(offset + piece);
                    let bytes = self.arrived.bytes(end - offset);
                    bytes.copy_from_slice(&message[offset..end]);
                    deliver(offset, bytes);
                    (offset, piece) = (end, piece + 64);
                }
            }
        }
        Ok(())
    }
}
