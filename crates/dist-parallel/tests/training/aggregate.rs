//! Training loops of a user's own: every aggregator gives the bits of the canonical order.

use std::cell::Cell;

use dist_collectives::Communicator;
use dist_parallel::own_loop::{Aggregation, GradientAggregator, GradientSlices, ParameterServer, train_step};
use dist_parallel::{Error, ValuesMut};
use dist_transport::sim;
use half::bf16;
use rstest::rstest;

use crate::errors::run_at_once;
use crate::plain::Numbers;

const LENS: [usize; 4] = [3, 0, 1, 50];

/// One rank's gradients: some in f32, one in a half type.
#[derive(Debug, Clone, PartialEq)]
struct Mixed {
    singles: Vec<Vec<f32>>,
    halves: Vec<bf16>,
}

impl Mixed {
    fn of(rank: usize) -> Self {
        let mut numbers = Numbers(rank as u64);
        let singles = LENS.map(|len| numbers.take(len)).into();
        Self { singles, halves: numbers.take(9).into_iter().map(bf16::from_f32).collect() }
    }

    fn bits(&self) -> Vec<u32> {
        let halves = self.halves.iter().map(|half| half.to_bits().into());
        self.singles.iter().flatten().map(|single| single.to_bits()).chain(halves).collect()
    }

    /// Returns the mean over these ranks, by the definition of the canonical order.
    fn mean(ranks: &[usize]) -> Self {
        let count = f32::from(u8::try_from(ranks.len()).unwrap());
        let mut mean = Self::sum(ranks);
        mean.singles.iter_mut().flatten().for_each(|value| *value /= count);
        mean.halves.iter_mut().for_each(|value| *value = bf16::from_f32(value.to_f32() / count));
        mean
    }

    fn sum(ranks: &[usize]) -> Self {
        if let [rank] = ranks {
            return Self::of(*rank);
        }
        let (left, right) = ranks.split_at(ranks.len().next_power_of_two() / 2);
        let (mut sum, right) = (Self::sum(left), Self::sum(right));
        for (left, right) in sum.singles.iter_mut().flatten().zip(right.singles.iter().flatten()) {
            *left += right;
        }
        for (left, right) in sum.halves.iter_mut().zip(&right.halves) {
            *left = bf16::from_f32(left.to_f32() + right.to_f32());
        }
        sum
    }
}

impl GradientSlices for Mixed {
    fn slices(&mut self) -> Vec<ValuesMut<'_>> {
        let mut slices = self.singles.slices();
        slices.insert(2, self.halves.as_mut_slice().into());
        slices
    }
}

fn over(transport: sim::SimTransport, aggregation: Aggregation) -> Box<dyn GradientAggregator> {
    aggregation.over(Communicator::new(transport)).unwrap()
}

#[rstest]
fn every_aggregator_gives_the_canonical_mean(
    #[values(1, 2, 3, 5, 8)] ranks: usize,
    #[values(
        Aggregation::AllReduce,
        Aggregation::ParameterServer { server: 0 },
        Aggregation::ParameterServer { server: usize::MAX }
    )]
    aggregation: Aggregation,
) {
    let expected = Mixed::mean(&Vec::from_iter(0..ranks)).bits();
    let outcome = sim::run(1, ranks, move |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank();
        let aggregation = match aggregation {
            Aggregation::ParameterServer { server: usize::MAX } => {
                Aggregation::ParameterServer { server: ranks - 1 }
            }
            other => other,
        };
        let mut aggregator = aggregation.over(comm).unwrap();
        let mut gradients = Mixed::of(rank);
        aggregator.aggregate(&mut gradients.slices()).unwrap();
        let mut again = Mixed::of(rank);
        aggregator.aggregate(&mut again.slices()).unwrap();
        assert_eq!(again, gradients);
        gradients.bits()
    });
    assert_eq!(outcome.results, vec![expected; ranks]);
}

#[test]
fn alone_gradients_stay_as_they_are() {
    let mut aggregator = dist_parallel::own_loop::LocalAggregator;
    let mut gradients = Mixed::of(3);
    aggregator.aggregate(&mut gradients.slices()).unwrap();
    aggregator.broadcast(&mut gradients.slices()).unwrap();
    assert_eq!(gradients, Mixed::of(3));
}

#[rstest]
#[case(Aggregation::AllReduce, 0)]
#[case(Aggregation::ParameterServer { server: 2 }, 2)]
fn parameters_are_broadcast_from_rank_0_or_the_server(#[case] aggregation: Aggregation, #[case] root: usize) {
    let outcome = sim::run(1, 3, move |transport| {
        let rank = dist_transport::Transport::rank(&transport).index();
        let mut parameters = Mixed::of(rank);
        over(transport, aggregation).broadcast(&mut parameters.slices()).unwrap();
        parameters
    });
    assert_eq!(outcome.results, vec![Mixed::of(root); 3]);
}

#[rstest]
#[case::fewer(|gradients: &mut Vec<Vec<f32>>| { gradients.pop(); })]
#[case::none(Vec::clear)]
#[case::the_same_number_of_values(|gradients: &mut Vec<Vec<f32>>| gradients.swap(0, 1))]
fn gradients_that_differ_are_an_error_on_every_rank(
    #[case] change: fn(&mut Vec<Vec<f32>>),
    #[values(Aggregation::AllReduce, Aggregation::ParameterServer { server: 0 })] aggregation: Aggregation,
) {
    let results = run_at_once(3, move |comm| {
        let mut gradients = vec![vec![1.0_f32; 2], vec![2.0; 3]];
        if comm.rank() == 1 {
            change(&mut gradients);
        }
        aggregation.over(comm).unwrap().aggregate(&mut gradients.slices())
    });
    let named = |result: &Result<(), Error>| matches!(result, Err(Error::GradientsDiffer { rank: 1 }));
    assert!(results.iter().all(named), "{results:?}");
}

/// If gradients differ in number, type or length, the step ends on every rank with the same error, whichever rank
/// notices first. Training then continues.
#[rstest]
fn a_step_with_differing_gradients_is_the_same_error_on_every_rank_without_harm(
    #[values(0, 1, 2, 3, 4)] seed: u64,
    #[values(2, 3, 5)] ranks: usize,
    #[values(Aggregation::AllReduce, Aggregation::ParameterServer { server: 1 })] aggregation: Aggregation,
) {
    let outcome = sim::run(seed, ranks, move |transport| {
        let comm = Communicator::new(transport);
        let odd = comm.rank() == 1;
        let mut aggregator = aggregation.over(comm).unwrap();
        let mut step = |len: usize| {
            let (gradients, apply) = (vec![vec![1.0_f32; 2], vec![2.0; len]], |_| Ok(()));
            train_step(|| Ok((1.0, gradients)), apply, &mut *aggregator)
        };
        let refused = step(if odd { 4 } else { 3 }).map_err(|error| format!("{error:?}"));
        (refused, step(3).map_err(|error| format!("{error:?}")))
    });
    let expected = (Err(format!("{:?}", Error::GradientsDiffer { rank: 1 })), Ok(1.0));
    assert_eq!(outcome.results, vec![expected; ranks]);
}

#[test]
fn a_list_that_changes_on_one_rank_only_is_an_error_on_every_rank() {
    let results = run_at_once(2, |comm| {
        let rank = comm.rank();
        let mut aggregator = Aggregation::AllReduce.over(comm).unwrap();
        aggregator.aggregate(&mut vec![vec![1.0_f32; 4]].slices()).unwrap();
        aggregator.aggregate(&mut vec![vec![1.0_f32; 4 + rank]].slices())
    });
    assert!(results.iter().all(|result| matches!(result, Err(Error::Communication(_)))), "{results:?}");
}

#[test]
fn there_is_no_server_beyond_the_last_rank() {
    let outcome = sim::run(1, 2, |transport| ParameterServer::new(Communicator::new(transport), 2).map(drop));
    let refused =
        |result: &Result<(), Error>| matches!(result, Err(Error::NoSuchServer { server: 2, world_size: 2 }));
    assert!(outcome.results.iter().all(refused), "{:?}", outcome.results);
}

/// Learns one weight from each rank's target. Returns the weight and the losses, as bits.
fn learned(ranks: usize, aggregation: Aggregation) -> Vec<(u32, Vec<u32>)> {
    let program = move |transport| {
        let comm = Communicator::new(transport);
        let target = comm.rank() as f32 + 0.1;
        let mut aggregator = aggregation.over(comm).unwrap();
        let weight = Cell::new(0.0_f32);
        let step = |_| {
            let error = weight.get() - target;
            let compute = || Ok((error * error, vec![vec![2.0 * error]]));
            let apply = |gradients: Vec<Vec<f32>>| {
                weight.set(weight.get() - 0.1 * gradients[0][0]);
                Ok(())
            };
            train_step(compute, apply, &mut *aggregator).unwrap().to_bits()
        };
        let losses = (0..20).map(step).collect();
        (weight.get().to_bits(), losses)
    };
    sim::run(1, ranks, program).results
}

#[test]
fn a_loop_of_ones_own_trains_the_same_with_every_aggregator() {
    let expected = learned(3, Aggregation::AllReduce);
    assert!(expected.iter().all(|(weight, _)| *weight == expected[0].0));
    assert!(expected[0].1 != expected[1].1, "every rank has its own loss");
    assert!((f32::from_bits(expected[0].0) - 1.1).abs() < 0.05);
    assert_eq!(learned(3, Aggregation::ParameterServer { server: 1 }), expected);
    assert_eq!(learned(1, Aggregation::Local), learned(1, Aggregation::AllReduce));
}

#[rstest]
fn a_failed_part_of_a_step_ends_the_step_on_every_rank(#[values(false, true)] in_apply: bool) {
    let results = run_at_once(3, move |comm| {
        let rank = comm.rank();
        let mut aggregator = Aggregation::AllReduce.over(comm).unwrap();
        let (computed, applied) = (Cell::new(0), Cell::new(0));
        let mut step = || {
            let compute = || {
                computed.set(computed.get() + 1);
                if rank == 1 && !in_apply {
                    Err("no more data".into())
                } else {
                    Ok((1.0, vec![vec![0.5_f32]]))
                }
            };
            let apply = |_: Vec<Vec<f32>>| {
                applied.set(applied.get() + 1);
                if rank == 1 && in_apply { Err("no such parameter".into()) } else { Ok(()) }
            };
            train_step(compute, apply, &mut *aggregator)
        };
        let error = step().and_then(|_| step()).unwrap_err();
        (error, computed.get(), applied.get())
    });
    for (rank, (error, computed, applied)) in results.iter().enumerate() {
        match (rank, in_apply) {
            (1, false) => {
                assert!(matches!(error, Error::Compute(source) if source.to_string() == "no more data"));
                assert_eq!((*computed, *applied), (1, 0), "nothing runs after the failure");
            }
            (1, true) => assert!(matches!(error, Error::Apply(_)), "{error:?}"),
            _ => {
                let Error::Communication(source) = error else { panic!("rank {rank}: {error:?}") };
                assert_eq!(source.peer(), Some(1));
                assert_eq!(*computed, *applied + 1);
            }
        }
    }
}
