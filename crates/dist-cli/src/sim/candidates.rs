//! The algorithms of each operation, ready to be predicted.

use dist_algos::predict::{self, Network, Plan, Prediction, STEPS_MAX};
use dist_algos::{
    AllGather, AllReduce, AllToAll, Barrier, Broadcast, Choice, Gather, Hosts, Order, Partition, Reduce,
    ReduceScatter, Scan, Scatter, Step,
};
use dist_collectives::Operation;
use dist_transport::Rank;

use super::world::World;
use super::{samples, two_levels};
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

/// Predicts for a network; only by symmetry, if there are too many steps to follow.
type Predict<'a> = Box<dyn Fn(&Network, bool) -> dist_algos::Result<Prediction> + 'a>;

/// Predicts seconds for a network and a number of calls.
type TimeOne<'a> = Box<dyn Fn(&Network, usize) -> dist_algos::Result<f64> + 'a>;

/// A way to do it.
pub(super) struct Candidate<'a> {
    pub(super) name: String,
    /// In which order it reduces, if it does.
    pub(super) order: Option<Order>,
    /// Messages that follow one another; unknown for two levels, which have two kinds.
    pub(super) rounds: Option<usize>,
    /// Whether it is the one that would be chosen.
    pub(super) chosen: bool,
    /// One call.
    predict: Predict<'a>,
    /// Several calls, one after the other: the time of one of them.
    predict_calls: TimeOne<'a>,
    /// The same, as a benchmark that takes few of them at a time measures it.
    predict_samples: TimeOne<'a>,
    /// About how many steps all ranks have together.
    steps: u64,
    /// Bytes that a rank works on.
    memory: usize,
}

impl Candidate<'_> {
    /// Predicts it; an error if it has too many steps to be followed.
    pub(super) fn predict(&self, world: &World) -> dist_algos::Result<Prediction> {
        (self.predict)(&world.network(self.steps, self.memory), self.steps > STEPS_MAX)
    }

    /// Predicts the time of one of so many calls back to back, each with the next root, as `distctl bench` measures it:
    /// if they are few, it matters that ranks do not begin at the same time.
    pub(super) fn predict_one_of(&self, world: &World, calls: usize) -> dist_algos::Result<f64> {
        let network = world.network(self.steps, self.memory);
        if calls < CALLS_MANY {
            (self.predict_samples)(&network, calls)
        } else {
            (self.predict_calls)(&network, calls)
        }
    }
}

/// From so many calls on, how they begin is lost among them.
const CALLS_MANY: usize = 8;

/// What the choice among algorithms looks at.
#[derive(Debug)]
pub(super) struct Traits {
    pub(super) name: String,
    pub(super) order: Option<Order>,
    /// Messages that follow one another, of all kinds.
    pub(super) rounds: usize,
    pub(super) two_levels: bool,
    pub(super) chunks: usize,
    pub(super) chosen: bool,
}

impl<'a> Case<'a> {
    /// All algorithms that serve so many ranks.
    pub(super) fn candidates(&self) -> Result<Vec<Candidate<'a>>, Error> {
        match self.operation {
            Operation::AllReduce => self.with(self.all::<AllReduce>()?, two_levels::all_reduce),
            Operation::ReduceScatter => self.with(self.all::<ReduceScatter>()?, two_levels::reduce_scatter),
            Operation::AllGather => self.with(self.all::<AllGather>()?, two_levels::all_gather),
            Operation::Broadcast => self.with(self.all::<Broadcast>()?, two_levels::broadcast),
            Operation::Reduce => self.with(self.all::<Reduce>()?, two_levels::reduce),
            Operation::AllToAll => self.all::<AllToAll>(),
            Operation::Gather => self.all::<Gather>(),
            Operation::Scatter => self.all::<Scatter>(),
            Operation::Scan => self.all::<Scan>(),
            Operation::Barrier => self.with(self.all::<Barrier>()?, two_levels::barrier),
            other => Err(Error::Usage(format!("{other} has no algorithms to choose from"))),
        }
    }

    /// Adds what there is for ranks that share hosts.
    fn with(
        &self,
        mut all: Vec<Candidate<'a>>,
        two_levels: fn(&Self, &'a Hosts) -> Result<Vec<Candidate<'a>>, Error>,
    ) -> Result<Vec<Candidate<'a>>, Error> {
        if let Some(hosts) = self.world.shared_hosts() {
            all.extend(two_levels(self, hosts)?);
        }
        Ok(all)
    }

    fn all<A: Choice>(&self) -> Result<Vec<Candidate<'a>>, Error> {
        let (ranks, bytes) = (self.world.ranks(), self.whole()?);
        let chosen = A::suggest(ranks, bytes, self.order, self.world.costs());
        let candidate = |algorithm: A| {
            let traits = Traits {
                name: algorithm.name().to_owned(),
                order: algorithm.order(ranks),
                rounds: algorithm.cost(ranks).rounds,
                two_levels: false,
                chunks: algorithm.chunks(ranks),
                chosen: algorithm == chosen,
            };
            self.candidate(traits, move |rank, root| algorithm.steps(rank, root))
        };
        A::ALL.iter().copied().filter(|algorithm| algorithm.supports(ranks)).map(candidate).collect()
    }

    pub(super) fn candidate<I: Iterator<Item = Step>>(
        &self,
        traits: Traits,
        steps: impl Fn(Rank, usize) -> I + Copy + 'a,
    ) -> Result<Candidate<'a>, Error> {
        let Traits { name, order, rounds, two_levels, chunks, chosen } = traits;
        let whole = self.whole()?;
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
            let plan = Plan { steps: all, buffer, input: Some(buffer) };
            Ok(predict::predict(&plan, network)?.seconds / calls as f64)
        };
        Ok(Candidate {
            name,
            order,
            rounds: (!two_levels).then_some(rounds),
            chosen,
            predict: Box::new(predict),
            predict_calls: Box::new(predict_calls),
            predict_samples: Box::new(move |network, calls| samples::predict(steps, buffer, network, calls)),
            steps: (self.world.ranks() as u64).saturating_mul(rounds as u64),
            memory: whole,
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
