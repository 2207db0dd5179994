//! The simulated network finds mistakes that are planted below direct schedules, by trying seeds: sums are wrong,
//! or a rank waits for ever.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::ops::Range;
use std::time::Duration;

use dist_algos::direct::{
    DirectAccess, DirectAlgorithm, DirectCollective, DirectMemory, DirectPlan, OwnMemory, ReductionKernel,
    RemoteAccess, one_shot, run, staged,
};
use dist_algos::{ALGORITHMS, CollectiveKind, Partition, Scratch};
use dist_transport::conformance::Unchecked;
use dist_transport::shm_group::{ExposedRegion, GroupLayout, MemoryArea, Reach, SlotUse};
use dist_transport::{Fingerprint, LazyDeadline, Owned, Rank, Result, Transport, sim};
use rstest::rstest;

const WORLD: usize = 3;
const SEEDS: u64 = 2000;
/// The slots of a pipeline of many blocks.
const SHARED: GroupLayout =
    GroupLayout { slot_bytes: 64 * WORLD, eager_bytes: 4096, ..GroupLayout::on_host(Reach::Write) };

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    None,
    /// Some waits are left out.
    MissingWait,
    /// Every wait is for one signal less.
    WaitsForLess,
    /// A slot is reused two blocks later.
    EarlyReuse,
    /// A signal comes before the data that it announces.
    EarlySignal,
    /// Some signals are never given.
    LostSignal,
}

/// An access to shared memory with a mistake.
struct Wrong<'a> {
    inner: Unchecked<'a>,
    mistake: Mistake,
    waits: usize,
    signals: u32,
    /// Data that is published only after the signal.
    late: Vec<(MemoryArea, usize, Vec<u8>)>,
}

impl Wrong<'_> {
    fn place(&self, place: MemoryArea) -> MemoryArea {
        match place {
            MemoryArea::Slot(slot) if self.mistake == Mistake::EarlyReuse => MemoryArea::Slot(slot % 2),
            place => place,
        }
    }
}

impl DirectAccess for Wrong<'_> {
    fn shared(&self) -> GroupLayout {
        SHARED
    }

    fn publish(&mut self, place: MemoryArea, offset: usize, bytes: &[u8]) {
        let place = self.place(place);
        if self.mistake == Mistake::EarlySignal && place != MemoryArea::FlagLine {
            self.late.push((place, offset, bytes.to_vec()));
        } else {
            self.inner.publish(place, offset, bytes);
        }
    }

    fn signal(&mut self) {
        self.signals += 1;
        if self.mistake != Mistake::LostSignal || self.signals != 2 {
            self.inner.signal();
        }
        for (place, offset, bytes) in std::mem::take(&mut self.late) {
            self.inner.publish(place, offset, &bytes);
        }
    }

    fn wait(&mut self, rank: usize, signals: u32, due: &LazyDeadline<'_>) -> Result<()> {
        self.waits += 1;
        match self.mistake {
            Mistake::MissingWait if self.waits.is_multiple_of(5) => Ok(()),
            Mistake::WaitsForLess => self.inner.wait(rank, signals.saturating_sub(1), due),
            _ => self.inner.wait(rank, signals, due),
        }
    }

    fn signal_and_wait(
        &mut self,
        _: Rank,
        _: SlotUse,
        to: (usize, MemoryArea, usize),
        bytes: &[u8],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.inner.signal_and_wait(to, bytes, due)
    }

    fn view(
        &mut self,
        rank: usize,
        place: MemoryArea,
        range: Range<usize>,
        read: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        self.inner.view(rank, self.place(place), range, read)
    }

    fn view_all(
        &mut self,
        place: MemoryArea,
        there: &[(usize, usize)],
        len: usize,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()> {
        self.inner.view_all(self.place(place), there, len, read)
    }

    fn read(&mut self, rank: usize, place: MemoryArea, offset: usize, into: &mut [u8]) -> Result<()> {
        self.inner.read(rank, self.place(place), offset, into)
    }

    fn write(&mut self, rank: usize, place: MemoryArea, offset: usize, bytes: &[u8]) -> Result<()> {
        self.inner.write(rank, self.place(place), offset, bytes)
    }

    fn update_exposed(&mut self, memory: &[u8]) {
        self.inner.update_exposed(memory);
    }
}

/// Computes three sums in a row. Returns `true` if all of them were right.
fn sums(transport: &mut sim::SimTransport, algorithm: &'static DirectAlgorithm, mistake: Mistake) -> bool {
    let (rank, deadline) = (transport.rank(), transport.runtime().deadline(Duration::from_secs(60)));
    let partition = Partition::new(64 * 8, 1, algorithm.parts(WORLD)).unwrap();
    let plan = DirectPlan::new(
        (DirectCollective::AllReduce, algorithm),
        WORLD,
        partition.chunk_bytes_max(),
        64 * WORLD,
        SHARED,
    )
    .unwrap();
    (1..=3_u8).all(|call| {
        transport.begin(&Fingerprint([call; 48]));
        // No two blocks, and no two calls, have equal data.
        let brought = |at: usize| (usize::from(call) + at / 64) % 3 + 1;
        let word = |at: usize| u8::try_from(brought(at) << (2 * rank.index())).unwrap();
        let mut buffer = Vec::from_iter((0..64 * 8).map(word));
        let due = &deadline.into();
        let mut inner = Unchecked::simulated(transport, due).unwrap().unwrap();
        let lends = algorithm.remote_access == RemoteAccess::Write;
        let exposed = match algorithm.remote_access {
            RemoteAccess::Write => ExposedRegion::Write(Owned::from(buffer.clone()).lend()),
            RemoteAccess::Read => ExposedRegion::Read(&buffer),
            RemoteAccess::Nothing => ExposedRegion::Nothing,
        };
        if inner.enter(plan.signals(), plan.use_of_slots(), exposed, due).is_err() {
            return false;
        }
        let mut access = Wrong { inner, mistake, waits: rank.index(), signals: 0, late: Vec::new() };
        let part = partition.range(if lends { rank.index() } else { 0 });
        let own = if lends {
            OwnMemory::Lent { len: buffer.len(), start: part.start, part: &mut buffer[part.clone()] }
        } else {
            OwnMemory::Borrowed(&mut buffer)
        };
        let memory = &mut DirectMemory { own, partition, input: None, piece_bytes: 64 };
        let combine = &mut |into: &mut [u8], from: &[u8]| {
            into.iter_mut().zip(from).for_each(|(into, from)| *into = into.wrapping_add(*from));
        };
        let complete = &mut |_: &mut [&mut [u8]]| unreachable!("no other rank's memory is accessible");
        let kernel = &mut ReductionKernel { combine, finish: &mut |_| (), complete };
        let (steps, scratch) = (plan.schedule(rank), &mut Scratch::new());
        let done = run(&mut access, (&plan, rank), steps, memory, kernel, scratch, due);
        if lends {
            let Some(lent) = access.inner.reclaim() else { return false };
            let mut others = lent.into_owned::<u8>().unwrap().into_vec().unwrap();
            others[part.clone()].copy_from_slice(&buffer[part]);
            buffer = others;
        }
        done.is_ok()
            && access.inner.is_finished()
            && buffer.iter().enumerate().all(|(at, &sum)| usize::from(sum) == brought(at) * 0b01_0101)
    })
}

fn all_reduces() -> impl Iterator<Item = &'static DirectAlgorithm> {
    ALGORITHMS.direct().filter(|algorithm| algorithm.collective == CollectiveKind::AllReduce)
}

/// Returns the first seed that shows the mistake.
fn found(algorithm: &'static DirectAlgorithm, mistake: Mistake, seeds: u64) -> Option<u64> {
    (0..seeds).find(|&seed| {
        let network = sim::Network::new(WORLD).with_seed(seed).with_shared_memory();
        let program = move |mut transport: sim::SimTransport| sums(&mut transport, algorithm, mistake);
        network.try_run(program).map_or(true, |outcome| outcome.results.contains(&Some(false)))
    })
}

#[rstest]
#[case::missing_await(Mistake::MissingWait)]
#[case::waits_for_less(Mistake::WaitsForLess)]
#[case::lost_post(Mistake::LostSignal)]
fn mistakes_of_waits_are_found_in_every_algorithm(#[case] mistake: Mistake) {
    for algorithm in all_reduces() {
        assert!(found(algorithm, mistake, SEEDS).is_some(), "{mistake:?} in {algorithm:?}");
    }
}

#[rstest]
#[case::early_reuse(Mistake::EarlyReuse)]
#[case::early_post(Mistake::EarlySignal)]
fn mistakes_of_slots_are_found_in_algorithms_with_slots(#[case] mistake: Mistake) {
    for algorithm in [&one_shot::ALL_REDUCE, &staged::ALL_REDUCE] {
        assert!(found(algorithm, mistake, SEEDS).is_some(), "{mistake:?} in {algorithm:?}");
    }
}

#[test]
fn nothing_is_found_where_there_is_no_mistake() {
    for algorithm in all_reduces() {
        assert_eq!(found(algorithm, Mistake::None, SEEDS / 20), None, "{algorithm:?}");
    }
}
