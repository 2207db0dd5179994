//! Memory shared by processes of one host: how it is offered and taken, messages' bytes in it, and what ranks do in it
//! together.
//!
//! One side makes the memory and passes its descriptor over a Unix socket, after both have proven themselves there.
//! The socket stays: whoever sleeps is woken through it, and it ends when its process does. Whether two processes
//! can share memory is found out by doing so: the taker looks for a number in it that only the maker knows.

mod apart;
mod bell;
mod cursor;
mod door;
mod exposure;
mod group;
mod heap;
mod loan;
mod map;
mod memory;
mod offer;
mod pen;
mod process;
mod ranges;
mod segment;
mod turn;

pub(crate) use door::{connect, is_ours, listen};
pub(crate) use exposure::{Exposure, Origin};
pub(crate) use group::GroupMemory;
pub(crate) use heap::Heap;
pub(crate) use map::{Mapping, change, copy_past, take_short_turns};
pub(crate) use memory::{End, Memory, Next};
pub(crate) use offer::{ACCEPTED, Share, give_arena, offer, take, take_arena};
pub(crate) use pen::{LONG_BYTES, Pen};
pub(crate) use process::{Process, processor_time, read_process};
pub(crate) use turn::{Turn, hash, is_same_call};

const PAGE_BYTES: usize = 4096;
