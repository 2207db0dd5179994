//! The storage of sharded parameters in a model.
//!
//! A sharded model's parameters are gathered before they are used and freed afterwards. Several of them lie in one
//! buffer, and each block receives a [view](BufferView) of it. The buffer is freed with its last view.

use std::fmt;
use std::sync::Arc;

use half::{bf16, f16};

use crate::flat::Flat;
use crate::{BoxError, Error, FloatType, Result, Values, ValuesMut};

/// A reference-counted view of one parameter's values in a shared buffer. Cloning does not copy the values.
#[derive(Clone)]
pub struct BufferView {
    flat: Arc<Flat>,
    offset: usize,
    len: usize,
}

impl BufferView {
    pub(crate) const fn new(flat: Arc<Flat>, offset: usize, len: usize) -> Self {
        Self { flat, offset, len }
    }

    /// Returns the values.
    pub fn values(&self) -> Values<'_> {
        self.flat.slice(self.offset, self.len)
    }
}

impl fmt::Debug for BufferView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufferView({} values of {})", self.len, self.values().dtype())
    }
}

/// The model's answer to [`Params::materialise`](crate::Params::materialise).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Materialised {
    /// The model keeps the view until it is told to free it.
    Shared,
    /// The model has copied the values into memory of its own.
    Copied,
}

/// The model's answer to [`Params::reshard`](crate::Params::reshard).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resharded {
    /// The parameter needs no memory.
    Freed,
    /// The parameter keeps its memory.
    Kept,
}

/// The storage of one parameter of a block in plain Rust: own memory, a view of a shared buffer, or freed. A model
/// that returns its [`slots`](crate::Params::slots) needs no other access methods.
///
/// ```
/// use dist_parallel::model::{Resharded, Slot};
/// use dist_parallel::{FloatType, Values};
///
/// let mut weight = Slot::from(vec![1.0_f32, 2.0]);
/// assert_eq!(weight.values().unwrap(), Values::F32(&[1.0, 2.0]));
/// assert_eq!(weight.reshard(), Resharded::Freed);
/// assert!(weight.values().is_err());
///
/// let mut born_without_memory = Slot::freed(FloatType::F32, 2);
/// born_without_memory.write(&mut |values| assert_eq!(values.len(), 2)).unwrap();
/// ```
#[derive(Debug)]
pub struct Slot {
    place: Storage,
    dtype: FloatType,
    len: usize,
}

#[derive(Debug)]
enum Storage {
    Own(Flat),
    Shared(BufferView),
    Nowhere,
}

impl Slot {
    /// Returns a freed parameter of `len` values.
    pub const fn freed(dtype: FloatType, len: usize) -> Self {
        Self { place: Storage::Nowhere, dtype, len }
    }

    /// Returns the values.
    ///
    /// # Errors
    /// The parameter is freed.
    pub fn values(&self) -> Result<Values<'_>> {
        match &self.place {
            Storage::Own(flat) => Ok(flat.slice(0, self.len)),
            Storage::Shared(view) => Ok(view.values()),
            Storage::Nowhere => Err(Error::Freed),
        }
    }

    /// Calls `f` with the values, which are +0 if the parameter was freed. A view is copied first, because others can
    /// read the buffer.
    ///
    /// # Errors
    /// None at present.
    pub fn write(&mut self, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        if !matches!(self.place, Storage::Own(_)) {
            let mut own = Flat::zeros(self.dtype, self.len);
            if let Storage::Shared(view) = &self.place {
                own.slice_mut(0, self.len).copy_from(view.values())?;
            }
            self.place = Storage::Own(own);
        }
        if let Storage::Own(flat) = &mut self.place {
            f(flat.slice_mut(0, self.len));
        }
        Ok(())
    }

    /// Keeps this view in place of the present values.
    ///
    /// # Errors
    /// The view differs from the parameter in length or type.
    pub fn materialise(&mut self, view: BufferView) -> Result<Materialised, BoxError> {
        let values = view.values();
        if (values.dtype(), values.len()) != (self.dtype, self.len) {
            let (got_len, got) = (values.len(), values.dtype());
            let (expected_len, expected) = (self.len, self.dtype);
            return Err(Error::ValuesDiffer { expected_len, expected, got_len, got }.into());
        }
        self.place = Storage::Shared(view);
        Ok(Materialised::Shared)
    }

    /// Drops the values.
    pub fn reshard(&mut self) -> Resharded {
        self.place = Storage::Nowhere;
        Resharded::Freed
    }
}

macro_rules! from_vec {
    ($($variant:ident: $element:ty),*) => {$(
        impl From<Vec<$element>> for Slot {
            fn from(values: Vec<$element>) -> Self {
                let len = values.len();
                Self { place: Storage::Own(Flat::$variant(values.into())), dtype: FloatType::$variant, len }
            }
        }
    )*};
}

from_vec!(F32: f32, F64: f64, F16: f16, Bf16: bf16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_lives_as_long_as_its_last_view() {
        let flat = Arc::new(Flat::F32(vec![1.0, 2.0, 3.0].into()));
        let buffer = Arc::downgrade(&flat);
        let mut slots = [Slot::freed(FloatType::F32, 1), Slot::freed(FloatType::F32, 2)];
        for (slot, (offset, len)) in slots.iter_mut().zip([(0, 1), (1, 2)]) {
            assert_eq!(
                slot.materialise(BufferView::new(flat.clone(), offset, len)).unwrap(),
                Materialised::Shared
            );
        }
        drop(flat);
        assert_eq!(slots[1].values().unwrap(), Values::F32(&[2.0, 3.0]));
        assert_eq!(slots[0].reshard(), Resharded::Freed);
        assert!(buffer.upgrade().is_some());
        assert_eq!(slots[1].reshard(), Resharded::Freed);
        assert!(buffer.upgrade().is_none());
    }

    #[test]
    fn writing_to_a_view_changes_no_other_view() {
        let flat = Arc::new(Flat::F32(vec![1.0, 2.0].into()));
        let mut slot = Slot::freed(FloatType::F32, 2);
        slot.materialise(BufferView::new(flat.clone(), 0, 2)).unwrap();
        slot.write(&mut |mut values| values.divide(2)).unwrap();
        assert_eq!(slot.values().unwrap(), Values::F32(&[0.5, 1.0]));
        assert_eq!(flat.slice(0, 2), Values::F32(&[1.0, 2.0]));
    }

    #[test]
    fn a_view_of_another_type_or_length_is_refused() {
        let flat = Arc::new(Flat::F64(vec![1.0, 2.0].into()));
        let mut slot = Slot::from(vec![0.0_f32; 2]);
        assert!(slot.materialise(BufferView::new(flat.clone(), 0, 2)).is_err());
        assert!(Slot::from(vec![0.0_f64; 2]).materialise(BufferView::new(flat, 0, 1)).is_err());
        assert_eq!(slot.values().unwrap(), Values::F32(&[0.0; 2]), "nothing has changed");
    }
}
