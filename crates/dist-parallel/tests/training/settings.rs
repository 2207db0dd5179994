//! Different settings on the ranks: every rank gets an error that names them, at the next step or before a save.

use dist_collectives::Communicator;
use dist_parallel::buckets::BucketBytes;
use dist_parallel::checkpoint::Checkpoints;
use dist_parallel::compress::Compression;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, Precision, Reshard, ShardingStrategy, Units};
use dist_parallel::local_sgd::{LocalSgd, LocalSgdOptions};
use dist_parallel::optim::{AdamW, AdamWOptions, Momentum, Optimizer, ParamGroups, Sgd, SgdOptions};
use dist_parallel::{Ddp, DdpOptions, Error, FloatType, Params};
use dist_transport::sim;
use rstest::rstest;

use crate::checkpoint::{TrainingWay, WAYS};
use crate::plain::{batch, model};

/// The actions of a rank between two steps, on all ranks or on one of them.
type Between = fn(odd: bool) -> Settings;

struct Settings {
    clipped_to: Option<f64>,
    /// `None` if the update is omitted.
    optimizer: Option<Box<dyn Optimizer>>,
}

fn updated(optimizer: impl Optimizer + 'static) -> Settings {
    Settings { clipped_to: None, optimizer: Some(Box::new(optimizer)) }
}

fn sgd(change: impl FnOnce(&mut SgdOptions)) -> Sgd {
    let mut options = SgdOptions::default();
    change(&mut options);
    Sgd::new(options).unwrap()
}

fn adamw(change: impl FnOnce(&mut AdamWOptions)) -> AdamW {
    let mut options = AdamWOptions { learning_rate: 0.001, ..AdamWOptions::default() };
    change(&mut options);
    AdamW::new(options).unwrap()
}

fn grouped(odd: bool, change: impl FnOnce(&mut dist_parallel::optim::ParamOptions)) -> Settings {
    let mut groups = ParamGroups::new(model(0).infos()).unwrap();
    if odd {
        change(groups.named("last.bias").unwrap());
    }
    updated(adamw(|_| ()).with_groups(groups).unwrap())
}

/// Takes a step, runs the actions, and takes a step or saves to a directory of this name.
fn train(
    transport: sim::SimTransport,
    way: TrainingWay,
    between: Between,
    save_in: Option<&std::path::Path>,
) -> Vec<Result<(), Error>> {
    let comm = Communicator::new(transport);
    let Settings { clipped_to, optimizer } = between(comm.rank() == 2);
    let mut trainer = way.trainer(comm, model(1), FsdpOptions::default());
    let batch = batch(0);
    trainer.step(4, batch).unwrap();
    if let Some(max) = clipped_to {
        trainer.clip_gradients(max).unwrap();
    }
    if let Some(mut optimizer) = optimizer {
        trainer.update(&mut *optimizer).unwrap();
    }
    match save_in {
        Some(directory) => {
            let mut checkpoints = Checkpoints::at(directory);
            let refused = trainer.save(&mut checkpoints, None, 1);
            assert!(checkpoints.steps().unwrap().is_empty());
            vec![refused]
        }
        // The error repeats, because the parameters stay different.
        None => (0..2).map(|_| trainer.step(4, batch).map(drop)).collect(),
    }
}

#[rstest]
#[case::learning_rate(|odd| updated(sgd(|sgd| sgd.learning_rate = if odd { 0.5 } else { 0.25 })), "the learning rate", "0.5", "0.25")]
#[case::decay(|odd| updated(sgd(|sgd| sgd.weight_decay = if odd { 0.5 } else { 0.0 })), "the weight decay", "0.5", "0")]
#[case::momentum(|odd| updated(sgd(|sgd| sgd.momentum = Momentum::Plain(if odd { 0.5 } else { 0.75 }))), "the momentum", "0.5", "0.75")]
#[case::nesterov(|odd| updated(sgd(|sgd| sgd.momentum = if odd { Momentum::Nesterov(0.5) } else { Momentum::Plain(0.5) })), "Nesterov's momentum", "0.5", "missing")]
#[case::kind(|odd| if odd { updated(adamw(|_| ())) } else { updated(sgd(|_| ())) }, "the optimizer of the update", "adamw", "sgd")]
#[case::beta1(|odd| updated(adamw(|adamw| adamw.beta1 = if odd { 0.5 } else { 0.25 })), "beta1", "0.5", "0.25")]
#[case::beta2(|odd| updated(adamw(|adamw| adamw.beta2 = if odd { 0.5 } else { 0.25 })), "beta2", "0.5", "0.25")]
#[case::epsilon(|odd| updated(adamw(|adamw| adamw.epsilon = if odd { 0.5 } else { 0.25 })), "epsilon", "0.5", "0.25")]
#[case::decay_of_adamw(|odd| updated(adamw(|adamw| adamw.weight_decay = if odd { 0.5 } else { 0.25 })), "the weight decay", "0.5", "0.25")]
#[case::group_rate(|odd| grouped(odd, |options| options.learning_rate_factor = 0.5), "the factor of the learning rate of last.bias", "0.5", "missing")]
#[case::group_decay(|odd| grouped(odd, |options| options.weight_decay = Some(0.5)), "the weight decay of last.bias", "0.5", "missing")]
#[case::clipping(|odd| Settings { clipped_to: Some(if odd { 0.5 } else { 0.25 }), ..updated(sgd(|_| ())) }, "the norm that gradients are clipped to", "0.5", "0.25")]
fn settings_that_differ_are_the_same_error_on_every_rank(
    #[case] between: Between,
    #[case] name: &str,
    #[case] there: &str,
    #[case] on_rank_0: &str,
    #[values(0, 1, 2, 3, 4, 5)] way: usize,
    #[values(false, true)] saves: bool,
) {
    let folder = tempfile::tempdir().unwrap();
    let directory = saves.then(|| folder.path().to_owned());
    let outcome = sim::run(1, 4, move |transport| train(transport, WAYS[way], between, directory.as_deref()));
    let expected = (2, name.to_owned(), there.to_owned(), on_rank_0.to_owned());
    for result in outcome.results.into_iter().flatten() {
        let Err(Error::SettingsDiffer { rank, setting, there, on_rank_0 }) = result else {
            panic!("{result:?}")
        };
        assert_eq!((rank, setting, there, on_rank_0), expected);
    }
}

/// The update of a replica communicates nothing.
#[test]
fn an_update_that_one_rank_leaves_out_is_the_same_error_on_every_rank() {
    let between: Between = |odd| {
        if odd { Settings { clipped_to: None, optimizer: None } } else { updated(sgd(|_| ())) }
    };
    let outcome = sim::run(1, 4, move |transport| train(transport, TrainingWay::Ddp, between, None));
    for result in outcome.results.into_iter().flatten() {
        let Err(Error::SettingsDiffer { rank: 2, setting, there, on_rank_0 }) = result else {
            panic!("{result:?}")
        };
        assert_eq!((&*setting, &*there, &*on_rank_0), ("the optimizer of the update", "missing", "sgd"));
    }
}

/// After one mistake of a rank, every step returns the error, also if the rank's later updates are correct.
#[test]
fn a_difference_of_earlier_steps_is_not_forgotten_until_a_checkpoint_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_owned();
    let outcome = sim::run(1, 2, move |transport| {
        let comm = Communicator::new(transport);
        let odd = comm.rank() == 1;
        let options = FsdpOptions::new(ShardingStrategy::FullShard);
        let mut fsdp = Fsdp::new(comm, model(1), &options).unwrap();
        let step = |fsdp: &mut Fsdp<_>, rate: f64| {
            let report = fsdp.step(4, batch(0))?;
            fsdp.update(&mut sgd(|sgd| sgd.learning_rate = rate)).map(|()| report.loss)
        };
        let mut checkpoints = Checkpoints::at(&directory);
        step(&mut fsdp, 0.1).unwrap();
        checkpoints.save(&mut fsdp, None, 1).unwrap();
        step(&mut fsdp, if odd { 0.3 } else { 0.2 }).unwrap();
        let refused = [0.1, 0.1].map(|rate| step(&mut fsdp, rate).unwrap_err());
        assert!(refused.iter().all(|error| matches!(error, Error::SettingsDiffer { rank: 1, .. })));
        fsdp.update(&mut sgd(|_| ())).unwrap();
        assert!(matches!(
            step(&mut fsdp, 0.1).unwrap_err(),
            Error::SettingsDiffer { .. } | Error::EarlierSettingsDiffer
        ));
        checkpoints.load(&mut fsdp, None).unwrap();
        step(&mut fsdp, 0.1).unwrap();
        step(&mut fsdp, 0.1).unwrap()
    });
    assert_eq!(outcome.results[0].to_bits(), outcome.results[1].to_bits());
}

/// Creates the trainer of a rank, which can be the odd one.
type Make = fn(Communicator, bool) -> Result<(), Error>;

fn sharded(comm: Communicator, options: FsdpOptions) -> Result<(), Error> {
    Fsdp::new(comm, model(1), &options).map(drop)
}

fn full() -> FsdpOptions {
    FsdpOptions::new(ShardingStrategy::FullShard)
}

#[rstest]
#[case::strategy(|comm, odd| sharded(comm, if odd { FsdpOptions::new(ShardingStrategy::ShardGradOp) } else { full() }), "the strategy", "ShardGradOp", "FullShard")]
#[case::units(|comm, odd| sharded(comm, if odd { full().with_units(Units::OneForAll) } else { full() }), "units", "OneForAll", "EachBlock")]
#[case::prefetch(|comm, odd| sharded(comm, full().with_prefetch(1 + usize::from(odd))), "prefetch", "2", "1")]
#[case::reshard(|comm, odd| sharded(comm, if odd { full().with_reshard(Reshard::Nothing) } else { full() }), "reshard", "Nothing", "All")]
#[case::precision(
    |comm, odd| {
        let reduce = if odd { Some(FloatType::F64) } else { None };
        sharded(comm, full().with_precision(Precision { master: None, reduce }))
    },
    "the precision",
    "Precision { master: None, reduce: Some(F64) }",
    "Precision { master: None, reduce: None }"
)]
#[case::buckets(
    |comm, odd| {
        let bytes = BucketBytes { first_max: 1, other_max: if odd { 3 } else { 2 } };
        Ddp::new(comm, model(1), DdpOptions::default().with_bucket_bytes(bytes)).map(drop)
    },
    "the sizes of buckets",
    "BucketBytes { first_max: 1, other_max: 3 }",
    "BucketBytes { first_max: 1, other_max: 2 }"
)]
#[case::hook(
    |comm, odd| {
        let compression: Compression = if odd { "topk:0.5" } else { "topk:0.25" }.parse()?;
        match compression.hook()? {
            Some(hook) => Ddp::with_hook(comm, model(1), DdpOptions::default(), hook).map(drop),
            None => Ok(()),
        }
    },
    "the hook",
    "topk:0.5",
    "topk:0.25"
)]
#[case::no_hook(
    |comm, odd| match odd {
        true => Ddp::new(comm, model(1), DdpOptions::default()).map(drop),
        false => Ddp::with_hook(comm, model(1), DdpOptions::default(), dist_parallel::compress::F16Hook::default()).map(drop),
    },
    "the hook",
    "none",
    "f16"
)]
#[case::inner_steps(|comm, odd| LocalSgd::new(comm, model(1), LocalSgdOptions::average(1 + usize::from(odd))).map(drop), "the number of inner steps", "2", "1")]
#[case::outer_step(
    |comm, odd| {
        let options = if odd { LocalSgdOptions::diloco(1) } else { LocalSgdOptions::average(1) };
        LocalSgd::new(comm, model(1), options).map(drop)
    },
    "the outer step",
    "Nesterov { learning_rate: 0.7, momentum: 0.9 }",
    "Average"
)]
fn options_that_differ_are_named_with_both_values(
    #[case] make: Make,
    #[case] name: &str,
    #[case] there: &str,
    #[case] on_rank_0: &str,
) {
    let outcome = sim::run(1, 3, move |transport| {
        let comm = Communicator::new(transport);
        let odd = comm.rank() == 1;
        make(comm, odd)
    });
    let expected = (1, name.to_owned(), there.to_owned(), on_rank_0.to_owned());
    for result in outcome.results {
        let Err(Error::OptionsDiffer { rank, setting, there, on_rank_0 }) = result else {
            panic!("{result:?}")
        };
        assert_eq!((rank, setting, there, on_rank_0), expected);
    }
}
