//! Operations that move elements: every bit arrives at its destination.

use dist_collectives::Error;
use dist_collectives::tuning::{Algorithm, Operation};
use dist_testkit::oracle;
use half::bf16;
use rstest::rstest;

use super::{HOSTS, Probe, World, assert_same, inputs, lengths, part_of, parts, ways};
use crate::worlds::{self, Network};

/// Elements that every operation must overwrite.
fn blank<T: Probe>(len: usize) -> Vec<T> {
    vec![T::one(); len]
}

fn broadcast<T: Probe>(comm: &mut World, len: usize, root: usize) {
    let inputs = inputs::<T>(comm.world_size(), len);
    for way in ways(Operation::Broadcast) {
        let mut buffer = inputs[comm.rank()].clone();
        if comm.does(way, |comm| comm.broadcast(&mut buffer, root)) {
            assert_same(&buffer, &inputs[root], &format!("broadcast of {len} from {root} by {way:?}"));
        }
    }
}

/// Checks an all_gather of equal parts of this length, in place, and of uneven parts of this many elements
/// together.
fn all_gather<T: Probe>(comm: &mut World, len: usize) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let part = len / world_size;
    let inputs = inputs::<T>(world_size, part);
    let (expected, counts) = (oracle::all_gather(&inputs), parts(world_size, len));
    let uneven = oracle::sample::<T>(9, 0, len);
    for way in ways(Operation::AllGather) {
        let context = format!("all_gather of {len} by {way:?} on {world_size}");
        let mut output = blank(expected.len());
        if comm.does(way, |comm| comm.all_gather(&inputs[rank], &mut output)) {
            assert_same(&output, &expected, &context);
        }
        let mut buffer = blank(expected.len());
        buffer[rank * part..][..part].copy_from_slice(&inputs[rank]);
        if comm.does(way, |comm| comm.all_gather_in_place(&mut buffer)) {
            assert_same(&buffer, &expected, &context);
        }
        let mut output = blank(len);
        let own = part_of(&uneven, &counts, rank);
        if comm.does(way, |comm| comm.all_gather_v(own, &counts, &mut output)) {
            assert_same(&output, &uneven, &context);
        }
    }
}

fn gather<T: Probe>(comm: &mut World, len: usize, root: usize) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let inputs = inputs::<T>(world_size, len / world_size);
    let (expected, counts) = (oracle::all_gather(&inputs), parts(world_size, len));
    let uneven = oracle::sample::<T>(9, 0, len);
    let at_root = |len: usize| blank(if rank == root { len } else { 0 });
    for way in ways(Operation::Gather) {
        let context = format!("gather of {len} to {root} by {way:?} on {world_size}");
        let mut output = at_root(expected.len());
        if comm.does(way, |comm| comm.gather(&inputs[rank], &mut output, root)) && rank == root {
            assert_same(&output, &expected, &context);
        }
        let mut output = at_root(len);
        let own = part_of(&uneven, &counts, rank);
        if comm.does(way, |comm| comm.gather_v(own, &counts, &mut output, root)) && rank == root {
            assert_same(&output, &uneven, &context);
        }
    }
}

fn scatter<T: Probe>(comm: &mut World, len: usize, root: usize) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let (part, counts) = (len / world_size, parts(world_size, len));
    let all = oracle::sample::<T>(9, 0, len);
    let at_root = |len: usize| if rank == root { &all[..len] } else { &[] };
    for way in ways(Operation::Scatter) {
        let context = format!("scatter of {len} from {root} by {way:?} on {world_size}");
        let mut output = blank(part);
        if comm.does(way, |comm| comm.scatter(at_root(part * world_size), &mut output, root)) {
            assert_same(&output, &all[rank * part..][..part], &context);
        }
        let mut output = blank(counts[rank]);
        if comm.does(way, |comm| comm.scatter_v(at_root(len), &counts, &mut output, root)) {
            assert_same(&output, part_of(&all, &counts, rank), &context);
        }
    }
}

fn all_to_all<T: Probe>(comm: &mut World, len: usize) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let part = len / world_size;
    let whole = part * world_size;
    let inputs = inputs::<T>(world_size, len);
    let expected: Vec<T> = inputs.iter().flat_map(|input| input[rank * part..][..part].to_vec()).collect();
    // The number of elements that each rank sends to each rank.
    let counts: Vec<Vec<usize>> = (0..world_size)
        .map(|sender| {
            let mut counts = parts(world_size, len);
            counts.rotate_right(sender);
            counts
        })
        .collect();
    let received: Vec<usize> = counts.iter().map(|sent| sent[rank]).collect();
    let uneven: Vec<T> =
        inputs.iter().zip(&counts).flat_map(|(input, sent)| part_of(input, sent, rank).to_vec()).collect();
    for way in ways(Operation::AllToAll) {
        let context = format!("all_to_all of {len} by {way:?} on {world_size}");
        let mut output = blank(whole);
        if comm.does(way, |comm| comm.all_to_all(&inputs[rank][..whole], &mut output)) {
            assert_same(&output, &expected, &context);
        }
        let mut output = blank(uneven.len());
        if let Some(even) = way.filter(|way| way.name() == "bruck" || matches!(way, Algorithm::Direct(_))) {
            let mut comm = comm.with_algorithm(even);
            let refused = comm.all_to_all_v(&inputs[rank], &counts[rank], &mut output, &received);
            assert!(matches!(refused, Err(Error::NeedsEvenParts { .. })), "{context}: {refused:?}");
            continue;
        }
        if comm.does(way, |comm| comm.all_to_all_v(&inputs[rank], &counts[rank], &mut output, &received)) {
            assert_same(&output, &uneven, &context);
        }
    }
}

fn barriers(comm: &mut World) {
    for way in ways(Operation::Barrier) {
        comm.does(way, |comm| comm.barrier());
    }
    comm.monitored_barrier().expect("every rank calls it");
}

fn check<T: Probe>(comm: &mut World, lengths: &[usize], roots: impl Fn(usize) -> Vec<usize>) {
    for &len in lengths {
        all_gather::<T>(comm, len);
        all_to_all::<T>(comm, len);
        for root in roots(len) {
            broadcast::<T>(comm, len, root);
            gather::<T>(comm, len, root);
            scatter::<T>(comm, len, root);
        }
    }
    barriers(comm);
}

#[rstest]
fn every_algorithm_moves_every_bit_of_every_length(
    #[values(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17)] world_size: usize,
) {
    worlds::run(Network::Simulated, world_size, |comm| {
        let mut comm = World::new(comm);
        let world_size = comm.world_size();
        check::<f32>(&mut comm, &lengths(world_size), |len| vec![len % world_size]);
        check::<u8>(&mut comm, &[127], |len| vec![(len + 1) % world_size]);
    });
}

#[rstest]
fn every_algorithm_moves_every_bit_from_and_to_every_root(#[values(1, 2, 3, 5, 6, 8, 11)] world_size: usize) {
    worlds::run(Network::Simulated, world_size, |comm| {
        let mut comm = World::new(comm);
        let world_size = comm.world_size();
        check::<bf16>(&mut comm, &[world_size + 1], |_| (0..world_size).collect());
    });
}

#[rstest]
fn every_algorithm_moves_every_bit_between_threads(#[values(2, 3, 5, 8)] world_size: usize) {
    worlds::run(Network::Threads, world_size, |comm| {
        let mut comm = World::new(comm);
        let world_size = comm.world_size();
        check::<u64>(&mut comm, &lengths(world_size), |len| vec![len % world_size]);
        check::<i8>(&mut comm, &[127], |_| (0..world_size).collect());
    });
}

#[rstest]
fn two_levels_move_every_bit(#[values(0, 1, 2, 3, 4, 5, 6)] hosts: usize) {
    let hosts = HOSTS[hosts];
    worlds::run(Network::Simulated, hosts.len(), move |comm| {
        let mut comm = World::among(comm, hosts);
        check::<f32>(&mut comm, &lengths(hosts.len()), |len| vec![len % hosts.len()]);
        check::<u8>(&mut comm, &[20], |_| (0..hosts.len()).collect());
    });
}

#[cfg(all(feature = "shm", target_os = "linux"))]
#[rstest]
fn every_algorithm_moves_every_bit_between_processes(
    #[values(Network::Tcp, Network::Shm)] network: Network,
    #[values(1, 2, 3, 4, 5)] world_size: usize,
) {
    worlds::run(network, world_size, |comm| {
        let mut comm = World::new(comm);
        let world_size = comm.world_size();
        check::<f64>(&mut comm, &lengths(world_size), |len| vec![len % world_size]);
    });
}

#[test]
fn bits_of_numbers_are_preserved() {
    let odd =
        [f32::NAN, -f32::NAN, f32::from_bits(0x7fa0_0001), f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e-45];
    worlds::run(Network::Simulated, 3, move |mut comm| {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        let mut buffer = if comm.rank() == 2 { odd } else { [1.0; 7] };
        comm.broadcast(&mut buffer, 2).unwrap();
        assert_eq!(bits(&buffer), bits(&odd));
        let mut gathered = [0.0; 21];
        comm.all_gather(&odd, &mut gathered).unwrap();
        let mut exchanged = [0.0; 21];
        comm.all_to_all(&gathered, &mut exchanged).unwrap();
        assert_eq!(bits(&exchanged), bits(&odd.repeat(3)));
    });
}
