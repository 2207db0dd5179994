//! The wait policy: a rank that waits for another spins, yields its core, or sleeps.

#[cfg(all(feature = "shm", target_os = "linux"))]
mod external_load;
mod wait_policy;

pub(crate) use wait_policy::{CoreDemand, Wait, WaitPolicy, WaitStep};
