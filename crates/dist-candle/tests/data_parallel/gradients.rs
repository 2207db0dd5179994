//! The gradients that a backward pass returns: weights, accumulation, clipping, unused parameters, uneven numbers of
//! batches.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use candle_nn::{Optimizer, SGD, VarBuilder};
use dist_candle::{CandleError, DataParallel, Variables};
use dist_parallel::compress::Bf16Hook;
use dist_parallel::own_loop::gradient_norm;
use dist_parallel::{Ddp, DdpOptions};
use dist_testkit::oracle::{self, Reduction};
use rstest::rstest;

use crate::model::{Named, Rows, gradients, model, numbers, run, values, variable};

/// Returns candle's own gradients of a micro-batch of these rows.
fn of_candle(first: usize, len: usize) -> Named {
    let (map, model) = model(DType::F32, 3);
    gradients(&map, &model.loss(&Rows::new(first, len, DType::F32)).unwrap().backward().unwrap())
}

#[rstest]
fn the_gradients_are_the_tree_over_candles_own_gradients(#[values(1, 2, 3, 4)] ranks: usize) {
    let all: Vec<_> = (0..ranks).map(|rank| of_candle(rank * 3, 3)).collect();
    #[expect(clippy::cast_possible_truncation, reason = "they were f32")]
    let as_f32 = |values: &[f64]| values.iter().map(|&value| value as f32).collect::<Vec<f32>>();
    let mean = |index: usize| {
        let each: Vec<Vec<f32>> = all.iter().map(|of_rank| as_f32(&of_rank[index].1)).collect();
        let means = oracle::all_reduce(&each, Reduction::Mean);
        (all[0][index].0.clone(), means.into_iter().map(f64::from).collect::<Vec<_>>())
    };
    let expected: Vec<_> = (0..all[0].len()).map(mean).collect();
    let found = run(ranks, |comm| {
        let (map, model) = model(DType::F32, 3);
        let mut dp = DataParallel::new(comm, &map).unwrap();
        let loss = model.loss(&Rows::new(dp.rank() * 3, 3, DType::F32)).unwrap();
        let store = dp.backward(&loss).unwrap();
        assert_eq!(store.get_ids().count(), 5, "nothing but the parameters");
        assert!(map.all_vars().iter().all(|var| store.get(var).unwrap().shape() == var.shape()));
        gradients(&map, &store)
    });
    assert_eq!(found, vec![expected; ranks]);
}

#[track_caller]
fn assert_close(found: &[(String, Vec<f64>)], expected: &[(String, Vec<f64>)]) {
    assert_eq!(found.len(), expected.len());
    for ((name, found), (_, expected)) in found.iter().zip(expected) {
        for (value, expected) in found.iter().zip(expected) {
            assert!((value - expected).abs() < 1e-5, "{name}: {value} instead of {expected}");
        }
    }
}

/// A loss of weight 0, such as the mean over no tokens, together with other losses.
#[rstest]
fn micro_batches_are_averaged_by_their_weights(#[values(1, 2, 3)] ranks: usize) {
    // Rank r has 2r + 1 rows, so the first r ranks have r² rows together. The mean over all rows is the
    // result for one batch.
    let expected = of_candle(0, ranks * ranks);
    let found = run(ranks, move |comm| {
        let (map, model) = model(DType::F32, 3);
        let mut dp = DataParallel::new(comm, &map).unwrap();
        let rank = dp.rank();
        let (first, rows) = (rank * rank, 2 * rank + 1);
        let loss = |first, rows| model.loss(&Rows::new(first, rows, DType::F32)).unwrap();
        let once = dp.backward((&loss(first, rows), rows as u64)).unwrap();
        let once = (gradients(&map, &once), dp.report().unwrap().loss);
        let nan = (loss(0, 1) * f64::NAN).unwrap();
        dp.accumulate((&nan, 0)).unwrap();
        dp.accumulate((&loss(first, 1), 1)).unwrap();
        // The first row is done, now the rest.
        let (rest, weight) = if rows == 1 { (nan, 0) } else { (loss(first + 1, rows - 1), rows as u64 - 1) };
        let again = dp.backward((&rest, weight)).unwrap();
        let again = (gradients(&map, &again), dp.report().unwrap().loss);
        [once, again]
    });
    let whole = {
        let (_, model) = model(DType::F32, 3);
        model.loss(&Rows::new(0, ranks * ranks, DType::F32)).unwrap().to_scalar::<f32>().unwrap()
    };
    for (gradients, loss) in found.into_iter().flatten() {
        assert_close(&gradients, &expected);
        assert!((loss - whole).abs() < 1e-5, "{loss} instead of {whole}");
    }
}

#[test]
fn ranks_that_run_out_of_batches_do_not_block_and_do_not_count() {
    // Rank r has r + 1 batches, and takes one of them in each step.
    let found = run(3, |comm| {
        let (map, model) = model(DType::F32, 3);
        let mut dp = DataParallel::new(comm, &map).unwrap();
        let rank = dp.rank();
        let mut batches = (0..=rank).map(|batch| Rows::new(10 * rank + batch, 1, DType::F32));
        let mut steps = Vec::new();
        loop {
            let loss = batches.next().map(|rows| model.loss(&rows).unwrap());
            let Some(store) = dp.join(loss.as_ref()).unwrap() else { break };
            steps.push((dp.report().unwrap().micro_batches, gradients(&map, &store)));
        }
        // Training goes on after ranks have accumulated different numbers of micro-batches, one of them none.
        for _ in 0..rank {
            dp.accumulate(model.loss(&Rows::new(5, 1, DType::F32)).unwrap()).unwrap();
        }
        let store = dp.join(None::<&Tensor>).unwrap().unwrap();
        steps.push((dp.report().unwrap().micro_batches, gradients(&map, &store)));
        steps
    });
    assert!(found.iter().all(|steps| *steps == found[0]));
    let mean = |rows: &[usize]| {
        let all: Vec<_> = rows.iter().map(|&row| of_candle(row, 1)).collect();
        let mean = |parameter: usize| {
            let values =
                |value: usize| all.iter().map(|one| one[parameter].1[value]).sum::<f64>() / all.len() as f64;
            (all[0][parameter].0.clone(), (0..all[0][parameter].1.len()).map(values).collect())
        };
        (0..all[0].len()).map(mean).collect::<Vec<_>>()
    };
    let expected: [&[usize]; 4] = [&[0, 10, 20], &[11, 21], &[22], &[5, 5, 5]];
    for ((micro_batches, gradients), rows) in found[0].iter().zip(expected) {
        assert_eq!(*micro_batches, rows.len());
        assert_close(gradients, &mean(rows));
    }
    assert_eq!(found[0].len(), expected.len());
}

#[rstest]
fn gradients_are_clipped_to_an_exact_norm_and_other_tensors_of_theirs_are_left_alone(
    #[values(DType::F32, DType::F64, DType::F16, DType::BF16)] dtype: DType,
) {
    let clip = move |ranks: usize| {
        run(ranks, move |comm| {
            let (map, model) = model(dtype, 3);
            let mut dp = DataParallel::new(comm, &map).unwrap();
            let loss_of = |number| Ok(model.loss(&Rows::new(number * 3, 3, dtype))?);
            let mut store = dp.backward_each(4, loss_of).unwrap();
            let name = "head.weight";
            let before = store.get(&variable(&map, name)).unwrap().clone();
            let seen = numbers(&before);
            let unclipped = dp.clip_gradients(&mut store, 1e6).unwrap();
            assert_eq!(numbers(store.get(&variable(&map, name)).unwrap()), seen, "it is below");
            let max = unclipped / 3.0;
            assert_eq!(dp.clip_gradients(&mut store, max).unwrap(), unclipped);
            assert_eq!(numbers(&before), seen);
            let clipped = dp.gradient_norm(&store).unwrap();
            let tolerance = if matches!(dtype, DType::F16 | DType::BF16) { 1e-2 } else { 1e-6 };
            assert!((clipped / max - 1.0).abs() < tolerance, "{clipped} instead of {max}");
            (unclipped, gradients(&map, &store))
        })
    };
    let alone = clip(1);
    for ranks in [2, 4] {
        assert_eq!(clip(ranks), vec![alone[0].clone(); ranks]);
    }
}

#[test]
fn gradients_are_compressed_by_a_hook() {
    let found = run(3, |comm| {
        let (map, model) = model(DType::F32, 3);
        let variables = Variables::from_var_map(&map).unwrap();
        let ddp =
            Ddp::with_hook(comm, variables, DdpOptions::default(), Box::new(Bf16Hook::default())).unwrap();
        let mut dp = DataParallel::from(ddp);
        let store = dp.backward(model.loss(&Rows::new(3 * dp.rank(), 3, DType::F32)).unwrap()).unwrap();
        let (comm, variables) = dp.into_parts();
        assert_eq!((comm.world_size(), variables.iter().count()), (3, 5));
        gradients(&map, &store)
    });
    assert!(found.iter().all(|other| *other == found[0]));
    let expected = of_candle(0, 9);
    for ((name, values), (_, expected)) in found[0].iter().zip(&expected) {
        for (value, expected) in values.iter().zip(expected) {
            assert!((value - expected).abs() < 2e-2, "{name}: {value} instead of {expected}");
        }
    }
    assert_ne!(found[0], expected, "nothing was rounded");
}

#[test]
fn the_norm_covers_all_gradients_as_one_vector_of_any_types() {
    let parts = [dist_parallel::Values::F32(&[3.0, 4.0]), dist_parallel::Values::F64(&[12.0, 1e-9])];
    assert_eq!(gradient_norm(parts), 13.0);
    assert!(gradient_norm([dist_parallel::Values::F32(&[f32::NAN])]).is_nan());
    assert_eq!(gradient_norm([]), 0.0);
}

/// Trains a model of several parts. Each rank uses one part, and no rank uses the last one.
fn used_in_part(unused: bool, ranks: usize) -> Vec<Result<Named, CandleError>> {
    run(ranks, move |comm| {
        let map = candle_nn::VarMap::new();
        let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let part = |name: &str| vars.get_with_hints(2, name, candle_nn::init::ONE).unwrap();
        let parts = ["a", "b", "c", "d"].map(part);
        let variables = Variables::from_var_map(&map).unwrap();
        let variables = if unused { variables.all_may_be_unused() } else { variables };
        // On one rank the other may fail before this one has begun.
        let mut dp = DataParallel::with_variables(comm, variables)?;
        let loss = (&parts[dp.rank()] * 4.0).unwrap().sum_all().unwrap();
        let store: GradStore = dp.backward(&loss)?;
        let unused: Vec<_> = dp.without_gradient().into_iter().map(str::to_owned).collect();
        let found = gradients(&map, &store);
        assert_eq!(unused.len() + found.len(), 4);
        SGD::new(map.all_vars(), 1.0).unwrap().step(&store).unwrap();
        let changed: Vec<_> = values(&map).into_iter().filter(|(_, values)| values[0] != 1.0).collect();
        assert_eq!(changed.len(), found.len(), "parameters without a gradient do not change");
        Ok(found)
    })
}

#[test]
fn a_parameter_that_only_some_ranks_use_counts_as_zero_on_the_others() {
    let mean =
        |name: &str| (name.to_owned(), vec![4.0 / 3.0_f32; 2].into_iter().map(f64::from).collect::<Vec<_>>());
    for found in used_in_part(true, 3) {
        assert_eq!(found.unwrap(), ["a", "b", "c"].map(mean));
    }
}

#[test]
fn a_parameter_without_a_gradient_is_an_error_that_names_all_of_them_unless_it_may_be_unused() {
    let errors = used_in_part(false, 1);
    let Err(CandleError::NoGradient { place, parameters }) = &errors[0] else { panic!("{errors:?}") };
    assert_eq!((&**place, &parameters[..]), ("the model", &["b", "c", "d"].map(str::to_owned)[..]));
    // On several ranks one of them fails first, and the error of the others names the reason.
    for error in used_in_part(false, 2) {
        let error = error.unwrap_err();
        let text = dist_collectives::transport::Chain(&error).to_string();
        assert!(text.contains("no gradient reaches"), "{text}");
    }
}
