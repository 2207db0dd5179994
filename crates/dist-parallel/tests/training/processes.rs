//! Ranks that are processes, connected by TCP.

use std::time::Duration;

use dist_collectives::Communicator;
use dist_testkit::process;
use rstest::rstest;

use crate::ddp::{options, train, train_alone};

#[rstest]
#[case(1)]
#[case(2)]
#[case(4)]
fn processes_train_what_one_process_trains(#[case] ranks: usize) {
    if process::rank().is_none() {
        let name = format!("processes::processes_train_what_one_process_trains::case_{}", ranks.ilog2() + 1);
        process::ranks(ranks, &name, Duration::from_secs(60)).assert_success();
        return;
    }
    let comm = Communicator::from_env().unwrap();
    assert_eq!(comm.world_size(), ranks);
    assert_eq!(train(comm, 8, "adamw", options(30)), train_alone(8, "adamw"));
}
