//! Direct schedules: all ranks work at once on memory that they share.
//!
//! In the schedules of the parent module, ranks send each other messages. Here a rank publishes chunks in slots or
//! exposes its memory, signals its progress and waits for signals of others. It then reads published data or writes
//! into lent memory. The steps are data as well: [`verify`] proves that no two ranks access the same memory at the
//! same time, and [`run`] executes them on any [`DirectAccess`].
//!
//! Every reduction is in canonical order: one rank computes an element from all contributions as T(p).

mod access;
mod algorithm;
mod canonical_sum;
mod cells;
mod choice;
mod collective;
mod digest;
pub mod one_shot;
mod price;
pub mod read_from_all;
mod run;
mod schedule;
pub mod staged;
mod step;
mod step_context;
pub mod verify;
mod volume;
pub mod write_to_all;

pub use access::DirectAccess;
pub use algorithm::{DirectAlgorithm, DirectCase, RemoteAccess};
pub use choice::{Crossovers, CrossoversError, Ownership};
pub use collective::{DirectCollective, Division};
pub use price::DirectCosts;
pub use run::{
    DirectMemory, ExposedMemory, OwnMemory, ReductionKernel, SumKernel, exposed_memory, run, signal_and_wait,
};
pub use schedule::{DirectPlan, DirectSchedule};
pub use step::{DirectStep, PartSet, PeerSet, SumTarget};
pub use step_context::{PhaseStep, StepContext};

/// The size of a block of a large buffer.
const BLOCK_BYTES: usize = 256 << 10;
