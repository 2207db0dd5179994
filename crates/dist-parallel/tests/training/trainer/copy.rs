//! Copies of the trained parameters into a whole model.

use dist_parallel::Params;
use dist_parallel::pipeline::PlainVectors;
use dist_parallel::trainer::{Strategy, TrainerOptions};
use rstest::rstest;

use super::{Setup, batch, blocks, f32s, sgd};
use crate::errors::run_at_once;
use crate::plain::model;

#[rstest]
fn trained_parameters_are_copied_into_a_whole_model(#[values("ddp", "fsdp", "pipeline:zbv")] strategy: &str) {
    let strategy: Strategy = strategy.parse().unwrap();
    let results = run_at_once(2, move |comm| {
        let options = TrainerOptions::new(strategy).with_micro_batches(2);
        let mut trainer = options.build(comm, model(7), PlainVectors).unwrap();
        trainer.step(2, |index| batch(0, index)).unwrap();
        trainer.update(&mut sgd()).unwrap();
        let mut copy = model(99);
        trainer.copy_parameters(&mut copy).unwrap();
        let mut copied = vec![Vec::new(); copy.infos().len()];
        for index in (0..copy.infos().len()).filter(|&index| copy.infos()[index].same_as.is_none()) {
            copy.read(index, &mut |values| copied[index] = f32s(values).to_vec()).unwrap();
        }
        copied
    });
    let alone = run_at_once(1, |comm| {
        let options = TrainerOptions::new(Strategy::Single);
        let mut training = Setup { comm, options, micro_batches: 0..2 }.build(model(7)).unwrap();
        training.step(0).unwrap();
        training.trainer.update(&mut training.sgd).unwrap();
        training.parameters().unwrap()
    });
    assert!(results.iter().all(|copied| copied.concat() == alone[0]), "{results:?}");
}

#[test]
fn parameters_are_not_copied_into_another_model() {
    let results = run_at_once(1, |comm| {
        let options = TrainerOptions::new(Strategy::Single);
        let mut trainer = options.build(comm, model(7), PlainVectors).unwrap();
        trainer.copy_parameters(&mut blocks()).unwrap_err()
    });
    let source = std::error::Error::source(&results[0]).unwrap().to_string();
    let expected = "the model to copy to has first.weight [4, 3] f32 instead of first.weight [3, 3] f32";
    assert_eq!(source, expected);
}
