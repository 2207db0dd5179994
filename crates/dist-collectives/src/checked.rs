//! Calls that move elements whose bits are checked when they arrive: `bool`, `char`, and enums.

use bytemuck::{CheckedBitPattern, NoUninit};

use crate::{Communicator, Error, Operation, Result};

/// Calls that move elements which are not valid for any bits: `bool`, `char`, and enums that derive [`NoUninit`] and
/// [`CheckedBitPattern`]. The elements travel as `u8`. A rank that receives bits that are no element gets
/// [`Error::BitPattern`], and its buffer is unchanged.
///
/// ```
/// use dist_collectives::Communicator;
/// use dist_transport::sim;
///
/// let outcome = sim::run(1, 3, |transport| {
///     let mut comm = Communicator::new(transport);
///     let (own, mut flags) = ([true, comm.rank() == 1], [false; 6]);
///     comm.checked().all_gather(&own, &mut flags).unwrap();
///     flags
/// });
/// assert_eq!(outcome.results, [[true, false, true, true, true, false]; 3]);
/// ```
#[derive(Debug)]
pub struct Checked<'a>(&'a mut Communicator);

/// # Elements whose bits are checked
impl Communicator {
    /// Returns the calls that move elements of types such as `bool`, whose bits are checked when they arrive.
    #[doc(alias = "MPI_C_BOOL")]
    pub const fn checked(&mut self) -> Checked<'_> {
        Checked(self)
    }
}

impl Checked<'_> {
    /// Sends elements, as [`Communicator::send`].
    ///
    /// # Errors
    /// As for [`Communicator::send`].
    pub fn send<T: NoUninit>(&mut self, elements: &[T], to: usize) -> Result<()> {
        self.0.send(bytes_of(elements), to)
    }

    /// Receives elements, as [`Communicator::recv`].
    ///
    /// # Errors
    /// [`Error::BitPattern`]. As for [`Communicator::recv`].
    pub fn recv<T: NoUninit + CheckedBitPattern>(&mut self, elements: &mut [T], from: usize) -> Result<()> {
        let mut bytes = bytes_of(elements).to_vec();
        self.0.recv(&mut bytes, from)?;
        store(Operation::Message, &bytes, elements)
    }

    /// Sends the root's elements to every rank, as [`Communicator::broadcast`].
    ///
    /// # Errors
    /// [`Error::BitPattern`]. As for [`Communicator::broadcast`].
    pub fn broadcast<T: NoUninit + CheckedBitPattern>(
        &mut self,
        elements: &mut [T],
        root: usize,
    ) -> Result<()> {
        let mut bytes = bytes_of(elements).to_vec();
        self.0.broadcast(&mut bytes, root)?;
        store(Operation::Broadcast, &bytes, elements)
    }

    /// Sends the elements of all ranks to every rank, as [`Communicator::all_gather`].
    ///
    /// # Errors
    /// [`Error::BitPattern`]. As for [`Communicator::all_gather`].
    pub fn all_gather<T: NoUninit + CheckedBitPattern>(
        &mut self,
        input: &[T],
        output: &mut [T],
    ) -> Result<()> {
        let mut bytes = bytes_of(output).to_vec();
        self.0.all_gather(bytes_of(input), &mut bytes)?;
        store(Operation::AllGather, &bytes, output)
    }

    /// Sends the elements of all ranks to the root, as [`Communicator::gather`].
    ///
    /// # Errors
    /// [`Error::BitPattern`] on the root. As for [`Communicator::gather`].
    pub fn gather<T: NoUninit + CheckedBitPattern>(
        &mut self,
        input: &[T],
        output: &mut [T],
        root: usize,
    ) -> Result<()> {
        let mut bytes = bytes_of(output).to_vec();
        self.0.gather(bytes_of(input), &mut bytes, root)?;
        store(Operation::Gather, &bytes, output)
    }

    /// Sends one part of the root's elements to each rank, as [`Communicator::scatter`].
    ///
    /// # Errors
    /// [`Error::BitPattern`]. As for [`Communicator::scatter`].
    pub fn scatter<T: NoUninit + CheckedBitPattern>(
        &mut self,
        input: &[T],
        output: &mut [T],
        root: usize,
    ) -> Result<()> {
        let mut bytes = bytes_of(output).to_vec();
        self.0.scatter(bytes_of(input), &mut bytes, root)?;
        store(Operation::Scatter, &bytes, output)
    }

    /// Sends part `r` to rank `r`, as [`Communicator::all_to_all`].
    ///
    /// # Errors
    /// [`Error::BitPattern`]. As for [`Communicator::all_to_all`].
    pub fn all_to_all<T: NoUninit + CheckedBitPattern>(
        &mut self,
        input: &[T],
        output: &mut [T],
    ) -> Result<()> {
        let mut bytes = bytes_of(output).to_vec();
        self.0.all_to_all(bytes_of(input), &mut bytes)?;
        store(Operation::AllToAll, &bytes, output)
    }
}

fn bytes_of<T: NoUninit>(elements: &[T]) -> &[u8] {
    bytemuck::cast_slice(elements)
}

/// Stores received elements, if the bits of all of them are valid.
fn store<T: CheckedBitPattern>(operation: Operation, bytes: &[u8], into: &mut [T]) -> Result<()> {
    // An element without bytes has nothing to check.
    let received =
        bytes.chunks_exact(size_of::<T>().max(1)).map(bytemuck::checked::try_pod_read_unaligned::<T>);
    if let Some(element) = received.clone().position(|element| element.is_err()) {
        return Err(Error::BitPattern { operation, element, name: std::any::type_name::<T>() });
    }
    into.iter_mut().zip(received.flatten()).for_each(|(into, element)| *into = element);
    Ok(())
}
