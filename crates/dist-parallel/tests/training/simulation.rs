//! Data-parallel training with its worker under virtual time.

use std::time::Duration;

use dist_collectives::Communicator;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::step::StepReport;
use dist_parallel::{Ddp, Error, FloatType, ParamInfo, Values};
use dist_transport::{Runtime, sim};
use rstest::rstest;

use crate::ddp::{options, train};
use crate::plain::{Bag, micro_batch, model, squared_error};

#[test]
fn the_seed_decides_everything_but_the_result() {
    let run =
        |seed| sim::run(seed, 4, |transport| train(Communicator::new(transport), 8, "adamw", options(30)));
    let first = run(0);
    let mut interleavings = std::collections::HashSet::new();
    for seed in 0..20 {
        let outcome = run(seed);
        assert_eq!(outcome, run(seed), "seed {seed} gives another run the second time");
        assert_eq!(outcome.results, first.results, "seed {seed} trains something else");
        interleavings.insert(outcome.trace_hash);
    }
    assert!(interleavings.len() > 15, "20 seeds gave {} interleavings", interleavings.len());
}

const MINUTE: Duration = Duration::from_secs(60);

fn infos() -> Vec<ParamInfo> {
    ["early", "late"].map(|name| ParamInfo::new(name, [2], FloatType::F32)).into()
}

/// A step of one micro-batch per rank, with a computation that takes time.
fn step(
    comm: Communicator,
    compute: impl Fn(usize, &Runtime, &mut dist_parallel::model::Ready<'_>) -> Result<(), dist_parallel::BoxError>,
) -> (Result<StepReport, Error>, [Vec<f32>; 2]) {
    let (rank, world_size, runtime) = (comm.rank(), comm.world_size(), comm.runtime().clone());
    let mut ddp = Ddp::new(comm, Bag::new(infos(), 1), options(0)).unwrap();
    let report = ddp.step_with(world_size, |_, _, ready| {
        compute(rank, &runtime, ready)?;
        Ok(0.0)
    });
    let gradients = [0, 1].map(|index| match ddp.gradient(index) {
        Some(Values::F32(values)) => values.to_vec(),
        _ => Vec::new(),
    });
    (report, gradients)
}

#[test]
fn a_peer_that_computes_for_too_long_is_named_at_the_deadline() {
    let outcome = sim::run(3, 2, |transport| {
        let (report, _) = step(Communicator::new(transport), |rank, runtime, ready| {
            if rank == 1 {
                runtime.sleep(2 * MINUTE);
            }
            ready(1, Values::F32(&[1.0; 2]))
        });
        report.unwrap_err()
    });
    let Error::Communication(source) = &outcome.results[0] else { panic!("{:?}", outcome.results) };
    assert!(source.is_timeout(), "{source}");
    assert_eq!(source.peer(), Some(1));
    assert!(matches!(&outcome.results[1], Error::Communication(_)), "{:?}", outcome.results);
    assert_eq!(outcome.elapsed, 2 * MINUTE);
}

#[test]
fn waiting_for_a_slow_peer_is_exposed_communication() {
    let outcome = sim::run(3, 3, |transport| {
        let (report, _) = step(Communicator::new(transport), |rank, runtime, ready| {
            if rank == 2 {
                runtime.sleep(MINUTE / 2);
            }
            ready(0, Values::F32(&[1.0; 2]))
        });
        let report = report.unwrap();
        (report.elapsed, report.exposed)
    });
    let slow = (MINUTE / 2, Duration::ZERO);
    let waiting = (MINUTE / 2, MINUTE / 2);
    assert_eq!(outcome.results, [waiting, waiting, slow]);
}

/// Both ranks compute for 80 seconds and end at the same time. Rank 0 reports at the beginning, so that its bucket is
/// launched with a deadline of a minute, or at the end.
fn report_early(early: bool) -> Vec<Result<StepReport, Error>> {
    let outcome = sim::run(3, 2, move |transport| {
        step(Communicator::new(transport), move |rank, runtime, ready| {
            let mut report = || ready(1, Values::F32(&[1.0; 2]));
            if early && rank == 0 {
                report()?;
                runtime.sleep(Duration::from_secs(80));
            } else {
                runtime.sleep(Duration::from_secs(80));
                report()?;
            }
            Ok(())
        })
        .0
    });
    outcome.results
}

#[test]
fn a_bucket_leaves_while_the_backward_goes_on() {
    assert!(report_early(false).iter().all(Result::is_ok));
    // The early launch shows in its deadline, which passes before the peer's bucket is launched.
    let results = report_early(true);
    let Err(Error::Communication(source)) = &results[0] else { panic!("{results:?}") };
    assert!(source.is_timeout(), "{source}");
}

#[test]
fn buckets_are_launched_in_the_order_of_the_plan() {
    let outcome = sim::run(3, 2, |transport| {
        let (report, gradients) = step(Communicator::new(transport), |rank, _, ready| {
            let order = if rank == 0 { [0_u8, 1] } else { [1, 0] };
            order.into_iter().try_for_each(|index| ready(index.into(), Values::F32(&[f32::from(index), 4.0])))
        });
        report.unwrap();
        gradients
    });
    assert_eq!(outcome.results, [[[0.0, 4.0], [1.0, 4.0]]; 2]);
}

#[rstest]
fn ranks_of_a_sharded_training_wait_as_long_as_its_communicator_is_told_to(
    #[values(false, true)] shares: bool,
    #[values(ShardingStrategy::FullShard, ShardingStrategy::NoShard)] strategy: ShardingStrategy,
) {
    let network = sim::Network::new(2);
    let network = if shares { network.with_shared_memory() } else { network };
    let outcome = network.run(move |transport| {
        let comm = Communicator::new(transport);
        let (runtime, is_slow) = (comm.runtime().clone(), comm.rank() == 1);
        let mut fsdp = Fsdp::new(comm, model(7), &FsdpOptions::new(strategy)).unwrap();
        fsdp.communicator_mut().set_timeout(10 * MINUTE);
        let report = fsdp.step(2, |index| {
            if is_slow {
                runtime.sleep(2 * MINUTE);
            }
            let (input, target) = micro_batch(0, index);
            Ok((input, squared_error(target)))
        });
        report.unwrap();
        let input = || micro_batch(0, 0).0;
        if is_slow {
            runtime.sleep(2 * MINUTE);
        }
        fsdp.forward(input()).unwrap();
    });
    assert!(outcome.elapsed >= 4 * MINUTE);
}
