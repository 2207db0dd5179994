//! Ranks that are processes, connected by TCP.

use std::time::Duration;

use dist_collectives::Communicator;
use dist_parallel::pipeline::ScheduleKind;
use dist_testkit::process;
use rstest::rstest;

use crate::evaluate::{TRAINED, alone_finds, train_and_evaluate};
use crate::model::alone;
use crate::training::pipeline;

#[rstest]
#[case(ScheduleKind::OneForwardOneBackward, 2)]
#[case(ScheduleKind::Zbv, 3)]
fn processes_train_and_evaluate_like_one_process(#[case] kind: ScheduleKind, #[case] ranks: usize) {
    if process::rank().is_none() {
        let name = format!("processes::processes_train_and_evaluate_like_one_process::case_{}", ranks - 1);
        process::ranks(ranks, &name, Duration::from_secs(60)).assert_success();
        return;
    }
    let comm = Communicator::from_env().unwrap();
    assert_eq!(comm.world_size(), ranks);
    let mut pipeline = pipeline(comm, kind.schedule(ranks, TRAINED).unwrap());
    assert_eq!(train_and_evaluate(&mut pipeline, 40), (alone(TRAINED), alone_finds(40)));
}
