//! The training of many ranks compared with one process: equal to the last bit.

use crate::join::tree;
use crate::plain::{self, Rows, batch, bits, micro_batch, model, squared_error};
use dist_collectives::{Communicator, ReduceOp};
use dist_parallel::buckets::BucketBytes;
use dist_parallel::fsdp::{Fsdp, FsdpOptions};
use dist_parallel::optim::{AdamW, AdamWOptions, Momentum, Optimizer, Sgd, SgdOptions};
use dist_parallel::trainer::Trainer;
use dist_parallel::{Ddp, DdpOptions, Params, Sequence, Values};
use dist_transport::sim;
use rstest::rstest;

const STEPS: usize = 5;

/// The result of a training: the parameters, and every step's loss.
pub(crate) type Trained = (Vec<u32>, Vec<u32>);

pub(crate) fn options(bucket_bytes: usize) -> DdpOptions {
    DdpOptions::default().with_bucket_bytes(BucketBytes { first_max: bucket_bytes, other_max: bucket_bytes })
}

pub(crate) fn optimizer(name: &str) -> Box<dyn Optimizer> {
    match name {
        "sgd" => {
            let momentum = Momentum::Plain(0.9);
            Box::new(Sgd::new(SgdOptions { learning_rate: 0.05, momentum, weight_decay: 0.01 }).unwrap())
        }
        _ => Box::new(AdamW::new(AdamWOptions { learning_rate: 0.02, ..AdamWOptions::default() }).unwrap()),
    }
}

pub(crate) fn train(
    comm: Communicator,
    micro_batches: usize,
    optimizer_name: &str,
    options: DdpOptions,
) -> Trained {
    // Every rank starts with another model, which rank 0's replaces.
    let seed = 7 + comm.rank() as u64;
    let ddp = Ddp::new(comm, model(seed), options).unwrap();
    train_steps(Box::new(ddp), (STEPS, micro_batches), optimizer_name, None).0
}

/// Takes steps with a falling learning rate. Returns every step's norm too, if gradients are clipped.
pub(crate) fn train_steps(
    mut trainer: Box<dyn Trainer<Rows>>,
    (steps, micro_batches): (usize, usize),
    optimizer_name: &str,
    clip: Option<f64>,
) -> (Trained, Vec<f64>) {
    let mut optimizer = optimizer(optimizer_name);
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..steps {
        optimizer.set_learning_rate(0.05 / (step + 1) as f64).unwrap();
        let report = trainer.step(micro_batches, batch(step));
        losses.push(report.unwrap().loss.to_bits());
        norms.extend(clip.map(|max| trainer.clip_gradients(max).unwrap()));
        trainer.update(&mut *optimizer).unwrap();
    }
    ((bits(&trainer.into_parts().unwrap().1[0]), losses), norms)
}

fn trained(ranks: usize, micro_batches: usize, optimizer: &'static str, bucket_bytes: usize) -> Vec<Trained> {
    let program =
        move |transport| train(Communicator::new(transport), micro_batches, optimizer, options(bucket_bytes));
    sim::run(ranks as u64, ranks, program).results
}

/// Trains by the definitions, without the tested code: whole gradients, the recursive tree.
pub(crate) fn train_alone(micro_batches: usize, optimizer_name: &str) -> Trained {
    let mut model = model(7);
    let mut optimizer = optimizer(optimizer_name);
    let mut losses = Vec::new();
    for step in 0..STEPS {
        optimizer.set_learning_rate(0.05 / (step + 1) as f64).unwrap();
        let leaves: Vec<Vec<f32>> = (0..micro_batches).map(|index| leaf(&mut model, step, index)).collect();
        let mut mean = tree(&leaves);
        mean.iter_mut().for_each(|sum| *sum /= micro_batches as f32);
        let (loss, gradients) = mean.split_first().unwrap();
        losses.push(loss.to_bits());
        let mut rest = gradients;
        for index in owners(&model) {
            let (gradient, after) = rest.split_at(model.infos()[index].len());
            rest = after;
            let mut step = |values: dist_parallel::ValuesMut<'_>| {
                optimizer.update(index, values, Values::F32(gradient)).unwrap();
            };
            model.write(index, &mut step).unwrap();
        }
    }
    (bits(&model), losses)
}

fn owners(model: &dyn Params) -> Vec<usize> {
    let owns = |index: &usize| model.infos()[*index].trainable && model.infos()[*index].same_as.is_none();
    (0..model.infos().len()).filter(owns).collect()
}

/// Returns the loss of a micro-batch, then its gradients.
fn leaf(model: &mut Sequence<Rows>, step: usize, index: usize) -> Vec<f32> {
    use dist_parallel::Block;
    let mut gradients: Vec<Vec<f32>> = model.infos().iter().map(|_| Vec::new()).collect();
    let homes: Vec<usize> =
        model.infos().iter().enumerate().map(|(i, info)| info.same_as.unwrap_or(i)).collect();
    let (input, target) = micro_batch(step, index);
    let (output, saved) = model.forward(input).unwrap();
    let (loss, of_output) = squared_error(target)(output).unwrap();
    let mut ready = |index: usize, values: Values<'_>| {
        let Values::F32(values) = values else { panic!("the model is f32") };
        let sum = &mut gradients[homes[index]];
        if sum.is_empty() {
            sum.extend_from_slice(values);
        } else {
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
        Ok(())
    };
    model.backward(saved, of_output, &mut ready).unwrap();
    let gradients = owners(model).into_iter().flat_map(|index| std::mem::take(&mut gradients[index]));
    std::iter::once(loss).chain(gradients).collect()
}

#[rstest]
#[case(1, 8)]
#[case(2, 8)]
#[case(4, 8)]
#[case(8, 8)]
#[case(3, 12)]
#[case(5, 5)]
#[case(1, 7)]
fn any_number_of_ranks_trains_like_one_process(
    #[case] ranks: usize,
    #[case] micro_batches: usize,
    #[values("sgd", "adamw")] optimizer: &'static str,
    #[values(0, 1, 30, 1 << 20)] bucket_bytes: usize,
) {
    let alone = train_alone(micro_batches, optimizer);
    for (rank, trained) in trained(ranks, micro_batches, optimizer, bucket_bytes).into_iter().enumerate() {
        assert_eq!(trained, alone, "rank {rank}");
    }
}

#[rstest]
#[case::uneven(3, 8)]
#[case::odd_shares(2, 6)]
#[case::some_have_nothing(5, 3)]
#[case::nearly_all_have_nothing(9, 1)]
fn other_shares_train_the_same_on_every_rank_in_every_run_with_all_buckets(
    #[case] ranks: usize,
    #[case] micro_batches: usize,
) {
    let first = trained(ranks, micro_batches, "adamw", 1 << 20);
    assert!(first.iter().all(|trained| *trained == first[0]));
    for bucket_bytes in [0, 30] {
        assert_eq!(trained(ranks, micro_batches, "adamw", bucket_bytes), first);
    }
    // The training also agrees with one process, except for rounding.
    let (alone, _) = train_alone(micro_batches, "adamw");
    for (trained, alone) in first[0].0.iter().zip(alone) {
        let (trained, alone) = (f32::from_bits(*trained), f32::from_bits(alone));
        assert!((trained - alone).abs() <= 1e-4 * alone.abs().max(1.0), "{trained} is not {alone}");
    }
}

#[rstest]
fn shares_are_contiguous_and_cover_everything(
    #[values(1, 2, 3, 4, 7)] ranks: usize,
    #[values(0, 1, 3, 8, 12, 25)] micro_batches: usize,
) {
    let outcome = sim::run(1, ranks, move |transport| {
        let ddp = Ddp::new(Communicator::new(transport), model(1), DdpOptions::default()).unwrap();
        ddp.share(micro_batches)
    });
    let all: Vec<usize> = outcome.results.iter().cloned().flatten().collect();
    assert_eq!(all, Vec::from_iter(0..micro_batches));
    let lens = outcome.results.iter().map(ExactSizeIterator::len);
    assert!(lens.clone().max().unwrap() - lens.min().unwrap() <= 1);
}

/// Returns one step's mean gradients of all parameters, as bits, and the loss.
fn gradients(ddp: &Ddp<Sequence<Rows>>) -> Vec<Option<Vec<u32>>> {
    let of = |index| match ddp.gradient(index)? {
        Values::F32(values) => Some(values.iter().map(|value| value.to_bits()).collect()),
        other => panic!("the model is not {}", other.dtype()),
    };
    (0..ddp.model().infos().len()).map(of).collect()
}

/// The reports of some micro-batches omit some parameters.
#[rstest]
fn a_missing_gradient_of_a_micro_batch_counts_as_zero(#[values(1, 2, 4)] ranks: usize) {
    let program = move |transport| {
        let mut ddp = Ddp::new(Communicator::new(transport), model(1), options(30)).unwrap();
        for _ in 0..2 {
            let report =
                |_: &mut Sequence<Rows>, index: usize, ready: &mut dist_parallel::model::Ready<'_>| {
                    // The bias of `first` (1) has a gradient in one micro-batch of four, the bias of `last`
                    // (7) in all but one.
                    if index == 2 {
                        ready(1, Values::F32(&[4.0, -0.0, 1.0]))?;
                    }
                    if index != 0 {
                        ready(7, Values::F32(&[index as f32, 1.0]))?;
                    }
                    Ok(index as f32)
                };
            let loss = ddp.step_with(4, report).unwrap().loss;
            assert_eq!(loss, 1.5);
        }
        gradients(&ddp)
    };
    let as_bits = |values: &[f32]| Some(values.iter().map(|value| value.to_bits()).collect::<Vec<_>>());
    for gradients in sim::run(5, ranks, program).results {
        assert_eq!(gradients[1], as_bits(&[1.0, 0.0, 0.25]));
        assert_eq!(gradients[7], as_bits(&[1.5, 0.75]));
        let others = [0, 2, 3, 4, 5, 6].map(|index| gradients[index].is_none());
        assert_eq!(others, [true; 6], "no rank had a gradient for these");
    }
}

#[test]
fn parameters_without_a_gradient_are_not_updated() {
    let outcome = sim::run(1, 2, |transport| {
        let mut ddp = Ddp::new(Communicator::new(transport), model(1), DdpOptions::default()).unwrap();
        let before = bits(ddp.model());
        let mut decaying = optimizer("adamw");
        ddp.update(&mut *decaying).unwrap();
        assert_eq!(bits(ddp.model()), before, "there are no gradients yet");
        ddp.step_with(2, |_, _, ready| {
            ready(7, Values::F32(&[1.0, 1.0]))?;
            Ok(0.0)
        })
        .unwrap();
        ddp.update(&mut *decaying).unwrap();
        let after = bits(ddp.model());
        let (changed, kept) = (before.len() - 2, before.len() - 2);
        (before[changed..] != after[changed..], before[..kept] == after[..kept])
    });
    assert_eq!(outcome.results, [(true, true); 2]);
}

#[test]
fn a_frozen_parameter_has_no_gradient_and_stays() {
    let outcome = sim::run(1, 2, |transport| {
        let mut ddp = Ddp::new(Communicator::new(transport), model(1), DdpOptions::default()).unwrap();
        let frozen = |ddp: &Ddp<Sequence<Rows>>| {
            let mut values = Vec::new();
            ddp.model()
                .read(4, &mut |read| {
                    if let Values::F32(read) = read {
                        values = read.to_vec()
                    }
                })
                .unwrap();
            values
        };
        let before = frozen(&ddp);
        ddp.step(2, batch(0)).unwrap();
        ddp.update(&mut *optimizer("sgd")).unwrap();
        assert_eq!(ddp.model().infos()[4].name, "frozen.weight");
        ddp.gradient(4).is_none() && ddp.gradient(0).is_some() && frozen(&ddp) == before
    });
    assert_eq!(outcome.results, [true, true]);
}

#[rstest]
fn slices_are_reduced_as_if_one_by_one(#[values(1, 2, 3, 5)] ranks: usize) {
    let outcome = sim::run(2, ranks, move |transport| {
        let mut comm = Communicator::new(transport);
        let mut numbers = plain::Numbers(comm.rank() as u64);
        let mut slices: Vec<Vec<f32>> =
            [0, 1, 7, 1000, 3].map(|len| (0..len).map(|_| numbers.next()).collect()).into();
        let mut one_by_one = slices.clone();
        for slice in &mut one_by_one {
            comm.all_reduce(slice, ReduceOp::Mean).unwrap();
        }
        let mut all: Vec<&mut [f32]> = slices.iter_mut().map(Vec::as_mut_slice).collect();
        dist_parallel::own_loop::reduce(&mut comm, &mut all, ReduceOp::Mean).unwrap();
        slices == one_by_one
    });
    assert!(outcome.results.into_iter().all(|equal| equal));
}

/// Tied parameters are left out, and a sharded model has the same.
#[test]
fn each_parameter_is_handed_out_once() {
    let outcome = sim::run(1, 2, |transport| {
        let mut comm = Communicator::new(transport);
        let ddp = Ddp::new(comm.fork().unwrap(), model(7), DdpOptions::default()).unwrap();
        let mut fsdp = Fsdp::new(comm, model(7), &FsdpOptions::default()).unwrap();
        let [mut of_ddp, mut of_fsdp] = [Vec::new(), Vec::new()];
        let bits = |values: Values<'_>| match values {
            Values::F32(values) => values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>(),
            other => panic!("the model is not {}", other.dtype()),
        };
        ddp.for_each_parameter(|index, values| of_ddp.push((index, bits(values)))).unwrap();
        fsdp.for_each_parameter(|index, values| of_fsdp.push((index, bits(values)))).unwrap();
        of_fsdp.sort();
        assert_eq!(of_ddp, of_fsdp);
        let infos = ddp.model().infos();
        let own = (0..infos.len()).filter(|&index| infos[index].same_as.is_none());
        assert_eq!(of_ddp.iter().map(|(index, _)| *index).collect::<Vec<_>>(), own.collect::<Vec<_>>());
        infos.len() - of_ddp.len()
    });
    assert_eq!(outcome.results, [1; 2]);
}
