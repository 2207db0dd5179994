//! Communication hooks and gradient compression.
//!
//! A hook sums a bucket over all ranks in its own way. It runs on a worker thread beside the backward pass, with its
//! own communicator, so that compression overlaps with computation too. docs/book/src/compression.md has the bytes
//! that each hook sends, and its effect on unusual gradients.

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

/// A communication hook: a way to sum buckets of gradients over all ranks.
///
/// ```
/// use dist_collectives::{Communicator, ReduceOp};
/// use dist_parallel::compress::{BucketGradients, BucketHook};
/// use dist_parallel::{BoxError, ValuesMut};
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
    /// Returns the name with the settings. Every rank's hook must have the same name.
    fn name(&self) -> String;

    /// Returns `true` if gradients of a step can appear in a later step's sum. A parameter that has had a gradient
    /// then has one in every later step. [`forget`](Self::forget) must drop these gradients.
    fn keeps_residual(&self) -> bool {
        false
    }

    /// Drops the residuals of earlier steps, because other parameters were loaded.
    fn forget(&mut self) {}

    /// Replaces this rank's sum of gradients by the exact or approximate sum over all ranks, with the same bits on
    /// every rank. Buckets come in the same order on every rank.
    ///
    /// # Errors
    /// Communication or the hook fails. The job is aborted.
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
    /// The tensors in the bucket, one after the other.
    pub tensors: &'a [BucketTensor],
    /// The gradients, summed over this rank's micro-batches and not divided. Those of `f16` parameters are `f32`,
    /// their [type of sums](crate::FloatType::sum_dtype).
    pub values: ValuesMut<'a>,
}

/// The position of a tensor in its bucket.
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
    /// Returns tensors of these shapes, one after the other.
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

/// The choice of a hook, with a text form: `none`, `bf16`, `f16`, `int8`, `topk:0.01`, `powersgd:4`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub enum Compression {
    /// No hook: gradients are sent uncompressed.
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
        /// The fraction of each tensor that is sent: more than 0, at most 1.
        ratio: f64,
    },
    /// [`PowerSgdHook`].
    PowerSgd {
        /// The rank of the matrices that are sent, at least 1.
        rank: usize,
    },
}

impl Compression {
    /// Returns the hook, or `None` for no compression.
    ///
    /// # Errors
    /// The setting is out of range.
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

/// Runs an operation on gradients as `f32`, in which all hooks here compute. Other types are converted before and
/// rounded after.
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

#[expect(clippy::cast_possible_truncation, reason = "the function is for rounding")]
fn narrow(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
mod tests;
