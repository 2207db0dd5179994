//! Tests of messages through shared memory between two sides of one process, one step at a time.

use std::io::Read;

use rstest::rstest;
use socket2::{Domain, Socket, Type};

use super::outbound::SingleCopy;
use super::{Inbound, LinkError, Outbound};
use crate::cpu::CacheLine;
use crate::link::peer_link::PeerLink;
use crate::link::shm::ShmLink;
use crate::link::socket;
use crate::link::staging_buffer::StagingBuffer;
use crate::{Activity, Fingerprint, Sink};

const CALL: Fingerprint = Fingerprint([7; 48]);
const MIB: usize = 1 << 20;

/// Returns two connected sides that offer and copy single-copy messages.
fn pair() -> [PeerLink; 2] {
    let (one, other) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
    one.set_nonblocking(true).unwrap();
    other.set_nonblocking(true).unwrap();
    let offered = crate::link::shm::offer(&one, &[5; 32]).unwrap();
    let taken = crate::link::shm::take(&other).unwrap().expect("it was offered");
    let mut accepted = [0];
    (&one).read_exact(&mut accepted).unwrap();
    [PeerLink::Shm(ShmLink::new(one, offered, true)), PeerLink::Shm(ShmLink::new(other, taken, true))]
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from(at % 251).expect("below 251")).collect()
}

fn single_copy(len: usize) -> Outbound {
    Outbound::new(len, &CALL).single_copy_if(true)
}

/// Moves a message from one side to the other. Returns whether it was offered as a single copy first.
fn pass([from, to]: &mut [PeerLink; 2], sent: &[u8], sink: &mut Sink<'_>) -> bool {
    let (mut outbound, mut inbound) = (single_copy(sent.len()), Inbound::new(sent.len(), &CALL));
    let mut staging = StagingBuffer::default();
    outbound.push(from, &mut StagingBuffer::default(), &[sent]).unwrap();
    let was_lent = outbound.single_copy == SingleCopy::Offered;
    while !(outbound.done() && inbound.done()) {
        let moved = !outbound.done() && outbound.push(from, &mut StagingBuffer::default(), &[sent]).unwrap();
        let came = !inbound.done() && inbound.pull(to, &mut staging, sink).unwrap();
        assert!(moved || came, "neither side can go on");
    }
    was_lent
}

#[test]
fn an_empty_message_leaves_the_fastbox_to_the_next() {
    let mut links = pair();
    // Then the first side owns both fastboxes.
    for (from_second, len) in
        [(true, 1), (false, 0), (false, 1), (true, 0), (true, 65_536), (false, 65_537), (false, 0)]
    {
        let (sent, mut received) = (bytes(len), vec![0; len]);
        if from_second {
            links.reverse();
        }
        pass(&mut links, &sent, &mut Sink::Into(&mut received));
        if from_second {
            links.reverse();
        }
        assert_eq!(received, sent);
    }
}

#[rstest]
#[case::what_the_ring_has_room_for(MIB - 64, false)]
#[case::what_it_has_none_for(MIB, true)]
#[case::several_pieces(3 * MIB + 1, true)]
fn a_large_message_is_sent_as_a_single_copy(
    #[case] len: usize,
    #[case] is_single_copy: bool,
    #[values(true, false)] into: bool,
) {
    let mut links = pair();
    let sent = bytes(len);
    // The second message goes the other way.
    for _ in 0..2 {
        let mut received = vec![0; if into { len } else { 0 }];
        let mut append = |offset: usize, piece: &[u8]| {
            assert_eq!((offset, offset % CacheLine::BYTES), (received.len(), 0));
            assert!(piece.as_ptr().addr().is_multiple_of(CacheLine::BYTES));
            received.extend_from_slice(piece);
        };
        let was_lent = match into {
            true => pass(&mut links, &sent, &mut Sink::Into(&mut received)),
            false => pass(&mut links, &sent, &mut Sink::Each(&mut append)),
        };
        assert_eq!(was_lent, is_single_copy);
        assert!(received == sent);
        links.reverse();
    }
}

#[test]
fn a_single_copy_is_combined_no_further_than_own_bytes_were_sent() {
    let mut links = pair();
    let sent = bytes(MIB);
    single_copy(MIB).push(&mut links[0], &mut StagingBuffer::default(), &[&sent]).unwrap();
    let (mut inbound, mut own) = (Inbound::new(MIB, &CALL), Outbound::new(MIB, &CALL));
    let mut memory = vec![1; MIB];
    let mut combine = |ours: &mut [u8], theirs: &[u8]| {
        ours.iter_mut().zip(theirs).for_each(|(ours, theirs)| *ours = ours.wrapping_add(*theirs));
    };
    own.push(&mut links[1], &mut StagingBuffer::default(), &[&memory]).unwrap();
    let left = own.payload_sent();
    assert!(left < MIB, "the ring has no room for all");
    let mut staging = StagingBuffer::default();
    while inbound.pull_in_place(&mut links[1], &mut staging, &own, &mut memory, &mut combine).unwrap() {}
    assert!(memory[..left].iter().zip(&sent).all(|(ours, theirs)| *ours == theirs.wrapping_add(1)));
    assert!(memory[left..].iter().all(|&byte| byte == 1));
}

fn memory(link: &mut PeerLink) -> &mut ShmLink {
    let PeerLink::Shm(memory) = link else { unreachable!("both are memory") };
    memory
}

/// One of two ranks may reach into the other's memory but not the reverse, as where one is the other's child.
#[test]
fn a_message_out_of_reach_and_later_ones_come_through_the_ring_but_not_those_of_the_other_direction() {
    let mut links = pair();
    memory(&mut links[1]).get_no_more();
    let sent = bytes(2 * MIB + 5);
    let was_lent = [false, false, true].map(|turns| {
        if turns {
            links.reverse();
        }
        let mut received = vec![0; sent.len()];
        let was_lent = pass(&mut links, &sent, &mut Sink::Into(&mut received));
        assert!(received == sent);
        was_lent
    });
    assert_eq!(was_lent, [true, false, true]);
}

#[test]
fn a_message_that_gets_out_of_reach_midway_continues_through_the_ring() {
    let [mut from, mut to] = pair();
    let sent = bytes(2 * MIB + 5);
    let mut received = vec![0; sent.len()];
    let mut sink = Sink::Into(&mut received);
    let (mut outbound, mut inbound) = (single_copy(sent.len()), Inbound::new(sent.len(), &CALL));
    let staging = &mut StagingBuffer::default();
    outbound.push(&mut from, staging, &[&sent]).unwrap();
    inbound.pull(&mut to, staging, &mut sink).unwrap();
    assert!(inbound.delivered > 0 && inbound.delivered < sent.len());
    memory(&mut to).get_no_more();
    while !inbound.done() {
        inbound.pull(&mut to, staging, &mut sink).unwrap();
        if !outbound.done() {
            outbound.push(&mut from, staging, &[&sent]).unwrap();
        }
    }
    assert!(outbound.done());
    assert!(received == sent);
}

#[rstest]
#[case::before_it_was_looked_at(false)]
#[case::while_it_was_copied(true)]
fn a_cancelled_message_is_not_received(#[case] begun: bool) {
    let [mut from, mut to] = pair();
    let sent = bytes(2 * MIB);
    let mut received = vec![0; sent.len()];
    let mut sink = Sink::Into(&mut received);
    let mut inbound = Inbound::new(sent.len(), &CALL);
    let staging = &mut StagingBuffer::default();
    single_copy(sent.len()).push(&mut from, staging, &[&sent]).unwrap();
    if begun {
        inbound.pull(&mut to, staging, &mut sink).unwrap();
    }
    from.cancel_offer();
    // It is no end of the peer, which may have been told so by the rank that made its call fail.
    while inbound.pull(&mut to, staging, &mut sink).unwrap() {}
    assert!(!inbound.done());
    drop(from);
    to.end_sleep();
    let link_error = inbound.pull(&mut to, staging, &mut sink);
    assert!(matches!(link_error, Err(LinkError::Closed)), "{link_error:?}");
}

#[test]
fn a_message_offered_by_a_dead_peer_is_not_received() {
    let [mut from, mut to] = pair();
    let sent = bytes(MIB);
    let mut received = vec![0; MIB];
    let staging = &mut StagingBuffer::default();
    single_copy(MIB).push(&mut from, staging, &[&sent]).unwrap();
    drop(from);
    let (mut inbound, mut sink) = (Inbound::new(MIB, &CALL), Sink::Into(&mut received));
    let link_error = loop {
        match inbound.pull(&mut to, staging, &mut sink) {
            Ok(_) => assert!(!inbound.done()),
            Err(link_error) => break link_error,
        }
    };
    assert!(matches!(link_error, LinkError::Closed), "{link_error:?}");
}

#[test]
fn a_sender_that_waits_for_an_acknowledgement_learns_that_the_peer_is_gone() {
    let [mut from, to] = pair();
    let (sent, staging) = (bytes(MIB), &mut StagingBuffer::default());
    let mut outbound = single_copy(MIB);
    outbound.push(&mut from, staging, &[&sent]).unwrap();
    assert!(from.prepare_sleep(Activity::Send), "the peer has not copied it");
    drop(to);
    from.end_sleep();
    let link_error = outbound.push(&mut from, staging, &[&sent]);
    assert!(matches!(link_error, Err(LinkError::Closed)), "{link_error:?}");
}

#[test]
fn a_sender_that_sleeps_until_its_message_is_copied_is_woken() {
    let [mut from, mut to] = pair();
    let (sent, mut received) = (bytes(MIB), vec![0; MIB]);
    let staging = &mut StagingBuffer::default();
    let mut outbound = single_copy(MIB);
    outbound.push(&mut from, staging, &[&sent]).unwrap();
    assert!(from.prepare_sleep(Activity::Send), "the peer has not copied it");
    let watch = |link: &PeerLink| {
        let mut watched = Vec::new();
        link.watch(Activity::Send, &mut watched);
        socket::poll(&mut watched, std::time::Duration::ZERO).unwrap()
    };
    assert!(!watch(&from));
    let mut inbound = Inbound::new(MIB, &CALL);
    while !inbound.done() {
        inbound.pull(&mut to, staging, &mut Sink::Into(&mut received)).unwrap();
    }
    assert!(watch(&from));
    from.end_sleep();
    assert!(!from.prepare_sleep(Activity::Send), "it was taken");
    outbound.push(&mut from, staging, &[&sent]).unwrap();
    assert!(outbound.done() && received == sent);
}
