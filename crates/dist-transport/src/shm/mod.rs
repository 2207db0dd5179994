//! Memory shared by processes of one host: how it is offered and taken, the bytes of messages in it, and the
//! memory of groups.
//!
//! One side creates the memory and passes its descriptor over a Unix socket, after both sides have
//! authenticated there. The socket stays open: it wakes a sleeping side, and it closes when its process ends.
//! Two processes find out whether they can share memory by trying: the taker checks a nonce in the memory
//! that only the creator knows.

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
