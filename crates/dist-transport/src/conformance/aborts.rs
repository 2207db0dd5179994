//! Aborts: one record for all ranks, wherever they wait and whatever the cause.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::shm_group::{ExposedRegion, SlotUse};
use crate::{Abort, Cause, Error, Incoming, Outgoing, Result, Sink, Transport};

use super::backend::{Backend, Fabric, LONG};
use super::calls::{call, exchange_a_byte_with_all, receive, receive_within, send, soon, wait_in_vain};
use super::unchecked::Unchecked;

/// The hosts of the ranks.
const HOSTS: [u64; 4] = [0, 0, 1, 1];

/// The bytes of a message whose receiver panics. Much of it is in flight then.
const LEN: usize = 100_000;

/// Two ranks end the job: `reporter` waits, and something happens to `culprit`.
#[derive(Debug, Clone, Copy)]
struct Case {
    place: AbortPlace,
    kind: AbortKind,
    reporter: usize,
    culprit: usize,
}

/// The place where the two ranks communicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AbortPlace {
    /// In shared memory of their host.
    Memory,
    /// By messages in a group of their host.
    Host,
    /// By messages in the group of all ranks. They are on different hosts.
    World,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AbortKind {
    TimedOut,
    Left,
    Mismatch,
    Length,
    GaveUp,
    Panicked,
}

/// The group of the ranks of a host, and that of all ranks, which is left last.
struct PairAndWorld {
    pair: Box<dyn Transport>,
    world: Box<dyn Transport>,
}

/// The error that ended the last wait of a rank, the record that it has then, and the records of later calls.
type EndOfRank = (Error, (Abort, Vec<Abort>));

impl PairAndWorld {
    fn new(mut world: Box<dyn Transport>) -> Self {
        let first = world.rank().index() & !1;
        let pair = world.fork(&[first, first + 1]).unwrap().expect("this rank is one of the two");
        Self { pair, world }
    }

    /// Lets all ranks connect, and those of a host share memory.
    fn set_up(&mut self) -> Result<()> {
        exchange_a_byte_with_all(&mut *self.pair)?;
        let due = soon(&*self.pair);
        if let Some(mut shm_group) = Unchecked::of(&mut *self.pair, &due)? {
            shm_group.enter(1, SlotUse::Used, ExposedRegion::Nothing, &due)?;
            shm_group.signal();
            let peer = 1 - shm_group.rank().index();
            shm_group.wait(peer, 1, &due)?;
        }
        exchange_a_byte_with_all(&mut *self.world)
    }

    /// Returns the group of this place, and the number of a rank there.
    fn at(&mut self, place: AbortPlace, rank: usize) -> (&mut dyn Transport, usize) {
        match place {
            AbortPlace::Memory | AbortPlace::Host => (&mut *self.pair, rank % 2),
            AbortPlace::World => (&mut *self.world, rank),
        }
    }

    /// Waits for a signal of the other rank of this host, or for a message if they share no memory.
    fn wait_in_memory(&mut self, limit: Duration) -> Error {
        let peer = 1 - self.pair.rank().index();
        let due = self.pair.runtime().deadline(limit).into();
        let waited = match Unchecked::of(&mut *self.pair, &due) {
            Ok(Some(mut shm_group)) => {
                let entered = shm_group.enter(1, SlotUse::Used, ExposedRegion::Nothing, &due);
                entered.and_then(|()| shm_group.wait(peer, 1, &due))
            }
            Ok(None) => return receive_within(&mut *self.pair, peer, 1, limit).expect_err("nothing is sent"),
            Err(error) => Err(error),
        };
        waited.expect_err("no rank signals")
    }

    /// Waits for the culprit, and returns the error.
    fn report(&mut self, case: Case, short: Duration) -> Error {
        let limit = if case.kind == AbortKind::TimedOut { short } else { LONG };
        let (transport, culprit) = self.at(case.place, case.culprit);
        if case.kind == AbortKind::Mismatch {
            transport.begin(&call(1, 0));
        }
        if case.place == AbortPlace::Memory {
            return self.wait_in_memory(limit);
        }
        if case.kind == AbortKind::Panicked {
            // The other rank may panic before it has taken all of the message.
            let _ = send(transport, culprit, &vec![7; LEN]);
        }
        let len = if case.kind == AbortKind::Length { 100 } else { 1 };
        receive_within(transport, culprit, len, limit).expect_err("no such message is sent")
    }

    /// Causes the abort. Returns `None` if this rank has left.
    fn cause(mut self, case: Case) -> Option<(Self, Error)> {
        let Case { place, kind, reporter, .. } = case;
        let is_in_memory = place == AbortPlace::Memory;
        let (transport, to) = self.at(place, reporter);
        match kind {
            AbortKind::TimedOut => {
                while transport.aborted().is_none() {
                    let runtime = transport.runtime();
                    runtime.park(Some(runtime.deadline(Duration::from_millis(1))));
                }
            }
            AbortKind::Left => return None,
            AbortKind::Mismatch => {
                transport.begin(&call(1, 1));
                if is_in_memory {
                    let error = self.wait_in_memory(LONG);
                    return Some((self, error));
                }
                send(transport, to, &[1]).unwrap();
            }
            AbortKind::Length => send(transport, to, &[7; 99]).unwrap(),
            AbortKind::GaveUp => transport.abort(Cause::gave_up("no more data")),
            AbortKind::Panicked if is_in_memory => {
                let panics = AssertUnwindSafe(move || {
                    let _in_hand = self;
                    std::panic::resume_unwind(Box::new("planted"))
                });
                let _: Result<(), _> = catch_unwind(panics);
                return None;
            }
            AbortKind::Panicked => {
                let due = soon(transport);
                let mut sink = |_, _: &[u8]| std::panic::resume_unwind(Box::new("planted"));
                let receive = Incoming { from: to, len: LEN, sink: Sink::Each(&mut sink) };
                let none: Option<Outgoing<'_>> = None;
                let panics = AssertUnwindSafe(|| transport.exchange(none, Some(receive), &due));
                catch_unwind(panics).expect_err("the function panics");
            }
        }
        let error = wait_in_vain(&mut *self.world, reporter);
        Some((self, error))
    }

    /// Waits until others end the job: the first rank of a host in memory, the second one for a message.
    fn stand_by(&mut self, case: Case) -> Error {
        match self.world.rank().index() {
            0 | 2 => self.wait_in_memory(LONG),
            3 if case.place == AbortPlace::World => wait_in_vain(&mut *self.world, 0),
            _ => wait_in_vain(&mut *self.world, case.reporter),
        }
    }

    /// Returns the records of calls after the abort.
    fn later(&mut self) -> Vec<Abort> {
        let (peer, due) = (1 - self.pair.rank().index(), soon(&*self.pair));
        let other = (self.world.rank().index() + 2) % 4;
        let in_world = receive(&mut *self.world, other, 1).expect_err("the job is aborted");
        let in_pair = receive(&mut *self.pair, peer, 1).expect_err("the job is aborted");
        let in_memory = self.pair.shm_group(&due).err();
        let records = [Some(in_world), Some(in_pair), in_memory].into_iter().flatten();
        let record = |error| match error {
            Error::Aborted(abort) => abort,
            error => panic!("{error}"),
        };
        records.map(record).collect()
    }
}

/// Runs a rank. Returns `None` if it has left.
fn run(world: Box<dyn Transport>, case: Case, short: Duration) -> Option<EndOfRank> {
    let me = world.rank().index();
    let mut groups = PairAndWorld::new(world);
    let (mut groups, error) = match groups.set_up() {
        Err(error) => (groups, error),
        Ok(()) if me == case.culprit => groups.cause(case)?,
        Ok(()) => {
            let error = if me == case.reporter { groups.report(case, short) } else { groups.stand_by(case) };
            (groups, error)
        }
    };
    let record = groups.world.aborted().expect("a call has failed");
    Some((error, (record, groups.later())))
}

fn verify(case: Case, ends: Vec<Option<EndOfRank>>) {
    let ends: Vec<_> = ends.into_iter().flatten().collect();
    let record = ends[0].1.0.clone();
    for (error, (own, later)) in ends {
        assert_eq!(own, record, "{case:?}: {error}");
        assert!(later.iter().all(|later| *later == record), "{case:?}: {later:?} is not {record:?}");
        if let Error::Aborted(abort) = error {
            assert_eq!(abort, record, "{case:?}");
        }
    }
    let is_expected = match (case.kind, &record.cause) {
        (AbortKind::Mismatch, Cause::Mismatch { .. }) => return,
        (AbortKind::TimedOut, Cause::TimedOut { .. })
        | (AbortKind::Left, Cause::Left)
        | (AbortKind::Length, Cause::Length { expected: 100, got: 99 })
        | (AbortKind::GaveUp, Cause::GaveUp { .. })
        | (AbortKind::Panicked, Cause::Panicked) => record.rank == case.culprit,
        _ => false,
    };
    assert!(is_expected, "{case:?}: {record:?}");
}

/// After an abort, all ranks of all hosts have one record, wherever they wait and whatever the cause.
pub(super) fn all_ranks_have_one_record_wherever_they_wait(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    let kinds = [
        AbortKind::TimedOut,
        AbortKind::Left,
        AbortKind::Mismatch,
        AbortKind::Length,
        AbortKind::GaveUp,
        AbortKind::Panicked,
    ];
    let pairs = [
        (AbortPlace::Memory, [0, 1]),
        (AbortPlace::Memory, [2, 3]),
        (AbortPlace::Host, [0, 1]),
        (AbortPlace::Host, [2, 3]),
    ];
    let across = [(AbortPlace::World, [1, 2]), (AbortPlace::World, [2, 1])];
    for (place, [reporter, culprit]) in pairs.into_iter().chain(across) {
        for kind in kinds {
            if place == AbortPlace::Memory && kind == AbortKind::Length {
                continue;
            }
            let case = Case { place, kind, reporter, culprit };
            let short = backend.short();
            backend.check_on(&HOSTS, move |world| run(world, case, short), move |ends| verify(case, ends));
        }
    }
}
