//! Models in candle's ordinary style, with initial values that are the same in every run.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use candle_nn::{BatchNorm, Linear, VarBuilder, VarMap};
use dist_collectives::Communicator;
use dist_transport::sim;

/// Two layers with two inputs.
pub(crate) struct Model {
    left: Linear,
    right: Linear,
    head: Linear,
}

impl Model {
    pub(crate) fn new(vars: &VarBuilder<'_>) -> Self {
        Self {
            left: candle_nn::linear(3, 5, vars.pp("left")).unwrap(),
            right: candle_nn::linear_no_bias(2, 5, vars.pp("right")).unwrap(),
            head: candle_nn::linear(5, 1, vars.pp("head")).unwrap(),
        }
    }

    pub(crate) fn loss(&self, rows: &Rows) -> Result<Tensor> {
        let hidden = (self.left.forward(&rows.x)? + self.right.forward(&rows.z)?)?.silu()?;
        candle_nn::loss::mse(&self.head.forward(&hidden)?, &rows.target)
    }
}

/// A set of rows, all different.
pub(crate) struct Rows {
    x: Tensor,
    z: Tensor,
    target: Tensor,
}

impl Rows {
    /// Returns `len` rows, starting with row `first`.
    pub(crate) fn new(first: usize, len: usize, dtype: DType) -> Self {
        let values = |columns: usize, shift: f64| {
            let from = (first * columns) as f32;
            let values = Tensor::arange(from, from + (len * columns) as f32, &Device::Cpu).unwrap();
            let values = values.affine(0.37, shift).unwrap().sin().unwrap();
            values.reshape((len, columns)).unwrap().to_dtype(dtype).unwrap()
        };
        Self { x: values(3, 0.1), z: values(2, 1.3), target: values(1, 2.0) }
    }
}

/// Returns a map with a model whose values depend only on the seed.
pub(crate) fn model(dtype: DType, seed: u64) -> (VarMap, Model) {
    let map = VarMap::new();
    let model = Model::new(&VarBuilder::from_varmap(&map, dtype, &Device::Cpu));
    set_all(&map, seed);
    (map, model)
}

/// Gives all variables values that depend on their names and the seed only.
pub(crate) fn set_all(map: &VarMap, seed: u64) {
    for (name, var) in &*map.data().lock().unwrap() {
        let phase = name.bytes().map(f64::from).sum::<f64>() + seed as f64;
        let values = Tensor::arange(0f32, var.elem_count() as f32, &Device::Cpu).unwrap();
        let values = values.affine(1.7, phase).unwrap().sin().unwrap().affine(0.5, 0.0).unwrap();
        var.set(&values.reshape(var.shape()).unwrap().to_dtype(var.dtype()).unwrap()).unwrap();
    }
}

/// A layer, and a batch norm as candle has it.
pub(crate) struct Normed {
    layer: Linear,
    norm: BatchNorm,
}

impl Normed {
    pub(crate) fn new(vars: &VarBuilder<'_>) -> Self {
        Self {
            layer: candle_nn::linear(3, 4, vars.pp("layer")).unwrap(),
            norm: candle_nn::batch_norm(4, 1e-5, vars.pp("norm")).unwrap(),
        }
    }

    pub(crate) fn loss(&self, rows: &Rows, train: bool) -> Result<Tensor> {
        self.norm.forward_t(&self.layer.forward(&rows.x)?, train)?.sqr()?.mean_all()
    }
}

/// The values of variables with their names.
pub(crate) type Named = Vec<(String, Vec<f64>)>;

/// Returns the values of all variables, sorted by name.
pub(crate) fn values(map: &VarMap) -> Named {
    let data = map.data().lock().unwrap();
    let mut all: Vec<_> = data.iter().map(|(name, var)| (name.clone(), numbers(var))).collect();
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    all
}

/// Returns the exact values of a tensor of any type.
pub(crate) fn numbers(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the gradients of all variables that have one, sorted by name.
pub(crate) fn gradients(map: &VarMap, store: &GradStore) -> Named {
    let data = map.data().lock().unwrap();
    let found = data.iter().filter_map(|(name, var)| Some((name.clone(), numbers(store.get(var)?))));
    let mut all: Vec<_> = found.collect();
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    all
}

pub(crate) fn variable(map: &VarMap, name: &str) -> Var {
    map.data().lock().unwrap()[name].clone()
}

/// Runs a program on simulated ranks.
pub(crate) fn run<T: Send + 'static>(
    ranks: usize,
    program: impl Fn(Communicator) -> T + Send + Sync + 'static,
) -> Vec<T> {
    sim::run(7, ranks, move |transport| program(Communicator::new(transport))).results
}
