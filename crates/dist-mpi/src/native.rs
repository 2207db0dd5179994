//! Collectives that the MPI library executes.
//!
//! Empty messages compare the calls of all ranks first. Then the bytes pass through memory of the world in segments,
//! since a collective of MPI cannot be withdrawn when a deadline passes. All channels with the same members use one
//! communicator of MPI. A communicator needs the same order of collectives on all ranks, so the first member gives each
//! call its ticket.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytemuck::{cast_slice, cast_slice_mut};
use dist_transport::cpu::{CacheLine, copy};
use dist_transport::native::{
    NativeCollective, NativeCollectives, NativeMemory, NativeOperation, NativeParts,
};
use dist_transport::{Activity, Incoming, LazyDeadline, Outgoing, Result, Sink, Transport};

use crate::endpoint::{Endpoint, Failure};
use crate::library::NativeComm;
use crate::wait::Wait;
use crate::wire::{Buffer, FinishedNative, NativeSegment};
use crate::world::State;

/// Bytes of memory for the input or the output of a segment.
const SEGMENT: usize = 4 << 20;
/// Segments that the library works on at the same time.
const OPEN_MAX: usize = 2;
/// Buffers that are kept for later segments.
const SPARE_MAX: usize = 4 * OPEN_MAX;
/// The time between two looks at the thread that creates a communicator.
const LOOK: Duration = Duration::from_millis(1);

/// The collectives of MPI on this process.
#[derive(Default)]
pub(crate) struct Natives {
    groups: HashMap<Arc<[usize]>, Group>,
    /// The communicators whose creation this process has begun as the first member.
    created: u64,
    /// The threads that create a communicator.
    pub(crate) creating: usize,
    begun: u64,
    /// The segments that are complete, by their numbers.
    finished: HashMap<u64, FinishedNative>,
    spare: Vec<Buffer>,
}

/// The ranks of a communicator of MPI.
#[derive(Default)]
struct Group {
    /// `None` until the first call has created it.
    comm: Option<NativeComm>,
    /// On the first member: the number of calls that have a ticket.
    tickets: u64,
    /// The ticket of the next call whose segments begin.
    next: u64,
}

/// The place of a call among the calls of all channels with the same members.
#[derive(Clone, Copy)]
struct Ticket {
    number: u64,
    /// The tag for the creation of the communicator, which the first call uses.
    tag: u64,
}

impl Natives {
    /// Keeps the memory of a segment for the call that has begun it.
    pub(crate) fn finish(&mut self, finished: FinishedNative) {
        self.finished.insert(finished.number, finished);
    }

    fn group(&mut self, members: &Arc<[usize]>) -> &mut Group {
        self.groups.entry(members.clone()).or_default()
    }

    /// Gives the next call of these members its ticket.
    fn give_ticket(&mut self, members: &Arc<[usize]>) -> Ticket {
        let group = self.group(members);
        let number = group.tickets;
        group.tickets += 1;
        let tag = self.created;
        self.created += u64::from(number == 0);
        Ticket { number, tag }
    }

    /// Returns memory of at least this many bytes.
    fn buffer(&mut self, bytes: usize) -> Buffer {
        let lines = bytes.div_ceil(CacheLine::BYTES);
        let place = self.spare.iter().position(|spare| spare.len() >= lines);
        place.map_or_else(|| vec![CacheLine::ZERO; lines], |place| self.spare.swap_remove(place))
    }

    fn recycle(&mut self, FinishedNative { send, receive, .. }: FinishedNative) {
        self.spare.extend([send, receive].into_iter().filter(|buffer| !buffer.is_empty()));
        self.spare.truncate(SPARE_MAX);
    }
}

impl NativeCollectives for Endpoint {
    fn supports(&self, collective: &NativeCollective) -> bool {
        let from = self.world.native_from;
        self.rank.world_size() > 1 && from.is_some_and(|from| collective.bytes >= from.max(1))
    }

    fn execute(
        &mut self,
        collective: &NativeCollective,
        memory: NativeMemory<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let ticket = self.compare_calls(due)?;
        let mut call =
            NativeCall::new(collective.operation, memory, (self.rank.index(), self.rank.world_size()));
        let mut wait = Wait::PATIENT;
        let done = self
            .await_ticket(ticket, &mut wait, due)
            .and_then(|()| self.run_segments(&mut call, &mut wait, due));
        self.end_wait(&wait);
        done.map_err(|failure| self.fail(failure, due))
    }
}

impl Endpoint {
    /// Compares the calls of all ranks, by messages up a binomial tree to the first rank and back. The answer is the
    /// ticket of the call.
    fn compare_calls(&mut self, due: &LazyDeadline<'_>) -> Result<Ticket> {
        let (rank, ranks) = (self.rank.index(), self.rank.world_size());
        let mut distance = 1;
        while distance < ranks && rank & distance == 0 {
            if rank + distance < ranks {
                self.receive_from(rank + distance, &mut [], due)?;
            }
            distance <<= 1;
        }
        let mut answer = [0_u64; 2];
        if rank == 0 {
            let ticket = self.world.lock().natives.give_ticket(&self.members);
            answer = [ticket.number, ticket.tag];
        } else {
            self.send_to(rank - distance, &[], due)?;
            self.receive_from(rank - distance, cast_slice_mut(&mut answer), due)?;
        }
        while distance > 1 {
            distance >>= 1;
            if rank + distance < ranks {
                self.send_to(rank + distance, cast_slice(&answer), due)?;
            }
        }
        Ok(Ticket { number: answer[0], tag: answer[1] })
    }

    fn send_to(&mut self, to: usize, bytes: &[u8], due: &LazyDeadline<'_>) -> Result<()> {
        self.exchange(Some(Outgoing { to, parts: &[bytes] }), None, due)
    }

    fn receive_from(&mut self, from: usize, bytes: &mut [u8], due: &LazyDeadline<'_>) -> Result<()> {
        self.exchange(None, Some(Incoming { from, len: bytes.len(), sink: Sink::Into(bytes) }), due)
    }

    /// Waits until the segments of this call may begin. The first call of the members creates their communicator.
    fn await_ticket(&self, ticket: Ticket, wait: &mut Wait, due: &LazyDeadline<'_>) -> Result<(), Failure> {
        if ticket.number == 0 {
            return self.create_communicator(ticket.tag, wait, due);
        }
        self.await_native(wait, due, |state| {
            (state.natives.group(&self.members).next == ticket.number).then_some(())
        })
    }

    /// Creates the communicator of the members. All of them are in this call. MPI has no form of this that does not
    /// block, so a thread waits for it.
    fn create_communicator(&self, tag: u64, wait: &mut Wait, due: &LazyDeadline<'_>) -> Result<(), Failure> {
        let runtime = &self.world.runtime;
        let mut thread = {
            let mut state = self.world.lock();
            let create = state.create_communicator(&self.members, tag);
            let thread = create.and_then(|create| runtime.spawn("dist-mpi-group", create));
            state.natives.creating += usize::from(thread.is_ok());
            thread.map_err(|error| self.library_failed(&error))?
        };
        let created = loop {
            match thread.join_by(runtime.deadline(LOOK)) {
                Ok(created) => break created,
                Err(unfinished) => thread = unfinished,
            }
            let mut looked = false;
            self.await_native(wait, due, |_| std::mem::replace(&mut looked, true).then_some(()))?;
        };
        let mut state = self.world.lock();
        state.natives.creating -= 1;
        let created = created.unwrap_or_else(|_| Err(std::io::Error::other("the thread has panicked")));
        let comm = created.map_err(|error| self.library_failed(&error))?;
        state.natives.group(&self.members).comm = Some(comm);
        Ok(())
    }

    fn library_failed(&self, error: &std::io::Error) -> Failure {
        self.world.library_failed(error);
        Failure::Aborted
    }

    /// Looks at the library until `look` returns a value. A wait is reported as one for the next rank, so that a chain of
    /// waits ends at a rank that waits for none.
    fn await_native<T>(
        &self,
        wait: &mut Wait,
        due: &LazyDeadline<'_>,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T, Failure> {
        loop {
            {
                let mut state = self.world.lock();
                self.world.progress(&mut state);
                if self.world.aborted().is_some() {
                    return Err(Failure::Aborted);
                }
                if let Some(found) = look(&mut state) {
                    return Ok(found);
                }
            }
            self.pause(wait, due, Activity::Receive, self.rank.right().index())?;
        }
    }

    /// Executes the segments of a call whose ticket is the next. The next call may begin when all of them have begun.
    fn run_segments(
        &self,
        call: &mut NativeCall<'_>,
        wait: &mut Wait,
        due: &LazyDeadline<'_>,
    ) -> Result<(), Failure> {
        let mut open: VecDeque<(Range<usize>, u64)> = VecDeque::new();
        let mut begun = 0;
        loop {
            while open.len() < OPEN_MAX && begun < call.len {
                let segment = begun..call.len.min(begun + call.step);
                begun = segment.end;
                let number = self.begin_segment(call, &segment, begun == call.len)?;
                open.push_back((segment, number));
            }
            let Some((segment, number)) = open.pop_front() else { return Ok(()) };
            let finished = self.await_native(wait, due, |state| state.natives.finished.remove(&number))?;
            wait.renew();
            call.take(&segment, cast_slice(&finished.receive));
            self.world.lock().natives.recycle(finished);
        }
    }

    /// Copies the input of a segment, and gives the segment to the library. Returns its number.
    fn begin_segment(
        &self,
        call: &NativeCall<'_>,
        segment: &Range<usize>,
        is_last: bool,
    ) -> Result<u64, Failure> {
        let [sent, received] = call.sizes(segment);
        let (mut send, mut receive) = {
            let natives = &mut self.world.lock().natives;
            (natives.buffer(sent.iter().sum()), natives.buffer(received.iter().sum()))
        };
        call.fill(segment, cast_slice_mut(&mut send), cast_slice_mut(&mut receive));
        let mut state = self.world.lock();
        let number = state.natives.begun;
        state.natives.begun += 1;
        let segment = NativeSegment { operation: call.operation, sent, received, number };
        let group = state.natives.group(&self.members);
        group.next += u64::from(is_last);
        let comm = group.comm.expect("the first call has created it");
        let begun = state.begin_native(comm, segment, send, receive);
        begun.map_err(|error| self.library_failed(&error))?;
        Ok(number)
    }
}

/// The memory of a call, in segments. A segment is a range of the buffer, or the same range of each part. Parts that are
/// shorter have less of it, or nothing.
struct NativeCall<'a> {
    operation: NativeOperation,
    memory: NativeMemory<'a>,
    rank: usize,
    /// The parts of the input that the library reads.
    sent: Vec<Range<usize>>,
    /// The parts of the buffer that the library writes.
    received: Vec<Range<usize>>,
    /// Bytes of the buffer, or of the largest part.
    len: usize,
    /// Bytes of a segment, or of its range of a part.
    step: usize,
}

impl<'a> NativeCall<'a> {
    fn new(operation: NativeOperation, memory: NativeMemory<'a>, (rank, ranks): (usize, usize)) -> Self {
        let (whole, has_input) = (memory.buffer.len(), memory.input.is_some());
        let even = |len: usize| vec![len / ranks; ranks];
        let parts = memory.parts.unwrap_or(NativeParts { sent: &[], received: &[], largest: 0 });
        if memory.parts.is_some() {
            // The library reads a count for each rank.
            assert_eq!([parts.sent.len(), parts.received.len()], [ranks; 2], "each rank has a part");
        }
        let (mut sent, mut received, len) = match operation {
            NativeOperation::AllReduce(_) | NativeOperation::Reduce { .. } => {
                (ranges(&[whole]), ranges(&[whole]), whole)
            }
            NativeOperation::Broadcast { .. } => (Vec::new(), ranges(&[whole]), whole),
            NativeOperation::AllGather | NativeOperation::AllToAll => {
                (ranges(&even(whole)), ranges(&even(whole)), whole / ranks)
            }
            NativeOperation::ReduceScatter(_) => {
                let part = if has_input { whole } else { whole / ranks };
                (ranges(&even(part * ranks)), ranges(&even(part * ranks)), part)
            }
            NativeOperation::AllGatherV | NativeOperation::ReduceScatterV(_) => {
                assert_eq!(parts.sent, parts.received, "all ranks have the same list of parts");
                (ranges(parts.sent), ranges(parts.received), parts.largest)
            }
            NativeOperation::AllToAllV => {
                assert_eq!(parts.sent.get(rank), parts.received.get(rank), "both are this rank's part");
                (ranges(parts.sent), ranges(parts.received), parts.largest)
            }
        };
        match operation {
            // A rank sends its own part. An input is that part.
            NativeOperation::AllGather | NativeOperation::AllGatherV => {
                let own = sent[rank].clone();
                sent = vec![if has_input { 0..own.len() } else { own }];
            }
            // A rank receives its own part. With an input, the buffer is that part.
            NativeOperation::ReduceScatter(_) | NativeOperation::ReduceScatterV(_) => {
                let own = received[rank].clone();
                received = vec![if has_input { 0..own.len() } else { own }];
            }
            _ => {}
        }
        let lines = SEGMENT / sent.len().max(received.len()) / CacheLine::BYTES;
        let step = lines.max(1) * CacheLine::BYTES;
        Self { operation, memory, rank, sent, received, len, step }
    }

    /// Returns the bytes of a segment in the parts that the library reads, and in those that it writes.
    fn sizes(&self, segment: &Range<usize>) -> [Vec<usize>; 2] {
        let of_parts = |parts: &[Range<usize>]| -> Vec<usize> {
            parts.iter().map(|part| piece(part, segment).len()).collect()
        };
        [of_parts(&self.sent), of_parts(&self.received)]
    }

    /// Writes this rank's input of a segment.
    fn fill(&self, segment: &Range<usize>, send: &mut [u8], receive: &mut [u8]) {
        let input = self.memory.input.unwrap_or(&*self.memory.buffer);
        // The root of a broadcast gives the library the memory that it writes on the other ranks.
        let (parts, mut place) = match self.operation {
            NativeOperation::Broadcast { root } if root == self.rank => (&self.received, receive),
            _ => (&self.sent, send),
        };
        for part in parts {
            let piece = piece(part, segment);
            let (here, behind) = place.split_at_mut(piece.len());
            copy(&input[piece], here);
            place = behind;
        }
    }

    /// Copies the result of a segment into the caller's memory.
    fn take(&mut self, segment: &Range<usize>, mut received: &[u8]) {
        match self.operation {
            NativeOperation::Reduce { root, .. } if root != self.rank => return,
            NativeOperation::Broadcast { root } if root == self.rank => return,
            _ => {}
        }
        for part in &self.received {
            let piece = piece(part, segment);
            let (here, behind) = received.split_at(piece.len());
            copy(here, &mut self.memory.buffer[piece]);
            received = behind;
        }
    }
}

/// Returns the ranges of parts that lie one after the other.
fn ranges(sizes: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let range = |size: &usize| {
        end += size;
        end - size..end
    };
    sizes.iter().map(range).collect()
}

/// Returns the bytes of a part that belong to a segment.
fn piece(part: &Range<usize>, segment: &Range<usize>) -> Range<usize> {
    let place = |offset: usize| part.start + offset.min(part.len());
    place(segment.start)..place(segment.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_cover_all_parts_once() {
        for sizes in [vec![0], vec![0, 300, 64, 5, 0], vec![1, 2, 3]] {
            let parts = ranges(&sizes);
            let largest = *sizes.iter().max().unwrap();
            let mut covered = vec![0; sizes.iter().sum()];
            for start in (0..largest).step_by(64) {
                let segment = start..largest.min(start + 64);
                parts.iter().flat_map(|part| piece(part, &segment)).for_each(|byte| covered[byte] += 1);
            }
            assert!(covered.iter().all(|&times| times == 1), "{sizes:?}");
        }
    }
}
