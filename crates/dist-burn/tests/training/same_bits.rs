//! The same micro-batches give the same bits on any number of ranks.

use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, ModuleOptimizer, RmsPropConfig, SgdConfig};
use burn::tensor::DType;
use dist_burn::{BurnError, DataParallel};
use dist_collectives::Communicator;

use crate::models::{Mlp, bits, cast, device, on_ranks};

const MICRO_BATCHES: usize = 4;

/// Returns the bits of the losses and of the model after some steps of four micro-batches each.
fn train(comm: Communicator, mut optimizer: ModuleOptimizer, dtype: DType) -> Result<Vec<u64>, BurnError> {
    let device = device();
    let mut model = cast(Mlp::new(&device), dtype);
    let mut dp = DataParallel::new(comm, &mut model)?;
    let mut seen = Vec::new();
    for step in 0..5 {
        let mut share = dp.share(MICRO_BATCHES).map(|number| step * MICRO_BATCHES + number);
        let last = share.next_back().expect("four micro-batches are enough for all ranks");
        for number in share {
            dp.accumulate(model.loss(number, &device), &model)?;
        }
        let grads = dp.backward(model.loss(last, &device), &model)?;
        seen.push(u64::from(dp.report().unwrap().loss.to_bits()));
        model = optimizer.step(0.01, model, grads);
    }
    seen.extend(bits(&model));
    Ok(seen)
}

fn optimizers() -> Vec<fn() -> ModuleOptimizer> {
    vec![
        || SgdConfig::new().init(),
        || SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init(),
        || AdamConfig::new().init(),
        || AdamWConfig::new().init(),
        || RmsPropConfig::new().init(),
    ]
}

#[test]
fn the_same_micro_batches_train_the_same_bits_on_1_2_and_4_ranks_with_any_optimizer() {
    for optimizer in optimizers() {
        let alone = on_ranks(1, move |comm| train(comm, optimizer(), DType::F32)).remove(0);
        for ranks in [2, 4] {
            for of_rank in on_ranks(ranks, move |comm| train(comm, optimizer(), DType::F32)) {
                assert_eq!(of_rank, alone, "{ranks} ranks");
            }
        }
    }
}

#[test]
fn half_and_double_types_train_the_same_bits_on_any_number_of_ranks() {
    for dtype in [DType::F64, DType::F16, DType::BF16] {
        let optimizer = || SgdConfig::new().init();
        let alone = on_ranks(1, move |comm| train(comm, optimizer(), dtype)).remove(0);
        for ranks in [2, 4] {
            for of_rank in on_ranks(ranks, move |comm| train(comm, optimizer(), dtype)) {
                assert_eq!(of_rank, alone, "{ranks} ranks of {dtype:?}");
            }
        }
    }
}

#[test]
fn one_process_trains_the_bits_of_burn_alone() {
    let with_dist = on_ranks(1, |comm| {
        let device = device();
        let mut model = Mlp::new(&device);
        let mut optimizer = AdamWConfig::new().init();
        let mut dp = DataParallel::new(comm, &mut model)?;
        for step in 0..5 {
            let grads = dp.backward(model.loss(step, &device), &model)?;
            model = optimizer.step(0.01, model, grads);
        }
        Ok(bits(&model))
    });
    let device = device();
    let mut model = Mlp::new(&device);
    let mut optimizer = AdamWConfig::new().init();
    for step in 0..5 {
        let loss = model.loss(step, &device);
        let grads = burn::optim::GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.01, model, grads);
    }
    assert_eq!(with_dist[0], bits(&model));
}

#[test]
fn dealt_micro_batches_train_the_same_bits_on_1_2_and_4_ranks() {
    let train = |comm| {
        let device = device();
        let mut model = Mlp::new(&device);
        let mut optimizer = AdamWConfig::new().init();
        let mut dp = DataParallel::new(comm, &mut model)?;
        for step in 0..3 {
            let grads = dp.backward_each(4, &model, |number| Ok(model.loss(step * 4 + number, &device)))?;
            model = optimizer.step(0.01, model, grads);
        }
        Ok(bits(&model))
    };
    let alone = on_ranks(1, train).remove(0);
    for ranks in [2, 4] {
        for of_rank in on_ranks(ranks, train) {
            assert_eq!(of_rank, alone, "{ranks} ranks");
        }
    }
}

/// If a batch is divided by the number of ranks, its parts depend on this number, and results differ by rounding.
#[test]
fn a_batch_divided_by_the_number_of_ranks_trains_nearly_the_same() {
    let train = |comm| {
        let device = device();
        let mut model = Mlp::new(&device);
        let mut optimizer = SgdConfig::new().init();
        let mut dp = DataParallel::new(comm, &mut model)?;
        for step in 0..4 {
            let rows = dp.share(9);
            let loss = model.loss_of_rows(step * 9 + rows.start..step * 9 + rows.end, &device);
            let grads = dp.backward((loss, rows.len() as u64), &model)?;
            model = optimizer.step(0.1, model, grads);
        }
        let values = bits(&model).into_iter().map(|bits| f32::from_bits(u32::try_from(bits).unwrap()));
        Ok(values.collect::<Vec<f32>>())
    };
    let alone = on_ranks(1, train).remove(0);
    for ranks in [2, 3, 4] {
        let all = on_ranks(ranks, train);
        assert!(all.iter().all(|of_rank| *of_rank == all[0]), "{ranks} ranks have the same bits");
        for (own, alone) in all[0].iter().zip(&alone) {
            assert!((own - alone).abs() < 1e-5, "{own} is nearly {alone}");
        }
    }
}
