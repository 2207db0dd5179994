//! The typed collectives over the in-process network: in virtual time, on the system's threads, over TCP.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod arguments;
#[cfg(feature = "ndarray")]
mod array_messages;
mod barriers;
mod batches;
mod calls;
mod circles;
mod coalesced;
mod costs;
mod custom_ops;
mod deadlines;
mod direct;
mod direct_calls;
mod direct_faults;
mod direct_traffic;
mod disagreement;
mod every_message;
mod faults;
mod forks;
mod from_any;
mod half_means;
mod hosts;
mod independent_messages;
mod logical;
mod long_messages;
mod messages;
mod mismatches;
mod native;
mod oracle;
mod parity;
mod pending;
mod refusals;
#[cfg(feature = "ndarray")]
mod shaped;
mod sizes;
mod started;
mod started_from_any;
mod store;
mod strided;
mod traffic;
#[cfg(all(feature = "shm", target_os = "linux"))]
mod transports;
mod update_windows;
#[cfg(feature = "serde")]
mod values;
mod vectors;
mod windows;
mod worlds;
