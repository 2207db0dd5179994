//! One turn of the coordinator's thread after the other.

use std::net::{Ipv4Addr, SocketAddr};

use rstest::rstest;
use socket2::{Domain, Socket, Type};

use super::*;
use crate::auth::Key;
use crate::tcp::control::Missing;
use crate::tcp::gate::Door;

const LONG: Duration = Duration::from_secs(60);

fn line_pair() -> [Line; 2] {
    let (ours, theirs) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
    [&ours, &theirs].iter().for_each(|end| end.set_nonblocking(true).unwrap());
    [ours, theirs].map(Line::new)
}

/// A meeting of four, and the lines of those who have come and may be silent for so long.
fn meeting<const N: usize>(ranks: [u32; N], liveness: Duration) -> (Meeting, [Line; N]) {
    let runtime = Runtime::system();
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = socket::listen(any, None).unwrap().into();
    let gate = Gate::new(Door::Network, listener, Key::new(None, "test"), 0, runtime.clone());
    let mut meeting = Meeting::new(gate, Worlds::One, 4, Arc::default(), Arc::default(), &runtime);
    let lines = ranks.map(|rank| join(&mut meeting, rank, liveness));
    (meeting, lines)
}

/// A rank comes, which may be silent for so long.
fn join(meeting: &mut Meeting, rank: u32, liveness: Duration) -> Line {
    join_world(meeting, rank, 4, liveness)
}

/// A rank comes that expects a world of this size.
fn join_world(meeting: &mut Meeting, rank: u32, world_size: u32, liveness: Duration) -> Line {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let home = Home::here(any, 0, None);
    let [ours, theirs] = line_pair();
    meeting.join((rank, ours), world_size, home, [LONG, liveness]);
    theirs
}

/// What a rank has been told before it was hung up on.
fn heard_at_last(line: &mut Line) -> Vec<Frame> {
    std::iter::from_fn(|| line.pull().ok().flatten()).collect()
}

/// What a rank has been told.
fn heard(line: &mut Line) -> Vec<Frame> {
    std::iter::from_fn(|| line.pull().unwrap()).collect()
}

/// It is about to hang up, and will not be there.
#[test]
fn no_world_starts_with_a_rank_that_was_told_that_it_does_not() {
    let (mut meeting, mut told) = meeting([0, 1, 2], LONG);
    meeting.answer(|_| true);
    let missing = |rank| Frame::Missing { rank, refused: 0 };
    assert!(told.iter_mut().all(|line| heard(line) == [missing(3), Frame::NotAll]));
    let mut last = join(&mut meeting, 3, LONG);
    assert!(!meeting.started);
    meeting.answer(|member| member.answer_by.is_some());
    assert_eq!(heard(&mut last), [missing(0), missing(1), missing(2), Frame::NotAll]);
    drop((told, last));
    (0..4).for_each(|rank| meeting.listen(rank));
    let _again = [0, 1, 2, 3].map(|rank| join(&mut meeting, rank, LONG));
    assert!(meeting.started, "who comes again is one of them");
}

#[test]
fn those_who_wait_for_a_rank_whose_process_has_ended_are_told_at_once() {
    let (mut meeting, mut told) = meeting([0, 2], LONG);
    let ended = Arc::new(EndedRanks::new().unwrap());
    meeting = meeting.with_ended(Arc::clone(&ended));
    let (mut launcher, _) = arrival(&mut meeting);
    // One that has come may be told of as well: that its process has ended is noticed in another way.
    launcher.push(Frame::Ended { rank: 2 }).unwrap();
    let stop = Bell::new().unwrap();
    assert!(!meeting.turn(&stop));
    assert!(told.iter_mut().all(|line| heard(line).is_empty()));
    launcher.push(Frame::Ended { rank: 1 }).unwrap();
    assert!(!meeting.turn(&stop));
    let abort = Abort { cause: Cause::NotJoined, rank: 1, reporter: 1, call: Fingerprint::NONE };
    assert!(told.iter_mut().all(|line| heard(line) == [Frame::Abort(abort.clone())]));
}

#[test]
fn whoever_waits_for_nobody_is_not_told_of_processes_that_have_ended() {
    let (mut meeting, _) = meeting([], LONG);
    let ended = Arc::new(EndedRanks::new().unwrap());
    meeting = meeting.with_ended(Arc::clone(&ended));
    (0..4).for_each(|rank| ended.push(rank));
    let stop = Bell::new().unwrap();
    assert!(!meeting.turn(&stop) && lock(&meeting.verdict).is_none());
    // One that comes later waits in vain.
    let mut late = join(&mut meeting, 3, LONG);
    ended.push(0);
    assert!(!meeting.turn(&stop));
    assert!(matches!(heard(&mut late)[..], [Frame::Abort(Abort { rank: 0, cause: Cause::NotJoined, .. })]));
}

#[test]
fn a_rank_is_answered_when_its_whole_time_is_over() {
    let (meeting, _line) = meeting([0], LONG);
    let answer_by = meeting.members().next().unwrap().answer_by.unwrap();
    assert_eq!(answer_by.limit(), LONG);
}

#[rstest]
fn ranks_that_expect_another_world_size_are_told_whichever_comes_first(
    #[values(Worlds::One, Worlds::InTurn)] worlds: Worlds,
) {
    let other = Frame::OtherWorldSize { rank: 3, size: 5 };
    let (mut meeting, mut lines) = meeting([0], LONG);
    meeting.worlds = worlds;
    assert_eq!(heard(&mut lines[0]), []);
    let mut odd = join_world(&mut meeting, 3, 5, LONG);
    assert_eq!(heard_at_last(&mut odd), [Frame::WorldSize { expected: 4 }]);
    assert_eq!(heard(&mut lines[0]), std::slice::from_ref(&other), "it was here before");
    assert!(!meeting.cannot_start(), "others may come");
    for rank in [1, 2] {
        let told = heard_at_last(&mut join(&mut meeting, rank, LONG));
        assert_eq!(told, std::slice::from_ref(&other), "it comes later");
    }
    let mut fourth = join_world(&mut meeting, 4, 5, LONG);
    assert_eq!(heard_at_last(&mut fourth), [Frame::WorldSize { expected: 4 }]);
    assert_eq!(meeting.cannot_start(), worlds == Worlds::One, "all have been told");
}

#[test]
fn ranks_that_were_started_again_with_the_right_world_size_meet() {
    let (mut meeting, lines) = meeting([0], LONG);
    meeting.worlds = Worlds::InTurn;
    drop(join_world(&mut meeting, 3, 5, LONG));
    drop(join(&mut meeting, 1, LONG));
    drop(lines);
    meeting.listen(0);
    let _again = [0, 1, 3].map(|rank| join(&mut meeting, rank, LONG));
    assert!(!meeting.started, "rank 2 was not there");
    let _last = join(&mut meeting, 2, LONG);
    assert!(meeting.started);
}

#[test]
fn a_rank_that_cannot_join_says_why_and_all_hear_it() {
    let (mut meeting, mut lines) = meeting([0], LONG);
    let [ours, mut theirs] = line_pair();
    meeting.arriving.push((1, ours, meeting.runtime.deadline(JOIN_LIMIT)));
    let cause = Cause::gave_up("too many open files");
    let abort = Abort { cause, rank: 1, reporter: 1, call: Fingerprint::NONE };
    theirs.push(Frame::Abort(abort.clone())).unwrap();
    meeting.turn(&Bell::new().unwrap());
    assert_eq!(heard(&mut lines[0]), [Frame::Abort(abort.clone())], "it is here already");
    assert_eq!(heard_at_last(&mut join(&mut meeting, 2, LONG)), [Frame::Abort(abort)], "it comes later");
}

#[test]
fn only_ranks_that_have_something_to_say_are_listened_to() {
    let (mut meeting, mut ranks) = meeting([0, 2, 3], LONG);
    let stop = Bell::new().unwrap();
    ranks[1].push(Frame::Beat).unwrap();
    assert_eq!(meeting.wait(&stop).unwrap(), [2], "the second of those who have come is rank 2");
    meeting.listen(2);
    stop.ring();
    assert_eq!(meeting.wait(&stop).unwrap(), []);
    let [first, _, last] = ranks;
    drop((first, last));
    assert_eq!(meeting.wait(&stop).unwrap(), [0, 3], "they have gone");
}

/// A rank that has proven that it is rank 0, and what it has to say then.
fn arrival(meeting: &mut Meeting) -> (Line, Frame) {
    let [ours, theirs] = line_pair();
    meeting.arriving.push((0, ours, meeting.runtime.deadline(JOIN_LIMIT)));
    let home = meeting.members().next().unwrap().home;
    (theirs, Frame::Join { world_size: 4, patience_ms: 60_000, liveness_ms: 60_000, home })
}

fn hears_that_it_is_over(line: &mut Line) -> bool {
    std::iter::from_fn(|| line.pull().unwrap()).any(|frame| frame == Frame::Over)
}

#[rstest]
fn a_rank_that_comes_again_has_left_however_late_its_goodbye_is_heard(
    #[values(Worlds::One, Worlds::InTurn)] worlds: Worlds,
) {
    let (mut meeting, mut ranks) = meeting([0, 1, 2, 3], LONG);
    meeting.worlds = worlds;
    let (mut again, join) = arrival(&mut meeting);
    ranks[0].push(Frame::Goodbye).unwrap();
    again.push(join).unwrap();
    assert!(!meeting.turn(&Bell::new().unwrap()));
    assert!(hears_that_it_is_over(&mut again), "it is no second process of its rank");
}

#[test]
fn a_rank_that_comes_again_when_the_last_one_leaves_is_not_hung_up_on() {
    let (mut meeting, mut ranks) = meeting([0, 1, 2, 3], LONG);
    let stop = Bell::new().unwrap();
    let (mut again, join) = arrival(&mut meeting);
    ranks.iter_mut().for_each(|line| line.push(Frame::Goodbye).unwrap());
    assert!(!meeting.turn(&stop), "one has come and not been heard");
    again.push(join).unwrap();
    assert!(meeting.turn(&stop), "all is said");
    assert!(hears_that_it_is_over(&mut again));
}

/// Rank 0 waits for its coordinator when it leaves.
#[test]
fn nobody_who_comes_when_all_have_left_keeps_the_coordinator_for_long() {
    let (mut meeting, mut ranks) = meeting([0, 1, 2, 3], LONG);
    let stop = Bell::new().unwrap();
    let (silent, _) = arrival(&mut meeting);
    ranks.iter_mut().for_each(|line| line.push(Frame::Goodbye).unwrap());
    assert!(!meeting.turn(&stop));
    let farewell = meeting.runtime.remaining(meeting.arriving[0].2);
    assert!(farewell <= FAREWELL_LIMIT, "{farewell:?}");
    assert!(meeting.is_over(), "nobody else is let in");
    drop(silent);
    assert!(meeting.turn(&stop));
}

/// Whoever leaves waits no longer than a second for a coordinator that has much to do.
#[test]
fn a_rank_that_has_said_goodbye_has_not_died_where_it_hung_up_first() {
    let (mut meeting, [mut leaving, ..]) = meeting([0, 1, 2, 3], LONG);
    leaving.push(Frame::Goodbye).unwrap();
    drop(leaving);
    // It is told of others, as it is not known to have left, and takes nothing any more.
    meeting.pass_on(0, Frame::Left { rank: 1 });
    meeting.listen(0);
    assert_eq!(*lock(&meeting.verdict), None);
    assert!(matches!(meeting.places[0], Place::Left));
}

/// It is not looked for only when the coordinator gives its next sign of life.
#[test]
fn the_coordinator_looks_again_as_soon_as_a_rank_is_silent_for_too_long() {
    let liveness = BEAT / 10;
    let (meeting, _ranks) = meeting([0, 1, 2, 3], liveness);
    assert!(meeting.next_deadline() <= liveness, "{:?}", meeting.next_deadline());
}

/// Tells what two ranks wait for of each other, and what the coordinator makes of it.
fn told_of_waits(waits: [(u32, Wait, Fingerprint); 2]) -> Option<Abort> {
    let (mut meeting, mut ranks) = meeting([0, 1, 2, 3], LONG);
    for (rank, wait, call) in waits {
        let mut calls = [Fingerprint::NONE; CALLS_MAX];
        calls[0] = call;
        ranks[rank as usize].push(Frame::Waiting { channel: ChannelId::WORLD, wait, calls }).unwrap();
        meeting.listen(rank as usize);
    }
    lock(&meeting.verdict).clone()
}

#[test]
fn two_ranks_that_wait_for_each_other_in_two_calls_are_told_so_unless_something_is_on_its_way() {
    let [collective, message] = [1, 0].map(|number| {
        let mut call = [7; Fingerprint::SIZE];
        call[..8].copy_from_slice(&u64::to_le_bytes(number));
        Fingerprint(call)
    });
    let for_post = Wait { on: 2, missing: Missing::Post(5), messages: 3, posts: 6 };
    let for_message = Wait { on: 1, missing: Missing::Message(3), messages: 4, posts: 5 };
    let told = |one: Wait, other: Wait, call| told_of_waits([(1, one, collective), (2, other, call)]);
    let mismatch =
        Abort { cause: Cause::Mismatch { theirs: collective }, rank: 1, reporter: 2, call: message };
    assert_eq!(told(for_post, for_message, message), Some(mismatch));
    let expected: [(&str, Wait, Wait, Fingerprint); 6] = [
        ("a message is on its way", Wait { messages: 4, ..for_post }, for_message, message),
        ("a post is", for_post, Wait { posts: 6, ..for_message }, message),
        ("it waits for room", for_post, Wait { missing: Missing::Anything, ..for_message }, message),
        ("it waits no longer", for_post, Wait { on: 2, ..for_message }, message),
        ("it waits for another rank", for_post, Wait { on: 3, ..for_message }, message),
        ("they are in one call", for_post, for_message, collective),
    ];
    for (why, one, other, call) in expected {
        assert_eq!(told(one, other, call), None, "{why}");
    }
}

fn unreachable(rank: usize, reporter: usize) -> Abort {
    Abort { cause: Cause::Unreachable, rank, reporter, call: Fingerprint::NONE }
}

#[test]
fn two_ranks_that_cannot_reach_each_other_are_named_if_both_live() {
    let (mut meeting, mut ranks) = meeting([0, 1, 2, 3], LONG);
    ranks[1].push(Frame::Abort(unreachable(3, 1))).unwrap();
    meeting.listen(1);
    // Rank 3 has not been heard of for a while, and may be dead.
    let now = meeting.runtime.now() + 4 * BEAT;
    meeting.judge_unreachable(now);
    assert_eq!(*lock(&meeting.verdict), None);
    ranks[3].push(Frame::Beat).unwrap();
    meeting.listen(3);
    meeting.judge_unreachable(now);
    assert_eq!(*lock(&meeting.verdict), Some(unreachable(3, 1)));
    let told = |line: &mut Line| heard(line).contains(&Frame::Abort(unreachable(3, 1)));
    assert!(ranks.iter_mut().all(told));
}

#[test]
fn a_rank_that_stops_responding_is_named_alone_although_a_peer_cannot_reach_it() {
    let (mut meeting, mut ranks) = meeting([0, 1, 2, 3], 4 * BEAT);
    ranks[1].push(Frame::Abort(unreachable(3, 1))).unwrap();
    meeting.listen(1);
    let now = meeting.runtime.now() + 5 * BEAT;
    meeting.last_look = now;
    let Place::Taken(member) = &mut meeting.places[3] else { panic!("it has come") };
    let silent_since = std::mem::take(&mut member.last_seen);
    meeting.members_mut().for_each(|member| member.last_seen = now);
    meeting.members_mut().last().expect("it has come").last_seen = silent_since;
    meeting.watch_silence(now);
    let verdict = lock(&meeting.verdict).clone().unwrap();
    assert_eq!((verdict.cause, verdict.rank), (Cause::Silent, 3));
}

/// Its connections may be open for longer, if it has forked.
#[rstest]
#[case::without_a_goodbye(false, Some(Cause::Died))]
#[case::after_its_goodbye(true, None)]
fn a_rank_whose_process_has_ended_has_died_unless_it_left_before(
    #[case] leaves: bool,
    #[case] cause: Option<Cause>,
) {
    let (mut meeting, mut ranks) = meeting([0, 1, 2, 3], LONG);
    if leaves {
        ranks[2].push(Frame::Goodbye).unwrap();
    }
    ranks[1].push(Frame::Ended { rank: 2 }).unwrap();
    meeting.listen(1);
    let verdict = lock(&meeting.verdict).clone();
    assert_eq!(verdict.map(|abort| (abort.cause, abort.rank)), cause.map(|cause| (cause, 2)));
    assert!(matches!(meeting.places[2], Place::Left));
    ranks[1].push(Frame::Ended { rank: 4000 }).unwrap();
    meeting.listen(1);
}

/// However long ago that was: a coordinator that has much to do comes late to what has come since.
#[test]
fn ranks_are_silent_of_which_nothing_had_come_at_the_last_look() {
    const LIVENESS: Duration = Duration::from_nanos(1);
    let (mut meeting, _ranks) = meeting([0, 1, 2, 3], LIVENESS);
    let told = meeting.members().map(|member| member.last_seen).min().expect("all have come");
    meeting.last_look = told;
    meeting.watch_silence(told + LIVENESS);
    assert_eq!(*lock(&meeting.verdict), None);
    meeting.watch_silence(told + 2 * LIVENESS);
    assert!(matches!(*lock(&meeting.verdict), Some(Abort { cause: Cause::Silent, .. })));
}
