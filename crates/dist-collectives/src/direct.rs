//! Algorithms for ranks that share memory.

use std::fmt;

use dist_algos::direct::{DirectAlgorithm, DirectCollective};

use crate::Operation;

/// An operation with its algorithm for ranks that share memory. Each rank accesses the memory of the others; no
/// messages are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Direct {
    operation: Operation,
    algorithm: DirectAlgorithm,
}

impl Direct {
    /// Returns every direct algorithm of an operation.
    pub fn of(operation: Operation) -> impl Iterator<Item = Self> {
        let collective =
            DirectCollective::all(0).into_iter().find(|collective| collective.name() == operation.name());
        let forms = DirectAlgorithm::ALL
            .into_iter()
            .filter(move |algorithm| collective.is_some_and(|collective| algorithm.serves(collective)));
        forms.map(move |algorithm| Self { operation, algorithm })
    }

    pub(crate) const fn new(operation: Operation, algorithm: DirectAlgorithm) -> Self {
        Self { operation, algorithm }
    }

    /// Returns the operation.
    pub const fn operation(self) -> Operation {
        self.operation
    }

    /// Returns the algorithm.
    pub const fn algorithm(self) -> DirectAlgorithm {
        self.algorithm
    }

    /// Returns the name, which is unique among the algorithms of the operation.
    pub const fn name(self) -> &'static str {
        match self.algorithm {
            DirectAlgorithm::OneShot => "direct/one_shot",
            DirectAlgorithm::Staged => "direct/staged",
            DirectAlgorithm::ReadFromAll => "direct/read_from_all",
            DirectAlgorithm::WriteToAll => "direct/write_to_all",
            _ => "direct",
        }
    }
}

impl fmt::Display for Direct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
