//! Steps of the user's own code that panic and are caught have no effect. Steps of blocks are in `strategies`.

use std::panic::{AssertUnwindSafe, catch_unwind};

use dist_collectives::Communicator;
use dist_parallel::model::Ready;
use dist_parallel::{Ddp, DdpOptions, FloatType, ParamInfo, Values};
use dist_transport::sim;
use rstest::rstest;

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
