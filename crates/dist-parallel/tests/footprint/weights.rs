//! A model whose parameters need nearly all of its memory.

use std::slice;

use dist_parallel::model::{BufferView, Materialised, Ready, Saved, Slot};
use dist_parallel::optim::{AdamW, AdamWOptions};
use dist_parallel::{Block, BoxError, FloatType, ParamInfo, Params, Sequence, Values, ValuesMut};

/// One value, the activation of all blocks.
pub(crate) type Value = [f32; 1];

/// A model that computes x/2 + the weighted mean of many parameters.
pub(crate) struct Weights {
    infos: [ParamInfo; 1],
    slot: Slot,
    /// The destination of gradients, so that a backward allocates nothing.
    gradient: Vec<f32>,
    loaded: Materialised,
}

impl Weights {
    pub(crate) fn new(name: String, len: usize, loaded: Materialised) -> Self {
        let slot = Slot::freed(FloatType::F32, len);
        Self { infos: [ParamInfo::new(name, [len], FloatType::F32)], slot, gradient: vec![0.0; len], loaded }
    }
}

/// Writes the initial value of every parameter.
pub(crate) fn initial(parameter: usize, values: ValuesMut<'_>) {
    let ValuesMut::F32(values) = values else { panic!("the model is f32") };
    values.iter_mut().zip(0_u8..=250).for_each(|(value, index)| *value = f32::from(index) / 100.0);
    values[0] = parameter as f32;
}

/// The factors of every run of seven parameters.
const WEIGHTS: [f32; 7] = [-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0];

impl Params for Weights {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn slots(&self) -> &[Slot] {
        slice::from_ref(&self.slot)
    }

    fn slots_mut(&mut self) -> &mut [Slot] {
        slice::from_mut(&mut self.slot)
    }

    fn materialise(&mut self, _: usize, values: BufferView) -> Result<Materialised, BoxError> {
        match self.loaded {
            Materialised::Shared => self.slot.materialise(values),
            Materialised::Copied => {
                self.slot.write(&mut |mut own| own.copy_from(values.values()).unwrap())?;
                Ok(Materialised::Copied)
            }
        }
    }
}

impl Block<Value> for Weights {
    fn forward(&mut self, input: Value) -> Result<(Value, Saved), BoxError> {
        let Values::F32(values) = self.slot.values()? else { panic!("the model is f32") };
        let sum: f32 = values.chunks(7).flat_map(|chunk| chunk.iter().zip(WEIGHTS)).map(|(v, w)| v * w).sum();
        Ok(([input[0] / 2.0 + sum / values.len() as f32], Saved::new(())))
    }

    fn backward(
        &mut self,
        saved: Saved,
        output_gradient: Value,
        ready: &mut Ready<'_>,
    ) -> Result<Option<Value>, BoxError> {
        saved.take::<()>()?;
        // The parameters must be materialised.
        let len = self.slot.values()?.len();
        let scale = output_gradient[0] / len as f32;
        for (gradient, weight) in self.gradient.chunks_mut(7).flat_map(|chunk| chunk.iter_mut().zip(WEIGHTS))
        {
            *gradient = scale * weight;
        }
        ready(0, Values::F32(&self.gradient))?;
        Ok(Some([output_gradient[0] / 2.0]))
    }
}

/// A block whose parameter is tied to that of an earlier block. It reports a gradient and does not read the values.
struct Again {
    infos: [ParamInfo; 1],
    gradient: Vec<f32>,
}

impl Params for Again {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }
}

impl Block<Value> for Again {
    fn forward(&mut self, input: Value) -> Result<(Value, Saved), BoxError> {
        Ok((input, Saved::new(())))
    }

    fn backward(
        &mut self,
        _: Saved,
        output_gradient: Value,
        ready: &mut Ready<'_>,
    ) -> Result<Option<Value>, BoxError> {
        ready(0, Values::F32(&self.gradient))?;
        Ok(Some(output_gradient))
    }
}

/// Returns a block for each length.
pub(crate) fn model(lens: &[usize], loaded: Materialised) -> Sequence<Value> {
    Sequence::new(blocks(lens, loaded)).unwrap()
}

/// Returns a block for each length, and one whose parameter is tied to that of the first.
pub(crate) fn tied_model(lens: &[usize], loaded: Materialised) -> Sequence<Value> {
    let mut blocks = blocks(lens, loaded);
    let infos = [ParamInfo::new("again", [lens[0]], FloatType::F32)];
    blocks.push(Box::new(Again { infos, gradient: vec![0.125; lens[0]] }));
    let mut model = Sequence::new(blocks).unwrap();
    model.tie("again", "block0").unwrap();
    model
}

fn blocks(lens: &[usize], loaded: Materialised) -> Vec<Box<dyn Block<Value>>> {
    let block = |(index, &len): (usize, &usize)| -> Box<dyn Block<Value>> {
        Box::new(Weights::new(format!("block{index}"), len, loaded))
    };
    lens.iter().enumerate().map(block).collect()
}

/// A function that computes a loss and its gradient.
type Loss = fn(Value) -> Result<(f32, Value), BoxError>;

/// Returns the input of a micro-batch, and its loss: half the square of the output.
pub(crate) fn batch(index: usize) -> Result<(Value, Loss), BoxError> {
    Ok(([index as f32], |output| Ok((output[0] * output[0] / 2.0, output))))
}

pub(crate) fn adamw() -> AdamW {
    AdamW::new(AdamWOptions::default()).unwrap()
}
