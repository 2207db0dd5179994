//! Many buffers as one operation.

use dist_collectives::{Buffer, Communicator, Element, Error, ReduceOp, algorithms::ring, bf16, f16};
use dist_transport::Cause;
use rstest::rstest;

use crate::worlds::{self, Network};

/// Returns a rank's buffers: thirds, whose sums are rounded.
fn buffers<T: Element>(rank: usize, lens: &[usize]) -> Vec<Vec<T>> {
    let element = |place: usize| T::from(((place + 31 * rank) % 200) as f64 / 3.0).expect("in range");
    let buffer = |(which, &len): (usize, &usize)| (0..len).map(|index| element(7 * which + index)).collect();
    lens.iter().enumerate().map(buffer).collect()
}

fn slices<T>(buffers: &mut [Vec<T>]) -> Vec<&mut [T]> {
    buffers.iter_mut().map(Vec::as_mut_slice).collect()
}

/// Compares the result with one call for each buffer, and counts the messages of one call for all.
fn check<T: Element>(comm: &mut Communicator, lens: &[usize], op: ReduceOp) {
    let own = buffers::<T>(comm.rank(), lens);
    let (mut reduced, mut copied) = (own.clone(), own.clone());
    let root = comm.world_size() - 1;
    for (reduced, copied) in reduced.iter_mut().zip(&mut copied) {
        comm.all_reduce(reduced, op).unwrap();
        comm.broadcast(copied, root).unwrap();
    }

    let mut together = own.clone();
    let before = comm.traffic();
    comm.all_reduce_coalesced(&mut slices(&mut together), op).unwrap();
    let after = comm.traffic();
    assert_eq!(together, reduced, "{lens:?} {op:?}");
    comm.all_reduce(&mut own.concat(), op).unwrap();
    let one = comm.traffic();
    assert_eq!(after.messages_sent - before.messages_sent, one.messages_sent - after.messages_sent);
    assert_eq!(after.bytes_sent - before.bytes_sent, one.bytes_sent - after.bytes_sent);

    let mut together = own.clone();
    let before = comm.traffic();
    comm.broadcast_coalesced(&mut slices(&mut together), root).unwrap();
    let after = comm.traffic();
    assert_eq!(together, copied, "{lens:?}");
    comm.broadcast(&mut own.concat(), root).unwrap();
    let one = comm.traffic();
    assert_eq!(after.messages_sent - before.messages_sent, one.messages_sent - after.messages_sent);

    let owned = || own.iter().cloned().map(Buffer::from).collect();
    let reducing = comm.start_all_reduce_coalesced(owned(), op);
    let copying = comm.start_broadcast_coalesced(owned(), root);
    let given = |buffers: Vec<Buffer<T>>| buffers.into_iter().map(Buffer::into_vec).collect::<Vec<_>>();
    assert_eq!(given(reducing.wait().unwrap()), reduced);
    assert_eq!(given(copying.wait().unwrap()), copied);
}

#[rstest]
fn many_together_get_the_bits_that_each_would_get_alone_in_the_messages_of_one(
    #[values(1, 2, 3, 4, 5, 7, 8)] world_size: usize,
) {
    worlds::run(Network::Simulated, world_size, |mut comm| {
        let many: Vec<usize> = (0..100).map(|index| index * 7 % 50).collect();
        for lens in [&[][..], &[0], &[0, 0], &[5], &[1, 0, 7, 3], &[20_000, 1], &many] {
            check::<f32>(&mut comm, lens, ReduceOp::Mean);
            check::<bf16>(&mut comm, lens, ReduceOp::Sum);
            check::<f64>(&mut comm, lens, ReduceOp::WeightedMean(0.1));
            check::<f16>(&mut comm, lens, ReduceOp::Mean);
            check::<u8>(&mut comm, lens, ReduceOp::Xor);
        }
    });
}

/// All lists have five elements in total; none of them is equal to a single buffer.
#[rstest]
#[case::other_lengths(&[3, 2])]
#[case::an_empty_one_more(&[2, 3, 0])]
#[case::all_in_one(&[5])]
#[case::not_coalesced(&[])]
fn ranks_with_different_lists_get_an_error(
    #[values(2, 3, 5)] world_size: usize,
    #[case] other: &'static [usize],
) {
    let errors = worlds::run(Network::Simulated, world_size, move |mut comm| {
        let is_other = comm.rank() == comm.world_size() / 2;
        let done = if is_other && other.is_empty() {
            comm.all_reduce(&mut [0.0_f32; 5], ReduceOp::Sum)
        } else {
            let mut list = buffers::<f32>(0, if is_other { other } else { &[2, 3] });
            comm.all_reduce_coalesced(&mut slices(&mut list), ReduceOp::Sum)
        };
        done.and_then(|()| comm.barrier()).expect_err("every rank is told")
    });
    for error in errors {
        let sizes = match &error {
            Error::Mismatch { ours, theirs, .. } => [ours.sizes, theirs.sizes],
            Error::Aborted { cause: Cause::Mismatch { .. }, theirs, reported, .. } => {
                [theirs, reported].map(|call| call.as_ref().unwrap().sizes)
            }
            _ => panic!("{error:?}"),
        };
        assert_ne!(sizes[0], sizes[1], "{error}");
    }
}

#[test]
fn a_refused_call_leaves_no_trace_in_the_next() {
    worlds::run(Network::Simulated, 3, |mut comm| {
        let mut list = buffers::<f32>(0, &[2, 3]);
        let refused = comm
            .with_algorithm(&ring::ALL_REDUCE)
            .all_reduce_coalesced(&mut slices(&mut list), ReduceOp::Sum);
        assert!(matches!(refused, Err(Error::Order { .. })), "{refused:?}");
        // Nothing was sent, and the digest of the refused call is not in the next one.
        comm.all_reduce(&mut list[0], ReduceOp::Sum).unwrap();
    });
}

#[test]
fn refused_arguments_leave_every_buffer_as_it_was() {
    worlds::run(Network::Simulated, 2, |mut comm| {
        let own = buffers::<i32>(comm.rank(), &[2, 0, 3]);
        let mut list = own.clone();
        assert!(matches!(
            comm.all_reduce_coalesced(&mut slices(&mut list), ReduceOp::Mean),
            Err(Error::Unreducible { .. })
        ));
        let root = comm.broadcast_coalesced(&mut slices(&mut list), 2);
        assert!(matches!(root, Err(Error::RootOutOfRange { root: 2, .. })), "{root:?}");
        let started = list.into_iter().map(Buffer::from).collect();
        let failed = comm.start_all_reduce_coalesced(started, ReduceOp::Mean).wait().unwrap_err();
        assert_eq!(failed.buffer.into_iter().map(Buffer::into_vec).collect::<Vec<_>>(), own);
    });
}
