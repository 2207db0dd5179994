//! The direct dialect: schedules for ranks that share memory, which work all at once, each in the others' memory.
//!
//! In the exchange dialect ranks send each other messages. Here a rank publishes chunks in slots of its own or exposes its
//! memory, posts that it has come so far, waits for the posts of others, and reads what they have published, or
//! writes into what they have lent. The steps are data as well: [`verify`] proves that no two ranks touch the same
//! memory at the same time, and [`run`] does them on whatever implements [`DirectAccess`].
//!
//! Every reduction is in canonical order: one rank computes an element, from all contributions, as T(p).

mod access;
mod algorithm;
mod canonical_sum;
mod cells;
mod choice;
mod collective;
mod digest;
mod price;
mod run;
mod schedule;
mod step;
pub mod verify;
mod volume;

pub use access::DirectAccess;
pub use algorithm::{DirectAlgorithm, RemoteAccess};
pub use choice::{Crossovers, CrossoversError, Ownership};
pub use collective::DirectCollective;
pub use price::DirectCosts;
pub use run::{
    DirectMemory, ExposedMemory, OwnMemory, ReductionKernel, SumKernel, exposed_memory, meet, run,
};
pub use schedule::{DirectPlan, DirectSchedule};
pub use step::{DirectStep, PartSet, PeerSet, SumTarget};
