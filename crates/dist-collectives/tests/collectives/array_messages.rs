//! Messages from and into arrays of any layout.

use dist_collectives::ndarray::{Array2, Array3, ArrayView2, ArrayViewMut2, Axis, array, s};
use dist_collectives::{ArrayMessage, Error};

use crate::worlds::{Network, run};

/// Returns a matrix whose elements contain the rank and their position.
fn matrix(rank: usize) -> Array2<u64> {
    Array2::from_shape_fn((6, 8), |(row, column)| (1000 * rank + 10 * row + column) as u64)
}

/// A view of a part of a matrix, for a sender and for a receiver.
type View = (fn(&Array2<u64>) -> ArrayView2<'_, u64>, fn(&mut Array2<u64>) -> ArrayViewMut2<'_, u64>);

/// Views of 6, 8, 12, 18, 24, 48 and 0 elements. Equal positions in the list have equal numbers of elements.
const VIEWS: [View; 8] = [
    (|array| array.slice(s![.., 3..4]), |array| array.slice_mut(s![.., 7..8])),
    (|array| array.slice(s![2..3, ..]), |array| array.slice_mut(s![..4, ..2])),
    (|array| array.slice(s![..;-1, 1..3]), |array| array.slice_mut(s![1..5;2, 2..])),
    (|array| array.slice(s![..;2, ..6]), |array| array.slice_mut(s![..3, ..;-1]).slice_move(s![.., ..6])),
    (|array| array.slice(s![1..4, ..]), |array| array.slice_mut(s![..;2, ..])),
    (|array| array.t(), |array| array.view_mut()),
    (|array| array.view(), |array| array.view_mut().reversed_axes()),
    (|array| array.slice(s![.., 4..4]), |array| array.slice_mut(s![0..0, ..])),
];

/// Returns the matrix of rank 0 after it has received the view of rank 1.
fn expected((sent, received): View) -> Array2<u64> {
    let (source, mut own) = (matrix(1), matrix(0));
    let elements: Vec<u64> = sent(&source).iter().copied().collect();
    received(&mut own).iter_mut().zip(elements).for_each(|(place, element)| *place = element);
    own
}

#[test]
fn arrays_of_any_layout_are_sent_into_arrays_of_any_layout_and_nothing_else_changes() {
    for &network in Network::ALL {
        run(network, 2, |mut comm| {
            for (tag, view) in (0..).zip(VIEWS) {
                let mut comm = comm.with_tag(tag);
                let mut own = matrix(comm.rank());
                if comm.rank() == 0 {
                    comm.recv_array(&mut view.1(&mut own), 1).unwrap();
                    assert_eq!(own, expected(view), "view {tag}");
                    comm.recv_array(&mut view.1(&mut own), 1).unwrap();
                } else {
                    comm.send_array(&view.0(&own), 0).unwrap();
                    let pending = comm.start_send_array(&view.0(&own), 0);
                    own.fill(0);
                    let sent = pending.wait().unwrap();
                    assert!(sent.iter().eq(view.0(&matrix(1)).iter()), "view {tag}");
                }
            }
        });
    }
}

#[test]
fn arrays_meet_messages_of_slices_and_arrays_of_other_shapes() {
    for &network in Network::ALL {
        run(network, 2, |mut comm| {
            let column = [3_u64, 13, 23, 33, 43, 53];
            if comm.rank() == 0 {
                comm.send_array(&matrix(0).column(3), 1).unwrap();
                comm.send(&column, 1).unwrap();
                comm.send_array(&matrix(0).column(3), 1).unwrap();
            } else {
                let mut received = [0; 6];
                comm.recv(&mut received, 0).unwrap();
                assert_eq!(received, column);
                let mut cube = Array3::<u64>::zeros((3, 1, 2));
                for _ in 0..2 {
                    cube.fill(0);
                    comm.recv_array(&mut cube.view_mut().reversed_axes(), 0).unwrap();
                    assert!(cube.t().iter().eq(&column));
                }
            }
        });
    }
}

#[test]
fn columns_are_exchanged_between_neighbours_at_once() {
    for &network in Network::ALL {
        for is_batch in [false, true] {
            let plates = run(network, 3, move |mut comm| {
                let (left, right) = ((comm.rank() + 2) % 3, (comm.rank() + 1) % 3);
                let mut plate = Array2::from_elem((3, 4), comm.rank());
                let (mut halo_left, own, mut halo_right) =
                    plate.multi_slice_mut((s![.., 0], s![.., 1..3], s![.., 3]));
                if is_batch {
                    // The sum of each own row is sent beside the columns, from memory in index order.
                    let (sums, mut sums_of_left) = (own.sum_axis(Axis(1)), array![0, 0, 0]);
                    let mut messages = [
                        ArrayMessage::send(left, own.column(0)).with_tag(1),
                        ArrayMessage::send(right, sums.view()),
                        ArrayMessage::receive(left, sums_of_left.view_mut()),
                        ArrayMessage::send(right, own.column(1)).with_tag(2),
                        ArrayMessage::receive(right, halo_right).with_tag(1),
                        ArrayMessage::receive(left, halo_left).with_tag(2),
                    ];
                    comm.batch_arrays(&mut messages).unwrap();
                    assert_eq!(sums_of_left, array![2 * left, 2 * left, 2 * left]);
                } else {
                    let mut comm = comm.with_tag(5);
                    comm.send_recv_array(&own.column(0), left, &mut halo_right, right).unwrap();
                    comm.send_recv_array(&own.column(1), right, &mut halo_left, left).unwrap();
                }
                plate
            });
            for (rank, plate) in plates.iter().enumerate() {
                let row = array![(rank + 2) % 3, rank, rank, (rank + 1) % 3];
                assert!(plate.rows().into_iter().all(|found| found == row), "{network:?}: {plate}");
            }
        }
    }
}

#[test]
fn an_array_of_another_length_is_refused_with_both_lengths() {
    for &network in Network::ALL {
        let errors = run(network, 2, |mut comm| {
            let mut own = matrix(comm.rank());
            if comm.rank() == 0 {
                comm.recv_array(&mut own.column_mut(1), 1).unwrap_err()
            } else {
                comm.send_array(&own.row(1), 0).unwrap();
                comm.barrier().unwrap_err()
            }
        });
        let Error::Mismatch { peer: 1, ours, theirs } = &errors[0] else {
            panic!("{network:?}: {}", errors[0])
        };
        assert_eq!((ours.count, theirs.count), (6, 8), "{network:?}");
    }
}

#[test]
fn a_rank_outside_of_the_group_is_refused() {
    run(Network::Simulated, 2, |mut comm| {
        let mut own = matrix(0);
        let copy = own.clone();
        let refused = [
            comm.send_array(&copy.column(0), 2),
            comm.recv_array(&mut own.column_mut(0), 3),
            comm.send_recv_array(&copy.column(0), 0, &mut own.column_mut(0), 4),
            comm.start_send_array(&copy.column(0), 5).wait().map(drop).map_err(Error::from),
        ];
        for (rank, error) in (2..).zip(refused) {
            assert!(
                matches!(&error, Err(Error::RankOutOfRange { rank: given, .. }) if *given == rank),
                "{error:?}"
            );
        }
    });
}

#[test]
fn arrays_without_another_rank_are_not_sent_and_do_not_change() {
    run(Network::Threads, 2, |mut comm| {
        let (rank, mut own) = (comm.rank(), matrix(comm.rank()));
        comm.send_array(&own.column(1), None).unwrap();
        comm.recv_array(&mut own.column_mut(0), None).unwrap();
        comm.send_recv_array(&own.clone().column(1), None, &mut own.column_mut(0), None).unwrap();
        let sent = comm.start_send_array(&own.column(1), None).wait().unwrap();
        assert!(sent.iter().eq(own.column(1)));
        assert_eq!(own, matrix(rank));
        // An open chain of two ranks: each has one neighbour.
        let (left, right) = (rank.checked_sub(1), Some(rank + 1).filter(|right| *right < 2));
        let (first, middle, last) = own.multi_slice_mut((s![.., 0], s![.., 1..7], s![.., 7]));
        comm.batch_arrays(&mut [
            ArrayMessage::send(left, middle.column(0)).with_tag(1),
            ArrayMessage::send(right, middle.column(5)).with_tag(2),
            ArrayMessage::receive(right, last).with_tag(1),
            ArrayMessage::receive(left, first).with_tag(2),
        ])
        .unwrap();
        let (halo, source, kept) = if rank == 0 { (7, 1, 0) } else { (0, 6, 7) };
        assert_eq!(own.column(halo), matrix(1 - rank).column(source));
        assert_eq!(own.column(kept), matrix(rank).column(kept));
    });
}
