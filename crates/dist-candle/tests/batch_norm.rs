//! candle's batch norm under every strategy: its running mean and variance are kept, saved, and used in evaluation.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use dist_candle::{CandleBlock, SequenceBuilder, SyncBatchNorm, Tensors, loss_and_gradient};
use dist_collectives::Communicator;
use dist_parallel::checkpoint::Checkpoints;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, Reshard, ShardingStrategy};
use dist_parallel::local_sgd::{LocalSgd, LocalSgdOptions};
use dist_parallel::model::{BufferSync, Pass};
use dist_parallel::optim::{Sgd, SgdOptions};
use dist_parallel::pipeline::{Pipeline, ScheduleKind};
use dist_parallel::{Block as _, BoxError, Ddp, DdpOptions, Params, Sequence, Values};
use dist_transport::sim;
use rstest::rstest;

const STEPS: usize = 3;
const STRATEGIES: [ShardingStrategy; 5] = [
    ShardingStrategy::FullShard,
    ShardingStrategy::ShardGradOp,
    ShardingStrategy::ShardOptimizer,
    ShardingStrategy::NoShard,
    ShardingStrategy::HybridShard { shard_degree: 2 },
];

/// Returns a linear layer and a batch norm.
fn model(sync: BufferSync) -> Sequence<Tensor> {
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let linear = candle_nn::linear(2, 2, vars.pp("linear")).unwrap();
    let norm = candle_nn::batch_norm(2, 1e-5, vars.pp("norm")).unwrap();
    let model = SequenceBuilder::new()
        .block(CandleBlock::from_var_map("linear", &map, linear).unwrap())
        .block(CandleBlock::from_var_map("norm", &map, norm).unwrap().sync_buffers(sync))
        .build()
        .unwrap();
    let set = |name: &str, values: &[f32]| {
        let var = map.data().lock().unwrap()[name].clone();
        var.set(&Tensor::new(values, &Device::Cpu).unwrap().reshape(var.shape()).unwrap()).unwrap();
    };
    set("linear.weight", &[0.5, -0.25, 1.0, 2.0]);
    set("linear.bias", &[0.0, 1.0]);
    model
}

/// Returns the rows of a micro-batch, different for every step and number.
fn rows(step: usize, number: usize) -> candle_core::Result<Tensor> {
    let shift = (step * 10 + number) as f64;
    Tensor::arange(0f32, 8.0, &Device::Cpu)?.reshape((4, 2))?.affine(0.5, shift)?.sin()
}

fn loss(output: Tensor) -> Result<(f32, Tensor), BoxError> {
    Ok(loss_and_gradient(&output, |output| output.affine(1.0, -0.5)?.sqr()?.mean_all())?)
}

fn sgd() -> Sgd {
    Sgd::new(SgdOptions { learning_rate: 0.1, ..SgdOptions::default() }).unwrap()
}

fn values(values: Values<'_>) -> Vec<f32> {
    let Values::F32(values) = values else { panic!("{values:?}") };
    values.to_vec()
}

/// The result of a training: all parameters and buffers by name, and the outputs of an evaluation.
type Trained = (Vec<(String, Vec<f32>)>, Vec<f32>);

fn train_ddp(comm: Communicator, sync: BufferSync, micro_batches: usize) -> Trained {
    let model = model(sync);
    let mut ddp = Ddp::new(comm, model, DdpOptions::default()).unwrap();
    let mut sgd = sgd();
    for step in 0..STEPS {
        ddp.step(micro_batches, |number| Ok((rows(step, number)?, loss))).unwrap();
        ddp.update(&mut sgd).unwrap();
    }
    let mut found = Vec::new();
    let names: Vec<String> = ddp.model().infos().iter().map(|info| info.name.clone()).collect();
    ddp.for_each_parameter(|index, read| found.push((names[index].clone(), values(read)))).unwrap();
    let output = ddp.forward(rows(99, 0).unwrap()).unwrap();
    (found, output.flatten_all().unwrap().to_vec1().unwrap())
}

fn train_sharded(
    comm: Communicator,
    options: &FsdpOptions,
    sync: BufferSync,
    micro_batches: usize,
) -> Trained {
    let model = model(sync);
    let mut fsdp = Fsdp::new(comm, model, options).unwrap();
    let mut sgd = sgd();
    for step in 0..STEPS {
        fsdp.step(micro_batches, |number| Ok((rows(step, number)?, loss))).unwrap();
        fsdp.update(&mut sgd).unwrap();
    }
    let names: Vec<String> = fsdp.model().infos().iter().map(|info| info.name.clone()).collect();
    let mut found = Vec::new();
    fsdp.for_each_parameter(|index, read| found.push((names[index].clone(), values(read)))).unwrap();
    found.sort_by_key(|(name, _)| names.iter().position(|other| other == name));
    let output = fsdp.forward(rows(99, 0).unwrap()).unwrap();
    (found, output.flatten_all().unwrap().to_vec1().unwrap())
}

fn running_mean((found, _): &Trained) -> &[f32] {
    let (_, mean) = found.iter().find(|(name, _)| name == "norm.running_mean").unwrap();
    mean
}

/// Every rank computes one micro-batch of a step, under every strategy.
#[rstest]
fn every_strategy_keeps_the_running_mean_and_variance(
    #[values(BufferSync::Broadcast, BufferSync::Mean, BufferSync::Local)] sync: BufferSync,
    #[values(0, 1, 2, 3, 4)] strategy: usize,
    #[values(Reshard::All, Reshard::Nothing)] reshard: Reshard,
    #[values(false, true)] shares_memory: bool,
) {
    let expected = sim::run(1, 4, move |transport| train_ddp(Communicator::new(transport), sync, 4)).results;
    let options = FsdpOptions::new(STRATEGIES[strategy]).with_reshard(reshard);
    let network = sim::Network::new(4);
    let network = if shares_memory { network.with_shared_memory() } else { network };
    let sharded =
        network.run(move |transport| train_sharded(Communicator::new(transport), &options, sync, 4));
    assert_eq!(sharded.results, expected);
    assert!(running_mean(&expected[0]).iter().all(|mean| *mean != 0.0));
    let is_same = expected.iter().all(|of_rank| running_mean(of_rank) == running_mean(&expected[0]));
    assert_eq!(is_same, sync != BufferSync::Local);
}

#[rstest]
fn an_integer_that_a_forward_counts_is_a_buffer_under_every_strategy(
    #[values(0, 1, 2, 3, 4)] strategy: usize,
    #[values(false, true)] shares_memory: bool,
) {
    let network = sim::Network::new(4);
    let network = if shares_memory { network.with_shared_memory() } else { network };
    let counted = network.run(move |transport| {
        let map = VarMap::new();
        let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let linear = candle_nn::linear(2, 2, vars.pp("linear")).unwrap();
        let counter = Var::zeros(1, DType::I64, &Device::Cpu).unwrap();
        map.data().lock().unwrap().insert("forwards".to_owned(), counter.clone());
        let comm = Communicator::new(transport);
        let by = 1.0 + comm.rank() as f64;
        let seen = counter.clone();
        let module = move |x: &Tensor| {
            seen.set(&seen.affine(1.0, by)?)?;
            linear.forward(x)
        };
        let block = CandleBlock::from_var_map("", &map, module).unwrap();
        let model = SequenceBuilder::new().block(block).build().unwrap();
        let mut fsdp = Fsdp::new(comm, model, &FsdpOptions::new(STRATEGIES[strategy])).unwrap();
        counter.set(&Tensor::new(&[10_i64], &Device::Cpu).unwrap()).unwrap();
        fsdp.step(4, |number| Ok((rows(0, number)?, loss))).unwrap();
        counter.to_vec1::<i64>().unwrap()
    });
    // Rank 0 has run the forward pass once, or twice if the backward pass computes the block again.
    let first = counted.results[0][0];
    assert!([11, 12].contains(&first), "{first}");
    assert_eq!(counted.results, vec![vec![first]; 4]);
}

/// Rank 0 computes the micro-batches with even numbers, or the first half.
#[test]
fn by_default_every_rank_has_the_running_mean_of_rank_0() {
    let alone = |step: usize, number: usize, mean: Vec<f32>| {
        let x = rows(step, number).unwrap().to_vec2::<f32>().unwrap();
        let mean_of = |column: usize| x.iter().map(|row| row[column]).sum::<f32>() / x.len() as f32;
        mean.iter().enumerate().map(|(column, mean)| 0.9 * mean + 0.1 * mean_of(column)).collect::<Vec<_>>()
    };
    let program = |transport| {
        let map = VarMap::new();
        let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let norm = candle_nn::batch_norm(2, 1e-5, vars.pp("norm")).unwrap();
        let block =
            CandleBlock::from_var_map("norm", &map, move |x: &Tensor| norm.forward_t(x, true)).unwrap();
        let model = SequenceBuilder::new().block(block).build().unwrap();
        let options = FsdpOptions::new(ShardingStrategy::FullShard);
        let mut fsdp = Fsdp::new(Communicator::new(transport), model, &options).unwrap();
        for step in 0..STEPS {
            fsdp.step(4, |number| Ok((rows(step, number)?, loss))).unwrap();
        }
        let mut mean = Vec::new();
        let index = fsdp.model().infos().iter().position(|info| info.name == "norm.running_mean").unwrap();
        fsdp.model().read(index, &mut |read| mean = values(read)).unwrap();
        mean
    };
    let mut expected = vec![0.0; 2];
    for step in 0..STEPS {
        expected = [0, 2].into_iter().fold(expected, |mean, number| alone(step, number, mean));
    }
    for mean in sim::run(1, 2, program).results {
        let close = mean.iter().zip(&expected).all(|(mean, expected)| (mean - expected).abs() < 1e-6);
        assert!(close, "{mean:?} instead of {expected:?}");
    }
}

/// One or two pipelines of two ranks with a stage each. There are no updates, so running means depend only on the
/// inputs.
#[rstest]
#[case::alone(1, false)]
#[case::beside_each_other(2, false)]
#[case::divided(2, true)]
fn a_pipeline_keeps_the_running_mean_of_one_process(#[case] pipelines: usize, #[case] divides: bool) {
    // The first pipeline computes these two micro-batches.
    let expected = sim::run(1, 1, |transport| {
        let model = model(BufferSync::Broadcast);
        let mut ddp = Ddp::new(Communicator::new(transport), model, DdpOptions::default()).unwrap();
        for step in 0..STEPS {
            ddp.step(2, |number| Ok((rows(step, number)?, loss))).unwrap();
        }
        let mut mean = Vec::new();
        let index = ddp.model().infos().iter().position(|info| info.name == "norm.running_mean").unwrap();
        ddp.model().read(index, &mut |read| mean = values(read)).unwrap();
        mean
    });
    let outcome = sim::run(1, 2 * pipelines, move |transport| {
        let mut world = Communicator::new(transport);
        let (pipeline, stage) = (world.rank() / 2, world.rank() % 2);
        let own = world.subgroup(&[2 * pipeline, 2 * pipeline + 1]).unwrap().unwrap();
        let beside: Vec<usize> = (0..pipelines).map(|pipeline| 2 * pipeline + stage).collect();
        let beside = world.subgroup(&beside).unwrap().unwrap();
        let schedule = ScheduleKind::Gpipe.schedule(2, 2).unwrap();
        let model = model(BufferSync::Broadcast);
        let mut pipeline = Pipeline::new(own, model, schedule, &[0..1, 1..2], Tensors).unwrap();
        if divides {
            pipeline.shard_over(world).unwrap();
        } else {
            pipeline.reduce_over(beside).unwrap();
        }
        for step in 0..STEPS {
            pipeline.step(|number| Ok(rows(step, number)?), |_, output| loss(output)).unwrap();
        }
        let names: Vec<String> = pipeline.infos().iter().map(|info| info.name.clone()).collect();
        let mut mean = Vec::new();
        let found = pipeline.for_each_parameter(|index, read| {
            if names[index] == "norm.running_mean" {
                mean = values(read);
            }
        });
        found.unwrap();
        mean
    });
    assert_eq!(outcome.results, vec![expected.results[0].clone(); 2 * pipelines]);
}

#[test]
fn ranks_that_train_by_themselves_agree_on_running_means_when_they_meet() {
    let outcome = sim::run(1, 2, |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank();
        let model = model(BufferSync::Mean);
        let mut local = LocalSgd::new(comm, model, LocalSgdOptions::average(2)).unwrap();
        for step in 0..4 {
            let inner = |model: &mut Sequence<Tensor>| {
                let (output, _) = dist_parallel::Block::forward(model, rows(step, rank)?)?;
                Ok(loss(output)?.0)
            };
            local.step_with(inner).unwrap();
        }
        let mut mean = Vec::new();
        let index = local.model().infos().iter().position(|info| info.name == "norm.running_mean").unwrap();
        local.model().read(index, &mut |read| mean = values(read)).unwrap();
        mean
    });
    assert_eq!(outcome.results[0], outcome.results[1]);
    assert!(outcome.results[0].iter().all(|mean| *mean != 0.0));
}

#[rstest]
fn a_checkpoint_has_running_means_once_and_gives_them_to_every_rank(
    #[values(0, 1, 2, 3, 4)] saved_by: usize,
    #[values(0, 1, 4)] loaded_by: usize,
) {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_owned();
    let trained = sim::run(1, 4, move |transport| {
        let model = model(BufferSync::Broadcast);
        let options = FsdpOptions::new(STRATEGIES[saved_by]);
        let mut fsdp = Fsdp::new(Communicator::new(transport), model, &options).unwrap();
        fsdp.step(4, |number| Ok((rows(0, number)?, loss))).unwrap();
        Checkpoints::at(&directory).save(&mut fsdp, None, 1).unwrap();
        let mut found = Vec::new();
        fsdp.for_each_parameter(|index, read| found.push((index, values(read)))).unwrap();
        found.sort_by_key(|(index, _)| *index);
        found
    });
    let directory = folder.path().to_owned();
    let loaded = sim::run(1, 2, move |transport| {
        let model = model(BufferSync::Broadcast);
        let options = FsdpOptions::new(STRATEGIES[loaded_by]);
        let mut fsdp = Fsdp::new(Communicator::new(transport), model, &options).unwrap();
        assert_eq!(Checkpoints::at(&directory).load(&mut fsdp, None).unwrap(), Some(1));
        let mut found = Vec::new();
        fsdp.for_each_parameter(|index, read| found.push((index, values(read)))).unwrap();
        found.sort_by_key(|(index, _)| *index);
        found
    });
    for found in loaded.results {
        assert_eq!(found, trained.results[0]);
    }
    let file = folder.path().join("one.safetensors");
    Checkpoints::at(folder.path()).consolidate(None, &file).unwrap();
    let tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    let mean = tensors["norm.running_mean"].to_vec1::<f32>().unwrap();
    assert!(trained.results[0].iter().any(|(_, values)| *values == mean));
}

/// State that is not declared as a buffer is an error.
#[test]
fn state_that_is_not_declared_is_refused_where_it_would_be_lost() {
    let outcome = sim::run(1, 2, |transport| {
        let map = VarMap::new();
        let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let norm = candle_nn::batch_norm(2, 1e-5, vars.pp("norm")).unwrap();
        let named: Vec<(String, Var)> = {
            let all = map.data().lock().unwrap();
            let mut named: Vec<_> =
                all.iter().map(|(name, var)| (name.replace("running", "moving"), var.clone())).collect();
            named.sort_by(|(a, _), (b, _)| a.cmp(b));
            named
        };
        let block = CandleBlock::new("block", named, move |x: &Tensor| norm.forward_t(x, true)).unwrap();
        let block = block.freeze("block.norm.moving_mean").unwrap();
        let block = block.may_be_unused("block.norm.moving_var").unwrap();
        let model = SequenceBuilder::new().block(block).build().unwrap();
        let options = FsdpOptions::new(ShardingStrategy::FullShard);
        let mut fsdp = Fsdp::new(Communicator::new(transport), model, &options).unwrap();
        fsdp.step(2, |number| Ok((rows(0, number)?, loss))).unwrap_err().to_string()
    });
    let names_it = |error: &String| error.contains("moving_") && error.contains("ParamInfo::buffer");
    assert!(outcome.results.iter().any(names_it), "{:?}", outcome.results);
}

#[test]
fn buffers_are_recognised_by_the_last_part_of_a_name_or_declared() {
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu).pp("b");
    for name in ["running_mean", "norm.running_var", "running_mean.weight", "my_running_mean", "counter"] {
        vars.get_with_hints(2, name, candle_nn::Init::Const(1.0)).unwrap();
    }
    let block = CandleBlock::from_var_map("b", &map, |x: &Tensor| Ok(x.clone())).unwrap();
    let buffers = |block: &CandleBlock<_>| {
        let buffers = block.infos().iter().filter(|info| info.buffer.is_some());
        buffers.map(|info| info.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(buffers(&block), ["b.norm.running_var", "b.running_mean"]);
    let block = block.train("b.running_mean").unwrap().buffer("b.counter", BufferSync::Mean).unwrap();
    assert_eq!(buffers(&block), ["b.counter", "b.norm.running_var"]);
    let block = block.freeze("b.counter").unwrap();
    assert_eq!(buffers(&block), ["b.counter", "b.norm.running_var"]);
    assert!(block.infos().iter().all(|info| info.trainable == (info.buffer.is_none())));
}

/// Trains on the same rows in every micro-batch, with this strategy, or without one: with `Ddp` on two ranks, with
/// two pipelines of two stages on four. Returns the running mean and variance.
fn constant_batches(comm: Communicator, strategy: Option<ShardingStrategy>) -> Vec<Vec<f32>> {
    let map = VarMap::new();
    let norm =
        candle_nn::batch_norm(2, 1e-5, VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu).pp("bn"));
    let nothing = CandleBlock::new("nothing", Vec::<(String, Var)>::new(), |x: &Tensor| x.affine(1.0, 0.0));
    let model = SequenceBuilder::new()
        .block(nothing.unwrap())
        .block(CandleBlock::from_var_map("bn", &map, norm.unwrap()).unwrap())
        .build()
        .unwrap();
    let names: Vec<String> = model.infos().iter().map(|info| info.name.clone()).collect();
    let mut found = Vec::new();
    let mut keep = |index: usize, read: Values<'_>| {
        if names[index].contains("running") {
            found.push(values(read));
        }
    };
    let input = || Tensor::arange(0f32, 16.0, &Device::Cpu)?.reshape((8, 2));
    let loss = |output: Tensor| Ok(loss_and_gradient(&output, |output| output.sqr()?.mean_all())?);
    if let Some(strategy) = strategy {
        let mut fsdp = Fsdp::new(comm, model, &FsdpOptions::new(strategy)).unwrap();
        for _ in 0..10 {
            fsdp.step(2, |_| Ok((input()?, loss))).unwrap();
            fsdp.update(&mut sgd()).unwrap();
        }
        fsdp.for_each_parameter(&mut keep).unwrap();
        return found;
    }
    if comm.world_size() == 2 {
        let mut ddp = Ddp::new(comm, model, DdpOptions::default()).unwrap();
        for _ in 0..10 {
            ddp.step(2, |_| Ok((input()?, loss))).unwrap();
            ddp.update(&mut sgd()).unwrap();
        }
        ddp.for_each_parameter(&mut keep).unwrap();
        return found;
    }
    let mut world = comm;
    let (pipeline, stage) = (world.rank() / 2, world.rank() % 2);
    let own = world.subgroup(&[2 * pipeline, 2 * pipeline + 1]).unwrap().unwrap();
    let beside = world.subgroup(&[stage, 2 + stage]).unwrap().unwrap();
    let schedule = ScheduleKind::Gpipe.schedule(2, 1).unwrap();
    let mut pipeline = Pipeline::new(own, model, schedule, &[0..1, 1..2], Tensors).unwrap();
    pipeline.reduce_over(beside).unwrap();
    for _ in 0..10 {
        pipeline.step(|_| Ok(input()?), |_, output| loss(output)).unwrap();
        pipeline.update(&mut sgd()).unwrap();
    }
    pipeline.for_each_parameter(&mut keep).unwrap();
    found
}

#[rstest]
#[case::ddp(2, None)]
#[case::fsdp(2, Some(ShardingStrategy::FullShard))]
#[case::zero1(2, Some(ShardingStrategy::ShardOptimizer))]
#[case::zero2(2, Some(ShardingStrategy::ShardGradOp))]
#[case::no_shard(2, Some(ShardingStrategy::NoShard))]
#[case::hybrid(2, Some(ShardingStrategy::HybridShard { shard_degree: 2 }))]
#[case::pipeline(4, None)]
fn the_running_mean_of_constant_batches_is_the_same_under_every_strategy(
    #[case] ranks: usize,
    #[case] strategy: Option<ShardingStrategy>,
) {
    let outcome =
        sim::run(1, ranks, move |transport| constant_batches(Communicator::new(transport), strategy));
    // Channels are 0, 2, … 14 and 1, 3, … 15: means 7 and 8, variance 24.
    let rest = 0.9_f32.powi(10);
    let expected = [vec![7.0 * (1.0 - rest), 8.0 * (1.0 - rest)], vec![24.0 - 23.0 * rest; 2]];
    for found in &outcome.results {
        assert_eq!((found.len(), found), (2, &outcome.results[0]), "every rank has the same bits");
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            assert!((found - expected).abs() < 1e-4, "{found} instead of {expected}");
        }
    }
}

/// Returns sixteen rows of two channels at three positions.
fn all_rows(step: usize) -> candle_core::Result<Tensor> {
    Tensor::arange(0f32, 96.0, &Device::Cpu)?.reshape((16, 2, 3))?.affine(0.37, step as f64)?.sin()
}

fn synchronised_model(comm: &mut Communicator) -> Sequence<Tensor> {
    let norm = SyncBatchNorm::new(comm.fork().unwrap(), "norm", 2, 1e-5).unwrap();
    SequenceBuilder::new().plain_block(norm).build().unwrap()
}

/// Trains some steps, with a share of the rows on each rank. Returns parameters and buffers by index, and an
/// output in evaluation mode.
fn train_synchronised(
    mut comm: Communicator,
    strategy: Option<ShardingStrategy>,
) -> (Vec<(usize, Vec<f32>)>, Vec<f32>) {
    let (model, ranks) = (synchronised_model(&mut comm), comm.world_size());
    let share = 16 / ranks;
    let batch =
        |step| move |rank: usize| Ok((all_rows(step)?.narrow(0, rank * share, share)?.contiguous()?, loss));
    let mut found = Vec::new();
    let mut keep = |index: usize, read: Values<'_>| found.push((index, values(read)));
    let output = if let Some(strategy) = strategy {
        let mut fsdp = Fsdp::new(comm, model, &FsdpOptions::new(strategy)).unwrap();
        for step in 0..STEPS {
            fsdp.step(ranks, batch(step)).unwrap();
            fsdp.update(&mut sgd()).unwrap();
        }
        fsdp.for_each_parameter(&mut keep).unwrap();
        fsdp.forward(all_rows(99).unwrap()).unwrap()
    } else {
        let mut ddp = Ddp::new(comm, model, DdpOptions::default()).unwrap();
        for step in 0..STEPS {
            ddp.step(ranks, batch(step)).unwrap();
            ddp.update(&mut sgd()).unwrap();
        }
        ddp.for_each_parameter(&mut keep).unwrap();
        ddp.forward(all_rows(99).unwrap()).unwrap()
    };
    found.sort_by_key(|(index, _)| *index);
    (found, output.flatten_all().unwrap().to_vec1().unwrap())
}

#[rstest]
fn a_synchronised_batch_norm_trains_the_bits_of_one_process_with_the_whole_batch(
    #[values(1, 2, 4)] ranks: usize,
    #[values(5, 0, 1, 2, 3, 4)] strategy: usize,
) {
    let strategy = STRATEGIES.get(strategy).copied();
    // Two shards need two ranks.
    if ranks == 1 && strategy == Some(ShardingStrategy::HybridShard { shard_degree: 2 }) {
        return;
    }
    let alone = sim::run(1, 1, |transport| train_synchronised(Communicator::new(transport), None)).results;
    let divided =
        sim::run(1, ranks, move |transport| train_synchronised(Communicator::new(transport), strategy));
    assert_eq!(divided.results, vec![alone[0].clone(); ranks]);
}

/// Two blocks compute the same: candle's batch norm with the whole batch, and the synchronised one with half of it.
#[test]
fn a_synchronised_batch_norm_agrees_with_candle_on_the_whole_batch() {
    let outcome = sim::run(1, 2, |transport| {
        let mut comm = Communicator::new(transport);
        let (mut model, own) = (synchronised_model(&mut comm), 8 * comm.rank());
        model.begin_forward(Pass { training: true, step: 0, micro_batch: comm.rank() });
        let (output, saved) = model.forward(all_rows(0).unwrap().narrow(0, own, 8).unwrap()).unwrap();
        let gradient = all_rows(7).unwrap().narrow(0, own, 8).unwrap();
        let of_input = model.backward(saved, gradient, &mut |_, _| Ok(())).unwrap().unwrap();
        let mut running = Vec::new();
        model.read(2, &mut |read| running.extend(values(read))).unwrap();
        model.read(3, &mut |read| running.extend(values(read))).unwrap();
        [output, of_input]
            .map(|tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap())
            .into_iter()
            .chain([running])
            .collect::<Vec<_>>()
    });
    let map = VarMap::new();
    let norm =
        candle_nn::batch_norm(2, 1e-5, VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu)).unwrap();
    let mut block = CandleBlock::from_var_map("", &map, norm).unwrap();
    let (output, saved) = block.forward(all_rows(0).unwrap()).unwrap();
    let of_input = block.backward(saved, all_rows(7).unwrap(), &mut |_, _| Ok(())).unwrap().unwrap();
    let running =
        ["running_mean", "running_var"].map(|name| map.data().lock().unwrap()[name].to_vec1().unwrap());
    let [output, of_input] =
        [output, of_input].map(|tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    let [first, second] = [&outcome.results[0], &outcome.results[1]];
    let joined = |place: usize| [&*first[place], &*second[place]].concat();
    let expected_running: Vec<f32> = running.concat();
    let pairs = [(joined(0), output), (joined(1), of_input), (first[2].clone(), expected_running)];
    for (found, expected) in pairs {
        assert_eq!(found.len(), expected.len());
        let close = found.iter().zip(&expected).all(|(found, expected)| (found - expected).abs() < 1e-5);
        assert!(close, "{found:?} instead of {expected:?}");
    }
    assert_eq!(first[2], second[2]);
}

#[test]
fn a_synchronised_batch_norm_refuses_other_shapes_single_values_and_a_negative_epsilon() {
    let outcome = sim::run(1, 1, |transport| {
        let mut comm = Communicator::new(transport);
        let fork = comm.fork().unwrap();
        let negative = SyncBatchNorm::new(fork, "norm", 2, -1.0).unwrap_err();
        let mut model = synchronised_model(&mut comm);
        let mut refused = |shape: &[usize]| {
            let x = Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
            dist_parallel::internal::Chain(&*model.forward(x).unwrap_err()).to_string()
        };
        [refused(&[4, 3]), refused(&[1, 2]), dist_parallel::internal::Chain(&negative).to_string()]
    });
    let [shape, single, negative] = &outcome.results[0];
    assert!(shape.contains("block norm, forward") && shape.contains("rows x 2 channels"), "{shape}");
    assert!(single.contains("a channel has 1 values and needs two"), "{single}");
    assert!(negative.contains("eps is -1"), "{negative}");
}
