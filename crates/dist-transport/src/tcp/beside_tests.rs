//! Payloads that go by a connection of their own, one end at a time.

use std::io::Write;
use std::os::fd::AsRawFd;

use socket2::{Domain, Socket, Type};

use super::link::{Link, Stream};
use super::message::{Fault, HEADER_BYTES, Inbound, Outbound};
use super::scratch::Scratch;
use crate::{Activity, Fingerprint, Sink};

const CALL: Fingerprint = Fingerprint([3; Fingerprint::SIZE]);
const OTHER_CALL: Fingerprint = Fingerprint([4; Fingerprint::SIZE]);
/// One that goes beside its header.
const MIDDLING: usize = 100_001;

fn pair() -> (Socket, Socket) {
    let pair = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
    for socket in [&pair.0, &pair.1] {
        socket.set_nonblocking(true).unwrap();
    }
    pair
}

/// Both ends of two connections, by the second of which the first end sends.
fn ends() -> (Link, Link) {
    let ((main, other), (beside, other_beside)) = (pair(), pair());
    let sender = Stream::new(main, Some(beside), Activity::Send);
    let receiver = Stream::new(other, Some(other_beside), Activity::Receive);
    (Link::Socket(sender), Link::Socket(receiver))
}

fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect()
}

/// Pulls once, into memory or in pieces.
fn pull(
    inbound: &mut Inbound,
    link: &mut Link,
    scratch: &mut Scratch,
    into: &mut [u8],
    in_pieces: bool,
) -> Result<bool, Fault> {
    if in_pieces {
        let mut put = |at: usize, bytes: &[u8]| into[at..][..bytes.len()].copy_from_slice(bytes);
        inbound.pull(link, scratch, &mut Sink::Each(&mut put))
    } else {
        inbound.pull(link, scratch, &mut Sink::Into(into))
    }
}

#[test]
fn messages_keep_their_order_whichever_way_their_payloads_go() {
    let (mut sender, mut receiver) = ends();
    for in_pieces in [false, true] {
        for from in [0, 1] {
            let (mut outgoing, mut incoming) = (Scratch::default(), Scratch::default());
            for len in [10, MIDDLING, 5, 65_535, 65_536, 262_144, 262_145, 0, 70_000, 70_001] {
                let (bytes, mut received) = (payload(len), vec![0; len]);
                let (mut outbound, mut inbound) = (Outbound::new(len, &CALL), Inbound::new(len, &CALL));
                let (out, to) =
                    if from == 0 { (&mut sender, &mut receiver) } else { (&mut receiver, &mut sender) };
                while !outbound.done() || !inbound.done() {
                    if !outbound.done() {
                        outbound.push(out, &mut outgoing, &[&bytes]).unwrap();
                    }
                    if !inbound.done() {
                        pull(&mut inbound, to, &mut incoming, &mut received, in_pieces).unwrap();
                    }
                }
                assert!(received == bytes, "{len} bytes from {from}");
            }
        }
    }
}

#[test]
fn a_payload_of_a_middling_size_goes_beside_its_header() {
    for (len, goes_beside) in [(65_535, false), (65_536, true), (262_144, true), (262_145, false)] {
        let ((main, other), (beside, other_beside)) = (pair(), pair());
        let mut link = Link::Socket(Stream::new(main, Some(beside), Activity::Send));
        let sent = Outbound::new(len, &CALL).push(&mut link, &mut Scratch::default(), &[&payload(len)]);
        assert!(sent.unwrap());
        let mut first = [std::mem::MaybeUninit::uninit(); 2 * HEADER_BYTES];
        assert_eq!(other.recv(&mut first).unwrap() == HEADER_BYTES, goes_beside, "{len} bytes");
        assert_eq!(other_beside.recv(&mut first).is_ok(), goes_beside, "{len} bytes");
    }
}

#[test]
fn a_header_that_contradicts_is_told_as_everywhere() {
    let refused = |sent: usize, call, awaited: usize| {
        let (mut sender, mut receiver) = ends();
        Outbound::new(sent, call).push(&mut sender, &mut Scratch::default(), &[&payload(sent)]).unwrap();
        let mut memory = vec![0; awaited];
        let mut inbound = Inbound::new(awaited, &CALL);
        pull(&mut inbound, &mut receiver, &mut Scratch::default(), &mut memory, false).unwrap_err()
    };
    let length = |got, expected| format!("{:?}", Fault::Length { got, expected });
    assert_eq!(format!("{:?}", refused(MIDDLING, &CALL, 10)), length(100_001, 10));
    assert_eq!(format!("{:?}", refused(10, &CALL, MIDDLING)), length(10, 100_001));
    assert_eq!(format!("{:?}", refused(MIDDLING, &CALL, 70_000)), length(100_001, 70_000));
    assert!(matches!(refused(MIDDLING, &OTHER_CALL, MIDDLING), Fault::Mismatch { theirs: OTHER_CALL }));
    assert!(matches!(refused(MIDDLING, &OTHER_CALL, 0), Fault::Mismatch { theirs: OTHER_CALL }));
}

#[test]
fn what_comes_in_part_is_waited_for_where_the_rest_will_come() {
    let ((mut main, other), (mut beside, other_beside)) = (pair(), pair());
    let (header_comes, payload_comes) = (other.as_raw_fd(), other_beside.as_raw_fd());
    let mut link = Link::Socket(Stream::new(other, Some(other_beside), Activity::Receive));
    let watched = |link: &Link| link.descriptor(Activity::Receive).as_raw_fd();
    for in_pieces in [false, true] {
        // What a sender makes of it.
        let ((out, mut seen), (out_beside, _kept)) = (pair(), pair());
        let mut sender = Link::Socket(Stream::new(out, Some(out_beside), Activity::Send));
        let bytes = payload(MIDDLING);
        Outbound::new(MIDDLING, &CALL).push(&mut sender, &mut Scratch::default(), &[&bytes]).unwrap();
        let mut header = [0; HEADER_BYTES];
        std::io::Read::read_exact(&mut seen, &mut header).unwrap();

        let (mut received, mut scratch) = (vec![0; MIDDLING], Scratch::default());
        let mut inbound = Inbound::new(MIDDLING, &CALL);
        let mut step =
            |link: &mut Link| pull(&mut inbound, link, &mut scratch, &mut received, in_pieces).unwrap();
        assert!(!step(&mut link));
        main.write_all(&header[..10]).unwrap();
        assert!(step(&mut link) && watched(&link) == header_comes);
        main.write_all(&header[10..]).unwrap();
        assert!(step(&mut link) && watched(&link) == payload_comes);
        assert!(!step(&mut link));
        beside.write_all(&bytes[..60_000]).unwrap();
        assert!(step(&mut link) && watched(&link) == payload_comes);
        beside.write_all(&bytes[60_000..]).unwrap();
        assert!(step(&mut link) && watched(&link) == header_comes);
        assert!(inbound.done() && received == bytes);
    }
}

#[test]
fn a_second_connection_that_ends_within_a_payload_is_the_end() {
    let (mut sender, mut receiver) = ends();
    Outbound::new(MIDDLING, &CALL)
        .push(&mut sender, &mut Scratch::default(), &[&payload(MIDDLING)[..70_000]])
        .unwrap();
    drop(sender);
    let (mut memory, mut scratch) = (vec![0; MIDDLING], Scratch::default());
    let mut inbound = Inbound::new(MIDDLING, &CALL);
    let end = loop {
        match pull(&mut inbound, &mut receiver, &mut scratch, &mut memory, false) {
            Ok(moved) => assert!(moved, "it has ended"),
            Err(fault) => break fault,
        }
    };
    assert!(matches!(end, Fault::Closed), "{end:?}");
}
