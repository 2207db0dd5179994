//! Where strangers knock: accepts connections and lets in those that prove that they belong to the job.
//!
//! Nothing here waits: a stranger that says nothing costs a place among the half-open connections for two
//! seconds, and the newest knock takes the oldest place when all are taken.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use crate::auth::{HELLO_BYTES, Identity, Key, PROOF_BYTES, Responder};
use crate::tcp::socket;
use crate::{Deadline, Runtime};

const HALF_OPEN_MAX: usize = 64;
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Gate {
    pub(super) listener: TcpListener,
    key: Key,
    epoch: u32,
    runtime: Runtime,
    half_open: Vec<HalfOpen>,
    refused: u64,
}

/// A connection in the middle of its handshake.
#[derive(Debug)]
pub(super) struct HalfOpen {
    pub(super) stream: TcpStream,
    deadline: Deadline,
    hello: [u8; HELLO_BYTES],
    proof: [u8; PROOF_BYTES],
    filled: usize,
    /// Set when the hello is complete and the challenge sent.
    responder: Option<Responder>,
}

/// How far a handshake has come.
enum Progress {
    Waiting,
    Done(Identity),
    Refused,
}

impl Gate {
    /// A gate behind a non-blocking listener.
    pub(super) fn new(listener: TcpListener, key: Key, epoch: u32, runtime: Runtime) -> Self {
        Self { listener, key, epoch, runtime, half_open: Vec::new(), refused: 0 }
    }

    /// How many connections have been refused so far.
    pub(super) fn refused(&self) -> u64 {
        self.refused
    }

    /// The connections that are to be watched beside the listener.
    pub(super) fn half_open(&self) -> &[HalfOpen] {
        &self.half_open
    }

    /// Takes every handshake as far as it goes without waiting, and returns those who have proven themselves.
    pub(super) fn advance(&mut self) -> Vec<(TcpStream, Identity)> {
        self.accept();
        let mut admitted = Vec::new();
        for mut knock in std::mem::take(&mut self.half_open) {
            match self.progress(&mut knock) {
                Progress::Waiting => self.half_open.push(knock),
                Progress::Done(identity) => admitted.push((knock.stream, identity)),
                Progress::Refused => {
                    self.refused += 1;
                    tracing::debug!(peer = ?knock.stream.peer_addr().ok(), "refused a connection");
                }
            }
        }
        admitted
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if socket::prepare(&stream).is_err() {
                        continue;
                    }
                    if self.half_open.len() == HALF_OPEN_MAX {
                        self.half_open.remove(0);
                        self.refused += 1;
                    }
                    self.half_open.push(HalfOpen {
                        stream,
                        deadline: self.runtime.deadline(HANDSHAKE_LIMIT),
                        hello: [0; HELLO_BYTES],
                        proof: [0; PROOF_BYTES],
                        filled: 0,
                        responder: None,
                    });
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                // A connection that failed before it was accepted is no failure of ours.
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(e) => {
                    tracing::warn!(error = %e, "cannot accept connections for now");
                    return;
                }
            }
        }
    }

    fn progress(&self, knock: &mut HalfOpen) -> Progress {
        loop {
            let wanted = match knock.responder {
                None => &mut knock.hello[..],
                Some(_) => &mut knock.proof[..],
            };
            while knock.filled < wanted.len() {
                match knock.stream.read(&mut wanted[knock.filled..]) {
                    Ok(0) => return Progress::Refused,
                    Ok(count) => knock.filled += count,
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    Err(e) if e.kind() == ErrorKind::WouldBlock => {
                        let late = self.runtime.expired(knock.deadline);
                        return if late { Progress::Refused } else { Progress::Waiting };
                    }
                    Err(_) => return Progress::Refused,
                }
            }
            knock.filled = 0;
            if let Some(responder) = &knock.responder {
                let accepted = responder.accepts(&knock.proof);
                return if accepted { Progress::Done(responder.claim()) } else { Progress::Refused };
            }
            match Responder::new(self.key.clone(), &knock.hello) {
                Ok(Some(responder)) if responder.claim().epoch == self.epoch => {
                    // A new connection's buffer takes the whole challenge or the connection is of no use.
                    if knock.stream.write_all(&responder.challenge()).is_err() {
                        return Progress::Refused;
                    }
                    knock.responder = Some(responder);
                }
                _ => return Progress::Refused,
            }
        }
    }
}
