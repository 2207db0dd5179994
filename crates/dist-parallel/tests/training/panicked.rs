//! Steps that panic and are caught have no effect: the trainers that no [`Strategy`](dist_parallel::trainer::Strategy)
//! builds. All others are in `strategies`.

use std::panic::{AssertUnwindSafe, catch_unwind};

use dist_collectives::Communicator;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::model::Ready;
use dist_parallel::{Ddp, DdpOptions, FloatType, ParamInfo, Values};
use dist_transport::sim;
use rstest::rstest;

use crate::join::Echo;
use crate::plain::Bag;

/// The second attempt can have other arguments.
#[rstest]
fn a_step_of_the_users_own_code_that_panicked_leaves_nothing_for_the_next(
    #[values(false, true)] accumulates: bool,
    #[values(false, true)] accumulates_again: bool,
    #[values(false, true)] joins: bool,
) {
    let outcome = sim::run(1, 2, move |transport| {
        let infos = vec![ParamInfo::new("w", [1], FloatType::F32)];
        let mut ddp =
            Ddp::new(Communicator::new(transport), Bag::new(infos, 1), DdpOptions::default()).unwrap();
        let mut attempt = |fails: bool, accumulates: bool| {
            let compute = move |_: &mut Bag, index: usize, ready: &mut Ready<'_>| {
                assert!(!fails || index % 3 < 2, "the third micro-batch cannot be read");
                ready(0, Values::F32(&[[1.0, 2.0, 6.0][index % 3]]))?;
                Ok(1.0)
            };
            if accumulates {
                ddp.accumulate_with(6, compute).unwrap();
            }
            let own = if accumulates { 0 } else { 3 };
            let report = match joins {
                true => ddp.join_with(own, compute).unwrap().unwrap(),
                false => ddp.step_with(2 * own, compute).unwrap(),
            };
            let Some(Values::F32(mean)) = ddp.gradient(0) else { panic!("there was a gradient") };
            (report.micro_batches, mean[0])
        };
        catch_unwind(AssertUnwindSafe(|| attempt(true, accumulates))).unwrap_err();
        attempt(false, accumulates_again)
    });
    assert_eq!(outcome.results, [(6, 3.0); 2]);
}

#[rstest]
fn a_step_of_replicas_in_fsdp_that_panicked_leaves_nothing_for_the_next(
    #[values(false, true)] accumulates: bool,
    #[values(false, true)] joins: bool,
    #[values(false, true)] in_the_loss: bool,
) {
    let outcome = sim::run(1, 4, move |transport| {
        let options = FsdpOptions::new(ShardingStrategy::NoShard);
        let mut fsdp = Fsdp::new(Communicator::new(transport), Echo::model(), &options).unwrap();
        let mut attempt = |fails: bool| {
            let mut round = 0;
            let mut batch = |_| {
                let fails_now = fails && round == 1;
                assert!(!fails_now || in_the_loss, "the second micro-batch cannot be read");
                let value = [1.0_f32, 5.0][round];
                round += 1;
                let loss = move |output| {
                    assert!(!fails_now, "the second micro-batch has no loss");
                    Ok((value, output))
                };
                Ok((vec![value; 3], loss))
            };
            if accumulates {
                fsdp.accumulate(8, &mut batch).unwrap();
            }
            let own = if accumulates { 0 } else { 2 };
            let report = match joins {
                true => fsdp.join(own, batch).unwrap().unwrap(),
                false => fsdp.step(4 * own, batch).unwrap(),
            };
            let part = fsdp.gradient(0);
            assert!(part.is_none_or(|(_, values)| values == Values::F32(&vec![3.0; values.len()])));
            (report.micro_batches, report.loss)
        };
        catch_unwind(AssertUnwindSafe(|| attempt(true))).unwrap_err();
        attempt(false)
    });
    assert_eq!(outcome.results, [(8, 3.0); 4]);
}
