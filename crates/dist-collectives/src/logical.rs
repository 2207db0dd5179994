//! Logical reductions: of booleans.

use crate::{Communicator, ReduceOp, Result};

/// An operation that combines booleans of different ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogicalOp {
    /// `true` if the value is `true` on all ranks.
    #[doc(alias = "MPI_LAND")]
    And,
    /// `true` if the value is `true` on any rank.
    #[doc(alias = "MPI_LOR")]
    Or,
    /// `true` if the value is `true` on an odd number of ranks.
    #[doc(alias = "MPI_LXOR")]
    Xor,
}

/// # Logical reductions
impl Communicator {
    /// Replaces each value by the combination of all ranks' values at this place.
    ///
    /// ```
    /// use dist_collectives::{Communicator, LogicalOp};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let mut values = [comm.rank() == 2, true];
    ///     comm.all_reduce_logical(&mut values, LogicalOp::And).unwrap();
    ///     values
    /// });
    /// assert_eq!(outcome.results, [[false, true]; 3]);
    /// ```
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce), as which it appears in errors: of `u8`, with the operation on bits.
    pub fn all_reduce_logical(&mut self, values: &mut [bool], op: LogicalOp) -> Result<()> {
        let on_bits = match op {
            LogicalOp::And => ReduceOp::And,
            LogicalOp::Or => ReduceOp::Or,
            LogicalOp::Xor => ReduceOp::Xor,
        };
        let mut bytes: Vec<u8> = values.iter().map(|&value| value.into()).collect();
        self.all_reduce(&mut bytes, on_bits)?;
        values.iter_mut().zip(bytes).for_each(|(value, byte)| *value = byte != 0);
        Ok(())
    }
}
