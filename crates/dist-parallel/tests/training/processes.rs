//! Ranks that are processes, connected by TCP or by shared memory.

use std::time::Duration;

use dist_collectives::Communicator;
use dist_testkit::process;
use rstest::rstest;

use crate::ddp::{options, train, train_alone};

#[rstest]
#[case(1, "tcp")]
#[case(2, "tcp")]
#[case(4, "tcp")]
#[case(2, "shm")]
#[case(4, "shm")]
fn processes_train_like_one_process(#[case] ranks: usize, #[case] medium: &str) {
    if process::rank().is_none() {
        let case = ranks.ilog2() + if medium == "tcp" { 1 } else { 3 };
        let name = format!("processes::processes_train_like_one_process::case_{case}");
        let limit = Duration::from_secs(60);
        process::ranks_with(ranks, &name, limit, &[("DIST_TRANSPORT", medium)]).assert_success();
        return;
    }
    let comm = Communicator::from_env().unwrap();
    assert_eq!(comm.world_size(), ranks);
    assert_eq!(train(comm, 8, "adamw", options(30)), train_alone(8, "adamw"));
}
