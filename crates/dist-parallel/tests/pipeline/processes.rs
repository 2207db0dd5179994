//! Ranks that are processes, connected by TCP.

use std::time::Duration;

use dist_collectives::Communicator;
use dist_parallel::pipeline::Kind;
use dist_testkit::process;
use rstest::rstest;

use crate::model::alone;
use crate::training::{pipeline, train};

#[rstest]
#[case(Kind::OneForwardOneBackward, 2)]
#[case(Kind::Zbv, 3)]
fn processes_train_what_one_process_trains(#[case] kind: Kind, #[case] ranks: usize) {
    if process::rank().is_none() {
        let name = format!("processes::processes_train_what_one_process_trains::case_{}", ranks - 1);
        process::ranks(ranks, &name, Duration::from_secs(60)).assert_success();
        return;
    }
    let comm = Communicator::from_env().unwrap();
    assert_eq!(comm.world_size(), ranks);
    let mut pipeline = pipeline(comm, kind.schedule(ranks, 6).unwrap());
    assert_eq!(train(&mut pipeline), alone(6));
}
