//! The simulated network finds mistakes that are planted into steps, exchanges and message ends, by trying seeds:
//! sums are wrong, or a rank waits for a message that never comes.
#![allow(clippy::unwrap_used, reason = "a failing rank ends the test, and the tests look for failures")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use dist_algos::{
    ALGORITHMS, CollectiveKind, Memory, MessageAlgorithm, Partition, RingTransport, Scratch, Step,
    recursive_doubling, ring, run,
};
use dist_transport::sim::{Network, SimTransport};
use dist_transport::{
    Combine, Error, Incoming, LazyDeadline, Outgoing, Rank, Result, Runtime, Sink, Transport,
};
use rstest::rstest;

const WORLD: usize = 4;
const SEEDS: u64 = 2000;
/// Two groups of all ranks, each with its own thread on every rank.
const GROUPS: u8 = 2;
const CALLS: u8 = 2;
const LEN: usize = 256;
/// The rank that makes mistakes that not all ranks make.
const WRONG: usize = 1;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    None,
    /// A step of one rank is left out.
    StepLeftOut,
    /// A step of one rank is done twice.
    StepTwice,
    /// Two steps of one rank change places.
    StepsSwapped,
    /// Every rank receives before it sends.
    ReceivesFirst,
    /// Every rank finishes sending before it receives.
    SendsFirst,
    /// One rank takes only the messages that have arrived.
    DoesNotWait,
    /// One rank never sends one of its messages.
    LosesMessage,
    /// The first piece of a message is delivered twice.
    PieceTwice,
    /// The last piece of a message is not delivered.
    PieceLost,
    /// One of two ranks combines in place before it sends.
    CombinesFirst,
    /// A thread of one group uses the transport of another group.
    TakesAnyEnd,
    /// One rank swaps the transports of its groups.
    SwapsEnds,
}

/// One rank's transport of a group, with a mistake.
struct Wrong {
    inner: Box<dyn Transport>,
    mistake: Mistake,
    exchanges: usize,
}

impl Wrong {
    fn one_after_the_other(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        if send.is_some() {
            Transport::exchange(&mut self.inner, send, None, due)?;
        }
        if receive.is_some() {
            Transport::exchange(&mut self.inner, None, receive, due)?;
        }
        Ok(())
    }

    /// Exchanges messages with this many deliveries of the first piece and of the last piece.
    fn in_pieces(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Incoming<'_>,
        [first, last]: [usize; 2],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let Incoming { from, len, sink } = receive;
        let Sink::Each(deliver) = sink else {
            return Transport::exchange(&mut self.inner, send, Some(Incoming { from, len, sink }), due);
        };
        let mut counted = |offset: usize, bytes: &[u8]| {
            let of_first = if offset == 0 { first } else { 1 };
            let of_last = if offset + bytes.len() == len { last } else { 1 };
            (0..of_first * of_last).for_each(|_| deliver(offset, bytes));
        };
        let receive = Incoming { from, len, sink: Sink::Each(&mut counted) };
        Transport::exchange(&mut self.inner, send, Some(receive), due)
    }
}

impl RingTransport for Wrong {
    type Error = Error;

    fn rank(&self) -> Rank {
        Transport::rank(&self.inner)
    }

    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.exchanges += 1;
        let is_wrong = Transport::rank(&self.inner).index() == WRONG;
        match (self.mistake, receive) {
            (Mistake::ReceivesFirst, receive) => {
                if receive.is_some() {
                    Transport::exchange(&mut self.inner, None, receive, due)?;
                }
                self.one_after_the_other(send, None, due)
            }
            (Mistake::SendsFirst, receive) => self.one_after_the_other(send, receive, due),
            (Mistake::LosesMessage, receive) if is_wrong && self.exchanges == 2 => {
                self.one_after_the_other(None, receive, due)
            }
            (Mistake::DoesNotWait, Some(receive)) if is_wrong => {
                let at_once = self.inner.runtime().deadline(Duration::ZERO);
                let nothing = !self.inner.wait_any_peer(&[receive.from], &at_once.into())?.is_empty();
                self.one_after_the_other(send, (!nothing).then_some(receive), due)
            }
            (Mistake::PieceTwice, Some(receive)) => self.in_pieces(send, receive, [2, 1], due),
            (Mistake::PieceLost, Some(receive)) => self.in_pieces(send, receive, [1, 0], due),
            (_, receive) => Transport::exchange(&mut self.inner, send, receive, due),
        }
    }

    fn exchange_in_place(
        &mut self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        if self.mistake != Mistake::CombinesFirst || Transport::rank(&self.inner).index() < peer {
            return Transport::exchange_in_place(&mut self.inner, peer, buffer, combine, due);
        }
        let mut theirs = vec![0; buffer.len()];
        let sink = Sink::Into(&mut theirs);
        Transport::exchange(
            &mut self.inner,
            None,
            Some(Incoming { from: peer, len: buffer.len(), sink }),
            due,
        )?;
        combine(buffer, &theirs);
        Transport::exchange(&mut self.inner, Some(Outgoing { to: peer, parts: &[buffer] }), None, due)
    }
}

/// Returns the steps of a rank, with or without the mistake.
fn steps(rank: Rank, steps: impl Iterator<Item = Step>, mistake: Mistake) -> Vec<Step> {
    let mut steps: Vec<Step> = steps.collect();
    if rank.index() == WRONG {
        match mistake {
            Mistake::StepLeftOut => drop(steps.remove(0)),
            Mistake::StepTwice => steps.insert(0, steps[0]),
            Mistake::StepsSwapped => steps.swap(0, 1),
            _ => {}
        }
    }
    steps
}

/// Returns the data of a rank: each rank has its own four bits of the sum, and each call and group has other
/// numbers.
fn brought(rank: usize, group: u8, call: u8, at: usize) -> u8 {
    let number = usize::from(group + 2 * call) + at / 16;
    u8::try_from((number % 4) << (2 * rank)).unwrap()
}

/// Sums in a group by an algorithm and the real runner. Wrong sums panic.
fn sums(mut end: Wrong, group: u8, algorithm: &'static MessageAlgorithm) -> Box<dyn Transport> {
    let rank = Transport::rank(&end.inner);
    let due = &LazyDeadline::from(end.inner.runtime().deadline(Duration::from_secs(60)));
    let partition = Partition::new(LEN, 1, algorithm.chunks(WORLD)).unwrap();
    for call in 0..CALLS {
        let mut buffer: Vec<u8> = (0..LEN).map(|at| brought(rank.index(), group, call, at)).collect();
        let mut add = |into: &mut [u8], from: &[u8]| {
            into.iter_mut().zip(from).for_each(|(into, from)| *into = into.wrapping_add(*from));
        };
        let phases = algorithm.phases(rank, 0);
        for phase in [phases.first, phases.second] {
            let memory = Memory::new(&mut buffer, partition);
            let steps = steps(rank, phase, end.mistake);
            run(&mut end, steps, memory, &mut add, &mut Scratch::new(), due).unwrap();
        }
        let sum = |at| (0..WORLD).map(|rank| brought(rank, group, call, at)).sum::<u8>();
        assert!(buffer.iter().zip(0..).all(|(&byte, at)| byte == sum(at)), "a wrong sum");
    }
    end.inner
}

/// Runs both groups at once, each on its own thread.
fn groups(mut transport: SimTransport, algorithm: &'static MessageAlgorithm, mistake: Mistake) {
    let (everybody, runtime): (Vec<usize>, Runtime) = ((0..WORLD).collect(), transport.runtime().clone());
    let swaps = mistake == Mistake::SwapsEnds && RingTransport::rank(&transport).index() == WRONG;
    let fork = |_| Some(transport.fork(&everybody).unwrap().unwrap());
    let mut ends: Vec<_> = (0..GROUPS).map(fork).collect();
    if swaps {
        ends.swap(0, 1);
    }
    let ends = Arc::new(Mutex::new(ends));
    let start = |group: u8| {
        let ends = ends.clone();
        let work = move || {
            let inner = {
                let mut ends = ends.lock().unwrap();
                let first = ends.iter().position(Option::is_some).unwrap();
                let place = if mistake == Mistake::TakesAnyEnd { first } else { group.into() };
                ends[place].take().unwrap()
            };
            sums(Wrong { inner, mistake, exchanges: 0 }, group, algorithm)
        };
        runtime.spawn("group", work).unwrap()
    };
    let tasks: Vec<_> = (0..GROUPS).map(start).collect();
    // Ranks that are done stay until all are.
    let ended: Vec<_> = tasks.into_iter().map(|task| task.join().unwrap()).collect();
    let due = &LazyDeadline::within(&runtime, Duration::from_secs(60));
    let sends: Vec<_> = everybody.iter().map(|&to| Outgoing { to, parts: &[] }).collect();
    let receive = |&from: &usize| Incoming { from, len: 0, sink: Sink::Into(&mut []) };
    let mut receives: Vec<_> = everybody.iter().map(receive).collect();
    RingTransport::exchange_all(&mut transport, &sends, &mut receives, due).unwrap();
    drop(ended);
}

/// Returns the first seed that shows the mistake.
fn found(algorithm: &'static MessageAlgorithm, mistake: Mistake, seeds: u64) -> Option<u64> {
    let network = Network::new(WORLD).with_window(16);
    let found = network.find(0..seeds, move |transport| groups(transport, algorithm, mistake));
    found.map(|found| found.seed())
}

#[rstest]
#[case::step_left_out(Mistake::StepLeftOut)]
#[case::step_twice(Mistake::StepTwice)]
#[case::steps_swapped(Mistake::StepsSwapped)]
#[case::receives_first(Mistake::ReceivesFirst)]
#[case::sends_first(Mistake::SendsFirst)]
#[case::does_not_wait(Mistake::DoesNotWait)]
#[case::loses_message(Mistake::LosesMessage)]
#[case::piece_twice(Mistake::PieceTwice)]
#[case::piece_lost(Mistake::PieceLost)]
#[case::takes_any_end(Mistake::TakesAnyEnd)]
#[case::swaps_ends(Mistake::SwapsEnds)]
fn a_mistake_is_found(#[case] mistake: Mistake) {
    assert!(found(&ring::ALL_REDUCE, mistake, SEEDS).is_some());
}

#[test]
fn combining_before_sending_is_found_where_it_is_done_in_place() {
    assert!(found(&recursive_doubling::ALL_REDUCE, Mistake::CombinesFirst, SEEDS).is_some());
}

#[test]
fn nothing_is_found_where_there_is_no_mistake() {
    let all_reduces = ALGORITHMS.messages().filter(|it| it.collective == CollectiveKind::AllReduce);
    for algorithm in all_reduces.filter(|algorithm| algorithm.supports(WORLD)) {
        assert_eq!(found(algorithm, Mistake::None, SEEDS / 20), None, "{algorithm:?}");
    }
}
