//! Arguments that make no sense are refused before anything is sent, also in a world of one.

use dist_collectives::{
    AllGather, AllReduce, Communicator, DType, Error, Operation, ReduceOp, ReduceScatter, ReductionOrder,
};

use crate::worlds::{self, Network};

type Program = fn(&mut Communicator) -> Result<(), Error>;

/// Makes a call that is refused on every rank, and shows that the communicator lives on.
#[track_caller]
fn check(world_size: usize, call: Program, message: &str) {
    let messages = worlds::run(Network::Simulated, world_size, move |mut comm| {
        let message = call(&mut comm).expect_err("refused").to_string();
        let mut sum = [1_u64];
        comm.all_reduce(&mut sum, ReduceOp::Sum).expect("the communicator lives on");
        assert_eq!(sum, [world_size as u64]);
        assert_eq!(comm.traffic().messages_sent > 0, world_size > 1);
        message
    });
    assert!(messages.iter().all(|found| found == message), "{messages:?}");
}

const REFUSED: &[(usize, Program, &str)] = &[
    (
        1,
        |comm| comm.all_reduce(&mut [1_i32], ReduceOp::Mean),
        "integers have no mean: i32 can be reduced by sum, product, min and max",
    ),
    (
        3,
        |comm| comm.reduce(&mut [1_u8], ReduceOp::Mean, 0),
        "integers have no mean: u8 can be reduced by sum, product, min and max",
    ),
    (
        2,
        |comm| comm.reduce_scatter(&[0_u64; 4], &mut [0; 2], ReduceOp::Mean),
        "integers have no mean: u64 can be reduced by sum, product, min and max",
    ),
    (1, |comm| comm.broadcast(&mut [1.0_f32], 1), "broadcast: root 1 is outside a group of 1"),
    (3, |comm| comm.broadcast(&mut [1.0_f32], 3), "broadcast: root 3 is outside a group of 3"),
    (3, |comm| comm.reduce(&mut [1.0_f32], ReduceOp::Sum, 7), "reduce: root 7 is outside a group of 3"),
    (
        1,
        |comm| comm.all_gather(&[1.0_f32; 2], &mut [0.0; 3]),
        "all_gather: 3 elements are not 1 ranks times 2 elements",
    ),
    (
        3,
        |comm| comm.all_gather(&[1.0_f32; 2], &mut [0.0; 5]),
        "all_gather: 5 elements are not 3 ranks times 2 elements",
    ),
    (
        3,
        |comm| comm.reduce_scatter(&[1.0_f32; 7], &mut [0.0; 2], ReduceOp::Sum),
        "reduce_scatter: 7 elements are not 3 ranks times 2 elements",
    ),
    (
        1,
        |comm| comm.reduce_scatter(&[1.0_f32; 7], &mut [0.0; 2], ReduceOp::Sum),
        "reduce_scatter: 7 elements are not 1 ranks times 2 elements",
    ),
    (1, |comm| comm.send(&[1_u8], 1), "rank 1 is outside a group of 1"),
    (2, |comm| comm.recv(&mut [1_u8], 2), "rank 2 is outside a group of 2"),
    (
        3,
        |comm| comm.with_algorithm(AllReduce::Ring).all_reduce(&mut [1.0_f32], ReduceOp::Sum),
        "all_reduce by ring does not reduce in canonical order in a group of 3",
    ),
    (
        3,
        |comm| {
            comm.with_algorithm(ReduceScatter::HalvingDoubling).reduce_scatter(
                &[0_u8; 3],
                &mut [0],
                ReduceOp::Sum,
            )
        },
        "reduce_scatter by halving_doubling does not work for a group of 3",
    ),
    (
        3,
        |comm| comm.with_algorithm(AllGather::RecursiveDoubling).all_gather(&[0_u8], &mut [0; 3]),
        "all_gather by recursive_doubling does not work for a group of 3",
    ),
    (2, |comm| comm.subgroup(&[]).map(drop), "a group cannot be made of these ranks"),
    (2, |comm| comm.subgroup(&[0, 2]).map(drop), "a group cannot be made of these ranks"),
    (2, |comm| comm.subgroup(&[1, 1]).map(drop), "a group cannot be made of these ranks"),
    (
        1,
        |comm| comm.start_all_reduce(vec![1_i8], ReduceOp::Mean).wait().map(drop).map_err(Error::from),
        "integers have no mean: i8 can be reduced by sum, product, min and max",
    ),
];

#[test]
fn what_makes_no_sense_is_refused_with_its_numbers() {
    for &(world_size, call, message) in REFUSED {
        check(world_size, call, message);
    }
}

#[test]
fn refusals_say_what_they_are_in_their_types() {
    worlds::run(Network::Simulated, 1, |mut comm| {
        let error = comm.all_reduce(&mut [1_i32], ReduceOp::Mean).unwrap_err();
        assert!(matches!(error, Error::NoMean { dtype: DType::I32 }));
        let error = comm.broadcast(&mut [1_i32], 4).unwrap_err();
        let root = Error::RootOutOfRange { operation: Operation::Broadcast, root: 4, world_size: 1 };
        assert_eq!(format!("{error:?}"), format!("{root:?}"));
        assert!(!error.is_timeout() && error.peer().is_none() && error.call().is_none());
    });
}

#[test]
fn a_guard_changes_the_settings_for_one_call() {
    worlds::run(Network::Simulated, 1, |mut comm| {
        let before = (comm.timeout(), comm.order());
        let second = std::time::Duration::from_secs(1);
        {
            let mut scoped = comm.with_timeout(second);
            assert_eq!(scoped.timeout(), second);
            let both = scoped.with_order(ReductionOrder::Any);
            assert_eq!((both.timeout(), both.order()), (second, ReductionOrder::Any));
        }
        comm.with_timeout(second).with_algorithm(AllReduce::Ring).barrier().unwrap();
        assert_eq!((comm.timeout(), comm.order()), before);
    });
}
