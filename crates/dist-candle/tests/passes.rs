//! Dropout, and candle modules that train and evaluate differently, under every strategy.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use candle_core::{DType, Device, Module, ModuleT, Tensor};
use candle_nn::{VarBuilder, VarMap};
use dist_candle::{CandleBlock, DataParallel, Dropout, PassFn, SequenceBuilder, Tensors, loss_and_gradient};
use dist_collectives::Communicator;
use dist_parallel::checkpoint::Checkpoints;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::model::Pass;
use dist_parallel::optim::{Sgd, SgdOptions};
use dist_parallel::pipeline::{Pipeline, ScheduleKind};
use dist_parallel::{BoxError, Ddp, DdpOptions, Sequence, Values};
use dist_transport::sim;
use rstest::rstest;

/// A strategy of training.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Strategy {
    Ddp,
    Sharded(ShardingStrategy),
    Pipeline(ScheduleKind),
}

const STRATEGIES: [Strategy; 8] = [
    Strategy::Ddp,
    Strategy::Sharded(ShardingStrategy::FullShard),
    Strategy::Sharded(ShardingStrategy::ShardGradOp),
    Strategy::Sharded(ShardingStrategy::ShardOptimizer),
    Strategy::Sharded(ShardingStrategy::NoShard),
    Strategy::Sharded(ShardingStrategy::HybridShard { shard_degree: 2 }),
    Strategy::Pipeline(ScheduleKind::Gpipe),
    Strategy::Pipeline(ScheduleKind::OneForwardOneBackward),
];

const STEPS: usize = 2;
const MICRO_BATCHES: usize = 4;
const BLOCKS: usize = 4;

/// Returns four linear layers, each with a dropout.
fn model() -> Sequence<Tensor> {
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let mut model = SequenceBuilder::new();
    for number in 0..BLOCKS {
        let name = format!("layer{number}");
        let linear = candle_nn::linear(3, 3, vars.pp(&name)).unwrap();
        let dropout = Dropout::new(0.4, 42, &name).unwrap();
        let module = PassFn(move |x: &Tensor, pass: Pass| dropout.forward(&linear.forward(x)?.tanh()?, pass));
        model = model.block(CandleBlock::from_var_map(name, &map, module).unwrap());
    }
    for (number, name) in (0..BLOCKS).flat_map(|number| [(number, "weight"), (number, "bias")]) {
        let var = map.data().lock().unwrap()[&format!("layer{number}.{name}")].clone();
        let count = var.elem_count();
        let values = Tensor::arange(0f32, count as f32, &Device::Cpu).unwrap();
        let values = values.affine(0.7, number as f64).unwrap().sin().unwrap();
        var.set(&values.reshape(var.shape()).unwrap()).unwrap();
    }
    model.build().unwrap()
}

fn rows(number: usize) -> candle_core::Result<Tensor> {
    Tensor::arange(0f32, 6.0, &Device::Cpu)?.reshape((2, 3))?.affine(0.5, number as f64)?.sin()
}

fn loss(output: Tensor) -> Result<(f32, Tensor), BoxError> {
    Ok(loss_and_gradient(&output, |output| output.affine(1.0, -0.5)?.sqr()?.mean_all())?)
}

fn sgd() -> Sgd {
    Sgd::new(SgdOptions { learning_rate: 0.1, ..SgdOptions::default() }).unwrap()
}

/// A parameter's index and its bits.
type Bits = Vec<(usize, Vec<u32>)>;

fn add_bits(bits: &mut Bits, index: usize, values: Values<'_>) {
    let Values::F32(values) = values else { panic!("{values:?}") };
    bits.push((index, values.iter().map(|value| value.to_bits()).collect()));
}

/// Trains and returns this rank's parameters, by index.
fn train(strategy: Strategy, comm: Communicator) -> Bits {
    let (model, mut optimizer, mut bits) = (model(), sgd(), Vec::new());
    let batch = |number| Ok((rows(number)?, loss));
    match strategy {
        Strategy::Ddp => {
            let mut ddp = Ddp::new(comm, model, DdpOptions::default()).unwrap();
            for _ in 0..STEPS {
                ddp.step(MICRO_BATCHES, batch).unwrap();
                ddp.update(&mut optimizer).unwrap();
            }
            ddp.for_each_parameter(|index, values| add_bits(&mut bits, index, values)).unwrap();
        }
        Strategy::Sharded(strategy) => {
            let mut fsdp = Fsdp::new(comm, model, &FsdpOptions::new(strategy)).unwrap();
            for _ in 0..STEPS {
                fsdp.step(MICRO_BATCHES, batch).unwrap();
                fsdp.update(&mut optimizer).unwrap();
            }
            fsdp.for_each_parameter(|index, values| add_bits(&mut bits, index, values)).unwrap();
        }
        Strategy::Pipeline(kind) => {
            let ranks = comm.world_size();
            let schedule = kind.schedule(ranks, MICRO_BATCHES).unwrap();
            let stages = dist_parallel::pipeline::split_into_stages(BLOCKS, ranks).unwrap();
            let mut pipeline = Pipeline::new(comm, model, schedule, &stages, Tensors).unwrap();
            for _ in 0..STEPS {
                pipeline.step(|number| Ok(rows(number)?), |_, output| loss(output)).unwrap();
                pipeline.update(&mut optimizer).unwrap();
            }
            pipeline.for_each_parameter(|index, values| add_bits(&mut bits, index, values)).unwrap();
        }
    }
    bits.sort_unstable();
    bits
}

#[rstest]
fn dropout_trains_the_same_bits_under_every_strategy_on_any_number_of_ranks(
    #[values(0, 1, 2, 3, 4, 5, 6, 7)] strategy: usize,
    #[values(1, 2, 4)] ranks: usize,
) {
    let strategy = STRATEGIES[strategy];
    // Two shards need two ranks.
    if ranks == 1 && strategy == Strategy::Sharded(ShardingStrategy::HybridShard { shard_degree: 2 }) {
        return;
    }
    let alone = sim::run(1, 1, |transport| train(Strategy::Ddp, Communicator::new(transport)));
    let outcome = sim::run(1, ranks, move |transport| train(strategy, Communicator::new(transport)));
    assert_eq!(outcome.results, vec![alone.results[0].clone(); ranks]);
}

/// Trains with `DataParallel`, with one of two micro-batches on each rank. If there is a directory, it saves and
/// loads a checkpoint halfway.
fn train_loop(mut comm: Communicator, directory: Option<&std::path::Path>) -> Vec<u32> {
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let linear = candle_nn::linear(3, 3, vars.pp("linear")).unwrap();
    let dropout = Dropout::new(0.4, 42, "linear").unwrap();
    let bias = map.data().lock().unwrap()["linear.bias"].clone();
    let weight = map.data().lock().unwrap()["linear.weight"].clone();
    bias.set(&rows(1).unwrap().get(0).unwrap()).unwrap();
    weight.set(&Tensor::eye(3, DType::F32, &Device::Cpu).unwrap()).unwrap();
    let mut restarted = directory.is_some();
    let mut dp = DataParallel::new(comm.fork().unwrap(), &map).unwrap();
    let loss_of = |pass: Pass| -> candle_core::Result<Tensor> {
        dropout.forward(&linear.forward(&rows(pass.micro_batch)?)?, pass)?.sqr()?.mean_all()
    };
    let mut step = 0;
    while step < 4 {
        if let (2, true) = (step, restarted) {
            restarted = false;
            let mut checkpoints = Checkpoints::at(directory.unwrap());
            dp.save(&mut checkpoints, None, 9).unwrap();
            dp = DataParallel::new(comm.fork().unwrap(), &map).unwrap();
            assert_eq!(dp.load(&mut checkpoints, None).unwrap(), Some(9));
        }
        for _ in 1..2 / dp.world_size() {
            let loss = loss_of(dp.pass()).unwrap();
            dp.accumulate(&loss).unwrap();
        }
        let loss = loss_of(dp.pass()).unwrap();
        let gradients = dp.backward(&loss).unwrap();
        for var in [&weight, &bias] {
            let change = gradients.get(var).unwrap().affine(-0.1, 0.0).unwrap();
            var.set(&(var.as_tensor() + change).unwrap()).unwrap();
        }
        step += 1;
    }
    dp.eval();
    assert_eq!(dp.pass(), Pass { training: false, step: 4, micro_batch: dp.rank() });
    dp.train();
    assert!(dp.pass().training);
    let all = Tensor::cat(&[weight.flatten_all().unwrap(), bias.flatten_all().unwrap()], 0).unwrap();
    all.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

#[rstest]
fn dropout_in_a_loop_of_its_own_gives_the_same_bits_on_two_ranks_and_after_a_restart(
    #[values(1, 2)] ranks: usize,
    #[values(false, true)] restarts: bool,
) {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_owned();
    let alone = sim::run(1, 1, |transport| train_loop(Communicator::new(transport), None));
    let outcome = sim::run(1, ranks, move |transport| {
        train_loop(Communicator::new(transport), restarts.then_some(&*directory))
    });
    assert_eq!(outcome.results, vec![alone.results[0].clone(); ranks]);
}

/// A candle module instead of a closure: batch norm uses batch statistics in steps, and its running means elsewhere.
#[rstest]
fn a_module_of_candle_receives_the_mode(#[values(false, true)] sharded: bool) {
    let outcome = sim::run(1, 1, move |transport| {
        let map = VarMap::new();
        let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let norm = candle_nn::batch_norm(3, 1e-5, vars.pp("norm")).unwrap();
        let expected = norm.forward_t(&rows(1).unwrap(), false).unwrap().to_vec2::<f32>().unwrap();
        let block = CandleBlock::from_var_map("norm", &map, norm).unwrap();
        let model = SequenceBuilder::new().block(block).build().unwrap();
        let comm = Communicator::new(transport);
        let output = if sharded {
            let mut fsdp = Fsdp::new(comm, model, &FsdpOptions::new(ShardingStrategy::FullShard)).unwrap();
            let before = fsdp.forward(rows(1).unwrap()).unwrap();
            fsdp.step(1, |number| Ok((rows(number)?, loss))).unwrap();
            before
        } else {
            let mut ddp = Ddp::new(comm, model, DdpOptions::default()).unwrap();
            let before = ddp.forward(rows(1).unwrap()).unwrap();
            ddp.step(1, |number| Ok((rows(number)?, loss))).unwrap();
            before
        };
        let mean = map.data().lock().unwrap()["norm.running_mean"].to_vec1::<f32>().unwrap();
        assert!(mean.iter().all(|mean| *mean != 0.0), "{mean:?}");
        (output.to_vec2::<f32>().unwrap(), expected)
    });
    let (output, expected) = &outcome.results[0];
    assert_eq!(output, expected);
}
