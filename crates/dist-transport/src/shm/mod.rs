//! ShmLink shared by processes of one host: how it is offered and taken, messages' bytes in it, and what ranks do in it
//! together.
//!
//! One side makes the memory and passes its descriptor over a Unix socket, after both have proven themselves there.
//! The socket stays: whoever sleeps is woken through it, and it ends when its process does. Whether two processes
//! can share memory is found out by doing so: the taker looks for a number in it that only the maker knows.

mod address_colouring;
mod copy_policy;
mod cursor;
mod futex;
mod generation;
mod group;
mod heap;
mod map;
mod offer;
mod process;
mod ranges;
mod remote_region;
mod segment;
mod shm_link;
mod single_copy;
mod unix_socket;

pub(crate) use copy_policy::{CopyPolicy, LONG_BYTES};
pub(crate) use generation::{Generation, hash, is_same_call};
pub(crate) use group::GroupMemory;
pub(crate) use heap::Heap;
pub(crate) use map::{Mapping, change, copy_non_temporal, request_short_slices};
pub(crate) use offer::{ACCEPTED, SharedSegment, give_arena, offer, take, take_arena};
pub(crate) use process::{Process, processor_time, read_process};
pub(crate) use remote_region::{RegionOrigin, RemoteRegion};
pub(crate) use shm_link::{NextMessage, ShmLink, StreamEnd};
pub(crate) use unix_socket::{connect, is_ours, listen};

const PAGE_BYTES: usize = 4096;
