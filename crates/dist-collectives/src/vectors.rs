//! Collectives whose ranks do not know how much the others send.

use bytemuck::Pod;

use crate::{Communicator, Error, Operation, Result};

/// # Parts of unknown lengths
///
/// Each of these collectives first exchanges the lengths, as a call of its own.
impl Communicator {
    /// Sends the elements of all ranks to every rank, in rank order. Ranks may pass different lengths, which the others
    /// need not know.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     comm.all_gather_vec(&vec![7_u8; comm.rank()]).unwrap()
    /// });
    /// assert_eq!(outcome.results[0], [vec![], vec![7], vec![7, 7]]);
    /// ```
    ///
    /// # Errors
    /// As for [`all_gather_v`](Self::all_gather_v).
    #[doc(alias = "MPI_Allgatherv")]
    pub fn all_gather_vec<T: Pod>(&mut self, elements: &[T]) -> Result<Vec<Vec<T>>> {
        let counts = self.lengths_of_all(elements.len())?;
        let mut gathered = self.zeroed(Operation::AllGather, &counts)?;
        self.all_gather_v(elements, &counts, &mut gathered)?;
        Ok(split(&gathered, &counts))
    }

    /// Sends the elements of all ranks to the root, in rank order. Returns `None` on the other ranks. Ranks may pass
    /// different lengths, which the root need not know.
    ///
    /// # Errors
    /// As for [`gather_v`](Self::gather_v).
    #[doc(alias = "MPI_Gatherv")]
    pub fn gather_vec<T: Pod>(&mut self, elements: &[T], root: usize) -> Result<Option<Vec<Vec<T>>>> {
        self.engine()?.check_root(Operation::Gather, root)?;
        let counts = self.lengths_of_all(elements.len())?;
        let is_root = self.rank() == root;
        let mut gathered = self.zeroed(Operation::Gather, if is_root { &counts } else { &[] })?;
        self.gather_v(elements, &counts, &mut gathered, root)?;
        Ok(is_root.then(|| split(&gathered, &counts)))
    }

    /// Sends list `r` to rank `r`, and returns the lists from all ranks, in rank order. The receivers need not know the
    /// lengths.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let sent = if comm.rank() == 0 { [vec![1], vec![2, 3]] } else { [vec![], vec![4]] };
    ///     comm.all_to_all_vec(&sent).unwrap()
    /// });
    /// assert_eq!(outcome.results, [[vec![1], vec![]], [vec![2, 3], vec![4]]]);
    /// ```
    ///
    /// # Errors
    /// [`Error::Counts`] if there is not one list for each rank. As for [`all_to_all_v`](Self::all_to_all_v).
    #[doc(alias = "MPI_Alltoallv")]
    pub fn all_to_all_vec<T: Pod>(&mut self, lists: &[Vec<T>]) -> Result<Vec<Vec<T>>> {
        let (operation, world_size) = (Operation::AllToAll, self.world_size());
        if lists.len() != world_size {
            return Err(Error::Counts { operation, counts: lists.len(), world_size });
        }
        let sent: Vec<usize> = lists.iter().map(Vec::len).collect();
        let announced: Vec<u64> = sent.iter().map(|&len| len as u64).collect();
        let mut lengths = vec![0; world_size];
        self.all_to_all(&announced, &mut lengths)?;
        let counts = in_memory(operation, &lengths)?;
        let mut received = self.zeroed(operation, &counts)?;
        self.all_to_all_v(&lists.concat(), &sent, &mut received, &counts)?;
        Ok(split(&received, &counts))
    }

    /// Returns the lengths that all ranks pass, in rank order.
    fn lengths_of_all(&mut self, own: usize) -> Result<Vec<usize>> {
        let mut lengths = vec![0; self.world_size()];
        self.all_gather(&[own as u64], &mut lengths)?;
        in_memory(Operation::AllGather, &lengths)
    }

    /// Allocates memory for parts of these lengths. If that fails, the job is aborted, because other ranks wait.
    fn zeroed<T: Pod>(&mut self, operation: Operation, counts: &[usize]) -> Result<Vec<T>> {
        let total = counts.iter().try_fold(0_usize, |total, &count| total.checked_add(count));
        let total = total.ok_or(Error::TotalCount { operation })?;
        Ok(self.engine()?.output(total)?.into_vec())
    }
}

/// Converts lengths that other ranks have sent.
fn in_memory(operation: Operation, lengths: &[u64]) -> Result<Vec<usize>> {
    let lengths = lengths.iter().map(|&length| usize::try_from(length));
    lengths.collect::<Result<_, _>>().map_err(|_| Error::TotalCount { operation })
}

/// Splits elements into parts of these lengths.
fn split<T: Pod>(elements: &[T], counts: &[usize]) -> Vec<Vec<T>> {
    let mut rest = elements;
    let mut take = |&count: &usize| {
        let (part, later) = rest.split_at(count);
        rest = later;
        part.to_vec()
    };
    counts.iter().map(&mut take).collect()
}
