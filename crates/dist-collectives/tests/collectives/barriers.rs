//! The barrier that names absent ranks.

use std::time::Duration;

use dist_collectives::error::TransportError;
use dist_collectives::transport::Cause;
use dist_collectives::{Communicator, Error};
use dist_transport::sim;
use rstest::rstest;

use crate::worlds::{self, Network};

const LIMIT: Duration = Duration::from_secs(8);

/// The call that absent ranks make instead of the barrier.
type Elsewhere = fn(&mut Communicator) -> Result<(), Error>;

const ELSEWHERE: [Elsewhere; 3] = [
    // They wait for each other, or for themselves, for a message that never comes.
    |comm| comm.recv(&mut [0_u8], comm.rank()),
    // They do something that never ends.
    |comm| {
        comm.runtime().sleep(4 * LIMIT);
        comm.monitored_barrier()
    },
    // They are in a call that moves nothing to rank 0.
    |comm| {
        let mut alone = comm.subgroup(&[comm.rank()])?.expect("it is a member");
        alone.recv(&mut [0_u8], 0)
    },
];

/// The index of the first call that a rank enters too late.
const LATE: usize = 1;

#[rstest]
#[case(2, &[1])]
#[case(4, &[2])]
#[case(5, &[1, 4])]
#[case(9, &[8])]
#[case(12, &[1, 2, 3, 8, 9, 11])]
#[case(6, &[1, 2, 3, 4, 5])]
fn every_rank_that_comes_learns_the_absent_ranks(
    #[case] world_size: usize,
    #[case] absent: &'static [usize],
    #[values(0, 1, 2)] elsewhere: usize,
) {
    let outcome = sim::run(3, world_size, move |transport| {
        let mut comm = Communicator::new(transport);
        if absent.contains(&comm.rank()) {
            comm.set_timeout(10 * LIMIT);
            let error = ELSEWHERE[elsewhere](&mut comm).unwrap_err();
            // A rank that comes after the others have gone learns that it is late.
            let is_late = matches!(error, Error::Late);
            let names_the_first = matches!(
                error,
                Error::Aborted { rank, cause: Cause::TimedOut { .. }, reporter: 0, .. } if rank == absent[0]
            );
            assert!(is_late || names_the_first, "{error:?}");
            assert_eq!(is_late, elsewhere == LATE, "{error:?}");
            return Duration::ZERO;
        }
        let error = comm.with_timeout(LIMIT).monitored_barrier().unwrap_err();
        let Error::Absent { ranks } = &error else { panic!("{error:?}") };
        assert_eq!(ranks, absent);
        assert!(error.is_timeout());
        assert_eq!(error.peer(), if let [alone] = absent { Some(*alone) } else { None });
        assert_eq!(error.to_string(), format!("monitored_barrier: ranks {absent:?} did not come"));
        // The job is over.
        assert!(matches!(comm.barrier(), Err(Error::Aborted { .. })));
        comm.runtime().now()
    });
    assert!(outcome.results.iter().all(|&time| time < LIMIT), "{:?}", outcome.results);
}

#[rstest]
fn rank_0_may_be_the_one_that_does_not_come(#[values(2, 3, 7)] world_size: usize) {
    let outcome = sim::run(3, world_size, |transport| {
        let mut comm = Communicator::new(transport);
        if comm.rank() == 0 {
            comm.set_timeout(10 * LIMIT);
            comm.recv(&mut [0_u8], 0).unwrap_err();
            return None;
        }
        match comm.with_timeout(LIMIT).monitored_barrier().unwrap_err() {
            Error::Absent { ranks } => Some(ranks),
            error => panic!("{error:?}"),
        }
    });
    assert!(outcome.results[1..].iter().all(|ranks| *ranks == Some(vec![0])), "{:?}", outcome.results);
}

/// Rank 0 has more time left than the others, and must still answer them within their time.
#[rstest]
fn a_late_rank_0_names_the_absent_ranks(#[values(2, 3, 6)] eighths: u32) {
    const ABSENT: usize = 2;
    let outcome = sim::run(3, 4, move |transport| {
        let mut comm = Communicator::new(transport);
        match comm.rank() {
            ABSENT => {
                comm.set_timeout(10 * LIMIT);
                comm.recv(&mut [0_u8], ABSENT).unwrap_err();
                return None;
            }
            0 => comm.runtime().sleep(LIMIT / 8 * eighths),
            _ => {}
        }
        Some(comm.with_timeout(LIMIT).monitored_barrier().unwrap_err())
    });
    for error in outcome.results.into_iter().flatten() {
        assert!(matches!(&error, Error::Absent { ranks } if *ranks == [ABSENT]), "{error:?}");
    }
}

/// The ranks that enter have less time than rank 0. They get the answer within their time, whether they enter
/// before or after it.
#[rstest]
fn a_rank_with_a_short_deadline_learns_the_absent_ranks_in_time(
    #[values(0, 1, 100)] late_ms: u64,
    #[values(2, 8, 32, 200)] divisor: u32,
) {
    const ABSENT: usize = 2;
    let outcome = sim::run(3, 4, move |transport| {
        let mut comm = Communicator::new(transport);
        let limit = match comm.rank() {
            ABSENT => {
                comm.set_timeout(10 * LIMIT);
                comm.recv(&mut [0_u8], ABSENT).unwrap_err();
                return None;
            }
            3 => LIMIT / divisor,
            _ => LIMIT,
        };
        if comm.rank() != 0 {
            comm.runtime().sleep(Duration::from_millis(late_ms));
        }
        Some(comm.with_timeout(limit).monitored_barrier().unwrap_err())
    });
    for error in outcome.results.into_iter().flatten() {
        assert!(matches!(&error, Error::Absent { ranks } if *ranks == [ABSENT]), "{error:?}");
    }
}

/// Only rank 0 receives from every rank.
#[test]
fn rank_0_hides_the_others_that_do_not_come() {
    let outcome = sim::run(3, 4, |transport| {
        let mut comm = Communicator::new(transport);
        if comm.rank().is_multiple_of(2) {
            comm.set_timeout(10 * LIMIT);
            comm.recv(&mut [0_u8], comm.rank()).unwrap_err();
            return None;
        }
        Some(comm.with_timeout(LIMIT).monitored_barrier().unwrap_err())
    });
    for error in outcome.results.into_iter().flatten() {
        assert!(matches!(&error, Error::Absent { ranks } if *ranks == [0]), "{error:?}");
    }
}

/// Rank 0 is in the barrier when another rank gives it up in another call.
#[test]
fn rank_0_has_come_though_another_call_waits_for_it_in_vain() {
    let outcome = sim::run(3, 4, |transport| {
        let mut comm = Communicator::new(transport);
        match comm.rank() {
            1 => return comm.with_timeout(LIMIT / 4).recv(&mut [0_u8], 0).unwrap_err(),
            // Rank 2 then waits for rank 0's first message when the job ends.
            2 => comm.runtime().sleep(LIMIT / 8),
            _ => {}
        }
        comm.with_timeout(LIMIT).monitored_barrier().unwrap_err()
    });
    for error in &outcome.results[1..] {
        assert!(!matches!(error, Error::Absent { .. } | Error::Late), "{error:?}");
        assert_eq!(error.peer(), Some(0), "{error:?}");
    }
    let told = &outcome.results[2];
    assert!(
        matches!(told, Error::Aborted { rank: 0, cause: Cause::TimedOut { .. }, reporter: 1, .. }),
        "{told:?}"
    );
}

/// A rank that comes after the end of the job gets the reason of the end.
#[rstest]
#[case::who_left(|_: &mut Communicator| Ok(()))]
#[case::who_does_something_else(Communicator::barrier)]
fn a_rank_that_comes_after_another_end_of_the_barrier_is_not_called_late(
    #[case] unusual: fn(&mut Communicator) -> Result<(), Error>,
) {
    let outcome = sim::run(3, 3, move |transport| {
        let mut comm = Communicator::new(transport);
        comm.set_timeout(LIMIT);
        match comm.rank() {
            1 => return unusual(&mut comm).err(),
            2 => comm.runtime().sleep(LIMIT / 8),
            _ => {}
        }
        Some(comm.monitored_barrier().unwrap_err())
    });
    let told = outcome.results[2].as_ref().unwrap();
    assert!(matches!(told, Error::Aborted { rank: 0 | 1, .. }) && !told.is_timeout(), "{told:?}");
}

/// The other ranks, which only know rank 0, report that it is absent.
#[rstest]
fn rank_0_is_late_too_when_it_comes_after_the_others_have_given_it_up(#[values(2, 4)] world_size: usize) {
    let outcome = sim::run(3, world_size, |transport| {
        let mut comm = Communicator::new(transport);
        if comm.rank() == 0 {
            comm.runtime().sleep(2 * LIMIT);
        }
        comm.with_timeout(LIMIT).monitored_barrier().unwrap_err()
    });
    for (rank, error) in outcome.results.into_iter().enumerate() {
        let told = match rank {
            0 => matches!(error, Error::Late),
            _ => matches!(&error, Error::Absent { ranks } if *ranks == [0]),
        };
        assert!(told, "rank {rank}: {error:?}");
    }
}

/// The others have left when the rank comes, well before its own deadline and theirs.
#[rstest]
fn a_rank_that_enters_after_the_count_is_reported_as_late(#[values(2, 4)] world_size: usize) {
    let outcome = sim::run(3, world_size, |transport| {
        let mut comm = Communicator::new(transport);
        comm.set_timeout(LIMIT);
        if comm.rank() == 1 {
            comm.runtime().sleep(LIMIT / 8 * 7);
        }
        comm.monitored_barrier().unwrap_err()
    });
    for (rank, error) in outcome.results.into_iter().enumerate() {
        let told = match rank {
            1 => matches!(error, Error::Late),
            _ => matches!(&error, Error::Absent { ranks } if *ranks == [1]),
        };
        assert!(told && error.is_timeout(), "rank {rank}: {error:?}");
    }
}

#[rstest]
fn it_is_a_barrier_when_all_come(
    #[values(Network::Simulated, Network::Threads)] network: Network,
    #[values(1, 2, 5, 9)] world_size: usize,
) {
    worlds::run(network, world_size, |mut comm| {
        for _ in 0..20 {
            comm.monitored_barrier().unwrap();
        }
        let mut sum = [1_u32];
        comm.all_reduce(&mut sum, dist_collectives::ReduceOp::Sum).unwrap();
    });
}

/// No rank leaves before the last rank has come, at half of the time limit.
#[test]
fn no_rank_leaves_before_the_last_has_entered() {
    let outcome = sim::run(1, 5, |transport| {
        let mut comm = Communicator::new(transport);
        comm.set_timeout(LIMIT);
        if comm.rank() == 3 {
            comm.runtime().sleep(LIMIT / 2);
        }
        comm.monitored_barrier().unwrap();
        comm.runtime().now()
    });
    assert!(outcome.results.iter().all(|&time| time >= LIMIT / 2), "{:?}", outcome.results);
}

#[test]
fn a_rank_in_another_call_is_a_mismatch() {
    worlds::run(Network::Simulated, 3, |mut comm| {
        let done = if comm.rank() == 1 { comm.barrier() } else { comm.monitored_barrier() };
        let error = done.and_then(|()| comm.barrier()).unwrap_err();
        let text = match &error {
            Error::Mismatch { .. } | Error::Aborted { .. } => error.to_string(),
            _ => panic!("{error:?}"),
        };
        assert!(text.contains(" barrier (call 1)") && text.contains("monitored_barrier (call 1)"), "{text}");
    });
}

#[cfg(feature = "tcp")]
#[test]
fn over_sockets_the_absent_are_named_too() {
    worlds::run(Network::Tcp, 4, |mut comm| {
        // The limit counts from here on, however long the ranks take to start.
        comm.barrier().unwrap();
        if comm.rank() == 2 {
            let error = comm.recv(&mut [0_u8], 3).unwrap_err();
            assert!(matches!(error, Error::Aborted { .. }), "{error:?}");
            return;
        }
        let error = comm.with_timeout(Duration::from_secs(8)).monitored_barrier().unwrap_err();
        assert!(matches!(&error, Error::Absent { ranks } if *ranks == [2]), "{error:?}");
    });
}

/// A rank that waits for long asks the coordinator, which is the only source of this information over sockets.
#[cfg(feature = "tcp")]
#[test]
fn over_sockets_a_rank_that_has_left_the_group_is_not_called_absent() {
    worlds::run(Network::Tcp, 3, |mut comm| {
        let mut group = comm.fork().unwrap();
        if comm.rank() == 2 {
            drop(group);
            let error = comm.recv(&mut [0_u8], 0).unwrap_err();
            assert!(matches!(error, Error::Aborted { .. }), "{error:?}");
            return;
        }
        let error = group.with_timeout(Duration::from_secs(20)).monitored_barrier().unwrap_err();
        assert!(!error.is_timeout() && error.peer() == Some(2), "{error:?}");
    });
}

#[rstest]
fn a_group_names_absent_ranks_as_the_world_does(#[values(0, 1, 2)] absent: usize) {
    const MEMBERS: [usize; 3] = [3, 1, 2];
    worlds::run(Network::Simulated, 4, move |mut comm| {
        let rank = comm.rank();
        let mut group = comm.subgroup(&MEMBERS).unwrap();
        let Some(group) = group.as_mut().filter(|group| group.rank() != absent) else {
            // An absent rank learns of the end when the others have given it up.
            let error = comm.recv(&mut [0_u8], rank).unwrap_err();
            assert!(matches!(error, Error::Aborted { .. }), "{error:?}");
            return;
        };
        let error = group.with_timeout(LIMIT).monitored_barrier().unwrap_err();
        assert!(matches!(&error, Error::Absent { ranks } if *ranks == [MEMBERS[absent]]), "{error:?}");
    });
}

#[test]
fn a_rank_that_dies_ends_it() {
    let errors = sim::run(1, 3, |transport| {
        let mut comm = Communicator::new(transport);
        if comm.rank() == 1 {
            return None;
        }
        Some(comm.monitored_barrier().unwrap_err())
    });
    for error in errors.results.into_iter().flatten() {
        let told = matches!(error, Error::Aborted { rank: 1, .. })
            || matches!(&error, Error::Transport { source, .. } if matches!(**source, TransportError::Closed { peer: 1, .. }));
        assert!(told, "{error:?}");
    }
}
