//! Messages from and into memory with gaps: columns and blocks of matrices.

use bytemuck::Pod;

use crate::{Communicator, Error, Result};

/// A view of blocks of a slice that lie at equal distances: a column of a matrix, or a part of several of its rows.
///
/// ```
/// use dist_collectives::Strided;
///
/// // A matrix of 3 rows and 4 columns.
/// let matrix: Vec<i32> = (0..12).collect();
/// let column = Strided::new(&matrix[1..], 3, 1, 4).unwrap();
/// assert_eq!(column.to_vec(), [1, 5, 9]);
/// let corner = Strided::new(&matrix[6..], 2, 2, 4).unwrap();
/// assert_eq!(corner.to_vec(), [6, 7, 10, 11]);
/// ```
#[derive(Clone, Copy, Debug)]
#[doc(alias = "MPI_Type_vector")]
pub struct Strided<'a, T> {
    elements: &'a [T],
    layout: StridedLayout,
}

/// A mutable view like [`Strided`].
#[derive(Debug)]
#[doc(alias = "MPI_Type_vector")]
pub struct StridedMut<'a, T> {
    elements: &'a mut [T],
    layout: StridedLayout,
}

/// The blocks of a view. They do not overlap, and all of them are inside the slice.
#[derive(Clone, Copy, Debug)]
struct StridedLayout {
    blocks: usize,
    block_len: usize,
    stride: usize,
}

impl StridedLayout {
    fn new(blocks: usize, block_len: usize, stride: usize, len: usize) -> Result<Self> {
        let last = blocks.saturating_sub(1).checked_mul(stride);
        let end = last.and_then(|last| last.checked_add(block_len)).filter(|_| blocks > 0);
        let is_inside = blocks == 0 || end.is_some_and(|end| end <= len);
        let is_apart = blocks < 2 || stride >= block_len;
        // Together the blocks are no longer than the slice, because they do not overlap.
        if is_inside && is_apart {
            Ok(Self { blocks, block_len, stride })
        } else {
            Err(Error::Strided { blocks, block_len, stride, len })
        }
    }

    const fn len(&self) -> usize {
        self.blocks * self.block_len
    }

    /// Returns `true` if there are no gaps between the blocks.
    const fn is_contiguous(&self) -> bool {
        self.blocks < 2 || self.stride == self.block_len
    }

    /// Returns the start of each block.
    fn starts(self) -> impl Iterator<Item = usize> {
        (0..self.blocks).map(move |block| block * self.stride)
    }
}

impl<'a, T: Pod> Strided<'a, T> {
    /// Creates a view of `blocks` blocks of `block_len` elements. The first block begins at the start of the slice, and
    /// each other one `stride` elements after the block before it.
    ///
    /// # Errors
    /// [`Error::Strided`] if blocks overlap or are not inside the slice.
    pub fn new(elements: &'a [T], blocks: usize, block_len: usize, stride: usize) -> Result<Self> {
        let layout = StridedLayout::new(blocks, block_len, stride, elements.len())?;
        Ok(Self { elements, layout })
    }

    /// Returns the number of elements of all blocks.
    pub const fn len(&self) -> usize {
        self.layout.len()
    }

    /// Returns `true` if the blocks have no elements.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns a copy of the blocks, one after the other.
    pub fn to_vec(&self) -> Vec<T> {
        let mut packed = vec![T::zeroed(); self.len()];
        self.pack(&mut packed);
        packed
    }

    /// Returns the elements if there are no gaps between the blocks.
    pub(crate) fn as_slice(&self) -> Option<&'a [T]> {
        self.layout.is_contiguous().then(|| &self.elements[..self.len()])
    }

    /// Copies the blocks, one after the other.
    pub(crate) fn pack(&self, packed: &mut [T]) {
        if self.is_empty() {
            return;
        }
        if self.layout.block_len == 1 {
            // Faster than a copy of slices of one element.
            let elements = self.elements.iter().step_by(self.layout.stride.max(1));
            packed.iter_mut().zip(elements).for_each(|(packed, element)| *packed = *element);
            return;
        }
        let blocks = packed.chunks_exact_mut(self.layout.block_len);
        for (packed, start) in blocks.zip(self.layout.starts()) {
            packed.copy_from_slice(&self.elements[start..][..self.layout.block_len]);
        }
    }
}

impl<'a, T: Pod> StridedMut<'a, T> {
    /// Creates a view as [`Strided::new`] does.
    ///
    /// # Errors
    /// As there.
    pub fn new(elements: &'a mut [T], blocks: usize, block_len: usize, stride: usize) -> Result<Self> {
        let layout = StridedLayout::new(blocks, block_len, stride, elements.len())?;
        Ok(Self { elements, layout })
    }

    /// Returns the number of elements of all blocks.
    pub const fn len(&self) -> usize {
        self.layout.len()
    }

    /// Returns `true` if the blocks have no elements.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the elements if there are no gaps between the blocks.
    pub(crate) fn as_mut_slice(&mut self) -> Option<&mut [T]> {
        let len = self.len();
        self.layout.is_contiguous().then(|| &mut self.elements[..len])
    }

    /// Copies elements into the blocks, one after the other.
    pub(crate) fn unpack(&mut self, packed: &[T]) {
        if self.is_empty() {
            return;
        }
        if self.layout.block_len == 1 {
            let elements = self.elements.iter_mut().step_by(self.layout.stride.max(1));
            elements.zip(packed).for_each(|(element, packed)| *element = *packed);
            return;
        }
        for (packed, start) in packed.chunks_exact(self.layout.block_len).zip(self.layout.starts()) {
            self.elements[start..][..self.layout.block_len].copy_from_slice(packed);
        }
    }
}

/// # Messages with gaps
///
/// The elements of a view are copied once on their way into a message, in memory that the communicator keeps. The peer
/// may receive them without gaps, as with [`recv`](Communicator::recv).
impl Communicator {
    /// Sends the elements of a view like [`send`](Self::send).
    ///
    /// ```
    /// use dist_collectives::{Communicator, Strided};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let mut column = [0; 3];
    ///     if comm.rank() == 0 {
    ///         let matrix: Vec<i32> = (0..12).collect();
    ///         comm.send_strided(Strided::new(&matrix[1..], 3, 1, 4).unwrap(), 1).unwrap();
    ///     } else {
    ///         comm.recv(&mut column, 0).unwrap();
    ///     }
    ///     column
    /// });
    /// assert_eq!(outcome.results[1], [1, 5, 9]);
    /// ```
    ///
    /// # Errors
    /// As for [`send`](Self::send).
    pub fn send_strided<T: Pod>(&mut self, view: Strided<'_, T>, to: impl Into<Option<usize>>) -> Result<()> {
        let Some(to) = to.into() else { return Ok(()) };
        self.call_messages(|engine, options| engine.send_strided(view, to, &options))
    }

    /// Receives a message into a view like [`recv`](Self::recv).
    ///
    /// # Errors
    /// As for [`recv`](Self::recv).
    pub fn recv_strided<T: Pod>(
        &mut self,
        mut view: StridedMut<'_, T>,
        from: impl Into<Option<usize>>,
    ) -> Result<()> {
        let Some(from) = from.into() else { return Ok(()) };
        self.call_messages(|engine, options| engine.receive_strided(&mut view, from, &options))
    }

    /// Sends the elements of a view while receiving a message into another one, like [`send_recv`](Self::send_recv).
    ///
    /// # Errors
    /// As for [`send_recv`](Self::send_recv).
    #[doc(alias = "MPI_Sendrecv")]
    pub fn send_recv_strided<T: Pod>(
        &mut self,
        sent: Strided<'_, T>,
        to: impl Into<Option<usize>>,
        mut received: StridedMut<'_, T>,
        from: impl Into<Option<usize>>,
    ) -> Result<()> {
        match (to.into(), from.into()) {
            (Some(to), Some(from)) => self.call_messages(|engine, options| {
                engine.send_receive_strided((sent, to), (&mut received, from), &options)
            }),
            (to, None) => self.send_strided(sent, to),
            (None, from) => self.recv_strided(received, from),
        }
    }
}
