//! The algorithms of each operation, ready to be predicted.

use dist_algos::hierarchical::TwoLevelAlgorithm;
use dist_algos::{AlgorithmTable, CollectiveKind, Hosts, MessageAlgorithm, Order, Partition, Step};
use dist_collectives::tuning::{BLOCK_BYTES_OF_RANK, Operation};
use dist_predict::{NetworkModel, Prediction, STEPS_MAX, Workload};
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

/// A rank's steps. One type for those of all algorithms: what follows them is compiled once, and a step is worth far
/// more than the call that fetches it.
type Steps<'a> = Box<dyn Iterator<Item = Step> + 'a>;

/// A way to do it.
pub(super) struct Candidate<'a> {
    pub(super) name: String,
    /// In which order it reduces, if it does.
    pub(super) order: Option<Order>,
    /// Messages that follow one another; unknown for two levels, which have two kinds.
    pub(super) rounds: Option<usize>,
    /// Whether it is the one that would be chosen.
    pub(super) chosen: bool,
    /// What a rank does, with this root.
    schedule: Box<dyn Fn(Rank, usize) -> Steps<'a> + 'a>,
    buffer: Partition<'a>,
    /// Bytes that a rank works on again and again.
    memory: usize,
    /// Messages that follow one another in one call and are counted one by one: the time is that of one of them.
    trips: usize,
    /// Whether it is a collective, not messages by themselves.
    is_call: bool,
    /// Bytes that the library copies beside the schedule, where it does not work in place.
    copied: u64,
    /// About how many steps all ranks have together.
    steps: u64,
}

impl<'a> Candidate<'a> {
    /// What two ranks do, without any algorithm, each on so much memory.
    pub(super) fn of_messages<I: Iterator<Item = Step> + 'a>(
        buffer: Partition<'a>,
        memory: usize,
        trips: usize,
        steps: impl Fn(Rank) -> I + 'a,
    ) -> Self {
        Self {
            name: "message".to_owned(),
            order: None,
            rounds: Some(trips),
            chosen: true,
            schedule: Box::new(move |rank, _| Box::new(steps(rank))),
            memory,
            buffer,
            trips,
            is_call: false,
            copied: 0,
            steps: trips as u64,
        }
    }
}

impl Candidate<'_> {
    /// Predicts it; an error if it has too many steps to be followed.
    pub(super) fn predict(&self, world: &World) -> dist_predict::Result<Prediction> {
        let steps = |rank| (self.schedule)(rank, 0);
        let (plan, network) = (self.plan(&steps), self.network(world));
        let prediction = if self.steps <= STEPS_MAX {
            dist_predict::predict(&plan, &network)?
        } else {
            let limit = STEPS_MAX;
            dist_predict::symmetric(&plan, &network).ok_or(dist_predict::Error::TooManySteps { limit })?
        };
        let calling = if world.ranks() > 1 { self.calling(world) } else { 0.0 };
        Ok(Prediction { seconds: prediction.seconds + calling, ..prediction })
    }

    /// Predicts the time of one of so many calls back to back, each with the next root, as `distctl bench` measures it:
    /// with an input that stays as it is.
    pub(super) fn predict_one_of(&self, world: &World, calls: usize) -> dist_predict::Result<f64> {
        let steps = |rank: Rank| -> Steps<'_> {
            Box::new((0..calls).flat_map(move |call| (self.schedule)(rank, call % rank.world_size())))
        };
        let prediction = dist_predict::predict(&self.plan(&steps), &self.network(world))?;
        let copying = world.copying(self.copied, self.memory);
        let fetching =
            if self.memory < self.buffer.bytes() { world.fetching(self.buffer.bytes()) } else { 0.0 };
        Ok(prediction.seconds / (calls * self.trips) as f64 + copying + fetching + self.calling(world))
    }

    /// What it costs beside its messages.
    fn calling(&self, world: &World) -> f64 {
        if self.is_call { world.calling() } else { 0.0 }
    }

    fn plan<'a>(
        &'a self,
        steps: &'a dyn Fn(Rank) -> Steps<'a>,
    ) -> Workload<'a, &'a dyn Fn(Rank) -> Steps<'a>> {
        Workload { steps, buffer: self.buffer, input: Some(self.buffer) }
    }

    fn network(&self, world: &World) -> NetworkModel {
        world.network(self.steps, self.memory)
    }
}

/// What the choice among algorithms looks at.
#[derive(Debug)]
struct Traits {
    name: String,
    order: Option<Order>,
    /// Messages that follow one another, of all kinds.
    rounds: usize,
    two_levels: bool,
    chunks: usize,
    /// How many chunks a rank copies beside its steps.
    copied: usize,
    chosen: bool,
}

impl<'a> Case<'a> {
    /// All algorithms of a table that serve so many ranks.
    pub(super) fn candidates(&self, table: AlgorithmTable<'_>) -> Result<Vec<Candidate<'a>>, Error> {
        let Some(collective) = self.operation.collective() else {
            return Err(Error::Usage(format!("{} has no algorithms to choose from", self.operation)));
        };
        let mut all = self.by_messages(table, collective)?;
        if let Some(hosts) = self.world.shared_hosts() {
            let two_level = table.two_level().filter(|two| two.collective == collective);
            for two in two_level.filter(|two| two.supports(hosts)) {
                all.push(self.two_level(two, hosts)?);
            }
        }
        Ok(all)
    }

    fn two_level(&self, two: &'static TwoLevelAlgorithm, hosts: &'a Hosts) -> Result<Candidate<'a>, Error> {
        let cost = two.cost(hosts);
        let traits = Traits {
            name: two.name.to_owned(),
            order: two.order(hosts),
            rounds: cost.inside.rounds + cost.across.rounds,
            two_levels: true,
            chunks: two.chunks(hosts),
            // Its steps reduce into their input.
            copied: if self.operation == Operation::ReduceScatter { two.chunks(hosts) } else { 0 },
            // None is chosen by costs that are the same everywhere.
            chosen: false,
        };
        self.candidate(traits, move |rank, root| two.steps(rank, hosts, root).expect("they are supported"))
    }

    /// What there is for ranks that are all alike.
    fn by_messages(
        &self,
        table: AlgorithmTable<'_>,
        collective: CollectiveKind,
    ) -> Result<Vec<Candidate<'a>>, Error> {
        let (ranks, bytes) = (self.world.ranks(), self.whole()?);
        let (placement, costs) = (self.world.placement(), self.world.costs());
        let chosen = table.suggest(collective, placement, bytes, self.order, costs);
        let candidate = |algorithm: &'static MessageAlgorithm| {
            let traits = Traits {
                name: algorithm.name.to_owned(),
                order: algorithm.order(ranks),
                rounds: algorithm.cost(ranks).rounds,
                two_levels: false,
                chunks: algorithm.chunks(ranks),
                copied: algorithm.copied(ranks),
                chosen: chosen.is_some_and(|chosen| chosen.name == algorithm.name),
            };
            self.candidate(traits, move |rank, root| algorithm.steps(rank, root))
        };
        let of_operation = table.messages().filter(|algorithm| algorithm.collective == collective);
        of_operation.filter(|algorithm| algorithm.supports(ranks)).map(candidate).collect()
    }

    /// Bytes that a rank works on again and again, before it goes on to others, which it has to fetch. What an operation
    /// is given and what comes of it are two where it does not work in place; what is copied so that the input stays as
    /// it is makes a third.
    fn memory(&self, whole: usize, copied: u64) -> usize {
        match self.operation {
            Operation::AllReduce if self.world.hosts() == 1 => {
                whole.min(BLOCK_BYTES_OF_RANK.saturating_mul(self.world.ranks()))
            }
            Operation::AllGather => whole + self.bytes,
            Operation::ReduceScatter => whole + usize::try_from(copied).unwrap_or(usize::MAX),
            _ => whole,
        }
    }

    fn candidate<I: Iterator<Item = Step> + 'a>(
        &self,
        traits: Traits,
        steps: impl Fn(Rank, usize) -> I + Copy + 'a,
    ) -> Result<Candidate<'a>, Error> {
        let Traits { name, order, rounds, two_levels, chunks, copied, chosen } = traits;
        let whole = self.whole()?;
        let size = if whole.is_multiple_of(4) { 4 } else { 1 };
        let buffer = Partition::new(whole / size, size, chunks)
            .ok_or_else(|| Error::Usage(format!("{whole} bytes cannot be cut into {chunks} chunks")))?;
        let copied = (whole / chunks.max(1) * copied) as u64 + self.put_out();
        Ok(Candidate {
            name,
            order,
            rounds: (!two_levels).then_some(rounds),
            chosen,
            schedule: Box::new(move |rank, root| Box::new(steps(rank, root))),
            buffer,
            memory: self.memory(whole, copied),
            trips: 1,
            is_call: true,
            copied,
            steps: (self.world.ranks() as u64).saturating_mul(rounds as u64),
        })
    }

    /// Bytes that a rank copies to its output: its own part, where the schedule works elsewhere or others bring the rest.
    fn put_out(&self) -> u64 {
        match self.operation {
            Operation::ReduceScatter => (self.bytes / self.world.ranks()) as u64,
            Operation::AllGather => self.bytes as u64,
            _ => 0,
        }
    }

    /// Bytes of the buffer that the schedules work on.
    fn whole(&self) -> Result<usize, Error> {
        let parts = match self.operation {
            Operation::AllGather | Operation::Gather => self.world.ranks(),
            _ => 1,
        };
        let bytes = self.bytes.checked_mul(parts).filter(|&bytes| bytes <= WHOLE_MAX);
        bytes.ok_or_else(|| {
            Error::Usage(format!("{} bytes of each of {} ranks are too many", self.bytes, self.world.ranks()))
        })
    }
}

/// So that sums of the bytes of all ranks are numbers.
const WHOLE_MAX: usize = 1 << 50;

#[cfg(test)]
mod tests {
    use dist_algos::{ALGORITHMS, Algorithm, ring};
    use rstest::rstest;

    use super::super::model::Model;
    use super::*;

    #[rstest]
    #[case(Operation::AllToAll, "bruck", 2 * 4096)]
    #[case(Operation::AllToAll, "pairwise", 0)]
    #[case(Operation::ReduceScatter, "halving_doubling", 4096 + 1024)]
    #[case(Operation::ReduceScatter, "pairwise", 1024)]
    #[case(Operation::AllGather, "ring", 4096)]
    #[case(Operation::AllReduce, "ring", 0)]
    fn what_a_rank_copies_beside_its_steps_is_predicted_too(
        #[case] operation: Operation,
        #[case] name: &str,
        #[case] copied: u64,
    ) {
        let world = World::like(4, &Model::default(), true);
        let case = Case { operation, bytes: 4096, order: Order::Any, world: &world };
        let all = case.candidates(ALGORITHMS).unwrap();
        assert_eq!(all.iter().find(|candidate| candidate.name == name).unwrap().copied, copied);
    }

    /// A ring that says it costs nothing, so that it is chosen.
    static FREE_RING: MessageAlgorithm =
        MessageAlgorithm { name: "free_ring", cost: |_| dist_algos::Cost::NOTHING, ..ring::ALL_REDUCE };

    #[test]
    fn an_algorithm_more_in_the_table_is_chosen_and_predicted() {
        let world = World::like(4, &Model::default(), true);
        let case = Case { operation: Operation::AllReduce, bytes: 1 << 20, order: Order::Any, world: &world };
        let mut algorithms = ALGORITHMS.to_vec();
        algorithms.push(Algorithm::from(&FREE_RING));
        let all = case.candidates(AlgorithmTable::new(&algorithms)).unwrap();
        let predicted = |name| {
            let candidate = all.iter().find(|candidate| candidate.name == name).unwrap();
            (candidate.chosen, candidate.predict(&world).unwrap().seconds)
        };
        let ((chosen, seconds), (ring_chosen, ring_seconds)) = (predicted("free_ring"), predicted("ring"));
        assert!(chosen && !ring_chosen);
        assert!(seconds > 0.0 && (seconds - ring_seconds).abs() < 1e-12, "{seconds} {ring_seconds}");
    }
}
