//! Local SGD and DiLoCo compared with their definitions.

use std::ops::Range;

use dist_collectives::Communicator;
use dist_collectives::transport::Chain;
use dist_parallel::checkpoint::{CheckpointProblem, Checkpoints};
use dist_parallel::local_sgd::{LocalSgd, LocalSgdOptions, OuterStep};
use dist_parallel::optim::{AdamW, AdamWOptions, Momentum, OptimizerState as _, Sgd, SgdOptions};
use dist_parallel::pipeline::PlainVectors;
use dist_parallel::trainer::{Trainer, TrainerOptions};
use dist_parallel::{BoxError, Ddp, DdpOptions, Error, FloatType, ParamInfo, Params, ValuesMut};
use dist_transport::sim;
use rstest::rstest;

use crate::errors::run_at_once;
use crate::join::tree;
use crate::plain::{Bag, Numbers, Rows, batch, bits};

pub(crate) const LEN: usize = 6;

pub(crate) fn bag(seed: u64) -> Bag {
    let mut infos: Vec<ParamInfo> =
        ["a", "b", "frozen"].map(|name| ParamInfo::new(name, [LEN / 2], FloatType::F32)).into();
    infos[2].trainable = false;
    Bag::new(infos, seed)
}

pub(crate) fn values(model: &dyn Params) -> Vec<f32> {
    bits(model)[..LEN].iter().map(|&bits| f32::from_bits(bits)).collect()
}

/// Returns the change of a rank in a step.
pub(crate) fn change(rank: usize, step: usize) -> Vec<f32> {
    Numbers((rank * 1000 + step) as u64).take(LEN)
}

/// Takes one step of plain gradient descent on one rank. The loss identifies it.
pub(crate) fn inner(rank: usize, step: usize) -> impl FnOnce(&mut Bag) -> Result<f32, BoxError> {
    move |model| {
        let change = change(rank, step);
        for index in 0..2 {
            let change = &change[index * LEN / 2..][..LEN / 2];
            model.write(index, &mut |values| {
                let ValuesMut::F32(values) = values else { panic!("the model is f32") };
                values.iter_mut().zip(change).for_each(|(value, change)| *value -= 0.25 * change);
            })?;
        }
        Ok((100 * step + rank) as f32)
    }
}

/// Returns the parameters after this number of steps, by the definition.
pub(crate) fn expected(ranks: usize, steps: usize, inner_steps: usize, outer: OuterStep) -> Vec<u32> {
    let mut start = values(&bag(0));
    let mut velocity: Option<Vec<f32>> = None;
    for first in (0..steps).step_by(inner_steps) {
        let of_rank = |rank| {
            let mut own = start.clone();
            for step in first..first + inner_steps {
                own.iter_mut().zip(change(rank, step)).for_each(|(own, change)| *own -= 0.25 * change);
            }
            own
        };
        let all: Vec<Vec<f32>> = (0..ranks).map(of_rank).collect();
        match outer {
            OuterStep::Average => start = mean(&all),
            OuterStep::Nesterov { learning_rate, momentum } => {
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "settings are rounded to the type of the parameters"
                )]
                let (rate, momentum) = (learning_rate as f32, momentum as f32);
                let gone = |own: &Vec<f32>| start.iter().zip(own).map(|(start, own)| start - own).collect();
                let gone = mean(&all.iter().map(gone).collect::<Vec<Vec<f32>>>());
                let faster = |v: Vec<f32>| v.iter().zip(&gone).map(|(v, gone)| momentum * v + gone).collect();
                let v = velocity.take().map_or_else(|| gone.clone(), faster);
                for ((start, gone), v) in start.iter_mut().zip(&gone).zip(&v) {
                    *start -= rate * (gone + momentum * v);
                }
                velocity = Some(v);
            }
        }
    }
    start.iter().map(|value| value.to_bits()).collect()
}

fn mean(all: &[Vec<f32>]) -> Vec<f32> {
    tree(all).into_iter().map(|sum| sum / all.len() as f32).collect()
}

#[rstest]
fn ranks_synchronise_as_the_definition_says(
    #[values(1, 2, 3, 5)] ranks: usize,
    #[values(1, 3)] inner_steps: usize,
    #[values(
        OuterStep::Average,
        OuterStep::Nesterov { learning_rate: 0.7, momentum: 0.9 },
        OuterStep::Nesterov { learning_rate: 1.0, momentum: 0.0 }
    )]
    outer: OuterStep,
) {
    let outcome = sim::run(1, ranks, move |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank();
        let options = LocalSgdOptions { inner_steps, outer };
        let mut local = LocalSgd::new(comm, bag(rank as u64), options).unwrap();
        for step in 0..9 {
            let report = local.step_with(inner(rank, step)).unwrap();
            assert_eq!(report.loss, (100 * step + rank) as f32);
            assert_eq!(report.sync_point.is_some(), (step + 1).is_multiple_of(inner_steps));
            if let Some(sync_point) = report.sync_point {
                let mean_step = step as f32 - (inner_steps - 1) as f32 / 2.0;
                let expected = 100.0 * mean_step + (ranks - 1) as f32 / 2.0;
                assert!((sync_point.loss - expected).abs() < 1e-3, "{} is not {expected}", sync_point.loss);
            }
        }
        bits(local.model())
    });
    let frozen = &bits(&bag(0))[LEN..];
    let expected = [&expected(ranks, 9, inner_steps, outer), frozen].concat();
    assert_eq!(outcome.results, vec![expected; ranks]);
}

#[rstest]
#[case(1, 0)]
// An all_gather of the steps and weights, an all_reduce of the loss, and one of the trained parameters.
#[case(2, 3 * 8 + 4 + 4 * LEN as u64)]
fn avoided_bytes_are_counted(#[case] ranks: usize, #[case] meeting_bytes: u64) {
    let outcome = sim::run(1, ranks, |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank();
        let mut local = LocalSgd::new(comm, bag(0), LocalSgdOptions::diloco(4)).unwrap();
        for step in 0..10 {
            local.step_with(inner(rank, step)).unwrap();
        }
        let before = local.traffic();
        let last = local.synchronise().unwrap();
        (before, last.bytes_sent, local.traffic())
    });
    for (before, last, after) in outcome.results {
        assert_eq!((before.steps, before.sync_points, before.bytes_sent), (10, 2, 2 * meeting_bytes));
        assert_eq!(before.bytes_saved(), 6 * meeting_bytes);
        assert_eq!(last, meeting_bytes);
        assert_eq!((after.steps, after.sync_points, after.bytes_sent), (10, 3, 3 * meeting_bytes));
        assert_eq!((after.bytes_without, after.bytes_saved()), (10 * meeting_bytes, 7 * meeting_bytes));
    }
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let nesterov = |learning_rate, momentum| LocalSgdOptions {
        inner_steps: 1,
        outer: OuterStep::Nesterov { learning_rate, momentum },
    };
    let refused =
        [LocalSgdOptions::average(0), nesterov(-1.0, 0.9), nesterov(f64::NAN, 0.9), nesterov(1.0, -0.1)];
    for options in refused {
        let results = run_at_once(2, move |comm| LocalSgd::new(comm, bag(0), options).map(drop));
        let named = |result: &Result<(), Error>| matches!(result, Err(Error::Setting { .. }));
        assert!(results.iter().all(named), "{results:?}");
    }
}

#[rstest]
#[case(LocalSgdOptions::average(3))]
#[case(LocalSgdOptions::diloco(2))]
fn options_that_differ_are_an_error_on_every_rank(#[case] other: LocalSgdOptions) {
    let results = run_at_once(3, move |comm| {
        let options = if comm.rank() == 1 { other } else { LocalSgdOptions::average(2) };
        LocalSgd::new(comm, bag(0), options).map(drop)
    });
    let named = |result: &Result<(), Error>| matches!(result, Err(Error::OptionsDiffer { rank: 1, .. }));
    assert!(results.iter().all(named), "{results:?}");
}

#[rstest]
fn synchronising_after_different_numbers_of_steps_is_an_error_and_aborts_the_job(
    #[values(0, 1, 2, 3)] seed: u64,
) {
    let outcome = sim::run(seed, 3, |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank();
        let mut local = LocalSgd::new(comm, bag(0), LocalSgdOptions::average(10)).unwrap();
        for step in 0..2 + rank {
            local.step_with(inner(rank, step)).unwrap();
        }
        (local.synchronise().unwrap_err(), local.synchronise().unwrap_err())
    });
    for (told, next) in &outcome.results {
        let why = "the ranks synchronise after different numbers of steps: rank 1 after 3, rank 0 after 2";
        assert!(matches!(told, Error::InnerStepsDiffer { rank: 1, there: 3, on_rank_0: 2 }), "{told:?}");
        assert!(matches!(next, Error::Communication(_)) && Chain(next).to_string().contains(why), "{next:?}");
    }
}

#[test]
fn a_step_that_fails_ends_the_job_for_everybody() {
    let results = run_at_once(2, |comm| {
        let rank = comm.rank();
        let mut local = LocalSgd::new(comm, bag(0), LocalSgdOptions::average(2)).unwrap();
        (0..4).try_for_each(|step| {
            let fails = (rank, step) == (1, 2);
            let inner = inner(rank, step);
            local.step_with(|model| if fails { Err("no more data".into()) } else { inner(model) }).map(drop)
        })
    });
    assert!(matches!(&results[1], Err(Error::Compute(_))), "{results:?}");
    let Err(Error::Communication(source)) = &results[0] else { panic!("{results:?}") };
    assert_eq!(source.peer(), Some(1));
}

#[test]
fn parameters_of_other_types_are_synchronised_too() {
    use FloatType::{Bf16, F16, F64};
    let outcome = sim::run(1, 2, |transport| {
        let comm = Communicator::new(transport);
        let infos = [F64, F16, Bf16].map(|dtype| ParamInfo::new(dtype.name(), [1], dtype)).into();
        let mut local = LocalSgd::new(comm, Bag::new(infos, 1), LocalSgdOptions::diloco(1)).unwrap();
        let rank = local.communicator_mut().rank();
        let inner = |model: &mut Bag| {
            for index in 0..3 {
                model.write(index, &mut |values| add(values, rank))?;
            }
            Ok(0.0)
        };
        let before = bits(local.model());
        local.step_with(inner).unwrap();
        (before == bits(local.model()), bits(local.model()))
    });
    assert_eq!(outcome.results[0], outcome.results[1]);
    assert!(!outcome.results[0].0, "something was learned");
}

fn add(values: ValuesMut<'_>, rank: usize) {
    let value = 1.0 + f32::from(u8::try_from(rank).unwrap());
    match values {
        ValuesMut::F64(values) => values[0] += f64::from(value),
        ValuesMut::F16(values) => values[0] = half::f16::from_f32(values[0].to_f32() + value),
        ValuesMut::Bf16(values) => values[0] = half::bf16::from_f32(values[0].to_f32() + value),
        ValuesMut::F32(_) => panic!("none is f32"),
    }
}

fn steps(local: &mut LocalSgd<Bag>, steps: Range<usize>) {
    for step in steps {
        local.step_with(inner(0, step)).unwrap();
    }
}

/// Three synchronisation points, or two from the checkpoint after the first. The number of ranks can change in
/// between, if all ranks then make the same changes.
#[rstest]
fn training_continues_from_a_saved_synchronisation_point(
    #[values(LocalSgdOptions::average(2), LocalSgdOptions::diloco(2))] options: LocalSgdOptions,
    #[values((2, 2), (4, 1), (1, 4))] ranks: (usize, usize),
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let directory = path.clone();
    let whole = sim::run(1, ranks.0, move |transport| {
        let mut local = LocalSgd::new(Communicator::new(transport), bag(0), options).unwrap();
        let mut checkpoints = Checkpoints::at(&directory);
        steps(&mut local, 0..2);
        local.save(&mut checkpoints, None, 2).unwrap();
        steps(&mut local, 2..6);
        let saving = local.start_save(&mut checkpoints, None, 6).unwrap();
        saving.wait().unwrap();
        bits(local.model())
    });
    let resumed = sim::run(2, ranks.1, move |transport| {
        let mut local = LocalSgd::new(Communicator::new(transport), bag(7), options).unwrap();
        let mut seen = Vec::new();
        let mut checkpoints = Checkpoints::at(&path);
        assert_eq!(local.load(&mut checkpoints, None).unwrap(), Some(6));
        seen.push(bits(local.model()));
        local.load_step(&mut checkpoints, 2, None).unwrap();
        steps(&mut local, 2..6);
        seen.push(bits(local.model()));
        seen
    });
    for seen in resumed.results {
        assert_eq!(seen, [&whole.results[0][..]; 2]);
    }
}

#[test]
fn ranks_are_not_saved_between_synchronisation_points() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let refused = sim::run(1, 2, move |transport| {
        let mut local =
            LocalSgd::new(Communicator::new(transport), bag(0), LocalSgdOptions::diloco(2)).unwrap();
        let mut checkpoints = Checkpoints::at(&path);
        local.step_with(inner(0, 0)).unwrap();
        let refused = local.save(&mut checkpoints, None, 1).unwrap_err().to_string();
        local.step_with(inner(0, 1)).unwrap();
        local.save(&mut checkpoints, None, 2).unwrap();
        (refused, checkpoints.steps().unwrap())
    });
    for (refused, steps) in refused.results {
        assert!(refused.contains("after 1 steps since the last synchronisation point"), "{refused}");
        assert_eq!(steps, [2]);
    }
}

fn with_momentum() -> Sgd {
    Sgd::new(SgdOptions { momentum: Momentum::Plain(0.9), ..SgdOptions::default() }).unwrap()
}

/// Both keep a velocity of each parameter, but one of gradients and one of the ranks' changes.
#[test]
fn the_velocities_of_diloco_and_of_sgd_are_not_taken_for_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let refused = sim::run(1, 2, move |transport| {
        let mut comm = Communicator::new(transport);
        let mut ddp = Ddp::new(comm.fork().unwrap(), bag(0), DdpOptions::default()).unwrap();
        let mut local = LocalSgd::new(comm, bag(0), LocalSgdOptions::diloco(2)).unwrap();
        let mut sgd = with_momentum();
        ddp.step_with(2, |bag, index, ready| bag.report(index, ready)).unwrap();
        ddp.update(&mut sgd).unwrap();
        let [mut of_sgd, mut of_diloco] = ["sgd", "diloco"].map(|name| Checkpoints::at(path.join(name)));
        of_sgd.save(&mut ddp, Some(&sgd), 1).unwrap();
        steps(&mut local, 0..2);
        local.save(&mut of_diloco, None, 2).unwrap();
        [local.load(&mut of_sgd, None).unwrap_err(), of_diloco.load(&mut ddp, Some(&mut sgd)).unwrap_err()]
    });
    let differ = |training: &str, checkpoint: &str| CheckpointProblem::Optimizer {
        training: training.to_owned(),
        checkpoint: checkpoint.to_owned(),
    };
    for refused in refused.results {
        let problems = refused.map(|error| match error {
            Error::Checkpoint(error) => error.problem,
            other => panic!("{other:?}"),
        });
        assert_eq!(problems, [differ("diloco", "sgd"), differ("sgd", "diloco")]);
    }
}

#[test]
fn local_sgd_does_not_go_on_from_a_checkpoint_whose_optimizer_it_would_drop() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let refused = sim::run(1, 2, move |transport| {
        let mut comm = Communicator::new(transport);
        let mut ddp = Ddp::new(comm.fork().unwrap(), bag(0), DdpOptions::default()).unwrap();
        let mut local = LocalSgd::new(comm, bag(0), LocalSgdOptions::average(2)).unwrap();
        let mut sgd = with_momentum();
        ddp.step_with(2, |bag, index, ready| bag.report(index, ready)).unwrap();
        ddp.update(&mut sgd).unwrap();
        let mut checkpoints = Checkpoints::at(&path);
        checkpoints.save(&mut ddp, Some(&sgd), 1).unwrap();
        let refused = [
            local.load(&mut checkpoints, None).unwrap_err(),
            local.load_step(&mut checkpoints, 1, None).unwrap_err(),
        ];
        local.load_parameters(&mut checkpoints).unwrap();
        refused.map(|error| error.to_string())
    });
    for refused in refused.results.into_iter().flatten() {
        assert!(
            refused.contains("the optimizer of this training is none, that of the checkpoint sgd"),
            "{refused}"
        );
    }
}

/// It continues as if it had not synchronised before, whatever it has done meanwhile.
#[rstest]
fn a_training_begins_with_parameters_that_another_has_saved(
    #[values(LocalSgdOptions::average(2), LocalSgdOptions::diloco(2))] options: LocalSgdOptions,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let outcome = sim::run(1, 2, move |transport| {
        let mut comm = Communicator::new(transport);
        let mut ddp = Ddp::new(comm.fork().unwrap(), bag(3), DdpOptions::default()).unwrap();
        let mut checkpoints = Checkpoints::at(&path);
        let mut begin = |met_before: bool, of: Option<u64>, checkpoints: &mut Checkpoints| {
            let mut local = LocalSgd::new(comm.fork().unwrap(), bag(0), options).unwrap();
            if met_before {
                steps(&mut local, 0..3);
            }
            let step = match of {
                None => local.load_parameters(checkpoints).unwrap(),
                Some(step) => local.load_parameters_of(checkpoints, step).map(|()| of).unwrap(),
            };
            let first = bits(local.model());
            steps(&mut local, 3..7);
            (step, first, bits(local.model()))
        };
        assert_eq!(begin(true, None, &mut checkpoints).0, None);
        checkpoints.save(&mut ddp, Some(&with_momentum()), 1).unwrap();
        let begun = begin(true, None, &mut checkpoints);
        assert_eq!((begun.0, &begun.1), (Some(1), &bits(ddp.model())));
        assert_eq!(begun, begin(false, None, &mut checkpoints));
        // The same from a step that is not the newest.
        ddp.step_with(2, |bag, index, ready| bag.report(index, ready)).unwrap();
        ddp.update(&mut with_momentum()).unwrap();
        checkpoints.save(&mut ddp, Some(&with_momentum()), 2).unwrap();
        assert_eq!(begin(false, None, &mut checkpoints).1, bits(ddp.model()));
        assert_eq!(
            [true, false].map(|met_before| begin(met_before, Some(1), &mut checkpoints)),
            [begun.clone(), begun]
        );
    });
    assert_eq!(outcome.results.len(), 2);
}

#[test]
fn invalid_settings_on_some_ranks_are_an_error_on_all_ranks() {
    let results = run_at_once(3, |comm| {
        let inner_steps = if comm.rank() == 2 { 0 } else { 4 };
        LocalSgd::new(comm, bag(0), LocalSgdOptions::average(inner_steps)).map(drop)
    });
    let named = |result: &Result<(), Error>| matches!(result, Err(Error::OptionsDiffer { rank: 2, .. }));
    assert!(results.iter().all(named), "{results:?}");
}

/// A training by local SGD with an optimizer that has state.
fn build(transport: sim::SimTransport, strategy: &str) -> (Box<dyn Trainer<Rows>>, AdamW) {
    let comm = Communicator::new(transport);
    let options = TrainerOptions::new(strategy.parse().unwrap());
    let trainer = options.build(comm, crate::plain::model(7), PlainVectors).unwrap();
    (trainer, AdamW::new(AdamWOptions::default()).unwrap())
}

fn two_steps(trainer: &mut dyn Trainer<Rows>, adamw: &mut AdamW) {
    for step in 0..2 {
        let batch = batch(step);
        trainer.step(8, batch).unwrap();
        trainer.update(adamw).unwrap();
    }
}

/// Returns all state of an optimizer.
fn state_of(adamw: &AdamW) -> String {
    let slices = adamw.states().unwrap().iter();
    slices.map(|(slice, state)| format!("{slice}: {:?} {:?}\n", state.arrays(), state.scalars())).collect()
}

/// Further ranks begin with the state of an earlier one.
#[rstest]
fn each_rank_continues_with_the_state_of_its_own_optimizer(
    #[values("local_sgd:2", "diloco:2")] strategy: &'static str,
    #[values((2, 2), (4, 2), (2, 4))] (before, after): (usize, usize),
    #[values(false, true)] copied: bool,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let directory = path.clone();
    let saved = sim::run(1, before, move |transport| {
        let (mut trainer, mut adamw) = build(transport, strategy);
        two_steps(&mut *trainer, &mut adamw);
        let mut checkpoints = Checkpoints::at(&directory);
        if copied {
            trainer.start_save(&mut checkpoints, Some(&adamw), 2).unwrap().wait().unwrap();
        } else {
            trainer.save(&mut checkpoints, Some(&adamw), 2).unwrap();
        }
        state_of(&adamw)
    });
    assert_ne!(saved.results[0], saved.results[1]);
    let loaded = sim::run(1, after, move |transport| {
        let (mut trainer, mut adamw) = build(transport, strategy);
        assert_eq!(trainer.load(&mut Checkpoints::at(&path), Some(&mut adamw)).unwrap(), Some(2));
        state_of(&adamw)
    });
    for (rank, state) in loaded.results.iter().enumerate() {
        assert_eq!(*state, saved.results[rank % before], "rank {rank}");
    }
}

/// All ranks of local SGD begin with the state of another strategy's optimizer. The other way round there is no one state.
#[rstest]
fn the_state_of_another_strategy_s_optimizer_is_that_of_all_ranks(
    #[values("local_sgd:2", "diloco:2")] strategy: &'static str,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let outcome = sim::run(1, 2, move |transport| {
        let mut comm = Communicator::new(transport);
        let model = || crate::plain::model(7);
        let build = |comm, strategy: &str| {
            TrainerOptions::new(strategy.parse().unwrap()).build(comm, model(), PlainVectors).unwrap()
        };
        let mut ddp = build(comm.fork().unwrap(), "ddp");
        let mut local = build(comm, strategy);
        let [mut of_all, mut own] = [(); 2].map(|()| AdamW::new(AdamWOptions::default()).unwrap());
        two_steps(&mut *ddp, &mut of_all);
        let [mut of_ddp, mut of_local] = ["ddp", "local"].map(|name| Checkpoints::at(path.join(name)));
        ddp.save(&mut of_ddp, Some(&of_all), 2).unwrap();
        assert_eq!(local.load(&mut of_ddp, Some(&mut own)).unwrap(), Some(2));
        assert_eq!(state_of(&own), state_of(&of_all));
        two_steps(&mut *local, &mut own);
        local.save(&mut of_local, Some(&own), 4).unwrap();
        let before = state_of(&of_all);
        let refused = ddp.load(&mut of_local, Some(&mut of_all)).unwrap_err();
        assert_eq!(state_of(&of_all), before);
        assert_eq!(ddp.load_parameters(&mut of_local).unwrap(), Some(4));
        refused.to_string()
    });
    for refused in outcome.results {
        assert!(
            refused.contains("the optimizer of this training is adamw, that of the checkpoint"),
            "{refused}"
        );
    }
}
