//! Local SGD as a trainer.

use dist_collectives::Communicator;
use dist_parallel::Error;
use dist_parallel::pipeline::PlainVectors;
use dist_parallel::trainer::{Trainer, TrainerOptions};
use dist_transport::sim;

use super::{STEPS, Training, batch, blocks, sgd};
use crate::errors::run_at_once;
use crate::plain::{Rows, micro_batch};

/// With weights on some ranks only, parameters would be averaged with weights of different kinds.
#[test]
fn local_training_refuses_weights_on_only_some_ranks() {
    let results = run_at_once(2, |comm| {
        let rank = comm.rank();
        let options = TrainerOptions::new("local_sgd:1".parse().unwrap());
        let mut trainer = options.build(comm, blocks(), PlainVectors).unwrap();
        let report = if rank == 0 {
            trainer.step(2, |index| batch(0, index))
        } else {
            trainer.step(2, |index| {
                let (input, loss) = batch(0, index)?;
                Ok((input, move |output| loss(output).map(|(loss, gradient)| ((loss, 7), gradient))))
            })
        };
        assert_eq!(report.unwrap().micro_batches, 1);
        trainer.update(&mut sgd())
    });
    assert!(results.iter().all(|result| matches!(result, Err(Error::PartlyWeighted))), "{results:?}");
}

#[test]
fn local_training_refuses_weights_of_only_some_steps_before_a_synchronisation() {
    let results = run_at_once(1, |comm| {
        let options = TrainerOptions::new("local_sgd:2".parse().unwrap());
        let mut trainer = options.build(comm, blocks(), PlainVectors).unwrap();
        trainer.step(1, |index| batch(0, index)).unwrap();
        trainer.update(&mut sgd()).unwrap();
        trainer.step_with(1, |_, _, _| Ok((1.0, 7))).map(drop)
    });
    assert!(matches!(results[0], Err(Error::PartlyWeighted)), "{results:?}");
}

/// A rank without a micro-batch takes part in the average with weight 0.
#[test]
fn a_rank_without_micro_batches_gets_the_parameters_of_the_others() {
    let train = |ranks: usize| {
        sim::run(1, ranks, |transport| {
            let options = TrainerOptions::new("local_sgd:2".parse().unwrap());
            let mut trainer = options.build(Communicator::new(transport), blocks(), PlainVectors).unwrap();
            let mut sgd = sgd();
            for step in 0..STEPS {
                trainer.step(1, |index| batch(step, index)).unwrap();
                trainer.update(&mut sgd).unwrap();
            }
            assert!(matches!(trainer.step(0, |index| batch(0, index)), Err(Error::NoMicroBatches)));
            Training { trainer, micro_batches: 0..0, sgd }.parameters().unwrap()
        })
    };
    let alone = train(1).results.remove(0);
    assert_eq!(train(3).results, [(); 3].map(|()| alone.clone()));
}

#[test]
fn ranks_of_local_training_are_evaluated_when_they_have_synchronised() {
    let results = run_at_once(2, |comm| {
        let options = TrainerOptions::new("diloco:2".parse().unwrap());
        let mut trainer = options.build(comm, blocks(), PlainVectors).unwrap();
        trainer.step(2, |index| batch(0, index)).unwrap();
        trainer.update(&mut sgd()).unwrap();
        let find = |trainer: &mut dyn Trainer<Rows>| {
            trainer.evaluate(2, |index| Ok(micro_batch(0, index).0), |_, output: Rows| Ok(output[0]))
        };
        let refused = find(&mut *trainer).unwrap_err();
        assert!(matches!(refused, Error::NotSynchronised { steps: 1 }), "{refused}");
        trainer.synchronise_parameters().unwrap();
        find(&mut *trainer).unwrap().loss
    });
    assert_eq!(results[0], results[1]);
}
