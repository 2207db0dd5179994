//! The table of all operations that do not block, with the data that tests need.

use std::time::Duration;

use dist_collectives::{Buffer, Communicator, Error, Failed, Message, OwnedMessage, Pending, ReduceOp};

/// A handle of any operation.
pub(super) trait Handle {
    fn wait(self: Box<Self>) -> Result<Vec<i64>, (Vec<i64>, Error)>;
    fn is_done(&mut self) -> bool;
    fn wait_timeout(self: Box<Self>, limit: Duration) -> Result<Vec<i64>, Box<dyn Handle>>;
}

impl<B: Memory + 'static> Handle for Pending<B> {
    fn wait(self: Box<Self>) -> Result<Vec<i64>, (Vec<i64>, Error)> {
        (*self).wait().map(Memory::elements).map_err(|Failed { buffer, error }| (buffer.elements(), *error))
    }

    fn is_done(&mut self) -> bool {
        Self::is_done(self)
    }

    fn wait_timeout(self: Box<Self>, limit: Duration) -> Result<Vec<i64>, Box<dyn Handle>> {
        match (*self).wait_timeout(limit) {
            Ok(done) => {
                Ok(done.map(Memory::elements).map_err(|failed| failed.error).expect("all ranks come"))
            }
            Err(pending) => Err(Box::new(pending)),
        }
    }
}

/// A memory of an operation that can be converted to a list.
pub(super) trait Memory {
    fn elements(self) -> Vec<i64>;
}

impl Memory for () {
    fn elements(self) -> Vec<i64> {
        Vec::new()
    }
}

impl Memory for Buffer<i64> {
    fn elements(self) -> Vec<i64> {
        self.into_vec()
    }
}

impl Memory for (Buffer<i64>, Buffer<i64>) {
    fn elements(self) -> Vec<i64> {
        // The sent elements are unchanged.
        self.1.into_vec()
    }
}

impl Memory for Vec<Buffer<i64>> {
    fn elements(self) -> Vec<i64> {
        self.into_iter().flat_map(Buffer::into_vec).collect()
    }
}

impl Memory for Vec<OwnedMessage<i64>> {
    fn elements(self) -> Vec<i64> {
        // The sent elements are unchanged.
        let received = self.into_iter().filter(|message| matches!(message, OwnedMessage::Receive { .. }));
        received.flat_map(|message| message.into_elements().into_vec()).collect()
    }
}

pub(super) fn boxed<B: Memory + 'static>(pending: Pending<B>) -> Box<dyn Handle> {
    Box::new(pending)
}

/// An operation in its blocking and its started form, on the same input.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) start: fn(&mut Communicator) -> Box<dyn Handle>,
    pub(super) block: fn(&mut Communicator) -> Vec<i64>,
    /// The state of the input if the operation fails.
    pub(super) failed: Given,
}

impl Case {
    /// Returns `true` for messages, which wait for their own peers only.
    pub(super) fn is_message(&self) -> bool {
        matches!(self.name, "send" | "recv" | "send_recv" | "batch")
    }
}

/// The use of the input by an operation.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Given {
    /// The operation works in it.
    Written,
    /// The operation reads it.
    Read,
    /// The operation sends it and does not wait for any rank.
    Sent,
}

/// A message to the right neighbour, which receives it: no rank waits.
pub(super) const SEND: Case = Case {
    name: "send",
    start: |comm| {
        let right = (comm.rank() + 1) % comm.world_size();
        boxed(comm.start_send(own(comm), right))
    },
    block: |comm| {
        let right = (comm.rank() + 1) % comm.world_size();
        in_place(comm, |comm, buffer| comm.send(buffer, right))
    },
    failed: Given::Sent,
};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "all_reduce",
        start: |comm| boxed(comm.start_all_reduce(own(comm), ReduceOp::Sum)),
        block: |comm| in_place(comm, |comm, buffer| comm.all_reduce(buffer, ReduceOp::Sum)),
        failed: Given::Written,
    },
    Case {
        name: "reduce_scatter",
        start: |comm| boxed(comm.start_reduce_scatter(own(comm), ReduceOp::Max)),
        block: |comm| into(comm, 2, |comm, input, output| comm.reduce_scatter(input, output, ReduceOp::Max)),
        failed: Given::Read,
    },
    Case {
        name: "reduce_scatter_in_place",
        start: |comm| boxed(comm.start_reduce_scatter_in_place(own(comm), ReduceOp::Sum)),
        block: |comm| {
            in_place(comm, |comm, buffer| comm.reduce_scatter_in_place(buffer, ReduceOp::Sum).map(drop))
        },
        failed: Given::Written,
    },
    Case {
        name: "all_gather",
        start: |comm| boxed(comm.start_all_gather(own(comm))),
        block: |comm| {
            let world_size = comm.world_size();
            into(comm, 2 * world_size * world_size, Communicator::all_gather)
        },
        failed: Given::Read,
    },
    Case {
        name: "all_gather_in_place",
        start: |comm| boxed(comm.start_all_gather_in_place(own(comm))),
        block: |comm| in_place(comm, Communicator::all_gather_in_place),
        failed: Given::Written,
    },
    Case {
        name: "all_reduce_coalesced",
        start: |comm| boxed(comm.start_all_reduce_coalesced(in_three(own(comm)), ReduceOp::Sum)),
        block: |comm| in_place(comm, |comm, buffer| comm.all_reduce(buffer, ReduceOp::Sum)),
        failed: Given::Written,
    },
    Case {
        name: "broadcast_coalesced",
        start: |comm| boxed(comm.start_broadcast_coalesced(in_three(own(comm)), 0)),
        block: |comm| in_place(comm, |comm, buffer| comm.broadcast(buffer, 0)),
        failed: Given::Written,
    },
    Case {
        name: "broadcast",
        start: |comm| boxed(comm.start_broadcast(own(comm), 0)),
        block: |comm| in_place(comm, |comm, buffer| comm.broadcast(buffer, 0)),
        failed: Given::Written,
    },
    Case {
        name: "reduce",
        start: |comm| {
            let root = last(comm);
            boxed(comm.start_reduce(own(comm), ReduceOp::Sum, root))
        },
        block: |comm| {
            let root = last(comm);
            in_place(comm, |comm, buffer| comm.reduce(buffer, ReduceOp::Sum, root))
        },
        failed: Given::Written,
    },
    Case {
        name: "reduce_scatter_v",
        start: |comm| boxed(comm.start_reduce_scatter_v(own(comm), uneven(comm), ReduceOp::Sum)),
        block: |comm| {
            let counts = uneven(comm);
            into(comm, counts[comm.rank()], |comm, input, output| {
                comm.reduce_scatter_v(input, &counts, output, ReduceOp::Sum)
            })
        },
        failed: Given::Read,
    },
    Case {
        name: "all_gather_v",
        start: |comm| boxed(comm.start_all_gather_v(own(comm), lens(comm))),
        block: |comm| {
            let counts = lens(comm);
            into(comm, counts.iter().sum(), |comm, input, output| comm.all_gather_v(input, &counts, output))
        },
        failed: Given::Read,
    },
    Case {
        name: "gather",
        start: |comm| {
            let root = last(comm);
            boxed(comm.start_gather(own(comm), root))
        },
        block: |comm| {
            let (root, world_size) = (last(comm), comm.world_size());
            let len = if comm.rank() == root { 2 * world_size * world_size } else { 0 };
            into(comm, len, |comm, input, output| comm.gather(input, output, root))
        },
        failed: Given::Read,
    },
    Case {
        name: "gather_v",
        start: |comm| {
            let root = last(comm);
            boxed(comm.start_gather_v(own(comm), lens(comm), root))
        },
        block: |comm| {
            let (root, counts) = (last(comm), lens(comm));
            let len = if comm.rank() == root { counts.iter().sum() } else { 0 };
            into(comm, len, |comm, input, output| comm.gather_v(input, &counts, output, root))
        },
        failed: Given::Read,
    },
    Case {
        name: "scatter",
        start: |comm| boxed(comm.start_scatter(own(comm), 2, 0)),
        block: |comm| into(comm, 2, |comm, input, output| comm.scatter(input, output, 0)),
        failed: Given::Read,
    },
    Case {
        name: "scatter_v",
        start: |comm| boxed(comm.start_scatter_v(own(comm), uneven(comm), 0)),
        block: |comm| {
            let counts = uneven(comm);
            let len = counts[comm.rank()];
            into(comm, len, |comm, input, output| comm.scatter_v(input, &counts, output, 0))
        },
        failed: Given::Read,
    },
    Case {
        name: "all_to_all",
        start: |comm| boxed(comm.start_all_to_all(own(comm))),
        block: |comm| into(comm, own(comm).len(), Communicator::all_to_all),
        failed: Given::Read,
    },
    Case {
        name: "all_to_all_v",
        start: |comm| {
            let (send, receive) = dealt(comm);
            boxed(comm.start_all_to_all_v(own(comm), send, receive))
        },
        block: |comm| {
            let (send, receive) = dealt(comm);
            into(comm, receive.iter().sum(), |comm, input, output| {
                comm.all_to_all_v(input, &send, output, &receive)
            })
        },
        failed: Given::Read,
    },
    Case {
        name: "scan",
        start: |comm| boxed(comm.start_scan(own(comm), ReduceOp::Sum)),
        block: |comm| in_place(comm, |comm, buffer| comm.scan(buffer, ReduceOp::Sum)),
        failed: Given::Written,
    },
    Case {
        name: "exclusive_scan",
        start: |comm| boxed(comm.start_exclusive_scan(own(comm), ReduceOp::Max)),
        block: |comm| in_place(comm, |comm, buffer| comm.exclusive_scan(buffer, ReduceOp::Max)),
        failed: Given::Written,
    },
    Case {
        name: "barrier",
        start: |comm| boxed(comm.start_barrier()),
        block: |comm| comm.barrier().map(|()| Vec::new()).expect("all ranks come"),
        failed: Given::Read,
    },
    Case {
        name: "send_recv",
        start: |comm| {
            let right = (comm.rank() + 1) % comm.world_size();
            boxed(comm.start_send_recv(own(comm), right, own(comm), left(comm)))
        },
        block: |comm| {
            let (left, right) = (left(comm), (comm.rank() + 1) % comm.world_size());
            into(comm, own(comm).len(), |comm, sent, received| comm.send_recv(sent, right, received, left))
        },
        failed: Given::Written,
    },
    Case {
        name: "batch",
        start: |comm| {
            let (left, right) = (left(comm), (comm.rank() + 1) % comm.world_size());
            boxed(comm.start_batch(vec![
                OwnedMessage::receive(left, own(comm)),
                OwnedMessage::send(right, own(comm)),
            ]))
        },
        block: |comm| {
            let (left, right) = (left(comm), (comm.rank() + 1) % comm.world_size());
            let (sent, mut received) = (own(comm), own(comm));
            let messages = &mut [Message::receive(left, &mut received), Message::send(right, &sent)];
            comm.batch(messages).expect("all ranks come");
            received
        },
        failed: Given::Written,
    },
    SEND,
    Case {
        name: "recv",
        start: |comm| boxed(comm.start_recv(own(comm), left(comm))),
        block: |comm| {
            let left = left(comm);
            in_place(comm, |comm, buffer| comm.recv(buffer, left))
        },
        failed: Given::Written,
    },
];

/// Returns the operations in which every rank waits for others.
pub(super) fn waiting_cases() -> impl Iterator<Item = &'static Case> {
    CASES.iter().filter(|case| case.failed != Given::Sent)
}

/// This rank's input: two elements for every rank.
pub(super) fn own(comm: &Communicator) -> Vec<i64> {
    (0..2 * comm.world_size() as i64).map(|index| 100 * (comm.rank() as i64 + 1) + index).collect()
}

pub(super) fn last(comm: &Communicator) -> usize {
    comm.world_size() - 1
}

pub(super) fn left(comm: &Communicator) -> usize {
    (comm.rank() + last(comm)) % comm.world_size()
}

pub(super) fn in_place(
    comm: &mut Communicator,
    operation: impl FnOnce(&mut Communicator, &mut [i64]) -> Result<(), Error>,
) -> Vec<i64> {
    let mut buffer = own(comm);
    operation(comm, &mut buffer).expect("all ranks come");
    buffer
}

pub(super) fn into(
    comm: &mut Communicator,
    len: usize,
    operation: impl FnOnce(&mut Communicator, &[i64], &mut [i64]) -> Result<(), Error>,
) -> Vec<i64> {
    let (input, mut output) = (own(comm), vec![0; len]);
    operation(comm, &input, &mut output).expect("all ranks come");
    output
}

/// Returns the specified part of an operation's output.
pub(super) fn promised<'a>(case: &Case, comm: &Communicator, output: &'a [i64]) -> &'a [i64] {
    match case.name {
        "reduce" if comm.rank() != last(comm) => &[],
        "reduce_scatter_in_place" => &output[2 * comm.rank()..][..2],
        _ => output,
    }
}

/// Returns uneven parts of an input, one for each rank.
fn uneven(comm: &Communicator) -> Vec<usize> {
    let mut counts = vec![2; comm.world_size()];
    counts[0] -= 1;
    counts[last(comm)] += 1;
    counts
}

/// Returns the lengths of all ranks' inputs.
fn lens(comm: &Communicator) -> Vec<usize> {
    vec![own(comm).len(); comm.world_size()]
}

/// Returns the number of elements that this rank sends to each rank, and that it receives from each: everything to
/// the next rank, or a part to each.
fn dealt(comm: &Communicator) -> (Vec<usize>, Vec<usize>) {
    let world_size = comm.world_size();
    let sent = |from: usize, to: usize| match (from % 2, (to + world_size - from) % world_size) {
        (0, 0) | (1, 1) => 2 * world_size,
        _ => 0,
    };
    let all = || 0..world_size;
    (all().map(|to| sent(comm.rank(), to)).collect(), all().map(|from| sent(from, comm.rank())).collect())
}

/// Splits the elements into three buffers, one of which is empty.
fn in_three(elements: Vec<i64>) -> Vec<Buffer<i64>> {
    let (one, others) = elements.split_at(1);
    [one, &[], others].map(|part| part.to_vec().into()).into()
}
