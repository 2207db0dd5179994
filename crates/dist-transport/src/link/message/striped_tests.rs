//! Tests of messages over several sockets between two sides of one process, one step at a time.

use rstest::rstest;
use socket2::{Domain, Socket, Type};

use super::{HEADER_BYTES, Inbound, LinkError, Outbound};
use crate::link::peer_link::PeerLink;
use crate::link::socket;
use crate::link::staging_buffer::StagingBuffer;
use crate::link::striped_socket::{SEGMENT_BYTES, StripedSocket};
use crate::{Activity, Fingerprint, Sink};

const CALL: Fingerprint = Fingerprint([7; 48]);
/// A message that does not end with a segment.
const LARGE: usize = 20 * SEGMENT_BYTES + 12_345;

/// Returns two connected sides.
fn pair(count: usize) -> [PeerLink; 2] {
    let connections = (0..count).map(|_| Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap());
    let (ours, theirs): (Vec<_>, Vec<_>) = connections.unzip();
    [ours, theirs].map(|mut sockets: Vec<Socket>| {
        sockets.iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
        let first = sockets.remove(0);
        PeerLink::Socket(StripedSocket::new(first, sockets))
    })
}

fn sockets(link: &PeerLink) -> &StripedSocket {
    let PeerLink::Socket(sockets) = link else { unreachable!("it was made of sockets") };
    sockets
}

/// Returns the indices of the connections that are watched.
fn watched(link: &PeerLink, activity: Activity) -> Vec<usize> {
    use std::os::fd::{AsFd, AsRawFd};
    let sockets = sockets(link);
    let index = |watched: rustix::event::PollFd<'_>| {
        let descriptor = watched.as_fd().as_raw_fd();
        (0..sockets.count()).find(|&index| sockets.socket(index).as_raw_fd() == descriptor).unwrap()
    };
    sockets.watch(activity).map(index).collect()
}

/// Returns bytes that differ between messages and between segments.
fn bytes(len: usize, message: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from((at / 7 + at / SEGMENT_BYTES + 31 * message) % 251).unwrap()).collect()
}

/// Moves messages of these lengths from one side to the other. All of one are sent before the next begins.
fn pass([from, to]: &mut [PeerLink; 2], lengths: &[usize], into_memory: bool) {
    let messages: Vec<_> = lengths.iter().enumerate().map(|(number, &len)| bytes(len, number)).collect();
    let mut outbound: Vec<_> = lengths.iter().map(|&len| Outbound::new(len, &CALL)).collect();
    let mut inbound: Vec<_> = lengths.iter().map(|&len| Inbound::new(len, &CALL)).collect();
    let mut received: Vec<_> =
        lengths.iter().map(|&len| vec![0; if into_memory { len } else { 0 }]).collect();
    let (mut sending, mut receiving) = (StagingBuffer::default(), StagingBuffer::default());
    while !inbound.iter().all(Inbound::done) {
        let mut moved = false;
        if let Some(at) = outbound.iter().position(|outbound| !outbound.done()) {
            moved |= outbound[at].push(from, &mut sending, &[&messages[at]]).unwrap();
        }
        if let Some(at) = inbound.iter().position(|inbound| !inbound.done()) {
            let memory = &mut received[at];
            let pulled = if into_memory {
                inbound[at].pull(to, &mut receiving, &mut Sink::Into(memory))
            } else {
                let mut append = |offset: usize, piece: &[u8]| {
                    assert_eq!(offset, memory.len());
                    memory.extend_from_slice(piece);
                };
                inbound[at].pull(to, &mut receiving, &mut Sink::Each(&mut append))
            };
            moved |= pulled.unwrap();
        }
        assert!(moved, "neither side can go on");
    }
    assert!(received == messages, "the bytes are those that were sent");
}

#[rstest]
fn messages_of_all_lengths_arrive_in_order(
    #[values(1, 2, 3, 8, 64)] count: usize,
    #[values(true, false)] into_memory: bool,
) {
    let whole = SEGMENT_BYTES - HEADER_BYTES;
    let lengths =
        [LARGE, 8, LARGE, 0, whole, whole + 1, 1, 2 * SEGMENT_BYTES, whole + SEGMENT_BYTES, LARGE + 1, 5000];
    let mut links = pair(count);
    pass(&mut links, &lengths, into_memory);
    links.reverse();
    pass(&mut links, &lengths, into_memory);
}

#[test]
fn a_large_message_goes_over_all_sockets_and_a_small_one_over_the_first() {
    let mut links = pair(3);
    let arrived = |link: &PeerLink| {
        let sockets = sockets(link);
        [0, 1, 2].map(|index| socket::peek(sockets.socket(index)).unwrap().is_some())
    };
    let small = bytes(SEGMENT_BYTES - HEADER_BYTES, 0);
    let staging = &mut StagingBuffer::default();
    let mut outbound = Outbound::new(small.len(), &CALL);
    outbound.push(&mut links[0], staging, &[&small]).unwrap();
    assert_eq!(arrived(&links[1]), [true, false, false]);
    let mut links = pair(3);
    let large = bytes(LARGE, 0);
    Outbound::new(LARGE, &CALL).push(&mut links[0], staging, &[&large]).unwrap();
    assert_eq!(arrived(&links[1]), [true; 3]);
}

#[test]
fn nothing_is_sent_before_the_first_socket_has_taken_the_header() {
    let mut links = pair(3);
    let staging = &mut StagingBuffer::default();
    while socket::send(sockets(&links[0]).first(), &[0; 4096]).unwrap().is_some() {}
    let large = bytes(LARGE, 0);
    let mut outbound = Outbound::new(LARGE, &CALL);
    assert!(!outbound.push(&mut links[0], staging, &[&large]).unwrap());
    assert!(!outbound.has_begun(), "the message may still be given up");
    assert_eq!(watched(&links[0], Activity::Send), [0]);
    assert_eq!(socket::peek(sockets(&links[1]).socket(1)).unwrap(), None);
}

/// Otherwise it would be woken again and again by sockets that have sent their segments.
#[test]
fn a_sender_waits_for_the_sockets_that_have_bytes_left() {
    let mut links = pair(3);
    let staging = &mut StagingBuffer::default();
    // The second socket is full.
    while socket::send(sockets(&links[0]).socket(1), &[0; 4096]).unwrap().is_some() {}
    let message = bytes(3 * SEGMENT_BYTES - HEADER_BYTES, 0);
    let mut outbound = Outbound::new(message.len(), &CALL);
    let mut read = vec![0; 1 << 20];
    while outbound.push(&mut links[0], staging, &[&message]).unwrap() {
        for index in [0, 2] {
            let _ = socket::receive(sockets(&links[1]).socket(index), &mut read).unwrap();
        }
    }
    assert!(!outbound.done() && outbound.has_begun());
    assert_eq!(watched(&links[0], Activity::Send), [1]);
    assert_eq!(outbound.payload_sent(), SEGMENT_BYTES - HEADER_BYTES, "all bytes up to there were sent");
}

#[test]
fn a_receiver_waits_for_the_socket_that_carries_the_next_byte() {
    let mut links = pair(2);
    let staging = &mut StagingBuffer::default();
    let message = bytes(2 * SEGMENT_BYTES - HEADER_BYTES, 0);
    let mut inbound = Inbound::new(message.len(), &CALL);
    let mut memory = vec![0; message.len()];
    assert!(!inbound.pull(&mut links[1], staging, &mut Sink::Into(&mut memory)).unwrap());
    assert_eq!(watched(&links[1], Activity::Receive), [0]);
    let header = Outbound::new(message.len(), &CALL).header();
    let first = [&header, &message[..SEGMENT_BYTES - HEADER_BYTES]].concat();
    let mut sent = 0;
    while sent < first.len() {
        sent += socket::send(sockets(&links[0]).first(), &first[sent..]).unwrap().unwrap_or(0);
        inbound.pull(&mut links[1], staging, &mut Sink::Into(&mut memory)).unwrap();
    }
    while inbound.pull(&mut links[1], staging, &mut Sink::Into(&mut memory)).unwrap() {}
    assert_eq!(watched(&links[1], Activity::Receive), [1]);
    socket::send(sockets(&links[0]).socket(1), &message[SEGMENT_BYTES - HEADER_BYTES..]).unwrap();
    inbound.pull(&mut links[1], staging, &mut Sink::Into(&mut memory)).unwrap();
    // It waits for the next message from the first again.
    assert!(!Inbound::new(1, &CALL).pull(&mut links[1], staging, &mut Sink::Into(&mut [0])).unwrap());
    assert_eq!(watched(&links[1], Activity::Receive), [0]);
}

#[test]
fn bytes_are_combined_no_further_than_own_bytes_were_sent() {
    let mut links = pair(3);
    let [ours, theirs] = &mut links;
    let sent = bytes(LARGE, 1);
    let before = bytes(LARGE, 2);
    let mut memory = before.clone();
    let (mut outbound, mut inbound) = (Outbound::new(LARGE, &CALL), Inbound::new(LARGE, &CALL));
    let (mut their_outbound, mut their_inbound) = (Outbound::new(LARGE, &CALL), Inbound::new(LARGE, &CALL));
    let mut received = vec![0; LARGE];
    let [mut staging, mut sending, mut receiving] = [(); 3].map(|()| StagingBuffer::default());
    let mut combine = |into: &mut [u8], bytes: &[u8]| {
        into.iter_mut().zip(bytes).for_each(|(into, byte)| *into = into.wrapping_add(*byte));
    };
    while !(inbound.done() && their_inbound.done()) {
        let mut moved = false;
        if !their_outbound.done() {
            moved |= their_outbound.push(theirs, &mut sending, &[&sent]).unwrap();
        }
        if !inbound.done() {
            moved |= inbound.pull_in_place(ours, &mut staging, &outbound, &mut memory, &mut combine).unwrap();
            let unsent = outbound.payload_sent();
            assert!(outbound.done() || memory[unsent..] == before[unsent..], "unsent bytes are unchanged");
        }
        if !outbound.done() {
            moved |= outbound.push(ours, &mut staging, &[&memory]).unwrap();
        }
        if !their_inbound.done() {
            moved |= their_inbound.pull(theirs, &mut receiving, &mut Sink::Into(&mut received)).unwrap();
        }
        assert!(moved, "neither side can go on");
    }
    assert!(received == before);
    assert!(memory.iter().zip(before.iter().zip(&sent)).all(|(sum, (a, b))| *sum == a.wrapping_add(*b)));
}

#[test]
fn a_peer_that_ends_in_the_middle_of_a_message_has_closed_the_link() {
    let [mut from, mut to] = pair(3);
    let staging = &mut StagingBuffer::default();
    let message = bytes(LARGE, 0);
    let mut outbound = Outbound::new(LARGE, &CALL);
    outbound.push(&mut from, staging, &[&message]).unwrap();
    drop(from);
    let (mut inbound, mut memory) = (Inbound::new(LARGE, &CALL), vec![0; LARGE]);
    let error = loop {
        match inbound.pull(&mut to, staging, &mut Sink::Into(&mut memory)) {
            Ok(moved) => assert!(moved && !inbound.done()),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, LinkError::Closed), "{error:?}");
    let error = Outbound::new(LARGE, &CALL).push(&mut to, staging, &[&message]).unwrap_err();
    assert!(matches!(error, LinkError::Closed), "{error:?}");
}
