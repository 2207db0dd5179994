//! Small models with initial values that are the same in every process.

use burn::module::{Module, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use dist_burn::{BurnError, ModuleParams};
use dist_collectives::Communicator;
use dist_parallel::half::{bf16, f16};
use dist_parallel::{Params, Values, ValuesMut};
use dist_transport::sim;

/// Two layers.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    pub(crate) hidden: Linear,
    pub(crate) output: Linear,
}

impl Mlp {
    pub(crate) fn new(device: &Device) -> Self {
        let model = Self {
            hidden: LinearConfig::new(3, 8).init(device),
            output: LinearConfig::new(8, 2).init(device),
        };
        with_values(model)
    }

    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.output.forward(relu(self.hidden.forward(x)))
    }

    /// Returns the loss of a micro-batch of four rows, which depend on its number.
    pub(crate) fn loss(&self, number: usize, device: &Device) -> Tensor<1> {
        self.loss_of_rows(4 * number..4 * number + 4, device)
    }

    pub(crate) fn loss_of_rows(&self, rows: std::ops::Range<usize>, device: &Device) -> Tensor<1> {
        let x = inputs(rows, device).cast(self.hidden.weight.val().dtype());
        let target = x.clone().slice([0..x.dims()[0], 0..2]).sin();
        (self.forward(x) - target).square().mean()
    }
}

/// A table of vectors, a batch norm, a layer that no input reaches, integers and booleans.
#[derive(Module, Debug)]
pub(crate) struct Mixed {
    pub(crate) table: Embedding,
    pub(crate) norm: BatchNorm,
    pub(crate) heads: Vec<Linear>,
    pub(crate) unused: Option<Linear>,
    pub(crate) order: Param<Tensor<1, Int>>,
    pub(crate) mask: Param<Tensor<1, Bool>>,
}

impl Mixed {
    pub(crate) fn new(device: &Device) -> Self {
        let model = Self {
            table: EmbeddingConfig::new(10, 4).init(device),
            norm: BatchNormConfig::new(4).init(device),
            heads: vec![
                LinearConfig::new(4, 2).init(device),
                LinearConfig::new(4, 2).with_bias(false).init(device),
            ],
            unused: Some(LinearConfig::new(2, 2).init(device)),
            order: Param::initialized(ParamId::new(), Tensor::from_data([3, 1, 2], device)),
            mask: Param::initialized(ParamId::new(), Tensor::from_data([true, false], device)),
        };
        with_values(model)
    }

    pub(crate) fn loss(&self, number: usize, device: &Device) -> Tensor<1> {
        let ids: Vec<i64> = (0..6).map(|row| ((number * 7 + row * 3) % 10) as i64).collect();
        let ids = Tensor::<1, Int>::from_data(&ids[..], device).reshape([1, 6]);
        let x = self.table.forward(ids).reshape([6, 4]);
        let x = self.norm.forward(x);
        let heads = self.heads[0].forward(x.clone()) - self.heads[1].forward(x);
        heads.square().mean()
    }
}

pub(crate) fn device() -> Device {
    Device::flex().autodiff()
}

fn inputs(rows: std::ops::Range<usize>, device: &Device) -> Tensor<2> {
    let len = rows.len();
    let values: Vec<f32> =
        rows.flat_map(|row| (0..3).map(move |column| (row as f32 * 0.37 + column as f32).sin())).collect();
    Tensor::<1>::from_data(&values[..], device).reshape([len, 3])
}

/// Returns the model with values that depend only on the order of its parameters.
pub(crate) fn with_values<M: Module>(model: M) -> M {
    let mut params = ModuleParams::new(&model).unwrap();
    for index in 0..params.infos().len() {
        if params.infos()[index].trainable {
            params.write(index, &mut |values| fill(values, index)).unwrap();
        }
    }
    params.install(model).unwrap()
}

fn fill(values: ValuesMut<'_>, index: usize) {
    let value = |place: usize| ((index * 31 + place) as f32 * 0.7).sin() * 0.5;
    match values {
        ValuesMut::F32(values) => values.iter_mut().enumerate().for_each(|(place, own)| *own = value(place)),
        ValuesMut::F64(values) => {
            values.iter_mut().enumerate().for_each(|(place, own)| *own = value(place).into())
        }
        ValuesMut::F16(values) => {
            values.iter_mut().enumerate().for_each(|(place, own)| *own = f16::from_f32(value(place)));
        }
        ValuesMut::Bf16(values) => {
            values.iter_mut().enumerate().for_each(|(place, own)| *own = bf16::from_f32(value(place)));
        }
    }
}

/// Returns the model in another type.
pub(crate) fn cast<M: Module>(model: M, dtype: DType) -> M {
    struct Cast(DType);
    impl burn::module::ModuleMapper for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| {
                let trained = tensor.is_require_grad();
                tensor.detach().cast(self.0).detach().set_require_grad(trained)
            })
        }
    }
    model.map(&mut Cast(dtype))
}

/// Returns the bits of all tensors of a model, in order.
pub(crate) fn bits<M: Module>(model: &M) -> Vec<u64> {
    named_bits(model).into_iter().flat_map(|(_, bits)| bits).collect()
}

/// Returns the names of all tensors of a model, and their bits.
pub(crate) fn named_bits<M: Module>(model: &M) -> Vec<(String, Vec<u64>)> {
    let params = ModuleParams::new(model).unwrap();
    let bits = |index: usize| {
        let mut bits = Vec::new();
        let mut keep = |values: Values<'_>| match values {
            Values::F32(values) => bits.extend(values.iter().map(|value| u64::from(value.to_bits()))),
            Values::F64(values) => bits.extend(values.iter().map(|value| value.to_bits())),
            Values::F16(values) => bits.extend(values.iter().map(|value| u64::from(value.to_bits()))),
            Values::Bf16(values) => bits.extend(values.iter().map(|value| u64::from(value.to_bits()))),
        };
        params.read(index, &mut keep).unwrap();
        bits
    };
    let infos = params.infos().iter().enumerate();
    infos.map(|(index, info)| (info.name.clone(), bits(index))).collect()
}

/// Runs a program on simulated ranks and returns their results.
pub(crate) fn on_ranks<T: Send + 'static>(
    ranks: usize,
    train: impl Fn(Communicator) -> Result<T, BurnError> + Send + Sync + 'static,
) -> Vec<T> {
    let results = results_on_ranks(ranks, train);
    results.into_iter().map(|result| result.unwrap()).collect()
}

/// Runs a program on ranks as [`on_ranks`] does, if a rank may fail.
pub(crate) fn results_on_ranks<T: Send + 'static>(
    ranks: usize,
    train: impl Fn(Communicator) -> Result<T, BurnError> + Send + Sync + 'static,
) -> Vec<Result<T, BurnError>> {
    sim::run(7, ranks, move |transport| train(Communicator::new(transport))).results
}
