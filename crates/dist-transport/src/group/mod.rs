//! Memory that all ranks of a host share: flag lines, eager buffers, slots, the heap, and access to the memory
//! of another process.

mod address_colouring;
mod futex;
mod generation;
mod group_memory;
mod heap;
pub(crate) mod mapping;
mod ranges;
mod remote_process;
mod remote_region;
mod shm_group;

pub(crate) use generation::{Generation, hash, is_same_call};
pub(crate) use group_memory::{Core, GroupMemory};
pub(crate) use heap::Heap;
pub(crate) use mapping::{Mapping, change, copy_non_temporal, request_short_slices};
pub(crate) use remote_process::{Process, peer_of, processor_time, read_process};
pub(crate) use remote_region::{RegionOrigin, RemoteRegion};
pub(crate) use shm_group::ShmGroup;

pub(crate) const PAGE_BYTES: usize = 4096;
