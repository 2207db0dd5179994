//! Links between two processes of one host through shared memory: how the memory is offered and taken, and the
//! bytes of messages in it.
//!
//! One side creates the memory and passes its descriptor over a Unix socket, after both sides have
//! authenticated there. The socket stays open: it wakes a sleeping side, and it closes when its process ends.
//! Two processes find out whether they can share memory by trying: the taker checks a nonce in the memory
//! that only the creator knows.

pub(crate) mod cursor;
mod offer;
pub(crate) mod segment;
mod shm_link;
mod single_copy;
mod unix_socket;

pub(crate) use offer::{ACCEPTED, SharedSegment, give_arena, offer, take, take_arena};
pub(crate) use shm_link::{NextMessage, ShmLink, StreamEnd};
pub(crate) use unix_socket::{connect, is_ours, listen};
