//! Means of `f16`: partial sums are computed as `f32` in every operation, and the quotient is rounded to `f16`
//! once.

use dist_collectives::error::Call;
use dist_collectives::tuning::Operation;
use dist_collectives::{
    Buffer, Communicator, DType, ElementType, Error, ReduceOp, ReductionOrder, algorithms::binomial, bf16,
    f16,
};
use dist_testkit::oracle;
use proptest::prelude::*;
use rstest::rstest;

use crate::calls::by_messages;
use crate::oracle::assert_same;
use crate::worlds::{self, Network};

type Program = fn(&mut Communicator, &[f16], ReduceOp) -> Result<Option<Vec<f16>>, Error>;

/// Every form of a reduction of a whole buffer; `None` on ranks that get no result. The length is divisible by the ranks.
const WHOLE: &[(&str, Program)] = &[
    ("all_reduce", |comm, own, op| {
        let mut buffer = own.to_vec();
        comm.all_reduce(&mut buffer, op)?;
        Ok(Some(buffer))
    }),
    ("all_reduce_buffer", |comm, own, op| {
        let mut buffer = Buffer::from(own.to_vec());
        comm.all_reduce_buffer(&mut buffer, op)?;
        Ok(Some(buffer.into_vec()))
    }),
    ("all_reduce_buffer, allocated", |comm, own, op| {
        let mut buffer = comm.alloc(own.len())?;
        buffer.copy_from_slice(own);
        comm.all_reduce_buffer(&mut buffer, op)?;
        Ok(Some(buffer.into_vec()))
    }),
    ("all_reduce_coalesced", |comm, own, op| {
        let mut buffer = own.to_vec();
        let (left, right) = buffer.split_at_mut(own.len() / 3);
        comm.all_reduce_coalesced(&mut [left, right], op)?;
        Ok(Some(buffer))
    }),
    ("start_all_reduce", |comm, own, op| {
        Ok(Some(comm.start_all_reduce(own.to_vec(), op).wait()?.into_vec()))
    }),
    ("start_all_reduce_coalesced", |comm, own, op| {
        let parts = own.chunks(own.len().div_ceil(3).max(1)).map(|part| Buffer::from(part.to_vec()));
        let parts = comm.start_all_reduce_coalesced(parts.collect(), op).wait().map_err(|it| *it.error)?;
        Ok(Some(parts.iter().flat_map(|part| part.to_vec()).collect()))
    }),
    ("reduce", |comm, own, op| {
        let (mut buffer, root) = (own.to_vec(), comm.world_size() - 1);
        comm.reduce(&mut buffer, op, root)?;
        Ok((comm.rank() == root).then_some(buffer))
    }),
    ("start_reduce", |comm, own, op| {
        let reduced = comm.start_reduce(own.to_vec(), op, 0).wait()?.into_vec();
        Ok((comm.rank() == 0).then_some(reduced))
    }),
];

/// Every form of a reduce_scatter, which returns this rank's part of the result.
const PARTS: &[(&str, Program)] = &[
    ("reduce_scatter", |comm, own, op| {
        let mut output = vec![f16::ZERO; own.len() / comm.world_size()];
        comm.reduce_scatter(own, &mut output, op)?;
        Ok(Some(output))
    }),
    ("reduce_scatter_buffer", |comm, own, op| {
        let mut input = comm.alloc(own.len())?;
        input.copy_from_slice(own);
        let mut output = vec![f16::ZERO; own.len() / comm.world_size()];
        comm.reduce_scatter_buffer(&input, &mut output, op)?;
        assert_same(&input, own, &"the input stays as it is");
        Ok(Some(output))
    }),
    ("reduce_scatter_in_place", |comm, own, op| {
        Ok(Some(comm.reduce_scatter_in_place(&mut own.to_vec(), op)?.to_vec()))
    }),
    ("reduce_scatter_v", |comm, own, op| {
        let counts = vec![own.len() / comm.world_size(); comm.world_size()];
        let mut output = vec![f16::ZERO; counts[0]];
        comm.reduce_scatter_v(own, &counts, &mut output, op)?;
        Ok(Some(output))
    }),
    ("start_reduce_scatter", |comm, own, op| {
        Ok(Some(comm.start_reduce_scatter(own.to_vec(), op).wait()?.into_vec()))
    }),
    ("start_reduce_scatter_in_place", |comm, own, op| {
        let (part, rank) = (own.len() / comm.world_size(), comm.rank());
        let buffer = comm.start_reduce_scatter_in_place(own.to_vec(), op).wait()?.into_vec();
        Ok(Some(buffer[rank * part..][..part].to_vec()))
    }),
    ("start_reduce_scatter_v", |comm, own, op| {
        let counts = vec![own.len() / comm.world_size(); comm.world_size()];
        Ok(Some(comm.start_reduce_scatter_v(own.to_vec(), counts, op).wait()?.into_vec()))
    }),
];

/// Returns the mean by definition: Σ weight · value over the canonical tree in `f32`, divided in `f32`,
/// rounded to `f16`.
#[allow(clippy::cast_possible_truncation, reason = "weights are rounded to f32 by definition")]
fn means(inputs: &[Vec<f16>], weights: &[f64]) -> Vec<f16> {
    let total = oracle::tree(weights, &|left, right| left + right) as f32;
    let mean = |index: usize| {
        let products: Vec<f32> = inputs
            .iter()
            .zip(weights)
            .map(|(input, &weight)| input[index].to_f32() * weight as f32)
            .collect();
        f16::from_f32(oracle::tree(&products, &|left, right| left + right) / total)
    };
    (0..inputs[0].len()).map(mean).collect()
}

/// Checks both means of these inputs, in every form.
fn check(network: Network, inputs: &[Vec<f16>], weights: &[f64]) {
    let (inputs, weights) = (inputs.to_vec(), weights.to_vec());
    let (mean, weighted) = (means(&inputs, &vec![1.0; inputs.len()]), means(&inputs, &weights));
    worlds::run(network, inputs.len(), move |mut comm| {
        let (rank, part) = (comm.rank(), inputs[0].len() / inputs.len());
        let own = rank * part..(rank + 1) * part;
        for (op, expected) in [(ReduceOp::Mean, &mean), (ReduceOp::WeightedMean(weights[rank]), &weighted)] {
            for (name, program) in WHOLE {
                let context = format!("{name} {op} over {network:?} of {} ranks", inputs.len());
                if let Some(result) = program(&mut comm, &inputs[rank], op).expect(name) {
                    assert_same(&result, expected, &context);
                }
            }
            for (name, program) in PARTS {
                let context = format!("{name} {op} over {network:?} of {} ranks", inputs.len());
                let result = program(&mut comm, &inputs[rank], op).expect(name);
                assert_same(&result.expect(name), &expected[own.clone()], &context);
            }
        }
    });
}

/// Inputs with any bits, including NaN and infinities, for this many ranks.
fn any_inputs() -> impl Strategy<Value = (Vec<Vec<f16>>, Vec<f64>)> {
    (1..=9_usize, 0..5_usize).prop_flat_map(|(ranks, part)| {
        let values = prop::collection::vec(any::<u16>().prop_map(f16::from_bits), part * ranks);
        let inputs = prop::collection::vec(values, ranks);
        (inputs, prop::collection::vec(0.001..1000.0_f64, ranks))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn means_of_any_f16_have_the_bits_of_f32_sums_rounded_once((inputs, weights) in any_inputs()) {
        check(Network::Simulated, &inputs, &weights);
        check(Network::SharedMemory(inputs.len() as u64), &inputs, &weights);
    }
}

/// Values that include some whose sum exceeds `f16` and whose mean does not.
fn large_inputs(ranks: usize, len: usize) -> Vec<Vec<f16>> {
    let large = |rank: usize, index: usize| match index % 3 {
        0 => f16::from_f32(10_000.0),
        1 => f16::MAX,
        _ => f16::from_f32((rank * 31 + index) as f32 / 7.0),
    };
    (0..ranks).map(|rank| (0..len).map(|index| large(rank, index)).collect()).collect()
}

#[rstest]
fn means_that_f16_holds_are_finite_over_every_network(#[values(1, 2, 3, 5, 8)] ranks: usize) {
    let networks: &[Network] = &[
        Network::Simulated,
        Network::SharedMemory(3),
        Network::Threads,
        #[cfg(feature = "tcp")]
        Network::Tcp,
        #[cfg(all(feature = "shm", target_os = "linux"))]
        Network::Shm,
    ];
    let weights: Vec<f64> = (0..ranks).map(|rank| [1.0, 1000.0, 0.25][rank % 3]).collect();
    for &network in networks {
        // Lengths: zero, a slot, and several blocks.
        for part in [0, 1, 125, 40_000 / ranks] {
            check(network, &large_inputs(ranks, part * ranks), &weights);
        }
    }
    let mean = means(&large_inputs(ranks, 3), &vec![1.0; ranks]);
    assert_eq!(mean[..2], [f16::from_f32(10_000.0), f16::MAX]);
}

#[test]
fn sums_of_f16_and_means_of_bf16_keep_their_rule() {
    worlds::run(Network::Simulated, 8, |mut comm| {
        let mut sum = [f16::from_f32(10_000.0)];
        comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [f16::INFINITY]);
        // Each of seven additions of 1 to 256 is rounded away.
        let mut mean = [bf16::from_f32(if comm.rank() == 0 { 256.0 } else { 1.0 })];
        comm.all_reduce(&mut mean, ReduceOp::Mean).unwrap();
        let rounded = [257.0, 2.0, 2.0, 2.0].map(bf16::from_f32);
        let [left, right] = [(rounded[0], rounded[1]), (rounded[2], rounded[3])]
            .map(|(one, other)| bf16::from_f32(one.to_f32() + other.to_f32()));
        let sum = bf16::from_f32(left.to_f32() + right.to_f32());
        assert_eq!(mean, [bf16::from_f32(sum.to_f32() / 8.0)]);
    });
}

/// In any order, all ranks have the same bits; if `f32` sums are exact, the mean is exact.
#[rstest]
fn every_algorithm_of_any_order_carries_f32(#[values(2, 3, 5, 8, 9)] ranks: usize) {
    let results = worlds::run(Network::Simulated, ranks, move |mut comm| {
        comm.set_order(ReductionOrder::Any);
        let mut results = Vec::new();
        for algorithm in by_messages(Operation::AllReduce) {
            let mut comm = comm.with_algorithm(algorithm);
            let own = large_inputs(ranks, 100).swap_remove(comm.rank());
            let (mut exact, mut noisy) = ([f16::from_f32(10_000.0), f16::MAX], own);
            match comm.all_reduce(&mut exact, ReduceOp::Mean) {
                Err(Error::Unsupported { .. }) => continue,
                done => done.unwrap(),
            }
            assert_eq!(exact, [f16::from_f32(10_000.0), f16::MAX], "{algorithm}");
            comm.all_reduce(&mut noisy, ReduceOp::Mean).unwrap();
            results.push(noisy);
        }
        results
    });
    assert!(results.iter().all(|of_rank| *of_rank == results[0] && !of_rank.is_empty()));
}

#[rstest]
fn a_mean_of_f16_moves_the_bytes_of_one_of_f32(#[values(2, 3, 4, 8)] ranks: usize) {
    worlds::run(Network::Simulated, ranks, move |mut comm| {
        let len = 1009 * ranks;
        let mut moved = |call: &dyn Fn(&mut Communicator) -> Result<(), Error>| {
            let before = comm.traffic().bytes_sent;
            call(&mut comm).unwrap();
            comm.traffic().bytes_sent - before
        };
        for op in [ReduceOp::Mean, ReduceOp::WeightedMean(2.0)] {
            let half = moved(&|comm| comm.all_reduce(&mut vec![f16::ONE; len], op));
            let single = moved(&|comm| comm.all_reduce(&mut vec![1.0_f32; len], op));
            assert_eq!(half, single, "{op}");
            let half = moved(&|comm| comm.reduce(&mut vec![f16::ONE; len], op, 0));
            assert_eq!(half, moved(&|comm| comm.reduce(&mut vec![1.0_f32; len], op, 0)), "{op}");
            let half = moved(&|comm| comm.reduce_scatter_in_place(&mut vec![f16::ONE; len], op).map(drop));
            let single = moved(&|comm| comm.reduce_scatter_in_place(&mut vec![1.0_f32; len], op).map(drop));
            assert_eq!(half, single, "{op}");
        }
        let sum = |comm: &mut Communicator, len| comm.all_reduce(&mut vec![f16::ONE; len], ReduceOp::Sum);
        let by_doubling =
            |len| move |comm: &mut Communicator| sum(&mut comm.with_algorithm(&binomial::ALL_REDUCE), len);
        assert_eq!(2 * moved(&by_doubling(len)), moved(&by_doubling(2 * len)), "sums travel as f16");
    });
}

/// The messages are equal; the calls are not.
#[test]
fn a_mean_of_f16_and_one_of_f32_are_different_calls() {
    let errors = worlds::run(Network::Simulated, 2, |mut comm| match comm.rank() {
        0 => comm.all_reduce(&mut [f16::ONE; 4], ReduceOp::Mean).unwrap_err(),
        _ => comm.all_reduce(&mut [1.0_f32; 4], ReduceOp::Mean).unwrap_err(),
    });
    let named = |call: &Call| call.element.and_then(ElementType::dtype);
    for error in errors {
        let text = format!("{error}: {:?}", error.call().map(named));
        assert!(text.contains("f16") && text.contains("f32"), "{text}");
        assert!(
            error.call().is_some_and(|call| matches!(named(call), Some(DType::F16 | DType::F32))),
            "{text}"
        );
    }
}

#[test]
fn weights_that_make_no_mean_are_refused_by_the_name_of_the_callers_type() {
    let errors = worlds::run(Network::Simulated, 2, |mut comm| {
        let error = comm.all_reduce(&mut [f16::ONE], ReduceOp::WeightedMean(0.0)).unwrap_err();
        let mut mean = [f16::MAX];
        comm.all_reduce(&mut mean, ReduceOp::Mean).unwrap();
        (error, mean)
    });
    for (error, mean) in errors {
        assert!(matches!(error, Error::TotalWeight { dtype: DType::F16, .. }), "{error}");
        assert_eq!(mean, [f16::MAX], "the next call works");
    }
}
