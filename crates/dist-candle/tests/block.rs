//! A candle module as a block: its parameters are its memory, its backward pass is candle's own.

mod small_model;

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use dist_candle::{CandleBlock, CandleError, loss_and_gradient};
use dist_parallel::{Block, Params, Sequence, Values, ValuesMut};
use rstest::rstest;
use small_model::{WIDTH, ids, loss, model, parts, var};

fn bits(values: Values<'_>) -> Vec<u32> {
    let Values::F32(values) = values else { panic!("{values:?}") };
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn going_backward_block_by_block_gives_the_bits_of_the_whole_backward() {
    let mut hidden = ids(0);
    let parts = parts();
    for (_, vars, forward) in &parts {
        hidden = forward(vars, &hidden).unwrap();
    }
    let whole_loss = loss(&hidden, 0).unwrap();
    let whole = whole_loss.backward().unwrap();
    let vars = parts.iter().flat_map(|(_, vars, _)| vars);
    let expected: Vec<_> = vars
        .map(|var| whole.get(var).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap())
        .map(|gradient| gradient.into_iter().map(f32::to_bits).collect::<Vec<_>>())
        .collect();

    let mut model = model();
    let (output, saved) = model.forward(ids(0)).unwrap();
    let (value, gradient) = loss_and_gradient(&output, |output| loss(output, 0)).unwrap();
    assert_eq!(value.to_bits(), whole_loss.to_scalar::<f32>().unwrap().to_bits());
    let mut got = vec![Vec::new(); model.infos().len()];
    let mut order = Vec::new();
    let of_input = model.backward(saved, gradient, &mut |index, values| {
        order.push(index);
        got[index] = bits(values);
        Ok(())
    });
    assert_eq!(got, expected);
    assert!(of_input.unwrap().is_none(), "token numbers have no gradient");
    assert_eq!(order, Vec::from_iter((0..10).rev()), "the last parameters are final first");
}

#[test]
fn two_forwards_before_their_backwards_do_not_disturb_each_other() {
    let gradients = |model: &mut Sequence<Tensor>, saved, gradient| {
        let mut got = Vec::new();
        let mut ready = |_, values: Values<'_>| {
            got.push(bits(values));
            Ok(())
        };
        model.backward(saved, gradient, &mut ready).unwrap();
        got
    };
    let mut model = model();
    let (output, saved) = model.forward(ids(0)).unwrap();
    let (_, gradient) = loss_and_gradient(&output, |output| loss(output, 0)).unwrap();
    let alone = gradients(&mut model, saved, gradient.clone());
    let (_, first) = model.forward(ids(0)).unwrap();
    let (_, second) = model.forward(ids(0)).unwrap();
    assert_eq!(gradients(&mut model, first, gradient.clone()), alone);
    assert_eq!(gradients(&mut model, second, gradient), alone);
}

#[test]
fn parameters_are_read_and_written_where_the_module_keeps_them() {
    let address = |values: Values<'_>| match values {
        Values::F32(values) => values.as_ptr().addr(),
        _ => panic!("{values:?}"),
    };
    let weight = var(&[2, 3], 1);
    let seen_by_module = weight.as_tensor().clone();
    let module = candle_nn::Linear::new(seen_by_module, None);
    let mut block = CandleBlock::new("linear", [("weight", weight)], module).unwrap();
    let mut addresses = Vec::new();
    block.read(0, &mut |values| addresses.push(address(values))).unwrap();
    let mut overwrite = |mut values: ValuesMut<'_>| {
        addresses.push(address(values.as_values()));
        values.copy_from(Values::F32(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])).unwrap();
    };
    block.write(0, &mut overwrite).unwrap();
    block.read(0, &mut |values| addresses.push(address(values))).unwrap();
    assert!(addresses.windows(2).all(|pair| pair[0] == pair[1]), "{addresses:?}");
    let x = Tensor::new(&[[1f32, 1.0, 1.0]], &Device::Cpu).unwrap();
    assert_eq!(block.module().forward(&x).unwrap().to_vec2::<f32>().unwrap(), [[6.0, 15.0]]);
}

#[rstest]
#[case(DType::F32)]
#[case(DType::F64)]
#[case(DType::F16)]
#[case(DType::BF16)]
fn every_float_type_is_handed_out_as_itself(#[case] dtype: DType) {
    let values = Tensor::new(&[1f32, -2.0, 0.5], &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    let scale = Var::from_tensor(&values).unwrap();
    let of_module = scale.as_tensor().clone();
    let mut block = CandleBlock::new("scale", [("by", scale)], move |x: &Tensor| x * &of_module).unwrap();
    let name = dtype.as_str();
    assert_eq!(block.infos()[0].dtype.name(), name);
    let x = Tensor::new(&[2f32, 4.0, 8.0], &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    let (output, saved) = block.forward(x).unwrap();
    let mut reported = Vec::new();
    let mut ready = |index: usize, values: Values<'_>| {
        reported.push((index, values.dtype().name(), values.len()));
        Ok(())
    };
    let of_input = block.backward(saved, output.ones_like().unwrap(), &mut ready).unwrap().unwrap();
    assert_eq!(reported, [(0, name, 3)]);
    assert_eq!(of_input.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap(), [1.0, -2.0, 0.5]);
}

#[test]
fn the_parameters_of_a_var_map_are_sorted_by_name_whatever_its_order() {
    let map = VarMap::new();
    let builder = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let other = candle_nn::linear(2, 2, builder.pp("other")).unwrap();
    let layers = ["c", "a", "b"].map(|name| candle_nn::linear(2, 2, builder.pp("mine").pp(name)).unwrap());
    let module = move |x: &Tensor| layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x));
    let block = CandleBlock::from_var_map("mine", &map, module).unwrap();
    let names: Vec<_> = block.infos().iter().map(|info| info.name.as_str()).collect();
    let expected = ["a.bias", "a.weight", "b.bias", "b.weight", "c.bias", "c.weight"];
    assert_eq!(names, expected.map(|name| format!("mine.{name}")));
    let error = CandleBlock::from_var_map("min", &map, other).unwrap_err();
    assert!(matches!(error, CandleError::NoVariables { block } if block == "min"));
}

#[test]
fn a_variable_with_two_names_has_one_gradient() {
    let shared = var(&[3], 4);
    let (a, b) = (shared.as_tensor().clone(), shared.as_tensor().clone());
    let module = move |x: &Tensor| (x * &a)? + &b;
    let mut block = CandleBlock::new("tied", [("a", shared.clone()), ("b", shared)], module).unwrap();
    assert_eq!(block.infos()[1].same_as, Some(0));
    let x = Tensor::new(&[1f32, 2.0, 3.0], &Device::Cpu).unwrap();
    let (output, saved) = block.forward(x).unwrap();
    let mut reported = Vec::new();
    let mut ready = |index: usize, values: Values<'_>| {
        reported.push((index, bits(values)));
        Ok(())
    };
    block.backward(saved, output.ones_like().unwrap(), &mut ready).unwrap();
    assert_eq!(reported, [(0, [2f32, 3.0, 4.0].map(f32::to_bits).to_vec())]);
}

#[test]
fn a_frozen_parameter_has_no_gradient_but_is_still_read() {
    let (a, b) = (var(&[3], 1), var(&[3], 2));
    let (of_a, of_b) = (a.as_tensor().clone(), b.as_tensor().clone());
    let module = move |x: &Tensor| (x * &of_a)? + &of_b;
    let block = CandleBlock::new("frozen", [("a", a), ("b", b)], module).unwrap();
    let mut block = block.freeze("frozen.a").unwrap();
    let (output, saved) = block.forward(Tensor::new(&[1f32, 2.0, 3.0], &Device::Cpu).unwrap()).unwrap();
    let mut reported = Vec::new();
    let mut ready = |index: usize, _: Values<'_>| {
        reported.push(index);
        Ok(())
    };
    block.backward(saved, output.ones_like().unwrap(), &mut ready).unwrap();
    assert_eq!(reported, [1]);
    let mut read = 0;
    block.read(0, &mut |values| read = values.len()).unwrap();
    assert_eq!(read, 3);
    let error = block.freeze("frozen.c").unwrap_err();
    assert_eq!(error.to_string(), "block frozen has no parameter named frozen.c");
}

#[test]
fn an_operation_without_a_backward_pass_is_an_error_and_not_a_missing_gradient() {
    let (gain, bias) = (var(&[WIDTH], 1), var(&[WIDTH], 2));
    // On contiguous input this takes the fused kernel, which candle cannot go back through.
    let norm = candle_nn::LayerNorm::new(gain.as_tensor().clone(), bias.as_tensor().clone(), 1e-5);
    let mut block = CandleBlock::new("norm", [("gain", gain), ("bias", bias)], norm).unwrap();
    let (output, saved) = block.forward(var(&[2, WIDTH], 3).as_tensor().clone()).unwrap();
    let error = block.backward(saved, output.ones_like().unwrap(), &mut |_, _| Ok(())).unwrap_err();
    assert!(error.to_string().contains("block norm: no gradient reaches the input"), "{error}");
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    let identity = |x: &Tensor| Ok(x.clone());
    let error = CandleBlock::new("b", [("w", var(&[1], 0)), ("w", var(&[1], 1))], identity).unwrap_err();
    assert_eq!(error.to_string(), "block b has two parameters named b.w");
    let integers = Var::from_vec(vec![1u32], 1, &Device::Cpu).unwrap();
    let error = CandleBlock::new("b", [("n", integers)], identity).unwrap_err();
    assert_eq!(error.to_string(), "parameter b.n is of type U32: only f32, f64, f16 and bf16 can be trained");

    let mut block = CandleBlock::new("b", [("w", var(&[2], 0))], identity).unwrap();
    let (_, saved) = block.forward(var(&[2, 3], 1).as_tensor().clone()).unwrap();
    let error = block.backward(saved, ids(0), &mut |_, _| Ok(())).unwrap_err().to_string();
    assert_eq!(error, "block b: the output is ([2, 3], F32), its gradient ([3, 5], U32)");
    assert!(block.read(1, &mut |_| ()).unwrap_err().to_string().contains("number 1"));
    assert!(block.write(1, &mut |_| ()).is_err());

    let error = loss_and_gradient(var(&[2], 0).as_tensor(), |output| Ok(output.clone())).unwrap_err();
    assert_eq!(error.to_string(), "the loss is no single number but [2]");
    assert!(loss_and_gradient(var(&[2], 0).as_tensor(), |output| output.detach().sum_all()).is_err());
}

#[test]
fn an_error_of_the_one_who_takes_the_gradients_ends_the_backward_pass() {
    let mut model = model();
    let (output, saved) = model.forward(ids(0)).unwrap();
    let mut calls = 0;
    let mut ready = |_, _: Values<'_>| {
        calls += 1;
        Err("enough".into())
    };
    let error = model.backward(saved, output.ones_like().unwrap(), &mut ready).unwrap_err();
    assert_eq!((error.to_string(), calls), ("enough".to_owned(), 1));
}
