//! Weighted micro-batches.

use dist_collectives::Communicator;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::{BoxError, Ddp, DdpOptions, FloatType, ParamInfo, Values};
use dist_transport::sim;
use rstest::rstest;

use crate::ddp::optimizer;
use crate::join::{gradient, tree};
use crate::plain::{Bag, Rows, bits, micro_batch, model, squared_error};

fn tokens(index: usize) -> u64 {
    [3, 0, 128, 1, 77, 50, 2, 9][index]
}

/// Micro-batches of different numbers of tokens, whose gradients are sums over their tokens.
#[rstest]
fn a_weighted_mean_is_the_mean_of_all_tokens(
    #[values(1, 2, 4)] ranks: usize,
    #[values(4, 8)] micro_batches: usize,
) {
    let outcome = sim::run(1, ranks, move |transport| {
        let infos = vec![ParamInfo::new("w", [3], FloatType::F32)];
        let mut ddp =
            Ddp::new(Communicator::new(transport), Bag::new(infos, 1), DdpOptions::default()).unwrap();
        let report = ddp.step_with(micro_batches, |_, index, ready| {
            ready(0, Values::F32(&gradient(0, 0, index)))?;
            Ok((gradient(1, 1, index)[0], tokens(index)))
        });
        let report = report.unwrap();
        assert_eq!(report.micro_batches, micro_batches);
        let Some(Values::F32(mean)) = ddp.gradient(0) else { panic!("there is a gradient") };
        (mean.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), report.loss.to_bits())
    });
    let all = (0..micro_batches).map(tokens).sum::<u64>() as f32;
    let sum = |of: &dyn Fn(usize) -> Vec<f32>| tree(&(0..micro_batches).map(of).collect::<Vec<_>>());
    let mean = sum(&|index| gradient(0, 0, index)).into_iter().map(|sum| (sum / all).to_bits()).collect();
    let loss = (sum(&|index| gradient(1, 1, index))[0] / all).to_bits();
    assert_eq!(outcome.results, vec![(mean, loss); ranks]);
}

#[rstest]
fn accumulated_weighted_micro_batches_count_as_those_of_one_larger_step(#[values(1, 2, 3)] ranks: usize) {
    let run = move |parts: &'static [usize], last: Option<usize>| {
        let program = move |transport| {
            let comm = Communicator::new(transport);
            let rank = comm.rank();
            let infos = vec![ParamInfo::new("w", [3], FloatType::F32)];
            let mut ddp = Ddp::new(comm, Bag::new(infos, 1), DdpOptions::default()).unwrap();
            let mut done = 0;
            // A rank computes the same in the order of the calls, for every division.
            let mut next = |_: &mut Bag, _, ready: &mut dist_parallel::model::Ready<'_>| {
                let index = done;
                done += 1;
                ready(0, Values::F32(&gradient(rank, 0, index)))?;
                Ok((gradient(rank, 1, index)[0], tokens(index + rank)))
            };
            for part in parts {
                ddp.accumulate_with(part * ranks, &mut next).unwrap();
            }
            let report = match last {
                Some(last) => ddp.step_with(last * ranks, &mut next),
                None => ddp.synchronise(),
            };
            let report = report.unwrap();
            assert_eq!(report.micro_batches, 6 * ranks);
            let Some(Values::F32(mean)) = ddp.gradient(0) else { panic!("there is a gradient") };
            (mean.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), report.loss.to_bits())
        };
        sim::run(3, ranks, program).results
    };
    let whole = run(&[], Some(6));
    assert_eq!(run(&[3], Some(3)), whole);
    assert_eq!(run(&[1, 2, 0, 2], Some(1)), whole);
    assert_eq!(run(&[4, 2], Some(0)), whole, "a step may be all that is communicated");
    assert_eq!(run(&[4, 2], None), whole);
}

/// Returns the loss and the gradient of all values of a micro-batch of `tokens` tokens.
fn of_tokens(index: usize) -> impl FnOnce(Rows) -> Result<((f32, u64), Rows), BoxError> {
    let (_, target) = micro_batch(0, index);
    move |output| {
        let (loss, gradient) = squared_error(target)(output)?;
        let tokens = tokens(index);
        let factor = f32::from(u16::try_from(tokens)?);
        Ok(((loss * factor, tokens), gradient.into_iter().map(|value| value * factor).collect()))
    }
}

fn input(index: usize) -> Rows {
    micro_batch(0, index).0
}

#[rstest]
fn sharded_training_divides_by_the_weight_like_one_process(
    #[values(1, 2, 4)] ranks: usize,
    #[values(
        ShardingStrategy::FullShard,
        ShardingStrategy::ShardGradOp,
        ShardingStrategy::ShardOptimizer,
        ShardingStrategy::NoShard
    )]
    strategy: ShardingStrategy,
    #[values(false, true)] accumulates: bool,
) {
    let alone = sim::run(1, 1, |transport| {
        let mut ddp = Ddp::new(Communicator::new(transport), model(7), DdpOptions::default()).unwrap();
        let report = ddp.step(8, |index| Ok((input(index), of_tokens(index)))).unwrap();
        ddp.update(&mut *optimizer("sgd")).unwrap();
        (bits(ddp.model()), report.loss.to_bits(), report.micro_batches)
    });
    let outcome = sim::run(1, ranks, move |transport| {
        let comm = Communicator::new(transport);
        let (rank, half) = (comm.rank(), 4 / comm.world_size());
        let mut fsdp = Fsdp::new(comm, model(7), &FsdpOptions::new(strategy)).unwrap();
        let batch = |index| Ok((input(index), of_tokens(index)));
        // The micro-batch that a step of all 8 would assign to this rank at the same place.
        let of_all = |part: usize, index: usize| match strategy {
            ShardingStrategy::FullShard | ShardingStrategy::ShardGradOp => part * 4 + index,
            _ => rank * half + part * half + index,
        };
        let report = if accumulates {
            fsdp.accumulate(4, |index| batch(of_all(0, index))).unwrap();
            fsdp.step(4, |index| batch(of_all(1, index))).unwrap()
        } else {
            fsdp.step(8, batch).unwrap()
        };
        fsdp.update(&mut *optimizer("sgd")).unwrap();
        let (_, model) = fsdp.into_parts().unwrap();
        (bits(&model), report.loss.to_bits(), report.micro_batches)
    });
    assert!(outcome.results.iter().all(|result| *result == alone.results[0]), "{:?}", outcome.results);
}

#[test]
fn ranks_that_join_divide_by_the_weight_of_all_micro_batches() {
    let outcome = sim::run(1, 3, |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank();
        let infos = vec![ParamInfo::new("w", [1], FloatType::F32)];
        let mut ddp = Ddp::new(comm, Bag::new(infos, 1), DdpOptions::default()).unwrap();
        let report = ddp.join_with(rank, |_, index, ready| {
            ready(0, Values::F32(&[5.0]))?;
            Ok((2.0, (rank + index) as u64))
        });
        (report.unwrap().map(|report| (report.loss, report.micro_batches)), ddp.gradient(0).is_some())
    });
    // Of one token on rank 1, and of two and three on rank 2.
    assert_eq!(outcome.results, [(Some((1.0, 3)), true); 3]);
}
