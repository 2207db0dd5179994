//! Bootstrap of a job: rendezvous, authentication, the coordinator, heartbeats and the abort.

pub(crate) mod abort_state;
pub(crate) mod acceptor;
pub(crate) mod address;
pub(crate) mod auth;
pub(crate) mod channels;
pub(crate) mod config;
pub(crate) mod control;
pub(crate) mod coordinator;
pub(crate) mod dial;
pub(crate) mod failure;
pub(crate) mod files;
pub(crate) mod host;
pub(crate) mod outer_job;
pub(crate) mod probe;
pub(crate) mod rendezvous;
pub(crate) mod rendezvous_server;
pub(crate) mod service;
pub(crate) mod session;
pub(crate) mod store;
pub(crate) mod threads;
pub(crate) mod user;
