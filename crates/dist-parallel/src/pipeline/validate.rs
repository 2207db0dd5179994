//! The proof that a schedule is executable and complete.
//!
//! It proves the assumptions of the runtime. A computation waits for the messages that it receives, never for those
//! that it sends. Each pair of neighbouring stages on different ranks has one link for activations and one for
//! gradients. A link carries one message at a time, without a buffer, in the order of the sends. Receiving in another
//! order is a flaw. All other conditions concern one rank's list alone, so the proof can follow the ranks in any
//! order.

use std::collections::{HashMap, HashSet, VecDeque};

use super::timeline::received;
use super::{Action, Flaw, Item, PipelineSchedule, ScheduleProof};

pub(super) fn validate(schedule: &PipelineSchedule) -> Result<ScheduleProof, Flaw> {
    shape(schedule)?;
    once(schedule)?;
    let mut run = ScheduleRun::new(schedule);
    run.all()?;
    let messages = schedule.actions().iter().flatten().filter(|action| received(**action).is_some()).count();
    Ok(ScheduleProof { kept: run.ranks.into_iter().map(|rank| rank.kept_most).collect(), messages })
}

/// Returns a flaw unless all lists are for the same ranks.
pub(super) fn shape(schedule: &PipelineSchedule) -> Result<(), Flaw> {
    let (ranks, stages) = (schedule.ranks(), schedule.stages());
    let (lists, bounds) = (schedule.actions().len(), schedule.kept_max().len());
    let micro_batches = schedule.micro_batches();
    if ranks == 0 || stages == 0 || micro_batches == 0 || lists != ranks || bounds != ranks {
        return Err(Flaw::Shape { ranks, lists, bounds, stages, micro_batches });
    }
    let missing = schedule.placement().iter().enumerate().find(|&(_, &rank)| rank >= ranks);
    missing.map_or(Ok(()), |(stage, &rank)| Err(Flaw::Placement { stage, rank, ranks }))
}

/// Returns a flaw unless every action is on a rank that takes part in it, and every required action occurs once.
fn once(schedule: &PipelineSchedule) -> Result<(), Flaw> {
    let mut done = HashSet::new();
    for (rank, &action) in all(schedule) {
        if !is_own(schedule, rank, action) {
            return Err(Flaw::NotOwn { rank, action });
        }
        let part_of_whole = match action {
            Action::Backward(item) => {
                done.contains(&Action::InputGradient(item)) || done.contains(&Action::WeightGradient(item))
            }
            Action::InputGradient(item) | Action::WeightGradient(item) => {
                done.contains(&Action::Backward(item))
            }
            Action::Gather(_) | Action::Free(_) => continue,
            _ => false,
        };
        if part_of_whole || !done.insert(action) {
            return Err(Flaw::Twice { rank, action });
        }
    }
    let missing = required(schedule, &done).find(|action| !done.contains(action));
    missing.map_or(Ok(()), |action| Err(Flaw::Missing { action }))
}

fn all(schedule: &PipelineSchedule) -> impl Iterator<Item = (usize, &Action)> {
    schedule
        .actions()
        .iter()
        .enumerate()
        .flat_map(|(rank, list)| list.iter().map(move |action| (rank, action)))
}

fn is_own(schedule: &PipelineSchedule, rank: usize, action: Action) -> bool {
    let stage = action.stage();
    let exists = schedule.placement().get(stage) == Some(&rank)
        && action.micro_batch().is_none_or(|micro_batch| micro_batch < schedule.micro_batches());
    exists
        && match action {
            Action::SendActivation(_) | Action::ReceiveGradient(_) => schedule.is_sent(stage),
            Action::ReceiveActivation(_) | Action::SendGradient(_) => {
                stage > 0 && schedule.is_sent(stage - 1)
            }
            _ => true,
        }
}

/// Returns the required actions, given the actions that occur.
fn required(schedule: &PipelineSchedule, done: &HashSet<Action>) -> impl Iterator<Item = Action> {
    let of_item = move |item: Item| {
        let (to_next, to_last) =
            (schedule.is_sent(item.stage), item.stage > 0 && schedule.is_sent(item.stage - 1));
        let split =
            done.contains(&Action::InputGradient(item)) || done.contains(&Action::WeightGradient(item));
        [
            Some(Action::Forward(item)),
            (!split).then_some(Action::Backward(item)),
            split.then_some(Action::InputGradient(item)),
            split.then_some(Action::WeightGradient(item)),
            to_next.then_some(Action::SendActivation(item)),
            to_next.then_some(Action::ReceiveGradient(item)),
            to_last.then_some(Action::ReceiveActivation(item)),
            to_last.then_some(Action::SendGradient(item)),
        ]
    };
    let items =
        move |stage| (0..schedule.micro_batches()).map(move |micro_batch| Item::new(stage, micro_batch));
    let of_stages = (0..schedule.stages()).map(Action::ReduceGradients);
    (0..schedule.stages()).flat_map(items).flat_map(of_item).flatten().chain(of_stages)
}

/// The progress of all ranks through their lists.
struct ScheduleRun<'a> {
    schedule: &'a PipelineSchedule,
    ranks: Vec<RankProgress>,
    /// The messages in flight on each link, by the action that receives them.
    links: HashMap<LinkId, VecDeque<Action>>,
    /// The stages whose parameters are gathered and freed.
    sharded: HashSet<usize>,
}

/// The progress of one rank.
#[derive(Default)]
struct RankProgress {
    next: usize,
    done: HashSet<Action>,
    kept: usize,
    kept_most: usize,
    gathered: HashSet<usize>,
}

/// A link: the stage that receives, and `true` if it carries activations.
type LinkId = (usize, bool);

impl<'a> ScheduleRun<'a> {
    fn new(schedule: &'a PipelineSchedule) -> Self {
        let ranks = (0..schedule.ranks()).map(|_| RankProgress::default()).collect();
        let gathers = |action: &&Action| matches!(action, Action::Gather(_) | Action::Free(_));
        let sharded =
            schedule.actions().iter().flatten().filter(gathers).map(|action| action.stage()).collect();
        Self { schedule, ranks, links: HashMap::new(), sharded }
    }

    fn all(&mut self) -> Result<(), Flaw> {
        let mut moved = true;
        while std::mem::take(&mut moved) {
            for rank in 0..self.ranks.len() {
                moved |= self.follow(rank)?;
            }
        }
        for (rank, list) in self.schedule.actions().iter().enumerate() {
            if let Some(&action) = list.get(self.ranks[rank].next) {
                return Err(Flaw::Deadlock { rank, action });
            }
            if let (Some(&stage), Some(&action)) = (self.ranks[rank].gathered.iter().min(), list.last()) {
                return Err(Flaw::Parameters { rank, action, stage, state: "never freed" });
            }
        }
        Ok(())
    }

    /// Advances a rank until it waits or has finished. Returns `true` if it has advanced.
    fn follow(&mut self, rank: usize) -> Result<bool, Flaw> {
        let schedule = self.schedule;
        let start = self.ranks[rank].next;
        for &action in &schedule.actions()[rank][start..] {
            if !self.arrived(rank, action)? {
                break;
            }
            self.check(rank, action)?;
            self.ranks[rank].act(action);
            self.memory(rank, action)?;
            if let Some(received) = received(action) {
                let link = link(received).expect("every sent message is received");
                self.links.entry(link).or_default().push_back(received);
            }
            self.ranks[rank].next += 1;
        }
        Ok(self.ranks[rank].next > start)
    }

    /// Returns `true` if the message that the action receives has been sent.
    fn arrived(&mut self, rank: usize, action: Action) -> Result<bool, Flaw> {
        let Some(link) = link(action) else { return Ok(true) };
        let queue = self.links.entry(link).or_default();
        match queue.front() {
            None => Ok(false),
            Some(&sent) if sent == action => {
                queue.pop_front();
                Ok(true)
            }
            Some(&sent) => Err(Flaw::OtherOrder { rank, action, sent }),
        }
    }

    /// Returns a flaw unless the rank has the inputs of the action.
    fn check(&self, rank: usize, action: Action) -> Result<(), Flaw> {
        let done = |needed: Action| self.ranks[rank].done.contains(&needed);
        let gone_back = |item: Item| done(Action::Backward(item)) || done(Action::InputGradient(item));
        let ready = match action {
            Action::Forward(item) => match item.stage.checked_sub(1) {
                None => true,
                Some(before) if self.schedule.is_sent(before) => done(Action::ReceiveActivation(item)),
                Some(before) => done(Action::Forward(Item::new(before, item.micro_batch))),
            },
            Action::Backward(item) | Action::InputGradient(item) => {
                let next = item.stage + 1;
                let gradient = if next == self.schedule.stages() {
                    true
                } else if self.schedule.is_sent(item.stage) {
                    done(Action::ReceiveGradient(item))
                } else {
                    gone_back(Item::new(next, item.micro_batch))
                };
                gradient && done(Action::Forward(item))
            }
            Action::WeightGradient(item) => done(Action::InputGradient(item)),
            Action::SendActivation(item) => done(Action::Forward(item)),
            Action::SendGradient(item) => gone_back(item),
            Action::ReduceGradients(stage) => (0..self.schedule.micro_batches()).all(|micro_batch| {
                let item = Item::new(stage, micro_batch);
                done(Action::Backward(item)) || done(Action::WeightGradient(item))
            }),
            Action::ReceiveActivation(_)
            | Action::ReceiveGradient(_)
            | Action::Gather(_)
            | Action::Free(_) => true,
        };
        if !ready {
            return Err(Flaw::TooEarly { rank, action });
        }
        self.parameters(rank, action)
    }

    /// Returns a flaw unless the parameters that the action uses are gathered, on a rank that gathers and frees.
    fn parameters(&self, rank: usize, action: Action) -> Result<(), Flaw> {
        let stage = action.stage();
        let gathered = self.ranks[rank].gathered.contains(&stage);
        let fits = match action {
            Action::Gather(_) => !gathered,
            Action::Free(_) => gathered,
            _ if action.is_computation() => gathered || !self.sharded.contains(&stage),
            _ => true,
        };
        let state = if gathered { "gathered" } else { "not gathered" };
        if fits { Ok(()) } else { Err(Flaw::Parameters { rank, action, stage, state }) }
    }

    fn memory(&self, rank: usize, action: Action) -> Result<(), Flaw> {
        let (kept, kept_max) = (self.ranks[rank].kept, self.schedule.kept_max()[rank]);
        if kept > kept_max { Err(Flaw::Memory { rank, action, kept, kept_max }) } else { Ok(()) }
    }
}

impl RankProgress {
    fn act(&mut self, action: Action) {
        match action {
            Action::Forward(_) => self.kept += 1,
            Action::Backward(_) | Action::WeightGradient(_) => self.kept -= 1,
            Action::Gather(stage) => _ = self.gathered.insert(stage),
            Action::Free(stage) => _ = self.gathered.remove(&stage),
            _ => {}
        }
        self.kept_most = self.kept_most.max(self.kept);
        self.done.insert(action);
    }
}

/// Returns the link on which an action receives.
const fn link(action: Action) -> Option<LinkId> {
    match action {
        Action::ReceiveActivation(item) => Some((item.stage, true)),
        Action::ReceiveGradient(item) => Some((item.stage, false)),
        _ => None,
    }
}
