//! The typed collectives over the in-process network: in virtual time, on the system's threads, over TCP.

mod arguments;
mod deadlines;
mod disagreement;
mod forks;
mod oracle;
mod pending;
mod refusals;
mod started;
mod worlds;
