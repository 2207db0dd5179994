//! Activations of another type than a model's blocks compute.

use std::sync::Arc;

use crate::flat::Flat;
use crate::pipeline::Activations;
use crate::{
    Block, BoxError, BufferView, FloatType, Materialised, ParamInfo, Params, Pass, Ready, Resharded, Saved,
    Slot, Values, ValuesMut,
};

/// A block whose output, and the gradient of whose input, are rounded to a type.
pub(crate) struct CastBlock<A> {
    block: Box<dyn Block<A>>,
    codec: Arc<dyn Activations<A>>,
    dtype: FloatType,
    /// The type in which the block gets its input and the gradient of its output: that of its parameters.
    input: FloatType,
}

impl<A> CastBlock<A> {
    pub(crate) fn new(block: Box<dyn Block<A>>, codec: Arc<dyn Activations<A>>, dtype: FloatType) -> Self {
        let mut dtypes = block.infos().iter().filter(|info| info.buffer.is_none()).map(|info| info.dtype);
        let first = dtypes.next().unwrap_or(dtype);
        let input = if dtypes.all(|other| other == first) { first } else { dtype };
        Self { block, codec, dtype, input }
    }

    fn round(&self, activation: A) -> Result<A, BoxError> {
        self.codec.cast(activation, self.dtype)
    }

    /// Returns an activation that a block before or a loss has made, in the type of this block.
    fn take(&self, activation: A) -> Result<A, BoxError> {
        self.codec.cast(self.round(activation)?, self.input)
    }
}

impl<A> Params for CastBlock<A> {
    fn infos(&self) -> &[ParamInfo] {
        self.block.infos()
    }

    fn begin_forward(&mut self, pass: Pass) {
        self.block.begin_forward(pass);
    }

    fn slots(&self) -> &[Slot] {
        self.block.slots()
    }

    fn slots_mut(&mut self) -> &mut [Slot] {
        self.block.slots_mut()
    }

    fn read(&self, index: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        self.block.read(index, f)
    }

    fn write(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        self.block.write(index, f)
    }

    fn materialise(&mut self, index: usize, values: BufferView) -> Result<Materialised, BoxError> {
        self.block.materialise(index, values)
    }

    fn fill(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<bool, BoxError> {
        self.block.fill(index, f)
    }

    fn reshard(&mut self, index: usize) -> Result<Resharded, BoxError> {
        self.block.reshard(index)
    }
}

impl<A> Block<A> for CastBlock<A> {
    fn forward(&mut self, input: A) -> Result<(A, Saved), BoxError> {
        let input = self.take(input)?;
        let (output, saved) = self.block.forward(input)?;
        Ok((self.round(output)?, saved))
    }

    fn backward(
        &mut self,
        saved: Saved,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<Option<A>, BoxError> {
        let gradient = self.take(output_gradient)?;
        let of_input = self.block.backward(saved, gradient, ready)?;
        of_input.map(|gradient| self.round(gradient)).transpose()
    }

    fn input_gradient(
        &mut self,
        saved: Saved,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<(Option<A>, Saved), BoxError> {
        let gradient = self.take(output_gradient)?;
        let (of_input, rest) = self.block.input_gradient(saved, gradient, ready)?;
        Ok((of_input.map(|gradient| self.round(gradient)).transpose()?, rest))
    }

    fn weight_gradient(&mut self, saved: Saved, ready: &mut Ready<'_>) -> Result<(), BoxError> {
        self.block.weight_gradient(saved, ready)
    }
}

/// A codec whose messages have a type.
pub(crate) struct CastActivations<A> {
    pub(crate) codec: Arc<dyn Activations<A>>,
    pub(crate) dtype: FloatType,
}

impl<A> Activations<A> for CastActivations<A> {
    fn to_flat(&self, activation: &A, f: &mut dyn FnMut(&[usize], Values<'_>)) -> Result<(), BoxError> {
        self.codec.to_flat_as(activation, self.dtype, f)
    }

    fn unflatten(&self, shape: &[usize], values: Values<'_>) -> Result<A, BoxError> {
        self.codec.unflatten(shape, values)
    }

    fn gradients_have_the_same_shape(&self) -> bool {
        self.codec.gradients_have_the_same_shape()
    }
}

/// Calls `f` with values of a type.
pub(crate) fn with_type(values: Values<'_>, dtype: FloatType, f: impl FnOnce(Values<'_>)) {
    if values.dtype() == dtype {
        return f(values);
    }
    let mut converted = Flat::zeros(dtype, values.len());
    converted.slice_mut(0, values.len()).convert_from(values);
    f(converted.slice(0, values.len()));
}
