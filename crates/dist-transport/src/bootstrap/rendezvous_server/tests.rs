//! Tests of the rendezvous server, one step of the coordinator's thread after the other.

use std::net::{Ipv4Addr, SocketAddr};

use rstest::rstest;
use socket2::{Domain, Socket, Type};

use super::*;
use crate::CircularWait;
use crate::bootstrap::acceptor::ListenerKind;
use crate::bootstrap::auth::Key;
use crate::bootstrap::control::Missing;

const LONG: Duration = Duration::from_secs(60);

fn line_pair() -> [ControlConnection; 2] {
    let (ours, theirs) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
    [&ours, &theirs].iter().for_each(|end| end.set_nonblocking(true).unwrap());
    [ours, theirs].map(ControlConnection::new)
}

/// A server for four ranks, and the connections of the joined ranks, which may be silent for this long.
fn rendezvous_server<const N: usize>(
    ranks: [u32; N],
    liveness: Duration,
) -> (RendezvousServer, [ControlConnection; N]) {
    let runtime = Runtime::system();
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = socket::listen(any, None).unwrap().into();
    let acceptor = Acceptor::new(ListenerKind::Network, listener, Key::new(None, "test"), 0, runtime.clone());
    let mut rendezvous_server =
        RendezvousServer::new(acceptor, Worlds::One, 4, Arc::default(), Arc::default(), &runtime);
    let lines = ranks.map(|rank| join(&mut rendezvous_server, rank, liveness));
    (rendezvous_server, lines)
}

/// Joins a rank that may be silent for this long.
fn join(rendezvous_server: &mut RendezvousServer, rank: u32, liveness: Duration) -> ControlConnection {
    join_world(rendezvous_server, rank, 4, liveness)
}

/// Joins a rank that expects a world of this size.
fn join_world(
    rendezvous_server: &mut RendezvousServer,
    rank: u32,
    world_size: u32,
    liveness: Duration,
) -> ControlConnection {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let peer_info = PeerInfo::here(any, 0, None);
    let [ours, theirs] = line_pair();
    rendezvous_server.join((rank, ours), world_size, peer_info, [LONG, liveness]);
    theirs
}

/// Returns the frames that a rank got before its connection was closed.
fn heard_at_last(line: &mut ControlConnection) -> Vec<Frame> {
    std::iter::from_fn(|| line.pull().ok().flatten()).collect()
}

/// Returns the frames that a rank got.
fn heard(line: &mut ControlConnection) -> Vec<Frame> {
    std::iter::from_fn(|| line.pull().unwrap()).collect()
}

#[test]
fn one_waiting_rank_of_each_host_is_told_again_and_again_who_is_missing() {
    let (mut server, mut here) = rendezvous_server([1, 2], LONG);
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let [ours, mut elsewhere] = line_pair();
    server.join((3, ours), 4, PeerInfo::here(any, 7, None), [LONG, LONG]);
    server.tell_who_is_missing();
    assert_eq!(heard(&mut here[0]), [], "it has not waited for long");
    for _ in 0..2 {
        let now = server.runtime.deadline(Duration::ZERO);
        server.members_mut().for_each(|member| member.notice_at = now);
        assert_eq!(server.next_deadline(), Duration::ZERO);
        server.tell_who_is_missing();
        let notice = [Frame::Missing { rank: 0, refused: 0 }, Frame::NotYet { missing: 1 }];
        assert_eq!(heard(&mut here[0]), notice);
        assert_eq!(heard(&mut elsewhere), notice);
        assert_eq!(heard(&mut here[1]), [], "another rank of its host was told");
        server.tell_who_is_missing();
        assert_eq!(heard(&mut here[0]), [], "it was told a moment ago");
    }
    let limits = server.members().map(|member| member.notice_at.limit());
    assert!(limits.into_iter().all(|limit| limit == NOTICE_INTERVAL));
}

/// Such a rank is about to hang up, and will not be there.
#[test]
fn no_world_starts_with_a_rank_that_was_told_that_it_does_not() {
    let (mut rendezvous_server, mut told) = rendezvous_server([0, 1, 2], LONG);
    rendezvous_server.answer(|_| true);
    let missing = |rank| Frame::Missing { rank, refused: 0 };
    assert!(told.iter_mut().all(|line| heard(line) == [missing(3), Frame::NotAll]));
    let mut last = join(&mut rendezvous_server, 3, LONG);
    assert!(!rendezvous_server.started);
    rendezvous_server.answer(|member| member.answer_by.is_some());
    assert_eq!(heard(&mut last), [missing(0), missing(1), missing(2), Frame::NotAll]);
    drop((told, last));
    (0..4).for_each(|rank| rendezvous_server.read_frames(rank));
    let _again = [0, 1, 2, 3].map(|rank| join(&mut rendezvous_server, rank, LONG));
    assert!(rendezvous_server.started, "who comes again is one of them");
}

#[test]
fn ranks_that_wait_for_an_ended_process_to_join_are_told_at_once() {
    let (mut rendezvous_server, mut told) = rendezvous_server([0, 2], LONG);
    let ended = Arc::new(EndedRanks::new().unwrap());
    rendezvous_server = rendezvous_server.with_ended(Arc::clone(&ended));
    let (mut launcher, _) = arrival(&mut rendezvous_server);
    // A joined rank may be reported as well; its end is noticed in another way.
    launcher.push(Frame::Ended { rank: 2 }).unwrap();
    let stop = Waker::new().unwrap();
    assert!(!rendezvous_server.run_once(&stop));
    assert!(told.iter_mut().all(|line| heard(line).is_empty()));
    launcher.push(Frame::Ended { rank: 1 }).unwrap();
    assert!(!rendezvous_server.run_once(&stop));
    let abort = Abort { cause: Cause::NotJoined, rank: 1, reporter: 1, call: Fingerprint::NONE };
    assert!(told.iter_mut().all(|line| heard(line) == [Frame::Abort(abort.clone())]));
}

/// The launcher sees only that the rank which waited has ended.
#[test]
fn ranks_that_came_too_late_are_the_cause_if_the_rank_that_waited_for_them_ends() {
    let (mut server, [first, mut other, third]) = rendezvous_server([0, 1, 3], LONG);
    let is_first = std::cell::Cell::new(true);
    server.answer(|_| is_first.replace(false));
    drop(first);
    server.read_frames(0);
    server.ended.insert(0);
    server.abort_if_awaited_rank_ended();
    let cause = Cause::not_in_time(vec![2], LONG);
    let abort = Abort { cause, rank: 2, reporter: 0, call: Fingerprint::NONE };
    assert_eq!(heard(&mut other), [Frame::Abort(abort.clone())]);
    drop(third);
    let [ours, mut late] = line_pair();
    server.join((2, ours), 4, PeerInfo::here(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), 0, None), [LONG; 2]);
    assert_eq!(heard_at_last(&mut late), [Frame::Abort(abort)], "the late rank is told the same");
}

#[test]
fn a_rank_that_waits_for_nobody_is_not_told_of_ended_processes() {
    let (mut rendezvous_server, _) = rendezvous_server([], LONG);
    let ended = Arc::new(EndedRanks::new().unwrap());
    rendezvous_server = rendezvous_server.with_ended(Arc::clone(&ended));
    (0..4).for_each(|rank| ended.push(rank));
    let stop = Waker::new().unwrap();
    assert!(!rendezvous_server.run_once(&stop) && lock(&rendezvous_server.abort_state).is_none());
    // A rank that joins later waits in vain.
    let mut late = join(&mut rendezvous_server, 3, LONG);
    ended.push(0);
    assert!(!rendezvous_server.run_once(&stop));
    assert!(matches!(heard(&mut late)[..], [Frame::Abort(Abort { rank: 0, cause: Cause::NotJoined, .. })]));
}

#[test]
fn a_rank_is_answered_when_its_whole_time_is_over() {
    let (rendezvous_server, _line) = rendezvous_server([0], LONG);
    let answer_by = rendezvous_server.members().next().unwrap().answer_by.unwrap();
    assert_eq!(answer_by.limit(), LONG);
}

#[rstest]
fn ranks_that_expect_another_world_size_are_told_whichever_comes_first(
    #[values(Worlds::One, Worlds::InTurn)] worlds: Worlds,
) {
    let other = Frame::OtherWorldSize { rank: 3, size: 5 };
    let (mut rendezvous_server, mut lines) = rendezvous_server([0], LONG);
    rendezvous_server.worlds = worlds;
    assert_eq!(heard(&mut lines[0]), []);
    let mut odd = join_world(&mut rendezvous_server, 3, 5, LONG);
    assert_eq!(heard_at_last(&mut odd), [Frame::WorldSize { expected: 4 }]);
    assert_eq!(heard(&mut lines[0]), std::slice::from_ref(&other), "it was here before");
    assert!(!rendezvous_server.cannot_start(), "others may come");
    for rank in [1, 2] {
        let told = heard_at_last(&mut join(&mut rendezvous_server, rank, LONG));
        assert_eq!(told, std::slice::from_ref(&other), "it comes later");
    }
    let mut fourth = join_world(&mut rendezvous_server, 4, 5, LONG);
    assert_eq!(heard_at_last(&mut fourth), [Frame::WorldSize { expected: 4 }]);
    assert_eq!(rendezvous_server.cannot_start(), worlds == Worlds::One, "all have been told");
}

#[test]
fn ranks_that_were_started_again_with_the_right_world_size_meet() {
    let (mut rendezvous_server, lines) = rendezvous_server([0], LONG);
    rendezvous_server.worlds = Worlds::InTurn;
    drop(join_world(&mut rendezvous_server, 3, 5, LONG));
    drop(join(&mut rendezvous_server, 1, LONG));
    drop(lines);
    rendezvous_server.read_frames(0);
    let _again = [0, 1, 3].map(|rank| join(&mut rendezvous_server, rank, LONG));
    assert!(!rendezvous_server.started, "rank 2 was not there");
    let _last = join(&mut rendezvous_server, 2, LONG);
    assert!(rendezvous_server.started);
}

#[test]
fn a_rank_that_cannot_join_says_why_and_all_hear_it() {
    let (mut rendezvous_server, mut lines) = rendezvous_server([0], LONG);
    let [ours, mut theirs] = line_pair();
    rendezvous_server.arriving.push((1, ours, rendezvous_server.runtime.deadline(JOIN_LIMIT)));
    let cause = Cause::gave_up("too many open files");
    let abort = Abort { cause, rank: 1, reporter: 1, call: Fingerprint::NONE };
    theirs.push(Frame::Abort(abort.clone())).unwrap();
    rendezvous_server.run_once(&Waker::new().unwrap());
    assert_eq!(heard(&mut lines[0]), [Frame::Abort(abort.clone())], "it is here already");
    assert_eq!(
        heard_at_last(&mut join(&mut rendezvous_server, 2, LONG)),
        [Frame::Abort(abort)],
        "it comes later"
    );
}

#[test]
fn only_ranks_that_have_something_to_say_are_listened_to() {
    let (mut rendezvous_server, mut ranks) = rendezvous_server([0, 2, 3], LONG);
    let stop = Waker::new().unwrap();
    ranks[1].push(Frame::Beat).unwrap();
    assert_eq!(rendezvous_server.wait(&stop).unwrap(), [2], "the second of those who have come is rank 2");
    rendezvous_server.read_frames(2);
    stop.notify();
    assert_eq!(rendezvous_server.wait(&stop).unwrap(), []);
    let [first, _, last] = ranks;
    drop((first, last));
    assert_eq!(rendezvous_server.wait(&stop).unwrap(), [0, 3], "they have gone");
}

/// Returns an authenticated connection of rank 0, and the frame that it will send.
fn arrival(rendezvous_server: &mut RendezvousServer) -> (ControlConnection, Frame) {
    let [ours, theirs] = line_pair();
    rendezvous_server.arriving.push((0, ours, rendezvous_server.runtime.deadline(JOIN_LIMIT)));
    let peer_info = rendezvous_server.members().next().unwrap().peer_info;
    (theirs, Frame::Join { world_size: 4, timeout_ms: 60_000, liveness_ms: 60_000, peer_info })
}

fn hears_that_it_is_over(line: &mut ControlConnection) -> bool {
    std::iter::from_fn(|| line.pull().unwrap()).any(|frame| frame == Frame::Over)
}

#[rstest]
fn a_rank_that_comes_again_has_left_however_late_its_goodbye_is_heard(
    #[values(Worlds::One, Worlds::InTurn)] worlds: Worlds,
) {
    let (mut rendezvous_server, mut ranks) = rendezvous_server([0, 1, 2, 3], LONG);
    rendezvous_server.worlds = worlds;
    let (mut again, join) = arrival(&mut rendezvous_server);
    ranks[0].push(Frame::Goodbye).unwrap();
    again.push(join).unwrap();
    assert!(!rendezvous_server.run_once(&Waker::new().unwrap()));
    assert!(hears_that_it_is_over(&mut again), "it is no second process of its rank");
}

#[test]
fn a_rank_that_comes_again_when_the_last_one_leaves_is_not_hung_up_on() {
    let (mut rendezvous_server, mut ranks) = rendezvous_server([0, 1, 2, 3], LONG);
    let stop = Waker::new().unwrap();
    let (mut again, join) = arrival(&mut rendezvous_server);
    ranks.iter_mut().for_each(|line| line.push(Frame::Goodbye).unwrap());
    assert!(!rendezvous_server.run_once(&stop), "one has come and not been heard");
    again.push(join).unwrap();
    assert!(rendezvous_server.run_once(&stop), "all is logged");
    assert!(hears_that_it_is_over(&mut again));
}

/// Rank 0 waits for its coordinator when it leaves.
#[test]
fn a_client_that_connects_after_all_have_left_does_not_keep_the_coordinator() {
    let (mut rendezvous_server, mut ranks) = rendezvous_server([0, 1, 2, 3], LONG);
    let stop = Waker::new().unwrap();
    let (silent, _) = arrival(&mut rendezvous_server);
    ranks.iter_mut().for_each(|line| line.push(Frame::Goodbye).unwrap());
    assert!(!rendezvous_server.run_once(&stop));
    let limit = rendezvous_server.runtime.remaining(rendezvous_server.arriving[0].2);
    assert!(limit <= LATE_RANKS_LIMIT, "{limit:?}");
    assert!(rendezvous_server.is_over(), "nobody else is let in");
    drop(silent);
    assert!(rendezvous_server.run_once(&stop));
}

/// A leaving rank waits at most a second for a busy coordinator.
#[test]
fn a_rank_that_has_said_goodbye_has_not_died_where_it_hung_up_first() {
    let (mut rendezvous_server, [mut leaving, ..]) = rendezvous_server([0, 1, 2, 3], LONG);
    leaving.push(Frame::Goodbye).unwrap();
    drop(leaving);
    // It is told of others, since it is not known to have left, and receives nothing any more.
    rendezvous_server.pass_on(0, Frame::Left { rank: 1 });
    rendezvous_server.read_frames(0);
    assert_eq!(*lock(&rendezvous_server.abort_state), None);
    assert!(matches!(rendezvous_server.slots[0], RankSlot::Left));
}

/// The server does not wait for its next heartbeat to notice the rank.
#[test]
fn the_coordinator_looks_again_as_soon_as_a_rank_is_silent_for_too_long() {
    let liveness = HEARTBEAT / 10;
    let (rendezvous_server, _ranks) = rendezvous_server([0, 1, 2, 3], liveness);
    assert!(rendezvous_server.next_deadline() <= liveness, "{:?}", rendezvous_server.next_deadline());
}

/// Reports the waits of two ranks for each other, and returns the server's abort.
fn told_of_waits(waits: [(u32, WaitReport, Fingerprint); 2]) -> Option<Abort> {
    let (mut rendezvous_server, mut ranks) = rendezvous_server([0, 1, 2, 3], LONG);
    for (rank, wait, call) in waits {
        let mut calls = [Fingerprint::NONE; CALLS_MAX];
        calls[0] = call;
        ranks[rank as usize].push(Frame::Waiting { channel: ChannelId::WORLD, wait, calls }).unwrap();
        rendezvous_server.read_frames(rank as usize);
    }
    lock(&rendezvous_server.abort_state).clone()
}

#[test]
fn two_ranks_that_wait_for_each_other_in_two_calls_are_told_so_unless_something_is_on_its_way() {
    let [collective, message] = [1, 0].map(|number| {
        let mut call = [7; Fingerprint::SIZE];
        call[..8].copy_from_slice(&u64::to_le_bytes(number));
        Fingerprint(call)
    });
    let for_signal = WaitReport {
        on: 2,
        index: 1,
        missing: Missing::Signal(5),
        messages: 3,
        signals: 6,
        is_only_call: false,
    };
    let for_message = WaitReport {
        on: 1,
        index: 2,
        missing: Missing::Message(3),
        messages: 4,
        signals: 5,
        is_only_call: false,
    };
    let told =
        |one: WaitReport, other: WaitReport, call| told_of_waits([(1, one, collective), (2, other, call)]);
    let mismatch =
        Abort { cause: Cause::Mismatch { theirs: collective }, rank: 1, reporter: 2, call: message };
    assert_eq!(told(for_signal, for_message, message), Some(mismatch));
    let expected: [(&str, WaitReport, WaitReport, Fingerprint); 6] = [
        ("a message is on its source", WaitReport { messages: 4, ..for_signal }, for_message, message),
        ("a signal is", for_signal, WaitReport { signals: 6, ..for_message }, message),
        ("it waits for room", for_signal, WaitReport { missing: Missing::Anything, ..for_message }, message),
        ("it waits no longer", for_signal, WaitReport { on: 2, ..for_message }, message),
        ("it waits for another rank", for_signal, WaitReport { on: 3, ..for_message }, message),
        ("they are in one call", for_signal, for_message, collective),
    ];
    for (why, one, other, call) in expected {
        assert_eq!(told(one, other, call), None, "{why}");
    }
}

/// Reports that ranks 0 to 2 wait for each other's messages in a circle, and answers the questions of the server with these
/// numbers of sent messages. Returns the server's abort.
fn told_of_circle(answers: [[u64; 3]; 2], is_in_call: bool) -> Option<Abort> {
    let (mut rendezvous_server, mut ranks) = rendezvous_server([0, 1, 2, 3], LONG);
    let channel = ChannelId::WORLD.child(1, &[3, 2, 1, 0]);
    for rank in [2, 0, 1] {
        let number = u8::try_from(rank).unwrap() + 1;
        let call = if is_in_call { Fingerprint([number; Fingerprint::SIZE]) } else { Fingerprint::NONE };
        let mut calls = [Fingerprint::NONE; CALLS_MAX];
        calls[0] = call;
        let on = u32::try_from((rank + 1) % 3).unwrap();
        let missing = Missing::Message(10 * u64::from(on));
        let wait = WaitReport {
            on,
            index: 3 - u32::try_from(rank).unwrap(),
            missing,
            messages: 7,
            signals: 0,
            is_only_call: false,
        };
        ranks[rank].push(Frame::Waiting { channel, wait, calls }).unwrap();
        rendezvous_server.read_frames(rank);
    }
    for messages in answers {
        for (rank, messages) in messages.into_iter().enumerate() {
            let before = u32::try_from((rank + 2) % 3).unwrap();
            let asked = Frame::AskSent { channel, to: 3 - before };
            if heard(&mut ranks[rank]).contains(&asked) {
                ranks[rank].push(Frame::Sent { channel, to: 3 - before, messages, signals: 9 }).unwrap();
                rendezvous_server.read_frames(rank);
            }
        }
    }
    lock(&rendezvous_server.abort_state).clone()
}

#[test]
fn a_circle_of_waits_is_told_once_every_rank_has_said_twice_that_nothing_is_on_its_way() {
    let sent = [0, 10, 20];
    let abort = told_of_circle([sent, sent], true).expect("nothing is on its way");
    let wait = |rank: usize| {
        let call = Fingerprint([u8::try_from(rank).unwrap() + 1; Fingerprint::SIZE]);
        CircularWait { rank, on: (rank + 1) % 3, call }
    };
    let waits = [0, 1, 2].map(wait).to_vec();
    assert_eq!(abort.cause, Cause::CircularWait { waits, count: 3 });
    for (index, rank) in [(0, 0), (0, 2), (1, 1)] {
        let mut answers = [sent, sent];
        answers[index][rank] += 1;
        assert_eq!(told_of_circle(answers, true), None, "rank {rank} has sent a message meanwhile");
    }
    assert_eq!(told_of_circle([[0, 11, 20]; 2], true), None, "a message of rank 1 is on its way");
    assert_eq!(told_of_circle([sent, sent], false), None, "messages outside calls are not compared");
}

/// Reports that rank 0 waits for a message of rank 1 on one channel, and rank 1 for a signal of rank 0 on another one, in calls of
/// the same communicator. Answers every question with these numbers of messages and signals. Returns the server's abort.
fn told_of_circle_of_calls(are_only_calls: [bool; 2], signals: u64, communicators: [u8; 2]) -> Option<Abort> {
    let (mut rendezvous_server, mut ranks) = rendezvous_server([0, 1, 2, 3], LONG);
    let of_messages = ChannelId::WORLD.child(1, &[0, 1, 2, 3]);
    for rank in [0, 1] {
        let mut calls = [Fingerprint::NONE; CALLS_MAX];
        calls[0].0[8..].fill(communicators[rank]);
        let (on, index) = (1 - u32::try_from(rank).unwrap(), u32::try_from(rank).unwrap());
        let (channel, missing) =
            [(of_messages, Missing::Message(4)), (ChannelId::WORLD, Missing::Signal(6))][rank];
        let is_only_call = are_only_calls[rank];
        let wait = WaitReport { on, index, missing, messages: 0, signals: 0, is_only_call };
        ranks[rank].push(Frame::Waiting { channel, wait, calls }).unwrap();
        rendezvous_server.read_frames(rank);
    }
    for _ in 0..2 {
        for (rank, to, channel) in [(0, 1, ChannelId::WORLD), (1, 0, of_messages)] {
            if heard(&mut ranks[rank]).contains(&Frame::AskSent { channel, to }) {
                ranks[rank].push(Frame::Sent { channel, to, messages: 4, signals }).unwrap();
                rendezvous_server.read_frames(rank);
            }
        }
    }
    lock(&rendezvous_server.abort_state).clone()
}

#[test]
fn a_receive_and_a_collective_are_a_circle_if_no_other_operation_of_their_communicator_is_open() {
    let abort = told_of_circle_of_calls([true; 2], 6, [3; 2]).expect("nothing is on its way");
    let Cause::CircularWait { waits, count: 2 } = &abort.cause else { panic!("{abort}") };
    assert_eq!(waits.iter().map(|wait| (wait.rank, wait.on)).collect::<Vec<_>>(), [(0, 1), (1, 0)]);
    assert_eq!(told_of_circle_of_calls([true, false], 6, [3; 2]), None, "rank 1 has started something");
    assert_eq!(told_of_circle_of_calls([false, true], 6, [3; 2]), None, "rank 0 has started something");
    assert_eq!(told_of_circle_of_calls([true; 2], 7, [3; 2]), None, "rank 0 has given the signal");
    assert_eq!(told_of_circle_of_calls([true; 2], 6, [3, 4]), None, "they are in two communicators");
}

fn unreachable(rank: usize, reporter: usize) -> Abort {
    let cause = Cause::Unreachable { hosts: Some([[10, 0, 0, 4].into(), [10, 0, 0, 2].into()]) };
    Abort { cause, rank, reporter, call: Fingerprint::NONE }
}

#[test]
fn two_ranks_that_cannot_reach_each_other_are_named_if_both_live() {
    let (mut rendezvous_server, mut ranks) = rendezvous_server([0, 1, 2, 3], LONG);
    ranks[1].push(Frame::Abort(unreachable(3, 1))).unwrap();
    rendezvous_server.read_frames(1);
    // Rank 3 has sent nothing for a while, and may be dead.
    let now = rendezvous_server.runtime.now() + 4 * HEARTBEAT;
    rendezvous_server.judge_unreachable(now);
    assert_eq!(*lock(&rendezvous_server.abort_state), None);
    ranks[3].push(Frame::Beat).unwrap();
    rendezvous_server.read_frames(3);
    rendezvous_server.judge_unreachable(now);
    assert_eq!(*lock(&rendezvous_server.abort_state), Some(unreachable(3, 1)));
    let told = |line: &mut ControlConnection| heard(line).contains(&Frame::Abort(unreachable(3, 1)));
    assert!(ranks.iter_mut().all(told));
}

#[test]
fn a_rank_that_stops_responding_is_named_alone_although_a_peer_cannot_reach_it() {
    let (mut rendezvous_server, mut ranks) = rendezvous_server([0, 1, 2, 3], 4 * HEARTBEAT);
    ranks[1].push(Frame::Abort(unreachable(3, 1))).unwrap();
    rendezvous_server.read_frames(1);
    let now = rendezvous_server.runtime.now() + 5 * HEARTBEAT;
    rendezvous_server.last_look = now;
    let RankSlot::Joined(member) = &mut rendezvous_server.slots[3] else { panic!("it has come") };
    let silent_since = std::mem::take(&mut member.last_seen);
    rendezvous_server.members_mut().for_each(|member| member.last_seen = now);
    rendezvous_server.members_mut().last().expect("it has come").last_seen = silent_since;
    rendezvous_server.watch_silence(now);
    let abort_state = lock(&rendezvous_server.abort_state).clone().unwrap();
    assert_eq!((abort_state.cause, abort_state.rank), (Cause::Silent, 3));
}

/// Its connections may stay open longer if it has forked.
#[rstest]
#[case::without_a_goodbye(false, Some(Cause::Died))]
#[case::after_its_goodbye(true, None)]
fn a_rank_whose_process_has_ended_has_died_unless_it_left_before(
    #[case] leaves: bool,
    #[case] cause: Option<Cause>,
) {
    let (mut rendezvous_server, mut ranks) = rendezvous_server([0, 1, 2, 3], LONG);
    if leaves {
        ranks[2].push(Frame::Goodbye).unwrap();
    }
    ranks[1].push(Frame::Ended { rank: 2 }).unwrap();
    rendezvous_server.read_frames(1);
    let abort_state = lock(&rendezvous_server.abort_state).clone();
    assert_eq!(abort_state.map(|abort| (abort.cause, abort.rank)), cause.map(|cause| (cause, 2)));
    assert!(matches!(rendezvous_server.slots[2], RankSlot::Left));
    ranks[1].push(Frame::Ended { rank: 4000 }).unwrap();
    rendezvous_server.read_frames(1);
}

/// However long ago that was: a busy coordinator reads later frames late.
#[test]
fn ranks_without_frames_at_the_last_look_are_silent() {
    const LIVENESS: Duration = Duration::from_nanos(1);
    let (mut rendezvous_server, _ranks) = rendezvous_server([0, 1, 2, 3], LIVENESS);
    let told = rendezvous_server.members().map(|member| member.last_seen).min().expect("all have come");
    rendezvous_server.last_look = told;
    rendezvous_server.watch_silence(told + LIVENESS);
    assert_eq!(*lock(&rendezvous_server.abort_state), None);
    rendezvous_server.watch_silence(told + 2 * LIVENESS);
    assert!(matches!(*lock(&rendezvous_server.abort_state), Some(Abort { cause: Cause::Silent, .. })));
}

/// Returns the memory of this process in bytes.
#[cfg(target_os = "linux")]
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Lets this process open this many descriptors.
#[cfg(target_os = "linux")]
fn allow_descriptors(wanted: u64) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    // Only root may raise the hard limit.
    let limits = [now.maximum.map_or(wanted, |maximum| maximum.max(wanted)), now.maximum.unwrap_or(wanted)];
    let raise = |&limit: &u64| {
        let both = Rlimit { current: Some(limit), maximum: Some(limit) };
        setrlimit(Resource::Nofile, both).is_ok()
    };
    let is_raised = now.current.is_none_or(|limit| limit >= wanted) || limits.iter().any(raise);
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    assert!(
        is_raised && allowed >= wanted,
        "this test needs {wanted} open files, and this process may have {allowed}: run it as root, or after ulimit -Hn {wanted}"
    );
}

/// Returns the coordinator's ends of connections with this many ranks, and the other ends, each of which [`SHARING`] ranks
/// share. This saves half of the descriptors.
#[cfg(target_os = "linux")]
fn shared_lines(ranks: usize) -> (impl Iterator<Item = ControlConnection>, Vec<ControlConnection>) {
    let pairs = std::iter::repeat_with(line_pair).take(ranks.div_ceil(SHARING));
    let (ours, theirs): (Vec<_>, Vec<_>) = pairs.map(|[ours, theirs]| (ours, theirs)).unzip();
    let copy = move |rank: usize| ControlConnection::new(ours[rank / SHARING].stream.try_clone().unwrap());
    ((0..ranks).map(copy), theirs)
}

/// The frames of an abort for this number of ranks fit into the buffer of a connection.
#[cfg(target_os = "linux")]
const SHARING: usize = 50;

/// No rank but three reads what it is sent, so all the rest stays with the coordinator.
#[cfg(target_os = "linux")]
#[test]
fn ten_thousand_ranks_meet_each_takes_little_memory_and_an_abort_reaches_all() {
    const RANKS: u32 = 10_000;
    const BYTES_PER_RANK_MAX: u64 = 16 << 10;
    allow_descriptors(u64::from(RANKS) + 1000);
    let runtime = Runtime::system();
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = socket::listen(any, None).unwrap().into();
    let acceptor = Acceptor::new(ListenerKind::Network, listener, Key::new(None, "test"), 0, runtime.clone());
    let size = RANKS as usize;
    let mut server =
        RendezvousServer::new(acceptor, Worlds::One, size, Arc::default(), Arc::default(), &runtime);
    let before = resident_bytes();
    let readers = [0, size / 2, size - 1];
    let (ours, _unread) = shared_lines(size);
    let mut lines = Vec::new();
    for (rank, mut line) in (0..RANKS).zip(ours) {
        if readers.contains(&(rank as usize)) {
            let [ours, theirs] = line_pair();
            line = ours;
            lines.push(theirs);
        }
        // The system's buffers of all connections would take 2 GB.
        line.stream.set_send_buffer_size(4096).unwrap();
        server.join((rank, line), RANKS, PeerInfo::here(any, 0, None), [LONG, LONG]);
    }
    assert!(server.started);
    let unread = server.members().filter(|member| member.line.unsent()).count();
    assert_eq!(unread, size, "the list of all ranks is longer than what a connection takes at once");
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < BYTES_PER_RANK_MAX * u64::from(RANKS), "{RANKS} ranks take {grown} bytes");
    for (rank, line) in readers.into_iter().zip(&mut lines) {
        let mut known = 0;
        while known < size {
            server.read_frames(rank);
            for frame in heard(line) {
                match frame {
                    Frame::Peers { first, peer_infos } => {
                        assert_eq!(first as usize, known);
                        known += peer_infos.len();
                    }
                    Frame::Beat => {}
                    other => panic!("{other:?}"),
                }
            }
        }
    }
    lines[2].push(Frame::Goodbye).unwrap();
    assert!(!server.run_once(&Waker::new().unwrap()));
    let left = Frame::Left { rank: RANKS - 1 };
    assert!(heard(&mut lines[0]).contains(&left));
    check_that_an_abort_reaches_all(&mut server, size - 1);
}

/// The list of all ranks takes 480 KB, so reading it on each rank would take long. New connections stand for ranks that have
/// read it.
#[cfg(target_os = "linux")]
fn check_that_an_abort_reaches_all(server: &mut RendezvousServer, ranks: usize) {
    let (ours, mut theirs) = shared_lines(ranks);
    assert_eq!(server.members().count(), ranks);
    server.members_mut().zip(ours).for_each(|(member, line)| member.line = line);
    let abort = Abort { cause: Cause::gave_up("no data"), rank: 1, reporter: 1, call: Fingerprint::NONE };
    theirs[0].push(Frame::Abort(abort.clone())).unwrap();
    server.read_frames(1);
    let told: Vec<Frame> = theirs.iter_mut().flat_map(heard).collect();
    assert_eq!(told.len(), ranks, "each rank gets one frame");
    assert!(told.iter().all(|frame| *frame == Frame::Abort(abort.clone())));
}
