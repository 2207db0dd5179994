//! Ranks that call different functions of a trainer get an error at once that names both.

use std::path::Path;

use dist_collectives::Communicator;
use dist_collectives::transport::Chain;
use dist_parallel::checkpoint::{Checkpoints, Shards, WeightOptions, load_weights};
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::local_sgd::{LocalSgd, LocalSgdOptions};
use dist_parallel::optim::{Sgd, SgdOptions};
use dist_parallel::{Ddp, DdpOptions, Error, Sequence};
use dist_transport::sim;
use rstest::rstest;

use crate::plain::{Rows, batch, micro_batch, model};

/// A trainer with its arguments.
struct Training<T> {
    trainer: T,
    sgd: Sgd,
    checkpoints: Checkpoints,
}

/// A call of all ranks: its name, its description in errors if calls of its kind are compared by themselves, and the
/// function.
type Call<T> = (&'static str, &'static str, fn(&mut Training<T>) -> Result<(), Error>);

/// Checks every pair of calls. After a common step, rank 0 makes one call and rank 1 another. Both then
/// continue with steps, the first of the calls. Every rank must get an error at once that names both calls. If one of
/// them is never described, the operations or steps in which the ranks meet may be named instead.
fn check<T: 'static>(make: fn(Communicator) -> T, calls: &[Call<T>]) {
    let pairs = calls.iter().flat_map(|first| calls.iter().map(move |second| (first, second)));
    for (&(first, described, on_0), &(second, other, on_1)) in
        pairs.filter(|(first, second)| first.0 != second.0)
    {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        let step = calls[0].2;
        let outcome = sim::run(1, 2, move |transport| {
            let rank = transport_rank(&transport);
            let mut training = training(make(Communicator::new(transport)), &path);
            let call = if rank == 0 { on_0 } else { on_1 };
            // A rank that is slower gets the error in this step already.
            step(&mut training)?;
            call(&mut training)?;
            step(&mut training)?;
            step(&mut training)
        });
        let pair = format!("{first} and {second}");
        assert!(outcome.elapsed.as_secs() < 1, "{pair}: waited for {:?}", outcome.elapsed);
        for result in outcome.results {
            let error: Error = result.expect_err(&pair);
            let text = error.to_string();
            let is_named = |name: &str, described: &str| {
                text.contains(&format!("called {name}")) || text.contains(described)
            };
            let whole = Chain(&error).to_string();
            let is_compared = whole.contains("all ranks must") || text.contains("called for different steps");
            let is_without_call = [described, other].contains(&NEVER) && is_compared;
            let are_named = is_named(first, described) && is_named(second, other);
            assert!(are_named || is_without_call, "{pair}: {}", Chain(&error));
            assert!(error.peer().is_some() && !error.is_timeout(), "{pair}: {}", Chain(&error));
        }
    }
}

fn transport_rank(transport: &sim::SimTransport) -> usize {
    dist_transport::Transport::rank(transport).index()
}

fn training<T>(trainer: T, path: &Path) -> Training<T> {
    Training { trainer, sgd: Sgd::new(SgdOptions::default()).unwrap(), checkpoints: Checkpoints::at(path) }
}

/// Returns the calls of checkpoints.
fn calls_of_checkpoints<T: Shards>() -> [Call<T>; 4] {
    [
        ("save", "saves step 1", |t| t.checkpoints.save(&mut t.trainer, Some(&t.sgd), 1)),
        ("start_save", "starts to save step 1", |t| {
            t.checkpoints.start_save(&mut t.trainer, Some(&t.sgd), 1)?.wait()
        }),
        ("load", "loads the newest checkpoint", |t| {
            t.checkpoints.load(&mut t.trainer, Some(&mut t.sgd)).map(drop)
        }),
        ("load_weights", "loads weights", |t| {
            load_weights("absent", &mut t.trainer, &WeightOptions::new()).map(drop)
        }),
    ]
}

type Replicated = Ddp<Sequence<Rows>>;
type Replicas = Training<Replicated>;

fn step_of_replicas(t: &mut Replicas) -> Result<(), Error> {
    t.trainer.step(2, batch(0)).map(drop)
}

#[test]
fn of_a_replicated_trainer() {
    let calls: [Call<Replicated>; 3] = [
        ("step", "a step of 2", step_of_replicas),
        ("join", "a join", |t| t.trainer.join(1, batch(0)).map(drop)),
        ("evaluate", "an evaluation of 2", |t| {
            t.trainer.evaluate(2, |index| Ok(micro_batch(0, index).0), |_, output| Ok(output[0])).map(drop)
        }),
    ];
    let all = [&calls[..], &calls_of_checkpoints()[..]].concat();
    check(|comm| Ddp::new(comm, model(1), DdpOptions::default()).unwrap(), &all);
}

/// Rank 1 alone makes a call that needs no other rank, which must therefore send nothing. The next step compares
/// what the call has changed. A call that changes nothing is not an error.
#[rstest]
#[case::update(|t: &mut Replicas| t.trainer.update(&mut t.sgd), "the ranks have trained with different settings")]
#[case::clip(|t: &mut Replicas| { t.trainer.clip_gradients(1.0).map(drop) }, "the norm that gradients are clipped to is 1.0 on rank 1")]
#[case::scale(|t: &mut Replicas| { t.trainer.scale_gradients(2.0); Ok(()) }, "the factor that gradients are scaled by is 2.0 on rank 1")]
#[case::update_if_finite(|t: &mut Replicas| t.trainer.update_if_finite(&mut t.sgd).map(drop), "the ranks have trained with different settings")]
#[case::accumulate(|t: &mut Replicas| t.trainer.accumulate(2, batch(0)), "rank 1 for a step of 4 micro-batches, rank 0 for a step of 2")]
#[case::norm(|t: &mut Replicas| { t.trainer.gradient_norm().map(drop) }, "")]
#[case::forward(|t: &mut Replicas| t.trainer.forward(micro_batch(0, 0).0).map(drop), "")]
#[case::for_each(|t: &mut Replicas| t.trainer.for_each_parameter(|_, _| ()), "")]
fn local_calls_of_a_replicated_trainer_are_compared_by_the_next_step(
    #[case] local: fn(&mut Replicas) -> Result<(), Error>,
    #[case] expected: &'static str,
) {
    let outcome = sim::run(1, 2, move |transport| {
        let rank = transport_rank(&transport);
        let ddp = Ddp::new(Communicator::new(transport), model(1), DdpOptions::default()).unwrap();
        let mut t = training(ddp, Path::new("unused"));
        step_of_replicas(&mut t).unwrap();
        let sent = |t: &Replicas| t.trainer.communicator().traffic().bytes_sent;
        let before = sent(&t);
        if rank == 1 {
            local(&mut t).unwrap();
        }
        assert_eq!(sent(&t), before);
        step_of_replicas(&mut t).map_err(|error| error.to_string())
    });
    for result in outcome.results {
        match result {
            Ok(()) => assert_eq!(expected, ""),
            Err(error) => assert!(!expected.is_empty() && error.contains(expected), "{error}"),
        }
    }
}

#[rstest]
#[case::full_shard(|comm| sharded(comm, ShardingStrategy::FullShard))]
#[case::shard_grad_op(|comm| sharded(comm, ShardingStrategy::ShardGradOp))]
#[case::shard_optimizer(|comm| sharded(comm, ShardingStrategy::ShardOptimizer))]
#[case::no_shard(|comm| sharded(comm, ShardingStrategy::NoShard))]
#[case::hybrid(|comm| sharded(comm, ShardingStrategy::HybridShard { shard_degree: 1 }))]
fn of_a_sharded_trainer(#[case] make: fn(Communicator) -> Fsdp<Rows>) {
    let calls: [Call<Fsdp<Rows>>; 10] = [
        ("step", "a step of", |t| t.trainer.step(2, batch(0)).map(drop)),
        ("join", "a join", |t| t.trainer.join(1, batch(0)).map(drop)),
        ("accumulate", "an accumulation", |t| t.trainer.accumulate(2, batch(0))),
        ("evaluate", "an evaluation", |t| {
            t.trainer.evaluate(2, |index| Ok(micro_batch(0, index).0), |_, _| Ok(0.0_f32)).map(drop)
        }),
        ("forward", NEVER, |t| t.trainer.forward(micro_batch(0, 0).0).map(drop)),
        ("update", NEVER, |t| t.trainer.update(&mut t.sgd)),
        ("update_if_finite", NEVER, |t| t.trainer.update_if_finite(&mut t.sgd).map(drop)),
        ("clip_gradients", NEVER, |t| t.trainer.clip_gradients(1.0).map(drop)),
        ("gradient_norm", NEVER, |t| t.trainer.gradient_norm().map(drop)),
        ("for_each", NEVER, |t| t.trainer.for_each_parameter(|_, _| ())),
    ];
    check(make, &[&calls[..], &calls_of_checkpoints()[..]].concat());
}

/// The description of a call that no other call of its kind is compared with.
const NEVER: &str = "no text contains this";

fn sharded(comm: Communicator, strategy: ShardingStrategy) -> Fsdp<Rows> {
    Fsdp::new(comm, model(1), &FsdpOptions::new(strategy)).unwrap()
}

#[test]
fn of_ranks_that_train_by_themselves() {
    type T = LocalSgd<Sequence<Rows>>;
    let calls: [Call<T>; 5] = [
        ("synchronise", NEVER, |t| {
            t.trainer.step_with(|_| Ok(1.0_f32))?;
            t.trainer.synchronise().map(drop)
        }),
        ("save", "saves step 1", |t| t.trainer.save(&mut t.checkpoints, None, 1)),
        ("start_save", "starts to save step 1", |t| {
            t.trainer.start_save(&mut t.checkpoints, None, 1)?.wait()
        }),
        ("load", "loads the newest checkpoint", |t| t.trainer.load(&mut t.checkpoints, None).map(drop)),
        ("load_weights", "loads weights", |t| {
            t.trainer.load_weights("absent", &WeightOptions::new()).map(drop)
        }),
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
fn processes_get_an_error_if_only_one_of_them_saves(#[case] medium: &str) {
    use std::time::Duration;

    use dist_testkit::process;

    let Some(rank) = process::rank() else {
        let case = if medium == "tcp" { 1 } else { 2 };
        let name = format!("calls::processes_get_an_error_if_only_one_of_them_saves::case_{case}");
        // The deadline of a call is a minute.
        let limit = Duration::from_secs(50);
        process::ranks_with(2, &name, limit, &[("DIST_TRANSPORT", medium)]).assert_success();
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let ddp = Ddp::new(Communicator::from_env().unwrap(), model(1), DdpOptions::default()).unwrap();
    let mut t = training(ddp, directory.path());
    step_of_replicas(&mut t).unwrap();
    let saved = match rank {
        0 => t.checkpoints.save(&mut t.trainer, Some(&t.sgd), 1),
        _ => Ok(()),
    };
    let error = saved.and_then(|()| step_of_replicas(&mut t)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("rank 0 called save") && text.contains("rank 1 called step"), "{}", Chain(&error));
}
