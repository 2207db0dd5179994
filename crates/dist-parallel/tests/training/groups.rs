//! Optimizers with parameter groups, compared with one optimizer per group: equal to the last bit.

use dist_collectives::Communicator;
use dist_parallel::local_sgd::{LocalSgd, LocalSgdOptions};
use dist_parallel::optim::Optimizer;
use dist_parallel::{FloatType, ParamInfo, Params as _};
use dist_transport::sim;
use rstest::rstest;

use crate::by_hand::{ByHand, grouped};
use crate::checkpoint::{STEPS, TrainingWay, WAYS, ranks_of, train};
use crate::plain::{Bag, bits};

fn alone(name: &'static str, steps: u64) -> Vec<u32> {
    train(tempfile::tempdir().unwrap().path(), 1, TrainingWay::Ddp, name, steps).remove(0)
}

/// The weight with other options is shared by two blocks.
#[rstest]
fn groups_train_like_separate_optimizers(
    #[values(0, 1, 2, 3, 4, 5)] way: usize,
    #[values("groups", "adamw")] name: &'static str,
) {
    let directory = tempfile::tempdir().unwrap();
    let trained = train(directory.path(), ranks_of(WAYS[way]), WAYS[way], name, STEPS);
    let expected = alone("by hand", STEPS);
    for (rank, trained) in trained.iter().enumerate() {
        assert_eq!(*trained == expected, name == "groups", "rank {rank}");
    }
}

/// The state of a parameter does not depend on its group, so training continues with other groups or without.
#[rstest]
#[case::the_same_groups("groups", "groups", "by hand", "by hand")]
#[case::groups_from_then_on("adamw", "groups", "adamw", "by hand")]
#[case::no_groups_from_then_on("groups", "adamw", "by hand", "adamw")]
fn a_checkpoint_goes_on_with_the_groups_that_are_given(
    #[case] first: &'static str,
    #[case] then: &'static str,
    #[case] expected_first: &'static str,
    #[case] expected_then: &'static str,
    #[values(0, 1, 5)] before: usize,
    #[values(0, 1, 3)] after: usize,
) {
    let [directory, other] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    train(other.path(), 1, TrainingWay::Ddp, expected_first, 3);
    let expected = train(other.path(), 1, TrainingWay::Ddp, expected_then, STEPS).remove(0);
    train(directory.path(), ranks_of(WAYS[before]), WAYS[before], first, 3);
    let trained = train(directory.path(), ranks_of(WAYS[after]), WAYS[after], then, STEPS);
    assert!(trained.iter().all(|bits| *bits == expected));
}

/// Each rank's own optimizer has the groups.
#[test]
fn local_sgd_has_parameter_groups_too() {
    let infos = [("w", vec![2, 3]), ("b", vec![3]), ("other", vec![3, 1])]
        .map(|(name, shape)| ParamInfo::new(name, shape, FloatType::F32));
    let train = |by_hand: bool| {
        let infos = infos.to_vec();
        let program = move |transport| {
            let comm = Communicator::new(transport);
            let mut optimizer: Box<dyn Optimizer> = match by_hand {
                true => Box::new(ByHand::new(&infos, "other")),
                false => Box::new(grouped(&infos, "other")),
            };
            let first = 100 * comm.rank() as u64;
            let model = Bag::new(infos.clone(), 7);
            let mut local = LocalSgd::new(comm, model, LocalSgdOptions::diloco(2)).unwrap();
            for step in 0..4 {
                local
                    .step_with(|model| {
                        let gradients = Bag::new(infos.clone(), first + step);
                        for index in 0..infos.len() {
                            let gradient = gradients.values(index);
                            let mut outcome = Ok(());
                            model.write(index, &mut |values| {
                                outcome = optimizer.update(index, values, gradient);
                            })?;
                            outcome?;
                        }
                        Ok(0.0)
                    })
                    .unwrap();
            }
            bits(local.model())
        };
        sim::run(1, 2, program).results
    };
    assert_eq!(train(false), train(true));
}
