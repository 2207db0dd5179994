//! The installed MPI library: the thread that owns it, and packets as its requests.
//!
//! All memory that a request names belongs to [`MpiWire`], and stays where it is until the library has reported the
//! request complete. All calls are made while the lock of the world is held, so that the level
//! [`Threading::Serialized`] is enough.
#![allow(unsafe_code, reason = "requests that outlive a call have no safe form in rsmpi")]

use std::ffi::c_int;
use std::io;
use std::sync::Arc;

use dist_transport::Runtime;
use dist_transport::cpu::CacheLine;
use mpi::ffi;
use mpi::raw::AsRaw;
use mpi::topology::{Communicator, SimpleCommunicator};
use mpi::traits::CommunicatorCollectives;
use mpi::{Threading, initialize_with_threading};

use crate::Error;
use crate::wire::{Buffer, Completions, FULL, HEADER, Packet, Tag, Wire};
use crate::world::{CORE_WORDS, Placement, World};

/// The fewest and the most receives that wait for packets at the same time.
const RECEIVES: std::ops::RangeInclusive<usize> = 8..=64;

/// A packet of at most this size is copied when it arrives, so that the queue needs no more memory than it.
const SMALL: usize = 8 * 1024;

/// Receives the world once it is connected, or the reason why it is not.
pub(crate) type Started<'a> = &'a dyn Fn(Result<Arc<World>, Error>);

/// Initialises MPI on a thread of its own, which also finalises it.
pub(crate) fn start() -> Result<Arc<World>, Error> {
    spawn(own_library)
}

/// Runs `owner` on a thread of its own, and returns the world that it starts.
pub(crate) fn spawn(owner: impl FnOnce(Started<'_>) + Send + 'static) -> Result<Arc<World>, Error> {
    let runtime = Runtime::system();
    let (ready, mut started) = runtime.mailbox();
    let owner = move || owner(&|world| ready.send(world));
    let task = runtime.spawn("dist-mpi", owner).map_err(Error::Thread)?;
    let world: Result<Arc<World>, Error> = started.receive(None).map_err(|_| Error::Ended)?;
    let world = world?;
    world.set_service(task);
    Ok(world)
}

/// Runs the thread that owns MPI, from its initialisation to its end.
fn own_library(started: Started<'_>) {
    let Some((universe, level)) = initialize_with_threading(Threading::Serialized) else {
        return started(Err(Error::AlreadyInitialized));
    };
    if level < Threading::Serialized {
        return started(Err(Error::ThreadLevel { level: format!("{level:?}") }));
    }
    serve(&universe.world().duplicate(), started);
}

/// Connects the processes of a communicator, and serves this one until all have left.
pub(crate) fn serve(comm: &SimpleCommunicator, started: Started<'_>) {
    let (rank, placement) = (index(comm.rank()), placement(comm));
    let wire = match MpiWire::new(comm, placement.len()) {
        Ok(wire) => wire,
        Err(error) => return started(Err(Error::Library(error))),
    };
    let world = Arc::new(World::new(Box::new(wire), rank, placement));
    started(Ok(world.clone()));
    if !world.serve() {
        // Requests are open, so nothing that they name may be freed.
        let text = world.decided().map_or_else(String::new, ToString::to_string);
        eprintln!("dist-mpi: rank {rank} ends the job with MPI_Abort: {text}");
        comm.abort(1);
    }
    world.close_wire();
}

/// Returns the host and the cores of every rank.
fn placement(comm: &SimpleCommunicator) -> Vec<Placement> {
    let size = index(comm.size());
    let mut host = u64::from(comm.rank().unsigned_abs());
    let on_host = comm.split_shared(comm.rank());
    // The first rank of the host gives it its number.
    mpi::traits::Root::broadcast_into(&on_host.process_at_rank(0), &mut host);
    let mut own = [0; 1 + CORE_WORDS];
    own[0] = host;
    own[1..].copy_from_slice(&own_cores());
    let mut all = vec![0; own.len() * size];
    comm.all_gather_into(&own, &mut all);
    let (all, _) = all.as_chunks::<{ 1 + CORE_WORDS }>();
    let of_rank = |words: &[u64; 1 + CORE_WORDS]| Placement {
        host: words[0],
        cores: words[1..].try_into().expect("the words of one mask"),
    };
    all.iter().map(of_rank).collect()
}

/// Returns the cores that this process may run on, as bits.
fn own_cores() -> [u64; CORE_WORDS] {
    let mut cores = [0; CORE_WORDS];
    #[cfg(target_os = "linux")]
    if let Ok(allowed) = rustix::thread::sched_getaffinity(None) {
        let most = rustix::thread::CpuSet::MAX_CPU.min(64 * CORE_WORDS);
        (0..most).filter(|&core| allowed.is_set(core)).for_each(|core| cores[core / 64] |= 1 << (core % 64));
        return cores;
    }
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    (0..count.min(64 * CORE_WORDS)).for_each(|core| cores[core / 64] |= 1 << (core % 64));
    cores
}

pub(crate) fn index(number: c_int) -> usize {
    usize::try_from(number).expect("MPI counts from 0")
}

/// A wire whose packets are requests of MPI: some receives that always wait, and sends.
///
/// The slots and requests have the same indexes. The first slots receive.
struct MpiWire {
    comm: ffi::MPI_Comm,
    requests: Vec<ffi::MPI_Request>,
    slots: Vec<Slot>,
    receives: usize,
    in_flight: Vec<usize>,
    sends: usize,
    /// Memory for the answers of `MPI_Testsome`, as long as `requests`.
    completed: Vec<c_int>,
    statuses: Vec<ffi::MPI_Status>,
}

/// The memory of a request.
enum Slot {
    Free,
    Receiving(Buffer),
    Sending(usize, Buffer),
}

// SAFETY: handles of MPI belong to the process, not to a thread. `World` calls the wire under its lock only, as
// `MPI_THREAD_SERIALIZED` requires, and `own_library` has checked that level.
unsafe impl Send for MpiWire {}

impl MpiWire {
    fn new(comm: &SimpleCommunicator, size: usize) -> io::Result<Self> {
        let comm = comm.as_raw();
        // SAFETY: the communicator is valid and the error handler is a constant of the library.
        check("MPI_Comm_set_errhandler", unsafe {
            ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN)
        })?;
        let receives = (2 * size).clamp(*RECEIVES.start(), *RECEIVES.end());
        let mut wire = Self {
            comm,
            requests: Vec::new(),
            slots: Vec::new(),
            receives,
            in_flight: vec![0; size],
            sends: 0,
            completed: Vec::new(),
            statuses: Vec::new(),
        };
        for slot in 0..receives {
            wire.add_slot();
            wire.receive(slot, vec![CacheLine::ZERO; FULL])?;
        }
        Ok(wire)
    }

    fn add_slot(&mut self) -> usize {
        // SAFETY: a constant that the library initialises when it is loaded.
        self.requests.push(unsafe { ffi::RSMPI_REQUEST_NULL });
        self.slots.push(Slot::Free);
        self.completed.push(0);
        // SAFETY: a status is a C structure of numbers, for which zero is a value.
        self.statuses.push(unsafe { std::mem::zeroed() });
        self.slots.len() - 1
    }

    /// Begins to receive any packet into a buffer of full size.
    fn receive(&mut self, slot: usize, mut buffer: Buffer) -> io::Result<()> {
        let (memory, bytes) = (buffer.as_mut_ptr().cast(), to_c_int(buffer.len() * CacheLine::BYTES));
        // The slot keeps the memory before the library knows it.
        self.slots[slot] = Slot::Receiving(buffer);
        // SAFETY: constants that the library initialises when it is loaded.
        let (byte, any_source, any_tag) =
            unsafe { (ffi::RSMPI_UINT8_T, ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_ANY_TAG) };
        let request = &raw mut self.requests[slot];
        // SAFETY: the memory has `bytes` bytes. The slot owns it until `poll` sees that the request is complete;
        // moving the `Vec` does not move its memory.
        let code = unsafe { ffi::MPI_Irecv(memory, bytes, byte, any_source, any_tag, self.comm, request) };
        check("MPI_Irecv", code)
    }

    /// Hands over what a completed request has received or sent.
    fn complete(
        &mut self,
        slot: usize,
        status: ffi::MPI_Status,
        completions: &mut Completions,
    ) -> io::Result<()> {
        match std::mem::replace(&mut self.slots[slot], Slot::Free) {
            Slot::Receiving(buffer) => {
                let bytes = received_bytes(&status)?;
                let (buffer, next) = split_off(buffer, bytes, completions);
                let tag = Tag::decode(status.MPI_TAG);
                let packet = Packet { kind: tag.kind, buffer, bytes };
                completions.arrived.push((index(status.MPI_SOURCE), tag, packet));
                self.receive(slot, next)
            }
            Slot::Sending(to, buffer) => {
                self.in_flight[to] -= 1;
                self.sends -= 1;
                completions.recycle(buffer);
                Ok(())
            }
            Slot::Free => Ok(()),
        }
    }

    /// Cancels the receives. No packet is on its way any more: each process has sent its last one.
    fn cancel_receives(&mut self) -> io::Result<()> {
        for slot in 0..self.receives {
            let request = &raw mut self.requests[slot];
            // SAFETY: the request belongs to a receive, and no other thread uses it.
            check("MPI_Cancel", unsafe { ffi::MPI_Cancel(request) })?;
            // SAFETY: as above; no status is asked for.
            check("MPI_Wait", unsafe { ffi::MPI_Wait(request, ffi::RSMPI_STATUS_IGNORE) })?;
            self.slots[slot] = Slot::Free;
        }
        Ok(())
    }
}

impl Wire for MpiWire {
    fn send(&mut self, to: usize, tag: Tag, buffer: Buffer, bytes: usize) -> io::Result<()> {
        let free = (self.receives..self.slots.len()).find(|&slot| matches!(self.slots[slot], Slot::Free));
        let slot = free.unwrap_or_else(|| self.add_slot());
        assert!(bytes <= buffer.len() * CacheLine::BYTES, "a packet is in its buffer");
        let memory = buffer.as_ptr().cast();
        // The slot keeps the memory before the library knows it.
        self.slots[slot] = Slot::Sending(to, buffer);
        self.in_flight[to] += 1;
        self.sends += 1;
        // SAFETY: a constant that the library initialises when it is loaded.
        let byte = unsafe { ffi::RSMPI_UINT8_T };
        let (bytes, to, tag) = (to_c_int(bytes), to_c_int(to), tag.encode());
        let request = &raw mut self.requests[slot];
        // SAFETY: the memory has `bytes` bytes, as asserted above. The slot owns it until `poll` finds that
        // the request is complete; no thread writes to it.
        check("MPI_Isend", unsafe { ffi::MPI_Isend(memory, bytes, byte, to, tag, self.comm, request) })
    }

    fn poll(&mut self, completions: &mut Completions) -> io::Result<()> {
        let (count, mut found) = (to_c_int(self.requests.len()), 0);
        let requests = self.requests.as_mut_ptr();
        let (completed, statuses) = (self.completed.as_mut_ptr(), self.statuses.as_mut_ptr());
        // SAFETY: the three arrays have `count` elements, since `add_slot` extends them together.
        let code = unsafe { ffi::MPI_Testsome(count, requests, &raw mut found, completed, statuses) };
        check("MPI_Testsome", code)?;
        // A negative count says that no request is active.
        for place in 0..usize::try_from(found).unwrap_or(0) {
            self.complete(index(self.completed[place]), self.statuses[place], completions)?;
        }
        Ok(())
    }

    fn in_flight_to(&self, to: usize) -> usize {
        self.in_flight[to]
    }

    fn in_flight(&self) -> usize {
        self.sends
    }

    fn close(&mut self) -> io::Result<()> {
        self.cancel_receives()
    }
}

impl Drop for MpiWire {
    /// Leaks the memory of open requests, into which the library may still write.
    fn drop(&mut self) {
        let open = self.slots.drain(..).filter(|slot| !matches!(slot, Slot::Free));
        open.for_each(std::mem::forget);
    }
}

/// Returns the buffer of a packet, and a buffer for the next one.
fn split_off(buffer: Buffer, bytes: usize, completions: &mut Completions) -> (Buffer, Buffer) {
    if bytes <= SMALL {
        let lines = bytes.max(HEADER).div_ceil(CacheLine::BYTES);
        return (buffer[..lines].to_vec(), buffer);
    }
    (buffer, completions.full_buffer())
}

fn received_bytes(status: &ffi::MPI_Status) -> io::Result<usize> {
    let mut count = 0;
    // SAFETY: a constant that the library initialises when it is loaded.
    let byte = unsafe { ffi::RSMPI_UINT8_T };
    // SAFETY: the status was written by the library for a receive that is complete.
    check("MPI_Get_count", unsafe { ffi::MPI_Get_count(status, byte, &raw mut count) })?;
    usize::try_from(count).map_err(io::Error::other)
}

fn to_c_int(number: usize) -> c_int {
    c_int::try_from(number).expect("the size of a packet and the number of ranks are small")
}

/// Returns the library's error as text.
fn check(function: &str, code: c_int) -> io::Result<()> {
    if code == 0 {
        return Ok(());
    }
    let mut text = vec![0_u8; 4096];
    let mut length = 0;
    // SAFETY: the memory is longer than the longest text of any library, which is 1,024 bytes.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &raw mut length) };
    text.truncate(usize::try_from(length).unwrap_or(0));
    Err(io::Error::other(format!("{function}: {}", String::from_utf8_lossy(&text))))
}
