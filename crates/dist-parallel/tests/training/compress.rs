//! Training with compressed gradients, or with a user's hook.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dist_collectives::{Communicator, ReduceOp};
use dist_parallel::checkpoint::Checkpoints;
use dist_parallel::compress::{BucketGradients, BucketHook, Compression, TopKHook};
use dist_parallel::optim::{AdamW, AdamWOptions, Sgd, SgdOptions};
use dist_parallel::{BoxError, Ddp, DdpOptions, Error, FloatType, ParamInfo, Values, ValuesMut};
use dist_transport::sim;
use rstest::rstest;

use crate::ddp::{options, train_alone, train_steps};
use crate::errors::run_at_once;
use crate::plain::{Bag, Numbers, batch, bits, model};

fn hook(text: &str) -> Box<dyn BucketHook> {
    text.parse::<Compression>().unwrap().hook().unwrap().unwrap()
}

/// Trains like the uncompressed tests of AdamW. Returns the parameters and the losses.
fn train(ranks: usize, steps: usize, text: &'static str, bucket_bytes: usize) -> Vec<(Vec<u32>, Vec<f32>)> {
    let program = move |transport| {
        let comm = Communicator::new(transport);
        let seed = 7 + comm.rank() as u64;
        let mut ddp = Ddp::with_hook(comm, model(seed), options(bucket_bytes), hook(text)).unwrap();
        let mut sgd = Sgd::new(SgdOptions { learning_rate: 0.05, ..SgdOptions::default() }).unwrap();
        let step = |step| {
            let report = ddp.step(8, batch(step % 4));
            ddp.update(&mut sgd).unwrap();
            report.unwrap().loss
        };
        let losses = (0..steps).map(step).collect();
        (bits(ddp.model()), losses)
    };
    sim::run(ranks as u64, ranks, program).results
}

#[rstest]
fn compressed_training_learns_and_is_the_same_on_every_rank(
    #[values("bf16", "f16", "int8", "topk:0.3", "powersgd:1")] text: &'static str,
    #[values(1, 2, 3)] ranks: usize,
    #[values(0, 1 << 20)] bucket_bytes: usize,
) {
    let plain = train(ranks, 60, "topk:1", bucket_bytes);
    let all = train(ranks, 60, text, bucket_bytes);
    assert!(all.iter().all(|trained| *trained == all[0]));
    assert_ne!(all[0].0, plain[0].0, "something was compressed");
    let last = |losses: &[f32]| losses[56..].iter().sum::<f32>();
    let (first, compressed, plain) = (all[0].1[..4].iter().sum::<f32>(), last(&all[0].1), last(&plain[0].1));
    assert!(plain < 0.9 * first, "there is something to learn: {first} {plain}");
    assert!(compressed - plain < 0.2 * (first - plain), "{text}: {first} {plain} {compressed}");
}

/// A hook that sums without compression, and counts.
struct Plain(Arc<AtomicUsize>);

impl BucketHook for Plain {
    fn name(&self) -> String {
        "plain".to_owned()
    }

    fn sum(&mut self, bucket: BucketGradients<'_>, comm: &mut Communicator) -> Result<(), BoxError> {
        let ValuesMut::F32(values) = bucket.values else { return Err("this hook sums f32".into()) };
        assert_eq!(bucket.bucket, self.0.fetch_add(1, Ordering::Relaxed));
        assert_eq!(values.len(), bucket.tensors.iter().map(|tensor| tensor.len).sum::<usize>());
        Ok(comm.all_reduce(values, ReduceOp::Sum)?)
    }
}

#[test]
fn a_hook_that_sums_without_compression_trains_like_one_process() {
    let program = |transport| {
        let comm = Communicator::new(transport);
        let ddp = Ddp::with_hook(comm, model(7), options(30), hook("topk:1")).unwrap();
        train_steps(Box::new(ddp), (5, 8), "adamw", None).0
    };
    assert_eq!(sim::run(1, 4, program).results, vec![train_alone(8, "adamw"); 4]);
}

fn infos() -> Vec<ParamInfo> {
    (0..4).map(|index| ParamInfo::new(format!("layer.{index}"), [2, 3], FloatType::F32)).collect()
}

#[test]
fn buckets_are_summed_by_the_hook_while_the_backward_pass_goes_on() {
    let outcome = sim::run(1, 3, |transport| {
        let comm = Communicator::new(transport);
        let runtime = comm.runtime().clone();
        let summed = Arc::new(AtomicUsize::new(0));
        let hook = Plain(Arc::clone(&summed));
        // Two parameters in each bucket.
        let mut ddp = Ddp::with_hook(comm, Bag::new(infos(), 1), options(48), hook).unwrap();
        let mut seen = Vec::new();
        ddp.step_with(3, |_, _, ready| {
            for parameter in (0..4).rev() {
                ready(parameter, Values::F32(&[1.0; 6]))?;
                runtime.sleep(Duration::from_millis(100));
                seen.push(summed.load(Ordering::Relaxed));
            }
            Ok(0.0)
        })
        .unwrap();
        assert_eq!(ddp.gradient(0), Some(Values::F32(&[1.0; 6])));
        seen
    });
    assert_eq!(outcome.results, [[0, 1, 1, 2]; 3]);
}

#[test]
fn hooks_that_differ_are_an_error_on_every_rank() {
    let results = run_at_once(3, |comm| {
        let hook = hook(if comm.rank() == 1 { "topk:0.1" } else { "topk:0.2" });
        Ddp::with_hook(comm, model(1), DdpOptions::default(), hook).map(drop)
    });
    let named = |result: &Result<(), Error>| matches!(result, Err(Error::OptionsDiffer { rank: 1, .. }));
    assert!(results.iter().all(named), "{results:?}");
    let results = run_at_once(2, |comm| match comm.rank() {
        0 => Ddp::new(comm, model(1), DdpOptions::default()).map(drop),
        _ => Ddp::with_hook(comm, model(1), DdpOptions::default(), hook("bf16")).map(drop),
    });
    assert!(results.iter().all(named), "{results:?}");
}

/// A hook that fails in different ways on rank 1.
struct Failing(Failure);

#[derive(Clone, Copy, Debug)]
enum Failure {
    Own,
    /// It fails with an error that otherwise every rank has.
    Everybodys,
    Panic,
}

impl BucketHook for Failing {
    fn name(&self) -> String {
        "failing".to_owned()
    }

    fn sum(&mut self, bucket: BucketGradients<'_>, comm: &mut Communicator) -> Result<(), BoxError> {
        match (comm.rank(), self.0) {
            (1, Failure::Own) => Err("no codebook".into()),
            (1, Failure::Everybodys) => Err(Error::NoMicroBatches.into()),
            (1, Failure::Panic) => panic!("on purpose"),
            _ => hook("bf16").sum(bucket, comm),
        }
    }
}

#[rstest]
fn a_failing_hook_ends_the_job_on_every_rank(
    #[values(Failure::Own, Failure::Everybodys, Failure::Panic)] failure: Failure,
) {
    let results = run_at_once(3, move |comm| {
        let bag = Bag::new(infos(), 1);
        let mut ddp = Ddp::with_hook(comm, bag, options(30), Failing(failure)).unwrap();
        ddp.step_with(3, |bag, index, ready| bag.report(index, ready)).unwrap_err()
    });
    for (rank, error) in results.iter().enumerate() {
        match (rank, failure, error) {
            (1, Failure::Own, Error::Hook { hook, source }) => {
                assert_eq!((&**hook, &*source.to_string()), ("failing", "no codebook"));
            }
            (1, Failure::Everybodys, Error::Hook { source, .. }) => assert!(source.is::<Error>()),
            (1, Failure::Panic, Error::HookPanicked { hook }) => assert_eq!(hook, "failing"),
            (0 | 2, _, Error::Communication(source)) => assert_eq!(source.peer(), Some(1), "{source}"),
            _ => panic!("rank {rank}: {error:?}"),
        }
    }
}

/// Returns the bytes of one rank in a step.
fn bytes_sent(compression: &'static str) -> Vec<u64> {
    let program = move |transport| {
        let comm = Communicator::new(transport);
        let model = Bag::new(vec![ParamInfo::new("w", [40, 50], FloatType::F32)], 1);
        let compression: Compression = compression.parse().unwrap();
        let mut ddp = match compression.hook().unwrap() {
            None => Ddp::new(comm, model, options(1 << 20)).unwrap(),
            Some(hook) => Ddp::with_hook(comm, model, options(1 << 20), hook).unwrap(),
        };
        let mut step = || ddp.step_with(2, |bag, index, ready| bag.report(index, ready)).unwrap().bytes_sent;
        let first = step();
        assert_eq!(step(), first);
        first
    };
    sim::run(1, 2, program).results
}

#[rstest]
#[case("none", 4 * 2000)]
#[case("bf16", 2 * 2000)]
#[case("int8", 2 * (1000 + 4 * 4))]
#[case("topk:0.01", 8 * 20)]
#[case("powersgd:4", 4 * 4 * (40 + 50))]
fn a_step_reports_the_bytes_that_it_sent(#[case] compression: &'static str, #[case] bucket: u64) {
    // In addition to the bucket, the loss and five numbers are sent.
    assert_eq!(bytes_sent(compression), [bucket + 4 + 8 * 5; 2]);
}

/// A parameter with a gradient only in the first step keeps receiving its residual.
#[test]
fn the_residual_of_a_gradient_reaches_its_parameter_later() {
    let outcome = sim::run(1, 2, |transport| {
        let comm = Communicator::new(transport);
        let model = Bag::new(vec![ParamInfo::new("w", [4], FloatType::F32)], 1);
        let mut ddp = Ddp::with_hook(comm, model, options(100), TopKHook::new(0.25).unwrap()).unwrap();
        let mut step = |gradient: Option<[f32; 4]>| {
            ddp.step_with(2, |_, _, ready| {
                gradient.map_or(Ok(()), |gradient| ready(0, Values::F32(&gradient)))?;
                Ok(0.0)
            })
            .unwrap();
            match ddp.gradient(0) {
                Some(Values::F32(values)) => Some(values.to_vec()),
                None => None,
                Some(other) => panic!("the model is not {}", other.dtype()),
            }
        };
        [step(None), step(Some([1.0, -4.0, 2.0, 3.0])), step(None), step(None), step(None), step(None)]
    });
    let at = |index: usize, value: f32| {
        let mut gradient = vec![0.0; 4];
        gradient[index] = value;
        Some(gradient)
    };
    let expected = [None, at(1, -4.0), at(3, 3.0), at(2, 2.0), at(0, 1.0), Some(vec![0.0; 4])];
    assert_eq!(outcome.results, [expected.clone(), expected]);
}

#[test]
fn a_model_without_parameters_and_parameters_without_values_are_trained_too() {
    for infos in [vec![], vec![ParamInfo::new("nothing", [0, 3], FloatType::F32)]] {
        for text in ["bf16", "int8", "topk:0.1", "powersgd:1"] {
            let infos = infos.clone();
            let outcome = sim::run(1, 2, move |transport| {
                let comm = Communicator::new(transport);
                let bag = Bag::new(infos.clone(), 1);
                let mut ddp = Ddp::with_hook(comm, bag, options(30), hook(text)).unwrap();
                ddp.step_with(2, |_, _, _| Ok(1.5)).unwrap().loss
            });
            assert_eq!(outcome.results, [1.5; 2]);
        }
    }
}

/// A hook that sums without compression, with an asynchronous operation.
struct Started;

impl BucketHook for Started {
    fn name(&self) -> String {
        "started".to_owned()
    }

    fn sum(&mut self, bucket: BucketGradients<'_>, comm: &mut Communicator) -> Result<(), BoxError> {
        let ValuesMut::F32(values) = bucket.values else { return Err("this hook sums f32".into()) };
        let sum = comm.start_all_reduce(values.to_vec(), ReduceOp::Sum).wait();
        values.copy_from_slice(&sum.map_err(|failed| failed.error)?);
        Ok(())
    }
}

#[test]
fn bytes_of_a_hooks_asynchronous_operations_are_counted() {
    let outcome = sim::run(1, 2, |transport| {
        let model = Bag::new(vec![ParamInfo::new("w", [40, 50], FloatType::F32)], 1);
        let mut ddp = Ddp::with_hook(Communicator::new(transport), model, options(1 << 20), Started).unwrap();
        ddp.step_with(2, |bag, index, ready| bag.report(index, ready)).unwrap().bytes_sent
    });
    assert_eq!(outcome.results, bytes_sent("none")[..]);
}

/// One of two parameters has gradients only in some steps before a checkpoint.
#[rstest]
fn loading_an_earlier_step_continues_like_a_new_process(
    #[values("topk:0.25", "powersgd:1")] text: &'static str,
) {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_owned();
    let run = move |is_new: bool| {
        let directory = directory.clone();
        let program = move |transport| {
            let infos = ["always", "later"].map(|name| ParamInfo::new(name, [4, 4], FloatType::F32)).into();
            let comm = Communicator::new(transport);
            let mut ddp = Ddp::with_hook(comm, Bag::new(infos, 1), options(0), hook(text)).unwrap();
            let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
            let mut checkpoints = Checkpoints::at(&directory);
            let step = |ddp: &mut Ddp<Bag>, optimizer: &mut AdamW, number: u64, parameters: usize| {
                let report = ddp.step_with(2, |_, index, ready| {
                    let mut numbers = Numbers(2 * number + index as u64);
                    (0..parameters)
                        .try_for_each(|parameter| ready(parameter, (&*numbers.take(16)).into()))?;
                    Ok(0.0)
                });
                report.unwrap();
                ddp.update(optimizer).unwrap();
            };
            if !is_new {
                step(&mut ddp, &mut optimizer, 1, 1);
                checkpoints.save(&mut ddp, Some(&optimizer), 1).unwrap();
                step(&mut ddp, &mut optimizer, 2, 2);
            }
            assert_eq!(checkpoints.load(&mut ddp, Some(&mut optimizer)).unwrap(), Some(1));
            step(&mut ddp, &mut optimizer, 3, 1);
            step(&mut ddp, &mut optimizer, 4, 1);
            bits(ddp.model())
        };
        sim::run(1, 2, program).results
    };
    let went_back = run(false);
    assert_eq!(went_back, run(true));
}
