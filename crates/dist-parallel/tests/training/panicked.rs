//! Steps that panic and are caught have no effect.

use std::panic::{AssertUnwindSafe, catch_unwind};

use dist_collectives::Communicator;
use dist_parallel::fsdp::{Fsdp, FsdpOptions};
use dist_parallel::model::Ready;
use dist_parallel::optim::{Sgd, SgdOptions};
use dist_parallel::{Ddp, DdpOptions, Error, FloatType, ParamInfo, Values};
use dist_transport::sim;
use rstest::rstest;

use crate::join::{Echo, STRATEGIES};
use crate::plain::Bag;

/// The second attempt can have other arguments.
#[rstest]
fn a_step_that_panicked_leaves_nothing_for_the_next(
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
fn a_sharded_step_that_panicked_leaves_nothing_for_the_next(
    #[values(0, 1, 2, 3, 4)] strategy: usize,
    #[values(false, true)] accumulates: bool,
    #[values(false, true)] joins: bool,
    #[values(false, true)] in_the_loss: bool,
) {
    let outcome = sim::run(1, 4, move |transport| {
        let options = FsdpOptions::new(STRATEGIES[strategy]);
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

/// Instead of another step, the caller updates. This aborts the job, so a rank whose step has not panicked gets an
/// error.
#[rstest]
fn gradients_of_a_step_that_panicked_cannot_be_used(
    #[values(0, 1, 2, 3, 4, 5)] strategy: usize,
    #[values(false, true)] in_the_loss: bool,
) {
    let outcome = sim::run(1, 4, move |transport| {
        let comm = Communicator::new(transport);
        let mut round = 0;
        let batch = |_| {
            round += 1;
            let fails_now = round == 2;
            assert!(!fails_now || in_the_loss, "the second micro-batch cannot be read");
            let loss = move |output| {
                assert!(!fails_now, "the second micro-batch has no loss");
                Ok((1.0_f32, output))
            };
            Ok((vec![1.0; 3], loss))
        };
        let mut sgd = Sgd::new(SgdOptions::default()).unwrap();
        let refused = |result: &Result<(), Error>| matches!(result, Err(Error::StepPanicked));
        if let Some(&strategy) = STRATEGIES.get(strategy) {
            let mut fsdp = Fsdp::new(comm, Echo::model(), &FsdpOptions::new(strategy)).unwrap();
            let stepped = catch_unwind(AssertUnwindSafe(|| fsdp.step(8, batch).map(drop)));
            let (clipped, updated) = (fsdp.clip_gradients(1.0).map(drop), fsdp.update(&mut sgd));
            match stepped {
                Ok(stepped) => stepped.is_err(),
                Err(_panic) => refused(&clipped) && refused(&updated),
            }
        } else {
            // Another rank may have aborted the job before this one has started.
            let Ok(mut ddp) = Ddp::new(comm, Echo::model(), DdpOptions::default()) else { return true };
            catch_unwind(AssertUnwindSafe(|| ddp.step(8, batch))).unwrap_err();
            refused(&ddp.update(&mut sgd))
        }
    });
    assert_eq!(outcome.results, [true; 4]);
}
