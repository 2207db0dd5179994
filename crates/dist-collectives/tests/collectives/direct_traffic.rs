//! The traffic of ranks that share memory equals the traffic of their schedules, to the byte.

use dist_algos::direct::{DirectAlgorithm, DirectCollective, DirectPlan};
use dist_algos::{Partition, Source};
use dist_collectives::transport::Traffic;
use dist_transport::Rank;
use dist_transport::shm_group::{GroupLayout, Reach};
use rstest::rstest;

use crate::direct_calls::{all, call};
use crate::worlds::{self, Network};

/// Elements of each part, or of a buffer without parts: no world size divides it.
const PART: usize = 10_007;

/// The layout of the shared memory does not change the traffic.
const SHARED: GroupLayout = GroupLayout::on_host(Reach::Write);

/// Returns the traffic of a rank's schedule.
fn counted(collective: DirectCollective, algorithm: &'static DirectAlgorithm, rank: Rank) -> Traffic {
    let (world_size, parts) = (rank.world_size(), algorithm.parts(rank.world_size()));
    let cut = |len: usize| Partition::new(len, 4, parts).unwrap();
    let whole = cut(PART * world_size);
    let part_bytes = 4 * PART.div_ceil(if collective.source() == Source::Input { 1 } else { parts });
    let plan = DirectPlan::new((collective, algorithm), world_size, part_bytes, 64 << 10, SHARED).unwrap();
    let own: Vec<usize> = (0..=parts).map(|part| if part > rank.index() { PART } else { 0 }).collect();
    match collective {
        DirectCollective::ReduceScatter { of: Source::Input } => {
            plan.traffic(rank, Partition::at(&own, 4).unwrap(), Some(whole))
        }
        DirectCollective::AllGather { of: Source::Input } => {
            plan.traffic(rank, whole, Some(Partition::at(&own, 4).unwrap()))
        }
        DirectCollective::AllToAll => plan.traffic(rank, whole, Some(whole)),
        DirectCollective::AllGather { of: Source::Buffer }
        | DirectCollective::ReduceScatter { of: Source::Buffer } => plan.traffic(rank, whole, None),
        DirectCollective::Barrier => plan.traffic(rank, cut(0), None),
        _ => plan.traffic(rank, cut(PART), None),
    }
}

#[rstest]
fn every_algorithm_moves_the_bytes_of_its_schedule(#[values(2, 3, 4, 5)] world_size: usize) {
    let forms = move || all(world_size - 1);
    for &network in Network::SHARING {
        let moved = worlds::run(network, world_size, move |mut comm| {
            let after = |(collective, algorithm)| {
                call(&mut comm, (collective, algorithm), PART).unwrap();
                comm.traffic()
            };
            forms().map(after).collect::<Vec<_>>()
        });
        for (rank, moved) in Rank::all(world_size).zip(moved) {
            let mut sum = Traffic::default();
            for ((collective, algorithm), moved) in forms().zip(moved) {
                let counted = counted(collective, algorithm, rank);
                assert!(
                    counted.bytes_sent + counted.bytes_received > 0
                        || collective == DirectCollective::Barrier
                        || collective.root().is_some()
                );
                sum = sum + counted;
                assert_eq!(moved, sum, "{collective:?} {algorithm:?}, {rank:?} over {network:?}");
            }
        }
    }
}
