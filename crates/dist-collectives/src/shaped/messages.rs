//! Messages from and into arrays of any layout.

use bytemuck::Pod;
use ndarray::{ArrayRef, ArrayView, ArrayViewD, ArrayViewMut, ArrayViewMutD, Dimension};

use super::shape;
use crate::{Buffer, Communicator, Message, Pending, Result};

/// One message of a [`batch_arrays`](Communicator::batch_arrays).
#[derive(Debug)]
pub enum ArrayMessage<'a, T> {
    /// A message that is sent.
    Send {
        /// The receiving rank. The message is not sent if there is none.
        to: Option<usize>,
        /// The tag.
        tag: u32,
        /// The elements to send.
        array: ArrayViewD<'a, T>,
    },
    /// A message that is received.
    Receive {
        /// The sending rank. Nothing is received if there is none.
        from: Option<usize>,
        /// The tag.
        tag: u32,
        /// The destination, which has as many elements as the message.
        array: ArrayViewMutD<'a, T>,
    },
}

impl<'a, T> ArrayMessage<'a, T> {
    /// Creates a message to this rank, or to none, with tag 0.
    pub fn send<D: Dimension>(to: impl Into<Option<usize>>, array: ArrayView<'a, T, D>) -> Self {
        Self::Send { to: to.into(), tag: 0, array: array.into_dyn() }
    }

    /// Creates a message that is received from this rank, or from none, with tag 0.
    pub fn receive<D: Dimension>(from: impl Into<Option<usize>>, array: ArrayViewMut<'a, T, D>) -> Self {
        Self::Receive { from: from.into(), tag: 0, array: array.into_dyn() }
    }

    /// Sets the tag.
    #[must_use]
    pub fn with_tag(mut self, new: u32) -> Self {
        let (Self::Send { tag, .. } | Self::Receive { tag, .. }) = &mut self;
        *tag = new;
        self
    }

    /// Returns the number of elements that pass through other memory, because they do not lie in index order.
    fn packed_len(&self) -> usize {
        match self {
            Self::Send { to: Some(_), array, .. } if array.as_slice().is_none() => array.len(),
            Self::Receive { from: Some(_), array, .. } if array.as_slice().is_none() => array.len(),
            _ => 0,
        }
    }
}

/// # Messages of arrays
///
/// Feature `ndarray`. The elements of a message are in index order, and its shape is not compared: the peer may receive them
/// in an array of another shape, or with [`recv`](Communicator::recv). Any view is supported: a column, every second row, a
/// transposed matrix. A view whose elements are not stored in index order passes through memory that the communicator keeps.
impl Communicator {
    /// Sends an array like [`send`](Self::send).
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_collectives::ndarray::{array, s};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let mut matrix = array![[1, 2, 3], [4, 5, 6]];
    ///     if comm.rank() == 0 {
    ///         comm.send_array(&matrix.column(2), 1).unwrap();
    ///     } else {
    ///         comm.recv_array(&mut matrix.slice_mut(s![..;-1, 0]), 0).unwrap();
    ///     }
    ///     matrix
    /// });
    /// assert_eq!(outcome.results[1], array![[6, 2, 3], [3, 5, 6]]);
    /// ```
    ///
    /// # Errors
    /// Those of [`send`](Self::send).
    #[doc(alias = "MPI_Send")]
    pub fn send_array<T: Pod, D: Dimension>(
        &mut self,
        array: &ArrayRef<T, D>,
        to: impl Into<Option<usize>>,
    ) -> Result<()> {
        let Some(to) = to.into() else { return Ok(()) };
        self.call_messages(|engine, options| match array.as_slice() {
            Some(elements) => engine.send(elements, to, &options),
            None => engine.with_packed(array.len(), |engine, packed| {
                pack(array, packed);
                engine.send(packed, to, &options)
            }),
        })
    }

    /// Receives a message into an array like [`recv`](Self::recv).
    ///
    /// # Errors
    /// Those of [`recv`](Self::recv).
    #[doc(alias = "MPI_Recv")]
    pub fn recv_array<T: Pod, D: Dimension>(
        &mut self,
        array: &mut ArrayRef<T, D>,
        from: impl Into<Option<usize>>,
    ) -> Result<()> {
        let Some(from) = from.into() else { return Ok(()) };
        self.call_messages(|engine, options| {
            if let Some(elements) = array.as_slice_mut() {
                return engine.receive(elements, from, &options);
            }
            engine.with_packed(array.len(), |engine, packed| {
                engine.receive(packed, from, &options)?;
                unpack(packed, array);
                Ok(())
            })
        })
    }

    /// Sends an array while receiving a message into another one, like [`send_recv`](Self::send_recv).
    ///
    /// # Errors
    /// Those of [`send_recv`](Self::send_recv).
    #[doc(alias = "MPI_Sendrecv")]
    pub fn send_recv_array<T: Pod, D: Dimension, E: Dimension>(
        &mut self,
        sent: &ArrayRef<T, D>,
        to: impl Into<Option<usize>>,
        received: &mut ArrayRef<T, E>,
        from: impl Into<Option<usize>>,
    ) -> Result<()> {
        let tag = self.settings.tag;
        self.batch_arrays(&mut [
            ArrayMessage::send(to, sent.view()).with_tag(tag),
            ArrayMessage::receive(from, received.view_mut()).with_tag(tag),
        ])
    }

    /// Sends and receives arrays at once, like [`batch`](Self::batch). The arrays of one batch may have different shapes.
    ///
    /// ```
    /// use dist_collectives::ndarray::{Array2, array, s};
    /// use dist_collectives::{ArrayMessage, Communicator};
    /// use dist_transport::sim;
    ///
    /// // Each rank has two columns between the columns of its neighbours, on a ring.
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let (left, right) = ((comm.rank() + 2) % 3, (comm.rank() + 1) % 3);
    ///     let mut plate = Array2::from_elem((2, 4), comm.rank());
    ///     let (halo_left, own, halo_right) = plate.multi_slice_mut((s![.., 0], s![.., 1..3], s![.., 3]));
    ///     comm.batch_arrays(&mut [
    ///         ArrayMessage::send(left, own.column(0)).with_tag(1),
    ///         ArrayMessage::send(right, own.column(1)).with_tag(2),
    ///         ArrayMessage::receive(right, halo_right).with_tag(1),
    ///         ArrayMessage::receive(left, halo_left).with_tag(2),
    ///     ])
    ///     .unwrap();
    ///     plate
    /// });
    /// assert_eq!(outcome.results[0], array![[2, 0, 0, 1], [2, 0, 0, 1]]);
    /// ```
    ///
    /// # Errors
    /// Those of [`batch`](Self::batch).
    #[doc(alias = "batch_isend_irecv")]
    pub fn batch_arrays<T: Pod>(&mut self, messages: &mut [ArrayMessage<'_, T>]) -> Result<()> {
        self.call_messages(|engine, options| {
            let packed_len = messages.iter().map(ArrayMessage::packed_len).fold(0, usize::saturating_add);
            engine.with_packed(packed_len, |engine, packed| {
                let mut slices = slices(messages, &mut *packed);
                engine.batch(&mut slices, &options)?;
                unpack_all(messages, packed);
                Ok(())
            })
        })
    }

    /// Starts to send an array like [`start_send`](Self::start_send). The elements are copied, so the array may change at
    /// once. The handle returns the copy.
    #[doc(alias = "MPI_Isend")]
    #[doc(alias = "isend")]
    pub fn start_send_array<T: Pod + Send, D: Dimension>(
        &mut self,
        array: &ArrayRef<T, D>,
        to: impl Into<Option<usize>>,
    ) -> Pending<Buffer<T>> {
        self.start_send(shape::elements(array).into_owned(), to)
    }
}

/// Copies the elements of an array in index order.
fn pack<T: Pod, D: Dimension>(array: &ArrayRef<T, D>, packed: &mut [T]) {
    packed.iter_mut().zip(array).for_each(|(packed, element)| *packed = *element);
}

/// Copies elements into an array in index order.
fn unpack<T: Pod, D: Dimension>(packed: &[T], array: &mut ArrayRef<T, D>) {
    array.iter_mut().zip(packed).for_each(|(element, packed)| *element = *packed);
}

/// Returns the messages of slices: of the arrays themselves if their elements lie in index order, otherwise of parts of
/// `packed`, one after the other. The elements of sent arrays are copied there.
fn slices<'a, T: Pod>(
    messages: &'a mut [ArrayMessage<'_, T>],
    mut packed: &'a mut [T],
) -> Vec<Message<'a, T>> {
    let mut slices = Vec::with_capacity(messages.len());
    for message in messages {
        let (part, rest) = packed.split_at_mut(message.packed_len());
        packed = rest;
        slices.push(match message {
            ArrayMessage::Send { to, tag, array } => {
                let elements = match array.as_slice() {
                    Some(elements) => elements,
                    None => {
                        // The part is empty if there is no receiving rank.
                        pack(array, part);
                        part
                    }
                };
                Message::Send { to: *to, tag: *tag, elements }
            }
            ArrayMessage::Receive { from, tag, array } => {
                let elements = array.as_slice_mut().unwrap_or(part);
                Message::Receive { from: *from, tag: *tag, elements }
            }
        });
    }
    slices
}

/// Copies the received elements from `packed`, which has the parts of [`slices`].
fn unpack_all<T: Pod>(messages: &mut [ArrayMessage<'_, T>], mut packed: &[T]) {
    for message in messages {
        let (part, rest) = packed.split_at(message.packed_len());
        packed = rest;
        if let ArrayMessage::Receive { array, .. } = message
            && !part.is_empty()
        {
            unpack(part, array);
        }
    }
}
