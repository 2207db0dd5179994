//! Means, weights, accumulation, uneven numbers of micro-batches, clipping.

use burn::nn::Linear;
use burn::nn::LinearConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use dist_burn::DataParallel;

use crate::models::{Mixed, Mlp, bits, device, on_ranks, with_values};

/// Returns a model with one parameter.
fn line(device: &Device) -> Linear {
    LinearConfig::new(1, 1).with_bias(false).init(device)
}

/// Returns a loss whose gradient is this number.
fn loss(model: &Linear, gradient: f32, device: &Device) -> Tensor<1> {
    model.forward(Tensor::<2>::from_data([[gradient]], device)).mean()
}

fn gradient(model: &Linear, gradients: &GradientsParams) -> f32 {
    gradients.get::<2>(model.weight.id).unwrap().into_scalar::<f32>()
}

#[test]
fn every_rank_begins_with_rank_0s_values_and_gets_the_mean() {
    let seen = on_ranks(3, |comm| {
        let device = device();
        let rank = comm.rank() as f32;
        let mut model = line(&device);
        model.weight = burn::module::Param::from_data([[rank + 1.0]], &device);
        let mut dp = DataParallel::new(comm, &mut model)?;
        assert_eq!(model.weight.val().into_scalar::<f32>(), 1.0);
        assert!(model.weight.is_require_grad());
        let grads = dp.backward(loss(&model, rank * 3.0, &device), &model)?;
        assert_eq!(dp.report().unwrap().micro_batches, 3);
        Ok((gradient(&model, &grads), dp.report().unwrap().loss))
    });
    assert_eq!(seen, [(3.0, 3.0); 3]);
}

#[test]
fn micro_batches_are_averaged_by_their_weights() {
    let seen = on_ranks(2, |comm| {
        let device = device();
        let rank = comm.rank();
        let mut model = line(&device);
        let mut dp = DataParallel::new(comm, &mut model)?;
        let (value, weight) = [(1.0, 3), (5.0, 1)][rank];
        let grads = dp.backward((loss(&model, value, &device), weight), &model)?;
        // A micro-batch of weight 0 is ignored, even if its loss is NaN.
        let (value, weight) = [(f32::NAN, 0), (5.0, 2)][rank];
        let second = dp.backward((loss(&model, value, &device), weight), &model)?;
        Ok((gradient(&model, &grads), gradient(&model, &second)))
    });
    assert_eq!(seen, [(2.0, 5.0); 2]);
}

#[test]
fn accumulated_micro_batches_are_in_the_next_mean() {
    let seen = on_ranks(2, |comm| {
        let device = device();
        let mut model = line(&device);
        let mut dp = DataParallel::new(comm, &mut model)?;
        dp.accumulate(loss(&model, 1.0, &device), &model)?;
        dp.no_sync().backward(loss(&model, 2.0, &device), &model)?;
        let grads = dp.backward(loss(&model, 6.0, &device), &model)?;
        let first = (gradient(&model, &grads), dp.report().unwrap().micro_batches);
        dp.accumulate(loss(&model, 4.0, &device), &model)?;
        let grads = dp.synchronise(&model)?;
        Ok((first, gradient(&model, &grads)))
    });
    assert_eq!(seen, [((3.0, 6), 4.0); 2]);
}

#[test]
fn gradients_that_were_computed_already_are_averaged() {
    let seen = on_ranks(2, |comm| {
        let device = device();
        let own = comm.rank() as f32 * 2.0;
        let mut model = line(&device);
        let mut dp = DataParallel::new(comm, &mut model)?;
        let own_grads = GradientsParams::from_grads(loss(&model, own, &device).backward(), &model);
        let grads = dp.average(own_grads, &model)?;
        assert!(dp.report().unwrap().loss.is_nan());
        Ok(gradient(&model, &grads))
    });
    assert_eq!(seen, [1.0; 2]);
}

#[test]
fn ranks_that_run_out_of_batches_join_the_others() {
    let seen = on_ranks(3, |comm| {
        let device = device();
        // Rank 0 has no batch, rank 1 has one, rank 2 has two.
        let mut batches = (0..comm.rank()).map(|batch| batch as f32 * 2.0 + 1.0);
        let mut model = line(&device);
        let mut dp = DataParallel::new(comm, &mut model)?;
        let mut optimizer = SgdConfig::new().init();
        let mut seen = Vec::new();
        loop {
            let loss = batches.next().map(|batch| loss(&model, batch, &device));
            let Some(grads) = dp.join(loss, &model)? else { break };
            seen.push((gradient(&model, &grads), dp.report().unwrap().micro_batches));
            model = optimizer.step(0.1, model, grads);
        }
        Ok((seen, bits(&model)))
    });
    assert_eq!(seen[0].0, [(1.0, 2), (3.0, 1)]);
    assert!(seen.iter().all(|of_rank| *of_rank == seen[0]));
}

#[test]
fn gradients_are_clipped_by_their_exact_norm() {
    let seen = on_ranks(2, |comm| {
        let device = device();
        let mut model = Mlp::new(&device);
        let mut dp = DataParallel::new(comm, &mut model)?;
        let mut grads = dp.backward(model.loss(dp.rank(), &device), &model)?;
        let norm = dp.gradient_norm(&grads, &model)?;
        assert_eq!(dp.clip_gradients(&mut grads, &model, 2.0 * norm)?, norm, "nothing is to be clipped");
        assert_eq!(dp.gradient_norm(&grads, &model)?, norm);
        let id = model.hidden.weight.id;
        let before = grads.get::<2>(id).unwrap().try_into_vec_as::<f32>().unwrap();
        assert_eq!(dp.clip_gradients(&mut grads, &model, 0.01)?, norm);
        let clipped = dp.gradient_norm(&grads, &model)?;
        assert!((clipped - 0.01).abs() < 1e-8, "{clipped}");
        let after = grads.get::<2>(id).unwrap().try_into_vec_as::<f32>().unwrap();
        #[expect(clippy::cast_possible_truncation, reason = "as gradients are multiplied")]
        let factor = (0.01 / norm) as f32;
        assert!(
            before.iter().zip(&after).all(|(before, after)| (before * factor).to_bits() == after.to_bits())
        );
        assert_eq!(grads.len(), 4);
        let squares: f64 = before.iter().map(|value| f64::from(*value).powi(2)).sum();
        assert!(squares.sqrt() <= norm);
        Ok(norm.to_bits())
    });
    assert_eq!(seen[0], seen[1]);
}

#[test]
fn unused_parameters_have_no_gradient_and_do_not_change() {
    on_ranks(2, |comm| {
        let device = device();
        let mut model = Mixed::new(&device);
        let mut dp = DataParallel::new(comm, &mut model)?;
        let mut optimizer = SgdConfig::new().init();
        let unused = bits(model.unused.as_ref().unwrap());
        for step in 0..2 {
            let grads = dp.backward(model.loss(step, &device), &model)?;
            assert_eq!(dp.without_gradient(), ["unused.weight", "unused.bias"]);
            assert_eq!(grads.len(), 6);
            model = optimizer.step(0.1, model, grads);
        }
        assert_eq!(bits(model.unused.as_ref().unwrap()), unused);
        Ok(())
    });
}

#[test]
fn a_parameter_that_only_one_rank_uses_is_averaged_with_zeros() {
    let seen = on_ranks(2, |comm| {
        let device = device();
        let rank = comm.rank();
        let mut model = vec![line(&device), line(&device)];
        let mut dp = DataParallel::new(comm, &mut model)?;
        let grads = dp.backward(loss(&model[rank], 2.0, &device), &model)?;
        Ok((gradient(&model[0], &grads), gradient(&model[1], &grads)))
    });
    assert_eq!(seen, [(1.0, 1.0); 2]);
}

#[test]
fn frozen_parameters_stay_as_they_are() {
    on_ranks(2, |comm| {
        let device = device();
        let mut model = Mlp::new(&device);
        model.hidden = burn::module::Module::no_grad(model.hidden);
        let frozen = bits(&model.hidden);
        let mut dp = DataParallel::new(comm, &mut model)?;
        let mut optimizer = SgdConfig::new().init();
        let grads = dp.backward(model.loss(0, &device), &model)?;
        assert_eq!((grads.len(), dp.without_gradient().len()), (2, 0));
        model = optimizer.step(0.1, model, grads);
        assert_eq!(bits(&model.hidden), frozen);
        assert!(!model.hidden.weight.is_require_grad());
        Ok(())
    });
}

#[test]
fn a_model_without_parameters_or_with_empty_ones_is_trained() {
    on_ranks(2, |comm| {
        let device = device();
        let mut model = with_values(vec![line(&device)]);
        model.push(LinearConfig::new(1, 0).with_bias(false).init(&device));
        let mut dp = DataParallel::new(comm, &mut model)?;
        let grads = dp.backward(loss(&model[0], 1.0, &device), &model)?;
        assert_eq!(gradient(&model[0], &grads), 1.0);
        Ok(())
    });
}
