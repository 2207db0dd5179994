//! The symbolic machine executes all ranks at once, over channels without buffers.
//!
//! A message passes when its sender and its receiver have both reached it. No rank ever chooses between peers, so
//! the order in which the machine executes possible messages does not matter. The proof therefore holds for
//! transports with any amount of buffering (Siegel and Avrunin, "Modeling wildcard-free MPI programs", 2005).

use dist_transport::Rank;
use smallvec::SmallVec;

use super::forest::{Forest, RankSet, SumId};
use super::report::RankReport;
use super::{Goal, RankProgram};
use crate::validate::ChunkCounts;
use crate::{ChunkLocation, Chunks, Error, OnArrival, ReceiveHalf, Result, SendHalf, Source, Step};

pub(super) struct Machine {
    pub(super) forest: Forest,
    pub(super) ranks: Vec<SymbolicRank>,
    pub(super) goal: Goal,
    parts: ChunkCounts,
}

/// The state of one rank.
#[derive(Clone)]
pub(super) struct SymbolicRank {
    rank: Rank,
    /// The content of each chunk of the buffer.
    pub(super) buffer: Vec<Option<SumId>>,
    /// The content of each chunk of the input.
    input: Vec<Option<SumId>>,
    /// The content of each slot.
    pub(super) slots: Vec<Option<SlotContent>>,
    /// The ranks that are known to have begun.
    pub(super) heard: RankSet,
    /// The time at which the steps so far were done.
    pub(super) clock: PathLength,
    /// The longest chain of messages that had to arrive before.
    pub(super) depth: PathLength,
    pub(super) report: RankReport,
    next: usize,
    exchange: Option<OpenExchange>,
}

/// The content of a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotContent {
    chunk: usize,
    sum: SumId,
    /// The rank from which the content first arrived; see [`Order::Canonical`](crate::Order::Canonical).
    from: usize,
    /// `true` if the content was used.
    pub(super) is_used: bool,
}

/// A sum, and the rank from which it first arrived at its location. The sum from the lower rank is the left operand, as
/// in the runner.
#[derive(Clone, Copy, Debug)]
struct Operand {
    sum: SumId,
    from: usize,
}

/// Two measures of time: messages and chunks.
#[derive(Clone, Copy, Default)]
pub(super) struct PathLength {
    pub(super) rounds: usize,
    pub(super) path: usize,
}

/// An exchange of which at least one half is not done yet.
#[derive(Clone)]
struct OpenExchange {
    step: usize,
    sends: SmallVec<[SentMessage; 1]>,
    receives: SmallVec<[ReceiveHalf; 1]>,
    in_place: bool,
    /// The number of chunks that leave in this step and share the outgoing link.
    leaving: usize,
    ends: PathLength,
    depth: PathLength,
}

/// A message in flight, with the content that it had when the step began.
#[derive(Clone)]
struct SentMessage {
    to: usize,
    of: Source,
    chunks: Chunks,
    sums: SmallVec<[SumId; 4]>,
    heard: RankSet,
}

impl PathLength {
    fn later(self, other: Self) -> Self {
        Self { rounds: self.rounds.max(other.rounds), path: self.path.max(other.path) }
    }

    fn after(self, chunks: usize) -> Self {
        Self { rounds: self.rounds + 1, path: self.path + chunks }
    }
}

impl Machine {
    pub(super) fn new(goal: Goal, parts: usize, world_size: usize) -> Self {
        let parts = ChunkCounts { buffer: parts, input: if goal.has_input() { parts } else { 0 } };
        let mut forest = Forest::new(world_size);
        let ranks = Rank::all(world_size)
            .map(|rank| {
                let index = rank.index();
                let buffer = (0..parts.buffer).map(|chunk| goal.begins(world_size, index, chunk));
                let buffer = buffer.map(|piece| piece.map(|piece| forest.leaf(piece))).collect();
                let input = (0..parts.input).map(|chunk| goal.input(index, chunk));
                let input = input.map(|piece| piece.map(|piece| forest.leaf(piece))).collect();
                SymbolicRank {
                    rank,
                    buffer,
                    input,
                    slots: Vec::new(),
                    heard: RankSet::one(index, world_size),
                    clock: PathLength::default(),
                    depth: PathLength::default(),
                    report: RankReport::default(),
                    next: 0,
                    exchange: None,
                }
            })
            .collect();
        Self { forest, ranks, goal, parts }
    }

    /// Executes the steps of these programs from the current state, as far as possible.
    pub(super) fn run(&mut self, programs: &[RankProgram]) -> Result<()> {
        let mut ready: Vec<usize> = (0..self.ranks.len()).rev().collect();
        for (rank, program) in programs.iter().enumerate() {
            self.advance(rank, program)?;
        }
        while let Some(rank) = ready.pop() {
            let Some(exchange) = &self.ranks[rank].exchange else { continue };
            let sends = exchange.sends.iter().map(|send| (rank, send.to));
            let receives = exchange.receives.iter().map(|receive| (receive.from, rank));
            let pairs: SmallVec<[(usize, usize); 2]> = sends.chain(receives).collect();
            for (sender, receiver) in pairs {
                if let Some(halves) = self.matching_halves(sender, receiver) {
                    self.pass(sender, receiver, halves)?;
                    for rank in [sender, receiver] {
                        if self.complete(rank, &programs[rank])? {
                            ready.push(rank);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the halves of two exchanges between which a message can pass now. An exchange in place runs in
    /// lockstep, so the peer must be in one too.
    fn matching_halves(&self, sender: usize, receiver: usize) -> Option<(usize, usize)> {
        let (ours, theirs) = (self.ranks[sender].exchange.as_ref()?, self.ranks[receiver].exchange.as_ref()?);
        let send = ours.sends.iter().position(|send| send.to == receiver)?;
        let receive = theirs.receives.iter().position(|receive| receive.from == sender)?;
        (ours.in_place == theirs.in_place).then_some((send, receive))
    }

    /// Passes a message from the sender to the receiver.
    fn pass(&mut self, sender: usize, receiver: usize, halves: (usize, usize)) -> Result<()> {
        const MATCHED: &str = "the halves of two exchanges match";
        let left = self.ranks[sender].depth;
        let starts = self.ranks[sender].clock.later(self.ranks[receiver].clock);
        let ours = self.ranks[sender].exchange.as_mut().expect(MATCHED);
        let step = ours.step;
        let message = ours.sends.remove(halves.0);
        let ends = starts.after(ours.leaving);
        ours.ends = ours.ends.later(ends);
        let theirs = self.ranks[receiver].exchange.as_mut().expect(MATCHED);
        let receive = theirs.receives.remove(halves.1);
        theirs.ends = theirs.ends.later(ends);
        theirs.depth = theirs.depth.later(left.after(message.chunks.len()));
        let their_step = theirs.step;
        if !self.goal.agree(sender, receiver, (message.of, message.chunks), receive.chunks) {
            return Err(Error::Mismatch {
                rank: sender,
                step,
                sent: message.chunks,
                peer: receiver,
                peer_step: their_step,
                expected: receive.chunks,
            });
        }
        self.ranks[sender].report.sends(receiver, message.of, message.chunks);
        let state = &mut self.ranks[receiver];
        state.report.receives(sender, receive.chunks);
        state.heard = state.heard.union(&message.heard);
        for (chunk, sum) in receive.chunks.indices().zip(message.sums) {
            let arrived = Operand { sum, from: sender };
            state.write(&mut self.forest, their_step, chunk, receive.place, receive.then, arrived)?;
        }
        Ok(())
    }

    /// Continues with the rank's next steps if its exchange is done.
    fn complete(&mut self, rank: usize, program: &RankProgram) -> Result<bool> {
        let state = &mut self.ranks[rank];
        match &state.exchange {
            Some(exchange) if exchange.sends.is_empty() && exchange.receives.is_empty() => {
                (state.clock, state.depth) = (exchange.ends, exchange.depth);
            }
            _ => return Ok(false),
        }
        state.exchange = None;
        self.advance(rank, program)?;
        Ok(true)
    }

    /// Executes the rank's next steps up to one that has to wait for a peer.
    fn advance(&mut self, rank: usize, program: &RankProgram) -> Result<()> {
        let state = &mut self.ranks[rank];
        while state.exchange.is_none() {
            if let Some(finish) = program.finish.filter(|finish| finish.after == state.next) {
                state.finish(&mut self.forest, finish.owned)?;
            }
            let Some(&step) = program.steps.get(state.next) else { break };
            step.validate(state.rank, state.next, self.parts)?;
            match step {
                Step::Combine { chunk, from, into } => state.combine(&mut self.forest, chunk, from, into)?,
                Step::Copy { chunk, from, into } => state.copy(&mut self.forest, chunk, from, into)?,
                Step::Exchange { send: None, receive: None } => {}
                Step::Exchange { .. } | Step::Window { .. } => state.begin(step)?,
            }
            state.next += 1;
            state.report.steps += 1;
        }
        Ok(())
    }

    /// Checks that all ranks have reached their ends.
    pub(super) fn deadlock(&self) -> Result<()> {
        let mut waiting = self.ranks.iter().filter_map(|state| Some((state, state.exchange.as_ref()?)));
        let Some((state, exchange)) = waiting.next() else { return Ok(()) };
        let to = exchange.sends.first().map(|send| send.to);
        let from = exchange.receives.first().map(|receive| receive.from);
        let peer = to.or(from).expect("one half is still to be done");
        Err(Error::Deadlock {
            rank: state.rank.index(),
            step: exchange.step,
            peer,
            peer_step: self.ranks[peer].exchange.as_ref().map(|exchange| exchange.step),
            blocked: 1 + waiting.count(),
        })
    }
}

impl SymbolicRank {
    /// Begins an exchange.
    fn begin(&mut self, step: Step) -> Result<()> {
        let (sends, receives) = step.halves(self.rank);
        let message = |send: &SendHalf| {
            let sums = send.chunks.indices().map(|chunk| self.read(send.of, chunk)).collect::<Result<_>>()?;
            Ok(SentMessage { to: send.to, of: send.of, chunks: send.chunks, sums, heard: self.heard.clone() })
        };
        self.exchange = Some(OpenExchange {
            step: self.next,
            leaving: sends.iter().map(|send| send.chunks.len()).sum(),
            sends: sends.iter().map(message).collect::<Result<_>>()?,
            receives,
            in_place: step.in_place().is_some(),
            ends: self.clock,
            depth: self.depth,
        });
        Ok(())
    }

    fn read(&self, source: Source, chunk: usize) -> Result<SumId> {
        let held = match source {
            Source::Buffer => self.buffer[chunk],
            Source::Input => self.input[chunk],
        };
        held.ok_or(Error::Unwritten { rank: self.rank.index(), step: self.next, chunk })
    }

    /// Stores the data that has arrived.
    fn write(
        &mut self,
        forest: &mut Forest,
        step: usize,
        chunk: usize,
        place: ChunkLocation,
        then: OnArrival,
        arrived: Operand,
    ) -> Result<()> {
        let rank = self.rank.index();
        if let (ChunkLocation::Slot(slot), OnArrival::Replace) = (place, then) {
            return match self.slots.get(slot).copied().flatten() {
                Some(held) if !held.is_used => Err(Error::Lost { rank, step, slot }),
                _ => {
                    self.hold(slot, chunk, arrived);
                    Ok(())
                }
            };
        }
        let Operand { sum, from } = match then {
            OnArrival::Replace => arrived,
            OnArrival::Reduce => {
                let there = self.content(place, chunk).ok_or(Error::Unwritten { rank, step, chunk })?;
                self.report.reductions += 1;
                let is_left = arrived.from < there.from;
                let (left, right) = if is_left { (arrived, there) } else { (there, arrived) };
                let sum = forest.sum(left.sum, right.sum);
                let twice = |contributor| Error::AddedTwice { rank, step, chunk, contributor };
                Operand { sum: sum.map_err(twice)?, ..there }
            }
        };
        match place {
            ChunkLocation::Buffer => self.buffer[chunk] = Some(sum),
            ChunkLocation::Slot(slot) => {
                self.slots[slot] = Some(SlotContent { chunk, sum, from, is_used: false });
            }
        }
        Ok(())
    }

    fn hold(&mut self, slot: usize, chunk: usize, Operand { sum, from }: Operand) {
        if self.slots.len() <= slot {
            self.slots.resize(slot + 1, None);
        }
        self.slots[slot] = Some(SlotContent { chunk, sum, from, is_used: false });
        self.report.slots = self.report.slots.max(slot + 1);
    }

    /// Returns the content of a location for a chunk.
    fn content(&self, place: ChunkLocation, chunk: usize) -> Option<Operand> {
        match place {
            ChunkLocation::Buffer => Some(Operand { sum: self.buffer[chunk]?, from: self.rank.index() }),
            ChunkLocation::Slot(slot) => {
                let held = self.slots.get(slot).copied().flatten()?;
                (held.chunk == chunk).then_some(Operand { sum: held.sum, from: held.from })
            }
        }
    }

    fn combine(&mut self, forest: &mut Forest, chunk: usize, from: usize, into: ChunkLocation) -> Result<()> {
        let unwritten = Error::Unwritten { rank: self.rank.index(), step: self.next, chunk };
        let operand = self.content(ChunkLocation::Slot(from), chunk).ok_or(unwritten)?;
        self.slots[from] = None;
        self.write(forest, self.next, chunk, into, OnArrival::Reduce, operand)
    }

    fn copy(
        &mut self,
        forest: &mut Forest,
        chunk: usize,
        from: ChunkLocation,
        into: ChunkLocation,
    ) -> Result<()> {
        let unwritten = Error::Unwritten { rank: self.rank.index(), step: self.next, chunk };
        let operand = self.content(from, chunk).ok_or(unwritten)?;
        if let ChunkLocation::Slot(slot) = from {
            self.slots[slot] =
                Some(SlotContent { chunk, sum: operand.sum, from: operand.from, is_used: true });
        }
        self.write(forest, self.next, chunk, into, OnArrival::Replace, operand)
    }

    /// Finishes the sums that the rank owns.
    fn finish(&mut self, forest: &mut Forest, owned: Chunks) -> Result<()> {
        let (rank, steps) = (self.rank.index(), self.next);
        if !owned.fit(self.buffer.len()) {
            return Err(Error::NoChunk { rank, step: steps, chunks: owned, parts: self.buffer.len() });
        }
        for chunk in owned.indices() {
            match self.buffer[chunk] {
                Some(sum) if forest.is_total(sum) => self.buffer[chunk] = Some(forest.finished(sum)),
                _ => return Err(Error::WrongResult { rank, steps, chunk }),
            }
        }
        Ok(())
    }
}

impl RankReport {
    fn sends(&mut self, peer: usize, of: Source, chunks: Chunks) {
        self.sent.push((of, chunks));
        self.talks_to(peer);
    }

    fn receives(&mut self, peer: usize, chunks: Chunks) {
        self.received.push(chunks);
        self.talks_to(peer);
    }

    fn talks_to(&mut self, peer: usize) {
        if !self.peers.contains(&peer) {
            self.peers.push(peer);
        }
    }
}
