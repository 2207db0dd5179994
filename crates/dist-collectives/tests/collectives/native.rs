//! Collectives that the library below the transport executes.

use std::sync::{Arc, Mutex};

use dist_collectives::algorithms::{all_to_all, ring};
use dist_collectives::transport::Transport;
use dist_collectives::{Communicator, Complex, CustomOp, Error, ReduceOp, ReductionOrder, f16};
use dist_transport::forwarding::ForwardingTransport;
use dist_transport::native::{
    NativeCollective, NativeCollectives, NativeElement, NativeMemory, NativeOp, NativeOperation, NativeParts,
    NativeReduction,
};
use dist_transport::{Incoming, LazyDeadline, Outgoing, Result, Sink, sim};

/// Collectives of at least this many bytes are executed by the library.
const FROM: usize = 64;
/// Elements of a part. All ranks together have enough bytes for the library.
const PART: usize = 64;

/// A transport with a library that sends all inputs to all ranks, and reduces `f32` only.
#[derive(Debug)]
struct WithLibrary {
    messages: Box<dyn Transport>,
    executed: Arc<Mutex<Vec<NativeOperation>>>,
}

impl ForwardingTransport for WithLibrary {
    type Inner = dyn Transport;

    fn inner(&self) -> &Self::Inner {
        &*self.messages
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.messages
    }

    fn native(&mut self) -> Option<&mut dyn NativeCollectives> {
        Some(self)
    }
}

impl NativeCollectives for WithLibrary {
    fn supports(&self, collective: &NativeCollective) -> bool {
        collective.bytes >= FROM
    }

    fn execute(
        &mut self,
        collective: &NativeCollective,
        memory: NativeMemory<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.executed.lock().unwrap().push(collective.operation);
        let (own, ranks) = (Transport::rank(&*self.messages).index(), self.messages.members().len());
        let place = |bytes: usize, rank: usize| match memory.parts {
            Some(NativeParts { received, .. }) => {
                let start: usize = received[..rank].iter().sum();
                start..start + received[rank]
            }
            None => bytes / ranks * rank..bytes / ranks * (rank + 1),
        };
        let whole = memory.buffer.len();
        let input = match (memory.input, collective.operation) {
            (Some(input), _) => input.to_vec(),
            (None, NativeOperation::AllGather | NativeOperation::AllGatherV) => {
                memory.buffer[place(whole, own)].to_vec()
            }
            (None, _) => memory.buffer.to_vec(),
        };
        let mut inputs: Vec<_> = (0..ranks)
            .map(|rank| match (collective.operation, memory.parts) {
                (NativeOperation::AllGatherV | NativeOperation::AllToAllV, Some(parts)) => {
                    vec![0; parts.received[rank]]
                }
                _ => vec![0; input.len()],
            })
            .collect();
        let mut sent = Vec::new();
        let mut start = 0;
        for rank in 0..ranks {
            // Ranks of an uneven all_to_all know only their own parts, so they send these. Otherwise they send all.
            match (collective.operation, memory.parts) {
                (NativeOperation::AllToAllV, Some(parts)) => {
                    sent.push([&input[start..start + parts.sent[rank]]]);
                    start += parts.sent[rank];
                }
                _ => sent.push([&input[..]]),
            }
        }
        let sends: Vec<_> = sent.iter().enumerate().map(|(to, parts)| Outgoing { to, parts }).collect();
        let receives = inputs.iter_mut().enumerate();
        let mut receives: Vec<_> = receives
            .map(|(from, input)| Incoming { from, len: input.len(), sink: Sink::Into(input) })
            .collect();
        (*self.messages).exchange_all(&sends, &mut receives, due)?;
        match collective.operation {
            NativeOperation::AllReduce(reduction) => memory.buffer.copy_from_slice(&sum(&inputs, reduction)),
            NativeOperation::Reduce { reduction, root } if root == own => {
                memory.buffer.copy_from_slice(&sum(&inputs, reduction));
            }
            NativeOperation::ReduceScatter(reduction) | NativeOperation::ReduceScatterV(reduction) => {
                let sums = sum(&inputs, reduction);
                let target = if memory.input.is_some() { 0..whole } else { place(whole, own) };
                memory.buffer[target].copy_from_slice(&sums[place(sums.len(), own)]);
            }
            NativeOperation::Broadcast { root } => memory.buffer.copy_from_slice(&inputs[root]),
            NativeOperation::AllGather | NativeOperation::AllGatherV | NativeOperation::AllToAllV => {
                memory.buffer.copy_from_slice(&inputs.concat());
            }
            NativeOperation::AllToAll => {
                let parts: Vec<_> = inputs.iter().map(|input| &input[place(whole, own)]).collect();
                memory.buffer.copy_from_slice(&parts.concat());
            }
            NativeOperation::Reduce { .. } => {}
        }
        Ok(())
    }
}

/// A transport with a library that refuses all collectives, and notes them.
#[derive(Debug)]
struct Refusing {
    messages: Box<dyn Transport>,
    asked: Arc<Mutex<Vec<NativeOperation>>>,
}

impl ForwardingTransport for Refusing {
    type Inner = dyn Transport;

    fn inner(&self) -> &Self::Inner {
        &*self.messages
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.messages
    }

    fn native(&mut self) -> Option<&mut dyn NativeCollectives> {
        Some(self)
    }
}

impl NativeCollectives for Refusing {
    fn supports(&self, collective: &NativeCollective) -> bool {
        self.asked.lock().unwrap().push(collective.operation);
        false
    }

    fn execute(&mut self, _: &NativeCollective, _: NativeMemory<'_>, _: &LazyDeadline<'_>) -> Result<()> {
        unreachable!("it is refused")
    }
}

/// Reduces buffers of `f32`.
fn sum(inputs: &[Vec<u8>], reduction: NativeReduction) -> Vec<u8> {
    assert_eq!(reduction.element, NativeElement::F32);
    let combine = match reduction.op {
        NativeOp::Sum => |one: f32, other: f32| one + other,
        NativeOp::Product => |one: f32, other: f32| one * other,
        NativeOp::Min => f32::min,
        NativeOp::Max => f32::max,
    };
    let elements = |input: &Vec<u8>| input.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
    let inputs: Vec<Vec<f32>> = inputs.iter().map(elements).collect();
    let of_all = |index| inputs.iter().map(|input| input[index]).reduce(combine).unwrap();
    let sums: Vec<f32> = (0..inputs[0].len()).map(of_all).collect();
    bytemuck::cast_slice(&sums).to_vec()
}

/// Runs a program on 2, 3 and 4 ranks, and returns the operations that the library has executed on rank 0 of 3.
fn executed(program: impl Fn(&mut Communicator) + Clone + Send + Sync + 'static) -> Vec<NativeOperation> {
    let run = |ranks| {
        let program = program.clone();
        let outcome = sim::run(1, ranks, move |transport| {
            let executed = Arc::<Mutex<_>>::default();
            let messages: Box<dyn Transport> = Box::new(transport);
            let mut comm = Communicator::new(WithLibrary { messages, executed: Arc::clone(&executed) });
            comm.set_order(ReductionOrder::Any);
            program(&mut comm);
            executed.lock().unwrap().clone()
        });
        assert!(outcome.results.iter().all(|of_rank| *of_rank == outcome.results[0]));
        outcome.results.into_iter().next().unwrap()
    };
    run(2);
    run(4);
    run(3)
}

/// Returns one element of the input of a rank.
fn element(rank: usize, index: usize) -> f32 {
    (rank * 3 + index % 7 + 1) as f32
}

/// Returns the input of this rank, with a part for each rank.
fn input(comm: &Communicator) -> Vec<f32> {
    (0..PART * comm.world_size()).map(|index| element(comm.rank(), index)).collect()
}

/// Returns the sum of the inputs of all ranks.
fn expected_sum(comm: &Communicator) -> Vec<f32> {
    let of_all = |index| (0..comm.world_size()).map(|rank| element(rank, index)).sum();
    (0..PART * comm.world_size()).map(of_all).collect()
}

fn part<T>(whole: &[T], rank: usize) -> &[T] {
    &whole[PART * rank..][..PART]
}

const SUM: NativeReduction = NativeReduction { element: NativeElement::F32, op: NativeOp::Sum };

#[test]
fn the_library_reduces_in_any_order() {
    let operations = executed(|comm| {
        let (rank, sums) = (comm.rank(), expected_sum(comm));
        let mut buffer = input(comm);
        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(buffer, sums);
        let mut buffer = input(comm);
        comm.reduce(&mut buffer, ReduceOp::Sum, 1).unwrap();
        assert!(rank != 1 || buffer == sums);
        let mut own = vec![0.0; PART];
        comm.reduce_scatter(&input(comm), &mut own, ReduceOp::Sum).unwrap();
        assert_eq!(own, part(&sums, rank));
        let mut buffer = input(comm);
        let own = comm.reduce_scatter_in_place(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(own, part(&sums, rank));
    });
    let expected = [
        NativeOperation::AllReduce(SUM),
        NativeOperation::Reduce { reduction: SUM, root: 1 },
        NativeOperation::ReduceScatter(SUM),
        NativeOperation::ReduceScatter(SUM),
    ];
    assert_eq!(operations, expected);
}

#[test]
fn the_library_has_four_reductions_and_means_are_divided_afterwards() {
    let ops = [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max, ReduceOp::Mean];
    let operations = executed(move |comm| {
        for op in ops {
            let mut native = input(comm);
            comm.all_reduce(&mut native, op).unwrap();
            let mut by_messages = input(comm);
            comm.with_order(ReductionOrder::Canonical).all_reduce(&mut by_messages, op).unwrap();
            assert_eq!(native, by_messages, "{op:?}");
        }
        let mut halves = vec![f16::from_f32(comm.rank() as f32); PART];
        comm.all_reduce(&mut halves, ReduceOp::Mean).unwrap();
        assert_eq!(halves[0], f16::from_f32((comm.world_size() - 1) as f32 / 2.0));
    });
    let used = [NativeOp::Sum, NativeOp::Product, NativeOp::Min, NativeOp::Max, NativeOp::Sum, NativeOp::Sum];
    let used = used.map(|op| NativeOperation::AllReduce(NativeReduction { op, ..SUM }));
    assert_eq!(operations, used);
}

#[test]
fn the_library_moves_elements_of_any_type() {
    let operations = executed(|comm| {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let own = vec![[u16::try_from(rank).unwrap(); 3]; PART];
        let expected: Vec<_> =
            (0..ranks).flat_map(|rank| vec![[u16::try_from(rank).unwrap(); 3]; PART]).collect();
        let mut all = vec![[9; 3]; PART * ranks];
        comm.all_gather(&own, &mut all).unwrap();
        assert_eq!(all, expected);
        all.fill([9; 3]);
        all[PART * rank..][..PART].copy_from_slice(&own);
        comm.all_gather_in_place(&mut all).unwrap();
        assert_eq!(all, expected);
        let mut received = vec![[9; 3]; PART * ranks];
        comm.all_to_all(&vec![[u16::try_from(rank).unwrap(); 3]; PART * ranks], &mut received).unwrap();
        assert_eq!(received, expected);
        let mut buffer = own;
        comm.with_order(ReductionOrder::Canonical).broadcast(&mut buffer, 1).unwrap();
        assert_eq!(buffer, vec![[1; 3]; PART]);
    });
    let expected = [
        NativeOperation::AllGather,
        NativeOperation::AllGather,
        NativeOperation::AllToAll,
        NativeOperation::Broadcast { root: 1 },
    ];
    assert_eq!(operations, expected);
}

#[test]
fn calls_that_the_library_cannot_execute_are_messages() {
    let operations = executed(|comm| {
        let (rank, ranks, sums) = (comm.rank(), comm.world_size(), expected_sum(comm));
        let mut buffer = input(comm);
        comm.with_order(ReductionOrder::Canonical).all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(buffer, sums, "in canonical order");
        let mut buffer = input(comm);
        comm.with_algorithm(&ring::ALL_REDUCE).all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(buffer, sums, "by an algorithm of the caller");
        let mut buffer = input(comm);
        comm.all_reduce(&mut buffer, ReduceOp::WeightedMean(1.0)).unwrap();
        let add = CustomOp::new("add", |into: &mut [f32], from: &[f32]| {
            into.iter_mut().zip(from).for_each(|(into, from)| *into += from);
        });
        let mut buffer = input(comm);
        comm.all_reduce_with(&mut buffer, &add).unwrap();
        assert_eq!(buffer, sums, "by an operation of the caller");
        let mut halves = vec![f16::ONE; PART];
        comm.all_reduce(&mut halves, ReduceOp::Sum).unwrap();
        assert_eq!(halves[0], f16::from_f32(ranks as f32), "of a type that the library does not have");
        let mut few = [1.0_f32; FROM / 4 - 1];
        comm.all_reduce(&mut few, ReduceOp::Sum).unwrap();
        assert_eq!(few[0], ranks as f32, "of few bytes");
        // Every rank sends one element to its right neighbour: too few bytes for the library.
        let right = (rank + 1) % ranks;
        let counts = |peer| (0..ranks).map(|rank| usize::from(rank == peer)).collect::<Vec<_>>();
        let (left, mut received) = ((rank + ranks - 1) % ranks, [0.0]);
        comm.all_to_all_v(&[rank as f32], &counts(right), &mut received, &counts(left)).unwrap();
        assert_eq!(received[0], left as f32, "of few bytes in uneven parts");
    });
    assert_eq!(operations, []);
}

#[test]
fn the_library_has_parts_of_different_sizes() {
    let operations = executed(|comm| {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        // Rank 0 has no part.
        let counts: Vec<_> = (0..ranks).map(|rank| PART * rank).collect();
        let mut all = vec![0.0; counts.iter().sum()];
        comm.all_gather_v(&vec![rank as f32; counts[rank]], &counts, &mut all).unwrap();
        let expected: Vec<f32> = (0..ranks).flat_map(|rank| vec![rank as f32; PART * rank]).collect();
        assert_eq!(all, expected);
        let mut own = vec![0.0; counts[rank]];
        comm.reduce_scatter_v(&all, &counts, &mut own, ReduceOp::Sum).unwrap();
        assert_eq!(own, vec![(rank * ranks) as f32; counts[rank]]);
        let sent: Vec<_> = (0..ranks).map(|to| PART * (rank + to)).collect();
        let values = vec![rank as f32; sent.iter().sum()];
        let mut received = vec![0.0; values.len()];
        comm.all_to_all_v(&values, &sent, &mut received, &sent).unwrap();
        let expected: Vec<f32> =
            (0..ranks).flat_map(|from| vec![from as f32; PART * (from + rank)]).collect();
        assert_eq!(received, expected);
    });
    let expected =
        [NativeOperation::AllGatherV, NativeOperation::ReduceScatterV(SUM), NativeOperation::AllToAllV];
    assert_eq!(operations, expected);
}

#[test]
fn an_uneven_all_to_all_goes_by_messages_if_one_rank_forces_an_algorithm() {
    let operations = executed(|comm| {
        let ranks = comm.world_size();
        let counts = vec![PART; ranks];
        let (values, mut received) = (vec![comm.rank() as f32; PART * ranks], vec![0.0; PART * ranks]);
        match comm.rank() {
            1 => comm.with_algorithm(&all_to_all::WINDOWED).all_to_all_v(
                &values,
                &counts,
                &mut received,
                &counts,
            ),
            _ => comm.all_to_all_v(&values, &counts, &mut received, &counts),
        }
        .unwrap();
        assert_eq!(received[received.len() - 1], (ranks - 1) as f32);
    });
    assert_eq!(operations, []);
}

#[test]
fn the_library_is_asked_to_reduce_complex_numbers() {
    let outcome = sim::run(1, 2, |transport| {
        let messages: Box<dyn Transport> = Box::new(transport);
        let asked = Arc::<Mutex<_>>::default();
        let mut comm = Communicator::new(Refusing { messages, asked: Arc::clone(&asked) });
        comm.set_order(ReductionOrder::Any);
        comm.all_reduce(&mut [Complex::new(1.0_f32, 2.0); PART], ReduceOp::Sum).unwrap();
        comm.all_reduce(&mut [Complex::new(1.0_f64, 2.0); PART], ReduceOp::Product).unwrap();
        asked.lock().unwrap().clone()
    });
    let complex = |element, op| NativeOperation::AllReduce(NativeReduction { element, op });
    let expected = vec![
        complex(NativeElement::ComplexF32, NativeOp::Sum),
        complex(NativeElement::ComplexF64, NativeOp::Product),
    ];
    assert_eq!(outcome.results, [expected.clone(), expected]);
}

#[test]
fn a_rank_that_forces_an_algorithm_while_others_use_the_library_is_reported() {
    let outcome = sim::run(1, 2, |transport| {
        let messages: Box<dyn Transport> = Box::new(transport);
        let mut comm = Communicator::new(WithLibrary { messages, executed: Arc::default() });
        comm.set_order(ReductionOrder::Any);
        let mut buffer = input(&comm);
        let error = match comm.rank() {
            0 => comm.with_algorithm(&ring::ALL_REDUCE).all_reduce(&mut buffer, ReduceOp::Sum),
            _ => comm.all_reduce(&mut buffer, ReduceOp::Sum),
        };
        error.unwrap_err()
    });
    let is_named = |error: &Error| {
        let text = error.to_string();
        text.contains("algorithms differ") && text.contains("that of a library") && text.contains("ring")
    };
    assert!(outcome.results.iter().any(is_named), "{:?}", outcome.results);
}
