//! Checksums of trained parameters and losses for each strategy. No change of the code may change them.

use std::collections::BTreeMap;
use std::slice;

use dist_collectives::{Communicator, ReduceOp};
use dist_groups::Mesh;
use dist_parallel::compress::{BucketGradients, BucketHook, Compression};
use dist_parallel::fsdp::{Fsdp, FsdpOptions, Precision, Reshard, ShardingStrategy, Units};
use dist_parallel::model::{Ready, Saved, Slot};
use dist_parallel::optim::{Momentum, Sgd, SgdOptions};
use dist_parallel::pipeline::{Pipeline, PlainVectors, ScheduleKind, split_into_stages};
use dist_parallel::trainer::TrainerOptions;
use dist_parallel::{Block, BoxError, Ddp, Error, FloatType, ParamInfo, Sequence, Values, ValuesMut};
use dist_transport::sim;
use half::{bf16, f16};
use rstest::rstest;

use crate::ddp::options;
use crate::plain::{Linear, Numbers, Relu, Rows, floats, params_in_slots, squared_error};

/// A block that adds a weighted sum of its parameters to its input. It has a parameter of each type. It reports no
/// gradient of the first one in micro-batches whose input begins with a negative number.
struct Mixed {
    infos: Vec<ParamInfo>,
    slots: Vec<Slot>,
}

impl Mixed {
    fn new() -> Self {
        use FloatType::{Bf16, F16, F32, F64};
        let types = [("half", F16, 3), ("single", F32, 5), ("brain", Bf16, 4), ("double", F64, 1)];
        let info = |&(name, dtype, len): &(&str, FloatType, usize)| ParamInfo::new(name, [len], dtype);
        let slots = vec![
            Slot::from([0.5, -0.25, 0.125].map(f16::from_f32).to_vec()),
            Slot::from(vec![0.1_f32, 0.2, -0.3, 0.4, -0.5]),
            Slot::from([0.75, -0.5, 0.25, 0.3].map(bf16::from_f32).to_vec()),
            Slot::from(vec![0.7_f64]),
        ];
        Self { infos: types.iter().map(info).collect(), slots }
    }
}

/// Returns the weight of a parameter's value in the sum.
const fn weight(index: usize) -> f32 {
    [0.25, -0.5, 0.75, 1.0, -1.25][index]
}

params_in_slots!(Mixed);

impl Block<Rows> for Mixed {
    fn forward(&mut self, input: Rows) -> Result<(Rows, Saved), BoxError> {
        let mut sum = 0.0;
        for slot in &self.slots {
            let values = floats(slot.values()?);
            sum += values.iter().enumerate().map(|(index, value)| weight(index) * value).sum::<f32>();
        }
        let negative = input[0] < 0.0;
        Ok((input.iter().map(|x| x + 0.1 * sum).collect(), Saved::new(negative)))
    }

    fn backward(
        &mut self,
        saved: Saved,
        gradient: Rows,
        ready: &mut Ready<'_>,
    ) -> Result<Option<Rows>, BoxError> {
        let total = 0.1 * gradient.iter().sum::<f32>();
        let of_values = [0, 1, 2, 3, 4].map(|index| weight(index) * total);
        ready(3, Values::F64(&[of_values[0].into()]))?;
        ready(2, Values::Bf16(&[0, 1, 2, 3].map(|index| bf16::from_f32(of_values[index]))))?;
        ready(1, Values::F32(&of_values))?;
        if !saved.take::<bool>()? {
            ready(0, Values::F16(&[0, 1, 2].map(|index| f16::from_f32(of_values[index]))))?;
        }
        Ok(Some(gradient))
    }
}

/// Returns a model with tied, frozen and mixed parameters.
fn mixed_model(rank: usize) -> Sequence<Rows> {
    let seed = 7 + rank as u64;
    let first = Linear::new("first", 3, 3, seed);
    let again = first.sharing_weight("again", seed + 1);
    let blocks: Vec<Box<dyn Block<Rows>>> = vec![
        Box::new(first),
        Box::new(Mixed::new()),
        Box::new(Relu),
        Box::new(again),
        Box::new(Linear::new("frozen", 3, 4, seed + 2).frozen()),
        Box::new(Linear::new("last", 4, 2, seed + 3)),
    ];
    let mut model = Sequence::new(blocks).unwrap();
    model.tie("again.weight", "first.weight").unwrap();
    model
}

fn input(step: usize, index: usize) -> Rows {
    Numbers((step * 1000 + index) as u64).take(6)
}

fn target(input: &[f32]) -> Rows {
    input.chunks(3).flat_map(|row| [row[0] - row[1], row[0] * row[2]]).collect()
}

/// Returns the loss of a micro-batch with weight 1, 2 or 3.
fn weighted(index: usize, target: Rows) -> impl FnOnce(Rows) -> Result<((f32, u64), Rows), BoxError> {
    move |output| {
        let (loss, gradient) = squared_error(target)(output)?;
        let weight = (1 + index % 3) as f32;
        Ok(((loss * weight, 1 + index as u64 % 3), gradient.iter().map(|g| g * weight).collect()))
    }
}

fn sgd() -> Sgd {
    let momentum = Momentum::Plain(0.9);
    Sgd::new(SgdOptions { learning_rate: 0.05, momentum, weight_decay: 0.01 }).unwrap()
}

/// Collects parameters and losses.
#[derive(Default)]
struct Checksum(BTreeMap<usize, Vec<u8>>, Vec<u8>);

impl Checksum {
    fn loss(&mut self, loss: f32) {
        self.1.extend(loss.to_bits().to_le_bytes());
    }

    fn parameter(&mut self, index: usize, values: Values<'_>) {
        let bytes: &[u8] = match values {
            Values::F32(values) => bytemuck::cast_slice(values),
            Values::F64(values) => bytemuck::cast_slice(values),
            Values::F16(values) => bytemuck::cast_slice(values),
            Values::Bf16(values) => bytemuck::cast_slice(values),
        };
        self.0.insert(index, bytes.to_vec());
    }

    fn crc32(self) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        self.0.values().chain(slice::from_ref(&self.1)).for_each(|bytes| hasher.update(bytes));
        hasher.finalize()
    }
}

/// Takes a step, an accumulated step, a join and a weighted join, with clipping.
macro_rules! train {
    ($trainer:expr, $micro_batches:expr) => {{
        let (mut trainer, micro_batches) = ($trainer, $micro_batches);
        let (rank, mut sgd, mut checksum) = (trainer.rank(), sgd(), Checksum::default());
        let batch = |step: usize| {
            move |index| {
                let input = input(step, index);
                let target = target(&input);
                Ok((input, squared_error(target)))
            }
        };
        let weighted_batch = |index| {
            let input = input(9, index + 10 * rank);
            let target = target(&input);
            Ok((input, weighted(index, target)))
        };
        // Ranks with an odd number have no micro-batch.
        let own = if rank % 2 == 1 { 0 } else { 1 + rank + micro_batches % 3 };
        for step in 0..5 {
            let report = match step {
                0 => trainer.step(micro_batches, batch(step)).unwrap(),
                1 => {
                    trainer.accumulate(micro_batches, batch(20)).unwrap();
                    trainer.step(micro_batches, batch(step)).unwrap()
                }
                2 => {
                    trainer.accumulate(micro_batches, batch(21)).unwrap();
                    trainer.synchronise().unwrap()
                }
                3 => trainer.join(own, |index| batch(step)(index + 10 * rank)).unwrap().unwrap(),
                _ => trainer.join(own, weighted_batch).unwrap().unwrap(),
            };
            checksum.loss(report.loss);
            trainer.clip_gradients(0.5).unwrap();
            trainer.update(&mut sgd).unwrap();
        }
        trainer.for_each_parameter(|index, values| checksum.parameter(index, values)).unwrap();
        checksum.crc32()
    }};
}

/// The numbers of micro-batches of a step.
const MICRO_BATCHES: [usize; 3] = [1, 3, 8];

/// Returns the checksums on 1, 2, 4 and 8 ranks, for each number of micro-batches.
fn checksums(
    shares: bool,
    train: impl Fn(Communicator, usize) -> u32 + Clone + Send + Sync + 'static,
) -> [[u32; 3]; 4] {
    [1, 2, 4, 8].map(|ranks| {
        MICRO_BATCHES.map(|micro_batches| {
            let network = sim::Network::new(ranks).with_seed(micro_batches as u64);
            let network = if shares { network.with_shared_memory() } else { network };
            let train = train.clone();
            let program = move |transport| train(Communicator::new(transport), micro_batches);
            let results = network.run(program).results;
            assert!(results.iter().all(|crc32| *crc32 == results[0]), "ranks differ: {results:x?}");
            results[0]
        })
    })
}

#[track_caller]
fn check(actual: [[u32; 3]; 4], expected: [[u32; 3]; 4]) {
    assert_eq!(format!("{actual:#010x?}"), format!("{expected:#010x?}"));
}

// The checksums on 1, 2, 4 and 8 ranks, for each number of micro-batches.
const REPLICATED: [[u32; 3]; 4] = [
    [0xdc5f_542f, 0xf151_7cb0, 0xd129_fbbe],
    [0xdc5f_542f, 0x7425_2926, 0x1cdd_1bde],
    [0x058e_84db, 0x82be_fd78, 0xd3f4_a9b4],
    [0xd164_b86c, 0x3c01_d3c3, 0xcc4e_2d27],
];
const BF16_HOOK: [[u32; 3]; 4] = [
    [0x83a8_6135, 0x8903_451e, 0x6c72_57ca],
    [0x83a8_6135, 0xfae7_2e86, 0x06d2_94fc],
    [0xb97d_7253, 0x4958_8c21, 0x089b_fd23],
    [0x226e_7612, 0xacbf_f985, 0x154d_a616],
];
const INT8_HOOK: [[u32; 3]; 4] = [
    [0x3e77_27a6, 0x9279_eae7, 0x9f81_64a1],
    [0x978f_b427, 0x8b8f_82a8, 0xf048_ed7c],
    [0xb274_6087, 0x664a_4e0f, 0x9bb7_40df],
    [0x25f8_2e3c, 0x379e_4f5b, 0x9a16_753c],
];
const PIPELINE: [[u32; 3]; 4] = [
    [0xdca1_af9e, 0x5640_f9d1, 0x6b19_7431],
    [0xdca1_af9e, 0x5640_f9d1, 0x6b19_7431],
    [0x9317_3c2f, 0xd12c_3241, 0xd683_438d],
    [0xa045_9918, 0xd6a4_3b16, 0x9f2f_471a],
];
const HYBRID: [[u32; 3]; 4] = [
    [0xdc5f_542f, 0xf151_7cb0, 0xd129_fbbe],
    [0xdc5f_542f, 0x5b7f_a6a2, 0xd129_fbbe],
    [0x058e_84db, 0xf761_8e02, 0x0ec3_0cfc],
    [0xd164_b86c, 0x3c01_d3c3, 0x4137_9ec8],
];
const HYBRID_BF16_HOOK: [[u32; 3]; 4] = [
    [0x83a8_6135, 0x8903_451e, 0x6c72_57ca],
    [0x83a8_6135, 0xccb9_e12c, 0x6c72_57ca],
    [0xb97d_7253, 0x1052_5cd0, 0xb8b8_465d],
    [0x226e_7612, 0xacbf_f985, 0x298c_79e3],
];
const ROUND_BY_ROUND: [[u32; 3]; 4] = [
    [0xdc5f_542f, 0xf151_7cb0, 0xd129_fbbe],
    [0xdc5f_542f, 0x5b7f_a6a2, 0xd129_fbbe],
    [0x4671_2ab5, 0xfb72_e7d4, 0x1580_75ef],
    [0xc9d8_041a, 0x6571_7b6f, 0xaee9_6498],
];
const ROUND_BY_ROUND_PRECISE: [[u32; 3]; 4] = [
    [0xcecd_6040, 0xacc6_c084, 0x793c_d86f],
    [0xcecd_6040, 0xa683_8c1c, 0x793c_d86f],
    [0xaf3a_a39d, 0xa8af_c4cb, 0x6f2e_be3b],
    [0x81b9_46d0, 0x83dc_e0e8, 0xbdb5_2fa5],
];
const REPLICATED_PRECISE: [[u32; 3]; 4] = [
    [0xcecd_6040, 0xacc6_c084, 0x793c_d86f],
    [0xcecd_6040, 0x356b_0d80, 0x12d4_e94c],
    [0x9774_9490, 0x91da_10c0, 0x99a6_e432],
    [0xc1e5_39b7, 0x5fc3_2d9d, 0x6817_6eee],
];
const LOCAL_SGD: [[u32; 3]; 4] = [
    [0xde88_c513, 0x1566_76fc, 0x3c14_8c16],
    [0xbee1_282e, 0x6f4c_122c, 0x2d52_d347],
    [0x9d6c_4b06, 0xdbaf_3db3, 0x1544_db62],
    [0x8a53_606e, 0xa061_58c4, 0x14a6_8a47],
];
const LOCAL_SGD_PRECISE: [[u32; 3]; 4] = [
    [0x3557_be40, 0x2166_f51e, 0xb6a9_9d6e],
    [0xd3e3_adcf, 0x35aa_e904, 0x8791_cff2],
    [0x1861_b9a2, 0xccac_9009, 0xe240_93ce],
    [0x5004_56b5, 0xacbd_b44c, 0x3312_bdb7],
];
const DILOCO_PRECISE: [[u32; 3]; 4] = [
    [0x6b51_3025, 0x2a7f_c21a, 0x55e3_2ab6],
    [0x5aac_68e6, 0x03eb_7f89, 0xcf47_4efb],
    [0xa113_9a73, 0x5876_b57d, 0xc078_6a30],
    [0xc7d5_c86a, 0x5fea_701d, 0x4c65_7c09],
];
const DILOCO: [[u32; 3]; 4] = [
    [0x0a81_9e3b, 0x17b0_21ff, 0xcaab_34d7],
    [0x1458_5db9, 0xc7f3_98bf, 0xbcbc_0c2c],
    [0xb425_2c61, 0x3989_41a8, 0x7a04_e41c],
    [0x1112_ccb6, 0x1c2d_ac80, 0xa91c_14b5],
];

#[rstest]
#[case::one_bucket(usize::MAX, None, Precision::default(), REPLICATED)]
#[case::small_buckets(20, None, Precision::default(), REPLICATED)]
#[case::bf16_on_the_wire(20, Some("bf16"), Precision::default(), BF16_HOOK)]
#[case::int8_on_the_wire(20, Some("int8"), Precision::default(), INT8_HOOK)]
#[case::precise(20, None, precise(), REPLICATED_PRECISE)]
fn data_parallel_training_keeps_its_bits(
    #[case] bucket_bytes: usize,
    #[case] hook: Option<&'static str>,
    #[case] precision: Precision,
    #[case] expected: [[u32; 3]; 4],
) {
    let hook = move || hook.and_then(|text| text.parse::<Compression>().unwrap().hook().unwrap());
    let actual = checksums(false, move |comm, micro_batches| {
        let model = mixed_model(comm.rank());
        let options = options(bucket_bytes).with_precision(precision);
        let ddp = match hook() {
            None => Ddp::new(comm, model, options),
            Some(hook) => Ddp::with_hook(comm, model, options, hook),
        };
        train!(ddp.unwrap(), micro_batches)
    });
    check(actual, expected);
}

fn precise() -> Precision {
    Precision { master: Some(FloatType::F64), reduce: Some(FloatType::Bf16) }
}

#[rstest]
#[case::full_shard(FsdpOptions::new(ShardingStrategy::FullShard), ROUND_BY_ROUND)]
#[case::prefetching(FsdpOptions::new(ShardingStrategy::FullShard).with_prefetch(2).with_reshard(Reshard::AllButLast), ROUND_BY_ROUND)]
#[case::precise(FsdpOptions::new(ShardingStrategy::FullShard).with_precision(precise()), ROUND_BY_ROUND_PRECISE)]
#[case::shard_gradients(FsdpOptions::new(ShardingStrategy::ShardGradOp), ROUND_BY_ROUND)]
#[case::shard_the_optimizer(FsdpOptions::new(ShardingStrategy::ShardOptimizer), REPLICATED)]
#[case::shard_the_optimizer_precisely(FsdpOptions::new(ShardingStrategy::ShardOptimizer).with_precision(precise()), REPLICATED_PRECISE)]
#[case::no_shard(FsdpOptions::new(ShardingStrategy::NoShard), REPLICATED)]
#[case::no_shard_one_unit(FsdpOptions::new(ShardingStrategy::NoShard).with_units(Units::OneForAll), REPLICATED)]
#[case::no_shard_precise(FsdpOptions::new(ShardingStrategy::NoShard).with_precision(precise()), REPLICATED_PRECISE)]
fn sharded_training_keeps_its_bits(
    #[case] options: FsdpOptions,
    #[case] expected: [[u32; 3]; 4],
    #[values(false, true)] shares: bool,
) {
    let actual = checksums(shares, move |comm, micro_batches| {
        let model = mixed_model(comm.rank());
        train!(Fsdp::new(comm, model, &options).unwrap(), micro_batches)
    });
    check(actual, expected);
}

fn bf16_hook() -> Box<dyn BucketHook> {
    "bf16".parse::<Compression>().unwrap().hook().unwrap().unwrap()
}

#[test]
fn a_hook_without_shards_has_the_bits_of_data_parallel_training() {
    let actual = checksums(false, |comm, micro_batches| {
        let model = mixed_model(comm.rank());
        let options = FsdpOptions::new(ShardingStrategy::NoShard);
        train!(Fsdp::with_hook(comm, model, &options, bf16_hook()).unwrap(), micro_batches)
    });
    check(actual, BF16_HOOK);
}

#[rstest]
fn a_hook_is_refused_if_there_is_one_replica(
    #[values(ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::ShardOptimizer)]
    strategy: ShardingStrategy,
) {
    let outcome = sim::run(1, 2, move |transport| {
        let options = FsdpOptions::new(strategy);
        let fsdp = Fsdp::with_hook(Communicator::new(transport), mixed_model(0), &options, bf16_hook());
        fsdp.unwrap_err()
    });
    for refused in outcome.results {
        assert!(
            matches!(refused, Error::HookWithShards { strategy: named } if named == strategy),
            "{refused}"
        );
    }
}

/// A hook that sums as training without a hook does.
struct ExactHook;

impl BucketHook for ExactHook {
    fn name(&self) -> String {
        "exact".to_owned()
    }

    fn sum(&mut self, bucket: BucketGradients<'_>, comm: &mut Communicator) -> Result<(), BoxError> {
        assert_eq!(bucket.tensors.iter().map(|tensor| tensor.len).sum::<usize>(), bucket.values.len());
        match bucket.values {
            ValuesMut::F32(values) => comm.all_reduce(values, ReduceOp::Sum)?,
            ValuesMut::F64(values) => comm.all_reduce(values, ReduceOp::Sum)?,
            ValuesMut::F16(values) => comm.all_reduce(values, ReduceOp::Sum)?,
            ValuesMut::Bf16(values) => comm.all_reduce(values, ReduceOp::Sum)?,
        }
        Ok(())
    }
}

/// It runs on ranks that its degree divides. A hook sums over the replicas.
#[rstest]
#[case::without_a_hook(None, HYBRID)]
#[case::exact_hook(Some("exact"), HYBRID)]
#[case::bf16_between_replicas(Some("bf16"), HYBRID_BF16_HOOK)]
fn hybrid_training_keeps_its_bits(
    #[case] hook: Option<&'static str>,
    #[case] expected: [[u32; 3]; 4],
    #[values(false, true)] shares: bool,
) {
    let actual = checksums(shares, move |comm, micro_batches| {
        let shard_degree = comm.world_size().min(2);
        let options = FsdpOptions::new(ShardingStrategy::HybridShard { shard_degree });
        let model = mixed_model(comm.rank());
        let fsdp = match hook {
            None => Fsdp::new(comm, model, &options),
            Some("exact") => Fsdp::with_hook(comm, model, &options, ExactHook),
            Some(_) => Fsdp::with_hook(comm, model, &options, bf16_hook()),
        };
        train!(fsdp.unwrap(), micro_batches)
    });
    check(actual, expected);
}

/// A pipeline has at most 2 ranks. On 4 and 8 ranks, several pipelines reduce or shard their stages together.
#[rstest]
#[case::gpipe(ScheduleKind::Gpipe, false, PIPELINE)]
#[case::sharded(ScheduleKind::OneForwardOneBackward, true, PIPELINE)]
#[case::zbv(ScheduleKind::Zbv, false, PIPELINE)]
fn pipelines_keep_their_bits(
    #[case] kind: ScheduleKind,
    #[case] is_sharded: bool,
    #[case] expected: [[u32; 3]; 4],
) {
    let actual = checksums(false, move |comm, micro_batches| {
        let ranks = comm.world_size().min(2);
        let axes = [("data", comm.world_size() / ranks), ("pipeline", ranks)];
        let model = mixed_model(0);
        let mut mesh = Mesh::new(comm, axes).unwrap();
        let [pipelined, data] = ["pipeline", "data"].map(|axis| mesh.take(axis).unwrap().into_communicator());
        let schedule = kind.schedule(ranks, micro_batches).unwrap();
        let stages = split_into_stages(6, schedule.stages()).unwrap();
        let mut pipeline = Pipeline::new(pipelined, model, schedule, &stages, PlainVectors).unwrap();
        if is_sharded {
            pipeline.shard_over(mesh.into_communicator()).unwrap();
        } else {
            pipeline.reduce_over(data).unwrap();
        }
        let (mut sgd, mut checksum) = (sgd(), Checksum::default());
        for step in 0..3 {
            let report = pipeline.step(
                |index| Ok(input(step, index)),
                |index, output| squared_error(target(&input(step, index)))(output),
            );
            checksum.loss(report.unwrap().loss);
            pipeline.clip_gradients(0.5).unwrap();
            pipeline.update(&mut sgd).unwrap();
        }
        pipeline.for_each_parameter(|index, values| checksum.parameter(index, values)).unwrap();
        checksum.crc32()
    });
    check(actual, expected);
}

/// Ranks synchronise after every second update. Their losses differ, so the loss of an evaluation is compared.
#[rstest]
#[case::average("local_sgd:2", Precision::default(), LOCAL_SGD)]
#[case::diloco("diloco:2", Precision::default(), DILOCO)]
#[case::average_precisely("local_sgd:2", precise(), LOCAL_SGD_PRECISE)]
#[case::diloco_precisely("diloco:2", precise(), DILOCO_PRECISE)]
fn local_sgd_keeps_its_bits(
    #[case] strategy: &'static str,
    #[case] precision: Precision,
    #[case] expected: [[u32; 3]; 4],
) {
    let actual = checksums(false, move |comm, micro_batches| {
        let (rank, mut sgd, mut checksum) = (comm.rank(), sgd(), Checksum::default());
        let options = TrainerOptions::new(strategy.parse().unwrap()).with_precision(precision);
        let mut trainer = options.build(comm, mixed_model(rank), PlainVectors).unwrap();
        let plain = |step: usize| {
            move |index| {
                let input = input(step, index);
                let target = target(&input);
                Ok((input, squared_error(target)))
            }
        };
        // Ranks with an odd number have no micro-batch.
        let own = if rank % 2 == 1 { 0 } else { 1 + rank + micro_batches % 3 };
        for step in 0..6 {
            let weighted_batch = |index| {
                let input = input(step, index + 10 * rank);
                let target = target(&input);
                Ok((input, weighted(index, target)))
            };
            match step {
                0 | 2 => trainer.step(micro_batches, plain(step)).map(drop).unwrap(),
                1 => {
                    trainer.accumulate(micro_batches, plain(20)).unwrap();
                    trainer.step(micro_batches, plain(step)).map(drop).unwrap();
                }
                3 => trainer.join(own, |index| plain(step)(index + 10 * rank)).map(drop).unwrap(),
                _ => trainer.join(own, weighted_batch).map(drop).unwrap(),
            }
            trainer.clip_gradients(0.5).unwrap();
            trainer.update(&mut sgd).unwrap();
            if step % 2 == 1 {
                let loss = |index, output| Ok(squared_error(target(&input(step, index)))(output)?.0);
                let report = trainer.evaluate(micro_batches, |index| Ok(input(step, index)), loss);
                checksum.loss(report.unwrap().loss);
            }
        }
        trainer.for_each_parameter(&mut |index, values| checksum.parameter(index, values)).unwrap();
        checksum.crc32()
    });
    check(actual, expected);
}
