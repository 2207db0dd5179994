//! Memory that processes of one host map or access together: [`MappedGroup`], which is the
//! [`ShmGroup`](crate::shm_group::ShmGroup) of processes, the heap, and access to the memory of another process.

mod address_colouring;
mod futex;
mod generation;
mod group_memory;
mod group_pool;
mod heap;
mod mapped_group;
pub(crate) mod mapping;
mod ranges;
mod remote_process;
mod remote_region;
mod spin_lock;

pub(crate) use generation::{Generation, hash, is_same_call};
pub(crate) use group_memory::{Core, GroupMemory};
pub(crate) use group_pool::{
    GroupPool, POOL_MEMBERS_MAX, POOL_NUMBER, POOL_RANKS_MAX, PoolEntry, PoolHandle, PoolLease,
};
pub(crate) use heap::Heap;
pub(crate) use mapped_group::MappedGroup;
pub(crate) use mapping::{Mapping, change, copy_non_temporal, request_short_slices};
pub(crate) use remote_process::{Process, peer_of, processor_time, read_process};
pub(crate) use remote_region::{RegionOrigin, RemoteRegion};

pub(crate) const PAGE_BYTES: usize = 4096;
