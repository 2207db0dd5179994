//! Choosing algorithms: the algorithms of each operation, the costs by which they are chosen, and settings that force
//! one.
//!
//! A program that only calls operations needs nothing of this module: [`Communicator::from_env`] measures the costs.
//!
//! [`Communicator::from_env`]: crate::Communicator::from_env

pub use crate::call::Operation;
pub use crate::communicator::Scoped;
pub use crate::cost_cache::{CostCache, TopologyKey};
pub use crate::engine::BLOCK_BYTES_OF_RANK;
pub use crate::level_costs::LevelModels;
pub use crate::variables::crossovers_from_env;
/// The choice of algorithms on shared memory, and the kinds of memory that they work on.
#[doc(no_inline)]
pub use dist_algos::direct::{Crossovers, CrossoversError, Ownership};
/// Algorithms, and the values by which they are chosen.
#[doc(no_inline)]
pub use dist_algos::{Algorithm, CostModel, Hosts};
