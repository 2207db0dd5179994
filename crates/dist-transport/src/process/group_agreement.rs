//! The agreement of a group on shared memory by messages: all ranks share it, or none does. A group uses it if it gets
//! no memory from the pool of its host (`host_memory/group_pool.rs`), as the first group of a job.
//!
//! The first rank of the group creates the memory. It passes the descriptor to the others over the Unix
//! sockets of their links, so only authenticated processes get it. All other data goes in ordinary messages
//! of the current call. A rank in another call, a death or the deadline therefore ends the agreement as it
//! ends any exchange.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use super::process_transport::{ProcessTransport, unconnected};
use crate::bootstrap::auth;
use crate::bootstrap::failure::PeerError;
use crate::host_memory::GroupMemory;
use crate::link::message::LinkError;
use crate::link::shm::ShmLink;
use crate::shm_group::Reach;
use crate::{Activity, Incoming, LazyDeadline, Outgoing, Sink};

/// The rank that creates the memory.
const CREATOR: usize = 0;

/// Bytes of the creator's offer: whether there is memory, and its nonce.
const OFFER_BYTES: usize = 1 + NONCE_BYTES;
const NONCE_BYTES: usize = 32;

/// Memory that all ranks of a group have mapped, and how far each of them may reach into another's memory.
pub(super) type Agreed = Option<(GroupMemory, Reach)>;

/// One rank's part in the agreement.
pub(super) struct GroupAgreement<'a, 'd> {
    pub(super) transport: &'a mut ProcessTransport,
    pub(super) due: &'a LazyDeadline<'d>,
    pub(super) world_size: usize,
    /// The access to this process's memory that its config allows.
    pub(super) reach: Reach,
}

impl GroupAgreement<'_, '_> {
    /// Agrees with all ranks of the group on shared memory. Returns `None` if they share none.
    pub(super) fn reach_by(mut self, rank: usize) -> Result<Agreed, PeerError> {
        if rank == CREATOR { self.create_memory() } else { self.receive_memory() }
    }

    fn create_memory(&mut self) -> Result<Agreed, PeerError> {
        let (all_share, reach) = self.hear_all()?;
        let nonce = auth::random_bytes().map_err(LinkError::Unconnected).map_err(unconnected(CREATOR))?;
        let made = all_share
            .then(|| GroupMemory::create(&nonce, self.world_size))
            .and_then(|made| made.inspect_err(|error| tracing::info!(%error, "no memory for a group")).ok());
        if let Some((file, memory)) = &made {
            memory.process(CREATOR).store(std::process::id(), Ordering::Relaxed);
            self.others().try_for_each(|peer| self.pass_memory(peer, memory, file.as_fd()))?;
        }
        let mut offer = [0; OFFER_BYTES];
        offer[0] = u8::from(made.is_some());
        offer[1..].copy_from_slice(&nonce);
        self.others().try_for_each(|peer| self.send(peer, offer))?;
        let Some((_, memory)) = made else { return Ok(None) };
        let mut taken = true;
        for peer in self.others() {
            taken &= self.receive(peer)? == [1];
        }
        self.others().try_for_each(|peer| self.send(peer, [u8::from(taken), encode(reach)]))?;
        Ok(taken.then_some((memory, reach)))
    }

    /// Returns whether all ranks can share memory with this one, and the least reach of any rank.
    fn hear_all(&mut self) -> Result<(bool, Reach), PeerError> {
        let (mut all_share, mut least) = (true, self.reach);
        for peer in self.others() {
            let [shares, reach] = self.receive(peer)?;
            all_share &= shares != 0 && self.link(peer).is_some();
            least = least.min(decode(reach));
        }
        Ok((all_share, least))
    }

    /// Passes the descriptor of the memory to a rank, and records the rank's process in it.
    fn pass_memory(
        &mut self,
        peer: usize,
        memory: &GroupMemory,
        file: BorrowedFd<'_>,
    ) -> Result<(), PeerError> {
        let link = self.link(peer).expect("all ranks were asked whether they share");
        let passed = link.peer_process().and_then(|process| {
            memory.process(peer).store(process, Ordering::Relaxed);
            link.pass(file)
        });
        let activity = Activity::Send;
        passed.map_err(|error| PeerError { activity, peer, link_error: LinkError::from(error) })
    }

    fn receive_memory(&mut self) -> Result<Agreed, PeerError> {
        self.transport.connect(&[CREATOR], self.due)?;
        let shares = u8::from(self.link(CREATOR).is_some());
        self.send(CREATOR, [shares, encode(self.reach)])?;
        let [offered, nonce @ ..]: [u8; OFFER_BYTES] = self.receive(CREATOR)?;
        if offered != 1 {
            return Ok(None);
        }
        let memory = self.open_memory(&nonce);
        self.send(CREATOR, [u8::from(memory.is_some())])?;
        let [taken, reach] = self.receive(CREATOR)?;
        Ok(memory.filter(|_| taken == 1).map(|memory| (memory, decode(reach))))
    }

    fn open_memory(&mut self, nonce: &[u8; NONCE_BYTES]) -> Option<GroupMemory> {
        let file = self.link(CREATOR).and_then(ShmLink::take_file)?;
        GroupMemory::open(&file, nonce, self.world_size).unwrap_or_else(|error| {
            tracing::info!(%error, "memory of a group cannot be mapped");
            None
        })
    }

    /// Returns the ranks that the creator agrees with.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        CREATOR + 1..self.world_size
    }

    /// Returns the link to a rank if it is a shared-memory link.
    fn link(&mut self, peer: usize) -> Option<&mut ShmLink> {
        self.transport.shm_link(peer)
    }

    fn send<const N: usize>(&mut self, to: usize, bytes: [u8; N]) -> Result<(), PeerError> {
        self.transport.try_exchange(Some(Outgoing { to, parts: &[&bytes] }), None, self.due)
    }

    fn receive<const N: usize>(&mut self, from: usize) -> Result<[u8; N], PeerError> {
        let mut bytes = [0; N];
        let receive = Incoming { from, len: N, sink: Sink::Into(&mut bytes) };
        self.transport.try_exchange(None, Some(receive), self.due)?;
        Ok(bytes)
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
