//! Each call has one deadline; the error of a call after it.

use std::error::Error as _;
use std::time::Duration;

use dist_collectives::transport::Chain;
use dist_collectives::tuning::Operation;
use dist_collectives::{Communicator, Error, ReduceOp, ReductionOrder, algorithms::ring};
use dist_transport::sim;
use rstest::rstest;

fn wait(comm: &Communicator, time: Duration) {
    comm.runtime().sleep(time);
}

const MINUTE: Duration = Duration::from_secs(60);

#[rstest]
#[case::the_default(None, MINUTE)]
#[case::half_an_hour(Some(Duration::from_secs(1800)), Duration::from_secs(1800))]
#[case::none_at_all(Some(Duration::ZERO), Duration::ZERO)]
fn a_rank_that_does_not_come_is_named_when_the_timeout_has_passed(
    #[case] timeout: Option<Duration>,
    #[case] expected: Duration,
) {
    let outcome = sim::run(5, 4, move |transport| {
        let mut comm = Communicator::new(transport);
        if let Some(timeout) = timeout {
            comm.set_timeout(timeout);
        }
        if comm.rank() == 2 {
            wait(&comm, expected + MINUTE);
            let error = comm.barrier().unwrap_err();
            assert!(matches!(error, Error::Aborted { .. }), "{error:?}");
            return comm.runtime().now();
        }
        let error = comm.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap_err();
        assert!(error.is_timeout(), "{error:?}");
        assert_eq!(error.call().unwrap().operation, Operation::AllReduce);
        assert_eq!(error.source().is_some(), matches!(error, Error::Transport { .. }), "{error:?}");
        comm.runtime().now()
    });
    for rank in [0, 1, 3] {
        assert_eq!(outcome.results[rank], expected, "rank {rank}");
    }
}

#[test]
fn the_error_names_the_peer_and_how_long_it_took() {
    let outcome = sim::run(5, 2, |transport| {
        let mut comm = Communicator::new(transport);
        if comm.rank() == 1 {
            wait(&comm, MINUTE);
            return String::new();
        }
        let error = comm.with_timeout(Duration::from_secs(7)).recv(&mut [0_u8; 3], 1).unwrap_err();
        assert_eq!(error.peer(), Some(1));
        assert_eq!(comm.timeout(), MINUTE);
        Chain(&error).to_string()
    });
    let expected = "message of 3 u8 (from rank 1) failed: \
                    receiving: rank 1 did not take part within 7s (waited 7s); \
                    if it only needs longer, set a longer time with set_timeout on every rank";
    assert_eq!(outcome.results[0], expected);
}

/// Every step of this call waits less than the timeout; all of them together wait longer.
#[test]
fn a_call_of_many_waits_has_one_deadline() {
    let outcome = sim::run(9, 4, |transport| {
        let mut comm = Communicator::new(transport);
        let mut pair = comm.subgroup(&[0, 1]).unwrap();
        let late = Duration::from_secs(50) * u32::try_from(comm.rank()).unwrap();
        wait(&comm, late);
        let started = comm.runtime().now();
        if let Some(pair) = &mut pair {
            // Rank 1 comes 50 seconds after rank 0: in time for the first wait of both.
            pair.barrier().unwrap();
        }
        let done = comm.all_reduce(&mut [1.0_f32], ReduceOp::Sum);
        assert!(done.is_err());
        comm.runtime().now() - started
    });
    assert!(outcome.results[1] <= MINUTE, "{:?}", outcome.results);
    assert!(outcome.results[0] <= Duration::from_secs(110), "{:?}", outcome.results);
}

#[test]
fn a_rank_that_gave_up_is_named_on_every_rank_at_once() {
    let outcome = sim::run(2, 5, |transport| {
        let mut comm = Communicator::new(transport);
        if comm.rank() == 3 {
            comm.abort("no more data");
            return;
        }
        let error = comm.barrier().unwrap_err();
        assert!(matches!(error, Error::Aborted { rank: 3, .. }), "{error:?}");
        let expected = "barrier (call 1) (dissemination): the job was aborted: rank 3 gave up: no more data";
        assert_eq!(Chain(&error).to_string(), expected);
        assert!(!error.is_timeout());
        // The error is permanent.
        assert!(matches!(comm.barrier().unwrap_err(), Error::Aborted { rank: 3, .. }));
    });
    assert!(outcome.elapsed.is_zero());
}

#[cfg(feature = "tcp")]
#[test]
fn the_rendezvous_ends_by_the_timeout_of_the_configuration() {
    let coordinator = dist_transport::process::Coordinator::start("127.0.0.1:0", 2, "alone", None).unwrap();
    let config = dist_collectives::Config::new(0, 2, &coordinator.address().to_string()).unwrap();
    let config = config.with_job("alone").with_external_coordinator().with_timeout(Duration::from_secs(2));
    let error = Communicator::join(&config).unwrap_err();
    assert!(error.is_timeout(), "{error:?}");
    let expected = "cannot join the world: rendezvous: rank 1 did not join within 2s: ";
    let text = Chain(&error).to_string();
    assert!(text.starts_with(expected), "{text}");
}

#[test]
fn a_simulated_run_reports_the_wait_of_every_rank() {
    let outcome = sim::run(0, 3, |transport| {
        let mut comm = Communicator::new(transport);
        comm.barrier().unwrap();
        let timeout = match comm.rank() {
            0 => return wait(&comm, 2 * MINUTE),
            1 => MINUTE / 2,
            _ => MINUTE,
        };
        comm.set_timeout(timeout);
        let mut scoped = comm.with_algorithm(&ring::ALL_REDUCE);
        scoped.with_order(ReductionOrder::Any).all_reduce(&mut [1_i32; 6], ReduceOp::Sum).unwrap_err();
    });
    let call = "all_reduce (call 2) of 6 i32 (sum, any, ring)";
    let expected = [
        "rank 0 waits for no message; it is in step 1 of barrier (call 1) (dissemination)".to_owned(),
        format!(
            "rank 1 waits in step 0 of {call} for chunk 2 from rank 0, which is in step 1 of barrier (call 1) (dissemination)"
        ),
        format!("rank 2 waits in step 1 of {call} for chunk 2 from rank 1, which is in step 0"),
    ];
    assert_eq!(outcome.waits, expected);
}
