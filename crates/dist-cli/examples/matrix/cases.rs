//! The cases of the matrix: what is done, by which algorithm, in which order, with which elements.

use std::fmt;

use dist_algos::Order;
use dist_collectives::{
    Algorithm, AllGather, AllReduce, Barrier, Broadcast, DType, Reduce, ReduceOp, ReduceScatter,
    ReductionOrder,
};

/// One case: a row of calls that differ only in their length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) action: Action,
    /// None where there is nothing to choose, or where the choice is the library's.
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) order: ReductionOrder,
    pub(crate) dtype: DType,
    /// Means nothing where nothing is reduced.
    pub(crate) op: ReduceOp,
}

/// What is called.
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
    Reduce,
    AllGather,
    Broadcast,
    /// A message from each rank to its right neighbour.
    Message,
    Barrier,
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
            Self::Reduce => "reduce",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::Message => "message",
            Self::Barrier => "barrier",
        }
    }

    pub(crate) fn reduces(self) -> bool {
        !matches!(self, Self::AllGather | Self::Broadcast | Self::Message | Self::Barrier)
    }
}

/// An algorithm and the strictest order that it keeps in the world at hand.
type Way = (Option<Algorithm>, ReductionOrder);

const CHOSEN: [Way; 2] = [(None, ReductionOrder::Canonical), (None, ReductionOrder::Any)];

impl Case {
    /// Every case of a world.
    pub(crate) fn all(world_size: usize) -> Vec<Self> {
        let n = world_size;
        let reducing = [
            (Action::AllReduce, ways!(AllReduce, n, |a: AllReduce| a.order(n))),
            (Action::StartAllReduce, CHOSEN.to_vec()),
            (Action::SubgroupAllReduce, CHOSEN.to_vec()),
            (Action::SplitAllReduce, CHOSEN[..1].to_vec()),
            (Action::MeshAllReduce, CHOSEN[..1].to_vec()),
            (Action::ReduceScatter, ways!(ReduceScatter, n, |a: ReduceScatter| a.order(n))),
            (Action::Reduce, ways!(Reduce, n, |a: Reduce| a.order(n))),
        ];
        let moving = [
            (Action::AllGather, ways!(AllGather, n, |_| Order::Canonical)),
            (Action::Broadcast, ways!(Broadcast, n, |_| Order::Canonical)),
            (Action::Message, CHOSEN[..1].to_vec()),
        ];
        let mut cases = Vec::new();
        for (action, ways) in reducing {
            for dtype in DType::ALL {
                let ops = ReduceOp::PLAIN.into_iter().filter(|op| op.supports(dtype));
                for op in ops {
                    cases.extend(ways.iter().map(|&way| Self::new(action, way, dtype, op)));
                }
            }
        }
        for (action, ways) in moving {
            for dtype in DType::ALL {
                cases.extend(ways.iter().map(|&way| Self::new(action, way, dtype, ReduceOp::Sum)));
            }
        }
        let barriers = ways!(Barrier, n, |_| Order::Canonical);
        cases.extend(
            barriers.into_iter().map(|way| Self::new(Action::Barrier, way, DType::U8, ReduceOp::Sum)),
        );
        cases
    }

    fn new(action: Action, (algorithm, order): Way, dtype: DType, op: ReduceOp) -> Self {
        Self { action, algorithm, order, dtype, op }
    }
}

/// The library's choice in every order, and every algorithm that serves the world.
macro_rules! ways {
    ($algorithm:ident, $world_size:ident, $order:expr) => {{
        let mut ways = CHOSEN.to_vec();
        for &algorithm in $algorithm::ALL {
            if algorithm.supports($world_size) {
                let order: Order = $order(algorithm);
                let order =
                    if order == Order::Canonical { ReductionOrder::Canonical } else { ReductionOrder::Any };
                ways.push((Some(algorithm.into()), order));
            }
        }
        ways
    }};
}
use ways;

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let algorithm = self.algorithm.map_or("auto", |algorithm| algorithm.name());
        let Self { action, order, dtype, op, .. } = self;
        let op = if action.reduces() { op.name() } else { "-" };
        write!(f, "{}/{algorithm}/{order}/{dtype}/{op}", action.name())
    }
}
