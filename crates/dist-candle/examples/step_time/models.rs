//! The measured models: multilayer perceptrons and transformer encoders of about 1, 10 and 100 million parameters.
//! Each layer is a block.

use candle_core::{D, DType, Device, Module, Tensor, Var};
use candle_nn::Linear;
use clap::ValueEnum;
use dist_candle::{CandleBlock, SequenceBuilder};
use dist_parallel::{BoxError, Sequence};

/// A model, by its kind and its approximate number of parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Model {
    #[value(name = "mlp-1M")]
    Mlp1M,
    #[value(name = "transformer-1M")]
    Transformer1M,
    #[value(name = "mlp-10M")]
    Mlp10M,
    #[value(name = "transformer-10M")]
    Transformer10M,
    #[value(name = "mlp-100M")]
    Mlp100M,
}

impl Model {
    /// Returns the width and the number of layers.
    const fn size(self) -> (usize, usize) {
        match self {
            Self::Mlp1M => (512, 4),
            Self::Transformer1M => (128, 5),
            Self::Mlp10M => (1600, 4),
            Self::Transformer10M => (384, 6),
            Self::Mlp100M => (3536, 8),
        }
    }

    const fn is_transformer(self) -> bool {
        matches!(self, Self::Transformer1M | Self::Transformer10M)
    }

    /// Returns the model with random values.
    pub(crate) fn build(self) -> Result<Sequence<Tensor>, BoxError> {
        let (width, layers) = self.size();
        let mut sequence = SequenceBuilder::new();
        for layer in 0..layers {
            let (name, mut vars) = (format!("layer{layer}"), Variables(Vec::new()));
            sequence = if self.is_transformer() {
                let module = Encoder::new(&mut vars, width)?;
                sequence.block(CandleBlock::new(name, vars.0, module)?)
            } else {
                let linear = vars.linear(["weight", "bias"], width, width)?;
                let module = candle_nn::func(move |x: &Tensor| linear.forward(x)?.relu());
                sequence.block(CandleBlock::new(name, vars.0, module)?)
            };
        }
        Ok(sequence.build()?)
    }

    /// Returns one micro-batch: 64 rows, or 4 sequences of 64 positions.
    pub(crate) fn input(self) -> Result<Tensor, BoxError> {
        let (width, _) = self.size();
        let normal = |shape: &[usize]| Tensor::randn(0_f32, 1.0, shape, &Device::Cpu);
        Ok(if self.is_transformer() { normal(&[4, 64, width])? } else { normal(&[64, width])? })
    }
}

/// A builder of the variables of a block.
struct Variables(Vec<(&'static str, Var)>);

impl Variables {
    fn add(&mut self, name: &'static str, var: Var) -> Tensor {
        let shared = var.as_tensor().clone();
        self.0.push((name, var));
        shared
    }

    #[expect(clippy::cast_possible_truncation, reason = "initial values are rounded to f32")]
    fn linear(
        &mut self,
        names: [&'static str; 2],
        from: usize,
        to: usize,
    ) -> Result<Linear, candle_core::Error> {
        let deviation = (1.0 / f64::sqrt(from as f64)) as f32;
        let weight = Var::randn(0_f32, deviation, (to, from), &Device::Cpu)?;
        let bias = Var::zeros(to, DType::F32, &Device::Cpu)?;
        Ok(Linear::new(self.add(names[0], weight), Some(self.add(names[1], bias))))
    }

    fn norm(&mut self, names: [&'static str; 2], width: usize) -> Result<Norm, candle_core::Error> {
        let gain = self.add(names[0], Var::ones(width, DType::F32, &Device::Cpu)?);
        Ok(Norm { gain, bias: self.add(names[1], Var::zeros(width, DType::F32, &Device::Cpu)?) })
    }
}

/// A layer of a transformer encoder with post-norm: it normalises after the residual addition.
struct Encoder {
    mix: Linear,
    project: Linear,
    up: Linear,
    down: Linear,
    norms: [Norm; 2],
}

const HEADS: usize = 4;

impl Encoder {
    fn new(vars: &mut Variables, width: usize) -> Result<Self, candle_core::Error> {
        Ok(Self {
            mix: vars.linear(["mix", "mix_bias"], width, 3 * width)?,
            project: vars.linear(["project", "project_bias"], width, width)?,
            up: vars.linear(["up", "up_bias"], width, 4 * width)?,
            down: vars.linear(["down", "down_bias"], 4 * width, width)?,
            norms: [vars.norm(["gain1", "norm_bias1"], width)?, vars.norm(["gain2", "norm_bias2"], width)?],
        })
    }

    fn attend(&self, x: &Tensor) -> Result<Tensor, candle_core::Error> {
        let (batch, len, width) = x.dims3()?;
        let mixed = self.mix.forward(x)?;
        // [batch, heads, len, size]
        let part = |part: usize| {
            let part = mixed.narrow(D::Minus1, part * width, width)?;
            part.reshape((batch, len, HEADS, width / HEADS))?.transpose(1, 2)?.contiguous()
        };
        let (query, key, value) = (part(0)?, part(1)?, part(2)?);
        let scores = (query.matmul(&key.t()?)? / f64::sqrt((width / HEADS) as f64))?;
        // The largest score is subtracted to avoid overflow. It does not change the result, so it needs no gradient.
        let exp = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
        let weights = exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?;
        let heads = weights.matmul(&value)?.transpose(1, 2)?.contiguous()?;
        self.project.forward(&heads.reshape((batch, len, width))?)
    }
}

impl Module for Encoder {
    fn forward(&self, x: &Tensor) -> Result<Tensor, candle_core::Error> {
        let x = self.norms[0].forward(&(x + self.attend(x)?)?)?;
        let dense = self.down.forward(&self.up.forward(&x)?.relu()?)?;
        self.norms[1].forward(&(x + dense)?)
    }
}

struct Norm {
    gain: Tensor,
    bias: Tensor,
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor, candle_core::Error> {
        // Not `candle_nn::LayerNorm`, whose fused kernel has no backward pass.
        candle_nn::ops::layer_norm_slow(x, &self.gain, &self.bias, 1e-5)
    }
}
