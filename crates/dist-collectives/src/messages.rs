//! Messages between two ranks.

use crate::{Communicator, Element, Result};

/// # Messages between two ranks
impl Communicator {
    /// Sends a message, which `to` takes with [`recv`](Self::recv). It may return before that. A rank may send to
    /// itself.
    ///
    /// # Errors
    /// If there is no such rank, if it died or does not take the message in time.
    #[doc(alias = "MPI_Send")]
    #[doc(alias = "ncclSend")]
    pub fn send<T: Element>(&mut self, elements: &[T], to: usize) -> Result<()> {
        let manner = self.engine.manner(&self.settings);
        self.engine.send(elements, to, manner)
    }

    /// Receives the oldest message that `from` has sent and this rank has not received, which must have the same
    /// type and as many elements.
    ///
    /// # Errors
    /// If there is no such rank, if it sends something else, if it died or sends nothing in time.
    #[doc(alias = "MPI_Recv")]
    #[doc(alias = "ncclRecv")]
    #[doc(alias = "receive")]
    pub fn recv<T: Element>(&mut self, elements: &mut [T], from: usize) -> Result<()> {
        let manner = self.engine.manner(&self.settings);
        self.engine.receive(elements, from, manner)
    }

    /// Sends a message to one rank while receiving one from another, or the same, as [`send`](Self::send) and
    /// [`recv`](Self::recv) at once: ranks that all call it in a circle do not wait for each other.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let (rank, world_size) = (comm.rank(), comm.world_size());
    ///     let mut received = [0];
    ///     comm.send_recv(&[rank as u32], (rank + 1) % world_size, &mut received, (rank + 2) % world_size).unwrap();
    ///     received[0]
    /// });
    /// assert_eq!(outcome.results, [2, 0, 1]);
    /// ```
    ///
    /// # Errors
    /// Those of the two.
    #[doc(alias = "MPI_Sendrecv")]
    pub fn send_recv<T: Element>(
        &mut self,
        sent: &[T],
        to: usize,
        received: &mut [T],
        from: usize,
    ) -> Result<()> {
        let manner = self.engine.manner(&self.settings);
        self.engine.send_receive(sent, to, received, from, manner)
    }
}
