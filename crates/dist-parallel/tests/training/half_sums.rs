//! Gradients of `f16` whose mean is in range and whose sum is not. All trainers sum in `f32` and round the mean to
//! `f16` once.

use dist_collectives::{Communicator, ReduceOp};
use dist_parallel::compress::{BucketGradients, BucketHook, Compression};
use dist_parallel::fsdp::{Fsdp, FsdpOptions, Precision, ShardingStrategy};
use dist_parallel::local_sgd::{LocalSgd, LocalSgdOptions};
use dist_parallel::model::{Ready, Saved, Slot};
use dist_parallel::own_loop::Aggregation;
use dist_parallel::pipeline::{Pipeline, PlainVectors, ScheduleKind, split_into_stages};
use dist_parallel::{
    Block, BoxError, Ddp, DdpOptions, FloatType, ParamInfo, Params, Sequence, Values, ValuesMut,
};
use dist_transport::sim;
use half::f16;
use proptest::prelude::*;
use rstest::rstest;

use crate::ddp::optimizer;
use crate::plain::{Bag, Numbers, Rows, bits, params_in_slots, rounded};

/// The input of a micro-batch, a factor of all its gradients.
struct Steep {
    infos: [ParamInfo; 1],
    slots: [Slot; 1],
}

impl Steep {
    fn new(name: &str, len: usize, dtype: FloatType) -> Self {
        Self { infos: [ParamInfo::new(name, [len], dtype)], slots: [rounded(dtype, &vec![1.0; len])] }
    }
}

params_in_slots!(Steep);

/// Returns the gradients of a parameter of `len` values in one micro-batch.
fn leaf(input: f32, len: usize) -> Vec<f16> {
    (0..len).map(|index| f16::from_f32(input * (1.0 - index as f32 / 16.0))).collect()
}

impl Block<Rows> for Steep {
    fn forward(&mut self, input: Rows) -> Result<(Rows, Saved), BoxError> {
        Ok((input.clone(), Saved::new(input)))
    }

    fn backward(
        &mut self,
        saved: Saved,
        gradient: Rows,
        ready: &mut Ready<'_>,
    ) -> Result<Option<Rows>, BoxError> {
        let own = leaf(saved.take::<Rows>()?[0], self.infos[0].len());
        match self.infos[0].dtype {
            FloatType::F16 => ready(0, own[..].into())?,
            _ => ready(0, own.into_iter().map(f16::to_f32).collect::<Vec<_>>()[..].into())?,
        }
        Ok(Some(gradient))
    }
}

/// Lengths that no number of ranks divides.
const LENS: [usize; 4] = [5, 3, 1, 7];

fn model(dtype: FloatType) -> Sequence<Rows> {
    let block = |(index, &len): (usize, &usize)| -> Box<dyn Block<Rows>> {
        Box::new(Steep::new(&format!("w{index}"), len, dtype))
    };
    Sequence::new(LENS.iter().enumerate().map(block).collect()).unwrap()
}

/// Returns a model whose last parameter is tied to the first.
fn tied_model() -> Sequence<Rows> {
    let steep = |name: &str, len| -> Box<dyn Block<Rows>> { Box::new(Steep::new(name, len, FloatType::F16)) };
    let mut model = Sequence::new(vec![steep("a", 5), steep("b", 3), steep("c", 2), steep("d", 5)]).unwrap();
    model.tie("d", "a").unwrap();
    model
}

/// Evaluates the tree T(n) over `f32` numbers.
fn tree(leaves: &[f32]) -> f32 {
    if let [leaf] = leaves {
        return *leaf;
    }
    let (left, right) = leaves.split_at(leaves.len().next_power_of_two() / 2);
    tree(left) + tree(right)
}

/// Returns the mean gradients of a parameter: sums in `f32` in canonical order, divided there, rounded to `f16`. It
/// is reported `uses` times in each micro-batch.
fn mean(inputs: &[f32], len: usize, times: usize, divisor: f32) -> Vec<f16> {
    let leaves: Vec<Vec<f16>> = inputs.iter().map(|&input| leaf(input, len)).collect();
    let of_value = |index: usize| {
        let value = |leaf: &Vec<f16>| (0..times).map(|_| leaf[index].to_f32()).sum::<f32>();
        f16::from_f32(tree(&leaves.iter().map(value).collect::<Vec<_>>()) / divisor)
    };
    (0..len).map(of_value).collect()
}

/// The loss of an output, and its gradient.
type Loss = fn(Rows) -> Result<(f32, Rows), BoxError>;

fn loss(output: Rows) -> Result<(f32, Rows), BoxError> {
    Ok((1.0, output))
}

fn batch(inputs: &[f32]) -> impl FnMut(usize) -> Result<(Rows, Loss), BoxError> {
    |index| Ok((vec![inputs[index]], loss as Loss))
}

#[track_caller]
fn assert_mean(found: Option<Values<'_>>, expected: &[f16], context: &str) {
    let Some(Values::F16(found)) = found else { panic!("{context}: {found:?}") };
    let bits = |values: &[f16]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(found), bits(expected), "{context}: {found:?}, not {expected:?}");
}

/// Returns eight micro-batches: ones, the largest values, and some whose `f32` sums are rounded.
fn cases() -> Vec<Vec<f32>> {
    let noise = |seed| Numbers(seed).take(8).into_iter().map(|number| number * 60_000.0).collect();
    vec![vec![10_000.0; 8], vec![65_504.0; 8], noise(1), noise(2), noise(3)]
}

fn ddp_trains(ranks: usize, inputs: Vec<f32>) {
    let _outcome = sim::run(1, ranks, move |transport| {
        let options = DdpOptions::default();
        let mut ddp = Ddp::new(Communicator::new(transport), model(FloatType::F16), options).unwrap();
        let count = inputs.len();
        let check = |ddp: &Ddp<Sequence<Rows>>, divisor: f32, context: &str| {
            for (parameter, &len) in LENS.iter().enumerate() {
                let expected = mean(&inputs, len, 1, divisor);
                assert_mean(ddp.gradient(parameter), &expected, &format!("{context} of {ranks}"));
            }
        };
        ddp.step(count, batch(&inputs)).unwrap();
        check(&ddp, count as f32, "step");
        assert!(ddp.gradient_norm().unwrap().is_finite());
        // Micro-batches with a weight of three each.
        ddp.step(count, |index| {
            Ok((vec![inputs[index]], |output| Ok::<_, BoxError>(((1.0_f32, 3_u64), output))))
        })
        .unwrap();
        check(&ddp, 3.0 * count as f32, "weighted step");
        let own = ddp.share(count);
        ddp.join(own.len(), |index| batch(&inputs)(own.start + index)).unwrap().unwrap();
        check(&ddp, count as f32, "join");
        ddp.accumulate(count, batch(&inputs)).unwrap();
        ddp.synchronise().unwrap();
        check(&ddp, count as f32, "accumulate");
        let norm = ddp.clip_gradients(1.0).unwrap();
        assert!(norm > 1.0 && (ddp.gradient_norm().unwrap() - 1.0).abs() < 0.01, "{norm}");
    });
}

#[rstest]
fn ddp_carries_sums_of_f16_as_f32(#[values(1, 2, 4, 8)] ranks: usize) {
    cases().into_iter().for_each(|inputs| ddp_trains(ranks, inputs));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_gradients_of_f16_have_the_mean_of_one_process(
        inputs in prop::collection::vec(-65_504.0..65_504.0_f32, 8),
        ranks in prop::sample::select(vec![1_usize, 2, 4, 8]),
    ) {
        ddp_trains(ranks, inputs.clone());
        fsdp_trains(ranks, ShardingStrategy::FullShard, false, Precision::default(), inputs.clone());
        fsdp_trains(ranks, ShardingStrategy::ShardOptimizer, true, Precision::default(), inputs);
    }
}

fn fsdp_trains(
    ranks: usize,
    strategy: ShardingStrategy,
    shares_memory: bool,
    precision: Precision,
    inputs: Vec<f32>,
) {
    let network = sim::Network::new(ranks);
    let network = if shares_memory { network.with_shared_memory() } else { network };
    let _outcome = network.run(move |transport| {
        let options = FsdpOptions::new(strategy).with_prefetch(1).with_precision(precision);
        let dtype = if precision.reduce.is_some() { FloatType::F32 } else { FloatType::F16 };
        let mut fsdp = Fsdp::new(Communicator::new(transport), model(dtype), &options).unwrap();
        let count = inputs.len();
        let check = |fsdp: &Fsdp<Rows>, divisor: f32, context: &str| {
            for (parameter, &len) in LENS.iter().enumerate() {
                let Some((range, values)) = fsdp.gradient(parameter) else { continue };
                let expected = &mean(&inputs, len, 1, divisor)[range];
                assert_mean(Some(values), expected, &format!("{context}, {strategy:?} of {ranks}"));
            }
        };
        // The second step uses the memory of the first.
        for _ in 0..2 {
            fsdp.step(count, batch(&inputs)).unwrap();
            check(&fsdp, count as f32, "step");
        }
        assert!(fsdp.gradient_norm().unwrap().is_finite());
        fsdp.step(count, |index| {
            Ok((vec![inputs[index]], |output| Ok::<_, BoxError>(((1.0_f32, 3_u64), output))))
        })
        .unwrap();
        check(&fsdp, 3.0 * count as f32, "weighted step");
        fsdp.accumulate(count, batch(&inputs)).unwrap();
        fsdp.synchronise().unwrap();
        check(&fsdp, count as f32, "accumulate");
        let norm = fsdp.clip_gradients(1.0).unwrap();
        assert!(norm > 1.0 && (fsdp.gradient_norm().unwrap() - 1.0).abs() < 0.01, "{norm}");
    });
}

#[rstest]
#[case(ShardingStrategy::FullShard)]
#[case(ShardingStrategy::ShardGradOp)]
#[case(ShardingStrategy::ShardOptimizer)]
#[case(ShardingStrategy::NoShard)]
#[case(ShardingStrategy::HybridShard { shard_degree: 2 })]
fn sharded_training_carries_sums_of_f16_as_f32(
    #[case] strategy: ShardingStrategy,
    #[values(1, 2, 4, 8)] ranks: usize,
    #[values(false, true)] shares_memory: bool,
) {
    if ranks == 1 && matches!(strategy, ShardingStrategy::HybridShard { .. }) {
        // One rank cannot be divided into groups of two.
        return;
    }
    for inputs in cases() {
        fsdp_trains(ranks, strategy, shares_memory, Precision::default(), inputs.clone());
        // Gradients that are f16 only while they are reduced.
        let precision = Precision { master: None, reduce: Some(FloatType::F16) };
        fsdp_trains(ranks, strategy, shares_memory, precision, inputs);
    }
}

/// Also for a parameter in two stages, whose gradients of one micro-batch are added first.
#[rstest]
#[case::one_rank(1, 1, false)]
#[case::two_stages(2, 1, false)]
#[case::beside_each_other(2, 2, false)]
#[case::divided(2, 2, true)]
fn pipelines_carry_sums_of_f16_as_f32(
    #[case] stages: usize,
    #[case] others: usize,
    #[case] is_divided: bool,
) {
    for inputs in cases() {
        let _outcome = sim::run(1, stages * others, move |transport| {
            let mut world = Communicator::new(transport);
            let (rank, all) = (world.rank(), world.world_size());
            let mut group = |members: Vec<usize>| world.subgroup(&members).unwrap().unwrap();
            let number = rank / stages;
            let own = group((number * stages..(number + 1) * stages).collect());
            let beside = group((rank % stages..all).step_by(stages).collect());
            let pipelines = world.fork().unwrap();
            let schedule =
                ScheduleKind::OneForwardOneBackward.schedule(stages, inputs.len() / others).unwrap();
            let ranges = split_into_stages(4, stages).unwrap();
            let mut pipeline = Pipeline::new(own, tied_model(), schedule, &ranges, PlainVectors).unwrap();
            match is_divided {
                true => pipeline.shard_over(pipelines).unwrap(),
                false => pipeline.reduce_over(beside).unwrap(),
            }
            let divisor = inputs.len() as f32;
            for _ in 0..2 {
                pipeline.step(|index| Ok(vec![inputs[index]]), |_, output| loss(output)).unwrap();
                for (parameter, (len, times)) in [(5, 2), (3, 1), (2, 1)].into_iter().enumerate() {
                    let Some(values) = pipeline.gradient(parameter) else { continue };
                    let expected = mean(&inputs, len, times, divisor);
                    assert_mean(
                        Some(values),
                        &expected,
                        &format!("parameter {parameter} of {stages} stages"),
                    );
                }
                // Two uses of a parameter can exceed `f16`, and then their mean does too.
                let norm = pipeline.gradient_norm().unwrap();
                assert!(norm.is_finite() || inputs[0] != 10_000.0, "{norm}");
            }
            if !is_divided {
                assert!((0..3).any(|parameter| pipeline.gradient(parameter).is_some()));
            }
        });
    }
}

/// Parameters are averaged, with and without weights.
#[rstest]
fn local_sgd_averages_f16_in_f32(#[values(1, 2, 3, 8)] ranks: usize, #[values(false, true)] counts: bool) {
    let outcome = sim::run(1, ranks, move |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank();
        let infos = vec![ParamInfo::new("w", [3], FloatType::F16)];
        let mut local = LocalSgd::new(comm, Bag::new(infos, 1), LocalSgdOptions::average(1)).unwrap();
        let set = |model: &mut Bag| {
            model.write(0, &mut |values| {
                let ValuesMut::F16(values) = values else { panic!("the model is f16") };
                let own = [65_504.0, -65_504.0, 1.0 + rank as f32];
                values.copy_from_slice(&own.map(f16::from_f32));
            })
        };
        match counts {
            true => local.step_with(|model| set(model).map(|()| (0.0, 1000 * rank as u64 + 1))).map(drop),
            false => local.step_with(|model| set(model).map(|()| 0.0)).map(drop),
        }
        .unwrap();
        bits(local.model())
    });
    let weights: Vec<f64> =
        (0..ranks).map(|rank| if counts { 1000.0 * rank as f64 + 1.0 } else { 1.0 }).collect();
    let total: f64 = weights.iter().sum();
    let third = weights.iter().enumerate().map(|(rank, weight)| (1.0 + rank as f64) * weight / total).sum();
    let expected = [65_504.0, -65_504.0, third].map(|value| u32::from(f16::from_f64(value).to_bits()));
    assert_eq!(outcome.results, vec![expected.to_vec(); ranks]);
}

#[rstest]
fn aggregators_carry_sums_of_f16_as_f32(
    #[values(1, 2, 3, 8)] ranks: usize,
    #[values(Aggregation::AllReduce, Aggregation::ParameterServer { server: 0 })] aggregation: Aggregation,
) {
    let own =
        |rank: usize| Numbers(rank as u64).take(5).into_iter().map(|value| f16::from_f32(value * 60_000.0));
    let all: Vec<Vec<f16>> = (0..ranks).map(|rank| own(rank).collect()).collect();
    let sum = |index: usize| tree(&all.iter().map(|one| one[index].to_f32()).collect::<Vec<_>>());
    let mean: Vec<f16> = (0..5).map(|index| f16::from_f32(sum(index) / ranks as f32)).collect();
    let _outcome = sim::run(1, ranks, move |transport| {
        let comm = Communicator::new(transport);
        let mut gradients: Vec<f16> = own(comm.rank()).collect();
        let mut aggregator = aggregation.over(comm).unwrap();
        let mut singles = [1.0_f32, 2.0];
        aggregator.aggregate(&mut [ValuesMut::F32(&mut singles), ValuesMut::F16(&mut gradients)]).unwrap();
        assert_eq!(gradients, mean);
        let large = &mut [f16::MAX; 3];
        aggregator.aggregate(&mut [ValuesMut::F16(large)]).unwrap();
        assert_eq!(*large, [f16::MAX; 3]);
    });
}

#[test]
fn gradients_of_a_list_are_averaged_in_f32() {
    let _outcome = sim::run(1, 8, |transport| {
        let mut comm = Communicator::new(transport);
        let (mut one, mut other) = ([f16::from_f32(10_000.0)], [f16::MAX; 2]);
        dist_parallel::own_loop::reduce(&mut comm, &mut [&mut one, &mut other], ReduceOp::Mean).unwrap();
        assert_eq!((one, other), ([f16::from_f32(10_000.0)], [f16::MAX; 2]));
    });
}

/// A hook that sums in `f32`, the type of its input.
struct InF32;

impl BucketHook for InF32 {
    fn name(&self) -> String {
        "in f32".to_owned()
    }

    fn sum(&mut self, bucket: BucketGradients<'_>, comm: &mut Communicator) -> Result<(), BoxError> {
        let ValuesMut::F32(values) = bucket.values else {
            return Err("sums of f16 are carried as f32".into());
        };
        Ok(comm.all_reduce(values, ReduceOp::Sum)?)
    }
}

fn hook(text: &str) -> Box<dyn BucketHook> {
    text.parse::<Compression>().unwrap().hook().unwrap().unwrap()
}

/// Trains these cases with a hook of this tolerance.
fn with_hook(
    ranks: usize,
    hook: fn() -> Box<dyn BucketHook>,
    (cases, tolerance): (impl IntoIterator<Item = Vec<f32>>, f32),
) {
    for inputs in cases {
        let _outcome = sim::run(1, ranks, move |transport| {
            let (comm, options) = (Communicator::new(transport), DdpOptions::default());
            let mut ddp = Ddp::with_hook(comm, model(FloatType::F16), options, hook()).unwrap();
            ddp.step(inputs.len(), batch(&inputs)).unwrap();
            for (parameter, &len) in LENS.iter().enumerate() {
                let Some(Values::F16(found)) = ddp.gradient(parameter) else { panic!("a mean is f16") };
                for (found, expected) in found.iter().zip(mean(&inputs, len, 1, inputs.len() as f32)) {
                    let error = (found.to_f32() - expected.to_f32()).abs();
                    assert!(error <= tolerance, "{found} on {ranks} ranks, not {expected}");
                }
            }
        });
    }
}

#[rstest]
fn hooks_are_given_sums_of_f16_as_f32(#[values(1, 2, 4, 8)] ranks: usize) {
    with_hook(ranks, || Box::new(InF32), (cases(), 0.0));
    with_hook(ranks, || hook("topk:1"), (cases(), 0.0));
    with_hook(ranks, || hook("powersgd:8"), (cases(), 0.0));
    with_hook(ranks, || hook("f16"), (cases(), 150.0));
    // The error is a fraction of the largest magnitudes of a block on each rank, and 8 bits of precision. It can
    // exceed the largest number of `f16`.
    let smaller = || cases().into_iter().filter(|inputs| inputs[0] != 65_504.0);
    with_hook(ranks, || hook("int8"), (smaller(), 1100.0));
    with_hook(ranks, || hook("bf16"), (smaller(), 1100.0));
}

/// The bytes on the wire are those of `f32`.
#[rstest]
fn gradients_of_f16_travel_as_many_bytes_as_those_of_f32(#[values(2, 4, 8)] ranks: usize) {
    let sent = |dtype| {
        let outcome = sim::run(1, ranks, move |transport| {
            let infos = vec![ParamInfo::new("w", [1 << 14], dtype)];
            let (comm, options) = (Communicator::new(transport), DdpOptions::default());
            let mut ddp = Ddp::new(comm, Bag::new(infos, 1), options).unwrap();
            ddp.step_with(8, |model, index, ready| model.report(index, ready)).unwrap().bytes_sent
        });
        outcome.results
    };
    assert_eq!(sent(FloatType::F16), sent(FloatType::F32));
    assert!(sent(FloatType::Bf16)[0] < sent(FloatType::F16)[0]);
}

/// Parameters are sent as `f16`, their gradients as `f32`: in each round one reduce-scatter, and gathers before
/// forward and backward.
#[rstest]
#[case(ShardingStrategy::FullShard, 4 + 2 * 2)]
#[case(ShardingStrategy::ShardGradOp, 4 + 2)]
#[case(ShardingStrategy::ShardOptimizer, 4 + 2)]
#[case(ShardingStrategy::NoShard, 4 + 4)]
fn sharded_training_sends_the_bytes_of_its_plan(
    #[case] strategy: ShardingStrategy,
    #[case] bytes_of_value: usize,
    #[values(2, 4)] ranks: usize,
) {
    const LEN: usize = 1 << 18;
    let outcome = sim::run(1, ranks, move |transport| {
        let block: Box<dyn Block<Rows>> = Box::new(Steep::new("w", LEN, FloatType::F16));
        let (comm, model) = (Communicator::new(transport), Sequence::new(vec![block]).unwrap());
        let mut fsdp = Fsdp::new(comm, model, &FsdpOptions::new(strategy)).unwrap();
        let before = fsdp.tensor_bytes_sent();
        fsdp.step(ranks, batch(&vec![0.0; ranks])).unwrap();
        fsdp.update(&mut *optimizer("sgd")).unwrap();
        (fsdp.tensor_bytes_sent() - before, fsdp.plan().wire_bytes(ranks) as u64)
    });
    let expected = (bytes_of_value * LEN * (ranks - 1) / ranks) as u64;
    assert_eq!(outcome.results, vec![(expected, expected); ranks]);
}
