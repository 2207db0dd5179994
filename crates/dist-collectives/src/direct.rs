//! Algorithms for ranks that share memory.

use std::fmt;

use dist_algos::direct::{DirectAlgorithm, DirectCollective};

use crate::Operation;

/// How an operation is done by ranks that share memory: not by messages, but each in the memory of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Direct {
    operation: Operation,
    algorithm: DirectAlgorithm,
}

impl Direct {
    /// Every form that an operation can be done in.
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

    /// The operation that this is an algorithm of.
    pub const fn operation(self) -> Operation {
        self.operation
    }

    /// The form.
    pub const fn algorithm(self) -> DirectAlgorithm {
        self.algorithm
    }

    /// The name, unique among the algorithms of its operation.
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
