//! The cases of the matrix: an operation, an algorithm, an order and an element type each.

use std::fmt;

use dist_collectives::algorithms::AlgorithmTable;
use dist_collectives::tuning::{Algorithm, Operation};
use dist_collectives::{DType, ReduceOp, ReductionOrder};

/// One case: a row of calls that differ only in their length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) action: Action,
    /// `None` if the library chooses, or if the operation has only one.
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) order: ReductionOrder,
    pub(crate) dtype: DType,
    /// Ignored if nothing is reduced.
    pub(crate) op: ReduceOp,
}

/// The call of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    AllReduce,
    /// The all_reduce that does not block.
    StartAllReduce,
    /// An all_reduce among every second rank.
    SubgroupAllReduce,
    /// An all_reduce among the ranks of one colour, numbered backwards.
    SplitAllReduce,
    /// An all_reduce along one axis of a mesh.
    MeshAllReduce,
    ReduceScatter,
    /// A reduce_scatter of parts of different sizes, like all calls that end in `V`.
    ReduceScatterV,
    Reduce,
    Scan,
    ExclusiveScan,
    AllGather,
    AllGatherV,
    Broadcast,
    Gather,
    Scatter,
    AllToAll,
    AllToAllV,
    /// A message from each rank to its right neighbour.
    Message,
    Barrier,
    MonitoredBarrier,
}

impl Action {
    fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::StartAllReduce => "start_all_reduce",
            Self::SubgroupAllReduce => "subgroup_all_reduce",
            Self::SplitAllReduce => "split_all_reduce",
            Self::MeshAllReduce => "mesh_all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::ReduceScatterV => "reduce_scatter_v",
            Self::Reduce => "reduce",
            Self::Scan => "scan",
            Self::ExclusiveScan => "exclusive_scan",
            Self::AllGather => "all_gather",
            Self::AllGatherV => "all_gather_v",
            Self::Broadcast => "broadcast",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all_to_all",
            Self::AllToAllV => "all_to_all_v",
            Self::Message => "message",
            Self::Barrier => "barrier",
            Self::MonitoredBarrier => "monitored_barrier",
        }
    }

    pub(crate) fn reduces(self) -> bool {
        let gathers = matches!(self, Self::AllGather | Self::AllGatherV | Self::Gather);
        let deals = matches!(self, Self::Broadcast | Self::Scatter | Self::AllToAll | Self::AllToAllV);
        !gathers && !deals && !self.is_barrier() && self != Self::Message
    }

    pub(crate) fn is_barrier(self) -> bool {
        matches!(self, Self::Barrier | Self::MonitoredBarrier)
    }

    fn has(self, op: ReduceOp) -> bool {
        op != ReduceOp::Mean || !matches!(self, Self::Scan | Self::ExclusiveScan)
    }
}

/// An algorithm, or `None` for the library's choice, and the strictest order that it keeps in this world.
type AlgorithmAndOrder = (Option<Algorithm>, ReductionOrder);

const CHOSEN: [AlgorithmAndOrder; 2] = [(None, ReductionOrder::Canonical), (None, ReductionOrder::Any)];

impl Case {
    /// Returns every case of a world, with the algorithms of a table.
    pub(crate) fn all(table: AlgorithmTable<'_>, world_size: usize) -> Vec<Self> {
        let ways = |operation| ways(table, operation, world_size);
        let reducing = [
            (Action::AllReduce, ways(Operation::AllReduce)),
            (Action::StartAllReduce, CHOSEN.to_vec()),
            (Action::SubgroupAllReduce, CHOSEN.to_vec()),
            (Action::SplitAllReduce, CHOSEN[..1].to_vec()),
            (Action::MeshAllReduce, CHOSEN[..1].to_vec()),
            (Action::ReduceScatter, ways(Operation::ReduceScatter)),
            (Action::ReduceScatterV, ways(Operation::ReduceScatter)),
            (Action::Reduce, ways(Operation::Reduce)),
            (Action::Scan, ways(Operation::Scan)),
            (Action::ExclusiveScan, ways(Operation::ExclusiveScan)),
        ];
        let moving = [
            (Action::AllGather, ways(Operation::AllGather)),
            (Action::AllGatherV, ways(Operation::AllGather)),
            (Action::Broadcast, ways(Operation::Broadcast)),
            (Action::Gather, ways(Operation::Gather)),
            (Action::Scatter, ways(Operation::Scatter)),
            (Action::AllToAll, ways(Operation::AllToAll)),
            (Action::AllToAllV, CHOSEN[..1].to_vec()),
            (Action::Message, CHOSEN[..1].to_vec()),
        ];
        let mut cases = Vec::new();
        for (action, ways) in reducing {
            for dtype in DType::ALL {
                let ops = ReduceOp::PLAIN.into_iter().filter(|&op| op.supports(dtype) && action.has(op));
                for op in ops {
                    // Algorithms treat all reductions alike, so two of them are enough for each algorithm.
                    let both = matches!(op, ReduceOp::Sum | ReduceOp::Max);
                    let ways = ways.iter().filter(|(algorithm, _)| both || algorithm.is_none());
                    cases.extend(ways.map(|&way| Self::new(action, way, dtype, op)));
                }
            }
        }
        for (action, ways) in moving {
            for dtype in DType::ALL {
                cases.extend(ways.iter().map(|&way| Self::new(action, way, dtype, ReduceOp::Sum)));
            }
        }
        let barriers = ways(Operation::Barrier);
        let barriers = barriers.into_iter().map(|way| (Action::Barrier, way));
        let barriers = barriers.chain([(Action::MonitoredBarrier, CHOSEN[0])]);
        cases.extend(barriers.map(|(action, way)| Self::new(action, way, DType::U8, ReduceOp::Sum)));
        cases
    }

    fn new(action: Action, (algorithm, order): AlgorithmAndOrder, dtype: DType, op: ReduceOp) -> Self {
        Self { action, algorithm, order, dtype, op }
    }
}

/// Returns the library's choice in every order, and every algorithm of the table that sends messages and supports the
/// world.
fn ways(table: AlgorithmTable<'_>, operation: Operation, world_size: usize) -> Vec<AlgorithmAndOrder> {
    let by_messages = operation.algorithms_in(table).filter(|it| matches!(it, Algorithm::Messages(_)));
    let way = |algorithm: Algorithm| {
        let canonical = algorithm.keeps(ReductionOrder::Canonical.least(), world_size);
        let order = if canonical { ReductionOrder::Canonical } else { ReductionOrder::Any };
        (Some(algorithm), order)
    };
    let served = by_messages.filter(|algorithm| algorithm.supports(world_size)).map(way);
    CHOSEN.into_iter().chain(served).collect()
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let algorithm = self.algorithm.map_or("auto", |algorithm| algorithm.name());
        let Self { action, order, dtype, op, .. } = self;
        let op = if action.reduces() { op.name() } else { "-" };
        write!(f, "{}/{algorithm}/{order}/{dtype}/{op}", action.name())
    }
}
