//! Batch norm with the mean and variance over the rows of all ranks.

use std::fmt;
use std::ops::{AddAssign, Range};

use candle_core::{DType, Tensor};
use dist_collectives::ReduceOp;
use dist_parallel::model::{Pass, Ready, Saved, Slot};
use dist_parallel::{Block, BoxError, Communicator, FloatType, ParamInfo, Params, Values, ValuesMut};
use num_traits::Float;

use crate::CandleError;

/// Batch norm over the rows of all ranks, as one block of a model.
///
/// In training, the ranks of a communicator all-reduce the sums and sums of squares of each channel in the
/// forward pass, and two sums of gradients per channel in the backward pass. So a batch that is divided among
/// ranks is normalised as a whole. An evaluation uses the running mean and variance, and does not
/// communicate.
///
/// Statistics are summed in `f64`, and the gradients of the parameters in `f32`. Both use the canonical
/// order: over a rank's rows first, then over the ranks. If each rank has the same number of neighbouring
/// rows and it is a power of two, outputs and gradients have the bits of one process with all rows.
///
/// The block has the parameters `name.weight` and `name.bias`, and the [buffers](ParamInfo::buffer)
/// `name.running_mean` and `name.running_var`. All are of type `f32` and have the names of candle's batch
/// norm. The input is of a float type and has the shape rows × channels × any further dims.
///
/// All ranks of the communicator must run the same forward and backward passes in the same order. So the
/// number of micro-batches of a step must be a multiple of the number of ranks.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use dist_candle::{SequenceBuilder, SyncBatchNorm};
/// use dist_parallel::{Communicator, Ddp, DdpOptions};
///
/// let mut comm = Communicator::from_env()?;
/// let norm = SyncBatchNorm::new(comm.fork()?, "norm", 4, 1e-5)?;
/// let model = SequenceBuilder::new().plain_block(norm).build()?;
/// let mut ddp = Ddp::new(comm, model, DdpOptions::default())?;
/// let report = ddp.step(ddp.world_size(), |rank| {
///     let x = Tensor::arange(0f32, 32.0, &Device::Cpu)?.reshape((8, 4))?.affine(1.0, rank as f64)?;
///     Ok((x, |y: Tensor| Ok(dist_candle::loss_and_gradient(&y, |y| y.sqr()?.mean_all())?)))
/// })?;
/// assert!((report.loss - 1.0).abs() < 1e-3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "SynchronizedBatchNorm")]
pub struct SyncBatchNorm {
    name: String,
    infos: [ParamInfo; 4],
    slots: [Slot; 4],
    comm: Communicator,
    eps: f64,
    momentum: f64,
    trains: bool,
}

const WEIGHT: usize = 0;
const BIAS: usize = 1;
const RUNNING_MEAN: usize = 2;
const RUNNING_VAR: usize = 3;

/// The shape of an input: rows, channels, and the product of all further dims.
#[derive(Debug, Clone, Copy)]
struct Extent {
    rows: usize,
    channels: usize,
    positions: usize,
}

/// The data that a forward pass keeps for its backward pass.
struct SavedBatch {
    normalised: Vec<f64>,
    /// For each channel, 1 / √(variance + eps).
    factors: Vec<f64>,
    /// The number of values of a channel, summed over all ranks. `None` in an evaluation, in which mean and
    /// variance are constants.
    count: Option<f64>,
    extent: Extent,
}

impl SyncBatchNorm {
    /// Creates the block called `name` for inputs of `channels` channels. `comm` consists of the ranks that
    /// divide a batch: pass a [fork](Communicator::fork) of the trainer's communicator. `eps` is added to the
    /// variance.
    ///
    /// # Errors
    /// If `eps` is negative or NaN.
    pub fn new(
        comm: Communicator,
        name: impl Into<String>,
        channels: usize,
        eps: f64,
    ) -> Result<Self, CandleError> {
        let name = name.into();
        if eps.is_nan() || eps < 0.0 {
            let source = candle_core::Error::Msg(format!("eps is {eps} and must be at least 0"));
            return Err(CandleError::Candle { place: crate::variables::place(&name), source });
        }
        let named = |what: &str| format!("{name}.{what}");
        let infos = [
            ParamInfo::new(named("weight"), [channels], FloatType::F32),
            ParamInfo::new(named("bias"), [channels], FloatType::F32),
            ParamInfo::buffer(named("running_mean"), [channels], FloatType::F32),
            ParamInfo::buffer(named("running_var"), [channels], FloatType::F32),
        ];
        let slots = [1.0_f32, 0.0, 0.0, 1.0].map(|value| Slot::from(vec![value; channels]));
        Ok(Self { name, infos, slots, comm, eps, momentum: 0.1, trains: true })
    }

    /// Sets the weight of a new batch in the running mean and variance. It is 0.1 by default.
    #[must_use]
    pub fn with_momentum(self, momentum: f64) -> Self {
        Self { momentum, ..self }
    }

    fn failed(&self, doing: &str) -> impl Fn(candle_core::Error) -> CandleError + use<> {
        let place = format!("{}, {doing}", crate::variables::place(&self.name));
        move |source| CandleError::Candle { place: place.clone(), source }
    }

    fn extent(&self, x: &Tensor) -> candle_core::Result<Extent> {
        let channels = self.infos[WEIGHT].len();
        match x.dims() {
            [rows, found, rest @ ..] if *found == channels => {
                Ok(Extent { rows: *rows, channels, positions: rest.iter().product() })
            }
            dims => {
                candle_core::bail!("the input is {dims:?} and must be rows x {channels} channels x any dims")
            }
        }
    }

    fn values(&self, index: usize) -> Result<Vec<f64>, BoxError> {
        match self.slots[index].values()? {
            Values::F32(values) => Ok(values.iter().map(|&value| value.into()).collect()),
            other => Err(format!("{} is of type {}", self.infos[index].name, other.dtype()).into()),
        }
    }

    /// Returns each channel's mean and variance over the rows of all ranks, and the number of values of a
    /// channel on all ranks.
    fn statistics(&mut self, values: &[f64], extent: Extent) -> Result<(Vec<f64>, Vec<f64>, f64), BoxError> {
        let mut sums = extent.sums(|index| [values[index], values[index] * values[index]]);
        sums.push((extent.rows * extent.positions) as f64);
        self.comm.all_reduce(&mut sums, ReduceOp::Sum)?;
        let count = sums.pop().unwrap_or_default();
        if count < 2.0 {
            return Err(
                format!("block {}: a channel has {count} values and needs two to train", self.name).into()
            );
        }
        let means: Vec<f64> = sums.chunks_exact(2).map(|pair| pair[0] / count).collect();
        let variance = |(pair, mean): (&[f64], &f64)| (pair[1] / count - mean * mean).max(0.0);
        let variances = sums.chunks_exact(2).zip(&means).map(variance).collect();
        Ok((means, variances, count))
    }

    /// Sets running values to `(1 − momentum) · running + momentum · batch`.
    #[expect(clippy::cast_possible_truncation, reason = "running values are f32")]
    fn update_running(&mut self, index: usize, batch: impl Iterator<Item = f64>) -> Result<(), BoxError> {
        let momentum = self.momentum;
        let next = self.values(index)?.into_iter().zip(batch);
        let next: Vec<f32> =
            next.map(|(running, batch)| ((1.0 - momentum) * running + momentum * batch) as f32).collect();
        let mut copied = Ok(());
        self.slots[index].write(&mut |mut own: ValuesMut<'_>| copied = own.copy_from(Values::F32(&next)))?;
        Ok(copied?)
    }

    /// Returns each channel's mean and variance and, in training, the number of values of a channel on all
    /// ranks.
    fn moments(&mut self, values: &[f64], extent: Extent) -> Result<Moments, BoxError> {
        if !self.trains {
            return Ok((self.values(RUNNING_MEAN)?, self.values(RUNNING_VAR)?, None));
        }
        let (means, variances, count) = self.statistics(values, extent)?;
        self.update_running(RUNNING_MEAN, means.iter().copied())?;
        self.update_running(RUNNING_VAR, variances.iter().map(|variance| variance * count / (count - 1.0)))?;
        Ok((means, variances, Some(count)))
    }
}

type Moments = (Vec<f64>, Vec<f64>, Option<f64>);

impl Extent {
    /// Returns the channel of a value.
    const fn channel(self, index: usize) -> usize {
        index / self.positions % self.channels
    }

    /// Sums `numbers(index)` over all values of each channel. Returns two sums per channel. Rows are summed
    /// in the canonical order.
    fn sums<T: Float + AddAssign>(self, numbers: impl Fn(usize) -> [T; 2]) -> Vec<T> {
        let of_row = |row: usize| {
            let mut sums = vec![T::zero(); 2 * self.channels];
            let len = self.channels * self.positions;
            for index in row * len..(row + 1) * len {
                let channel = self.channel(index);
                let [one, other] = numbers(index);
                sums[2 * channel] += one;
                sums[2 * channel + 1] += other;
            }
            sums
        };
        if self.rows == 0 { vec![T::zero(); 2 * self.channels] } else { tree(0..self.rows, &of_row) }
    }
}

/// Sums the vectors of n rows in the canonical order: T(n) = T(largest power of two below n) + T(rest).
fn tree<T: AddAssign>(rows: Range<usize>, of_row: &impl Fn(usize) -> Vec<T>) -> Vec<T> {
    if rows.len() == 1 {
        return of_row(rows.start);
    }
    let middle = rows.start + rows.len().next_power_of_two() / 2;
    let mut sum = tree(rows.start..middle, of_row);
    sum.iter_mut().zip(tree(middle..rows.end, of_row)).for_each(|(left, right)| *left += right);
    sum
}

fn f64s(tensor: &Tensor) -> candle_core::Result<Vec<f64>> {
    tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()
}

fn like(tensor: &Tensor, values: Vec<f64>) -> candle_core::Result<Tensor> {
    Tensor::from_vec(values, tensor.shape(), tensor.device())?.to_dtype(tensor.dtype())
}

impl Params for SyncBatchNorm {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn begin_forward(&mut self, pass: Pass) {
        self.trains = pass.training;
    }

    fn slots(&self) -> &[Slot] {
        &self.slots
    }

    fn slots_mut(&mut self) -> &mut [Slot] {
        &mut self.slots
    }
}

impl Block<Tensor> for SyncBatchNorm {
    fn forward(&mut self, input: Tensor) -> Result<(Tensor, Saved), BoxError> {
        let failed = self.failed("forward");
        let extent = self.extent(&input).map_err(&failed)?;
        let values = f64s(&input).map_err(&failed)?;
        let (means, variances, count) = self.moments(&values, extent)?;
        let (weight, bias) = (self.values(WEIGHT)?, self.values(BIAS)?);
        let factors: Vec<f64> = variances.iter().map(|variance| 1.0 / (variance + self.eps).sqrt()).collect();
        let normalise = |(index, value): (usize, f64)| {
            let channel = extent.channel(index);
            (value - means[channel]) * factors[channel]
        };
        let normalised: Vec<f64> = values.into_iter().enumerate().map(normalise).collect();
        let scale = |(index, value): (usize, &f64)| {
            let channel = extent.channel(index);
            value * weight[channel] + bias[channel]
        };
        let output = normalised.iter().enumerate().map(scale).collect();
        let output = like(&input, output).map_err(&failed)?;
        Ok((output, Saved::new(SavedBatch { normalised, factors, count, extent })))
    }

    #[expect(clippy::cast_possible_truncation, reason = "parameters are f32")]
    fn backward(
        &mut self,
        saved: Saved,
        output_gradient: Tensor,
        ready: &mut Ready<'_>,
    ) -> Result<Option<Tensor>, BoxError> {
        let failed = self.failed("backward");
        let SavedBatch { normalised, factors, count, extent } = saved.take()?;
        let gradient = f64s(&output_gradient).map_err(&failed)?;
        if gradient.len() != normalised.len() {
            return Err(CandleError::TensorCount { expected: normalised.len(), got: gradient.len() }.into());
        }
        let mut sums = extent.sums(|index| [gradient[index], gradient[index] * normalised[index]]);
        // In the parameters' type, in which the trainer adds the gradients of other ranks.
        let of_parameters =
            extent.sums(|index| [gradient[index] as f32, (gradient[index] * normalised[index]) as f32]);
        let of = |place: usize| of_parameters.chunks_exact(2).map(|pair| pair[place]).collect::<Vec<_>>();
        ready(BIAS, Values::F32(&of(0)))?;
        ready(WEIGHT, Values::F32(&of(1)))?;
        if count.is_some() {
            self.comm.all_reduce(&mut sums, ReduceOp::Sum)?;
        }
        let weight = self.values(WEIGHT)?;
        let of_input = |(index, gradient): (usize, f64)| {
            let channel = extent.channel(index);
            let [mean, along] =
                count.map_or([0.0; 2], |count| [sums[2 * channel] / count, sums[2 * channel + 1] / count]);
            weight[channel] * factors[channel] * (gradient - mean - normalised[index] * along)
        };
        let of_input = gradient.into_iter().enumerate().map(of_input).collect();
        Ok(Some(like(&output_gradient, of_input).map_err(&failed)?))
    }
}

impl fmt::Debug for SyncBatchNorm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SyncBatchNorm({}, {} channels, {:?})", self.name, self.infos[WEIGHT].len(), self.comm)
    }
}
