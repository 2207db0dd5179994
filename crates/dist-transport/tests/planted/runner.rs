//! A runner of ring schedules, and programs like it, each with a bug that can be planted.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use dist_transport::sim::SimTransport;
use dist_transport::{Incoming, Outgoing, Sink, Transport};

use crate::Bug;

const MINUTE: Duration = Duration::from_secs(60);

fn send(transport: &mut dyn Transport, to: usize, word: u64) {
    let deadline = transport.runtime().deadline(MINUTE);
    transport.exchange(Some(Outgoing { to, parts: &[&word.to_le_bytes()] }), None, &deadline.into()).unwrap();
}

fn receive(transport: &mut dyn Transport, from: usize) -> u64 {
    let (mut bytes, deadline) = ([0; 8], transport.runtime().deadline(MINUTE));
    let receive = Incoming { from, len: 8, sink: Sink::Into(&mut bytes) };
    transport.exchange(None, Some(receive), &deadline.into()).unwrap();
    u64::from_le_bytes(bytes)
}

fn exchange(transport: &mut dyn Transport, to: usize, word: u64, from: usize) -> u64 {
    let (mut bytes, deadline) = ([0; 8], transport.runtime().deadline(MINUTE));
    let receive = Incoming { from, len: 8, sink: Sink::Into(&mut bytes) };
    transport
        .exchange(Some(Outgoing { to, parts: &[&word.to_le_bytes()] }), Some(receive), &deadline.into())
        .unwrap();
    u64::from_le_bytes(bytes)
}

/// The difference of a runner with a bug.
#[derive(Default)]
struct Mutation {
    /// Added to the chunk that is sent in the second step.
    chunk: usize,
    steps_less: usize,
    reversed: bool,
    added_twice: bool,
    receives_first: bool,
}

/// Runs and checks a ring all_reduce of one word per rank.
fn all_reduce(transport: &mut dyn Transport, mutation: &Mutation) {
    let rank = transport.rank();
    let n = rank.world_size();
    let mut chunks: Vec<u64> = (0..n).map(|chunk| (10 * rank.index() + chunk) as u64).collect();
    let (to, from) = (rank.right().index(), rank.left().index());
    let (to, from) = if mutation.reversed { (from, to) } else { (to, from) };
    for step in 0..2 * (n - 1) - mutation.steps_less {
        let off = if step == 1 { mutation.chunk } else { 0 };
        let sent = chunks[(rank.index() + 2 * n - step + off) % n];
        let came = if mutation.receives_first {
            let came = receive(transport, from);
            send(transport, to, sent);
            came
        } else {
            exchange(transport, to, sent, from)
        };
        let place = &mut chunks[(rank.index() + 2 * n - step - 1) % n];
        *place = match step < n - 1 {
            true => *place + came + if mutation.added_twice && step == 1 { came } else { 0 },
            false => came,
        };
    }
    let sum = |chunk: usize| (0..n).map(|rank| (10 * rank + chunk) as u64).sum();
    let expected: Vec<u64> = (0..n).map(sum).collect();
    assert_eq!(chunks, expected);
}

fn mutated(mut transport: SimTransport, bug: Bug, mutation: Mutation) {
    all_reduce(&mut transport, &if bug.is_planted() { mutation } else { Mutation::default() });
    // A finished rank stays until all are finished.
    all_reduce(&mut transport, &Mutation::default());
}

pub(crate) fn sends_another_chunk(transport: SimTransport, bug: Bug) {
    mutated(transport, bug, Mutation { chunk: 1, ..Mutation::default() });
}

pub(crate) fn leaves_out_a_step(transport: SimTransport, bug: Bug) {
    mutated(transport, bug, Mutation { steps_less: 1, ..Mutation::default() });
}

pub(crate) fn receives_before_it_sends(transport: SimTransport, bug: Bug) {
    mutated(transport, bug, Mutation { receives_first: true, ..Mutation::default() });
}

pub(crate) fn goes_the_other_way(transport: SimTransport, bug: Bug) {
    let reversed = transport.rank().index() == 2;
    mutated(transport, bug, Mutation { reversed, ..Mutation::default() });
}

pub(crate) fn reduces_twice(transport: SimTransport, bug: Bug) {
    mutated(transport, bug, Mutation { added_twice: true, ..Mutation::default() });
}

/// Runs one thread that receives and adds, and another that forwards the sum without waiting for it.
pub(crate) fn sends_what_has_not_come(mut transport: SimTransport, bug: Bug) {
    let rank = transport.rank();
    let everybody: Vec<usize> = (0..rank.world_size()).collect();
    let mut out = transport.fork(&everybody).unwrap().unwrap();
    let mut into = transport.fork(&everybody).unwrap().unwrap();
    let (done, mut waits) = transport.runtime().mailbox();
    let sum = Arc::new(Mutex::new(rank.index() as u64));
    let partial = sum.clone();
    let receiver = transport.runtime().spawn("receiver", move || {
        let came = if rank.index() == 0 { 0 } else { receive(&mut *into, rank.left().index()) };
        *partial.lock().unwrap() += came;
        done.send(());
        into
    });
    if !bug.is_planted() {
        waits.receive(None).unwrap();
    }
    let word = *sum.lock().unwrap();
    // On the channel that the neighbour's receiver listens to.
    let into = receiver.unwrap();
    if rank.index() + 1 < rank.world_size() {
        let mut listener = into.join().unwrap();
        send(&mut *listener, rank.right().index(), word);
        exchange(&mut *out, rank.right().index(), 0, rank.left().index());
        wait_for_all(&mut transport);
    } else {
        drop(into.join().unwrap());
        exchange(&mut *out, rank.right().index(), 0, rank.left().index());
        wait_for_all(&mut transport);
        let expected: usize = (0..rank.world_size()).sum();
        assert_eq!(word, expected as u64);
    }
}

/// Waits on every rank for every other.
fn wait_for_all(transport: &mut dyn Transport) {
    all_reduce(transport, &Mutation::default());
}

pub(crate) fn forks_in_another_order(mut transport: SimTransport, bug: Bug) {
    let rank = transport.rank().index();
    let pairs: [&[usize]; 2] = [&[0, 1, 2, 3], &[3, 2, 1, 0]];
    let swapped = bug.is_planted() && rank == 1;
    let order = if swapped { [1, 0] } else { [0, 1] };
    let mut forks = order.map(|which| transport.fork(pairs[which]).unwrap().unwrap());
    if swapped {
        forks.swap(0, 1);
    }
    for fork in &mut forks {
        all_reduce(&mut **fork, &Mutation::default());
    }
    wait_for_all(&mut transport);
}

/// Shares a connection between two groups; each frame names its group.
pub(crate) fn deals_frames_as_they_come(mut transport: SimTransport, bug: Bug) {
    const FRAMES: u64 = 3;
    let runtime = transport.runtime().clone();
    if transport.rank().index() == 0 {
        let (frames, mut to_send) = runtime.mailbox();
        for group in 0..2_u64 {
            let frames = frames.clone();
            let work = move || (0..FRAMES).for_each(|frame| frames.send(100 * group + frame));
            drop(runtime.spawn("group", work).unwrap());
        }
        for _ in 0..2 * FRAMES {
            let frame = to_send.receive(None).unwrap();
            send(&mut transport, 1, frame);
        }
    } else {
        let mut inboxes = [Vec::new(), Vec::new()];
        for number in 0..2 * FRAMES {
            let frame = receive(&mut transport, 0);
            let group = if bug.is_planted() { number / FRAMES } else { frame / 100 };
            inboxes[usize::try_from(group).unwrap()].push(frame % 100 + 100 * (frame / 100));
        }
        assert_eq!(inboxes, [vec![0, 1, 2], vec![100, 101, 102]]);
    }
    exchange_with_peer(&mut transport);
}

fn exchange_with_peer(transport: &mut dyn Transport) {
    let peer = 1 - transport.rank().index();
    exchange(transport, peer, 0, peer);
}

pub(crate) fn confuses_numbers(mut transport: SimTransport, bug: Bug) {
    let members = [3, 1, 0];
    if let Some(mut group) = transport.fork(&members).unwrap() {
        let world = transport.rank().index();
        let right = group.rank().right().index();
        let to = if bug.is_planted() { members[right] % 3 } else { right };
        send(&mut *group, to, world as u64);
        let left = group.rank().left().index();
        assert_eq!(receive(&mut *group, left), members[left] as u64);
        all_reduce(&mut *group, &Mutation::default());
    }
    wait_for_all(&mut transport);
}

/// Lets the root answer each rank. It may not leave before they have asked.
pub(crate) fn leaves_too_early(mut transport: SimTransport, bug: Bug) {
    let rank = transport.rank();
    if rank.index() == 0 {
        let asked = if bug.is_planted() { 2..rank.world_size() } else { 1..rank.world_size() };
        for peer in asked {
            let word = receive(&mut transport, peer);
            send(&mut transport, peer, word + 1);
        }
    } else {
        send(&mut transport, 0, 7);
        assert_eq!(receive(&mut transport, 0), 8);
    }
}

pub(crate) fn keeps_answers_as_they_come(mut transport: SimTransport, bug: Bug) {
    let rank = transport.rank();
    if rank.index() > 0 {
        send(&mut transport, 0, rank.index() as u64);
        return wait_for_all(&mut transport);
    }
    let (answers, mut waits) = transport.runtime().mailbox();
    let runtime = transport.runtime().clone();
    for peer in 1..rank.world_size() {
        // Each received word is passed on by its own thread.
        let (word, answers) = (receive(&mut transport, peer), answers.clone());
        drop(runtime.spawn("answer", move || answers.send((peer, word))).unwrap());
    }
    let mut kept: Vec<(usize, u64)> = (1..rank.world_size()).map(|_| waits.receive(None).unwrap()).collect();
    if !bug.is_planted() {
        kept.sort();
    }
    assert!(kept.is_sorted());
    wait_for_all(&mut transport);
}

/// Sends from a buffer that the program fills again while a thread sends it.
pub(crate) fn uses_a_buffer_too_early(mut transport: SimTransport, bug: Bug) {
    const ROUNDS: u64 = 4;
    let runtime = transport.runtime().clone();
    if transport.rank().index() == 0 {
        let buffer = Arc::new(Mutex::new(0));
        let (full, mut fills) = runtime.mailbox();
        let (free, mut frees) = runtime.mailbox();
        let shared = buffer.clone();
        let task = runtime.spawn("sender", move || {
            while fills.receive(None).is_ok() {
                let word = *shared.lock().unwrap();
                send(&mut transport, 1, word);
                free.send(());
            }
            transport
        });
        for round in 1..=ROUNDS {
            *buffer.lock().unwrap() = round;
            full.send(());
            if !bug.is_planted() {
                frees.receive(None).unwrap();
            }
        }
        drop(full);
        exchange_with_peer(&mut task.unwrap().join().unwrap());
    } else {
        for round in 1..=ROUNDS {
            assert_eq!(receive(&mut transport, 0), round);
        }
        exchange_with_peer(&mut transport);
    }
}

/// Lets one rank continue after a while, assuming that the other has come as far.
pub(crate) fn trusts_in_time(mut transport: SimTransport, bug: Bug) {
    let (rank, runtime) = (transport.rank().index(), transport.runtime().clone());
    if rank == 0 {
        let mut late = 0;
        let ready = Arc::new(Mutex::new(false));
        let set = ready.clone();
        drop(runtime.spawn("ready", move || *set.lock().unwrap() = true).unwrap());
        while !*ready.lock().unwrap() {
            late += 1;
            runtime.park(Some(runtime.deadline(Duration::from_millis(1))));
        }
        if late > 0 {
            runtime.park(Some(runtime.deadline(Duration::from_millis(5))));
        }
        send(&mut transport, 1, 1);
    } else {
        let patience = runtime.deadline(if bug.is_planted() { Duration::from_millis(5) } else { MINUTE });
        assert_eq!(transport.wait_any_peer(&[0], &patience.into()).unwrap(), []);
        assert_eq!(receive(&mut transport, 0), 1);
    }
    exchange_with_peer(&mut transport);
}

/// Sends more from all ranks than the network holds before any of them receives.
pub(crate) fn fills_the_window(mut transport: SimTransport, bug: Bug) {
    let (rank, deadline) = (transport.rank(), transport.runtime().deadline(MINUTE));
    let (sent, mut received) = (vec![3; 1000], vec![0; 1000]);
    let send = Some(Outgoing { to: rank.right().index(), parts: &[&sent] });
    let receive = Some(Incoming { from: rank.left().index(), len: 1000, sink: Sink::Into(&mut received) });
    if bug.is_planted() {
        transport.exchange(send, None, &deadline.into()).unwrap();
        transport.exchange(None, receive, &deadline.into()).unwrap();
    } else {
        transport.exchange(send, receive, &deadline.into()).unwrap();
    }
    assert_eq!(received, sent);
}
