//! The computation of a block: a candle module, or a closure that receives the description of the forward.

use std::fmt;

use candle_core::{ModuleT, Result, Tensor};
use dist_parallel::model::Pass;

/// The computation of a [`CandleBlock`](crate::CandleBlock) on activations of type `A`.
///
/// It is implemented for every candle module by [`ModuleT::forward_t`], with [`Pass::training`] as the flag,
/// and for closures from one tensor to one tensor. To receive the whole [`Pass`], wrap a closure in
/// [`PassFn`]. Implement it yourself for a type that is no `ModuleT`.
pub trait BlockModule<A> {
    /// Returns the output for `input`.
    ///
    /// # Errors
    /// If candle fails.
    fn forward(&self, input: &A, pass: Pass) -> Result<A>;
}

impl<M: ModuleT> BlockModule<Tensor> for M {
    fn forward(&self, input: &Tensor, pass: Pass) -> Result<Tensor> {
        self.forward_t(input, pass.training)
    }
}

/// A closure from an activation and a [`Pass`] to an activation, as a [`BlockModule`].
///
/// ```
/// use candle_core::{DType, Device, Module, ModuleT, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use dist_candle::{CandleBlock, Dropout, PassFn};
/// use dist_parallel::model::Pass;
///
/// let map = VarMap::new();
/// let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu).pp("hidden");
/// let linear = candle_nn::linear(4, 4, vars.pp("linear"))?;
/// let norm = candle_nn::batch_norm(4, 1e-5, vars.pp("norm"))?;
/// let dropout = Dropout::new(0.1, 42, "hidden")?;
/// let block = CandleBlock::from_var_map("hidden", &map, PassFn(move |x: &Tensor, pass: Pass| {
///     let x = norm.forward_t(&linear.forward(x)?, pass.training)?;
///     dropout.forward(&x, pass)
/// }))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PassFn<F>(pub F);

impl<A, F: Fn(&A, Pass) -> Result<A>> BlockModule<A> for PassFn<F> {
    fn forward(&self, input: &A, pass: Pass) -> Result<A> {
        (self.0)(input, pass)
    }
}

impl<F> fmt::Debug for PassFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PassFn")
    }
}
