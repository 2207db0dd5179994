//! The algorithms of each operation, ready to be predicted.

use dist_algos::predict::{self, Network, Plan, Prediction, STEPS_MAX};
use dist_algos::{
    AllGather, AllReduce, AllToAll, Barrier, Broadcast, Choice, Cost, Gather, Order, Partition, Reduce,
    ReduceScatter, Scan, Scatter, Step, hierarchical,
};
use dist_collectives::Operation;
use dist_transport::Rank;

use super::world::World;
use crate::Error;

/// One operation on one network.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case<'a> {
    pub(super) operation: Operation,
    /// Of each rank's input.
    pub(super) bytes: usize,
    /// What the choice is to keep.
    pub(super) order: Order,
    pub(super) world: &'a World,
}

/// Predicts for a network, and something more.
type Predict<'a, T> = Box<dyn Fn(&Network, T) -> dist_algos::Result<Prediction> + 'a>;

/// A way to do it.
pub(super) struct Candidate<'a> {
    pub(super) name: String,
    /// In which order it reduces, if it does.
    pub(super) order: Option<Order>,
    /// Messages that follow one another; unknown for two levels, which have two kinds.
    pub(super) rounds: Option<usize>,
    /// Whether it is the one that would be chosen.
    pub(super) chosen: bool,
    /// One call; only by symmetry, if there are too many steps to follow.
    predict: Predict<'a, bool>,
    /// The same for several calls, one after the other.
    predict_calls: Predict<'a, usize>,
    /// About how many steps all ranks have together.
    steps: u64,
}

impl Candidate<'_> {
    /// Predicts it; an error if it has too many steps to be followed.
    pub(super) fn predict(&self, world: &World) -> dist_algos::Result<Prediction> {
        (self.predict)(world.network(self.steps), self.steps > STEPS_MAX)
    }

    /// Predicts so many calls back to back, each with the next root.
    pub(super) fn predict_calls(&self, world: &World, calls: usize) -> dist_algos::Result<Prediction> {
        (self.predict_calls)(world.network(self.steps), calls)
    }
}

/// What the choice among algorithms looks at.
#[derive(Debug, Clone, Copy)]
struct Traits {
    name: &'static str,
    order: Option<Order>,
    cost: Cost,
    chunks: usize,
    chosen: bool,
}

impl<'a> Case<'a> {
    /// All algorithms that serve so many ranks.
    pub(super) fn candidates(&self) -> Result<Vec<Candidate<'a>>, Error> {
        match self.operation {
            Operation::AllReduce => {
                let mut all = self.all::<AllReduce>()?;
                all.extend(self.two_levels()?);
                Ok(all)
            }
            Operation::ReduceScatter => self.all::<ReduceScatter>(),
            Operation::AllGather => self.all::<AllGather>(),
            Operation::Broadcast => self.all::<Broadcast>(),
            Operation::Reduce => self.all::<Reduce>(),
            Operation::AllToAll => self.all::<AllToAll>(),
            Operation::Gather => self.all::<Gather>(),
            Operation::Scatter => self.all::<Scatter>(),
            Operation::Scan => self.all::<Scan>(),
            Operation::Barrier => self.all::<Barrier>(),
            other => Err(Error::Usage(format!("{other} has no algorithms to choose from"))),
        }
    }

    fn all<A: Choice>(&self) -> Result<Vec<Candidate<'a>>, Error> {
        let (ranks, bytes) = (self.world.ranks(), self.whole()?);
        let chosen = A::suggest(ranks, bytes, self.order, self.world.costs());
        let candidate = |algorithm: A| {
            let traits = Traits {
                name: algorithm.name(),
                order: algorithm.order(ranks),
                cost: algorithm.cost(ranks),
                chunks: algorithm.chunks(ranks),
                chosen: algorithm == chosen,
            };
            self.candidate(traits, bytes, move |rank, root| algorithm.steps(rank, root))
        };
        A::ALL.iter().copied().filter(|algorithm| algorithm.supports(ranks)).map(candidate).collect()
    }

    /// Two-level all_reduces, where there are two levels.
    fn two_levels(&self) -> Result<Vec<Candidate<'a>>, Error> {
        let (mut all, whole) = (Vec::new(), self.whole()?);
        let Some(hosts) = self.world.shared_hosts() else { return Ok(all) };
        for plan in hierarchical::Plan::all(hosts) {
            let form = match plan.form {
                hierarchical::Form::Leaders => "leaders",
                hierarchical::Form::Parts => "parts",
            };
            let cost = plan.cost(hosts);
            let cost = Cost { rounds: cost.inside.rounds + cost.across.rounds, ..cost.across };
            let (order, chunks) = (Some(plan.order(hosts)), plan.chunks(hosts));
            let traits = Traits { name: plan.across.name(), order, cost, chunks, chosen: false };
            let candidate = self.candidate(traits, whole, move |rank, _| {
                let phases = plan.phases(rank, hosts).expect("the plan supports these hosts");
                phases.reduce.chain(phases.gather)
            })?;
            all.push(Candidate { name: format!("{form}+{}", plan.across), rounds: None, ..candidate });
        }
        Ok(all)
    }

    fn candidate<I: Iterator<Item = Step>>(
        &self,
        traits: Traits,
        whole: usize,
        steps: impl Fn(Rank, usize) -> I + Copy + 'a,
    ) -> Result<Candidate<'a>, Error> {
        let Traits { name, order, cost, chunks, chosen } = traits;
        let size = if whole.is_multiple_of(4) { 4 } else { 1 };
        let buffer = Partition::new(whole / size, size, chunks)
            .ok_or_else(|| Error::Usage(format!("{whole} bytes cannot be cut into {chunks} chunks")))?;
        let predict = move |network: &Network, too_many: bool| {
            let plan = Plan { steps: |rank| steps(rank, 0), buffer, input: Some(buffer) };
            if !too_many {
                return predict::predict(&plan, network);
            }
            predict::symmetric(&plan, network).ok_or(dist_algos::Error::TooManySteps { limit: STEPS_MAX })
        };
        let predict_calls = move |network: &Network, calls: usize| {
            let all = |rank: Rank| (0..calls).flat_map(move |call| steps(rank, call % rank.world_size()));
            predict::predict(&Plan { steps: all, buffer, input: Some(buffer) }, network)
        };
        let ranks = self.world.ranks() as u64;
        Ok(Candidate {
            name: name.to_owned(),
            order,
            rounds: Some(cost.rounds),
            chosen,
            predict: Box::new(predict),
            predict_calls: Box::new(predict_calls),
            steps: ranks.saturating_mul(cost.rounds as u64),
        })
    }

    /// Bytes of the buffer that the schedules work on.
    fn whole(&self) -> Result<usize, Error> {
        let parts = match self.operation {
            Operation::AllGather | Operation::Gather => self.world.ranks(),
            _ => 1,
        };
        let bytes = self.bytes.checked_mul(parts).filter(|&bytes| bytes <= WHOLE_MAX);
        bytes.ok_or_else(|| {
            Error::Usage(format!("{} bytes from each of {parts} ranks are too many", self.bytes))
        })
    }
}

/// So that sums of the bytes of all ranks are numbers.
const WHOLE_MAX: usize = 1 << 50;
