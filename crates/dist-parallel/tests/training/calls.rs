//! Ranks that call different functions of a trainer get an error at once that names both.

use std::path::Path;

use dist_collectives::Communicator;
use dist_collectives::transport::Chain;
use dist_parallel::{
    Checkpoints, Ddp, DdpOptions, Error, Fsdp, FsdpOptions, LocalSgd, LocalSgdOptions, Sequence, Sgd,
    SgdOptions, ShardingStrategy,
};
use dist_transport::sim;
use rstest::rstest;

use crate::plain::{Rows, micro_batch, model, squared_error};

/// A trainer with its arguments.
struct Training<T> {
    trainer: T,
    sgd: Sgd,
    checkpoints: Checkpoints,
}

/// A call of all ranks: its kind, its name, and the function. Calls of one kind are compared by themselves.
type Call<T> = (&'static str, &'static str, fn(&mut Training<T>) -> Result<(), Error>);

/// After a common step, rank 0 makes one call and rank 1 another, for every pair of different kinds. Both then
/// continue with steps, the first of the calls.
fn check<T: 'static>(make: fn(Communicator) -> T, calls: &[Call<T>]) {
    for (&(kind, first, on_0), &(other_kind, second, on_1)) in
        calls.iter().flat_map(|first| calls.iter().map(move |second| (first, second)))
    {
        if kind == other_kind {
            continue;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        let step = calls[0].2;
        let outcome = sim::run(1, 2, move |transport| {
            let rank = transport_rank(&transport);
            let mut training = training(make(Communicator::new(transport)), &path);
            step(&mut training).unwrap();
            let call = if rank == 0 { on_0 } else { on_1 };
            call(&mut training).and_then(|()| step(&mut training)).and_then(|()| step(&mut training))
        });
        assert!(outcome.elapsed.as_secs() < 1, "{first} and {second}: waited for {:?}", outcome.elapsed);
        for result in outcome.results {
            let error = result.expect_err(first);
            assert!(matches!(error, Error::CallsDiffer { .. }), "{first} and {second}: {}", Chain(&error));
            let text = error.to_string();
            assert!(
                text.contains(&format!("called {first}")) && text.contains(&format!("called {second}")),
                "{first} and {second}: {text}"
            );
        }
    }
}

fn transport_rank(transport: &sim::SimTransport) -> usize {
    dist_transport::Transport::rank(transport).index()
}

fn training<T>(trainer: T, path: &Path) -> Training<T> {
    Training { trainer, sgd: Sgd::new(SgdOptions::default()).unwrap(), checkpoints: Checkpoints::at(path) }
}

/// The calls of a trainer that checkpoints know.
macro_rules! checkpoint_calls {
    () => {
        [
            ("checkpoint", "save", |t| t.checkpoints.save(&mut t.trainer, Some(&t.sgd), 1)),
            ("checkpoint", "start_save", |t| {
                t.checkpoints.start_save(&mut t.trainer, Some(&t.sgd), 1)?.wait()
            }),
            ("checkpoint", "load", |t| t.checkpoints.load(&mut t.trainer, Some(&mut t.sgd)).map(drop)),
        ]
    };
}

#[test]
fn of_a_replicated_trainer() {
    type T = Ddp<Sequence<Rows>>;
    let calls: [Call<T>; 2] = [
        ("step", "step", |t| {
            t.trainer.step(2, |index| {
                let (input, target) = micro_batch(0, index);
                Ok((input, squared_error(target)))
            })?;
            t.trainer.update(&mut t.sgd)
        }),
        ("step", "join", |t| {
            let joined = t.trainer.join(1, |index| {
                let (input, target) = micro_batch(0, index);
                Ok((input, squared_error(target)))
            });
            joined.map(drop)
        }),
    ];
    let of_checkpoints: [Call<T>; 3] = checkpoint_calls!();
    let all = [&calls[..], &of_checkpoints[..]].concat();
    check(|comm| Ddp::new(comm, model(1), DdpOptions::default()).unwrap(), &all);
}

#[rstest]
#[case::full_shard(|comm| sharded(comm, ShardingStrategy::FullShard))]
#[case::shard_grad_op(|comm| sharded(comm, ShardingStrategy::ShardGradOp))]
#[case::shard_optimizer(|comm| sharded(comm, ShardingStrategy::ShardOptimizer))]
#[case::no_shard(|comm| sharded(comm, ShardingStrategy::NoShard))]
#[case::hybrid(|comm| sharded(comm, ShardingStrategy::HybridShard { shard_degree: 1 }))]
fn of_a_sharded_trainer(#[case] make: fn(Communicator) -> Fsdp<Rows>) {
    let calls: [Call<Fsdp<Rows>>; 8] = [
        ("step", "step", |t| {
            t.trainer.step(2, |index| {
                let (input, target) = micro_batch(0, index);
                Ok((input, squared_error(target)))
            })?;
            Ok(())
        }),
        ("step", "accumulate", |t| {
            t.trainer.accumulate(2, |index| {
                let (input, target) = micro_batch(0, index);
                Ok((input, squared_error(target)))
            })
        }),
        ("step", "evaluate", |t| {
            t.trainer.evaluate(2, |index| Ok(micro_batch(0, index).0), |_, _| Ok(0.0_f32)).map(drop)
        }),
        ("forward", "forward", |t| t.trainer.forward(micro_batch(0, 0).0).map(drop)),
        ("update", "update", |t| t.trainer.update(&mut t.sgd)),
        ("clip", "clip_gradients", |t| t.trainer.clip_gradients(1.0).map(drop)),
        ("norm", "gradient_norm", |t| t.trainer.gradient_norm().map(drop)),
        ("for_each", "for_each", |t| t.trainer.for_each_parameter(|_, _| ())),
    ];
    let of_checkpoints: [Call<Fsdp<Rows>>; 3] = checkpoint_calls!();
    check(make, &[&calls[..], &of_checkpoints[..]].concat());
}

fn sharded(comm: Communicator, strategy: ShardingStrategy) -> Fsdp<Rows> {
    Fsdp::new(comm, model(1), &FsdpOptions::new(strategy)).unwrap()
}

#[test]
fn of_ranks_that_train_by_themselves() {
    type T = LocalSgd<Sequence<Rows>>;
    let calls: [Call<T>; 3] = [
        ("synchronise", "synchronise", |t| {
            t.trainer.step_with(|_| Ok(1.0_f32))?;
            t.trainer.synchronise().map(drop)
        }),
        ("checkpoint", "save", |t| t.trainer.save(&mut t.checkpoints, 1)),
        ("checkpoint", "load", |t| t.trainer.load(&mut t.checkpoints).map(drop)),
    ];
    check(|comm| LocalSgd::new(comm, model(1), LocalSgdOptions::average(8)).unwrap(), &calls);
}

/// A save and a load compare their requests and do not abort the job.
#[test]
fn a_save_on_one_rank_and_a_load_on_the_other_is_an_error_and_training_continues() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let outcome = sim::run(1, 2, move |transport| {
        let rank = transport_rank(&transport);
        let ddp = Ddp::new(Communicator::new(transport), model(1), DdpOptions::default()).unwrap();
        let mut t = training(ddp, &path);
        let refused = match rank {
            0 => t.checkpoints.save(&mut t.trainer, Some(&t.sgd), 1),
            _ => t.checkpoints.load(&mut t.trainer, Some(&mut t.sgd)).map(drop),
        };
        t.checkpoints.save(&mut t.trainer, Some(&t.sgd), 2).unwrap();
        refused.unwrap_err().to_string()
    });
    for error in outcome.results {
        assert!(
            error.contains("rank 1 loads the newest checkpoint") && error.contains("rank 0 saves step 1"),
            "{error}"
        );
    }
}

/// This is how torch.save is called.
#[cfg(feature = "tcp")]
#[rstest]
#[case("tcp")]
#[case("shm")]
fn of_processes_of_which_one_saves(#[case] medium: &str) {
    use std::time::Duration;

    use dist_testkit::process;

    let Some(rank) = process::rank() else {
        let case = if medium == "tcp" { 1 } else { 2 };
        let name = format!("calls::of_processes_of_which_one_saves::case_{case}");
        // The deadline of a call is a minute.
        let limit = Duration::from_secs(50);
        process::ranks_with(2, &name, limit, &[("DIST_TRANSPORT", medium)]).assert_success();
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let ddp = Ddp::new(Communicator::from_env().unwrap(), model(1), DdpOptions::default()).unwrap();
    let mut t = training(ddp, directory.path());
    let step = |t: &mut Training<Ddp<Sequence<Rows>>>| {
        let report = t.trainer.step(2, |index| {
            let (input, target) = micro_batch(0, index);
            Ok((input, squared_error(target)))
        });
        report.map(drop)
    };
    step(&mut t).unwrap();
    let saved = match rank {
        0 => t.checkpoints.save(&mut t.trainer, Some(&t.sgd), 1),
        _ => Ok(()),
    };
    let error = saved.and_then(|()| step(&mut t)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("rank 0 called save") && text.contains("rank 1 called step"), "{}", Chain(&error));
}
