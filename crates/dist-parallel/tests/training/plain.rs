//! Small models on plain vectors, and their training data.

use std::sync::{Arc, Mutex};

use dist_parallel::model::{BufferView, Materialised, Ready, Resharded, Saved, Slot};
use dist_parallel::{Block, BoxError, FloatType, ParamInfo, Params, Sequence, Values, ValuesMut};
use half::{bf16, f16};

/// An activation: the rows of a batch, one after the other.
pub(crate) type Rows = Vec<f32>;

/// Memory that two parameters can share.
type Memory = Arc<Mutex<Slot>>;

/// A block that computes rows · weightᵀ + bias.
pub(crate) struct Linear {
    infos: Vec<ParamInfo>,
    memory: Vec<Memory>,
    from: usize,
    to: usize,
    /// `true` if it copies views.
    copies: bool,
}

impl Linear {
    /// Returns a block with values that depend on the seed.
    pub(crate) fn new(name: &str, from: usize, to: usize, seed: u64) -> Self {
        let info =
            |what: &str, shape: &[usize]| ParamInfo::new(format!("{name}.{what}"), shape, FloatType::F32);
        let infos = vec![info("weight", &[to, from]), info("bias", &[to])];
        let mut numbers = Numbers(seed);
        let memory = |len| Arc::new(Mutex::new(Slot::from(numbers.take(len))));
        let memory = [from * to, to].map(memory).into();
        Self { infos, memory, from, to, copies: false }
    }

    /// Returns another block with the weight of this one. The sequence of both must tie them.
    pub(crate) fn sharing_weight(&self, name: &str, seed: u64) -> Self {
        let mut other = Self::new(name, self.from, self.to, seed);
        other.memory[0] = self.memory[0].clone();
        other
    }

    pub(crate) fn frozen(mut self) -> Self {
        self.infos.iter_mut().for_each(|info| info.trainable = false);
        self
    }

    fn values(&self, index: usize) -> Vec<f32> {
        match self.memory[index].lock().unwrap().values().unwrap() {
            Values::F32(values) => values.to_vec(),
            other => panic!("the model is not {}", other.dtype()),
        }
    }
}

impl Params for Linear {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn read(&self, index: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        f(self.memory[index].lock().unwrap().values()?);
        Ok(())
    }

    fn write(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        self.memory[index].lock().unwrap().write(f)
    }

    fn materialise(&mut self, index: usize, values: BufferView) -> Result<Materialised, BoxError> {
        if self.copies {
            self.write(index, &mut |mut own| own.copy_from(values.values()).unwrap())?;
            return Ok(Materialised::Copied);
        }
        self.memory[index].lock().unwrap().materialise(values)
    }

    fn fill(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<bool, BoxError> {
        if self.copies {
            self.write(index, f)?;
        }
        Ok(self.copies)
    }

    fn reshard(&mut self, index: usize) -> Result<Resharded, BoxError> {
        Ok(self.memory[index].lock().unwrap().reshard())
    }
}

impl Block<Rows> for Linear {
    fn forward(&mut self, input: Rows) -> Result<(Rows, Saved), BoxError> {
        let (weight, bias) = (self.values(0), self.values(1));
        let row = |row: &[f32]| {
            let dot = |line: &[f32]| line.iter().zip(row).map(|(w, x)| w * x).sum::<f32>();
            weight.chunks(self.from).zip(&bias).map(|(line, b)| dot(line) + b).collect::<Rows>()
        };
        let output = input.chunks(self.from).flat_map(row).collect();
        Ok((output, Saved::new(input)))
    }

    fn backward(
        &mut self,
        saved: Saved,
        output_gradient: Rows,
        ready: &mut Ready<'_>,
    ) -> Result<Option<Rows>, BoxError> {
        let (of_input, left) = self.input_gradient(saved, output_gradient, ready)?;
        self.weight_gradient(left, ready)?;
        Ok(of_input)
    }

    fn input_gradient(
        &mut self,
        saved: Saved,
        output_gradient: Rows,
        _: &mut Ready<'_>,
    ) -> Result<(Option<Rows>, Saved), BoxError> {
        let input: Rows = saved.take()?;
        let weight = self.values(0);
        let mut of_input = vec![0.0; input.len()];
        for (of_row, of_output) in of_input.chunks_mut(self.from).zip(output_gradient.chunks(self.to)) {
            for (line, g) in weight.chunks(self.from).zip(of_output) {
                of_row.iter_mut().zip(line).for_each(|(of_column, weight)| *of_column += g * weight);
            }
        }
        Ok((Some(of_input), Saved::new((input, output_gradient))))
    }

    fn weight_gradient(&mut self, saved: Saved, ready: &mut Ready<'_>) -> Result<(), BoxError> {
        let (input, output_gradient): (Rows, Rows) = saved.take()?;
        let mut of_weight = vec![0.0; self.from * self.to];
        let mut of_bias = vec![0.0; self.to];
        for (row, of_output) in input.chunks(self.from).zip(output_gradient.chunks(self.to)) {
            let lines = of_weight.chunks_mut(self.from).zip(&mut of_bias);
            for ((of_line, of_bias), g) in lines.zip(of_output) {
                *of_bias += g;
                of_line.iter_mut().zip(row).for_each(|(of_weight, x)| *of_weight += g * x);
            }
        }
        ready(1, Values::F32(&of_bias))?;
        ready(0, Values::F32(&of_weight))
    }
}

/// A block that computes max(x, 0), without parameters.
pub(crate) struct Relu;

impl Params for Relu {
    fn infos(&self) -> &[ParamInfo] {
        &[]
    }
}

impl Block<Rows> for Relu {
    fn forward(&mut self, input: Rows) -> Result<(Rows, Saved), BoxError> {
        Ok((input.iter().map(|x| x.max(0.0)).collect(), Saved::new(input)))
    }

    fn backward(
        &mut self,
        saved: Saved,
        output_gradient: Rows,
        _: &mut Ready<'_>,
    ) -> Result<Option<Rows>, BoxError> {
        let input: Rows = saved.take()?;
        let passed = output_gradient.into_iter().zip(input).map(|(g, x)| if x > 0.0 { g } else { 0.0 });
        Ok(Some(passed.collect()))
    }
}

/// Returns the mean of squared differences, and its gradient.
pub(crate) fn squared_error(target: Rows) -> impl FnOnce(Rows) -> Result<(f32, Rows), BoxError> {
    move |output| {
        let count = u16::try_from(output.len()).map(f32::from)?;
        let differences: Vec<f32> = output.iter().zip(&target).map(|(o, t)| o - t).collect();
        let loss = differences.iter().map(|d| d * d).sum::<f32>() / count;
        Ok((loss, differences.into_iter().map(|d| 2.0 * d / count).collect()))
    }
}

/// Returns a model with 3 inputs, two hidden layers with one weight, a frozen layer, and 2 outputs.
pub(crate) fn model(seed: u64) -> Sequence<Rows> {
    model_that(seed, false)
}

/// Returns the same model, whose blocks copy views or keep them.
pub(crate) fn model_that(seed: u64, copies: bool) -> Sequence<Rows> {
    let linear = |name, from, to, seed| Linear { copies, ..Linear::new(name, from, to, seed) };
    let first = linear("first", 3, 3, seed);
    let again = Linear { copies, ..first.sharing_weight("again", seed + 1) };
    let frozen = linear("frozen", 3, 4, seed + 2).frozen();
    let last = linear("last", 4, 2, seed + 3);
    let blocks: Vec<Box<dyn Block<Rows>>> = vec![
        Box::new(first),
        Box::new(Relu),
        Box::new(again),
        Box::new(frozen),
        Box::new(Relu),
        Box::new(last),
    ];
    let mut model = Sequence::new(blocks).unwrap();
    model.tie("again.weight", "first.weight").unwrap();
    model
}

/// Returns the input of micro-batch `index` of a step, two rows, and its target.
pub(crate) fn micro_batch(step: usize, index: usize) -> (Rows, Rows) {
    let mut numbers = Numbers((step * 1000 + index) as u64);
    let input: Rows = numbers.take(6);
    let target = input.chunks(3).flat_map(|row| [row[0] - row[1], row.iter().sum::<f32>().sin()]).collect();
    (input, target)
}

/// The loss of an output, and its gradient.
pub(crate) type Differentiate = Box<dyn FnOnce(Rows) -> Result<(f32, Rows), BoxError>>;

/// Returns a function that returns the input of a micro-batch of a step, and computes its loss.
pub(crate) fn batch(step: usize) -> impl Fn(usize) -> Result<(Rows, Differentiate), BoxError> + Copy {
    move |index| {
        let (input, target) = micro_batch(step, index);
        Ok((input, Box::new(squared_error(target)) as Differentiate))
    }
}

/// Returns all parameters, as bits.
pub(crate) fn bits(model: &dyn Params) -> Vec<u32> {
    let mut bits = Vec::new();
    for index in 0..model.infos().len() {
        let mut append = |values: Values<'_>| match values {
            Values::F32(values) => bits.extend(values.iter().map(|value| value.to_bits())),
            Values::F64(values) => {
                bits.extend(values.iter().flat_map(|value| bytemuck::cast::<f64, [u32; 2]>(*value)));
            }
            Values::F16(values) => bits.extend(values.iter().map(|value| u32::from(value.to_bits()))),
            Values::Bf16(values) => bits.extend(values.iter().map(|value| u32::from(value.to_bits()))),
        };
        model.read(index, &mut append).unwrap();
    }
    bits
}

/// Returns pseudo-random numbers between −1 and 1 (splitmix64).
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn take(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }

    pub(crate) fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        f32::from(i16::try_from((z >> 48) as i64 - 32_768).unwrap()) / 32_768.0
    }
}

/// Implements [`Params`] for a block with the fields `infos` and `slots`.
macro_rules! params_in_slots {
    ($block:ty) => {
        impl ::dist_parallel::Params for $block {
            fn infos(&self) -> &[::dist_parallel::ParamInfo] {
                &self.infos
            }

            fn slots(&self) -> &[::dist_parallel::model::Slot] {
                &self.slots
            }

            fn slots_mut(&mut self) -> &mut [::dist_parallel::model::Slot] {
                &mut self.slots
            }
        }
    };
}
#[allow(unused_imports, reason = "other tests use it")]
pub(crate) use params_in_slots;

/// Returns these values, rounded to a type.
pub(crate) fn rounded(dtype: FloatType, values: &[f32]) -> Slot {
    match dtype {
        FloatType::F32 => values.to_vec().into(),
        FloatType::F64 => values.iter().map(|&value| f64::from(value)).collect::<Vec<_>>().into(),
        FloatType::F16 => values.iter().map(|&value| f16::from_f32(value)).collect::<Vec<_>>().into(),
        FloatType::Bf16 => values.iter().map(|&value| bf16::from_f32(value)).collect::<Vec<_>>().into(),
    }
}

/// Returns values of any type as `f32`.
#[allow(clippy::cast_possible_truncation, reason = "master parameters in f64 are compared as f32")]
pub(crate) fn floats(values: Values<'_>) -> Vec<f32> {
    match values {
        Values::F32(values) => values.to_vec(),
        Values::F64(values) => values.iter().map(|&value| value as f32).collect(),
        Values::F16(values) => values.iter().map(|value| value.to_f32()).collect(),
        Values::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
    }
}

/// Parameters of any type, without a computation.
pub(crate) struct Bag {
    infos: Vec<ParamInfo>,
    slots: Vec<Slot>,
}

impl Bag {
    pub(crate) fn new(infos: Vec<ParamInfo>, seed: u64) -> Self {
        let mut numbers = Numbers(seed);
        let slots = infos.iter().map(|info| rounded(info.dtype, &numbers.take(info.len()))).collect();
        Self { infos, slots }
    }

    /// Returns the values of one parameter.
    pub(crate) fn values(&self, index: usize) -> Values<'_> {
        self.slots[index].values().unwrap()
    }

    /// Reports a gradient for every parameter, different for every number.
    pub(crate) fn report(&self, number: usize, ready: &mut Ready<'_>) -> Result<f32, BoxError> {
        let mut numbers = Numbers(number as u64);
        for (index, info) in self.infos.iter().enumerate().rev() {
            ready(index, rounded(info.dtype, &numbers.take(info.len())).values()?)?;
        }
        Ok(numbers.next())
    }
}

params_in_slots!(Bag);
