//! Messages from and into memory with gaps.

use dist_collectives::{Error, Strided, StridedMut};

use crate::worlds::{Network, run};

/// The rows and columns of a matrix.
const ROWS: usize = 50;
const COLUMNS: usize = 40;

/// Returns a matrix whose elements contain the rank and their position.
fn matrix(rank: usize) -> Vec<u64> {
    (0..ROWS * COLUMNS).map(|place| (10_000 * rank + place) as u64).collect()
}

/// Block length, stride and start of a view of all rows.
const VIEWS: [(usize, usize, usize); 4] =
    [(1, COLUMNS, 7), (5, COLUMNS, 0), (39, COLUMNS, 1), (40, COLUMNS, 0)];

/// Returns the places of a view's elements in the matrix.
fn places((block_len, stride, start): (usize, usize, usize)) -> impl Iterator<Item = usize> {
    (0..ROWS).flat_map(move |block| (0..block_len).map(move |place| start + block * stride + place))
}

#[test]
fn views_are_sent_into_views_and_nothing_else_changes() {
    for &network in Network::ALL {
        run(network, 2, |mut comm| {
            for (tag, (len, stride, start)) in (0..).zip(VIEWS) {
                let mut comm = comm.with_tag(tag);
                let (rank, own) = (comm.rank(), matrix(comm.rank()));
                let mut expected = own.clone();
                let mut received = own.clone();
                if rank == 0 {
                    comm.send_strided(Strided::new(&own[start..], ROWS, len, stride).unwrap(), 1).unwrap();
                } else {
                    let view = StridedMut::new(&mut received[start..], ROWS, len, stride).unwrap();
                    comm.recv_strided(view, 0).unwrap();
                    places((len, stride, start)).for_each(|place| expected[place] -= 10_000);
                }
                assert!(received == expected, "blocks of {len}");
            }
        });
    }
}

#[test]
fn columns_are_exchanged_and_match_messages_without_gaps() {
    for &network in Network::ALL {
        run(network, 2, |mut comm| {
            let (rank, mut own) = (comm.rank(), matrix(comm.rank()));
            let other = matrix(1 - rank);
            let copy = own.clone();
            let last = Strided::new(&copy[COLUMNS - 1..], ROWS, 1, COLUMNS).unwrap();
            let first = StridedMut::new(&mut own, ROWS, 1, COLUMNS).unwrap();
            comm.send_recv_strided(last, 1 - rank, first, 1 - rank).unwrap();
            for row in 0..ROWS {
                assert_eq!(own[row * COLUMNS], other[row * COLUMNS + COLUMNS - 1]);
                assert_eq!(own[row * COLUMNS + 1], copy[row * COLUMNS + 1]);
            }
            let mut column = vec![0; ROWS];
            if rank == 0 {
                comm.send_strided(last, 1).unwrap();
                comm.send(&last.to_vec(), 1).unwrap();
            } else {
                comm.recv(&mut column, 0).unwrap();
                assert!(column.iter().copied().eq((0..ROWS).map(|row| other[row * COLUMNS + COLUMNS - 1])));
                comm.recv_strided(StridedMut::new(&mut own[3..], ROWS, 1, COLUMNS).unwrap(), 0).unwrap();
                assert_eq!(own[3], column[0]);
            }
        });
    }
}

#[test]
fn views_outside_of_a_slice_and_blocks_that_overlap_are_refused() {
    let elements = [0_u8; 10];
    for (blocks, block_len, stride) in [(0, 0, 0), (0, 3, 1), (1, 10, 0), (2, 5, 5), (3, 2, 4), (3, 0, 5)] {
        let view = Strided::new(&elements, blocks, block_len, stride).unwrap();
        assert_eq!(view.len(), blocks * block_len);
        assert_eq!(view.to_vec().len(), view.len());
    }
    for (blocks, block_len, stride) in
        [(1, 11, 0), (2, 5, 6), (3, 2, 5), (2, 3, 2), (usize::MAX, 1, 1), (2, 1, usize::MAX)]
    {
        let error = Strided::new(&elements, blocks, block_len, stride).unwrap_err();
        assert!(matches!(error, Error::Strided { len: 10, .. }), "{error}");
        assert!(StridedMut::new(&mut [0_u8; 10], blocks, block_len, stride).is_err());
    }
}

#[test]
fn views_without_another_rank_are_not_sent_and_do_not_change() {
    run(Network::Threads, 2, |mut comm| {
        let (rank, mut matrix) = (comm.rank(), (0..12).collect::<Vec<u32>>());
        let before = matrix.clone();
        let column = |index: usize| Strided::new(&before[index..], 3, 1, 4).unwrap();
        comm.send_strided(column(0), None).unwrap();
        comm.recv_strided(StridedMut::new(&mut matrix, 3, 1, 4).unwrap(), None).unwrap();
        let (left, right) = (rank.checked_sub(1), Some(rank + 1).filter(|right| *right < 2));
        let halo = StridedMut::new(&mut matrix[3..], 3, 1, 4).unwrap();
        comm.send_recv_strided(column(1), left, halo, right).unwrap();
        let mut expected = before.clone();
        if rank == 0 {
            (0..3).for_each(|row| expected[4 * row + 3] = before[4 * row + 1]);
        }
        assert_eq!(matrix, expected);
    });
}
