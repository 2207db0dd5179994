//! The algorithms of each operation, as candidates for a prediction.

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
    /// Bytes of each rank's input.
    pub(super) bytes: usize,
    /// The reduction order that the choice must keep.
    pub(super) order: Order,
    pub(super) world: &'a World,
}

/// The steps of a rank. A single boxed type for all algorithms, so that the code behind it is compiled once.
/// A step costs far more than the virtual call that returns it.
type Steps<'a> = Box<dyn Iterator<Item = Step> + 'a>;

/// An algorithm that can be predicted.
pub(super) struct Candidate<'a> {
    pub(super) name: String,
    /// The order in which it reduces, if it does.
    pub(super) order: Option<Order>,
    /// Number of messages on the longest path; `None` for two levels, which have two kinds of messages.
    pub(super) rounds: Option<usize>,
    /// `true` if the library would choose it.
    pub(super) chosen: bool,
    /// The steps of a rank, given the root.
    schedule: Box<dyn Fn(Rank, usize) -> Steps<'a> + 'a>,
    buffer: Partition<'a>,
    /// Bytes of the working set of a rank.
    memory: usize,
    /// Number of consecutive messages in one call. The reported time is that of one message.
    trips: usize,
    /// `true` for a collective, `false` for single messages.
    is_call: bool,
    /// Bytes that the library copies in addition to the schedule's steps, if it does not work in place.
    copied: u64,
    /// Estimated number of steps of all ranks together.
    steps: u64,
}

impl<'a> Candidate<'a> {
    /// Creates a candidate from the steps of two ranks, without an algorithm. `memory` is the working set of
    /// each.
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
    /// Predicts one call. Returns an error if it has too many steps to simulate.
    pub(super) fn predict(&self, world: &World) -> dist_predict::Result<Prediction> {
        let steps = |rank| (self.schedule)(rank, 0);
        let (plan, network) = (self.plan(&steps), self.network(world));
        let prediction = if self.steps <= STEPS_MAX {
            dist_predict::predict(&plan, &network)?
        } else {
            let limit = STEPS_MAX;
            dist_predict::symmetric(&plan, &network).ok_or(dist_predict::Error::TooManySteps { limit })?
        };
        let call_cost = if world.ranks() > 1 { self.call_cost(world) } else { 0.0 };
        Ok(Prediction { seconds: prediction.seconds + call_cost, ..prediction })
    }

    /// Predicts the time of one of `calls` calls back to back, each with the next root. As in `distctl
    /// bench`, the input is not overwritten.
    pub(super) fn predict_one_of(&self, world: &World, calls: usize) -> dist_predict::Result<f64> {
        let steps = |rank: Rank| -> Steps<'_> {
            Box::new((0..calls).flat_map(move |call| (self.schedule)(rank, call % rank.world_size())))
        };
        let prediction = dist_predict::predict(&self.plan(&steps), &self.network(world))?;
        let copying = world.copy_time(self.copied, self.memory);
        let fetching =
            if self.memory < self.buffer.bytes() { world.fetch_time(self.buffer.bytes()) } else { 0.0 };
        Ok(prediction.seconds / (calls * self.trips) as f64 + copying + fetching + self.call_cost(world))
    }

    /// Returns the cost of a call in addition to its messages.
    fn call_cost(&self, world: &World) -> f64 {
        if self.is_call { world.call_cost() } else { 0.0 }
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

/// The properties of an algorithm that the prediction needs.
#[derive(Debug)]
struct Traits {
    name: String,
    order: Option<Order>,
    /// Number of messages on the longest path, of all kinds.
    rounds: usize,
    two_levels: bool,
    chunks: usize,
    /// Number of chunks that a rank copies in addition to its steps.
    copied: usize,
    chosen: bool,
}

impl<'a> Case<'a> {
    /// Returns all algorithms of a table that support the number of ranks.
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
            // The input is copied first, because the steps reduce into it.
            copied: if self.operation == Operation::ReduceScatter { two.chunks(hosts) } else { 0 },
            // The cost model is the same for all pairs of ranks, and never prefers two levels.
            chosen: false,
        };
        self.candidate(traits, move |rank, root| two.steps(rank, hosts, root).expect("they are supported"))
    }

    /// Returns the candidates for ranks without a hierarchy.
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

    /// Returns the bytes of a rank's working set, which it uses repeatedly before it goes on to other memory.
    /// If the operation does not work in place, it contains input and output, and also the copy that
    /// preserves the input.
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
            .ok_or_else(|| Error::Usage(format!("{whole} bytes cannot be divided into {chunks} chunks")))?;
        let copied = (whole / chunks.max(1) * copied) as u64 + self.copied_to_output();
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

    /// Returns the bytes that a rank copies to its output: its own part, if the schedule does not write it
    /// there.
    fn copied_to_output(&self) -> u64 {
        match self.operation {
            Operation::ReduceScatter => (self.bytes / self.world.ranks()) as u64,
            Operation::AllGather => self.bytes as u64,
            _ => 0,
        }
    }

    /// Returns the bytes of the buffer that the schedules work on.
    fn whole(&self) -> Result<usize, Error> {
        let parts = match self.operation {
            Operation::AllGather | Operation::Gather => self.world.ranks(),
            _ => 1,
        };
        let bytes = self.bytes.checked_mul(parts).filter(|&bytes| bytes <= WHOLE_MAX);
        bytes.ok_or_else(|| {
            Error::Usage(format!(
                "{} bytes for each of {} ranks are too many",
                self.bytes,
                self.world.ranks()
            ))
        })
    }
}

/// The limit keeps sums of the bytes of all ranks finite.
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
    fn copies_in_addition_to_the_steps_are_predicted(
        #[case] operation: Operation,
        #[case] name: &str,
        #[case] copied: u64,
    ) {
        let world = World::like(4, &Model::default(), true);
        let case = Case { operation, bytes: 4096, order: Order::Any, world: &world };
        let all = case.candidates(ALGORITHMS).unwrap();
        assert_eq!(all.iter().find(|candidate| candidate.name == name).unwrap().copied, copied);
    }

    /// A ring with a cost of 0, so that it is chosen.
    static FREE_RING: MessageAlgorithm =
        MessageAlgorithm { name: "free_ring", cost: |_| dist_algos::Cost::NOTHING, ..ring::ALL_REDUCE };

    #[test]
    fn an_additional_algorithm_in_the_table_is_chosen_and_predicted() {
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
