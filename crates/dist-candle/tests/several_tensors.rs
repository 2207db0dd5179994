//! Activations of several tensors under every strategy: token numbers, a mask, and the output of an encoder.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Embedding, VarBuilder, VarMap};
use dist_candle::{
    Activation, CandleBlock, CandleError, PassFn, SequenceBuilder, Tensors, loss_and_gradient,
};
use dist_collectives::Communicator;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::model::Pass;
use dist_parallel::optim::{Sgd, SgdOptions};
use dist_parallel::pipeline::{Pipeline, ScheduleKind, split_into_stages};
use dist_parallel::trainer::TrainerOptions;
use dist_parallel::{Block, BoxError, Ddp, DdpOptions, FloatType, Sequence, Values};
use dist_transport::sim;
use rstest::rstest;

type List = Vec<Tensor>;

const WIDTH: usize = 4;
const MICRO_BATCHES: usize = 4;
const STRATEGIES: [ShardingStrategy; 5] = [
    ShardingStrategy::FullShard,
    ShardingStrategy::ShardGradOp,
    ShardingStrategy::ShardOptimizer,
    ShardingStrategy::NoShard,
    ShardingStrategy::HybridShard { shard_degree: 2 },
];

/// Returns token numbers and a mask.
fn input(micro_batch: usize) -> Result<List> {
    let step = u32::try_from(micro_batch).map_err(candle_core::Error::wrap)? + 3;
    let tokens: Vec<u32> = (0..6).map(|index| index * step % 7).collect();
    let mask: Vec<u8> = (0..6).map(|index| u8::from(index != micro_batch)).collect();
    Ok(vec![Tensor::from_vec(tokens, 6, &Device::Cpu)?, Tensor::from_vec(mask, 6, &Device::Cpu)?])
}

fn masked(x: &Tensor, mask: &Tensor) -> Result<Tensor> {
    x.broadcast_mul(&mask.to_dtype(x.dtype())?.unsqueeze(1)?)
}

/// Returns a model of four blocks. The embedding returns hidden values, the mask, and the output of an
/// encoder in `f64`. Two layers use both. The head returns one tensor and the mask.
fn model() -> Sequence<List> {
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let table = vars.get((7, WIDTH), "embed.weight").unwrap();
    let layers = ["first", "second", "head"];
    let linear = layers.map(|name| candle_nn::linear(WIDTH, WIDTH, vars.pp(name)).unwrap());
    for (number, (name, var)) in sorted(&map).into_iter().enumerate() {
        let values = Tensor::arange(0f32, var.elem_count() as f32, &Device::Cpu).unwrap();
        let values = values.affine(0.9, number as f64).unwrap().sin().unwrap();
        var.set(&values.reshape(var.shape()).unwrap()).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    let embed = PassFn(move |list: &List, _: Pass| {
        let [tokens, mask] = [&list[0], &list[1]];
        let x = Embedding::new(table.clone(), WIDTH).forward(tokens)?;
        let memory = masked(&x, mask)?.sum_keepdim(0)?.to_dtype(DType::F64)?;
        Ok(vec![x, mask.clone(), memory])
    });
    let layer = |linear: candle_nn::Linear| {
        PassFn(move |list: &List, _: Pass| {
            let [x, mask, memory] = [&list[0], &list[1], &list[2]];
            let y =
                masked(&linear.forward(x)?, mask)?.broadcast_add(&memory.to_dtype(DType::F32)?)?.tanh()?;
            Ok(vec![y, mask.clone(), memory.clone()])
        })
    };
    let [first, second, head] = linear;
    let head = PassFn(move |list: &List, _: Pass| Ok(vec![head.forward(&list[0])?, list[1].clone()]));
    SequenceBuilder::new()
        .block(CandleBlock::from_var_map("embed", &map, embed).unwrap())
        .block(CandleBlock::from_var_map("first", &map, layer(first)).unwrap())
        .block(CandleBlock::from_var_map("second", &map, layer(second)).unwrap())
        .block(CandleBlock::from_var_map("head", &map, head).unwrap())
        .build()
        .unwrap()
}

fn sorted(map: &VarMap) -> Vec<(String, candle_core::Var)> {
    let all = map.data().lock().unwrap();
    let mut all: Vec<_> = all.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    all
}

fn loss(output: List) -> std::result::Result<(f32, List), BoxError> {
    Ok(loss_and_gradient(&output, |list| masked(&list[0], &list[1])?.affine(1.0, -0.3)?.sqr()?.mean_all())?)
}

/// A parameter's index and its bits, and the bits of an evaluation's loss.
type Trained = (Vec<(usize, Vec<u32>)>, u32);

fn add_bits(bits: &mut Vec<(usize, Vec<u32>)>, index: usize, values: Values<'_>) {
    let Values::F32(values) = values else { panic!("{values:?}") };
    bits.push((index, values.iter().map(|value| value.to_bits()).collect()));
}

fn sgd() -> Sgd {
    Sgd::new(SgdOptions { learning_rate: 0.1, ..SgdOptions::default() }).unwrap()
}

fn train_sharded(comm: Communicator, strategy: ShardingStrategy) -> Trained {
    let (mut bits, mut optimizer) = (Vec::new(), sgd());
    let mut fsdp = Fsdp::new(comm, model(), &FsdpOptions::new(strategy)).unwrap();
    for _ in 0..2 {
        fsdp.step(MICRO_BATCHES, |number| Ok((input(number)?, loss))).unwrap();
        fsdp.update(&mut optimizer).unwrap();
    }
    let report = fsdp.evaluate(3, |number| Ok(input(number)?), |_, output| Ok(loss(output)?.0)).unwrap();
    fsdp.for_each_parameter(|index, values| add_bits(&mut bits, index, values)).unwrap();
    bits.sort_unstable();
    (bits, report.loss.to_bits())
}

fn train_pipeline(comm: Communicator, kind: ScheduleKind) -> Trained {
    let (mut bits, mut optimizer, ranks) = (Vec::new(), sgd(), comm.world_size());
    let schedule = kind.schedule(ranks, MICRO_BATCHES).unwrap();
    let stages = split_into_stages(4, ranks).unwrap();
    let mut pipeline = Pipeline::new(comm, model(), schedule, &stages, Tensors).unwrap();
    for _ in 0..2 {
        pipeline.step(|number| Ok(input(number)?), |_, output| loss(output)).unwrap();
        pipeline.update(&mut optimizer).unwrap();
    }
    let report = pipeline.evaluate(3, |number| Ok(input(number)?), |_, output| Ok(loss(output)?.0)).unwrap();
    pipeline.for_each_parameter(|index, values| add_bits(&mut bits, index, values)).unwrap();
    bits.sort_unstable();
    (bits, report.loss.to_bits())
}

fn alone() -> Trained {
    let train = |transport| train_sharded(Communicator::new(transport), ShardingStrategy::NoShard);
    sim::run(1, 1, train).results.into_iter().next().unwrap()
}

#[rstest]
fn lists_of_tensors_train_the_same_bits_under_every_sharding_strategy(
    #[values(0, 1, 2, 3, 4)] strategy: usize,
    #[values(2, 4)] ranks: usize,
) {
    let strategy = STRATEGIES[strategy];
    let outcome = sim::run(1, ranks, move |transport| train_sharded(Communicator::new(transport), strategy));
    assert_eq!(outcome.results, vec![alone(); ranks]);
}

#[rstest]
fn lists_of_tensors_travel_through_pipelines(
    #[values(ScheduleKind::Gpipe, ScheduleKind::OneForwardOneBackward)] kind: ScheduleKind,
    #[values(1, 2, 4)] ranks: usize,
) {
    let outcome = sim::run(1, ranks, move |transport| train_pipeline(Communicator::new(transport), kind));
    assert_eq!(outcome.results, vec![alone(); ranks]);
}

#[test]
fn a_ddp_trains_on_lists_of_tensors() {
    let outcome = sim::run(1, 2, |transport| {
        let (mut bits, mut optimizer) = (Vec::new(), sgd());
        let mut ddp = Ddp::new(Communicator::new(transport), model(), DdpOptions::default()).unwrap();
        for _ in 0..2 {
            ddp.step(MICRO_BATCHES, |number| Ok((input(number)?, loss))).unwrap();
            ddp.update(&mut optimizer).unwrap();
        }
        ddp.for_each_parameter(|index, values| add_bits(&mut bits, index, values)).unwrap();
        bits
    });
    assert_eq!(outcome.results, vec![alone().0; 2]);
}

/// The blocks have parameters of `f32`, and activations between them are `f16`.
fn train_with_activations(comm: Communicator, strategy: &str) -> Trained {
    let (mut bits, mut optimizer) = (Vec::new(), sgd());
    let options = TrainerOptions::new(strategy.parse().unwrap())
        .with_micro_batches(MICRO_BATCHES)
        .with_activations(FloatType::F16);
    let mut trainer = options.build(comm, model(), Tensors).unwrap();
    let loss = |output: List| {
        assert_eq!((output[0].dtype(), output[1].dtype()), (DType::F16, DType::U8));
        let square = |list: &List| {
            masked(&list[0].to_dtype(DType::F32)?, &list[1])?.affine(1.0, -0.3)?.sqr()?.mean_all()
        };
        Ok(loss_and_gradient(&output, square)?)
    };
    for _ in 0..2 {
        trainer.step(MICRO_BATCHES, |number| Ok((input(number)?, loss))).unwrap();
        trainer.update(&mut optimizer).unwrap();
    }
    let report = trainer.evaluate(3, |number| Ok(input(number)?), |_, output| Ok(loss(output)?.0)).unwrap();
    trainer.for_each_parameter(&mut |index, values| add_bits(&mut bits, index, values)).unwrap();
    bits.sort_unstable();
    (bits, report.loss.to_bits())
}

#[rstest]
fn activations_of_another_type_than_the_parameters_train_the_same_bits_under_every_strategy(
    #[values("ddp", "zero1", "fsdp", "pipeline:1f1b", "pipeline:zb1p:2", "pipeline:1f1b:2:sharded")] strategy: &'static str,
) {
    let train = |ranks, strategy: &'static str| {
        sim::run(1, ranks, move |transport| train_with_activations(Communicator::new(transport), strategy))
            .results
    };
    let expected = train(1, "single").remove(0);
    assert_ne!(expected, alone());
    assert_eq!(train(4, strategy), vec![expected; 4]);
}

/// The output does not depend on a mask of integers and a tensor of floats.
#[test]
fn gradients_exist_for_floats_only_and_are_zeros_if_nothing_depends_on_them() {
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let linear = candle_nn::linear(WIDTH, WIDTH, vars.pp("linear")).unwrap();
    type Three = (Tensor, Tensor, Tensor);
    let module = PassFn(move |(x, mask, unused): &Three, _: Pass| {
        Ok((masked(&linear.forward(x)?, mask)?, mask.clone(), unused.clone()))
    });
    let mut block = CandleBlock::from_var_map("linear", &map, module).unwrap();
    let x = Tensor::ones((6, WIDTH), DType::F32, &Device::Cpu).unwrap();
    let given = (x.clone(), input(0).unwrap()[1].clone(), Tensor::new(&[1_f64, 2.0], &Device::Cpu).unwrap());
    let (output, saved) = block.forward(given).unwrap();
    let (_, gradient) = loss_and_gradient(&output, |(y, ..): &Three| y.sum_all()).unwrap();
    assert_eq!((gradient.1.dims(), gradient.1.dtype()), (&[0][..], DType::U8));
    let of_input = block.backward(saved, gradient, &mut |_, _| Ok(())).unwrap().unwrap();
    assert_eq!(of_input.0.dims(), x.dims());
    assert_eq!((of_input.1.dims(), of_input.1.dtype()), (&[0][..], DType::U8));
    assert_eq!(of_input.2.to_vec1::<f64>().unwrap(), [0.0; 2]);
}

#[test]
fn an_activation_with_another_number_of_tensors_is_refused() {
    let tensor = Tensor::new(1_f32, &Device::Cpu).unwrap();
    let wrong = |result: std::result::Result<(), CandleError>, expected: usize| {
        assert!(matches!(result, Err(CandleError::TensorCount { expected: is, got: 5 }) if is == expected));
    };
    let five = || vec![tensor.clone(); 5];
    wrong(Tensor::from_tensors(five()).map(drop), 1);
    wrong(<(Tensor, Tensor)>::from_tensors(five()).map(drop), 2);
    wrong(<(Tensor, Tensor, Tensor)>::from_tensors(five()).map(drop), 3);
    let mut block = CandleBlock::new(
        "same",
        Vec::<(String, candle_core::Var)>::new(),
        PassFn(|list: &List, _: Pass| Ok(list.clone())),
    )
    .unwrap();
    let (_, saved) = block.forward(vec![tensor.clone(); 2]).unwrap();
    let error = block.backward(saved, five(), &mut |_, _| Ok(())).unwrap_err();
    wrong(Err(*error.downcast::<CandleError>().unwrap()), 2);
}
