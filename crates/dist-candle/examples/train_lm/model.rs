//! A small transformer that predicts the next byte, as blocks.

use candle_core::{D, Device, Module, Tensor, Var};
use candle_nn::{Embedding, Linear};
use dist_candle::CandleBlock;
use dist_parallel::{Block, BoxError, Sequence};

use crate::random::Random;

type Result<T, E = candle_core::Error> = std::result::Result<T, E>;

/// The sizes of the transformer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) layers: usize,
    pub(crate) width: usize,
    pub(crate) heads: usize,
    /// The number of bytes of its context.
    pub(crate) context: usize,
}

impl Shape {
    /// Returns the factor of the initial weights of residual branches. Each layer has two branches. All
    /// branches together should have about the variance of the input.
    fn small(self) -> f64 {
        1.0 / f64::sqrt(2.0 * self.layers as f64)
    }
}

/// Returns the transformer with the initial values of this seed. It maps byte values `[batch, context]` to the logits
/// `[batch, context, 256]` of the next bytes.
pub(crate) fn transformer(shape: Shape, seed: u64) -> Result<Sequence<Tensor>, BoxError> {
    let mut blocks = vec![
        block("bytes", seed, |weights| Bytes::new(weights, shape))?,
        block("places", seed, |weights| Places::new(weights, shape))?,
    ];
    for layer in 0..shape.layers {
        let name = |half: &str| format!("layer{layer}.{half}");
        blocks.push(block(&name("attention"), seed, |weights| Attention::new(weights, shape))?);
        blocks.push(block(&name("dense"), seed, |weights| Dense::new(weights, shape))?);
    }
    blocks.push(block("norm", seed, |weights| weights.norm("gain", "bias", shape.width))?);
    blocks.push(block("logits", seed, |weights| weights.linear("weight", shape.width, 256, 1.0))?);
    Ok(Sequence::new(blocks)?)
}

fn block<M: Module + Send + 'static>(
    name: &str,
    seed: u64,
    module: impl FnOnce(&mut Weights<'_>) -> Result<M>,
) -> Result<Box<dyn Block<Tensor>>, BoxError> {
    let mut weights = Weights { block: name, seed, vars: Vec::new() };
    let module = module(&mut weights)?;
    Ok(Box::new(CandleBlock::new(name, weights.vars, module)?))
}

/// A builder of the variables of one block. Each variable depends only on the seed and its own name.
struct Weights<'a> {
    block: &'a str,
    seed: u64,
    vars: Vec<(&'static str, Var)>,
}

impl Weights<'_> {
    /// Returns values with a uniform distribution around 0 and this standard deviation.
    #[expect(clippy::cast_possible_truncation, reason = "initial values are rounded to f32")]
    fn random(&mut self, name: &'static str, shape: (usize, usize), deviation: f64) -> Result<Tensor> {
        let mut random = Random::named(self.seed, &format!("{}.{name}", self.block));
        let bound = deviation * f64::sqrt(3.0);
        let values = (0..shape.0 * shape.1).map(|_| (bound * (2.0 * random.unit() - 1.0)) as f32).collect();
        self.add(name, Var::from_vec::<_, f32>(values, shape, &Device::Cpu)?)
    }

    fn constant(&mut self, name: &'static str, len: usize, value: f32) -> Result<Tensor> {
        self.add(name, Var::from_vec(vec![value; len], len, &Device::Cpu)?)
    }

    fn add(&mut self, name: &'static str, var: Var) -> Result<Tensor> {
        let shared = var.as_tensor().clone();
        self.vars.push((name, var));
        Ok(shared)
    }

    fn linear(&mut self, name: &'static str, input: usize, output: usize, gain: f64) -> Result<Linear> {
        Ok(Linear::new(self.random(name, (output, input), gain / f64::sqrt(input as f64))?, None))
    }

    fn norm(&mut self, gain: &'static str, bias: &'static str, width: usize) -> Result<Norm> {
        Ok(Norm { gain: self.constant(gain, width, 1.0)?, bias: self.constant(bias, width, 0.0)? })
    }
}

/// The embedding of bytes.
struct Bytes(Embedding);

impl Bytes {
    fn new(weights: &mut Weights<'_>, Shape { width, .. }: Shape) -> Result<Self> {
        Ok(Self(Embedding::new(weights.random("weight", (256, width), 1.0)?, width)))
    }
}

impl Module for Bytes {
    fn forward(&self, bytes: &Tensor) -> Result<Tensor> {
        self.0.forward(bytes)
    }
}

/// The embedding of positions, which is added to its input.
struct Places(Tensor);

impl Places {
    fn new(weights: &mut Weights<'_>, Shape { width, context, .. }: Shape) -> Result<Self> {
        Ok(Self(weights.random("weight", (context, width), 0.1)?))
    }
}

impl Module for Places {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.broadcast_add(&self.0.narrow(0, 0, x.dim(D::Minus2)?)?)
    }
}

/// A causal self-attention, which is added to its input.
struct Attention {
    heads: usize,
    norm: Norm,
    query: Linear,
    key: Linear,
    value: Linear,
    project: Linear,
}

impl Attention {
    fn new(weights: &mut Weights<'_>, shape: Shape) -> Result<Self> {
        let Shape { width, heads, .. } = shape;
        Ok(Self {
            heads,
            norm: weights.norm("gain", "bias", width)?,
            query: weights.linear("query", width, width, 1.0)?,
            key: weights.linear("key", width, width, 1.0)?,
            value: weights.linear("value", width, width, 1.0)?,
            project: weights.linear("project", width, width, shape.small())?,
        })
    }

    fn attend(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, len, width) = x.dims3()?;
        let size = width / self.heads;
        // [batch, heads, len, size]
        let split = |x: Tensor| x.reshape((batch, len, self.heads, size))?.transpose(1, 2)?.contiguous();
        let query = split(self.query.forward(x)?)?;
        let key = split(self.key.forward(x)?)?;
        let value = split(self.value.forward(x)?)?;
        let scores = (query.matmul(&key.t()?)? / f64::sqrt(size as f64))?;
        let weights = softmax_of_the_past(&scores)?;
        let heads = weights.matmul(&value)?.transpose(1, 2)?.contiguous()?;
        self.project.forward(&heads.reshape((batch, len, width))?)
    }
}

impl Module for Attention {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x + self.attend(&self.norm.forward(x)?)?
    }
}

/// Two dense layers, which are added to their input.
struct Dense {
    norm: Norm,
    up: Linear,
    down: Linear,
}

impl Dense {
    fn new(weights: &mut Weights<'_>, shape: Shape) -> Result<Self> {
        let width = shape.width;
        Ok(Self {
            norm: weights.norm("gain", "bias", width)?,
            up: weights.linear("up", width, 4 * width, 1.0)?,
            down: weights.linear("down", 4 * width, width, shape.small())?,
        })
    }
}

impl Module for Dense {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let dense = self.up.forward(&self.norm.forward(x)?)?.relu()?;
        x + self.down.forward(&dense)?
    }
}

struct Norm {
    gain: Tensor,
    bias: Tensor,
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // Not `candle_nn::LayerNorm`, whose fused kernel has no backward pass.
        candle_nn::ops::layer_norm_slow(x, &self.gain, &self.bias, 1e-5)
    }
}

/// Computes a causal softmax over the last dim of `[.., len, len]`: row `i` uses only columns `0..=i`.
fn softmax_of_the_past(scores: &Tensor) -> Result<Tensor> {
    let len = scores.dim(D::Minus1)?;
    let future = |index: usize| if index % len > index / len { f32::NEG_INFINITY } else { 0.0 };
    let mask = Tensor::from_vec((0..len * len).map(future).collect(), (len, len), &Device::Cpu)?;
    let scores = scores.broadcast_add(&mask.to_dtype(scores.dtype())?)?;
    // The largest score is subtracted to avoid overflow. It does not change the result, so it needs no gradient.
    let exp = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}

/// Returns the mean loss of `logits` for the next bytes, in nats per byte.
pub(crate) fn loss(logits: &Tensor, next: &Tensor) -> Result<Tensor> {
    candle_nn::loss::cross_entropy(&logits.flatten_to(1)?, &next.flatten_all()?)
}

/// Converts rows of bytes of equal length to the model's input.
pub(crate) fn rows<'a>(rows: impl IntoIterator<Item = &'a [u8]>) -> Result<Tensor> {
    let rows: Vec<&[u8]> = rows.into_iter().collect();
    let shape = (rows.len(), rows.first().map_or(0, |row| row.len()));
    let bytes = rows.concat().into_iter().map(u32::from).collect();
    Tensor::from_vec::<_, u32>(bytes, shape, &Device::Cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TINY: Shape = Shape { layers: 2, width: 16, heads: 2, context: 8 };

    fn logits(model: &mut Sequence<Tensor>, text: &[u8]) -> Vec<Vec<f32>> {
        let (logits, _) = model.forward(rows([text]).unwrap()).unwrap();
        logits.squeeze(0).unwrap().to_vec2().unwrap()
    }

    #[test]
    fn a_guess_depends_on_the_past_and_not_on_the_future() {
        let mut model = transformer(TINY, 0).unwrap();
        let original = logits(&mut model, b"abcdefgh");
        for place in 0..8 {
            let mut text = *b"abcdefgh";
            text[place] = b'x';
            let changed = logits(&mut model, &text);
            assert_eq!(changed[..place], original[..place], "place {place}");
            assert!((place..8).all(|after| changed[after] != original[after]), "place {place}");
        }
    }

    #[test]
    fn initial_values_depend_on_the_seed_alone() {
        let same = [0, 0].map(|seed| logits(&mut transformer(TINY, seed).unwrap(), b"abcdefgh"));
        assert_eq!(same[0], same[1]);
        assert_ne!(same[0], logits(&mut transformer(TINY, 1).unwrap(), b"abcdefgh"));
    }

    #[test]
    fn every_parameter_gets_a_gradient() {
        use dist_parallel::Params as _;
        let mut model = transformer(TINY, 0).unwrap();
        let (output, saved) = model.forward(rows([b"abcdefgh".as_slice()]).unwrap()).unwrap();
        let mut seen = Vec::new();
        let mut ready = |index: usize, _: dist_parallel::Values<'_>| {
            seen.push(index);
            Ok(())
        };
        model.backward(saved, output.ones_like().unwrap(), &mut ready).unwrap();
        seen.sort_unstable();
        assert_eq!(seen, Vec::from_iter(0..model.infos().len()));
    }
}
