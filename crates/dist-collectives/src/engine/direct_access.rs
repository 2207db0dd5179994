//! Executes checked plans on memory that ranks share: the only unsafe module of this crate.
//!
//! # Why this is sound
//! This module upholds the contract of [`dist_transport::shm_group::ShmGroup`]:
//!
//! - **Steps.** [`CheckedPlan::new`] lets the verifier of direct schedules execute this plan for this number of ranks.
//!   The verifier considers any two accesses of different ranks to the same memory, of which at least one is a write.
//!   It proves that one access precedes a signal and that the other follows a wait for that signal. It also proves that
//!   no rank accesses the memory of another rank whose part of the call is over. If the proof fails, there is no
//!   checked plan and the operation uses messages. [`dist_algos::direct::run()`] and
//!   [`signal_and_wait`](dist_algos::direct::signal_and_wait) execute the steps of the plan for this rank and nothing
//!   else.
//! - **One plan on all ranks.** Every rank publishes a digest of the plan, the call and the call's number. It is
//!   compared with the digest of every other rank before anything else is read that the other rank wrote
//!   ([`CallEntry::plan_digest`]). The check does not rely on a [`Transport`](crate::Transport) comparing fingerprints,
//!   and the rank is read from the memory itself. Two different plans have equal digests with probability 2⁻⁶⁴.
//! - **Memory that others read** is borrowed by the call. If the call fails or panics, the memory is
//!   [abandoned](ShmGroup::abandon) before the borrow ends.
//! - **Memory that others write** is passed to the call by value. It is returned only when the call has ended.
//!
//! # Assumptions
//! The other processes that map the memory belong to the job: each has proven that it knows the secret. They run
//! the same version of this code on the plan that was agreed on. A process that writes into the memory outside of
//! the plan can change the results of other ranks.
#![allow(unsafe_code, reason = "memory that processes share is reached under the contract of `ShmGroup`")]

use std::collections::HashSet;
use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::sync::{LazyLock, Mutex, PoisonError};

use bytemuck::Pod;
use dist_algos::direct::{
    self, DirectMemory, DirectPlan, DirectStep, ExposedMemory, OwnMemory, ReductionKernel, verify,
};
use dist_algos::{AlgorithmTable, Partition, RunError, Scratch};
use dist_transport::shm_group::{
    AbandonHandle, CallEntry, DirectCall, ExposedRegion, ExposedView, GroupLayout, Lent, MemoryArea,
    ShmGroup, SlotUse, WordSize, WordUpdate,
};
use dist_transport::{Error as TransportError, Fingerprint, LazyDeadline, Rank, Result};

use crate::buffer::LentBuffer;
use crate::digest::digest;
use crate::{Buffer, Call};

/// A plan that was proven for this number of ranks, with the steps of one rank.
#[derive(Debug)]
pub(super) struct CheckedPlan {
    plan: DirectPlan,
    /// The rank's steps; empty if there are more than [`STEPS_MAX`].
    steps: Vec<DirectStep>,
    /// The entry of every call. Its digest covers the plan and the call, but not the call's number and the generation of
    /// the slots.
    entry: CallEntry,
}

/// Plans that were proven in this process, for any rank. Each plan is proven once.
static PROVEN: LazyLock<Mutex<HashSet<DirectPlan>>> = LazyLock::new(Mutex::default);

/// Returns `true` if a plan is proven, whatever calls come before and after it. Proves it if no plan of this process
/// did so before.
fn is_proven(plan: &DirectPlan) -> bool {
    let shortened = plan.shortened();
    let mut proven = PROVEN.lock().unwrap_or_else(PoisonError::into_inner);
    if proven.contains(&shortened) {
        return true;
    }
    let found =
        (0..2).try_for_each(|generation| verify::prove_alone(&plan.with_generation(generation)).map(drop));
    match found {
        Ok(()) => {
            if proven.len() == PROVEN_MAX {
                proven.clear();
            }
            proven.insert(shortened)
        }
        Err(error) => {
            tracing::error!(?plan, %error, "a plan is not proven: its operation uses messages");
            false
        }
    }
}

impl CheckedPlan {
    /// Returns the checked plan of a call; `None` if it is not proven. `table` numbers the call's algorithm.
    pub(super) fn new(plan: DirectPlan, rank: Rank, call: &Call, table: AlgorithmTable<'_>) -> Option<Self> {
        let plan = plan.with_generation(0);
        if plan.world_size() != rank.world_size() || !is_proven(&plan) {
            return None;
        }
        let steps: Vec<_> = plan.schedule(rank).take(STEPS_MAX + 1).collect();
        let steps = if steps.len() > STEPS_MAX { Vec::new() } else { steps };
        let plan_digest = digest([digest_of(&call.without_history().encode_with(table)), plan.digest()]);
        let signals = if plan.is_fused() { 1 } else { plan.signals() };
        let entry = CallEntry { rank, plan_digest, signals, slots: plan.use_of_slots() };
        Some(Self { plan, steps, entry })
    }

    #[inline(always)]
    pub(super) const fn plan(&self) -> &DirectPlan {
        &self.plan
    }

    /// Sets the generation of the slots.
    #[inline(always)]
    pub(super) const fn set_generation(&mut self, generation: usize) {
        self.plan = self.plan.with_generation(generation);
    }

    /// Returns the entry of the call with this number and the current generation of the slots.
    #[inline(always)]
    const fn entry(&self, number: u64) -> CallEntry {
        let generation = self.plan.generation() as u64;
        // With odd factors, consecutive calls of one plan get different values.
        let plan_digest = self
            .entry
            .plan_digest
            .wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
            .wrapping_add(generation.wrapping_mul(0xc4ce_b9fe_1a85_ec53));
        CallEntry { plan_digest, ..self.entry }
    }

    /// Executes the call with this number as one fused barrier. Other ranks only see copies of the memory.
    #[inline(always)]
    pub(super) fn signal_and_wait(
        &self,
        number: u64,
        shm_group: &mut dyn ShmGroup,
        own: &mut [u8],
        arithmetic: (impl FnMut(&mut [u8], &[u8]), Option<impl FnMut(&mut [u8], &[&[u8]])>),
        scratch: &mut Scratch,
        due: &LazyDeadline<'_>,
    ) -> Result<(), RunError<TransportError>> {
        let access = &mut CheckedAccess { shm_group, entry: self.entry(number) };
        direct::signal_and_wait(access, (&self.plan, self.entry.rank), own, arithmetic, scratch, due)
    }

    /// Executes the call with this number on memory that other ranks only read.
    pub(super) fn run(
        &self,
        number: u64,
        shm_group: &mut dyn ShmGroup,
        memory: &mut DirectMemory<'_>,
        kernel: &mut ReductionKernel<'_>,
        scratch: &mut Scratch,
        due: &LazyDeadline<'_>,
    ) -> Result<(), RunError<TransportError>> {
        let exposed = match direct::exposed_memory(&self.plan, self.entry.rank, memory) {
            ExposedMemory::Nothing => ExposedRegion::Nothing,
            ExposedMemory::Read(bytes) => ExposedRegion::Read(bytes),
            ExposedMemory::OwnMemory => unreachable!("memory that other ranks write is lent"),
        };
        let mut entered = EnteredCall::enter(shm_group, self.entry(number), exposed, due)?;
        self.do_steps(&mut entered.access, memory, kernel, scratch, due)?;
        entered.end();
        Ok(())
    }

    /// Executes the call with this number on memory that other ranks write. Returns the memory if every rank is
    /// known to have finished; otherwise the memory is never used again.
    #[inline(never)]
    pub(super) fn run_lent(
        &self,
        number: u64,
        shm_group: &mut dyn ShmGroup,
        (mut lent, partition, piece_bytes): (Lent, Partition<'_>, usize),
        kernel: &mut ReductionKernel<'_>,
        scratch: &mut Scratch,
        due: &LazyDeadline<'_>,
    ) -> (Result<(), RunError<TransportError>>, Option<Lent>) {
        let len = lent.bytes().len();
        let part = partition.range(self.entry.rank.index());
        let start = lent.bytes_mut()[part.clone()].as_mut_ptr();
        let entry = self.entry(number);
        let mut entered = match EnteredCall::enter(&mut *shm_group, entry, ExposedRegion::Write(lent), due) {
            Ok(entered) => entered,
            Err(error) => return (Err(error), None),
        };
        // SAFETY: the bytes are initialised and lie in `lent`, which the call now owns and does not move. Nothing
        // else in this process accesses them until `take_back` below. Other ranks write only the other parts: the
        // proof shows that this rank writes its own part without a signal of theirs between.
        let own_part = unsafe { std::slice::from_raw_parts_mut(start, part.len()) };
        let own = OwnMemory::Lent { len, start: part.start, part: own_part };
        let memory = &mut DirectMemory { own, partition, input: None, piece_bytes };
        let done = self.do_steps(&mut entered.access, memory, kernel, scratch, due);
        entered.end();
        (done, shm_group.reclaim())
    }

    #[inline(always)]
    fn do_steps(
        &self,
        access: &mut CheckedAccess<'_>,
        memory: &mut DirectMemory<'_>,
        kernel: &mut ReductionKernel<'_>,
        scratch: &mut Scratch,
        due: &LazyDeadline<'_>,
    ) -> Result<(), RunError<TransportError>> {
        let (plan, rank) = (&self.plan, self.entry.rank);
        match &*self.steps {
            [] => direct::run(access, (plan, rank), plan.schedule(rank), memory, kernel, scratch, due),
            steps => direct::run(access, (plan, rank), steps, memory, kernel, scratch, due),
        }
    }
}

/// A call that this rank has entered. If it is dropped before its [end](Self::end), the call is abandoned.
struct EnteredCall<'a> {
    access: CheckedAccess<'a>,
    has_ended: bool,
}

impl<'a> EnteredCall<'a> {
    #[inline(always)]
    fn enter(
        shm_group: &'a mut dyn ShmGroup,
        entry: CallEntry,
        exposed: ExposedRegion<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<Self, RunError<TransportError>> {
        // SAFETY: the contract is upheld as the module documentation says. The callers borrow the exposed memory
        // for longer than `Self` lives, or lend it.
        let entered = unsafe { shm_group.enter(entry, exposed, due) };
        // If `enter` failed, nothing is exposed.
        entered.map_err(|source| RunError::Transport { step: 0, source })?;
        Ok(Self { access: CheckedAccess { shm_group, entry }, has_ended: false })
    }

    /// Marks the call as complete: no rank accesses this rank's memory any more.
    fn end(mut self) {
        self.has_ended = true;
    }
}

impl Drop for EnteredCall<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.access.shm_group.abandon();
        }
    }
}

/// Access to shared memory for the runner of a checked plan.
struct CheckedAccess<'a> {
    shm_group: &'a mut dyn ShmGroup,
    entry: CallEntry,
}

impl direct::DirectAccess for CheckedAccess<'_> {
    fn shared(&self) -> GroupLayout {
        self.shm_group.shared()
    }

    fn publish(&mut self, place: MemoryArea, offset: usize, bytes: &[u8]) {
        // SAFETY: the module documentation says how the contract is upheld.
        unsafe { self.shm_group.publish(place, offset, bytes) };
    }

    fn signal(&mut self) {
        // SAFETY: the module documentation says how the contract is upheld.
        unsafe { self.shm_group.signal() };
    }

    fn wait(&mut self, rank: usize, signals: u32, due: &LazyDeadline<'_>) -> Result<()> {
        self.shm_group.wait(rank, signals, due)
    }

    #[inline(always)]
    fn signal_and_wait(
        &mut self,
        _: Rank,
        slots: SlotUse,
        to: (usize, MemoryArea, usize),
        bytes: &[u8],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let entry = CallEntry { slots, ..self.entry };
        // SAFETY: the module documentation says how the contract is upheld.
        unsafe { self.shm_group.signal_and_wait(entry, to, bytes, due) }
    }

    #[inline(always)]
    fn view(
        &mut self,
        rank: usize,
        place: MemoryArea,
        range: Range<usize>,
        read: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        // SAFETY: the module documentation says how the contract is upheld.
        unsafe { self.shm_group.view(rank, place, range, read) }
    }

    #[inline(always)]
    fn view_all(
        &mut self,
        place: MemoryArea,
        there: &[(usize, usize)],
        len: usize,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()> {
        // SAFETY: the module documentation says how the contract is upheld.
        unsafe { self.shm_group.view_all(place, there, len, read) }
    }

    fn read(&mut self, rank: usize, place: MemoryArea, offset: usize, into: &mut [u8]) -> Result<()> {
        // SAFETY: the module documentation says how the contract is upheld.
        unsafe { self.shm_group.read(rank, place, offset, into) }
    }

    fn read_non_temporal(
        &mut self,
        rank: usize,
        place: MemoryArea,
        offset: usize,
        into: &mut [u8],
    ) -> Result<()> {
        // SAFETY: the module documentation says how the contract is upheld.
        unsafe { self.shm_group.read_non_temporal(rank, place, offset, into) }
    }

    fn copy(&mut self, from: &[u8], into: &mut [u8]) {
        self.shm_group.copy(from, into);
    }

    fn copy_non_temporal(&mut self, from: &[u8], into: &mut [u8]) {
        self.shm_group.copy_non_temporal(from, into);
    }

    fn write(&mut self, rank: usize, place: MemoryArea, offset: usize, bytes: &[u8]) -> Result<()> {
        // SAFETY: the module documentation says how the contract is upheld.
        unsafe { self.shm_group.write(rank, place, offset, bytes) }
    }

    fn change(
        &mut self,
        place: MemoryArea,
        there: &[(usize, usize)],
        len: usize,
        change: &mut dyn FnMut(&mut [&mut [u8]]),
    ) -> Result<bool> {
        // SAFETY: the module documentation says how the contract is upheld.
        unsafe { self.shm_group.change(place, there, len, change) }
    }

    fn wake_waiters(&mut self) {
        self.shm_group.wake_waiters();
    }

    fn update_exposed(&mut self, memory: &[u8]) {
        self.shm_group.update_exposed(memory);
    }
}

/// A buffer that every rank lets the others read until all ranks have closed it. It is one call with two signals of
/// each rank: when its buffer may be read, and when it no longer reads.
///
/// The buffer belongs to this type until then, and nobody can write to it. The plan of this call therefore needs no
/// other proof.
#[derive(Debug)]
pub(crate) struct WindowBuffer<T> {
    // Dropped before the buffer: this tells the other ranks that they must not read any more.
    shared: Option<WindowCall>,
    /// The buffer of each rank that is mapped here. Empty in a world of one rank.
    views: Vec<Option<ExposedView>>,
    buffer: Buffer<T>,
}

#[derive(Debug)]
struct WindowCall {
    call: DirectCall,
    abandon: AbandonHandle,
    has_closed: bool,
}

/// The number of signals of a rank that has opened its window.
const OPENED: u32 = 1;
/// The number of signals of a rank that has closed its window.
const CLOSED: u32 = 2;

impl<T: Pod + Send + Sync> WindowBuffer<T> {
    /// Wraps the buffer of a world of one rank.
    pub(super) const fn alone(buffer: Buffer<T>) -> Self {
        Self { shared: None, views: Vec::new(), buffer }
    }

    /// Exposes a buffer for reading, and waits until every other rank has done the same.
    ///
    /// # Errors
    /// Those of the transport, together with the buffer.
    pub(super) fn open(
        buffer: Buffer<T>,
        shm_group: &mut dyn ShmGroup,
        rank: Rank,
        call: &Call,
        due: &LazyDeadline<'_>,
    ) -> Result<Self, (Buffer<T>, TransportError)> {
        let entry = CallEntry {
            rank,
            plan_digest: digest_of(&call.encode()),
            signals: CLOSED,
            slots: SlotUse::Unused,
        };
        let exposed = ExposedRegion::Read(bytemuck::cast_slice(&buffer[..]));
        // SAFETY: the documentation of this type says how the contract is upheld.
        if let Err(error) = unsafe { shm_group.enter(entry, exposed, due) } {
            return Err((buffer, error));
        }
        let (call, abandon) = (shm_group.call(), shm_group.abandon_handle());
        let shared = Some(WindowCall { call, abandon, has_closed: false });
        let mut open = Self { shared, views: vec![None; rank.world_size()], buffer };
        match open.view_others(shm_group, rank, due) {
            Ok(()) => Ok(open),
            Err(error) => Err((open.into_buffer(), error)),
        }
    }

    /// Signals that this rank's buffer may be read, waits until the other ranks have signalled the same, and looks up
    /// their buffers.
    fn view_others(
        &mut self,
        shm_group: &mut dyn ShmGroup,
        rank: Rank,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        open_with_others(shm_group, rank, due)?;
        for peer in others(rank) {
            // SAFETY: the peer has signalled that its memory may be read.
            self.views[peer] = unsafe { shm_group.exposed_view(peer, size_of_val(&self.buffer[..])) }?;
        }
        Ok(())
    }

    /// Returns the elements of a rank's buffer. Returns `None` if they are not mapped here.
    pub(crate) fn view(&self, rank: usize) -> Option<&[T]> {
        let view = self.views.get(rank)?.as_ref()?;
        // SAFETY: the peer has signalled that its buffer may be read. It changes no byte before this rank's second
        // signal, which takes `self` mutably. After it has dropped its window, it changes pages of its own only.
        Some(bytemuck::cast_slice(unsafe { view.bytes() }))
    }

    /// Copies elements of another rank's buffer, from `start` on.
    ///
    /// # Errors
    /// Those of the transport; `None` if the memory of the group is already in another call.
    pub(super) fn read(
        &self,
        shm_group: &mut dyn ShmGroup,
        (peer, start): (usize, usize),
        into: &mut [T],
    ) -> Result<(), Option<TransportError>> {
        self.shared.as_ref().filter(|open| open.call == shm_group.call()).ok_or(None)?;
        let (offset, into) = (start * size_of::<T>(), bytemuck::cast_slice_mut(into));
        // SAFETY: the peer has signalled that its buffer may be read. It waits for this rank's second signal before it
        // uses the buffer again.
        unsafe { shm_group.read(peer, MemoryArea::Exposed, offset, into) }?;
        shm_group.wake_waiters();
        Ok(())
    }

    /// Waits until no rank reads any more. After an error, drop this window.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub(super) fn close(
        &mut self,
        shm_group: &mut dyn ShmGroup,
        rank: Rank,
        due: &LazyDeadline<'_>,
    ) -> Result<(), Option<TransportError>> {
        let open = self.shared.as_mut().filter(|open| open.call == shm_group.call() && !open.has_closed);
        let open = open.ok_or(None)?;
        // SAFETY: this rank reads no more, since `self` is closed or about to be dropped.
        unsafe { shm_group.signal() };
        others(rank).try_for_each(|peer| shm_group.wait(peer, CLOSED, due))?;
        shm_group.wake_waiters();
        open.has_closed = true;
        Ok(())
    }

    /// Returns the buffer. If not all ranks have closed it, ranks that still read it do not see later writes.
    pub(crate) fn into_buffer(self) -> Buffer<T> {
        drop(self.shared);
        self.buffer
    }
}

/// Signals that the other ranks may read the exposed memory, and waits until they have signalled the same.
fn open_with_others(shm_group: &mut dyn ShmGroup, rank: Rank, due: &LazyDeadline<'_>) -> Result<()> {
    // SAFETY: this rank's bytes may be read from here on.
    unsafe { shm_group.signal() };
    for peer in others(rank) {
        shm_group.wait(peer, OPENED, due)?;
        // Looks up the peer's memory now, within the deadline of the call, and not when something is read.
        // SAFETY: the peer has signalled that its memory may be read, and zero bytes are read.
        unsafe { shm_group.read(peer, MemoryArea::Exposed, 0, &mut []) }?;
    }
    shm_group.wake_waiters();
    Ok(())
}

impl<T: Pod + Send + Sync> Deref for WindowBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.buffer
    }
}

/// A buffer that every rank changes by atomic operations until all ranks have closed it. It is one call with two
/// signals of each rank: when its buffer may be changed, and when it changes no more.
///
/// The buffer is lent to the call. All ranks use words of one size, which depends on the type of the elements.
#[derive(Debug)]
pub(crate) struct UpdatedBuffer<T> {
    call: DirectCall,
    lent: LentBuffer,
    element: PhantomData<T>,
}

impl<T: Pod + Send + Sync> UpdatedBuffer<T> {
    const WORD: WordSize = WordSize::of_element(size_of::<T>());

    /// Lends a buffer to all ranks, and waits until every other rank has done the same. After an error the buffer is
    /// empty, because other ranks may change it.
    pub(super) fn open(
        buffer: &mut Buffer<T>,
        shm_group: &mut dyn ShmGroup,
        rank: Rank,
        call: &Call,
        due: &LazyDeadline<'_>,
    ) -> Result<Self> {
        let entry = CallEntry {
            rank,
            plan_digest: digest_of(&call.encode()),
            signals: CLOSED,
            slots: SlotUse::Unused,
        };
        let (lent, memory) = buffer.lend();
        // SAFETY: until `close` has succeeded, ranks access the memory by the two functions below only, with words of
        // one size, since the call contains the type of the elements. The group owns the memory.
        unsafe { shm_group.enter(entry, ExposedRegion::Write(memory), due) }?;
        let open = Self { call: shm_group.call(), lent, element: PhantomData };
        // SAFETY: this rank's words may be changed from here on.
        unsafe { shm_group.signal() };
        for peer in others(rank) {
            shm_group.wait(peer, OPENED, due)?;
        }
        for peer in 0..rank.world_size() {
            // Looks up the memory now, within the deadline of the call.
            // SAFETY: the rank has signalled, and no words are stored.
            unsafe { shm_group.store_words(peer, 0, Self::WORD, &[]) }?;
        }
        shm_group.wake_waiters();
        Ok(open)
    }

    /// Stores elements into a rank's buffer, from `start` on.
    ///
    /// # Errors
    /// Those of the transport; `None` if the memory of the group is already in another call.
    pub(super) fn store(
        &self,
        shm_group: &mut dyn ShmGroup,
        (rank, start): (usize, usize),
        elements: &[T],
    ) -> Result<(), Option<TransportError>> {
        let group = self.current(shm_group)?;
        let (offset, bytes) = (start * size_of::<T>(), bytemuck::cast_slice(elements));
        // SAFETY: the rank has signalled that its buffer may be changed. It takes the buffer back after this rank's
        // second signal.
        Ok(unsafe { group.store_words(rank, offset, Self::WORD, bytes) }?)
    }

    /// Performs an atomic operation on an element that is one word, and returns the value from before.
    ///
    /// # Errors
    /// As for [`store`](Self::store).
    pub(super) fn update(
        &self,
        shm_group: &mut dyn ShmGroup,
        (rank, element): (usize, usize),
        update: WordUpdate,
    ) -> Result<u64, Option<TransportError>> {
        const { assert!(size_of::<T>() == Self::WORD.bytes(), "an element is one word") };
        let group = self.current(shm_group)?;
        // SAFETY: as for `store`.
        Ok(unsafe { group.update_word(rank, element * size_of::<T>(), Self::WORD, update) }?)
    }

    /// Waits until no rank changes a buffer any more, and returns this rank's buffer.
    ///
    /// # Errors
    /// As for [`store`](Self::store). The buffer is lost, because other ranks may still change it.
    pub(super) fn close(
        self,
        shm_group: &mut dyn ShmGroup,
        rank: Rank,
        due: &LazyDeadline<'_>,
    ) -> Result<Buffer<T>, Option<TransportError>> {
        let group = self.current(shm_group)?;
        // SAFETY: this rank changes nothing more, since `self` is consumed.
        unsafe { group.signal() };
        others(rank).try_for_each(|peer| group.wait(peer, CLOSED, due))?;
        group.wake_waiters();
        let mut buffer = Buffer::from(Vec::new());
        buffer.take_back(self.lent, group.reclaim().ok_or(None)?);
        Ok(buffer)
    }

    fn current<'a>(
        &self,
        shm_group: &'a mut dyn ShmGroup,
    ) -> Result<&'a mut dyn ShmGroup, Option<TransportError>> {
        if shm_group.call() == self.call { Ok(shm_group) } else { Err(None) }
    }
}

impl Drop for WindowCall {
    fn drop(&mut self) {
        if !self.has_closed {
            self.abandon.now();
        }
    }
}

/// Returns a digest of an encoded call.
fn digest_of(Fingerprint(bytes): &Fingerprint) -> u64 {
    digest(bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes"))))
}

/// Returns the other ranks, counted upwards from this one.
fn others(rank: Rank) -> impl Iterator<Item = usize> {
    (1..rank.world_size()).map(move |distance| rank.plus(distance).index())
}

/// Maximum number of steps that are stored. For longer plans the time to compute the steps does not matter.
const STEPS_MAX: usize = 64;
/// Maximum number of plans that are remembered as proven.
const PROVEN_MAX: usize = 4096;
