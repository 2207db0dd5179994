//! Reductions by operations of the user's own, on elements of any type.

use std::fmt;
use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use dist_algos::OperandSide;
use dist_algos::scan::Extent;

use crate::digest::digest;
use crate::kernel::Ordering;
use crate::{Communicator, Element, Result};

/// An operation of the user's own that reduces elements of `T`.
///
/// It must be associative: `a ∘ (b ∘ c) = (a ∘ b) ∘ c`. It need not be commutative, unless it is declared to be. The
/// contributions of the ranks are combined in canonical order: with the same brackets as a built-in reduction in
/// [`ReductionOrder::Canonical`](crate::ReductionOrder), and the lower ranks always on the left.
///
/// All ranks of a call pass an operation of the same name. The ranks compare the names, and the size and the alignment
/// of the elements, and not what the functions compute.
///
/// ```
/// use dist_collectives::{Communicator, CustomOp};
/// use dist_transport::sim;
///
/// // The steps of an affine function x ↦ a·x + b, one after the other.
/// let compose = CustomOp::of_pairs("compose", |[a, b]: [f64; 2], [c, d]: [f64; 2]| [a * c, b * c + d]);
/// let outcome = sim::run(1, 3, move |transport| {
///     let mut comm = Communicator::new(transport);
///     let mut function = [[2.0, comm.rank() as f64]];
///     comm.all_reduce_with(&mut function, &compose).unwrap();
///     function[0]
/// });
/// assert_eq!(outcome.results, [[8.0, 4.0]; 3]);
/// ```
#[doc(alias = "MPI_Op_create")]
#[derive(Clone, Copy)]
pub struct CustomOp<T, F> {
    name: &'static str,
    is_commutative: bool,
    function: F,
    elements: PhantomData<fn(T)>,
}

impl<T: Pod, F: Fn(&mut [T], &[T])> CustomOp<T, F> {
    /// Creates an operation from a function on slices of equal length. It replaces each element of the first slice by
    /// its combination with the element at the same place of the second one: `left[i] = left[i] ∘ right[i]`. The slices
    /// are parts of the buffers, of any length.
    ///
    /// If the function panics, the call returns [`Error::OperationPanicked`](crate::Error::OperationPanicked) and the
    /// job is aborted.
    pub const fn new(name: &'static str, function: F) -> Self {
        Self { name, is_commutative: false, function, elements: PhantomData }
    }

    /// Declares that the operation is commutative, so that a call need not keep to the canonical order if
    /// [`ReductionOrder::Any`](crate::ReductionOrder) is set.
    #[must_use]
    pub const fn commutative(mut self) -> Self {
        self.is_commutative = true;
        self
    }

    /// Returns the name.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Returns `true` if the operation is declared to be commutative.
    pub const fn is_commutative(&self) -> bool {
        self.is_commutative
    }

    /// Returns the digest that a call carries: of the name, the property, and further sizes.
    pub(crate) fn digest(&self, sizes: u64) -> u64 {
        let name = self.name.as_bytes().chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        });
        digest([self.name.len() as u64, u64::from(self.is_commutative), sizes].into_iter().chain(name))
    }

    /// Returns the function on bytes of whole elements. It allocates memory for left operands that arrive. They are
    /// combined in blocks that stay in the cache.
    pub(crate) fn combine(&self) -> impl FnMut(&mut [u8], &[u8], OperandSide) {
        let mut left = Vec::new();
        let block = (LEFT_BYTES / size_of::<T>()).max(1);
        move |into, from, side| {
            let (into, from): (&mut [T], &[T]) = (bytemuck::cast_slice_mut(into), bytemuck::cast_slice(from));
            if side == OperandSide::Right {
                return (self.function)(into, from);
            }
            for (into, from) in into.chunks_mut(block).zip(from.chunks(block)) {
                left.clear();
                left.extend_from_slice(from);
                (self.function)(&mut left, into);
                into.copy_from_slice(&left);
            }
        }
    }
}

/// Bytes of left operands that are combined at a time.
const LEFT_BYTES: usize = 8 << 10;

impl<T: Pod, G: Fn(T, T) -> T> CustomOp<T, G> {
    /// Creates an operation from a function of two elements.
    pub const fn of_pairs(
        name: &'static str,
        function: G,
    ) -> CustomOp<T, impl Fn(&mut [T], &[T]) + use<T, G>> {
        CustomOp::new(name, move |left: &mut [T], right: &[T]| {
            for (left, right) in left.iter_mut().zip(right) {
                *left = function(*left, *right);
            }
        })
    }
}

impl<T, F> fmt::Debug for CustomOp<T, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CustomOp")
            .field("name", &self.name)
            .field("is_commutative", &self.is_commutative)
            .finish_non_exhaustive()
    }
}

/// # Reductions by operations of the user's own
///
/// Elements are of any [`Pod`] type, of any size. All ranks send messages, also on one host.
impl Communicator {
    /// Reduces like [`all_reduce`](Self::all_reduce), by an operation of the user's own.
    ///
    /// # Errors
    /// [`Error::OperationPanicked`](crate::Error::OperationPanicked) on a rank whose operation panics. As for
    /// [`all_reduce`](Self::all_reduce).
    #[doc(alias = "MPI_Op_create")]
    #[doc(alias = "MPI_Allreduce")]
    pub fn all_reduce_with<T: Pod>(
        &mut self,
        buffer: &mut [T],
        op: &CustomOp<T, impl Fn(&mut [T], &[T])>,
    ) -> Result<()> {
        self.call(|engine, options| engine.all_reduce_with(buffer, op, options))
    }

    /// Reduces like [`reduce`](Self::reduce), by an operation of the user's own.
    ///
    /// # Errors
    /// As for [`all_reduce_with`](Self::all_reduce_with), and if there is no such root.
    #[doc(alias = "MPI_Reduce")]
    pub fn reduce_with<T: Pod>(
        &mut self,
        buffer: &mut [T],
        op: &CustomOp<T, impl Fn(&mut [T], &[T])>,
        root: usize,
    ) -> Result<()> {
        self.call(|engine, options| engine.reduce_with(buffer, op, root, options))
    }

    /// Reduces like [`reduce_scatter`](Self::reduce_scatter), by an operation of the user's own.
    ///
    /// # Errors
    /// As for [`all_reduce_with`](Self::all_reduce_with), and if the input is not `world_size` times as long as the
    /// output.
    #[doc(alias = "MPI_Reduce_scatter_block")]
    pub fn reduce_scatter_with<T: Pod>(
        &mut self,
        input: &[T],
        output: &mut [T],
        op: &CustomOp<T, impl Fn(&mut [T], &[T])>,
    ) -> Result<()> {
        self.call(|engine, options| engine.reduce_scatter_with(input, output, op, options))
    }

    /// Reduces like [`scan`](Self::scan), by an operation of the user's own: rank `r` gets the reduction of ranks 0 to
    /// `r`.
    ///
    /// # Errors
    /// As for [`all_reduce_with`](Self::all_reduce_with).
    #[doc(alias = "MPI_Scan")]
    pub fn scan_with<T: Pod>(
        &mut self,
        buffer: &mut [T],
        op: &CustomOp<T, impl Fn(&mut [T], &[T])>,
    ) -> Result<()> {
        self.call(|engine, options| engine.scan_with(buffer, op, Extent::Inclusive, options))
    }

    /// Reduces like [`exclusive_scan`](Self::exclusive_scan), by an operation of the user's own: rank `r` gets the
    /// reduction of ranks 0 to `r − 1`, and rank 0 gets the identity of the operation.
    ///
    /// ```
    /// use dist_collectives::{Communicator, CustomOp};
    /// use dist_transport::sim;
    ///
    /// let longest = CustomOp::of_pairs("longest", |a: u128, b: u128| a.max(b)).commutative();
    /// let outcome = sim::run(1, 3, move |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let mut length = [10 - comm.rank() as u128];
    ///     comm.exclusive_scan_with(&mut length, &longest, 0).unwrap();
    ///     length[0]
    /// });
    /// assert_eq!(outcome.results, [0, 10, 10]);
    /// ```
    ///
    /// # Errors
    /// As for [`all_reduce_with`](Self::all_reduce_with).
    #[doc(alias = "MPI_Exscan")]
    pub fn exclusive_scan_with<T: Pod>(
        &mut self,
        buffer: &mut [T],
        op: &CustomOp<T, impl Fn(&mut [T], &[T])>,
        identity: T,
    ) -> Result<()> {
        self.call(|engine, options| engine.scan_with(&mut *buffer, op, Extent::Exclusive, options))?;
        if self.rank() == 0 {
            buffer.fill(identity);
        }
        Ok(())
    }
}

/// A value and the index that it was found at, for [`CustomOp::min_loc`] and [`CustomOp::max_loc`]. It has no padding,
/// so that it can be sent.
#[doc(alias = "MPI_DOUBLE_INT")]
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, packed)]
pub struct IndexedValue<T> {
    value: T,
    index: u64,
}

impl<T: Element> IndexedValue<T> {
    /// Returns a value that was found at an index.
    pub const fn new(value: T, index: u64) -> Self {
        Self { value, index }
    }

    /// Returns the value.
    pub const fn value(self) -> T {
        self.value
    }

    /// Returns the index.
    pub const fn index(self) -> u64 {
        self.index
    }
}

impl<T: Element + PartialOrd> IndexedValue<T> {
    /// Returns the one whose value `choose` returns, or the one with the lower index if both have it.
    fn chosen(self, other: Self, choose: impl Fn(T, T) -> T) -> Self {
        let chosen = choose(self.value(), other.value());
        let is_nan = |value: T| value.partial_cmp(&value).is_none();
        let same = |value: T| bytemuck::bytes_of(&value) == bytemuck::bytes_of(&chosen);
        let [own, theirs] =
            [self, other].map(|one| same(one.value()) || is_nan(one.value()) && is_nan(chosen));
        match (own, theirs) {
            (true, true) if other.index() < self.index() => other,
            (true, _) => self,
            _ => other,
        }
    }
}

impl<T: Element + PartialOrd> CustomOp<IndexedValue<T>, fn(&mut [IndexedValue<T>], &[IndexedValue<T>])> {
    /// Returns the operation that keeps the smallest value and its index, by the rules of
    /// [`ReduceOp::Min`](crate::ReduceOp::Min). Of equal values it keeps the one with the lower index.
    ///
    /// ```
    /// use dist_collectives::{Communicator, CustomOp, IndexedValue};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let distances = [5.0_f64, 2.0, 2.0];
    ///     let mut nearest = [IndexedValue::new(distances[comm.rank()], comm.rank() as u64)];
    ///     comm.all_reduce_with(&mut nearest, &CustomOp::min_loc()).unwrap();
    ///     (nearest[0].value(), nearest[0].index())
    /// });
    /// assert_eq!(outcome.results, [(2.0, 1); 3]);
    /// ```
    #[doc(alias = "MPI_MINLOC")]
    #[doc(alias = "argmin")]
    pub const fn min_loc() -> Self {
        let function: fn(&mut [IndexedValue<T>], &[IndexedValue<T>]) =
            |left, right| keep(left, right, |ordering| ordering.smaller);
        Self { name: "min_loc", is_commutative: true, function, elements: PhantomData }
    }

    /// Returns the operation that keeps the largest value and its index, like [`min_loc`](Self::min_loc).
    #[doc(alias = "MPI_MAXLOC")]
    #[doc(alias = "argmax")]
    pub const fn max_loc() -> Self {
        let function: fn(&mut [IndexedValue<T>], &[IndexedValue<T>]) =
            |left, right| keep(left, right, |ordering| ordering.larger);
        Self { name: "max_loc", is_commutative: true, function, elements: PhantomData }
    }
}

/// Keeps one of each pair. Types that are `PartialOrd` have an ordering.
fn keep<T: Element + PartialOrd>(
    left: &mut [IndexedValue<T>],
    right: &[IndexedValue<T>],
    rule: impl Fn(Ordering<T>) -> fn(T, T) -> T,
) {
    let choose = rule(T::ORDERING.expect("all ordered types have it"));
    for (left, right) in left.iter_mut().zip(right) {
        *left = left.chosen(*right, choose);
    }
}

impl<T: Element> PartialEq for IndexedValue<T> {
    fn eq(&self, other: &Self) -> bool {
        (self.value(), self.index()) == (other.value(), other.index())
    }
}

impl<T: Element> fmt::Debug for IndexedValue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.value(), self.index())
    }
}
