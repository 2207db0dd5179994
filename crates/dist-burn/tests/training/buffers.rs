//! Running statistics and other tensors that are not trained.

use burn::module::{Module, Param, ParamId};
use burn::optim::SgdConfig;
use burn::tensor::{DType, Tensor, TensorData};
use dist_burn::{BurnError, DataParallel, ModuleParams};
use dist_parallel::model::BufferSync;
use dist_parallel::{Params, ValuesMut};

use crate::models::{Mixed, device, named_bits, on_ranks};

fn running_mean(model: &Mixed) -> Vec<f32> {
    model.norm.running_mean.value_sync().try_into_vec_as::<f32>().unwrap()
}

/// Returns the running means of two ranks in a step, before and after the ranks synchronised them.
fn running_means(sync: Option<BufferSync>) -> Vec<[Vec<f32>; 2]> {
    on_ranks(2, move |comm| {
        let device = device();
        let mut model = Mixed::new(&device);
        let params = ModuleParams::new(&model)?;
        let params = match sync {
            Some(sync) => params.sync_buffers(sync),
            None => params,
        };
        let mut dp = DataParallel::with_params(comm, &mut model, params)?;
        let mut optimizer = SgdConfig::new().init();
        let loss = model.loss(dp.rank(), &device);
        let before = running_mean(&model);
        let grads = dp.backward(loss, &model)?;
        let model = optimizer.step(0.1, model, grads);
        // Evaluation uses them.
        let evaluated = model.valid().norm.running_mean.value().try_into_vec_as::<f32>().unwrap();
        assert_eq!(evaluated, running_mean(&model));
        Ok([before, running_mean(&model)])
    })
}

#[test]
fn running_statistics_are_those_of_rank_0_or_follow_the_rule() {
    let seen = running_means(None);
    assert_ne!(seen[0][0], seen[1][0], "ranks have other samples");
    assert_eq!([&seen[0][1], &seen[1][1]], [&seen[0][0]; 2]);

    let seen = running_means(Some(BufferSync::Mean));
    let mean: Vec<f32> = seen[0][0].iter().zip(&seen[1][0]).map(|(a, b)| (a + b) / 2.0).collect();
    assert_eq!([&seen[0][1], &seen[1][1]], [&mean; 2]);

    let seen = running_means(Some(BufferSync::Local));
    assert_eq!([&seen[0][1], &seen[1][1]], [&seen[0][0], &seen[1][0]]);
}

#[test]
fn one_buffer_can_be_synchronised_in_another_way() {
    let model = Mixed::new(&device());
    let params = ModuleParams::new(&model).unwrap();
    let params = params.sync_buffer("norm.running_var", BufferSync::Mean).unwrap();
    let buffers = params.infos().iter().filter_map(|info| Some((&*info.name, info.buffer?)));
    let expected = [("norm.running_mean", BufferSync::Broadcast), ("norm.running_var", BufferSync::Mean)];
    assert_eq!(buffers.collect::<Vec<_>>(), expected);
    let params = ModuleParams::new(&model).unwrap();
    assert!(params.sync_buffer("norm.gamma", BufferSync::Mean).is_err());
}

#[test]
fn tensors_are_named_by_their_fields_and_distinguished() {
    let model = Mixed::new(&device());
    let params = ModuleParams::new(&model).unwrap();
    let looks: Vec<String> = params.infos().iter().map(ToString::to_string).collect();
    assert_eq!(
        looks,
        [
            "table.weight [10, 4] f32",
            "norm.gamma [4] f32",
            "norm.beta [4] f32",
            "norm.running_mean [4] f32, a buffer (Broadcast)",
            "norm.running_var [4] f32, a buffer (Broadcast)",
            "heads.0.weight [4, 2] f32",
            "heads.0.bias [2] f32",
            "heads.1.weight [4, 2] f32",
            "unused.weight [2, 2] f32",
            "unused.bias [2] f32",
            "order [3] f64, frozen",
            "mask [2] f64, frozen",
        ]
    );
}

#[test]
fn integers_booleans_and_running_statistics_are_rank_0s_at_the_beginning() {
    let seen = on_ranks(2, |comm| {
        let device = device();
        let mut model = Mixed::new(&device);
        if comm.rank() == 1 {
            model.order = Param::initialized(ParamId::new(), Tensor::from_data([7, 8, 9], &device));
            model.mask = Param::initialized(ParamId::new(), Tensor::from_data([false, true], &device));
            drop(model.loss(5, &device));
        }
        let (id, dtype) = (model.order.id, model.order.dtype());
        let _dp = DataParallel::new(comm, &mut model)?;
        assert_eq!(
            (model.order.id, model.order.dtype()),
            (id, dtype),
            "numbers and types stay this process's own"
        );
        assert_eq!(model.order.val().try_into_vec_as::<i64>().unwrap(), [3, 1, 2]);
        assert_eq!(model.mask.val().try_into_vec_as::<bool>().unwrap(), [true, false]);
        Ok(named_bits(&model))
    });
    assert_eq!(seen[0], seen[1]);
}

#[test]
fn values_that_are_not_integers_or_booleans_are_rejected() {
    let model = Mixed::new(&device());
    for (name, value) in [("order", 0.5), ("order", f64::NAN), ("order", 1e300), ("mask", 2.0)] {
        let mut params = ModuleParams::new(&model).unwrap();
        let index = params.infos().iter().position(|info| info.name == name).unwrap();
        let mut write = |values: ValuesMut<'_>| match values {
            ValuesMut::F64(values) => values[0] = value,
            _ => panic!("integers and booleans are carried as f64"),
        };
        params.write(index, &mut write).unwrap();
        let error = params.install(model.clone()).unwrap_err();
        assert!(matches!(&error, BurnError::Inexact { name: found } if found == name), "{error}");
    }
    let mut large = model;
    large.order = Param::initialized(
        ParamId::new(),
        Tensor::from_data(TensorData::new(vec![(1_i64 << 53) + 1], [1]), (&device(), DType::I64)),
    );
    let error = ModuleParams::new(&large).unwrap_err();
    assert!(matches!(error, BurnError::Inexact { .. }), "{error}");
}
