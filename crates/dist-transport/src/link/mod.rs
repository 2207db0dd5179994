//! Links between two processes: sockets, message framing, and message counts.

pub(crate) mod counts;
pub(crate) mod message;
pub(crate) mod peer_link;
pub(crate) mod socket;
pub(crate) mod staging_buffer;
