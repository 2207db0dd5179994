//! Tests of message costs: links, hosts, racks and windows.

use std::time::Duration;

use rstest::rstest;

use super::*;
use crate::{Activity, Deadline, Error, Incoming, Outgoing, Result, Sink, Transport};

const MS: Duration = Duration::from_millis(1);
const MINUTE: Duration = Duration::from_secs(60);

/// Sends this rank's bytes to one rank while receiving equally many from another.
fn shift(transport: &mut SimTransport, to: usize, from: usize, bytes: usize) -> Result<()> {
    let (sent, mut received) = (vec![1; bytes], vec![0; bytes]);
    let deadline = transport.runtime().deadline(MINUTE);
    let send = Outgoing { to, parts: &[&sent] };
    let receive = Incoming { from, len: bytes, sink: Sink::Into(&mut received) };
    transport.exchange(Some(send), Some(receive), &deadline.into())?;
    assert_eq!(received, sent);
    Ok(())
}

fn send(transport: &mut SimTransport, to: usize, bytes: usize, deadline: Deadline) -> Result<()> {
    transport.exchange(Some(Outgoing { to, parts: &[&vec![1; bytes]] }), None, &deadline.into())
}

fn receive(transport: &mut SimTransport, from: usize, bytes: usize) -> Result<()> {
    let (mut memory, deadline) = (vec![0; bytes], transport.runtime().deadline(MINUTE));
    let receive = Incoming { from, len: bytes, sink: Sink::Into(&mut memory) };
    transport.exchange(None, Some(receive), &deadline.into())
}

/// Sends a thousand bytes from every rank to the rank `distance` further. Returns the time at which the last
/// rank has its message.
fn time_of_shift(network: &Network, distance: usize) -> Duration {
    let outcome = network.run(move |mut transport| {
        let rank = transport.rank();
        shift(&mut transport, rank.plus(distance).index(), rank.minus(distance).index(), 1000).unwrap();
    });
    outcome.elapsed
}

#[rstest]
#[case::on_the_same_host(1, 0, 2 * MS)]
// Each link is busy for 1 ms of overhead and 2 ms for the bytes, which leave it as they come.
#[case::to_another_host(1, 1, 14 * MS)]
fn messages_take_the_time_of_their_links(
    #[case] distance: usize,
    #[case] host_of_the_others: u64,
    #[case] time: Duration,
    #[values(0, 1, 2)] seed: u64,
) {
    let network = Network::new(2)
        .with_seed(seed)
        .with_hosts(&[0, host_of_the_others])
        .with_memory_link(Link::new(MS, 1_000_000))
        .with_host_link(Link::new(5 * MS, 500_000).with_overhead(MS));
    assert_eq!(time_of_shift(&network, distance), time);
}

#[rstest]
fn ranks_of_a_host_wait_for_each_other_at_its_uplink(#[values(0, 1, 2, 3)] seed: u64) {
    let network = Network::new(4).with_seed(seed).with_hosts(&[0, 0, 1, 1]);
    let network = network.with_host_link(Link::new(MS, 1_000_000));
    assert_eq!(time_of_shift(&network, 2), 4 * MS, "two messages of 1 ms over two links of 1 ms");
    assert_eq!(time_of_shift(&network.clone().with_hosts(&[0, 1, 2, 3]), 2), 3 * MS);
    let racks = network.with_racks(&[0, 0, 1, 1]).with_rack_link(Link::new(10 * MS, 1_000_000));
    assert_eq!(time_of_shift(&racks, 2), 24 * MS);
    let direct = racks.with_link_between(1, 0, Link::new(7 * MS, 1_000_000));
    assert_eq!(time_of_shift(&direct, 2), 9 * MS);
}

#[test]
fn later_messages_of_a_pair_do_not_overtake_and_a_deadline_does_not_wait_for_a_slow_one() {
    let link = Link::new(Duration::ZERO, 1_000).with_jitter(50 * MS);
    let outcome = Network::new(2).with_memory_link(link).run(|mut transport| {
        let deadline = transport.runtime().deadline(MINUTE);
        if transport.rank().index() == 0 {
            for len in [1, 2, 3, 1_000_000] {
                send(&mut transport, 1, len, deadline).unwrap();
            }
            return receive(&mut transport, 1, 1);
        }
        (1..4).try_for_each(|len| receive(&mut transport, 0, len))?;
        receive(&mut transport, 0, 1_000_000)
    });
    let at = |rank: usize| outcome.results[rank].as_ref().unwrap_err();
    assert!(matches!(at(1), Error::Timeout { limit: MINUTE, .. }) || at(0).is_timeout(), "{outcome:?}");
    assert!((MINUTE..2 * MINUTE).contains(&outcome.elapsed));
}

#[rstest]
#[case::all_fit(3, 1, 3)]
#[case::one_waits(2, 1, 3)]
#[case::longer_than_the_window(10, 100, 2)]
fn a_send_waits_for_room(#[case] window: usize, #[case] len: usize, #[case] messages: usize) {
    let pause = Duration::from_secs(1);
    let outcome = Network::new(2).with_window(window).run(move |mut transport| {
        let runtime = transport.runtime().clone();
        let deadline = runtime.deadline(MINUTE);
        for _ in 0..messages {
            if transport.rank().index() == 0 {
                send(&mut transport, 1, len, deadline).unwrap();
            } else {
                runtime.park(Some(runtime.deadline(pause)));
                receive(&mut transport, 0, len).unwrap();
            }
        }
        runtime.now()
    });
    // The sender is done when the bytes of its last send fit into the window, which is when enough bytes were
    // received.
    let unreceived = window / len;
    let received = messages.saturating_sub(unreceived);
    assert_eq!(outcome.results[0], pause * u32::try_from(received).unwrap());
}

#[test]
fn two_ranks_that_send_before_they_receive_time_out_where_the_window_is_too_small() {
    let program = |mut transport: SimTransport| {
        let (peer, deadline) = (1 - transport.rank().index(), transport.runtime().deadline(MINUTE));
        send(&mut transport, peer, 1000, deadline)?;
        receive(&mut transport, peer, 1000)
    };
    assert!(Network::new(2).with_window(1000).run(program).results.iter().all(Result::is_ok));
    let outcome = Network::new(2).with_window(999).run(program);
    let first = outcome.results.iter().find(|result| !matches!(result, Err(Error::Aborted(_)))).unwrap();
    assert!(matches!(first, Err(Error::Timeout { activity: Activity::Send, .. })), "{first:?}");
    assert_eq!(outcome.elapsed, MINUTE);
}

#[test]
fn an_exchange_sends_and_receives_at_once_however_small_the_window() {
    let outcome = Network::new(3).with_window(0).run(|mut transport| {
        let rank = transport.rank();
        shift(&mut transport, rank.right().index(), rank.left().index(), 1000)?;
        let deadline = transport.runtime().deadline(MINUTE);
        let peer = [1, 0, 2][rank.index()];
        transport.exchange_in_place(peer, &mut [3; 100], &mut |_, _| {}, &deadline.into())
    });
    assert!(outcome.results.iter().all(Result::is_ok), "{:?}", outcome.results);
}

#[test]
fn real_threads_wait_for_slow_links_too() {
    let runtime = Runtime::system();
    let network = Network::new(2).with_memory_link(Link::new(20 * MS, 1_000_000_000));
    let start = |mut transport: SimTransport| {
        let work = move || {
            let peer = 1 - transport.rank().index();
            shift(&mut transport, peer, peer, 10).unwrap();
            transport.runtime().now()
        };
        runtime.spawn("rank", work).unwrap()
    };
    let tasks: Vec<_> = network.connect(&runtime).into_iter().map(start).collect();
    for task in tasks {
        assert!(task.join().unwrap() >= 20 * MS);
    }
}

#[test]
fn the_same_seed_gives_the_same_times_and_other_seeds_others() {
    let run = |seed| {
        let network = Network::new(4).with_seed(seed);
        let network = network.with_memory_link(Link::new(MS, 1_000_000).with_jitter(MS));
        network.run(|mut transport| {
            let rank = transport.rank();
            for _ in 0..5 {
                shift(&mut transport, rank.right().index(), rank.left().index(), 100).unwrap();
            }
            transport.runtime().now()
        })
    };
    let outcomes: Vec<_> = (0..20).map(run).collect();
    for (seed, outcome) in (0..).zip(&outcomes) {
        assert_eq!(*outcome, run(seed));
    }
    let mut times: Vec<_> = outcomes.iter().map(|outcome| outcome.elapsed).collect();
    times.sort();
    times.dedup();
    assert_eq!(times.len(), 20);
}
