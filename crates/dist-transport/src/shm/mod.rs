//! Memory shared by two processes of one host: how it is offered and taken, and messages' bytes in it.
//!
//! One side makes the memory and passes its descriptor over a Unix socket, after both have proven themselves there.
//! The socket stays: whoever sleeps is woken through it, and it ends when its process does. Whether two processes
//! can share memory is found out by doing so: the taker looks for a number in it that only the maker knows.

mod cursor;
mod door;
mod memory;
mod segment;

pub(crate) use door::{connect, is_ours, listen};
pub(crate) use memory::{ACCEPTED, End, Memory, Share, offer, take};
