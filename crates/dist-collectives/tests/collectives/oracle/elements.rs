//! Operations that move elements other than numbers: structs, arrays and wide integers of any size.

use std::fmt::Debug;

use bytemuck::{CheckedBitPattern, NoUninit, Pod, Zeroable};
use dist_collectives::tuning::Operation;
use dist_collectives::{Buffer, Communicator, ElementType, Error, Message, OwnedMessage};

use super::{World, part_of, parts, ways};
use crate::worlds::{self, Network};

/// An element of 24 bytes, which do not divide 64.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
struct Particle {
    position: [f32; 3],
    kind: u32,
    id: u64,
}

/// Returns elements of arbitrary bytes, which depend on the rank.
fn sample<T: Pod>(rank: usize, len: usize) -> Vec<T> {
    let mut elements = vec![T::zeroed(); len];
    let mut random = fastrand::Rng::with_seed(rank as u64);
    // These are the bytes of small floats. A NaN would not be equal to itself.
    bytemuck::cast_slice_mut(&mut elements).fill_with(|| random.u8(..100));
    elements
}

/// One type of elements in every operation.
struct Case<T> {
    inputs: Vec<Vec<T>>,
    rank: usize,
    len: usize,
}

impl<T: Pod + Send + Debug + PartialEq> Case<T> {
    fn check(comm: &mut World, len: usize) {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let case = Self { inputs: (0..world_size).map(|rank| sample(rank, len)).collect(), rank, len };
        case.broadcast(comm, len % world_size);
        case.in_parts(comm, len % world_size);
        case.all_to_all(comm);
        case.messages(comm, (rank + 1) % world_size, (rank + world_size - 1) % world_size);
        case.coalesced_and_allocated(comm);
    }

    /// Makes a call by every algorithm of the operation; the algorithm must give the same output as the others.
    fn by_every_algorithm(
        comm: &mut World,
        operation: Operation,
        expected: &[T],
        call: impl Fn(&mut Communicator, &mut [T]) -> Result<(), Error>,
    ) {
        for way in ways(operation) {
            let mut output = vec![T::zeroed(); expected.len()];
            if comm.does(way, |comm| call(comm, &mut output)) {
                assert_eq!(output, expected, "{operation} by {way:?}");
            }
        }
    }

    fn broadcast(&self, comm: &mut World, root: usize) {
        let sent = &self.inputs[root];
        Self::by_every_algorithm(comm, Operation::Broadcast, sent, |comm, buffer| {
            if comm.rank() == root {
                buffer.copy_from_slice(sent);
            }
            comm.broadcast(buffer, root)
        });
    }

    fn in_parts(&self, comm: &mut World, root: usize) {
        let (own, all, rank) = (&self.inputs[self.rank], self.inputs.concat(), self.rank);
        let at_root = |elements: &[T]| if rank == root { elements.to_vec() } else { Vec::new() };
        Self::by_every_algorithm(comm, Operation::AllGather, &all, |comm, output| {
            comm.all_gather(own, output)
        });
        Self::by_every_algorithm(comm, Operation::Gather, &at_root(&all), |comm, output| {
            comm.gather(own, output, root)
        });
        Self::by_every_algorithm(comm, Operation::Scatter, own, |comm, output| {
            comm.scatter(&at_root(&all), output, root)
        });
        let counts = parts(comm.world_size(), self.len);
        let uneven = &self.inputs[0];
        let part = part_of(uneven, &counts, rank);
        Self::by_every_algorithm(comm, Operation::AllGather, uneven, |comm, output| {
            comm.all_gather_v(part, &counts, output)
        });
        Self::by_every_algorithm(comm, Operation::Scatter, part, |comm, output| {
            comm.scatter_v(&at_root(uneven), &counts, output, root)
        });
    }

    fn all_to_all(&self, comm: &mut World) {
        let (world_size, rank) = (comm.world_size(), self.rank);
        let sent = |from: usize| self.inputs[from].repeat(world_size);
        Self::by_every_algorithm(comm, Operation::AllToAll, &self.inputs.concat(), |comm, output| {
            comm.all_to_all(&sent(rank), output)
        });
        let counts = vec![self.len; world_size];
        let mut output = vec![T::zeroed(); self.len * world_size];
        comm.all_to_all_v(&sent(rank), &counts, &mut output, &counts).unwrap();
        assert_eq!(output, self.inputs.concat());
    }

    fn messages(&self, comm: &mut World, next: usize, last: usize) {
        let (own, expected) = (&self.inputs[self.rank], &self.inputs[last]);
        let mut received = vec![T::zeroed(); self.len];
        comm.send_recv(own, next, &mut received, last).unwrap();
        assert_eq!(received, *expected);
        let mut received = vec![T::zeroed(); self.len];
        let send = Message::send(next, own);
        comm.batch(&mut [send, Message::receive(last, &mut received)]).unwrap();
        assert_eq!(received, *expected);
        let send = OwnedMessage::send(next, own.clone());
        let receive = OwnedMessage::receive(last, vec![T::zeroed(); self.len]);
        let received = comm.start_batch(vec![send, receive]).wait().unwrap().pop().unwrap();
        assert_eq!(*received.into_elements(), **expected);
    }

    fn coalesced_and_allocated(&self, comm: &mut World) {
        let (mut first, mut second) = (self.inputs[self.rank].clone(), self.inputs[self.rank].clone());
        comm.broadcast_coalesced(&mut [&mut first, &mut second], 0).unwrap();
        assert_eq!([&first, &second], [&self.inputs[0]; 2]);
        let mut allocated: Buffer<T> = comm.alloc(self.len).unwrap();
        allocated.copy_from_slice(&self.inputs[self.rank]);
        let mut gathered = vec![T::zeroed(); self.len * comm.world_size()];
        comm.all_gather_buffer(&allocated, &mut gathered).unwrap();
        assert_eq!(gathered, self.inputs.concat());
        let started = comm.start_all_gather(allocated).wait().unwrap();
        assert_eq!(*started, gathered[..]);
    }
}

#[test]
fn elements_of_any_size_are_moved_on_every_network() {
    for &network in Network::ALL {
        for world_size in [1, 2, 3] {
            worlds::run(network, world_size, move |comm| {
                let mut comm = World::new(comm);
                for len in [0, 1, world_size + 1, 700] {
                    Case::<Particle>::check(&mut comm, len);
                }
                Case::<[u8; 3]>::check(&mut comm, 23);
                Case::<u128>::check(&mut comm, 5);
                Case::<[u64; 21]>::check(&mut comm, 50);
            });
        }
    }
}

#[test]
fn a_message_of_other_elements_is_refused_by_its_receiver() {
    for network in [Network::Simulated, Network::SharedMemory(7)] {
        let errors = worlds::run(network, 2, |mut comm| match comm.rank() {
            0 => comm.send(&[[1_u64; 3]], 1).and_then(|()| comm.barrier()).unwrap_err(),
            _ => comm.recv(&mut [[0_u32; 6]], 0).unwrap_err(),
        });
        let [of, expected] = [8, 4].map(|align| Some(ElementType::Other { size: 24, align }));
        let Error::Mismatch { ours, theirs, .. } = &errors[1] else { panic!("{network:?}: {}", errors[1]) };
        assert_eq!((theirs.element, ours.element), (of, expected), "{network:?}");
        let text = "types differ: rank 0 has elements of 24 bytes aligned to 8, this rank has elements of 24 bytes aligned to 4";
        assert!(errors[1].to_string().contains(text), "{network:?}: {}", errors[1]);
    }
}

/// An enum of two bytes.
#[derive(Clone, Copy, Debug, PartialEq, NoUninit, CheckedBitPattern)]
#[repr(u16)]
enum Cell {
    Dead = 7,
    Alive = 300,
}

fn check_checked<T: NoUninit + CheckedBitPattern + PartialEq + Debug>(
    comm: &mut Communicator,
    values: [T; 2],
) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let of = |rank: usize| [values[rank % 2], values[rank / 2 % 2], values[0]];
    let all: Vec<T> = (0..world_size).flat_map(of).collect();
    for root in 0..world_size {
        let mut elements = of(rank);
        comm.checked().broadcast(&mut elements, root).unwrap();
        assert_eq!(elements, of(root));
        let mut gathered = if rank == root { vec![values[1]; all.len()] } else { Vec::new() };
        comm.checked().gather(&of(rank), &mut gathered, root).unwrap();
        assert!(rank != root || gathered == all);
        let mut own = [values[1]; 3];
        comm.checked().scatter(&gathered, &mut own, root).unwrap();
        assert_eq!(own, of(rank));
        comm.checked().send(&of(rank), root).unwrap();
        for from in (0..world_size).filter(|_| rank == root) {
            comm.checked().recv(&mut own, from).unwrap();
            assert_eq!(own, of(from));
        }
    }
    let mut gathered = vec![values[1]; all.len()];
    comm.checked().all_gather(&of(rank), &mut gathered).unwrap();
    assert_eq!(gathered, all);
    let sent: Vec<T> = (0..world_size).map(|to| values[(rank + to) % 2]).collect();
    let mut received = vec![values[0]; world_size];
    comm.checked().all_to_all(&sent, &mut received).unwrap();
    assert_eq!(received, sent, "what goes there comes from there");
}

#[test]
fn elements_whose_bits_are_checked_are_moved_by_every_call() {
    for network in [Network::Simulated, Network::SharedMemory(3)] {
        for world_size in [1, 2, 3] {
            worlds::run(network, world_size, |mut comm| {
                check_checked(&mut comm, [false, true]);
                check_checked(&mut comm, [Cell::Dead, Cell::Alive]);
                check_checked(&mut comm, ['a', 'ß']);
            });
        }
    }
}

#[test]
fn invalid_bits_are_an_error_and_leave_the_buffer_as_it_was() {
    worlds::run(Network::Simulated, 2, |mut comm| {
        if comm.rank() == 0 {
            comm.send(&[1_u8, 2], 1).unwrap();
            return comm.checked().send(&[true], 1).unwrap();
        }
        let mut flags = [false, false];
        let error = comm.checked().recv(&mut flags, 0).unwrap_err();
        assert!(matches!(error, Error::BitPattern { element: 1, name: "bool", .. }), "{error:?}");
        assert!(error.to_string().contains("element 1 are no valid bool"), "{error}");
        assert_eq!(flags, [false, false]);
        comm.checked().recv(&mut flags[..1], 0).unwrap();
        assert_eq!(flags, [true, false]);
    });
}
