//! Operations on arrays: the shapes of results and of arguments.

use dist_collectives::ndarray::{Array2, ArrayD, Axis, IxDyn, Slice, array};
use dist_collectives::tuning::Operation;
use dist_collectives::{Communicator, Error, ReduceOp};
use dist_transport::Cause;
use rstest::rstest;

use crate::worlds::{self, Network};

/// Returns an array whose elements contain the rank and their position.
fn numbered(rank: usize, shape: &[usize]) -> ArrayD<i64> {
    let len = i64::try_from(shape.iter().product::<usize>()).unwrap();
    let start = 1000 * i64::try_from(rank).unwrap();
    ArrayD::from_shape_vec(shape, (start..start + len).collect()).unwrap()
}

/// Returns the elements in order.
fn flat(array: &ArrayD<i64>) -> Vec<i64> {
    array.iter().copied().collect()
}

fn run<T: Send + 'static>(
    world_size: usize,
    program: impl Fn(&mut Communicator) -> T + Send + Sync + 'static,
) -> Vec<T> {
    worlds::run(Network::Simulated, world_size, move |mut comm| program(&mut comm))
}

#[rstest]
#[case::two_dims(3, &[4, 8], &[12, 8])]
#[case::two_ranks(2, &[2, 3], &[4, 3])]
#[case::one_dim(5, &[3], &[15])]
#[case::no_dims(4, &[], &[4])]
#[case::no_dims_alone(1, &[], &[1])]
#[case::alone(1, &[4, 8], &[4, 8])]
#[case::no_rows(3, &[0, 8], &[0, 8])]
#[case::empty_rows(3, &[4, 0, 2], &[12, 0, 2])]
fn all_gather_multiplies_dim_0(
    #[case] world_size: usize,
    #[case] shape: &'static [usize],
    #[case] expected: &'static [usize],
) {
    for gathered in run(world_size, |comm| comm.all_gather_array(&numbered(comm.rank(), shape)).unwrap()) {
        assert_eq!(gathered.shape(), expected);
        let parts = (0..world_size).flat_map(|rank| flat(&numbered(rank, shape)));
        assert_eq!(flat(&gathered), parts.collect::<Vec<_>>());
    }
}

#[rstest]
#[case::two_dims(3, &[12, 8], &[4, 8])]
#[case::one_dim(2, &[6], &[3])]
#[case::one_row_each(4, &[4, 1, 5], &[1, 1, 5])]
#[case::alone(1, &[3, 2], &[3, 2])]
#[case::no_rows(3, &[0, 8], &[0, 8])]
#[case::empty_rows(3, &[6, 0], &[2, 0])]
fn reduce_scatter_divides_dim_0(
    #[case] world_size: usize,
    #[case] shape: &'static [usize],
    #[case] expected: &'static [usize],
) {
    let parts = run(world_size, |comm| {
        let input = numbered(comm.rank(), shape);
        let part = comm.reduce_scatter_array(&input, ReduceOp::Max).unwrap();
        assert_eq!(input, numbered(comm.rank(), shape), "the input is as it was");
        part
    });
    assert!(parts.iter().all(|part| part.shape() == expected));
    // The last rank's elements are the largest.
    assert_eq!(parts.iter().flat_map(flat).collect::<Vec<_>>(), flat(&numbered(world_size - 1, shape)));
}

#[rstest]
#[case::rows_do_not_divide(2, &[3, 2])]
#[case::rows_divide(3, &[6, 2])]
#[case::one_dim(2, &[4])]
#[case::alone(1, &[3, 2])]
#[case::no_dims_alone(1, &[])]
#[case::empty(3, &[2, 0])]
fn all_to_all_keeps_the_shape(#[case] world_size: usize, #[case] shape: &'static [usize]) {
    let outputs = run(world_size, |comm| comm.all_to_all_array(&numbered(comm.rank(), shape)).unwrap());
    for (rank, output) in outputs.iter().enumerate() {
        assert_eq!(output.shape(), shape);
        let part = output.len() / world_size;
        let expected = (0..world_size).flat_map(|from| {
            let sent = flat(&numbered(from, shape));
            sent[rank * part..(rank + 1) * part].to_vec()
        });
        assert_eq!(flat(output), expected.collect::<Vec<_>>());
    }
}

#[rstest]
#[case::two_dims(&[3, 2])]
#[case::no_dims(&[])]
#[case::empty(&[2, 0])]
fn operations_in_place_treat_arrays_like_slices(
    #[values(1, 2, 3)] world_size: usize,
    #[case] shape: &'static [usize],
) {
    type OnArray = fn(&mut Communicator, &mut ArrayD<i64>) -> Result<(), Error>;
    type OnSlice = fn(&mut Communicator, &mut [i64]) -> Result<(), Error>;
    let pairs: &'static [(OnArray, OnSlice)] = &[
        (|comm, a| comm.all_reduce_array(a, ReduceOp::Sum), |comm, a| comm.all_reduce(a, ReduceOp::Sum)),
        (|comm, a| comm.broadcast_array(a, 0), |comm, a| comm.broadcast(a, 0)),
        (|comm, a| comm.reduce_array(a, ReduceOp::Sum, 0), |comm, a| comm.reduce(a, ReduceOp::Sum, 0)),
        (|comm, a| comm.scan_array(a, ReduceOp::Sum), |comm, a| comm.scan(a, ReduceOp::Sum)),
        (
            |comm, a| comm.exclusive_scan_array(a, ReduceOp::Min),
            |comm, a| comm.exclusive_scan(a, ReduceOp::Min),
        ),
    ];
    run(world_size, move |comm| {
        for (index, (on_array, on_slice)) in pairs.iter().enumerate() {
            let mut array = numbered(comm.rank(), shape);
            let mut slice = flat(&array);
            on_array(comm, &mut array).unwrap();
            on_slice(comm, &mut slice).unwrap();
            assert_eq!(array.shape(), shape);
            assert_eq!(flat(&array), slice, "operation {index}");
        }
    });
}

/// Every rank's memory has another order, and elements are still combined by their indices.
#[test]
fn views_that_do_not_lie_in_order_are_copied() {
    run(3, |comm| {
        let shape = [4, 6];
        let lay = |source: &ArrayD<i64>| match comm.rank() {
            0 => source.clone(),
            1 => source.t().as_standard_layout().into_owned().reversed_axes(),
            _ => {
                let mut backwards = source.clone();
                backwards.invert_axis(Axis(1));
                let mut backwards = backwards.as_standard_layout().into_owned();
                backwards.invert_axis(Axis(1));
                backwards
            }
        };
        let own = lay(&numbered(comm.rank(), &shape));
        assert_eq!(own.is_standard_layout(), comm.rank() == 0);
        assert_eq!(own, numbered(comm.rank(), &shape));

        let sum = |a: &ArrayD<i64>, b: &ArrayD<i64>| a + b;
        let expected = (1..3).fold(numbered(0, &shape), |total, rank| sum(&total, &numbered(rank, &shape)));
        let mut reduced = own.clone();
        comm.all_reduce_array(&mut reduced, ReduceOp::Sum).unwrap();
        assert_eq!(reduced, expected);

        let gathered = comm.all_gather_array(&own).unwrap();
        assert_eq!(gathered.slice_axis(Axis(0), Slice::from(4..8)), numbered(1, &shape));
        let part = comm.reduce_scatter_v_array(&own, &[1, 0, 3], ReduceOp::Sum).unwrap();
        let rows = [0..1, 1..1, 1..4][comm.rank()].clone();
        assert_eq!(part, expected.slice_axis(Axis(0), Slice::from(rows)));
        let dealt = comm.all_to_all_array(&own).unwrap();
        let first = i64::try_from(8 * comm.rank()).unwrap();
        assert_eq!(flat(&dealt)[..8], (first..first + 8).collect::<Vec<_>>());

        // A part of a larger array; the rest does not change.
        let mut large = Array2::zeros((5, 5));
        let mut inner = large.slice_axis_mut(Axis(1), Slice::new(1, None, 2));
        inner.fill(i64::try_from(comm.rank()).unwrap());
        comm.broadcast_array(&mut inner, 2).unwrap();
        assert!(inner.iter().all(|&element| element == 2));
        comm.all_reduce_array(&mut inner, ReduceOp::Sum).unwrap();
        assert!(inner.iter().all(|&element| element == 6));
        assert_eq!(large.sum(), 10 * 6);
    });
}

#[rstest]
#[case::uneven(&[2, 0, 3], &[4])]
#[case::even(&[1, 1, 1], &[2, 2])]
#[case::flat(&[0, 5, 1], &[])]
#[case::all_empty(&[0, 0, 0], &[7])]
#[case::empty_rows(&[1, 2, 3], &[0])]
fn all_gather_v_puts_any_rows_together_and_reduce_scatter_v_takes_them_apart(
    #[case] rows: &'static [usize],
    #[case] row: &'static [usize],
) {
    let shape = move |rows: usize| [&[rows], row].concat();
    let all = rows.iter().sum();
    let outputs = run(3, move |comm| {
        let own = numbered(comm.rank(), &shape(rows[comm.rank()]));
        let gathered = comm.all_gather_v_array(&own, rows).unwrap();
        let part = comm.reduce_scatter_v_array(&gathered, rows, ReduceOp::Min).unwrap();
        assert_eq!(part, own);
        gathered
    });
    let parts = rows.iter().enumerate().flat_map(|(rank, &rows)| flat(&numbered(rank, &shape(rows))));
    let expected: Vec<i64> = parts.collect();
    for gathered in outputs {
        assert_eq!(gathered.shape(), shape(all));
        assert_eq!(flat(&gathered), expected);
    }
}

/// Rank `r` sends `r` elements to rank 0 and one to other ranks. Only rank 0 sends elements to itself.
#[test]
fn all_to_all_v_reads_flat_and_gives_one_list_in_rank_order() {
    let outputs = run(3, |comm| {
        let rank = comm.rank();
        let sends = |from: usize| -> Vec<usize> {
            (0..3).map(|to| if to == 0 { from } else { usize::from(to != from) }).collect()
        };
        let receives: Vec<usize> = (0..3).map(|from| sends(from)[rank]).collect();
        let input = numbered(rank, &[[2, 1], [1, 2], [3, 1]][rank]);
        comm.all_to_all_v_array(&input, &sends(rank), &receives).unwrap()
    });
    assert_eq!(outputs, [array![1000, 2000, 2001], array![0, 2002], array![1, 1001]]);
}

#[test]
fn all_to_all_v_checks_its_counts_in_a_world_of_one_too() {
    run(1, |comm| {
        let input = numbered(0, &[2, 2]);
        assert_eq!(comm.all_to_all_v_array(&input, &[4], &[4]).unwrap(), array![0, 1, 2, 3]);
        let own_part = comm.all_to_all_v_array(&input, &[4], &[3]).unwrap_err().to_string();
        assert_eq!(own_part, "all_to_all: rank 0 sends 4 elements to rank 0, which expects 3");
        let total = comm.all_to_all_v_array(&input, &[3], &[3]).unwrap_err().to_string();
        assert_eq!(total, "all_to_all: the input has 4 elements, not 3");
        let list = comm.all_to_all_v_array(&input, &[2, 2], &[4]).unwrap_err().to_string();
        assert_eq!(list, "all_to_all: 2 counts were given for 1 ranks: give one for each rank");
        let huge = comm.all_to_all_v_array(&input, &[3], &[usize::MAX / 16]).unwrap_err().to_string();
        assert_eq!(huge, total, "no memory is asked for");
        comm.barrier().unwrap();
    });
}

#[rstest]
#[case::to_another(0, 1)]
#[case::to_itself(1, 1)]
fn all_to_all_v_compares_sent_with_expected_lengths(#[case] from: usize, #[case] to: usize) {
    let errors = run(2, move |comm| {
        let mut receives = vec![2, 2];
        if comm.rank() == to {
            receives[from] = 5;
        }
        comm.all_to_all_v_array(&numbered(comm.rank(), &[4]), &[2, 2], &receives).unwrap_err()
    });
    for error in errors {
        assert_eq!(
            error.to_string(),
            format!("all_to_all: rank {from} sends 2 elements to rank {to}, which expects 5")
        );
    }
}

type Refused = fn(&mut Communicator) -> Result<ArrayD<i64>, Error>;

const REFUSED: &[(Refused, &str)] = &[
    (
        |comm| comm.reduce_scatter_array(&numbered(0, &[4, 3]), ReduceOp::Sum),
        "reduce_scatter: 4 rows cannot be divided evenly among 3 ranks: pad the array, or give the rows of each rank",
    ),
    (
        |comm| comm.reduce_scatter_array(&numbered(0, &[]), ReduceOp::Sum),
        "reduce_scatter: an array of no dims has no rows",
    ),
    (
        |comm| comm.all_to_all_array(&numbered(0, &[4, 2])),
        "all_to_all: 8 elements cannot be divided evenly among 3 ranks: pad the buffer, or use the form with counts",
    ),
    (
        |comm| comm.all_gather_v_array(&numbered(0, &[2, 3]), &[2, 2]),
        "all_gather: 2 counts were given for 3 ranks: give one for each rank",
    ),
    (
        |comm| comm.all_gather_v_array(&numbered(0, &[2, 3]), &[3, 3, 3]),
        "all_gather: the array has 2 rows, not 3",
    ),
    (
        |comm| comm.all_gather_v_array(&numbered(0, &[2, 0]), &[3, 3, 3]),
        "all_gather: the array has 2 rows, not 3",
    ),
    (
        |comm| comm.all_gather_v_array(&numbered(0, &[]), &[1, 1, 1]),
        "all_gather: an array of no dims has no rows",
    ),
    (
        |comm| comm.reduce_scatter_v_array(&numbered(0, &[4, 2]), &[1, 1, 1], ReduceOp::Sum),
        "reduce_scatter: the array has 4 rows, not 3",
    ),
    (
        |comm| comm.reduce_scatter_v_array(&numbered(0, &[4, 2]), &[usize::MAX, 1], ReduceOp::Sum),
        "reduce_scatter: 2 counts were given for 3 ranks: give one for each rank",
    ),
    (
        |comm| comm.reduce_scatter_v_array(&numbered(0, &[4, 2]), &[usize::MAX, 4, 1], ReduceOp::Sum),
        "reduce_scatter: the sum of the counts is larger than any memory",
    ),
    (
        |comm| comm.all_gather_v_array(&numbered(0, &[2, 3]), &[2, 2, usize::MAX]),
        "all_gather: the sum of the counts is larger than any memory",
    ),
    (
        |comm| comm.all_gather_array(&ArrayD::zeros(IxDyn(&[isize::MAX.unsigned_abs(), 0]))),
        "all_gather: there is no array of the output's shape",
    ),
];

#[test]
fn operations_without_a_result_are_refused_by_name_and_numbers() {
    run(3, |comm| {
        for (refused, message) in REFUSED {
            assert_eq!(refused(comm).unwrap_err().to_string(), *message);
        }
        comm.barrier().unwrap();
    });
}

type Shaped = fn(&mut Communicator, &[usize]) -> Result<(), Error>;

const SHAPED: &[(Operation, Shaped)] = &[
    (Operation::AllReduce, |comm, shape| comm.all_reduce_array(&mut numbered(0, shape), ReduceOp::Sum)),
    (Operation::Broadcast, |comm, shape| comm.broadcast_array(&mut numbered(0, shape), 0)),
    (Operation::Reduce, |comm, shape| comm.reduce_array(&mut numbered(0, shape), ReduceOp::Sum, 0)),
    (Operation::Scan, |comm, shape| comm.scan_array(&mut numbered(0, shape), ReduceOp::Sum)),
    (Operation::AllGather, |comm, shape| comm.all_gather_array(&numbered(0, shape)).map(drop)),
    (Operation::AllToAll, |comm, shape| comm.all_to_all_array(&numbered(0, shape)).map(drop)),
    (Operation::ReduceScatter, |comm, shape| {
        comm.reduce_scatter_array(&numbered(0, shape), ReduceOp::Sum).map(drop)
    }),
    // All lists of rows have the same number of elements, with different row shapes.
    (Operation::AllGather, |comm, shape| {
        let rows = vec![shape[0]; comm.world_size()];
        comm.all_gather_v_array(&numbered(0, shape), &rows).map(drop)
    }),
    (Operation::ReduceScatter, |comm, shape| {
        let rows = vec![shape[0] / comm.world_size(); comm.world_size()];
        comm.reduce_scatter_v_array(&numbered(0, shape), &rows, ReduceOp::Sum).map(drop)
    }),
];

/// The number of elements is equal everywhere; only the shapes differ.
#[rstest]
#[case::transposed(&[12, 24], &[24, 12])]
#[case::other_dims(&[12, 4], &[12, 2, 2])]
#[case::empty(&[0, 4], &[0, 2])]
#[case::no_elements(&[12, 0], &[0, 12])]
fn ranks_with_different_shapes_get_an_error(
    #[values(2, 3, 4)] world_size: usize,
    #[case] usual: &'static [usize],
    #[case] unusual: &'static [usize],
) {
    for (operation, call) in SHAPED {
        let errors = run(world_size, move |comm| {
            let is_last = comm.rank() == comm.world_size() - 1;
            let done = call(comm, if is_last { unusual } else { usual });
            done.and_then(|()| comm.barrier()).expect_err("every rank is told")
        });
        check_told(&errors, *operation);
    }
}

fn check_told(errors: &[Error], operation: Operation) {
    for error in errors {
        let (ours, theirs) = match &error {
            Error::Mismatch { ours, theirs, .. } => (**ours, **theirs),
            Error::Aborted { cause: Cause::Mismatch { .. }, theirs, reported, .. } => {
                (**theirs.as_ref().unwrap(), **reported.as_ref().unwrap())
            }
            _ => panic!("{error:?}"),
        };
        // A rank that only sends gets the error in the barrier, with the shaped call of another rank.
        let shaped = [ours, theirs].into_iter().filter(|call| call.operation == operation).count();
        assert!(shaped > 0, "{error}");
        assert!(shaped < 2 || ours.sizes != theirs.sizes, "{error}");
    }
}
