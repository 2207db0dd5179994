//! The installed MPI library: the thread that owns it, and packets as its requests.
//!
//! All memory that a request names belongs to [`MpiWire`], and stays where it is until the library has reported the
//! request complete. All calls are made while the lock of the world is held, so that the level
//! [`Threading::Serialized`] is enough. Only the creation of a group's communicator is called without the lock, since it
//! blocks. Native collectives need it, and then the level is [`Threading::Multiple`].
#![allow(unsafe_code, reason = "requests that outlive a call have no safe form in rsmpi")]

use std::ffi::{c_int, c_void};
use std::io;
use std::sync::Arc;

use dist_transport::Runtime;
use dist_transport::cpu::CacheLine;
use dist_transport::native::{NativeElement, NativeOp, NativeOperation, NativeReduction};
use mpi::ffi;
use mpi::raw::AsRaw;
use mpi::topology::{Communicator, SimpleCommunicator};
use mpi::traits::CommunicatorCollectives;
use mpi::{Threading, initialize_with_threading};

use crate::Error;
use crate::wire::{
    Buffer, Completions, FULL, FinishedNative, HEADER, NativeLayout, NativeSegment, Packet, Tag, Wire,
};
use crate::world::{CORE_WORDS, Placement, World};

/// The fewest and the most receives that wait for packets at the same time.
const RECEIVES: std::ops::RangeInclusive<usize> = 8..=64;

/// A packet of at most this size is copied when it arrives, so that the queue needs no more memory than it.
const SMALL: usize = 8 * 1024;

/// Receives the world once it is connected, or the reason why it is not.
pub(crate) type Started<'a> = &'a dyn Fn(Result<Arc<World>, Error>);

/// Initialises MPI on a thread of its own, which also finalises it. The library executes collectives from this many
/// bytes on, if it executes any.
pub(crate) fn start(native_from: Option<usize>) -> Result<Arc<World>, Error> {
    spawn(move |started| own_library(native_from, started))
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
fn own_library(native_from: Option<usize>, started: Started<'_>) {
    let needed = if native_from.is_some() { Threading::Multiple } else { Threading::Serialized };
    let Some((universe, level)) = initialize_with_threading(needed) else {
        return started(Err(Error::AlreadyInitialized));
    };
    if level < needed {
        return started(Err(Error::ThreadLevel {
            level: format!("{level:?}"),
            needed: format!("{needed:?}"),
        }));
    }
    serve(&universe.world().duplicate(), native_from, started);
}

/// Connects the processes of a communicator, and serves this one until all have left.
pub(crate) fn serve(comm: &SimpleCommunicator, native_from: Option<usize>, started: Started<'_>) {
    let (rank, placement) = (index(comm.rank()), placement(comm));
    if let Err(error) = compare_options(comm, native_from) {
        return started(Err(error));
    }
    // The wire receives messages with any tag, also those by which the library creates communicators.
    let of_natives = native_from.map(|_| comm.duplicate());
    let wire = match MpiWire::new(comm, of_natives.as_ref(), placement.len()) {
        Ok(wire) => wire,
        Err(error) => return started(Err(Error::Library(error))),
    };
    let world = Arc::new(World::new(Box::new(wire), rank, placement, native_from));
    started(Ok(world.clone()));
    if !world.serve() {
        // Requests are open, so nothing that they name may be freed.
        let text = world.decided().map_or_else(String::new, ToString::to_string);
        eprintln!("dist-mpi: rank {rank} ends the job with MPI_Abort: {text}");
        comm.abort(1);
    }
    world.close_wire();
}

/// Checks that all ranks have the same options. If they differ, all ranks get the same error.
fn compare_options(comm: &SimpleCommunicator, native_from: Option<usize>) -> Result<(), Error> {
    let own = native_from.map_or(0, |from| (from as u64).saturating_add(1));
    let mut all = vec![0_u64; index(comm.size())];
    comm.all_gather_into(&own, &mut all[..]);
    all.iter().position(|other| *other != all[0]).map_or(Ok(()), |rank| Err(Error::Options { rank }))
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
    /// The communicator from which those of groups are created.
    of_natives: Option<NativeComm>,
    requests: Vec<ffi::MPI_Request>,
    slots: Vec<Slot>,
    receives: usize,
    in_flight: Vec<usize>,
    sends: usize,
    /// The segments of collectives that are open.
    natives: usize,
    /// Memory for the answers of `MPI_Testsome`, as long as `requests`.
    completed: Vec<c_int>,
    statuses: Vec<ffi::MPI_Status>,
}

/// The memory of a request.
enum Slot {
    Free,
    Receiving(Buffer),
    Sending(usize, Buffer),
    Native(FinishedNative),
}

/// A communicator of MPI whose collectives the library executes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NativeComm(ffi::MPI_Comm);

/// A function that creates a communicator, and waits until all of its processes do so.
pub(crate) type CreateCommunicator = Box<dyn FnOnce() -> io::Result<NativeComm> + Send>;

// SAFETY: handles of MPI belong to the process, not to a thread. They are used by several threads only if the library
// grants the level `MPI_THREAD_MULTIPLE`, which `own_library` has checked.
unsafe impl Send for NativeComm {}

// SAFETY: handles of MPI belong to the process, not to a thread. `World` calls the wire under its lock only, as
// `MPI_THREAD_SERIALIZED` requires, and `own_library` has checked that level.
unsafe impl Send for MpiWire {}

impl MpiWire {
    fn new(
        comm: &SimpleCommunicator,
        of_natives: Option<&SimpleCommunicator>,
        size: usize,
    ) -> io::Result<Self> {
        let (comm, of_natives) = (comm.as_raw(), of_natives.map(|comm| NativeComm(comm.as_raw())));
        return_errors(comm)?;
        of_natives.map_or(Ok(()), |NativeComm(comm)| return_errors(comm))?;
        let receives = (2 * size).clamp(*RECEIVES.start(), *RECEIVES.end());
        let mut wire = Self {
            comm,
            of_natives,
            requests: Vec::new(),
            slots: Vec::new(),
            receives,
            in_flight: vec![0; size],
            sends: 0,
            natives: 0,
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
                let tag = Tag::decode(status.MPI_TAG).ok_or(io::ErrorKind::InvalidData)?;
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
            Slot::Native(finished) => {
                self.natives -= 1;
                completions.natives.push(finished);
                Ok(())
            }
            Slot::Free => Ok(()),
        }
    }

    /// Returns a slot for a request that is no receive.
    fn free_slot(&mut self) -> usize {
        let free = (self.receives..self.slots.len()).find(|&slot| matches!(self.slots[slot], Slot::Free));
        free.unwrap_or_else(|| self.add_slot())
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
        let slot = self.free_slot();
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
        self.sends + self.natives
    }

    fn create_communicator(&self, members: &[usize], count: u64) -> io::Result<CreateCommunicator> {
        let parent = self.of_natives.ok_or(io::ErrorKind::Unsupported)?;
        let tag = creation_tag(parent, (members[0], self.in_flight.len()), count)?;
        let members: Vec<c_int> = members.iter().map(|&member| to_c_int(member)).collect();
        Ok(Box::new(move || create_communicator(parent, &members, tag)))
    }

    fn begin_native(
        &mut self,
        comm: NativeComm,
        segment: NativeSegment,
        send: Buffer,
        receive: Buffer,
    ) -> io::Result<()> {
        let slot = self.free_slot();
        // The slot keeps the memory before the library knows it.
        let (number, layout) = (segment.number, layout(&segment));
        self.slots[slot] = Slot::Native(FinishedNative { number, send, receive, layout });
        self.natives += 1;
        let Slot::Native(memory) = &mut self.slots[slot] else { unreachable!("it was just filled") };
        begin_collective(comm, &segment, memory, &mut self.requests[slot])
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

/// Lets the library return errors of calls with this communicator instead of ending the process.
fn return_errors(comm: ffi::MPI_Comm) -> io::Result<()> {
    // SAFETY: the communicator is valid and the error handler is a constant of the library.
    check("MPI_Comm_set_errhandler", unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) })
}

/// Returns the tag by which a process creates its communicator number `count`. Communicators that have members in common
/// may be created at the same time by several threads, and need different tags then.
fn creation_tag(
    NativeComm(parent): NativeComm,
    (rank, size): (usize, usize),
    count: u64,
) -> io::Result<c_int> {
    let (mut most, mut is_set): (*mut c_int, c_int) = (std::ptr::null_mut(), 0);
    let key = c_int::try_from(ffi::MPI_TAG_UB).map_err(io::Error::other)?;
    let place = (&raw mut most).cast::<c_void>();
    // SAFETY: the attribute's value is a pointer to an integer, for which there is room.
    check("MPI_Comm_get_attr", unsafe { ffi::MPI_Comm_get_attr(parent, key, place, &raw mut is_set) })?;
    // SAFETY: if it is set, the library keeps the integer as long as the communicator exists.
    let most = if is_set == 0 || most.is_null() { TAG_MAX } else { unsafe { *most } };
    let counts = ((index(most) + 1) / size).max(1) as u64;
    let tag = rank as u64 + size as u64 * (count % counts);
    c_int::try_from(tag).map_err(io::Error::other)
}

/// The largest tag that every library allows.
const TAG_MAX: c_int = 32767;

/// Creates the communicator of these processes, and waits for them.
fn create_communicator(
    NativeComm(parent): NativeComm,
    members: &[c_int],
    tag: c_int,
) -> io::Result<NativeComm> {
    // SAFETY: constants that the library initialises when it is loaded.
    let (mut all, mut group, mut comm) =
        unsafe { (ffi::RSMPI_GROUP_NULL, ffi::RSMPI_GROUP_NULL, ffi::RSMPI_COMM_NULL) };
    // SAFETY: the communicator is valid.
    check("MPI_Comm_group", unsafe { ffi::MPI_Comm_group(parent, &raw mut all) })?;
    let (count, first) = (to_c_int(members.len()), members.as_ptr());
    // SAFETY: the list has `count` ranks of the group.
    check("MPI_Group_incl", unsafe { ffi::MPI_Group_incl(all, count, first, &raw mut group) })?;
    // SAFETY: all members call this, with this tag. The level `MPI_THREAD_MULTIPLE` is granted.
    let created = check("MPI_Comm_create_group", unsafe {
        ffi::MPI_Comm_create_group(parent, group, tag, &raw mut comm)
    });
    for group in [&raw mut group, &raw mut all] {
        // SAFETY: the group was created above and is not used any more.
        check("MPI_Group_free", unsafe { ffi::MPI_Group_free(group) })?;
    }
    created?;
    return_errors(comm)?;
    Ok(NativeComm(comm))
}

/// Returns the counts and places of a segment whose parts have different sizes.
fn layout(segment: &NativeSegment) -> NativeLayout {
    let element_size = match segment.operation {
        NativeOperation::AllGatherV | NativeOperation::AllToAllV => 1,
        NativeOperation::ReduceScatterV(reduction) => reduction.element.size(),
        _ => return NativeLayout::default(),
    };
    let counts =
        |sizes: &[usize]| -> Vec<c_int> { sizes.iter().map(|size| to_c_int(size / element_size)).collect() };
    let places = |counts: &[c_int]| -> Vec<c_int> {
        let mut end = 0;
        let place = |count: &c_int| {
            end += count;
            end - count
        };
        counts.iter().map(place).collect()
    };
    let [send_counts, receive_counts] = [&segment.sent, &segment.received].map(|sizes| counts(sizes));
    let [send_places, receive_places] = [&send_counts, &receive_counts].map(|counts| places(counts));
    NativeLayout { send_counts, send_places, receive_counts, receive_places }
}

/// Begins a collective on a segment.
fn begin_collective(
    comm: NativeComm,
    segment: &NativeSegment,
    memory: &mut FinishedNative,
    request: &mut ffi::MPI_Request,
) -> io::Result<()> {
    match segment.operation {
        NativeOperation::AllReduce(reduction)
        | NativeOperation::Reduce { reduction, .. }
        | NativeOperation::ReduceScatter(reduction)
        | NativeOperation::ReduceScatterV(reduction) => {
            begin_reduction(comm, segment, reduction, memory, request)
        }
        _ => begin_move(comm, segment, memory, request),
    }
}

// `NativeCall` has reserved the bytes of the parts in both buffers, and `layout` has counted them. The caller's slot owns
// buffers and layout until `poll` finds that the request is complete; moving a `Vec` does not move its memory. No thread uses
// them meanwhile.

/// Begins a collective that reduces elements.
fn begin_reduction(
    NativeComm(comm): NativeComm,
    segment: &NativeSegment,
    reduction: NativeReduction,
    memory: &mut FinishedNative,
    request: &mut ffi::MPI_Request,
) -> io::Result<()> {
    let send: *const c_void = memory.send.as_ptr().cast();
    let receive: *mut c_void = memory.receive.as_mut_ptr().cast();
    let (kind, op) = (datatype(reduction.element), function(reduction.op));
    // Of the buffer, or of each part.
    let count = to_c_int(segment.received[0] / reduction.element.size());
    let (name, code) = match segment.operation {
        NativeOperation::Reduce { root, .. } => {
            let root = to_c_int(root);
            // SAFETY: as stated above.
            let code = unsafe { ffi::MPI_Ireduce(send, receive, count, kind, op, root, comm, request) };
            ("MPI_Ireduce", code)
        }
        NativeOperation::ReduceScatter(_) => {
            // SAFETY: as stated above.
            let code =
                unsafe { ffi::MPI_Ireduce_scatter_block(send, receive, count, kind, op, comm, request) };
            ("MPI_Ireduce_scatter_block", code)
        }
        NativeOperation::ReduceScatterV(_) => {
            let counts = memory.layout.send_counts.as_ptr();
            // SAFETY: as stated above. This rank receives as many elements as its count says.
            let code = unsafe { ffi::MPI_Ireduce_scatter(send, receive, counts, kind, op, comm, request) };
            ("MPI_Ireduce_scatter", code)
        }
        _ => {
            // SAFETY: as stated above.
            let code = unsafe { ffi::MPI_Iallreduce(send, receive, count, kind, op, comm, request) };
            ("MPI_Iallreduce", code)
        }
    };
    check(name, code)
}

/// Begins a collective that moves bytes.
fn begin_move(
    NativeComm(comm): NativeComm,
    segment: &NativeSegment,
    memory: &mut FinishedNative,
    request: &mut ffi::MPI_Request,
) -> io::Result<()> {
    let send: *const c_void = memory.send.as_ptr().cast();
    let receive: *mut c_void = memory.receive.as_mut_ptr().cast();
    // SAFETY: a constant that the library initialises when it is loaded.
    let byte = unsafe { ffi::RSMPI_UINT8_T };
    let bytes = to_c_int(segment.received[0]);
    let NativeLayout { send_counts, send_places, receive_counts, receive_places } = &memory.layout;
    let (sends, receives) =
        ((send_counts.as_ptr(), send_places.as_ptr()), (receive_counts.as_ptr(), receive_places.as_ptr()));
    let (name, code) = match segment.operation {
        NativeOperation::Broadcast { root } => {
            // SAFETY: as stated above.
            let code = unsafe { ffi::MPI_Ibcast(receive, bytes, byte, to_c_int(root), comm, request) };
            ("MPI_Ibcast", code)
        }
        NativeOperation::AllGather => {
            // SAFETY: as stated above.
            let code = unsafe { ffi::MPI_Iallgather(send, bytes, byte, receive, bytes, byte, comm, request) };
            ("MPI_Iallgather", code)
        }
        NativeOperation::AllGatherV => {
            let (own, (counts, places)) = (send_counts[0], receives);
            // SAFETY: as stated above.
            let code = unsafe {
                ffi::MPI_Iallgatherv(send, own, byte, receive, counts, places, byte, comm, request)
            };
            ("MPI_Iallgatherv", code)
        }
        NativeOperation::AllToAllV => {
            let ((sent, from), (received, to)) = (sends, receives);
            // SAFETY: as stated above.
            let code = unsafe {
                ffi::MPI_Ialltoallv(send, sent, from, byte, receive, received, to, byte, comm, request)
            };
            ("MPI_Ialltoallv", code)
        }
        _ => {
            // SAFETY: as stated above.
            let code = unsafe { ffi::MPI_Ialltoall(send, bytes, byte, receive, bytes, byte, comm, request) };
            ("MPI_Ialltoall", code)
        }
    };
    check(name, code)
}

fn datatype(element: NativeElement) -> ffi::MPI_Datatype {
    // SAFETY: constants that the library initialises when it is loaded.
    unsafe {
        match element {
            NativeElement::F32 => ffi::RSMPI_FLOAT,
            NativeElement::F64 => ffi::RSMPI_DOUBLE,
            NativeElement::I8 => ffi::RSMPI_INT8_T,
            NativeElement::I32 => ffi::RSMPI_INT32_T,
            NativeElement::I64 => ffi::RSMPI_INT64_T,
            NativeElement::U8 => ffi::RSMPI_UINT8_T,
            NativeElement::U32 => ffi::RSMPI_UINT32_T,
            NativeElement::U64 => ffi::RSMPI_UINT64_T,
            NativeElement::ComplexF32 => ffi::RSMPI_FLOAT_COMPLEX,
            NativeElement::ComplexF64 => ffi::RSMPI_DOUBLE_COMPLEX,
        }
    }
}

fn function(op: NativeOp) -> ffi::MPI_Op {
    // SAFETY: constants that the library initialises when it is loaded.
    unsafe {
        match op {
            NativeOp::Sum => ffi::RSMPI_SUM,
            NativeOp::Product => ffi::RSMPI_PROD,
            NativeOp::Min => ffi::RSMPI_MIN,
            NativeOp::Max => ffi::RSMPI_MAX,
        }
    }
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
