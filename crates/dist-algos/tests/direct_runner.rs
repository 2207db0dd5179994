//! The runner executes direct schedules: every operation by every algorithm against an oracle, on memory that
//! threads share.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::iter;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use dist_algos::direct::{
    DirectAccess, DirectAlgorithm, DirectCollective, DirectMemory, DirectPlan, ExposedMemory, OwnMemory,
    ReductionKernel, RemoteAccess, SumKernel, exposed_memory, one_shot, run, signal_and_wait, staged,
    write_to_all,
};
use dist_algos::{ALGORITHMS, Partition, RunError, Scratch, Source};
use dist_testkit::oracle::{self, Reduction};
use dist_transport::shm_group::{CALLS_MAX, GroupLayout, MemoryArea, Reach, SlotUse};
use dist_transport::{Deadline, LazyDeadline, Rank, Result, Runtime};
use rstest::rstest;

const SHARED: GroupLayout =
    GroupLayout { slot_bytes: 1024, eager_bytes: 4096, ..GroupLayout::on_host(Reach::Write) };

/// The shared memory of one rank: flag lines and eager buffers used in turn by calls, and slots for every other
/// call.
#[derive(Debug, Default)]
struct Share {
    signals: u64,
    lines: [Vec<u8>; CALLS_MAX],
    eager_buffers: [Vec<u8>; CALLS_MAX],
    slots: [Vec<Vec<u8>>; 2],
    /// The exposed memory of the rank, as it was at its last signal.
    memory: Vec<u8>,
    shown: Vec<u8>,
}

/// The memory that threads share, protected by one mutex.
#[derive(Debug)]
struct ThreadGroup {
    rank: usize,
    all: Arc<Mutex<Vec<Share>>>,
    /// The number of signals of each rank before the calls that this rank has entered, and after them.
    bases: Vec<u64>,
    /// The generation of the slots.
    generation: usize,
}

impl ThreadGroup {
    fn lock(&self) -> MutexGuard<'_, Vec<Share>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for_signals(&self, rank: usize, signals: u64) {
        while self.lock()[rank].signals < signals {
            thread::yield_now();
        }
    }

    /// Returns the number of calls that this rank has entered.
    fn calls(&self) -> usize {
        self.bases.len() - 1
    }

    fn bytes(share: &mut Share, call: usize, place: MemoryArea) -> &mut Vec<u8> {
        match place {
            MemoryArea::FlagLine => &mut share.lines[call % CALLS_MAX],
            MemoryArea::EagerBuffer => &mut share.eager_buffers[call % CALLS_MAX],
            MemoryArea::Slot(slot) => &mut share.slots[call % 2][slot],
            MemoryArea::Exposed => &mut share.memory,
        }
    }

    /// Enters a call and exposes a copy of this memory.
    fn enter(&mut self, plan: &DirectPlan, memory: &[u8]) {
        self.begin(plan.signals(), plan.use_of_slots(), memory);
    }

    fn begin(&mut self, signals: u32, slots: SlotUse, memory: &[u8]) {
        let ranks = self.lock().len();
        let awaited_call = slots.awaited_call(self.calls());
        if awaited_call > 0 {
            (0..ranks).for_each(|rank| self.wait_for_signals(rank, self.bases[awaited_call - 1] + 1));
        }
        self.bases.push(self.bases[self.calls()] + u64::from(signals));
        let own = &mut self.lock()[self.rank];
        own.memory = memory.to_vec();
        own.shown.clone_from(&own.memory);
    }

    /// Returns the exposed memory with the writes of other ranks.
    fn memory(&self) -> Vec<u8> {
        self.lock()[self.rank].memory.clone()
    }
}

impl DirectAccess for ThreadGroup {
    fn shared(&self) -> GroupLayout {
        SHARED
    }

    fn signal_and_wait(
        &mut self,
        rank: Rank,
        slots: SlotUse,
        (holder, place, offset): (usize, MemoryArea, usize),
        bytes: &[u8],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.begin(1, slots, &[]);
        self.write(holder, place, offset, bytes)?;
        self.signal();
        (0..rank.world_size()).try_for_each(|peer| self.wait(peer, 1, due))
    }

    fn update_exposed(&mut self, memory: &[u8]) {
        let own = &mut self.lock()[self.rank];
        let changed = memory.iter().zip(&mut own.shown).zip(&mut own.memory);
        for ((now, shown), held) in changed.filter(|((now, shown), _)| *now != *shown) {
            (*shown, *held) = (*now, *now);
        }
    }

    fn publish(&mut self, place: MemoryArea, offset: usize, bytes: &[u8]) {
        let mut all = self.lock();
        Self::bytes(&mut all[self.rank], self.calls(), place)[offset..offset + bytes.len()]
            .copy_from_slice(bytes);
    }

    fn signal(&mut self) {
        self.lock()[self.rank].signals += 1;
    }

    fn wait(&mut self, rank: usize, signals: u32, _: &LazyDeadline<'_>) -> Result<()> {
        self.wait_for_signals(rank, self.bases[self.calls() - 1] + u64::from(signals));
        Ok(())
    }

    fn view(
        &mut self,
        rank: usize,
        place: MemoryArea,
        range: std::ops::Range<usize>,
        read: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        let mut bytes = Scratch::new();
        let piece = bytes.bytes(range.len());
        self.read(rank, place, range.start, piece)?;
        // Two pieces, if the range is long enough.
        let middle = range.len() / 128 * 64;
        read(0, &piece[..middle]);
        read(middle, &piece[middle..]);
        Ok(())
    }

    fn view_all(
        &mut self,
        place: MemoryArea,
        there: &[(usize, usize)],
        len: usize,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()> {
        let mut aligned: Vec<_> = there.iter().map(|_| Scratch::new()).collect();
        let mut all: Vec<_> = aligned.iter_mut().map(|scratch| scratch.bytes(len)).collect();
        for (&(rank, offset), bytes) in there.iter().zip(&mut all) {
            self.read(rank, place, offset, bytes)?;
        }
        read(&all.iter().map(|bytes| &**bytes).collect::<Vec<_>>());
        Ok(())
    }

    fn read(&mut self, rank: usize, place: MemoryArea, offset: usize, into: &mut [u8]) -> Result<()> {
        let mut all = self.lock();
        into.copy_from_slice(&Self::bytes(&mut all[rank], self.calls(), place)[offset..offset + into.len()]);
        Ok(())
    }

    fn write(&mut self, rank: usize, place: MemoryArea, offset: usize, bytes: &[u8]) -> Result<()> {
        let mut all = self.lock();
        Self::bytes(&mut all[rank], self.calls(), place)[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// Succeeds in every other call.
    fn change(
        &mut self,
        place: MemoryArea,
        there: &[(usize, usize)],
        len: usize,
        change: &mut dyn FnMut(&mut [&mut [u8]]),
    ) -> Result<bool> {
        let every_other = self.calls().is_multiple_of(2);
        if every_other {
            let mut aligned: Vec<_> = there.iter().map(|_| Scratch::new()).collect();
            let mut all: Vec<_> = aligned.iter_mut().map(|scratch| scratch.bytes(len)).collect();
            for (&(rank, offset), bytes) in there.iter().zip(&mut all) {
                self.read(rank, place, offset, bytes)?;
            }
            change(&mut all);
            for (&(rank, offset), bytes) in there.iter().zip(&all) {
                self.write(rank, place, offset, bytes)?;
            }
        }
        Ok(every_other)
    }
}

/// Runs consecutive calls on every rank and returns the result of each rank.
fn on_every_rank<R: Send>(world_size: usize, work: impl Fn(Rank, &mut ThreadGroup) -> R + Sync) -> Vec<R> {
    let share = || Share {
        lines: [(); CALLS_MAX].map(|()| vec![0; SHARED.flag_line_bytes]),
        eager_buffers: [(); CALLS_MAX].map(|()| vec![0; SHARED.eager_bytes]),
        slots: [(); 2].map(|()| vec![vec![0; SHARED.slot_bytes]; SHARED.slots]),
        ..Share::default()
    };
    let all = Arc::new(Mutex::new((0..world_size).map(|_| share()).collect::<Vec<_>>()));
    thread::scope(|scope| {
        let start = |rank: Rank| {
            let mut direct =
                ThreadGroup { rank: rank.index(), all: all.clone(), bases: vec![0], generation: 0 };
            let work = &work;
            scope.spawn(move || work(rank, &mut direct))
        };
        let threads: Vec<_> = Rank::all(world_size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Returns a deadline in the far future.
fn deadline() -> Deadline {
    Runtime::system().deadline(Duration::from_secs(60))
}

/// Returns the data of a rank: `len` elements for each rank of the world.
fn brought(rank: usize, world_size: usize, len: usize) -> Vec<f32> {
    oracle::sample(7, rank, len * world_size)
}

/// A way to run a fused call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum FusedCall {
    InSteps,
    ByPairs,
    AtOnce,
}

/// Runs an operation once and returns the rank's buffer.
fn once(
    direct: &mut ThreadGroup,
    rank: Rank,
    (collective, algorithm): (DirectCollective, &'static DirectAlgorithm),
    len: usize,
    meeting: FusedCall,
) -> Vec<f32> {
    let world_size = rank.world_size();
    let buffer = brought(rank.index(), world_size, len);
    let input = buffer.clone();
    let parts = algorithm.parts(world_size);
    let partition = Partition::new(buffer.len(), 4, parts).unwrap();
    let plan = DirectPlan::new((collective, algorithm), world_size, partition.chunk_bytes_max(), 512, SHARED)
        .unwrap();
    let plan = plan.with_generation(direct.generation);
    direct.generation += plan.generations();
    let part = rank.index() * len..(rank.index() + 1) * len;
    let input = match collective {
        DirectCollective::AllGather { of: Source::Input } => {
            let part_cut = Partition::new(len, 4, 1).and_then(|part| part.among(rank.index(), world_size));
            Some((bytemuck::cast_slice(&input[part]), part_cut.unwrap()))
        }
        collective if collective.source() == Source::Input => Some((bytemuck::cast_slice(&input), partition)),
        _ => None,
    };
    let mut buffer = buffer;
    let combine = |into: &mut [u8], from: &[u8]| {
        let (into, from) = (bytemuck::cast_slice_mut::<_, f32>(into), bytemuck::cast_slice::<_, f32>(from));
        into.iter_mut().zip(from).for_each(|(into, from)| *into += from);
    };
    let finish =
        |bytes: &mut [u8]| bytemuck::cast_slice_mut::<_, f32>(bytes).iter_mut().for_each(|sum| *sum *= 2.0);
    let total: &mut SumKernel<'_> = &mut |first, others| {
        let floats = |bytes: &[u8]| bytemuck::cast_slice::<_, f32>(bytes).to_vec();
        let all: Vec<_> = iter::once(floats(first)).chain(others.iter().map(|other| floats(other))).collect();
        first.copy_from_slice(bytemuck::cast_slice(&oracle::all_reduce(&all, Reduction::Sum)));
    };
    let (program, scratch, due) = ((&plan, rank), &mut Scratch::new(), &deadline().into());
    if plan.is_fused() && meeting != FusedCall::InSteps {
        let own = bytemuck::cast_slice_mut(&mut buffer);
        let total = (meeting == FusedCall::AtOnce).then_some(total);
        signal_and_wait(direct, program, own, (combine, total), scratch, due).unwrap();
        finish(own);
        return buffer;
    }
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut buffer);
    let (lent, lends) = (bytes.to_vec(), algorithm.remote_access == RemoteAccess::Write);
    let own_part = partition.range(if lends { rank.index() } else { 0 });
    let own = if lends {
        OwnMemory::Lent { len: lent.len(), start: own_part.start, part: &mut bytes[own_part.clone()] }
    } else {
        OwnMemory::Borrowed(bytes)
    };
    let memory = &mut DirectMemory { own, partition, input, piece_bytes: 256 };
    let kernel = &mut ReductionKernel {
        combine: &mut { combine },
        finish: &mut { finish },
        complete: &mut |all| {
            let mut width = 1;
            while width < all.len() {
                for left in (0..all.len() - width).step_by(2 * width) {
                    let (lefts, rights) = all.split_at_mut(left + width);
                    combine(lefts[left], rights[0]);
                }
                width *= 2;
            }
            let (sum, others) = all.split_first_mut().expect("there are ranks");
            finish(sum);
            others.iter_mut().for_each(|other| other.copy_from_slice(sum));
        },
    };
    match exposed_memory(&plan, rank, memory) {
        ExposedMemory::Nothing => direct.enter(&plan, &[]),
        ExposedMemory::Read(bytes) => direct.enter(&plan, bytes),
        ExposedMemory::OwnMemory => direct.enter(&plan, &lent),
    }
    run(direct, program, plan.schedule(rank), memory, kernel, scratch, due).unwrap();
    if lends {
        let written = direct.memory();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut buffer);
        bytes[..own_part.start].copy_from_slice(&written[..own_part.start]);
        bytes[own_part.end..].copy_from_slice(&written[own_part.end..]);
    }
    buffer
}

/// Returns the expected result of a rank; `None` if it is unspecified.
fn promised(collective: DirectCollective, rank: usize, inputs: &[Vec<f32>], len: usize) -> Vec<Option<f32>> {
    let sums = || oracle::all_reduce(inputs, Reduction::Sum).into_iter().map(|sum| Some(sum * 2.0));
    let part = |owner: usize| owner * len..(owner + 1) * len;
    let parts = |of: &dyn Fn(usize) -> Vec<f32>| (0..inputs.len()).flat_map(of).map(Some).collect();
    match collective {
        DirectCollective::AllReduce => sums().collect(),
        DirectCollective::Reduce { root } if rank == root => sums().collect(),
        DirectCollective::ReduceScatter { .. } => {
            sums().enumerate().map(|(index, sum)| sum.filter(|_| part(rank).contains(&index))).collect()
        }
        DirectCollective::AllGather { .. } => parts(&|owner| inputs[owner][part(owner)].to_vec()),
        DirectCollective::Broadcast { root } => inputs[root].iter().copied().map(Some).collect(),
        DirectCollective::AllToAll => parts(&|owner| inputs[owner][part(rank)].to_vec()),
        _ => vec![None; inputs[rank].len()],
    }
}

#[rstest]
fn every_algorithm_gives_the_result_of_the_oracle(
    #[values(1, 2, 3, 4, 7, 8)] world_size: usize,
    #[values(0, 1, 3, 150, 1000)] len: usize,
    #[values(FusedCall::InSteps, FusedCall::ByPairs, FusedCall::AtOnce)] meeting: FusedCall,
) {
    let root = world_size - 1;
    let inputs: Vec<Vec<f32>> = (0..world_size).map(|rank| brought(rank, world_size, len)).collect();
    let algorithms = |collective: DirectCollective| {
        let served = ALGORITHMS.direct().filter(move |algorithm| algorithm.collective == collective.kind());
        served.map(move |algorithm| (collective, algorithm))
    };
    let calls: Vec<(DirectCollective, &DirectAlgorithm)> =
        DirectCollective::all(root).into_iter().flat_map(algorithms).collect();
    let results = on_every_rank(world_size, |rank, direct| {
        calls.iter().map(|&call| once(direct, rank, call, len, meeting)).collect::<Vec<_>>()
    });
    for (rank, results) in results.iter().enumerate() {
        for (&(collective, algorithm), result) in calls.iter().zip(results) {
            let promised = promised(collective, rank, &inputs, len);
            for (index, (promised, got)) in promised.into_iter().zip(result).enumerate() {
                let same = promised.is_none_or(|promised| promised.to_bits() == got.to_bits());
                assert!(
                    same,
                    "{collective:?} {algorithm:?}, rank {rank}, element {index}: {got}, not {promised:?}"
                );
            }
        }
    }
}

#[test]
fn memory_that_the_schedule_was_not_made_for_is_refused() {
    let rank = Rank::new(0, 1).unwrap();
    let error_of = |collective: DirectCollective,
                    algorithm: &'static DirectAlgorithm,
                    bytes: &mut [u8],
                    partition: Partition<'_>| {
        let mut direct = ThreadGroup { rank: 0, all: Arc::default(), bases: vec![0], generation: 0 };
        let memory =
            &mut DirectMemory { own: OwnMemory::Borrowed(bytes), partition, input: None, piece_bytes: 64 };
        let kernel =
            &mut ReductionKernel { combine: &mut |_, _| (), finish: &mut |_| (), complete: &mut |_| () };
        let (plan, scratch) =
            (DirectPlan::new((collective, algorithm), 1, 64, 512, SHARED).unwrap(), &mut Scratch::new());
        match run(
            &mut direct,
            (&plan, rank),
            plan.schedule(rank),
            memory,
            kernel,
            scratch,
            &deadline().into(),
        ) {
            Err(RunError::Schedule(error)) => error,
            other => panic!("{other:?}"),
        }
    };
    let error = |algorithm, bytes: &mut [u8], partition| {
        error_of(DirectCollective::AllReduce, algorithm, bytes, partition)
    };
    let partition = |bytes, parts| Partition::new(bytes, 1, parts).unwrap();
    use dist_algos::Error as Wrong;
    assert_eq!(
        error(&one_shot::ALL_REDUCE, &mut [0; 63], partition(64, 1)),
        Wrong::BufferLength { expected: 64, got: 63 }
    );
    assert_eq!(
        error(&one_shot::ALL_REDUCE, &mut [0; 64], partition(64, 2)),
        Wrong::Parts { expected: 1, got: 2 }
    );
    assert_eq!(error(&write_to_all::ALL_REDUCE, &mut [0; 64], partition(64, 1)), Wrong::Borrowed);
    let too_long = error(&one_shot::ALL_REDUCE, &mut [0; 2048], partition(2048, 1));
    assert_eq!(too_long, Wrong::Slots { needed: 2048, slot_bytes: 1024 });
    let too_long = error_of(
        DirectCollective::Broadcast { root: 0 },
        &one_shot::BROADCAST,
        &mut [0; 5000],
        partition(5000, 1),
    );
    assert_eq!(too_long, Wrong::Slots { needed: 5000, slot_bytes: 4096 });
}

#[test]
fn a_plan_fits_its_slots_or_there_is_none() {
    let plan = |parts: usize, bytes: usize| {
        DirectPlan::new((DirectCollective::AllToAll, &one_shot::ALL_TO_ALL), parts, bytes, 512, SHARED)
    };
    assert_eq!(plan(4, 1000).map(|plan| plan.blocks()), Some(8));
    assert_eq!(plan(17, 64), None, "seventeen places of 64 bytes do not fit");
    let root = DirectCollective::Broadcast { root: 3 };
    assert_eq!(DirectPlan::new((root, &one_shot::BROADCAST), 3, 64, 512, SHARED), None, "there is no rank 3");
    assert_eq!(DirectPlan::new((root, &staged::ALL_REDUCE), 4, 64, 512, SHARED), None);
}

#[rstest]
#[case(DirectCollective::AllGather { of: Source::Input }, &one_shot::ALL_GATHER, 2, (32 << 20) / 6 + 1)]
#[case(DirectCollective::AllGather { of: Source::Buffer }, &one_shot::ALL_GATHER, 4, (32 << 20) / 20 + 1)]
#[case(DirectCollective::AllToAll, &one_shot::ALL_TO_ALL, 4, 1 << 20)]
fn data_beyond_the_last_level_cache_is_copied_with_non_temporal_stores(
    #[case] collective: DirectCollective,
    #[case] algorithm: &'static DirectAlgorithm,
    #[case] world_size: usize,
    #[case] part_bytes: usize,
) {
    let shared = GroupLayout { slot_bytes: 256 << 10, ..SHARED };
    let leaves = |part_bytes| {
        let plan = DirectPlan::new((collective, algorithm), world_size, part_bytes, 256 << 10, shared);
        plan.unwrap().leaves_caches()
    };
    assert_eq!([part_bytes - 1, part_bytes].map(leaves), [false, true]);
}
