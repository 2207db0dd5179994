//! A small model whose blocks use what transformers use: an embedding, matrix products, a norm, residual
//! connections.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use dist_candle::CandleBlock;
use dist_parallel::{Block, Sequence};

pub(crate) const WIDTH: usize = 6;
pub(crate) const VOCABULARY: usize = 11;

pub(crate) fn var(shape: &[usize], seed: u64) -> Var {
    let count: usize = shape.iter().product();
    let value = |index: usize| ((index as u64 * 7919 + seed * 104_729) % 1009) as f32 / 1009.0 - 0.5;
    Var::from_vec((0..count).map(value).collect(), shape, &Device::Cpu)
        .expect("as many values as the shape says")
}

pub(crate) type Forward = fn(&[Tensor], &Tensor) -> Result<Tensor>;

/// Returns a token embedding, two layers with a residual connection, and a projection: each as variables and
/// a closure.
pub(crate) fn parts() -> Vec<(&'static str, Vec<Var>, Forward)> {
    let layer = |vars: &[Tensor], x: &Tensor| {
        let inner = candle_nn::ops::layer_norm_slow(x, &vars[2], &vars[3], 1e-5)?;
        let inner = inner.reshape(((), WIDTH))?.matmul(&vars[0])?.broadcast_add(&vars[1])?;
        x + inner.gelu_erf()?.reshape(x.shape())?
    };
    let layer_vars = |seed| {
        vec![
            var(&[WIDTH, WIDTH], seed),
            var(&[WIDTH], seed + 1),
            var(&[WIDTH], seed + 2),
            var(&[WIDTH], seed + 3),
        ]
    };
    vec![
        ("embed", vec![var(&[VOCABULARY, WIDTH], 1)], |vars, ids| {
            candle_nn::Embedding::new(vars[0].clone(), WIDTH).forward(ids)
        }),
        ("first", layer_vars(10), layer),
        ("second", layer_vars(20), layer),
        ("head", vec![var(&[VOCABULARY, WIDTH], 2)], |vars, x| {
            candle_nn::Linear::new(vars[0].clone(), None).forward(x)
        }),
    ]
}

pub(crate) fn model() -> Sequence<Tensor> {
    model_in(DType::F32)
}

/// Returns the model with parameters of a type, which are converted to `f32` when they are used.
pub(crate) fn model_in(dtype: DType) -> Sequence<Tensor> {
    let blocks = parts().into_iter().map(|(name, vars, forward)| {
        let kept = |var: &Var| Var::from_tensor(&var.to_dtype(dtype)?);
        let vars: Vec<Var> = vars.iter().map(kept).collect::<Result<_>>().expect("a type of floats");
        let named: Vec<_> =
            vars.iter().cloned().enumerate().map(|(index, var)| (index.to_string(), var)).collect();
        let module = move |x: &Tensor| forward(&tensors(&vars)?, x);
        let block = CandleBlock::new(name, named, module).expect("a valid block");
        Box::new(block) as Box<dyn Block<Tensor>>
    });
    Sequence::new(blocks.collect()).expect("names that differ")
}

/// Returns the values of variables in the type of the computation.
pub(crate) fn tensors(vars: &[Var]) -> Result<Vec<Tensor>> {
    vars.iter().map(|var| var.to_dtype(DType::F32)).collect()
}

/// Returns the token numbers of a micro-batch. They are also its targets.
pub(crate) fn ids(micro_batch: u32) -> Tensor {
    let id = |index: u32| (index * (17 + micro_batch) + micro_batch) % 11;
    let ids: Vec<u32> = (0..3 * 5).map(id).collect();
    Tensor::from_vec(ids, (3, 5), &Device::Cpu).expect("15 numbers")
}

pub(crate) fn loss(output: &Tensor, micro_batch: u32) -> Result<Tensor> {
    let targets = ids(micro_batch).flatten_all()?;
    candle_nn::loss::cross_entropy(&output.reshape(((), VOCABULARY))?, &targets)
}
