//! The symbolic machine: all ranks at once, over channels that hold nothing.
//!
//! A message passes when its sender and its receiver are both at it. No rank ever chooses between peers, so the
//! order in which the machine takes up possible messages changes nothing, and what it proves holds for
//! transports with any amount of buffering (Siegel and Avrunin, "Modeling wildcard-free MPI programs", 2005).

use dist_transport::Rank;

use super::forest::{Forest, Ranks, Tree};
use super::report::RankReport;
use super::{Goal, Program};
use crate::validate::Parts;
use crate::{Chunks, Error, Place, ReceiveHalf, Result, Source, Step, Then};

pub(super) struct Machine<'a> {
    pub(super) forest: Forest,
    pub(super) ranks: Vec<State>,
    programs: &'a [Program],
    parts: Parts,
}

/// One rank.
pub(super) struct State {
    rank: Rank,
    /// What each chunk of the buffer holds.
    pub(super) buffer: Vec<Option<Tree>>,
    /// The chunk and the sum that each slot holds.
    pub(super) slots: Vec<Option<(usize, Tree)>>,
    /// Who is known to have begun.
    pub(super) heard: Ranks,
    /// When the steps so far were done.
    pub(super) clock: Clock,
    pub(super) report: RankReport,
    next: usize,
    exchange: Option<Exchange>,
}

/// Two measures of time: messages, and chunks.
#[derive(Clone, Copy, Default)]
pub(super) struct Clock {
    pub(super) rounds: usize,
    pub(super) path: usize,
}

/// An exchange of which at least one half is still to be done.
struct Exchange {
    step: usize,
    send: Option<Message>,
    receive: Option<ReceiveHalf>,
    in_place: bool,
    ends: Clock,
}

/// What is on its way: the content as it was when the step began.
struct Message {
    to: usize,
    chunks: Chunks,
    sums: Vec<Tree>,
    heard: Ranks,
}

impl Clock {
    fn later(self, other: Self) -> Self {
        Self { rounds: self.rounds.max(other.rounds), path: self.path.max(other.path) }
    }

    fn after(self, chunks: Chunks) -> Self {
        Self { rounds: self.rounds + 1, path: self.path + chunks.len() }
    }
}

impl<'a> Machine<'a> {
    pub(super) fn new(goal: Goal, parts: usize, programs: &'a [Program]) -> Self {
        let mut forest = Forest::new(programs.len());
        let ranks = Rank::all(programs.len())
            .map(|rank| {
                let leaf = forest.leaf(rank.index());
                let has = |chunk| goal.begins_with(rank.index(), chunk).then_some(leaf);
                State {
                    rank,
                    buffer: (0..parts).map(has).collect(),
                    slots: Vec::new(),
                    heard: Ranks::one(rank.index(), programs.len()),
                    clock: Clock::default(),
                    report: RankReport::default(),
                    next: 0,
                    exchange: None,
                }
            })
            .collect();
        Self { forest, ranks, programs, parts: Parts { buffer: parts, input: 0 } }
    }

    /// Does all steps of all ranks.
    pub(super) fn run(&mut self) -> Result<()> {
        let mut ready: Vec<usize> = (0..self.ranks.len()).rev().collect();
        for rank in 0..self.ranks.len() {
            self.advance(rank)?;
        }
        while let Some(rank) = ready.pop() {
            let Some(exchange) = &self.ranks[rank].exchange else { continue };
            let to = exchange.send.as_ref().map(|send| send.to);
            let from = exchange.receive.map(|receive| receive.from);
            for (sender, receiver) in
                [to.map(|to| (rank, to)), from.map(|from| (from, rank))].into_iter().flatten()
            {
                if self.meet(sender, receiver) {
                    self.pass(sender, receiver)?;
                    for rank in [sender, receiver] {
                        if self.complete(rank)? {
                            ready.push(rank);
                        }
                    }
                }
            }
        }
        self.deadlock()
    }

    /// Whether a message from the one to the other can pass now. An exchange in place goes on in lockstep, so
    /// its peer has to be in one too.
    fn meet(&self, sender: usize, receiver: usize) -> bool {
        let (Some(ours), Some(theirs)) = (&self.ranks[sender].exchange, &self.ranks[receiver].exchange)
        else {
            return false;
        };
        let sends = ours.send.as_ref().is_some_and(|send| send.to == receiver);
        let receives = theirs.receive.is_some_and(|receive| receive.from == sender);
        sends && receives && ours.in_place == theirs.in_place
    }

    /// Brings a message from the one to the other.
    fn pass(&mut self, sender: usize, receiver: usize) -> Result<()> {
        const MET: &str = "the two have met in an exchange";
        let starts = self.ranks[sender].clock.later(self.ranks[receiver].clock);
        let ours = self.ranks[sender].exchange.as_mut().expect(MET);
        let step = ours.step;
        let message = ours.send.take().expect(MET);
        let ends = starts.after(message.chunks);
        ours.ends = ours.ends.later(ends);
        let theirs = self.ranks[receiver].exchange.as_mut().expect(MET);
        let receive = theirs.receive.take().expect(MET);
        theirs.ends = theirs.ends.later(ends);
        if message.chunks != receive.chunks {
            return Err(Error::Mismatch {
                rank: sender,
                step,
                sent: message.chunks,
                peer: receiver,
                peer_step: theirs.step,
                expected: receive.chunks,
            });
        }
        let their_step = theirs.step;
        self.ranks[sender].report.sends(receiver, message.chunks);
        let state = &mut self.ranks[receiver];
        state.report.receives(sender, receive.chunks);
        state.heard = state.heard.union(&message.heard);
        for (chunk, sum) in message.chunks.indices().zip(message.sums) {
            state.write(&mut self.forest, their_step, chunk, receive.place, receive.then, sum)?;
        }
        Ok(())
    }

    /// If both halves of the rank's exchange are done, goes on with its next steps.
    fn complete(&mut self, rank: usize) -> Result<bool> {
        let state = &mut self.ranks[rank];
        match &state.exchange {
            Some(Exchange { send: None, receive: None, ends, .. }) => state.clock = *ends,
            _ => return Ok(false),
        }
        state.exchange = None;
        self.advance(rank)?;
        Ok(true)
    }

    /// Does the rank's next steps up to one that has to wait for a peer.
    fn advance(&mut self, rank: usize) -> Result<()> {
        let program = &self.programs[rank];
        let state = &mut self.ranks[rank];
        while state.exchange.is_none() {
            if let Some(finish) = program.finish.filter(|finish| finish.after == state.next) {
                state.finish(&mut self.forest, finish.owned)?;
            }
            let Some(&step) = program.steps.get(state.next) else { break };
            step.validate(state.rank, state.next, self.parts)?;
            match step {
                Step::Combine { chunk, from, into } => state.combine(&mut self.forest, chunk, from, into)?,
                Step::Exchange { send: None, receive: None } => {}
                Step::Exchange { .. } => state.begin(step)?,
            }
            state.next += 1;
            state.report.steps += 1;
        }
        Ok(())
    }

    /// Whether all ranks have come to their ends.
    fn deadlock(&self) -> Result<()> {
        let mut waiting = self.ranks.iter().filter_map(|state| Some((state, state.exchange.as_ref()?)));
        let Some((state, exchange)) = waiting.next() else { return Ok(()) };
        let to = exchange.send.as_ref().map(|send| send.to);
        let peer = to.or(exchange.receive.map(|receive| receive.from)).expect("one half is still to be done");
        Err(Error::Deadlock {
            rank: state.rank.index(),
            step: exchange.step,
            peer,
            peer_step: self.ranks[peer].exchange.as_ref().map(|exchange| exchange.step),
            blocked: 1 + waiting.count(),
        })
    }
}

impl State {
    /// Takes up an exchange.
    fn begin(&mut self, step: Step) -> Result<()> {
        let Step::Exchange { send, receive } = step else { return Ok(()) };
        let send = match send {
            None => None,
            Some(send) => {
                let read = |chunk| self.read(send.of, chunk);
                let sums = send.chunks.indices().map(read).collect::<Result<_>>()?;
                Some(Message { to: send.to, chunks: send.chunks, sums, heard: self.heard.clone() })
            }
        };
        let in_place = step.in_place().is_some();
        self.exchange = Some(Exchange { step: self.next, send, receive, in_place, ends: self.clock });
        Ok(())
    }

    fn read(&self, source: Source, chunk: usize) -> Result<Tree> {
        let held = match source {
            Source::Buffer => self.buffer[chunk],
            Source::Input => None,
        };
        held.ok_or(Error::Unwritten { rank: self.rank.index(), step: self.next, chunk })
    }

    /// Puts what has arrived where it belongs.
    fn write(
        &mut self,
        forest: &mut Forest,
        step: usize,
        chunk: usize,
        place: Place,
        then: Then,
        sum: Tree,
    ) -> Result<()> {
        let rank = self.rank.index();
        if let (Place::Slot(slot), Then::Replace) = (place, then) {
            let held = self.slots.get(slot).copied().flatten();
            return match held {
                Some(_) => Err(Error::Lost { rank, step, slot }),
                None => {
                    self.hold(slot, chunk, sum);
                    Ok(())
                }
            };
        }
        let sum = match then {
            Then::Replace => sum,
            Then::Reduce => {
                let there = self.content(place, chunk).ok_or(Error::Unwritten { rank, step, chunk })?;
                self.report.reductions += 1;
                forest.sum(there, sum).map_err(|contributor| Error::AddedTwice {
                    rank,
                    step,
                    chunk,
                    contributor,
                })?
            }
        };
        match place {
            Place::Buffer => self.buffer[chunk] = Some(sum),
            Place::Slot(slot) => self.slots[slot] = Some((chunk, sum)),
        }
        Ok(())
    }

    fn hold(&mut self, slot: usize, chunk: usize, sum: Tree) {
        if self.slots.len() <= slot {
            self.slots.resize(slot + 1, None);
        }
        self.slots[slot] = Some((chunk, sum));
        self.report.slots = self.report.slots.max(slot + 1);
    }

    /// What a place holds for a chunk.
    fn content(&self, place: Place, chunk: usize) -> Option<Tree> {
        match place {
            Place::Buffer => self.buffer[chunk],
            Place::Slot(slot) => {
                let (held, sum) = self.slots.get(slot).copied().flatten()?;
                (held == chunk).then_some(sum)
            }
        }
    }

    fn combine(&mut self, forest: &mut Forest, chunk: usize, from: usize, into: Place) -> Result<()> {
        let unwritten = Error::Unwritten { rank: self.rank.index(), step: self.next, chunk };
        let sum = self.content(Place::Slot(from), chunk).ok_or(unwritten)?;
        self.slots[from] = None;
        self.write(forest, self.next, chunk, into, Then::Reduce, sum)
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
    fn sends(&mut self, peer: usize, chunks: Chunks) {
        self.sent.push(chunks);
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
