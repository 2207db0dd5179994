//! Variables without gradients: buffers, integers, frozen parameters, and variables with several names.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
use dist_candle::{DataParallel, Variables};
use dist_parallel::Params;
use dist_parallel::checkpoint::{WeightOptions, load_weights};
use dist_parallel::model::BufferSync;
use rstest::rstest;

use crate::model::{Normed, Rows, model, numbers, run, set_all, values, variable};

#[rstest]
fn every_rank_begins_with_the_values_of_rank_0(
    #[values(1, 2, 3, 4)] ranks: usize,
    #[values(DType::F32, DType::F64, DType::F16, DType::BF16)] dtype: DType,
) {
    let expected = values(&model(dtype, 0).0);
    let found = run(ranks, move |comm| {
        let (map, _) = model(dtype, comm.rank() as u64);
        let _dp = DataParallel::new(comm, &map).unwrap();
        values(&map)
    });
    assert_eq!(found, vec![expected; ranks]);
}

/// Returns each rank's running mean after two steps with different batches on each rank, and whether an evaluation
/// changes it.
fn running_means(sync: BufferSync, ranks: usize) -> Vec<Vec<f64>> {
    run(ranks, move |comm| {
        let map = VarMap::new();
        let model = Normed::new(&VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu));
        set_all(&map, 1);
        let variables = Variables::from_var_map(&map).unwrap().sync_buffers(sync);
        let mut dp = DataParallel::with_variables(comm, variables).unwrap();
        let mut optimizer = SGD::new(map.all_vars(), 0.1).unwrap();
        for step in 0..2 {
            let rows = Rows::new(100 * step + 10 * dp.rank(), 4, DType::F32);
            let store = dp.backward(model.loss(&rows, true).unwrap()).unwrap();
            assert!(store.get(&variable(&map, "norm.running_mean")).is_none());
            optimizer.step(&store).unwrap();
        }
        let found = numbers(&variable(&map, "norm.running_mean"));
        model.loss(&Rows::new(0, 4, DType::F32), false).unwrap();
        assert_eq!(numbers(&variable(&map, "norm.running_mean")), found);
        found
    })
}

#[test]
fn running_means_are_synchronised_and_never_averaged_as_gradients() {
    let local = running_means(BufferSync::Local, 3);
    assert!(local[0] != local[1] && local[1] != local[2]);
    let broadcast = running_means(BufferSync::Broadcast, 3);
    assert_eq!(broadcast, vec![local[0].clone(); 3]);
    let mean = running_means(BufferSync::Mean, 3);
    assert!(mean.iter().all(|other| *other == mean[0]));
    assert_ne!(mean[0], local[0]);
}

#[rstest]
fn integers_are_synchronised_as_buffers_are(
    #[values(DType::U8, DType::U32, DType::I16, DType::I32, DType::I64)] dtype: DType,
    #[values(BufferSync::Broadcast, BufferSync::Mean, BufferSync::Local)] sync: BufferSync,
) {
    let found = run(3, move |comm| {
        let (map, model) = model(DType::F32, 3);
        let rank = comm.rank();
        let counter =
            Var::from_tensor(&Tensor::new(&[1_i64, 2], &Device::Cpu).unwrap().to_dtype(dtype).unwrap());
        let counter = counter.unwrap();
        map.data().lock().unwrap().insert("steps".to_owned(), counter.clone());
        let variables = Variables::from_var_map(&map).unwrap().sync_buffers(sync);
        let mut dp = DataParallel::with_variables(comm, variables).unwrap();
        let counted = Tensor::new(&[10 * rank as i64, 7], &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        counter.set(&counted).unwrap();
        let store = dp.backward(model.loss(&Rows::new(0, 2, DType::F32)).unwrap()).unwrap();
        assert!(store.get(&counter).is_none());
        assert_eq!(counter.dtype(), dtype);
        numbers(&counter)
    });
    let expected = match sync {
        BufferSync::Broadcast => [0.0; 3],
        BufferSync::Mean => [10.0; 3],
        BufferSync::Local => [0.0, 10.0, 20.0],
    };
    assert_eq!(found, expected.map(|first| vec![first, 7.0]));
}

#[test]
fn a_frozen_parameter_has_no_gradient_and_is_not_missed() {
    let found = run(2, |comm| {
        let (map, model) = model(DType::F32, 3);
        let variables = Variables::from_var_map(&map).unwrap().freeze("left.weight").unwrap();
        let mut dp = DataParallel::with_variables(comm, variables).unwrap();
        let store = dp.backward(model.loss(&Rows::new(0, 2, DType::F32)).unwrap()).unwrap();
        (store.get(&variable(&map, "left.weight")).is_some(), store.get_ids().count())
    });
    assert_eq!(found, [(false, 4); 2]);
}

#[test]
fn candle_saves_and_opens_files_with_the_names_that_it_has_always_had() {
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old", "new"].map(|name| folder.path().join(name));
    let (before, _) = model(DType::F32, 5);
    before.save(&old).unwrap();
    let expected = values(&before);
    let saved = new.clone();
    let found = run(2, move |comm| {
        let (map, model) = model(DType::F32, 3);
        let mut dp = DataParallel::new(comm, &map).unwrap();
        load_weights(&old, &mut dp, &WeightOptions::new()).unwrap();
        let loaded = values(&map);
        let store = dp.backward(model.loss(&Rows::new(0, 2, DType::F32)).unwrap()).unwrap();
        SGD::new(map.all_vars(), 0.1).unwrap().step(&store).unwrap();
        if dp.rank() == 0 {
            map.save(&saved).unwrap();
        }
        (loaded, values(&map))
    });
    let (mut after, _) = model(DType::F32, 9);
    after.load(&new).unwrap();
    for (loaded, trained) in found {
        assert_eq!(loaded, expected);
        assert_eq!(trained, values(&after));
    }
}

#[test]
fn variables_are_sorted_by_name_and_a_variable_with_two_names_is_one_parameter() {
    let (map, _) = model(DType::F32, 3);
    let shared = variable(&map, "head.weight");
    map.data().lock().unwrap().insert("tied".to_owned(), shared);
    let variables = Variables::from_var_map(&map).unwrap();
    let names: Vec<_> = variables.infos().iter().map(|info| &*info.name).collect();
    assert_eq!(names, ["head.bias", "head.weight", "left.bias", "left.weight", "right.weight", "tied"]);
    assert_eq!(variables.infos()[5].same_as, Some(1));
}
