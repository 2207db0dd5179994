//! A candle module as a block: its parameters are the module's memory, and its backward pass is candle's.

mod small_model;

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use dist_candle::{CandleBlock, CandleError, SequenceBuilder, backward_from, loss_and_gradient};
use dist_collectives::Communicator;
use dist_parallel::checkpoint::{Checkpoints, WeightOptions, load_weights};
use dist_parallel::model::BufferSync;
use dist_parallel::optim::{AdamW, AdamWOptions};
use dist_parallel::{Block, BoxError, Ddp, DdpOptions, Error, Params, Sequence, Values, ValuesMut};
use dist_transport::sim;
use rstest::rstest;
use small_model::{VOCABULARY, WIDTH, ids, loss, model, parts, tensors, var};

fn bits(values: Values<'_>) -> Vec<u32> {
    let Values::F32(values) = values else { panic!("{values:?}") };
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn going_backward_block_by_block_gives_the_bits_of_the_whole_backward() {
    let mut hidden = ids(0);
    let parts = parts();
    for (_, vars, forward) in &parts {
        hidden = forward(&tensors(vars).unwrap(), &hidden).unwrap();
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
fn the_parameters_of_a_var_map_are_sorted_by_name() {
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
    assert_eq!(
        error.to_string(),
        "block min has no variables: the map has none whose name begins with \"min.\""
    );
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
    // On contiguous input this uses the fused kernel, which has no backward pass.
    let norm = candle_nn::LayerNorm::new(gain.as_tensor().clone(), bias.as_tensor().clone(), 1e-5);
    let mut block = CandleBlock::new("norm", [("gain", gain), ("bias", bias)], norm).unwrap();
    let (output, saved) = block.forward(var(&[2, WIDTH], 3).as_tensor().clone()).unwrap();
    let error = block.backward(saved, output.ones_like().unwrap(), &mut |_, _| Ok(())).unwrap_err();
    assert!(error.to_string().contains("block norm: no gradient reaches the input"), "{error}");
}

/// Returns x + scale · norm(x), with different norms. The first term gives x a gradient even if the norm has
/// no backward pass.
fn residual(
    norm: impl Fn(&Tensor, &Tensor, &Tensor) -> candle_core::Result<Tensor> + Send,
) -> CandleBlock<impl Module + Send> {
    let vars = [("gain", 1), ("bias", 2), ("scale", 3)].map(|(name, seed)| (name, var(&[WIDTH], seed)));
    let [gain, bias, scale] = vars.each_ref().map(|(_, var)| var.as_tensor().clone());
    let module = move |x: &Tensor| x + norm(x, &gain, &bias)?.broadcast_mul(&scale)?;
    CandleBlock::new("layer", vars, module).expect("a valid block")
}

/// Returns the result of a backward pass, and the gradients that it reported.
fn backward(block: &mut CandleBlock<impl Module + Send>) -> (Result<Option<Tensor>, BoxError>, Vec<usize>) {
    let (output, saved) = block.forward(var(&[2, WIDTH], 3).as_tensor().clone()).expect("shapes that fit");
    let mut reported = Vec::new();
    let mut ready = |index: usize, _: Values<'_>| {
        reported.push(index);
        Ok(())
    };
    let result = block.backward(saved, output.ones_like().expect("a tensor in memory"), &mut ready);
    (result, reported)
}

/// Returns the gradients that a backward pass reports.
fn reported(block: &mut CandleBlock<impl Module + Send>) -> (Result<(), String>, Vec<usize>) {
    let (result, reported) = backward(block);
    (result.map(drop).map_err(|error| error.to_string()), reported)
}

#[test]
fn a_norm_without_a_backward_pass_beside_a_residual_connection_is_an_error() {
    let slow =
        |x: &Tensor, gain: &Tensor, bias: &Tensor| candle_nn::ops::layer_norm_slow(x, gain, bias, 1e-5);
    assert_eq!(reported(&mut residual(slow)), (Ok(()), vec![2, 1, 0]));
    let fused = |x: &Tensor, gain: &Tensor, bias: &Tensor| candle_nn::ops::layer_norm(x, gain, bias, 1e-5);
    let (error, seen) = reported(&mut residual(fused));
    let error = error.unwrap_err();
    assert!(error.starts_with("block layer: no gradient reaches layer.gain, layer.bias. Either"), "{error}");
    assert!(error.contains("say so with may_be_unused") && error.contains("layer_norm_slow"), "{error}");
    assert!(seen.is_empty(), "the error comes before any gradient leaves the block");
}

/// Returns a module with two parameters. An operation of candle without a backward pass hides the gradient of
/// one of them.
fn cut_off(
    operation: impl Fn(&Tensor) -> candle_core::Result<Tensor> + Send,
) -> CandleBlock<impl Module + Send> {
    let vars = [("seen", var(&[4], 1)), ("lost", var(&[4], 2)), ("lost_too", var(&[4], 3))];
    let [seen, lost, lost_too] = vars.each_ref().map(|(_, var)| var.as_tensor().clone());
    let module = move |x: &Tensor| {
        let inner = x.broadcast_mul(&lost)?.broadcast_add(&lost_too)?.reshape((1, 1, (), 4))?;
        x.broadcast_mul(&seen)? + operation(&inner)?.reshape(x.shape())?
    };
    CandleBlock::new("layer", vars, module).expect("a valid block")
}

#[test]
fn every_operation_of_candle_without_a_backward_pass_is_named_beside_the_parameters_that_it_cuts_off() {
    use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
    type Operation = Box<dyn Fn(&Tensor) -> candle_core::Result<Tensor> + Send>;
    let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).expect("some ones");
    let (scale, half) = (ones(&[4]), ones(&[32, 2]));
    let weight = QTensor::quantize(&ones(&[32, 32]), GgmlDType::Q8_0).expect("a matrix");
    let quantized = QMatMul::from_qtensor(weight).expect("a matrix");
    let (by, cos) = ((scale.clone(), scale.clone(), scale), (half.clone(), half.clone(), half));
    let operations: [(&str, Operation); 7] = [
        ("layer_norm", Box::new(move |x| candle_nn::ops::layer_norm(x, &by.0, &by.0, 1e-5))),
        ("rms_norm", Box::new(move |x| candle_nn::ops::rms_norm(x, &by.1, 1e-5))),
        ("softmax_last_dim", Box::new(candle_nn::ops::softmax_last_dim)),
        ("rope", Box::new(move |x| candle_nn::rotary_emb::rope(x, &cos.0, &cos.0))),
        ("rope_i", Box::new(move |x| candle_nn::rotary_emb::rope_i(x, &cos.1, &cos.1))),
        (
            "rope_thd",
            Box::new(move |x| {
                candle_nn::rotary_emb::rope_thd(&x.transpose(1, 2)?.contiguous()?, &cos.2, &cos.2)
            }),
        ),
        ("quantized", Box::new(move |x| quantized.forward(&x.reshape((1, 32))?))),
    ];
    let backward = |name: &str, operation: Operation| {
        let mut block = cut_off(operation);
        let (output, saved) = block.forward(var(&[8, 4], 3).as_tensor().clone()).expect(name);
        block.backward(saved, output.ones_like().expect(name), &mut |_, _| Ok(()))
    };
    for (name, operation) in operations {
        let error = backward(name, operation).expect_err(name);
        let Some(error @ CandleError::NoGradient { parameters, .. }) = error.downcast_ref() else {
            panic!("{name}: {error}")
        };
        assert_eq!(parameters, &["layer.lost", "layer.lost_too"], "{name}");
        let text = error.to_string();
        assert!(text.contains("layer.lost, layer.lost_too") && text.contains(name), "{text}");
    }
    let half = ones(&[32, 2]);
    let others: [(&str, Operation); 2] = [
        ("softmax", Box::new(|x| candle_nn::ops::softmax(x, 3))),
        ("rope_slow", Box::new(move |x| candle_nn::rotary_emb::rope_slow(x, &half, &half))),
    ];
    for (name, operation) in others {
        assert!(backward(name, operation).is_ok(), "{name}");
    }
}

#[test]
fn a_block_for_a_whole_model_keeps_the_names_of_its_variables_and_opens_old_files() {
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old", "new"].map(|name| folder.path().join(name));
    let model = |seed: u64| {
        let map = VarMap::new();
        let builder = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let hidden = candle_nn::linear(2, 3, builder.pp("hidden")).unwrap();
        let scale = builder.get_with_hints(3, "scale", candle_nn::init::ONE).unwrap();
        for (index, var) in map.all_vars().iter().enumerate() {
            let values = self::var(var.dims(), seed + index as u64);
            var.set(values.as_tensor()).unwrap();
        }
        let module = move |x: &Tensor| hidden.forward(x)?.broadcast_mul(&scale);
        (CandleBlock::from_var_map("", &map, module).unwrap(), map)
    };
    let values = |map: &VarMap| {
        let data = map.data().lock().unwrap();
        let flat = |tensor: &Var| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let mut all: Vec<_> = data.iter().map(|(name, var)| (name.clone(), flat(var))).collect();
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        all
    };
    let (block, saved) = model(1);
    let names: Vec<_> = block.infos().iter().map(|info| &*info.name).collect();
    assert_eq!(names, ["hidden.bias", "hidden.weight", "scale"]);
    saved.save(&old).unwrap();
    let expected = values(&saved);
    let outcome = sim::run(0, 1, move |transport| {
        let (block, map) = model(50);
        let mut ddp = Ddp::new(Communicator::new(transport), block, DdpOptions::default()).unwrap();
        load_weights(&old, &mut ddp, &WeightOptions::new()).unwrap();
        let mut checkpoints = Checkpoints::at(old.with_file_name("checkpoints"));
        checkpoints.save(&mut ddp, None, 1).unwrap();
        checkpoints.consolidate(None, &new).unwrap();
        let (_, mut of_candle) = model(90);
        of_candle.load(&new).unwrap();
        [values(&map), values(&of_candle)]
    });
    assert_eq!(outcome.results[0], [expected.clone(), expected]);
    let error = CandleBlock::from_var_map("", &VarMap::new(), |x: &Tensor| Ok(x.clone())).unwrap_err();
    assert_eq!(error.to_string(), "the model has no variables: the map has none whose name begins with \"\"");
}

#[test]
fn a_parameter_that_may_be_unused_may_have_no_gradient_and_another_may_not() {
    let block = || {
        let (gain, expert) = (var(&[WIDTH], 1), var(&[WIDTH], 2));
        let (of_all, of_expert) = (gain.as_tensor().clone(), expert.as_tensor().clone());
        // The expert gets only inputs of more than one row.
        let module = move |x: &Tensor| match x.dim(0)? {
            1 => x.broadcast_mul(&of_all),
            _ => x.broadcast_mul(&of_all)?.broadcast_mul(&of_expert),
        };
        CandleBlock::new("layer", [("gain", gain), ("expert", expert)], module).expect("a valid block")
    };
    let mut blocks = [block(), block().may_be_unused("layer.expert").expect("a parameter")];
    let mut forward_and_back = |number: usize, rows: usize| {
        let block = &mut blocks[number];
        let (output, saved) = block.forward(var(&[rows, WIDTH], 3).as_tensor().clone()).unwrap();
        let mut reported = Vec::new();
        let mut ready = |index: usize, _: Values<'_>| {
            reported.push(index);
            Ok(())
        };
        let result = block.backward(saved, output.ones_like().unwrap(), &mut ready);
        result.map(|_| reported).map_err(|error| error.to_string())
    };
    assert_eq!(forward_and_back(0, 2), Ok(vec![1, 0]));
    assert!(forward_and_back(0, 1).unwrap_err().contains("no gradient reaches layer.expert"));
    assert_eq!(forward_and_back(1, 2), Ok(vec![1, 0]));
    assert_eq!(forward_and_back(1, 1), Ok(vec![0]));
    // Each name of a variable refers to it.
    let unused = || {
        let of_b = var(&[1], 0);
        let names = ["w", "again"].map(|name| (name, of_b.clone()));
        CandleBlock::new("b", names, |x: &Tensor| Ok(x.clone())).expect("a valid block")
    };
    assert!(reported(&mut unused()).0.unwrap_err().contains("no gradient reaches b.w"));
    assert_eq!(reported(&mut unused().may_be_unused("b.again").unwrap()), (Ok(()), vec![]));
    let error = unused().may_be_unused("b.v").unwrap_err();
    assert_eq!(error.to_string(), "block b has no parameter named b.v");
}

type Uses = fn(&Tensor, &Var) -> candle_core::Result<Tensor>;

/// Runs the backward pass of a block with one parameter, whose module also uses a variable or constant
/// outside of the block.
fn backward_with(foreign: Var, uses: Uses) -> Result<Vec<usize>, String> {
    let own = var(&[WIDTH], 1);
    let gain = own.as_tensor().clone();
    let module = move |x: &Tensor| uses(&x.broadcast_mul(&gain)?, &foreign);
    let mut block = CandleBlock::new("odd", [("gain", own)], module).expect("a valid block");
    let (result, reported) = backward(&mut block);
    match result {
        Ok(of_input) => assert!(of_input.is_some()),
        Err(error) => {
            assert!(matches!(error.downcast_ref(), Some(CandleError::UnlistedVariable { .. })), "{error}");
            assert!(reported.is_empty(), "the error comes before any gradient leaves the block");
            return Err(error.to_string());
        }
    }
    Ok(reported)
}

#[test]
fn a_variable_that_the_block_does_not_list_is_an_error_and_not_a_lost_gradient() {
    let cases: [(&str, Uses); 6] = [
        ("an operand", |x, var| x * var.as_tensor()),
        ("one row", |x, var| x.broadcast_add(&var.get(0)?)),
        ("transposed", |x, var| x.matmul(&var.t()?)),
        ("converted", |x, var| x + var.to_dtype(DType::F64)?.sqr()?.to_dtype(DType::F32)?),
        ("concatenated", |x, var| Tensor::cat(&[x, var], 0)),
        ("selected", |x, var| x.ge(0.0)?.where_cond(x, var)),
    ];
    for (case, uses) in cases {
        let error = backward_with(var(&[2, WIDTH], 2), uses).expect_err(case);
        let expected =
            "block odd uses a variable of shape [2, 6] that it does not list: its gradient would be lost";
        assert_eq!(error, expected, "{case}");
    }
}

#[test]
fn constants_masks_and_detached_variables_raise_no_error() {
    let cases: [(&str, Uses); 11] = [
        ("detached", |x, var| x * var.as_detached_tensor()),
        ("a view, detached", |x, var| x.matmul(&var.t()?.detach())),
        ("a constant", |x, var| x * Tensor::ones_like(var)?),
        ("a copy", |x, var| x + var.detach().copy()?),
        ("a computed constant", |x, _| x.broadcast_add(&Tensor::arange(0f32, 6.0, x.device())?.sqr()?)),
        ("a mask", |x, var| x.ge(0.0)?.where_cond(x, &var.zeros_like()?)),
        ("an added mask", |x, _| x.broadcast_add(&Tensor::new(f32::NEG_INFINITY, x.device())?)?.exp()),
        ("a mask of zeros and ones", |x, _| {
            x * Tensor::rand(0f32, 1.0, x.shape(), x.device())?.ge(0.5)?.to_dtype(DType::F32)?
        }),
        ("numbers of rows", |x, _| x.index_select(&Tensor::new(&[1u32, 0, 1], x.device())?, 0)),
        ("compared with", |x, var| x * x.ge(var.as_tensor())?.to_dtype(DType::F32)?),
        ("the place of its maximum", |x, var| x.index_select(&var.argmax(1)?, 1)),
    ];
    for (case, uses) in cases {
        assert_eq!(backward_with(var(&[2, WIDTH], 2), uses), Ok(vec![0]), "{case}");
    }
}

#[test]
fn candle_also_stores_gradients_of_constants() {
    let (x, constant) = (var(&[3], 1), var(&[3], 2).detach());
    let output = (x.as_tensor() * &constant).unwrap();
    let gradients = backward_from(&output, output.ones_like().unwrap()).unwrap();
    assert_eq!(gradients.get_ids().count(), 2, "or the block could ask the store alone");
}

#[test]
fn a_head_tied_to_the_variable_of_another_block_must_list_it() {
    let map = VarMap::new();
    let builder = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let embed = candle_nn::embedding(VOCABULARY, WIDTH, builder.pp("embed")).unwrap();
    let norm = builder.pp("head").get_with_hints(WIDTH, "gain", candle_nn::init::ONE).unwrap();
    let table = embed.embeddings().clone();
    let head =
        move |x: &Tensor| candle_nn::Linear::new(table.clone(), None).forward(&x.broadcast_mul(&norm)?);
    let mut block = CandleBlock::from_var_map("head", &map, head).unwrap();
    let (output, saved) = block.forward(var(&[2, WIDTH], 3).as_tensor().clone()).unwrap();
    let error = block.backward(saved, output.ones_like().unwrap(), &mut |_, _| Ok(())).unwrap_err();
    let error = error.downcast_ref().expect("the crate's own error");
    assert!(matches!(error, CandleError::UnlistedVariable { place, shape }
        if place == "block head" && shape.dims() == [VOCABULARY, WIDTH]));
}

#[test]
fn a_loss_may_use_constants_but_no_variables() {
    let (output, weight) = (var(&[3], 1), var(&[3], 2));
    let weighted =
        |weight: &Tensor| loss_and_gradient(output.as_tensor(), |output| (output * weight)?.sum_all());
    let error = weighted(&weight).unwrap_err();
    assert!(matches!(&error, CandleError::UnlistedVariable { place, .. } if place == "the loss"), "{error}");
    let (_, gradient) = weighted(&weight.as_detached_tensor()).unwrap();
    assert_eq!(gradient.to_vec1::<f32>().unwrap(), weight.to_vec1::<f32>().unwrap());
}

/// Returns an embedding, and a head with the embedding's table for its weight.
fn tied_blocks(table: &Var) -> (CandleBlock<candle_nn::Embedding>, CandleBlock<candle_nn::Linear>) {
    let embed = candle_nn::Embedding::new(table.as_tensor().clone(), WIDTH);
    let head = candle_nn::Linear::new(table.as_tensor().clone(), None);
    let embed = CandleBlock::new("embed", [("weight", table.clone())], embed).expect("a valid block");
    let names = ["weight", "again"].map(|name| (name, table.clone()));
    (embed, CandleBlock::new("head", names, head).expect("a valid block"))
}

#[test]
fn a_variable_of_two_blocks_is_updated_once_with_the_sum_of_its_gradients() {
    const RATE: f32 = 0.5;
    let flat = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let table = || var(&[VOCABULARY, WIDTH], 1);
    let expected: Vec<f32> = {
        let table = table();
        let hidden = candle_nn::Embedding::new(table.as_tensor().clone(), WIDTH).forward(&ids(0)).unwrap();
        let output = candle_nn::Linear::new(table.as_tensor().clone(), None).forward(&hidden).unwrap();
        let gradients = loss(&output, 0).unwrap().backward().unwrap();
        let gradient = flat(gradients.get(&table).unwrap());
        // The first step of AdamW. An update of each block's part would change the variable twice.
        flat(&table).iter().zip(gradient).map(|(value, g)| value - RATE * g / (g.abs() + 1e-8)).collect()
    };
    let outcome = sim::run(0, 1, move |transport| {
        let (embed, head) = tied_blocks(&table());
        let model = SequenceBuilder::new().block(embed).block(head).build().unwrap();
        let ties: Vec<_> = model.infos().iter().map(|info| info.same_as).collect();
        assert_eq!(ties, [None, Some(0), Some(0)]);
        let mut ddp = Ddp::new(Communicator::new(transport), model, DdpOptions::default()).unwrap();
        let loss = |output: Tensor| loss_and_gradient(&output, |output| loss(output, 0)).map_err(Into::into);
        ddp.step(1, |_| Ok((ids(0), loss))).unwrap();
        let options =
            AdamWOptions { learning_rate: RATE.into(), weight_decay: 0.0, ..AdamWOptions::default() };
        ddp.update(&mut AdamW::new(options).unwrap()).unwrap();
        let mut got = Vec::new();
        ddp.model().read(2, &mut |values| got = bits(values)).unwrap();
        got.into_iter().map(f32::from_bits).collect::<Vec<_>>()
    });
    for (got, expected) in outcome.results[0].iter().zip(&expected) {
        assert!((got - expected).abs() < 1e-3, "{got} is not {expected}");
    }
    assert_eq!(outcome.results[0].len(), expected.len());
}

#[test]
fn a_variable_that_one_block_trains_and_another_has_frozen_is_refused_with_both_names() {
    let (embed, head) = tied_blocks(&var(&[VOCABULARY, WIDTH], 1));
    let head = head.freeze("head.again").unwrap();
    let error = SequenceBuilder::new().block(embed).block(head).build().unwrap_err();
    assert!(
        matches!(&error, Error::CannotTie { name, same_as, .. }
        if name == "head.again" && same_as == "embed.weight"),
        "{error}"
    );
}

#[test]
fn invalid_declarations_are_rejected_by_name() {
    let identity = |x: &Tensor| Ok(x.clone());
    let error = CandleBlock::new("b", [("w", var(&[1], 0)), ("w", var(&[1], 1))], identity).unwrap_err();
    assert_eq!(error.to_string(), "block b has two parameters named b.w");
    let expected = |dtype: &str| {
        format!(
            "variable b.n is of type {dtype}: f32, f64, f16 and bf16 can be trained, and u8, u32, i16, i32 and i64 can be \
             buffers"
        )
    };
    let eighths = Var::from_tensor(&var(&[1], 0).to_dtype(DType::F8E4M3).unwrap()).unwrap();
    let error = CandleBlock::new("b", [("n", eighths)], identity).unwrap_err();
    assert_eq!(error.to_string(), expected("F8E4M3"));
    let integers = Var::from_vec(vec![1u32], 1, &Device::Cpu).unwrap();
    let block = CandleBlock::new("b", [("n", integers)], identity).unwrap();
    assert_eq!(block.infos()[0].buffer, Some(BufferSync::Broadcast));
    assert_eq!(block.train("b.n").unwrap_err().to_string(), expected("U32"));

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
fn an_error_of_the_gradient_hook_ends_the_backward_pass() {
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
