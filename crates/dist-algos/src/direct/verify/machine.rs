//! The symbolic memory of all ranks: the content of every location and its last accesses.

use std::iter::Peekable;

use dist_transport::shm_group::{CALLS_MAX, MemoryArea};
use smallvec::SmallVec;

use super::DirectReport;
use super::clock::{KnownSignals, SignalClock};
use crate::direct::{DirectCollective, DirectPlan, DirectStep, PartSet, PeerSet, RemoteAccess, SumTarget};
use crate::{Error, Result, Source};

/// The location of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Location {
    /// The cell is in a rank's own memory.
    OwnMemory { of: Source, part: usize, block: usize },
    /// The cell is at a place of the flag line, the eager buffer or a slot, of this generation.
    Published { generation: usize, of: MemoryArea, place: usize },
}

/// The content of a location.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CellContent {
    /// The data that a rank brought to a call.
    Brought { call: usize, rank: usize, of: Source, part: usize, block: usize },
    /// The finished sum of all ranks' data, in canonical order.
    Sum { call: usize, part: usize, block: usize },
}

/// The accesses to a location. An access is a rank and the number of signals that it had given before.
#[derive(Clone, Debug, Default)]
struct Visits {
    held: Option<CellContent>,
    written: Option<(usize, usize)>,
    read: SmallVec<[(usize, usize); 1]>,
}

/// The locations of one rank that were ever used. Rows and columns are added when they are first used.
#[derive(Debug, Default)]
struct RankCells {
    /// For each block, the parts of the buffer, then those of the input.
    own: Vec<Vec<Visits>>,
    /// For each kind of place and generation, the places.
    published: Vec<Vec<Visits>>,
}

/// A rank's knowledge about the signals of other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Knowledge {
    /// The signals that the rank has waited for, and everything that the signalling ranks knew.
    All,
    /// Only the signals that the rank has waited for itself. A proof with this knowledge is faster, and also holds
    /// with all knowledge.
    Awaited,
}

/// The memory and the clocks of all ranks during consecutive calls.
pub(super) struct DirectMachine {
    ranks: Vec<DirectRank>,
    memory: Vec<RankCells>,
    knowledge: Knowledge,
    calls: usize,
    /// The number of signals of each rank before each call.
    bases: Vec<usize>,
    steps: usize,
}

struct DirectRank {
    /// The signals of all ranks that this rank knows of; for itself, those that it has given.
    clock: SignalClock,
    /// The clock at each of its signals, and the length of the chain of signals up to there.
    signalled: Vec<(KnownSignals, usize)>,
    rounds: usize,
}

/// The position of one rank in one call.
struct CallPosition<'a> {
    plan: &'a DirectPlan,
    rank: usize,
    step: usize,
}

impl RankCells {
    /// Returns the accesses to a location.
    fn visits(&mut self, location: Location) -> &mut Visits {
        let (rows, row, column) = match location {
            Location::OwnMemory { of, part, block } => {
                (&mut self.own, 2 * block + usize::from(of == Source::Input), part)
            }
            Location::Published { generation, of, place } => {
                let kind = match of {
                    MemoryArea::FlagLine => 0,
                    MemoryArea::EagerBuffer => 1,
                    MemoryArea::Slot(slot) => 2 + slot,
                    MemoryArea::Exposed => unreachable!("data is never published in exposed memory"),
                };
                (&mut self.published, kind * CALLS_MAX + generation, place)
            }
        };
        grown(grown(rows, row), column)
    }
}

/// Returns an element of a list, which is made longer if it is too short.
fn grown<T: Default>(list: &mut Vec<T>, index: usize) -> &mut T {
    if list.len() <= index {
        list.resize_with(index + 1, T::default);
    }
    &mut list[index]
}

impl DirectMachine {
    pub(super) fn new(world_size: usize, knowledge: Knowledge) -> Self {
        let state = |_| DirectRank { clock: SignalClock::new(world_size), signalled: Vec::new(), rounds: 0 };
        Self {
            ranks: (0..world_size).map(state).collect(),
            memory: (0..world_size).map(|_| RankCells::default()).collect(),
            knowledge,
            calls: 0,
            bases: Vec::new(),
            steps: 0,
        }
    }

    pub(super) fn report(&self) -> DirectReport {
        let rounds = self.ranks.iter().map(|state| state.rounds).max().unwrap_or(0);
        DirectReport { calls: self.calls, rounds, steps: self.steps }
    }

    /// Executes one call, in which each rank executes the steps of its program.
    pub(super) fn call(
        &mut self,
        plan: &DirectPlan,
        programs: impl IntoIterator<Item = impl IntoIterator<Item = DirectStep>>,
    ) -> Result<()> {
        let mut programs: Vec<_> =
            programs.into_iter().map(|program| program.into_iter().peekable()).collect();
        self.bases.push(self.ranks.first().map_or(0, |state| state.clock.of(0)));
        for rank in 0..self.ranks.len() {
            self.begin(plan, rank)?;
        }
        let mut next = vec![0; self.ranks.len()];
        let mut entered = vec![false; self.ranks.len()];
        loop {
            let mut moved = false;
            for rank in 0..self.ranks.len() {
                entered[rank] = entered[rank] || self.enter(rank, plan);
                while entered[rank]
                    && let Some(&step) = programs[rank].peek()
                    && self.step(&CallPosition { plan, rank, step: next[rank] }, step)?
                {
                    programs[rank].next();
                    next[rank] += 1;
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        self.deadlock(&mut programs, &next)?;
        for (rank, &steps) in next.iter().enumerate() {
            self.end(&CallPosition { plan, rank, step: steps })?;
        }
        self.calls += 1;
        Ok(())
    }

    /// Records the writes of the caller before a call: it fills the memory that the call reads.
    fn begin(&mut self, plan: &DirectPlan, rank: usize) -> Result<()> {
        let at = CallPosition { plan, rank, step: 0 };
        for (location, held) in brought(plan, rank, self.calls) {
            self.write(&at, (rank, location), held)?;
        }
        Ok(())
    }

    /// Returns `true` if every rank is known to have left the calls whose places are reused.
    fn enter(&mut self, rank: usize, plan: &DirectPlan) -> bool {
        let awaited_call = plan.use_of_slots().awaited_call(self.calls);
        if awaited_call == 0 {
            return true;
        }
        let signals = self.bases[awaited_call - 1] + 1;
        (0..self.ranks.len()).all(|peer| peer == rank || self.acquire(rank, peer, signals))
    }

    /// Returns the number of signals of each rank before this call.
    fn base(&self) -> usize {
        self.bases[self.calls]
    }

    /// Executes a step. Returns `false` if it has to wait.
    fn step(&mut self, at: &CallPosition<'_>, step: DirectStep) -> Result<bool> {
        let rank = at.rank;
        self.validate(at, step)?;
        match step {
            DirectStep::Publish { parts, block, of, place } => {
                for part in parts.indices(at.plan.parts()) {
                    let held = self.read(at, part, (rank, Location::OwnMemory { of, part, block }))?;
                    let there = self.published(at.plan, rank, place, (part, block));
                    self.write(at, there, Some(held))?;
                }
            }
            DirectStep::Signal => self.signal(rank),
            DirectStep::Wait { ranks, signals } => {
                let signals = self.base() + signals as usize;
                let mut peers = ranks.ranks(rank, self.ranks.len());
                if !peers.all(|peer| self.acquire(rank, peer, signals)) {
                    return Ok(false);
                }
            }
            DirectStep::Reduce { part, block, of, into } => self.reduce(at, (part, block), of, into)?,
            DirectStep::Take { from, part, block, of, into } => {
                let held = self.read(at, part, self.there(at.plan, from, of, (part, block)))?;
                self.write(at, (rank, own(into, block)), Some(held))?;
            }
            DirectStep::Keep { part, block } => {
                let held =
                    self.read(at, part, (rank, Location::OwnMemory { of: Source::Input, part, block }))?;
                self.write(at, (rank, own(part, block)), Some(held))?;
            }
        }
        self.steps += 1;
        Ok(true)
    }

    fn signal(&mut self, rank: usize) {
        let state = &mut self.ranks[rank];
        state.clock.signal(rank);
        let known =
            if self.knowledge == Knowledge::All { state.clock.known() } else { KnownSignals::default() };
        state.signalled.push((known, state.rounds + 1));
    }

    /// Merges the vector clock that `peer` had at its signal number `signals` into the clock of `rank`. Returns
    /// `false` if the peer has not given that signal yet.
    fn acquire(&mut self, rank: usize, peer: usize, signals: usize) -> bool {
        if self.ranks[rank].clock.of(peer) >= signals {
            return true;
        }
        let both = self.ranks.get_disjoint_mut([rank, peer]);
        let [state, other] = both.expect("a rank waits only for others, which exist");
        let Some((known, rounds)) = other.signalled.get(signals - 1) else { return false };
        state.clock.learn(known);
        state.clock.learn_of(peer, signals);
        state.rounds = state.rounds.max(*rounds);
        true
    }

    fn reduce(
        &mut self,
        at: &CallPosition<'_>,
        (part, block): (usize, usize),
        of: MemoryArea,
        into: SumTarget,
    ) -> Result<()> {
        let plan = at.plan;
        for rank in 0..self.ranks.len() {
            let from = if rank == at.rank {
                (rank, own(part, block))
            } else {
                self.there(plan, rank, of, (part, block))
            };
            let held = self.read(at, part, from)?;
            let of = at.plan.collective().source();
            let expected = CellContent::Brought { call: self.calls, rank, of, part, block };
            if held != expected {
                return Err(Error::WrongResult { rank: at.rank, steps: at.step, chunk: part });
            }
        }
        let sum = Some(CellContent::Sum { call: self.calls, part, block });
        self.write(at, (at.rank, own(part, block)), sum)?;
        match into {
            SumTarget::Buffer => {}
            SumTarget::Back(ranks) => {
                for peer in ranks.ranks(at.rank, self.ranks.len()) {
                    self.write(at, self.there(plan, peer, of, (part, block)), sum)?;
                }
            }
        }
        Ok(())
    }

    /// Reads a cell of this part from another rank.
    fn read(
        &mut self,
        at: &CallPosition<'_>,
        part: usize,
        (of, location): (usize, Location),
    ) -> Result<CellContent> {
        let clock = &self.ranks[at.rank].clock;
        let epoch = (at.rank, clock.of(at.rank));
        let visits = self.memory[of].visits(location);
        race(at, clock, of, visits.written)?;
        if visits.read.last() != Some(&epoch) {
            visits.read.push(epoch);
        }
        visits.held.ok_or(Error::Unwritten { rank: at.rank, step: at.step, chunk: part })
    }

    fn write(
        &mut self,
        at: &CallPosition<'_>,
        (of, location): (usize, Location),
        held: Option<CellContent>,
    ) -> Result<()> {
        let clock = &self.ranks[at.rank].clock;
        let epoch = (at.rank, clock.of(at.rank));
        let visits = self.memory[of].visits(location);
        visits
            .written
            .into_iter()
            .chain(visits.read.iter().copied())
            .try_for_each(|visit| race(at, clock, of, Some(visit)))?;
        (visits.held, visits.written) = (held, Some(epoch));
        visits.read.clear();
        Ok(())
    }

    /// Returns an error if a rank waits for a signal that is never given.
    fn deadlock(
        &self,
        programs: &mut [Peekable<impl Iterator<Item = DirectStep>>],
        next: &[usize],
    ) -> Result<()> {
        let waiting: Vec<Option<DirectStep>> =
            programs.iter_mut().map(|program| program.peek().copied()).collect();
        let blocked = waiting.iter().flatten().count();
        let Some(rank) = waiting.iter().position(Option::is_some) else { return Ok(()) };
        let step = next[rank];
        let peer = match waiting[rank] {
            Some(DirectStep::Wait { ranks, signals }) => ranks
                .ranks(rank, next.len())
                .find(|&peer| self.ranks[peer].signalled.len() < self.base() + signals as usize),
            _ => None,
        };
        let peer = peer.unwrap_or(rank);
        let peer_step = waiting[peer].map(|_| next[peer]);
        Err(Error::Deadlock { rank, step, peer, peer_step, blocked })
    }

    /// Ends the call of a rank. Checks that it has given all signals and has the right result. Its memory then
    /// belongs to the caller again.
    fn end(&mut self, at: &CallPosition<'_>) -> Result<()> {
        let CallPosition { plan, rank, step: steps } = *at;
        let got = self.ranks[rank].clock.of(rank) - self.base();
        if got != plan.signals() as usize {
            let got = u32::try_from(got).unwrap_or(u32::MAX);
            return Err(Error::Signals { rank, expected: plan.signals(), got });
        }
        for block in 0..plan.blocks() {
            for part in 0..plan.parts() {
                let held = self.memory[rank].visits(own(part, block)).held;
                let expected = promised(plan, rank, (part, block), self.calls);
                if expected.is_some() && held != expected {
                    return Err(Error::WrongResult { rank, steps, chunk: part });
                }
            }
        }
        if plan.collective() == DirectCollective::Barrier {
            self.has_waited(rank)?;
        }
        for (location, _) in brought(plan, rank, self.calls) {
            self.write(at, (rank, location), None)?;
        }
        Ok(())
    }

    /// Checks that a rank knows, by signals, that every other rank has entered this call.
    fn has_waited(&self, rank: usize) -> Result<()> {
        let absent = (0..self.ranks.len())
            .find(|&peer| peer != rank && self.ranks[rank].clock.of(peer) <= self.base());
        absent.map_or(Ok(()), |absent| Err(Error::LeavesEarly { rank, absent }))
    }

    /// Checks that the parts, blocks, ranks and places that a step names exist.
    fn validate(&self, at: &CallPosition<'_>, step: DirectStep) -> Result<()> {
        let (world_size, parts) = (self.ranks.len(), at.plan.parts());
        let (rank, index) = (at.rank, at.step);
        let peer = |peer: usize| {
            let exists = peer < world_size && peer != rank;
            if exists { Ok(()) } else { Err(Error::NoPeer { rank, step: index, peer }) }
        };
        let cell = |part: usize, block: usize| {
            let exists = part < parts && block < at.plan.blocks();
            let chunks = crate::Chunks::one(part);
            if exists { Ok(()) } else { Err(Error::NoChunk { rank, step: index, chunks, parts }) }
        };
        let open = at.plan.algorithm().remote_access;
        let place = |place: MemoryArea| match place {
            MemoryArea::Slot(slot) if slot >= at.plan.slots() => {
                Err(Error::BadSlot { rank, step: index, slot })
            }
            MemoryArea::Exposed if open == RemoteAccess::Nothing => Err(Error::Closed { rank, step: index }),
            _ => Ok(()),
        };
        match step {
            DirectStep::Publish {
                parts: PartSet::One(part) | PartSet::Others(part),
                block,
                place: to,
                ..
            } => {
                if to == MemoryArea::Exposed
                    || to == MemoryArea::FlagLine && self.ranks[rank].clock.of(rank) > self.base()
                {
                    return Err(Error::BadSlot { rank, step: index, slot: 0 });
                }
                cell(part, block).and_then(|()| place(to))
            }
            DirectStep::Wait { ranks: PeerSet::One(one), .. } => peer(one),
            DirectStep::Keep { part, block } => cell(part, block),
            DirectStep::Signal | DirectStep::Wait { .. } => Ok(()),
            DirectStep::Reduce { part, block, of, into } => {
                let target = match (into, of) {
                    (SumTarget::Buffer, _) => Ok(()),
                    (SumTarget::Back(PeerSet::One(one)), MemoryArea::Slot(_)) => peer(one),
                    (SumTarget::Back(PeerSet::Others), MemoryArea::Slot(_)) => Ok(()),
                    (SumTarget::Back(_), MemoryArea::Exposed) if open == RemoteAccess::Write => Ok(()),
                    (SumTarget::Back(_), _) => Err(Error::Closed { rank, step: index }),
                };
                cell(part, block).and_then(|()| place(of)).and(target)
            }
            DirectStep::Take { from, part, block, of, into } => Ok(from)
                .and_then(|from| if from == rank && of != MemoryArea::Exposed { Ok(()) } else { peer(from) })
                .and_then(|()| cell(part, block))
                .and_then(|()| cell(into, block))
                .and_then(|()| place(of)),
        }
    }

    /// Returns the location of another rank's cell.
    fn there(
        &self,
        plan: &DirectPlan,
        rank: usize,
        of: MemoryArea,
        (part, block): (usize, usize),
    ) -> (usize, Location) {
        match of {
            MemoryArea::Exposed => {
                (rank, Location::OwnMemory { of: plan.collective().source(), part, block })
            }
            place => self.published(plan, rank, place, (part, block)),
        }
    }

    fn published(
        &self,
        plan: &DirectPlan,
        rank: usize,
        of: MemoryArea,
        cell: (usize, usize),
    ) -> (usize, Location) {
        let generations = if let MemoryArea::Slot(_) = of { 2 } else { CALLS_MAX };
        let (holder, place) = plan.cell_location(rank, cell, of);
        (holder, Location::Published { generation: self.calls % generations, of, place })
    }
}

/// Returns `true` if an access may be concurrent with the step of a rank with this clock.
fn race(at: &CallPosition<'_>, clock: &SignalClock, of: usize, visit: Option<(usize, usize)>) -> Result<()> {
    match visit {
        Some((other, epoch)) if other != at.rank && clock.of(other) <= epoch => {
            Err(Error::Race { rank: at.rank, step: at.step, other, of })
        }
        _ => Ok(()),
    }
}

const fn own(part: usize, block: usize) -> Location {
    Location::OwnMemory { of: Source::Buffer, part, block }
}

/// Returns the content of a rank's memory when a call begins; `None` for locations that only receive data.
fn brought(
    plan: &DirectPlan,
    rank: usize,
    call: usize,
) -> impl Iterator<Item = (Location, Option<CellContent>)> {
    let plan = *plan;
    let held = move |of, part, block| {
        let is_there = match (plan.collective(), of) {
            (collective, Source::Buffer) if collective.source() == Source::Input => false,
            (DirectCollective::AllGather { .. }, _) => part == rank,
            (DirectCollective::Broadcast { root }, _) => rank == root,
            _ => true,
        };
        is_there.then_some(CellContent::Brought { call, rank, of, part, block })
    };
    let memories: &[Source] = match plan.collective().source() {
        Source::Buffer => &[Source::Buffer],
        Source::Input => &[Source::Buffer, Source::Input],
    };
    let rows = (0..plan.blocks()).flat_map(|block| memories.iter().map(move |&of| (of, block)));
    rows.flat_map(move |(of, block)| (0..plan.parts()).map(move |part| (of, part, block)))
        .map(move |(of, part, block)| (Location::OwnMemory { of, part, block }, held(of, part, block)))
}

/// Returns the content that a cell of a rank's buffer must have at the end, if any.
fn promised(
    plan: &DirectPlan,
    rank: usize,
    (part, block): (usize, usize),
    call: usize,
) -> Option<CellContent> {
    let sum = Some(CellContent::Sum { call, part, block });
    let brought_by = |rank, of, part| Some(CellContent::Brought { call, rank, of, part, block });
    match plan.collective() {
        DirectCollective::AllReduce => sum,
        DirectCollective::Reduce { root } => sum.filter(|_| rank == root),
        DirectCollective::ReduceScatter { .. } => sum.filter(|_| rank == part),
        DirectCollective::AllGather { of } => brought_by(part, of, part),
        DirectCollective::Broadcast { root } => brought_by(root, Source::Buffer, part),
        DirectCollective::AllToAll => brought_by(part, Source::Input, rank),
        DirectCollective::Barrier => None,
    }
}
