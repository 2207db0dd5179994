//! Establishes the shared memory of a group: all ranks share it, or none does.
//!
//! The first rank of the group creates the memory. It passes the descriptor to the others over the Unix
//! sockets of their links, so only authenticated processes get it. All other data goes in ordinary messages
//! of the current call. A rank in another call, a death or the deadline therefore ends the agreement as it
//! ends any exchange.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use super::transport::{ProcessTransport, unconnected};
use crate::bootstrap::auth;
use crate::bootstrap::failure::PeerError;
use crate::group::GroupMemory;
use crate::group::ShmGroup;
use crate::link::message::LinkError;
use crate::link::peer_link::PeerLink;
use crate::link::shm::ShmLink;
use crate::{Activity, Incoming, LazyDeadline, Outgoing, Reach, Result, Sink};

/// The rank that creates the memory.
const CREATOR: usize = 0;

/// Bytes of the creator's offer: whether there is memory, and its nonce.
const OFFER_BYTES: usize = 1 + 32;

impl ProcessTransport {
    /// Agrees with all ranks of the group whether they share memory, and how far they reach into each other's
    /// own memory.
    pub(super) fn establish_shm_group(&mut self, due: &LazyDeadline<'_>) -> Result<Option<ShmGroup>> {
        if !self.session().may_all_share(&self.members) {
            return Ok(None);
        }
        let made = match self.rank.index() {
            CREATOR => self.create_memory(due),
            _ => self.receive_memory(due),
        };
        let Some((memory, reach)) = made.map_err(|peer_error| self.fail(peer_error, due))? else {
            tracing::info!(channel = self.channel.get(), "not all ranks of the group share memory");
            return Ok(None);
        };
        let (members, counts) = (self.members.clone(), self.counts.clone());
        let mut shm_group =
            ShmGroup::new(memory, &self.membership, (self.channel, self.calls, counts), self.rank, members);
        let reach = shm_group.probe(reach, due)?;
        tracing::info!(
            channel = self.channel.get(),
            members = ?self.members,
            ?reach,
            "the ranks of the group share memory"
        );
        Ok(Some(shm_group))
    }

    fn create_memory(&mut self, due: &LazyDeadline<'_>) -> Result<Option<(GroupMemory, Reach)>, PeerError> {
        let others = 1..self.rank.world_size();
        let mut reach = self.membership.session.reach;
        let mut shared = true;
        for peer in others.clone() {
            let [shares, reaches] = self.receive_bytes(peer, due)?;
            shared &= shares != 0 && self.shm_link(peer).is_some();
            reach = reach.min(decode(reaches));
        }
        let nonce = auth::random_bytes().map_err(LinkError::Unconnected).map_err(unconnected(CREATOR))?;
        let made = shared
            .then(|| GroupMemory::create(&nonce, self.rank.world_size()))
            .and_then(|made| made.inspect_err(|error| tracing::info!(%error, "no memory for a group")).ok());
        let mut offer = [0; OFFER_BYTES];
        offer[0] = u8::from(made.is_some());
        offer[1..].copy_from_slice(&nonce);
        if let Some((file, memory)) = &made {
            memory.process(CREATOR).store(std::process::id(), Ordering::Relaxed);
            for peer in others.clone() {
                let link = self.shm_link(peer).expect("looked at above");
                let passed = link.peer_process().and_then(|process| {
                    memory.process(peer).store(process, Ordering::Relaxed);
                    link.pass(file.as_fd())
                });
                passed.map_err(|e| PeerError {
                    activity: Activity::Send,
                    peer,
                    link_error: LinkError::from(e),
                })?;
            }
        }
        others.clone().try_for_each(|peer| self.send_bytes(peer, offer, due))?;
        let Some((_, memory)) = made else { return Ok(None) };
        let mut taken = true;
        for peer in others.clone() {
            taken &= self.receive_bytes(peer, due)? == [1];
        }
        others.clone().try_for_each(|peer| self.send_bytes(peer, [u8::from(taken), encode(reach)], due))?;
        Ok(taken.then_some((memory, reach)))
    }

    fn receive_memory(&mut self, due: &LazyDeadline<'_>) -> Result<Option<(GroupMemory, Reach)>, PeerError> {
        self.connect(&[CREATOR], due)?;
        let shares = u8::from(self.shm_link(CREATOR).is_some());
        self.send_bytes(CREATOR, [shares, encode(self.membership.session.reach)], due)?;
        let offer: [u8; OFFER_BYTES] = self.receive_bytes(CREATOR, due)?;
        let (offered, nonce) = offer.split_at(1);
        if offered != [1] {
            return Ok(None);
        }
        let nonce = nonce.try_into().expect("an offer ends in a nonce");
        let (world_size, file) =
            (self.rank.world_size(), self.shm_link(CREATOR).and_then(|link| link.take_file()));
        let opened = file.map(|file| GroupMemory::open(&file, &nonce, world_size)).transpose();
        let memory = opened.unwrap_or_else(|error| {
            tracing::info!(%error, "memory of a group cannot be mapped");
            None
        });
        let memory = memory.flatten();
        self.send_bytes(CREATOR, [u8::from(memory.is_some())], due)?;
        let [taken, reach] = self.receive_bytes(CREATOR, due)?;
        Ok(memory.filter(|_| taken == 1).map(|memory| (memory, decode(reach))))
    }

    /// Returns the shared-memory link to a peer, if messages to it go through shared memory.
    fn shm_link(&mut self, peer: usize) -> Option<&mut ShmLink> {
        match self.links[peer].as_mut()? {
            PeerLink::Shm(memory) => Some(memory),
            PeerLink::Socket(_) => None,
        }
    }

    fn send_bytes<const N: usize>(
        &mut self,
        peer: usize,
        words: [u8; N],
        due: &LazyDeadline<'_>,
    ) -> Result<(), PeerError> {
        self.try_exchange(Some(Outgoing { to: peer, parts: &[&words] }), None, due)
    }

    fn receive_bytes<const N: usize>(
        &mut self,
        peer: usize,
        due: &LazyDeadline<'_>,
    ) -> Result<[u8; N], PeerError> {
        let mut words = [0; N];
        let receive = Incoming { from: peer, len: N, sink: Sink::Into(&mut words) };
        self.try_exchange(None, Some(receive), due)?;
        Ok(words)
    }
}

const fn encode(reach: Reach) -> u8 {
    match reach {
        Reach::Slots => 0,
        Reach::Read => 1,
        Reach::Write => 2,
    }
}

const fn decode(word: u8) -> Reach {
    match word {
        2 => Reach::Write,
        1 => Reach::Read,
        _ => Reach::Slots,
    }
}
