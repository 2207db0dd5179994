//! A candle model trained on several ranks of the simulated network has the bits of one process.

mod small_model;

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor, Var};
use dist_candle::loss_and_gradient;
use dist_collectives::Communicator;
use dist_parallel::checkpoint::{Checkpoints, WeightOptions, load_weights};
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::optim::{AdamW, AdamWOptions};
use dist_parallel::{BoxError, Ddp, DdpOptions, Params, Sequence, Values};
use dist_testkit::oracle;
use dist_transport::sim;
use rstest::rstest;
use small_model::{ids, loss, model, model_in, parts, tensors};

const MICRO_BATCHES: usize = 8;
const STEPS: usize = 5;

fn micro_batch(index: usize) -> u32 {
    u32::try_from(index).expect("a small number")
}

fn step(ddp: &mut Ddp<Sequence<Tensor>>, first: usize) -> dist_parallel::Result<f32> {
    let report = ddp.step(MICRO_BATCHES, |index| {
        let number = micro_batch(first + index);
        let loss = move |output: Tensor| -> Result<(f32, Tensor), BoxError> {
            Ok(loss_and_gradient(&output, |output| loss(output, number))?)
        };
        Ok((ids(number), loss))
    })?;
    Ok(report.loss)
}

/// Returns the bits of every loss, then the bits of every parameter.
fn train(comm: Communicator, dtype: DType) -> dist_parallel::Result<Vec<u32>> {
    let mut ddp = Ddp::new(comm, model_in(dtype), DdpOptions::default())?;
    let mut optimizer = AdamW::new(AdamWOptions { learning_rate: 0.02, ..AdamWOptions::default() })?;
    let mut seen = Vec::new();
    for number in 0..STEPS {
        seen.push(step(&mut ddp, number * MICRO_BATCHES)?.to_bits());
        ddp.update(&mut optimizer)?;
    }
    for index in 0..ddp.model().infos().len() {
        let mut keep = |values: Values<'_>| seen.extend(bits(values));
        ddp.model().read(index, &mut keep).expect("a parameter in memory");
    }
    Ok(seen)
}

/// Does the same with a sharded model.
fn train_sharded(
    comm: Communicator,
    dtype: DType,
    strategy: ShardingStrategy,
) -> dist_parallel::Result<Vec<u32>> {
    let mut fsdp = Fsdp::new(comm, model_in(dtype), &FsdpOptions::new(strategy).with_prefetch(1))?;
    let mut optimizer = AdamW::new(AdamWOptions { learning_rate: 0.02, ..AdamWOptions::default() })?;
    let mut seen = Vec::new();
    for number in 0..STEPS {
        let report = fsdp.step(MICRO_BATCHES, |index| {
            let number = micro_batch(number * MICRO_BATCHES + index);
            let loss = move |output: Tensor| -> Result<(f32, Tensor), BoxError> {
                Ok(loss_and_gradient(&output, |output| loss(output, number))?)
            };
            Ok((ids(number), loss))
        })?;
        seen.push(report.loss.to_bits());
        fsdp.update(&mut optimizer)?;
    }
    if strategy == ShardingStrategy::FullShard {
        let freed = fsdp.model().read(0, &mut |_| panic!("it is freed")).expect_err("it is freed");
        assert_eq!(
            freed.to_string(),
            "embed.0 cannot be reached as a slice: its memory is freed between its uses"
        );
    }
    fsdp.for_each_parameter(|_, values| seen.extend(bits(values)))?;
    Ok(seen)
}

#[rstest]
#[case(ShardingStrategy::FullShard)]
#[case(ShardingStrategy::ShardGradOp)]
#[case(ShardingStrategy::ShardOptimizer)]
#[case(ShardingStrategy::HybridShard { shard_degree: 2 })]
fn every_strategy_trains_the_parameters_of_one(
    #[case] strategy: ShardingStrategy,
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
) {
    let alone = train_on(0, 1, dtype).remove(0);
    let program =
        move |transport| train_sharded(Communicator::new(transport), dtype, strategy).expect("no faults");
    for (rank, trained) in sim::run(1, 4, program).results.into_iter().enumerate() {
        assert_eq!(trained, alone, "rank {rank}");
    }
}

fn bits(values: Values<'_>) -> Vec<u32> {
    match values {
        Values::F32(values) => values.iter().map(|value| value.to_bits()).collect(),
        Values::F16(values) => values.iter().map(|value| value.to_bits().into()).collect(),
        Values::Bf16(values) => values.iter().map(|value| value.to_bits().into()).collect(),
        Values::F64(_) => panic!("{values:?}"),
    }
}

fn train_on(seed: u64, ranks: usize, dtype: DType) -> Vec<Vec<u32>> {
    let program = move |transport| train(Communicator::new(transport), dtype).expect("no faults");
    sim::run(seed, ranks, program).results
}

#[rstest]
fn any_number_of_ranks_trains_the_parameters_of_one(
    #[values(2, 4, 8)] ranks: usize,
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
) {
    let alone = train_on(0, 1, dtype).remove(0);
    assert!(f32::from_bits(alone[STEPS - 1]) < 0.95 * f32::from_bits(alone[0]), "nothing is learned");
    for (rank, trained) in train_on(1, ranks, dtype).into_iter().enumerate() {
        assert_eq!(trained, alone, "rank {rank}");
    }
}

#[test]
fn shares_that_are_no_power_of_two_give_the_same_bits_on_every_rank_and_in_every_order_of_events() {
    let trained = train_on(2, 3, DType::F32);
    assert!(trained.iter().all(|other| *other == trained[0]));
    assert_eq!(train_on(3, 3, DType::F32), trained);
}

/// Files that a sharded training has saved can be read by candle, and the reverse.
#[test]
fn candle_reads_a_consolidated_checkpoint_and_its_files_can_be_loaded() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_owned();
    let program = move |transport| {
        let options = FsdpOptions::new(ShardingStrategy::FullShard);
        let mut fsdp = Fsdp::new(Communicator::new(transport), model(), &options).unwrap();
        let adamw = AdamW::new(AdamWOptions::default()).unwrap();
        Checkpoints::at(path.join("checkpoints")).save(&mut fsdp, Some(&adamw), 1).unwrap();
        let [consolidated, candles] = ["ours", "candles"].map(|name| path.join(name));
        if fsdp.rank() == 0 {
            Checkpoints::at(path.join("checkpoints")).consolidate(None, &consolidated).unwrap();
            let read = candle_core::safetensors::load(&consolidated, &Device::Cpu).unwrap();
            let vars = parts().into_iter().flat_map(|(block, vars, _)| {
                vars.into_iter().enumerate().map(move |(index, var)| (format!("{block}.{index}"), var))
            });
            let vars: HashMap<String, Var> = vars.collect();
            assert_eq!(read.len(), vars.len());
            let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            for (name, tensor) in &read {
                assert_eq!(
                    (tensor.dims(), values(tensor)),
                    (vars[name].dims(), values(&vars[name])),
                    "{name}"
                );
            }
            let doubled: HashMap<String, Tensor> =
                read.into_iter().map(|(name, tensor)| (name, (tensor * 2.0).unwrap())).collect();
            candle_core::safetensors::save(&doubled, &candles).unwrap();
        }
        fsdp.communicator_mut().barrier().unwrap();
        load_weights(&candles, &mut fsdp, &WeightOptions::new()).unwrap();
        let mut loaded = Vec::new();
        fsdp.for_each_parameter(|_, values| loaded.extend(bits(values))).unwrap();
        loaded
    };
    let vars = parts().into_iter().flat_map(|(_, vars, _)| vars);
    let doubled = vars
        .flat_map(|var| (var.as_tensor() * 2.0).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap());
    let expected: Vec<u32> = doubled.map(f32::to_bits).collect();
    assert_eq!(sim::run(1, 3, program).results, vec![expected; 3]);
}

/// Weights as another program writes them: in half precision, under other names, with integers and an unused head.
#[rstest]
fn candle_weights_in_half_precision_under_other_names_are_loaded(
    #[values(
        ShardingStrategy::FullShard,
        ShardingStrategy::ShardGradOp,
        ShardingStrategy::ShardOptimizer,
        ShardingStrategy::NoShard
    )]
    strategy: ShardingStrategy,
    #[values(1, 2, 3)] ranks: usize,
) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("weights.safetensors");
    let mut expected = Vec::new();
    let mut tensors = HashMap::new();
    for (block, vars, _) in parts() {
        for (index, var) in vars.into_iter().enumerate() {
            let half = var.as_tensor().to_dtype(DType::BF16).unwrap();
            let values = half.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            expected.extend(values.into_iter().map(f32::to_bits));
            tensors.insert(format!("model.{block}.{index}"), half);
        }
    }
    tensors.insert("model.position_ids".to_owned(), Tensor::arange(0_i64, 4, &Device::Cpu).unwrap());
    tensors.insert("lm_head.weight".to_owned(), Tensor::ones((2, 2), DType::F32, &Device::Cpu).unwrap());
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let program = move |transport| {
        let mut fsdp = Fsdp::new(Communicator::new(transport), model(), &FsdpOptions::new(strategy)).unwrap();
        let options = WeightOptions::new().rename("model.", "").convert().ignore_extra();
        let report = load_weights(&path, &mut fsdp, &options).unwrap();
        assert_eq!(report.left_out.len(), 2);
        let mut loaded = Vec::new();
        fsdp.for_each_parameter(|_, values| loaded.extend(bits(values))).unwrap();
        loaded
    };
    assert_eq!(sim::run(1, ranks, program).results, vec![expected; ranks]);
}

#[test]
fn the_mean_gradient_is_the_tree_over_candles_own_gradients() {
    let expected = {
        let of_one = |index| -> Vec<Vec<f32>> {
            let parts = parts();
            let start = ids(micro_batch(index));
            let output = parts
                .iter()
                .fold(start, |x, (_, vars, forward)| forward(&tensors(vars).unwrap(), &x).unwrap());
            let gradients = loss(&output, micro_batch(index)).unwrap().backward().unwrap();
            let vars = parts.iter().flat_map(|(_, vars, _)| vars);
            vars.map(|var| gradients.get(var).unwrap().flatten_all().unwrap().to_vec1().unwrap()).collect()
        };
        let all: Vec<_> = (0..MICRO_BATCHES).map(of_one).collect();
        let mean = |parameter: usize| {
            let each: Vec<Vec<f32>> = all.iter().map(|gradients| gradients[parameter].clone()).collect();
            let sums = oracle::all_reduce(&each, oracle::Reduction::Mean);
            sums.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        (0..all[0].len()).map(mean).collect::<Vec<_>>()
    };
    let outcome = sim::run(4, 4, |transport| {
        let mut ddp = Ddp::new(Communicator::new(transport), model(), DdpOptions::default()).unwrap();
        step(&mut ddp, 0).unwrap();
        let gradient = |index| bits(ddp.gradient(index).unwrap());
        (0..ddp.model().infos().len()).map(gradient).collect::<Vec<_>>()
    });
    for gradients in outcome.results {
        assert_eq!(gradients, expected);
    }
}
