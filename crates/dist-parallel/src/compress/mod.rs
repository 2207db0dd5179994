//! What buckets of gradients look like while they travel.
//!
//! A hook sums a bucket over all ranks in its own way. It runs on a thread of its own beside the backward pass, with
//! a communicator of its own, so that compressing is hidden like communicating. What it sends is what travels:
//! docs/book/src/compression.md has the bytes of each, and what each does to unusual gradients.

mod halves;
mod int8;
mod power_sgd;
mod residual;
mod top_k;

use std::fmt;
use std::str::FromStr;

use dist_collectives::Communicator;
pub use halves::{Bf16Hook, F16Hook};
pub use int8::Int8Hook;
pub use power_sgd::PowerSgdHook;
pub use top_k::{SparseGradient, TopKHook};

use crate::number::Number;
use crate::{BoxError, Error, Result, ValuesMut};

/// A way to sum buckets of gradients over all ranks.
///
/// ```
/// use dist_collectives::{Communicator, ReduceOp};
/// use dist_parallel::{BoxError, BucketGradients, BucketHook, ValuesMut};
///
/// /// Sums as usual, and counts.
/// struct Counting(usize);
///
/// impl BucketHook for Counting {
///     fn name(&self) -> String {
///         "counting".to_owned()
///     }
///
///     fn sum(&mut self, bucket: BucketGradients<'_>, comm: &mut Communicator) -> Result<(), BoxError> {
///         self.0 += 1;
///         match bucket.values {
///             ValuesMut::F32(values) => Ok(comm.all_reduce(values, ReduceOp::Sum)?),
///             _ => Err("this hook sums f32".into()),
///         }
///     }
/// }
/// ```
pub trait BucketHook: Send {
    /// What it is, with its settings: every rank's hook must have the same name.
    fn name(&self) -> String;

    /// Whether something of a step's gradients may come out of a later step's sum. A parameter that has had a
    /// gradient then has one in every later step. Such a hook forgets it in [`forget`](Self::forget).
    fn keeps_residual(&self) -> bool {
        false
    }

    /// Forgets what it keeps of earlier steps: parameters were loaded that these have nothing to do with.
    fn forget(&mut self) {}

    /// Replaces this rank's sum of gradients by the sum over all ranks, or what comes near to it: the same bits on
    /// every rank. Buckets come in the same order on every rank.
    ///
    /// # Errors
    /// If communication fails, or anything else. The job is aborted.
    fn sum(&mut self, bucket: BucketGradients<'_>, comm: &mut Communicator) -> Result<(), BoxError>;
}

impl<H: BucketHook + ?Sized> BucketHook for Box<H> {
    fn name(&self) -> String {
        (**self).name()
    }

    fn keeps_residual(&self) -> bool {
        (**self).keeps_residual()
    }

    fn forget(&mut self) {
        (**self).forget();
    }

    fn sum(&mut self, bucket: BucketGradients<'_>, comm: &mut Communicator) -> Result<(), BoxError> {
        (**self).sum(bucket, comm)
    }
}

/// One bucket of one step.
#[derive(Debug)]
pub struct BucketGradients<'a> {
    /// The bucket's number in the plan.
    pub bucket: usize,
    /// Which tensors lie in it, one after the other.
    pub tensors: &'a [BucketTensor],
    /// The gradients: summed over this rank's micro-batches, not divided. Those of `f16` parameters are `f32` here, the
    /// [type that their sums are carried in](crate::FloatType::sum_dtype).
    pub values: ValuesMut<'a>,
}

/// A tensor's place in its bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketTensor {
    /// Its shape.
    pub shape: Vec<usize>,
    /// The index of its first value in the bucket.
    pub offset: usize,
    /// The number of its values.
    pub len: usize,
}

impl BucketTensor {
    /// Tensors of these shapes, one after the other.
    pub fn row(shapes: impl IntoIterator<Item = Vec<usize>>) -> Vec<Self> {
        let mut end = 0;
        let place = |shape: Vec<usize>| {
            let (offset, len) = (end, shape.iter().product());
            end += len;
            Self { shape, offset, len }
        };
        shapes.into_iter().map(place).collect()
    }
}

/// A choice of a hook, as it is written down: `none`, `bf16`, `f16`, `int8`, `topk:0.01`, `powersgd:4`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub enum Compression {
    /// No hook: gradients travel as they are.
    #[default]
    None,
    /// [`Bf16Hook`].
    Bf16,
    /// [`F16Hook`].
    F16,
    /// [`Int8Hook`].
    Int8,
    /// [`TopKHook`].
    TopK {
        /// How much of each tensor travels: more than 0, at most 1.
        ratio: f64,
    },
    /// [`PowerSgdHook`].
    PowerSgd {
        /// The rank of the matrices that travel, at least 1.
        rank: usize,
    },
}

impl Compression {
    /// The hook of this choice, if there is one.
    ///
    /// # Errors
    /// If its setting makes no sense.
    pub fn hook(self) -> Result<Option<Box<dyn BucketHook>>> {
        Ok(Some(match self {
            Self::None => return Ok(None),
            Self::Bf16 => Box::new(Bf16Hook::default()),
            Self::F16 => Box::new(F16Hook::default()),
            Self::Int8 => Box::new(Int8Hook::default()),
            Self::TopK { ratio } => Box::new(TopKHook::new(ratio)?),
            Self::PowerSgd { rank } => Box::new(PowerSgdHook::new(rank)?),
        }))
    }
}

impl FromStr for Compression {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let unknown = || Error::UnknownCompression { text: text.to_owned() };
        let compression = match text.split_once(':') {
            None => match text {
                "none" => Self::None,
                "bf16" => Self::Bf16,
                "f16" => Self::F16,
                "int8" => Self::Int8,
                _ => return Err(unknown()),
            },
            Some(("topk", ratio)) => Self::TopK { ratio: ratio.parse().map_err(|_| unknown())? },
            Some(("powersgd", rank)) => Self::PowerSgd { rank: rank.parse().map_err(|_| unknown())? },
            Some(_) => return Err(unknown()),
        };
        compression.hook().map(|_| compression)
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Bf16 => f.write_str("bf16"),
            Self::F16 => f.write_str("f16"),
            Self::Int8 => f.write_str("int8"),
            Self::TopK { ratio } => write!(f, "topk:{ratio}"),
            Self::PowerSgd { rank } => write!(f, "powersgd:{rank}"),
        }
    }
}

/// Does something to gradients as `f32`, in which all hooks here calculate: those of other types are rounded or
/// widened before, and rounded after.
fn as_f32<E>(values: ValuesMut<'_>, operation: impl FnOnce(&mut [f32]) -> Result<(), E>) -> Result<(), E> {
    match values {
        ValuesMut::F32(values) => operation(values),
        ValuesMut::F64(values) => converted(values, narrow, f64::from, operation),
        ValuesMut::F16(values) => converted(values, Number::widen, Number::narrow, operation),
        ValuesMut::Bf16(values) => converted(values, Number::widen, Number::narrow, operation),
    }
}

fn converted<T: Copy, E>(
    values: &mut [T],
    to: fn(T) -> f32,
    from: fn(f32) -> T,
    operation: impl FnOnce(&mut [f32]) -> Result<(), E>,
) -> Result<(), E> {
    let mut singles: Vec<f32> = values.iter().map(|&value| to(value)).collect();
    operation(&mut singles)?;
    for (value, single) in values.iter_mut().zip(singles) {
        *value = from(single);
    }
    Ok(())
}

#[expect(clippy::cast_possible_truncation, reason = "rounding is what it is for")]
fn narrow(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
mod tests;
