//! A model that is too large for one process.

use std::time::Duration;

use dist_collectives::Communicator;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::model::Materialised;
use dist_parallel::optim::{AdamW, AdamWOptions};
use dist_testkit::process;
use rstest::rstest;
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::weights::{batch, initial, model};

/// Four blocks of 16 MiB: 256 MiB with gradients and AdamW's state. Each of four ranks has 64 MiB of that.
const LENS: [usize; 4] = [4 << 20; 4];

/// The memory limit of a process, including the stacks of its threads.
const LIMIT: u64 = 224 << 20;

#[rstest]
#[case::one_rank(1)]
#[case::four_ranks(4)]
fn a_model_that_does_not_fit_one_process_trains_on_four(#[case] ranks: usize) {
    if process::rank().is_none() {
        let case = if ranks == 1 { "case_1_one_rank" } else { "case_2_four_ranks" };
        let name = format!("limit::a_model_that_does_not_fit_one_process_trains_on_four::{case}");
        let job = process::ranks(ranks, &name, Duration::from_secs(60));
        if ranks == 1 {
            let output = &job.ranks[0].output;
            assert!(output.contains("memory allocation of"), "it should not fit: {output}");
        } else {
            job.assert_success();
        }
        return;
    }
    let comm = Communicator::from_env().unwrap();
    // The model's own gradient buffers are not part of this test.
    let model = model(&LENS, Materialised::Shared);
    let limit = LIMIT + 4 * LENS.iter().sum::<usize>() as u64;
    setrlimit(Resource::Data, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
    let options = FsdpOptions::new(ShardingStrategy::FullShard);
    let mut fsdp = Fsdp::with_values(comm, model, &options, initial).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    for _ in 0..2 {
        fsdp.step(ranks, batch).unwrap();
        fsdp.update(&mut optimizer).unwrap();
    }
}
