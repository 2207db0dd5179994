//! Models as lists of named parameters.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::flat::Flat;
use crate::{
    BoxError, BucketPlace, BufferView, Error, Materialised, Pass, Resharded, Result, Slot, Values, ValuesMut,
};

/// Named parameters in an order that is the same on every rank.
///
/// Broadcasts, gradient reduction and checkpoints need nothing else of a model. A model whose parameters lie in
/// [`Slot`]s returns the slots. Other models implement the access to each parameter.
///
/// ```
/// use dist_parallel::model::Slot;
/// use dist_parallel::{FloatType, ParamInfo, Params};
///
/// struct Scale {
///     infos: [ParamInfo; 1],
///     slots: [Slot; 1],
/// }
///
/// impl Params for Scale {
///     fn infos(&self) -> &[ParamInfo] {
///         &self.infos
///     }
///
///     fn slots(&self) -> &[Slot] {
///         &self.slots
///     }
///
///     fn slots_mut(&mut self) -> &mut [Slot] {
///         &mut self.slots
///     }
/// }
///
/// let infos = [ParamInfo::new("scale", [2], FloatType::F32)];
/// let mut model = Scale { infos, slots: [Slot::from(vec![1.0_f32, 2.0])] };
/// model.write(0, &mut |mut values| values.copy_from([3.0_f32, 4.0][..].into()).unwrap()).unwrap();
/// model.read(0, &mut |values| assert_eq!(values, [3.0_f32, 4.0][..].into())).unwrap();
/// ```
pub trait Params: Send {
    /// Returns the parameters. The list never changes.
    fn infos(&self) -> &[ParamInfo];

    /// Receives the description of the forward that the model is about to compute. Trainers call this before every
    /// forward of a micro-batch, in steps and in evaluations. The provided method ignores it.
    ///
    /// Other forwards can begin before the backward of this one. A block that computes its forward again in its
    /// backward therefore keeps the description in its [`Saved`](crate::Saved).
    fn begin_forward(&mut self, _pass: Pass) {}

    /// Returns the slots of the parameters, one for each. The provided method returns none.
    fn slots(&self) -> &[Slot] {
        &[]
    }

    /// Returns the same slots, to change them.
    fn slots_mut(&mut self) -> &mut [Slot] {
        &mut []
    }

    /// Calls `f` once with the values of parameter `index`, in row-major order. The provided method is for parameters
    /// in slots.
    ///
    /// # Errors
    /// The values are not accessible.
    fn read(&self, index: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        let slot = self.slots().get(index).ok_or(Error::NoSlot { index })?;
        f(slot.values()?);
        Ok(())
    }

    /// Calls `f` once with the memory of parameter `index`, which `f` may overwrite. The provided method is for
    /// parameters in slots.
    ///
    /// # Errors
    /// The memory is not accessible.
    fn write(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        self.slots_mut().get_mut(index).ok_or(Error::NoSlot { index })?.write(f)
    }

    /// Materialises parameter `index`: a sharded model is about to use these values, until
    /// [`reshard`](Params::reshard).
    ///
    /// The provided method puts the view into the parameter's slot, or copies the values into the parameter's own
    /// memory.
    ///
    /// # Errors
    /// The values differ from the parameter in length or type, or its memory is not accessible.
    fn materialise(&mut self, index: usize, values: BufferView) -> Result<Materialised, BoxError> {
        if let Some(slot) = self.slots_mut().get_mut(index) {
            return slot.materialise(values);
        }
        let mut copied = Err(Error::Freed);
        self.write(index, &mut |mut own| copied = own.copy_from(values.values()))?;
        copied?;
        Ok(Materialised::Copied)
    }

    /// Calls `f` with the model's own memory of parameter `index`, whose contents are unspecified, and returns
    /// `true`. It is for a model that copies in [`materialise`](Params::materialise). It saves the intermediate
    /// buffer if ranks read shards in place.
    ///
    /// Returns `false` without a call if the model prefers a view of the values. The provided method does that.
    ///
    /// # Errors
    /// The memory is not accessible.
    fn fill(&mut self, _index: usize, _f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<bool, BoxError> {
        Ok(false)
    }

    /// Frees the memory of parameter `index`, which is not used until it is materialised again.
    ///
    /// The provided method frees the parameter's slot. A parameter without a slot keeps its memory, and sharding the
    /// model then saves none.
    ///
    /// # Errors
    /// There is no such parameter.
    fn reshard(&mut self, index: usize) -> Result<Resharded, BoxError> {
        Ok(self.slots_mut().get_mut(index).map_or(Resharded::Kept, Slot::reshard))
    }
}

/// The description of one parameter.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ParamInfo {
    /// The name, unique in the model.
    pub name: String,
    /// The shape, empty for a single value.
    pub shape: Vec<usize>,
    /// The type of the values.
    pub dtype: FloatType,
    /// `true` if training changes the parameter. A frozen parameter has no gradient.
    ///
    /// A parameter that is neither trainable nor a [buffer](Self::buffer) is constant: a block must not change it.
    pub trainable: bool,
    /// The index of the earlier parameter that this one is tied to. They share their memory. The gradient of this one
    /// is added to that of the other, and its values are never written under this index.
    pub same_as: Option<usize>,
    /// The synchronisation of a buffer after a step, or `None` for a parameter.
    ///
    /// A buffer is state that a block changes by itself during a forward and that no gradient reaches, such as the
    /// running mean of a batch norm or a counter. Every rank has all of it, under every strategy: it is never sharded
    /// and never freed. A checkpoint contains it once, and loading gives it to every rank. A buffer is not trainable.
    pub buffer: Option<BufferSync>,
}

/// The synchronisation of a buffer between the ranks at the end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum BufferSync {
    /// Every rank gets the values of rank 0, as in PyTorch. If rank 0 has not gone forward since the last step, they
    /// are those of the first rank that has.
    #[default]
    Broadcast,
    /// Every rank gets the mean over the ranks that have gone forward since the last step. It is computed in `f64`
    /// for `f64` and in `f32` for all other types.
    Mean,
    /// Every rank keeps its own values. A checkpoint has those of rank 0.
    Local,
}

impl ParamInfo {
    /// Returns a trainable parameter that is not tied to another.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, dtype: FloatType) -> Self {
        Self { name: name.into(), shape: shape.into(), dtype, trainable: true, same_as: None, buffer: None }
    }

    /// Returns a [buffer](Self::buffer). Every rank gets the values of rank 0 after a step.
    ///
    /// ```
    /// use dist_parallel::model::BufferSync;
    /// use dist_parallel::{FloatType, ParamInfo};
    ///
    /// let running_mean = ParamInfo::buffer("norm.running_mean", [64], FloatType::F32);
    /// assert_eq!((running_mean.trainable, running_mean.buffer), (false, Some(BufferSync::Broadcast)));
    /// let averaged = running_mean.with_sync(BufferSync::Mean);
    /// assert_eq!(averaged.buffer, Some(BufferSync::Mean));
    /// ```
    #[doc(alias = "register_buffer")]
    pub fn buffer(name: impl Into<String>, shape: impl Into<Vec<usize>>, dtype: FloatType) -> Self {
        Self::new(name, shape, dtype).with_sync(BufferSync::default())
    }

    /// Returns this parameter as a buffer with this synchronisation.
    #[must_use]
    pub fn with_sync(self, sync: BufferSync) -> Self {
        Self { trainable: false, buffer: Some(sync), ..self }
    }

    /// Returns `true` if neither training nor a block changes it.
    pub(crate) const fn is_constant(&self) -> bool {
        !self.trainable && self.buffer.is_none()
    }

    /// Returns the number of values.
    #[expect(clippy::len_without_is_empty, reason = "a parameter is not a container")]
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

impl fmt::Display for ParamInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} {}", self.name, self.shape, self.dtype)?;
        match (self.buffer, self.trainable) {
            (Some(sync), _) => write!(f, ", a buffer ({sync:?})")?,
            (None, false) => f.write_str(", frozen")?,
            (None, true) => {}
        }
        self.same_as.map_or(Ok(()), |index| write!(f, ", tied to number {index}"))
    }
}

/// A type of parameters and gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum FloatType {
    /// 32 bits.
    F32,
    /// 64 bits.
    F64,
    /// 16 bits, the IEEE format.
    F16,
    /// 16 bits, the upper half of an `f32`.
    Bf16,
}

impl FloatType {
    /// Returns the number of bytes of one value.
    pub const fn size(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// Returns the type in which sums of gradients of this type are kept, in memory and on the wire: `f32` for `f16`,
    /// whose range sums exceed easily, otherwise this type. A mean gradient is rounded to this type once, after the
    /// division.
    ///
    /// ```
    /// use dist_parallel::FloatType;
    ///
    /// assert_eq!(FloatType::F16.sum_dtype(), FloatType::F32);
    /// assert_eq!(FloatType::Bf16.sum_dtype(), FloatType::Bf16);
    /// ```
    pub const fn sum_dtype(self) -> Self {
        match self {
            Self::F16 => Self::F32,
            other => other,
        }
    }

    /// Returns the name in programs: `f32`, `f64`, `f16` or `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for FloatType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Returns an error unless names are unique, buffers are not trainable and ties are valid.
pub(crate) fn validate(infos: &[ParamInfo]) -> Result<()> {
    let mut names = HashSet::new();
    (0..infos.len()).try_for_each(|index| {
        if !names.insert(&infos[index].name) {
            return Err(Error::DuplicateName { name: infos[index].name.clone() });
        }
        if infos[index].trainable && infos[index].buffer.is_some() {
            return Err(Error::TrainableBuffer { name: infos[index].name.clone() });
        }
        validate_tie(infos, index)
    })
}

/// Returns an error if a parameter has an invalid tie.
pub(crate) fn validate_tie(infos: &[ParamInfo], index: usize) -> Result<()> {
    let info = &infos[index];
    let Some(earlier) = info.same_as else { return Ok(()) };
    let other = infos.get(earlier);
    let reason = match other {
        Some(_) if earlier >= index => "the other does not come first",
        Some(other) if other.same_as.is_some() => "the other is itself tied",
        Some(other) if (&info.shape, info.dtype) != (&other.shape, other.dtype) => {
            "they differ in shape or type"
        }
        Some(other) if info.trainable != other.trainable => "only one of them is trainable",
        Some(other) if info.buffer != other.buffer => "they are not the same kind of buffer",
        Some(_) => return Ok(()),
        None => "there is no such parameter",
    };
    let same_as = other.map_or_else(|| format!("number {earlier}"), |other| other.name.clone());
    Err(Error::CannotTie { name: info.name.clone(), same_as, reason })
}

/// Reads a parameter and checks that its values match its description.
pub(crate) fn read(model: &impl Params, parameter: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<()> {
    let info = &model.infos()[parameter];
    let mut outcome = None;
    let called = model.read(parameter, &mut |values| {
        outcome = Some(check_values(info, values).map(|()| f(values)));
    });
    handed_out(info, called, outcome.map(|looks| looks.map(Ok)))
}

/// Copies parameters to their places in a buffer and converts them to its type.
pub(crate) fn pack(model: &impl Params, places: &[BucketPlace], buffer: &mut Flat) -> Result<()> {
    places.iter().try_for_each(|&BucketPlace { parameter, offset, len }| {
        read(model, parameter, &mut |values| buffer.slice_mut(offset, len).convert_from(values))
    })
}

/// Copies parameters from their places in a buffer and converts them to their own types.
pub(crate) fn unpack(model: &mut impl Params, places: &[BucketPlace], buffer: &Flat) -> Result<()> {
    places.iter().try_for_each(|&BucketPlace { parameter, offset, len }| {
        write(model, parameter, |mut values| {
            values.convert_from(buffer.slice(offset, len));
            Ok(())
        })
    })
}

/// Materialises parameters as views of one buffer.
pub(crate) fn materialise(model: &mut impl Params, places: &[BucketPlace], buffer: &Arc<Flat>) -> Result<()> {
    places.iter().try_for_each(|&BucketPlace { parameter, offset, len }| {
        let lent = model.materialise(parameter, BufferView::new(Arc::clone(buffer), offset, len));
        lent.map(drop).map_err(|source| refused(model, parameter, source))
    })
}

/// Frees the memory of parameters.
pub(crate) fn reshard(model: &mut impl Params, places: &[BucketPlace]) -> Result<()> {
    places.iter().try_for_each(|&BucketPlace { parameter, .. }| {
        model.reshard(parameter).map(drop).map_err(|source| refused(model, parameter, source))
    })
}

fn refused(model: &impl Params, parameter: usize, source: BoxError) -> Error {
    Error::Model { parameter: model.infos()[parameter].name.clone(), source }
}

/// Changes a parameter in place and checks that its memory matches its description.
pub(crate) fn write(
    model: &mut impl Params,
    parameter: usize,
    mut change: impl FnMut(ValuesMut<'_>) -> Result<()>,
) -> Result<()> {
    let info = model.infos()[parameter].clone();
    let mut outcome = None;
    let called = model.write(parameter, &mut |values| {
        outcome = Some(check_values(&info, values.as_values()).map(|()| change(values)));
    });
    handed_out(&info, called, outcome)
}

/// Fills a parameter in the model's memory and checks that it matches its description. Returns `false` if the model
/// prefers a view.
pub(crate) fn fill(
    model: &mut impl Params,
    parameter: usize,
    mut fill: impl FnMut(ValuesMut<'_>) -> Result<()>,
) -> Result<bool> {
    let info = model.infos()[parameter].clone();
    let mut outcome = None;
    let called = model.fill(parameter, &mut |values| {
        outcome = Some(check_values(&info, values.as_values()).map(|()| fill(values)));
    });
    if matches!((&outcome, &called), (None, Ok(false))) {
        return Ok(false);
    }
    handed_out(&info, called.map(drop), outcome).map(|()| true)
}

/// Returns an error unless the model has called back with values that match the description, and the callback has
/// succeeded.
fn handed_out(
    info: &ParamInfo,
    called: Result<(), BoxError>,
    outcome: Option<Result<Result<()>>>,
) -> Result<()> {
    let source: BoxError = match (outcome, called) {
        (Some(Ok(Err(error))), _) => return Err(error),
        (Some(Err(differs)), _) => differs.into(),
        (_, Err(source)) => source,
        (None, Ok(())) => "the model did not call the callback".into(),
        (Some(Ok(Ok(()))), Ok(())) => return Ok(()),
    };
    Err(Error::Model { parameter: info.name.clone(), source })
}

fn check_values(info: &ParamInfo, values: Values<'_>) -> Result<()> {
    let (got, got_len) = (values.dtype(), values.len());
    let (expected, expected_len) = (info.dtype, info.len());
    if (got, got_len) == (expected, expected_len) {
        return Ok(());
    }
    Err(Error::ValuesDiffer { expected_len, expected, got_len, got })
}

impl<P: Params + ?Sized> Params for Box<P> {
    fn infos(&self) -> &[ParamInfo] {
        (**self).infos()
    }

    fn begin_forward(&mut self, pass: Pass) {
        (**self).begin_forward(pass);
    }

    fn slots(&self) -> &[Slot] {
        (**self).slots()
    }

    fn slots_mut(&mut self) -> &mut [Slot] {
        (**self).slots_mut()
    }

    fn read(&self, index: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        (**self).read(index, f)
    }

    fn write(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        (**self).write(index, f)
    }

    fn materialise(&mut self, index: usize, values: BufferView) -> Result<Materialised, BoxError> {
        (**self).materialise(index, values)
    }

    fn fill(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<bool, BoxError> {
        (**self).fill(index, f)
    }

    fn reshard(&mut self, index: usize) -> Result<Resharded, BoxError> {
        (**self).reshard(index)
    }
}
