//! A program whose micro-batches do not depend on the number of ranks trains the same bits. Otherwise results are
//! equal within rounding.

use candle_core::DType;
use candle_nn::{Optimizer, ParamsAdamW, SGD};
use dist_candle::DataParallel;
use dist_collectives::Communicator;
use rstest::rstest;

use crate::model::{Named, Rows, model, run, values};

const STEPS: usize = 4;
const MICRO_BATCHES: usize = 4;
const ROWS: usize = 3;

/// A way to compute the micro-batches of a step.
#[derive(Debug, Clone, Copy)]
enum Call {
    Dealt,
    Accumulated,
    NoSync,
    Joined,
}

/// The optimizer of a training.
#[derive(Debug, Clone, Copy)]
enum ScheduleKind {
    Sgd,
    AdamW,
    SavedAdamW,
}

fn settings() -> ParamsAdamW {
    // `f16` cannot represent 1e-8.
    ParamsAdamW { lr: 0.02, eps: 1e-3, ..ParamsAdamW::default() }
}

fn train(comm: Communicator, way: Call, kind: ScheduleKind, dtype: DType) -> Named {
    let trained = match kind {
        ScheduleKind::Sgd => train_by::<SGD>(comm, way, dtype, 0.1),
        ScheduleKind::AdamW => train_by::<candle_nn::AdamW>(comm, way, dtype, settings()),
        ScheduleKind::SavedAdamW => train_by::<dist_candle::AdamW>(comm, way, dtype, settings()),
    };
    trained.unwrap()
}

/// Trains in a function that returns candle's own result.
fn train_by<O: Optimizer>(
    comm: Communicator,
    way: Call,
    dtype: DType,
    config: O::Config,
) -> candle_core::Result<Named> {
    let (map, model) = model(dtype, 3);
    let mut optimizer = O::new(map.all_vars(), config)?;
    let mut dp = DataParallel::new(comm, &map)?;
    for step in 0..STEPS {
        let loss_of = |number| model.loss(&Rows::new((step * MICRO_BATCHES + number) * ROWS, ROWS, dtype));
        let own = dp.share(MICRO_BATCHES);
        let last = own.end - 1;
        let grads = match way {
            Call::Dealt => dp.backward_each(MICRO_BATCHES, |number| Ok(loss_of(number)?))?,
            Call::Accumulated => {
                for number in own {
                    dp.accumulate(&loss_of(number)?)?;
                }
                dp.synchronise()?
            }
            Call::NoSync => {
                for number in own.start..last {
                    dp.no_sync().backward(&loss_of(number)?)?;
                }
                dp.backward(&loss_of(last)?)?
            }
            Call::Joined => {
                for number in own.start..last {
                    dp.accumulate(loss_of(number)?)?;
                }
                dp.join(Some(&loss_of(last)?))?.expect("every rank has a batch")
            }
        };
        assert_eq!(dp.report().unwrap().micro_batches, MICRO_BATCHES);
        optimizer.step(&grads)?;
    }
    Ok(values(&map))
}

#[rstest]
fn the_same_micro_batches_on_1_2_and_4_ranks_train_the_same_bits(
    #[values(ScheduleKind::Sgd, ScheduleKind::AdamW, ScheduleKind::SavedAdamW)] kind: ScheduleKind,
    #[values(DType::F32, DType::F64, DType::F16, DType::BF16)] dtype: DType,
) {
    let alone = run(1, move |comm| train(comm, Call::Dealt, kind, dtype)).remove(0);
    for way in [Call::Dealt, Call::Accumulated, Call::NoSync, Call::Joined] {
        for ranks in [1, 2, 4] {
            let trained = run(ranks, move |comm| train(comm, way, kind, dtype));
            for (rank, trained) in trained.into_iter().enumerate() {
                assert_eq!(trained, alone, "{way:?} on rank {rank} of {ranks}");
            }
        }
    }
}

#[test]
fn three_ranks_have_the_same_bits_as_each_other() {
    let trained = run(3, |comm| train(comm, Call::Dealt, ScheduleKind::AdamW, DType::F32));
    assert!(trained.iter().all(|other| *other == trained[0]));
    assert_eq!(run(3, |comm| train(comm, Call::Dealt, ScheduleKind::AdamW, DType::F32)), trained);
}

/// Trains with candle alone, with one batch in each step.
fn train_without_dist() -> Named {
    let (map, model) = model(DType::F32, 3);
    let mut optimizer = candle_nn::AdamW::new(map.all_vars(), settings()).unwrap();
    for step in 0..STEPS {
        optimizer.backward_step(&model.loss(&Rows::new(step * 12, 12, DType::F32)).unwrap()).unwrap();
    }
    values(&map)
}

/// Trains with each rank's rows of every batch, with or without a weight.
fn train_divided(comm: Communicator, weighted: bool) -> Named {
    let (map, model) = model(DType::F32, 3);
    let mut optimizer = candle_nn::AdamW::new(map.all_vars(), settings()).unwrap();
    let mut dp = DataParallel::new(comm, &map).unwrap();
    for step in 0..STEPS {
        let own = dp.share(12);
        let loss = model.loss(&Rows::new(step * 12 + own.start, own.len(), DType::F32)).unwrap();
        let grads = if weighted { dp.backward((&loss, own.len() as u64)) } else { dp.backward(&loss) };
        let grads = grads.unwrap();
        optimizer.step(&grads).unwrap();
    }
    values(&map)
}

#[test]
fn one_rank_trains_the_bits_of_candle_alone() {
    assert_eq!(run(1, |comm| train_divided(comm, false)), [train_without_dist()]);
}

/// 12 rows are 12, 6, 4 or 3 rows on each rank, or 3, 3, 2, 2 and 2, which need weights.
#[rstest]
fn a_batch_that_is_divided_by_the_number_of_ranks_trains_the_same_within_rounding(
    #[values(1, 2, 3, 4, 5)] ranks: usize,
) {
    let alone = train_without_dist();
    let trained = run(ranks, |comm| train_divided(comm, true));
    assert!(trained.iter().all(|other| *other == trained[0]), "the ranks agree to the bit");
    for ((name, values), (_, expected)) in trained[0].iter().zip(&alone) {
        for (value, expected) in values.iter().zip(expected) {
            assert!((value - expected).abs() < 1e-4, "{name}: {value} instead of {expected}");
        }
    }
}
