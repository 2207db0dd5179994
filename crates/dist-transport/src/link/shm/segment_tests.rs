//! Tests of segments between two threads that have mapped the same file.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

fn pair() -> (Ends, Ends) {
    let nonce = [7; 32];
    let (file, maker) = create(&nonce).unwrap();
    let taker = open(&file, &nonce).unwrap().expect("it is the segment with this nonce");
    (maker, taker)
}

/// Sends as much of `bytes` as fits, from `sent` on, and returns how much that was.
fn send(ends: &mut Ends, bytes: &[u8]) -> usize {
    let room = ends.outgoing.room(bytes.len()).unwrap();
    let count = bytes.len().min(room);
    ends.outgoing.write(0, &bytes[..count / 2]);
    ends.outgoing.write(count / 2, &bytes[count / 2..count]);
    ends.outgoing.publish(count);
    count
}

#[test]
fn the_pages_of_a_ring_are_allocated_when_it_is_written() {
    let nonce = [7; 32];
    let (file, mut maker) = create(&nonce).unwrap();
    let mut taker = open(&file, &nonce).unwrap().expect("it is the segment with this nonce");
    let allocated = || usize::try_from(rustix::fs::fstat(&file).unwrap().st_blocks * 512).unwrap();
    let at_first = allocated();
    assert!(at_first < RING_BYTES / 4, "{at_first}");
    for side in [&mut maker, &mut taker] {
        let before = allocated();
        assert_eq!(send(side, &[1; 64]), 64);
        assert_eq!(allocated() - before, RESERVED_STEP);
    }
    let message = vec![5; RING_BYTES - RESERVED_STEP];
    assert_eq!(send(&mut maker, &message), message.len());
    assert_eq!(allocated(), at_first + RING_BYTES + RESERVED_STEP);
    let mut received = 0;
    while received < 64 + message.len() {
        let count = taker.incoming.peek(usize::MAX).unwrap().len();
        taker.incoming.advance(count);
        received += count;
    }
    assert_eq!(send(&mut maker, &[1; 64]), 64, "the ring is written again");
}

#[test]
fn another_nonce_is_another_segment() {
    let (file, _) = create(&[1; 32]).unwrap();
    assert!(open(&file, &[2; 32]).unwrap().is_none());
}

#[test]
fn a_counter_that_makes_no_sense_is_noticed() {
    let (mut maker, mut taker) = pair();
    let mapping = taker.outgoing.mapping.clone();
    taker.outgoing.ring.produced(&mapping).store(RING_BYTES as u64 + 64, Ordering::Release);
    assert!(maker.incoming.peek(1).is_err());
    maker.outgoing.ring.consumed(&mapping).store(64, Ordering::Release);
    assert_eq!(maker.outgoing.room(RING_BYTES).unwrap(), RING_BYTES, "nothing has to be looked at yet");
    assert!(maker.outgoing.room(RING_BYTES + 1).is_err());
    assert!(taker.incoming.peek(1).unwrap().is_empty());
}

/// Sends a message with its header through a fastbox.
fn send_in_fastbox(ends: &mut Ends, about: u8, message: &[u8]) {
    ends.fastboxes.write(0, message);
    let count = ends.outgoing.skip();
    ends.fastboxes.hand_over(&[about; FASTBOX_HEADER_BYTES], count);
}

/// Takes the next message, if it has arrived in a fastbox, and returns its header.
fn take(ends: &mut Ends) -> Option<u8> {
    let about = ends.fastboxes.look(ends.incoming.next())?[0];
    ends.fastboxes.receive();
    ends.incoming.skip();
    Some(about)
}

#[test]
fn ranks_that_answer_each_other_always_have_a_fastbox() {
    let (mut maker, mut taker) = pair();
    for number in 1..6 {
        assert!(maker.fastboxes.takes(FASTBOX_BYTES) && !maker.fastboxes.takes(FASTBOX_BYTES + 1));
        assert_eq!(take(&mut taker), None);
        maker.fastboxes.write(60, &[9; 40]);
        send_in_fastbox(&mut maker, number, &[number; 60]);
        assert_eq!(take(&mut taker), Some(number));
        assert_eq!(taker.fastboxes.bytes(0..60), [number; 60]);
        assert_eq!(taker.fastboxes.bytes(60..100), [9; 40]);
        taker.fastboxes.clear();
        std::mem::swap(&mut maker, &mut taker);
    }
}

#[test]
fn a_side_that_moves_bytes_wakes_the_other_once() {
    let (maker, taker) = pair();
    assert!(!maker.sleep.is_to_be_woken());
    taker.sleep.begin();
    assert!(maker.sleep.is_to_be_woken());
    assert!(!maker.sleep.is_to_be_woken());
    taker.sleep.begin();
    taker.sleep.end();
    assert!(!maker.sleep.is_to_be_woken());
}

/// One side writes and sleeps when the ring is full; the other reads and sleeps when it is empty. Each is
/// woken through a queue. A lost wake-up ends the test at its deadline.
#[test]
fn no_wake_up_is_lost() {
    use std::time::Duration;

    use crate::Runtime;

    const GENERATIONS: u64 = 200_000;
    let runtime = Runtime::system();
    let (mut maker, mut taker) = pair();
    let ((to_maker, mut maker_wakes), (to_taker, mut taker_wakes)) = (runtime.mailbox(), runtime.mailbox());
    let deadline = Some(runtime.deadline(Duration::from_secs(60)));
    let writer = runtime.spawn("writer", move || {
        for round in 0..GENERATIONS {
            while maker.outgoing.room(64).unwrap() == 0 {
                maker.sleep.begin();
                if maker.outgoing.room(64).unwrap() == 0 {
                    maker_wakes.receive(deadline).expect("the reader wakes us");
                }
                maker.sleep.end();
            }
            maker.outgoing.write(0, &round.to_le_bytes());
            maker.outgoing.publish(8);
            if maker.sleep.is_to_be_woken() {
                to_taker.send(());
            }
        }
        // The reader of the last bytes may still want to wake this side.
        maker_wakes
    });
    for round in 0..GENERATIONS {
        while taker.incoming.peek(8).unwrap().is_empty() {
            taker.sleep.begin();
            if taker.incoming.peek(8).unwrap().is_empty() {
                taker_wakes.receive(deadline).expect("the writer wakes us");
            }
            taker.sleep.end();
        }
        assert_eq!(taker.incoming.peek(8).unwrap(), round.to_le_bytes());
        if taker.incoming.advance(8) && taker.sleep.is_to_be_woken() {
            to_maker.send(());
        }
    }
    writer.unwrap().join().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is sent, in fastboxes and in the ring, and whenever it is read: each side receives the
    /// other's messages in order, and no fastbox is lost.
    #[test]
    fn messages_in_fastboxes_and_in_the_ring_keep_their_order(
        moves in prop::collection::vec((0..4, any::<bool>()), 1..80)
    ) {
        let (maker, taker) = pair();
        let mut sides = [maker, taker];
        let mut under_way = [const { VecDeque::<(u8, bool)>::new() }; 2];
        let mut read = [None::<u8>; 2];
        for (number, (kind, of_taker)) in (1..).zip(moves) {
            let (side, other) = (usize::from(of_taker), usize::from(!of_taker));
            match kind {
                0 if sides[side].fastboxes.takes(1) => {
                    send_in_fastbox(&mut sides[side], number, &[number]);
                    under_way[other].push_back((number, true));
                }
                1 => {
                    prop_assert_eq!(send(&mut sides[side], &[number; 64]), 64);
                    under_way[other].push_back((number, false));
                }
                2 if read[side].is_none() => {
                    let in_ring = sides[side].incoming.peek(64).unwrap().first().copied();
                    let fastbox_bytes = take(&mut sides[side]);
                    if fastbox_bytes.is_none() && in_ring.is_some() {
                        sides[side].incoming.advance(64);
                    }
                    let come = fastbox_bytes.map(|number| (number, true)).or(in_ring.map(|number| (number, false)));
                    prop_assert_eq!(come, under_way[side].pop_front());
                    read[side] = fastbox_bytes;
                }
                3 if read[side].take().is_some() => sides[side].fastboxes.clear(),
                _ => {}
            }
            for (ends, read) in sides.iter().zip(read) {
                prop_assert!(read.is_none_or(|number| ends.fastboxes.bytes(0..1) == [number]));
            }
            let in_fastboxes = under_way.iter().flatten().filter(|(_, fastbox_bytes)| *fastbox_bytes).count();
            prop_assert_eq!(sides.iter().map(|ends| ends.fastboxes.here).sum::<usize>() + in_fastboxes, 2);
        }
    }

    /// A ring is a queue of cache lines: everything written is read once, in order, in aligned pieces.
    #[test]
    fn a_ring_is_a_queue(moves in prop::collection::vec((any::<bool>(), 1..RING_BYTES), 1..60)) {
        let (mut maker, mut taker) = pair();
        // Padding bytes of a cache line may be anything.
        let (mut written, mut queue) = (0_u8, VecDeque::<Option<u8>>::new());
        for (write, bytes) in moves {
            if write {
                let message = Vec::from_iter((0..bytes).map(|_| {
                    written = written.wrapping_add(1);
                    written
                }));
                let count = send(&mut maker, &message);
                prop_assert!(count == bytes || queue.len() + bytes > RING_BYTES / 4 * 3);
                queue.extend(message[..count].iter().copied().map(Some));
                queue.resize(queue.len().next_multiple_of(64), None);
            } else {
                let piece = taker.incoming.peek(bytes.next_multiple_of(64)).unwrap();
                prop_assert_eq!(piece.is_empty(), queue.is_empty());
                prop_assert!(piece.as_ptr().addr() % 64 == 0 && piece.len() % 64 == 0);
                let count = piece.len();
                let expected = queue.drain(..count);
                prop_assert!(expected.zip(piece).all(|(expected, got)| expected.is_none_or(|byte| byte == *got)));
                taker.incoming.advance(count);
            }
        }
    }
}
