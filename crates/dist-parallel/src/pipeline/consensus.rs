//! The comparison of calls between the ranks of all pipelines.

use dist_collectives::{Communicator, ReduceOp};

use crate::agreement::{self, hash};
use crate::engine::StepEngine;
use crate::fsdp::Groups;
use crate::loss::to_be_summed;
use crate::step_consensus::StepConsensus;
use crate::tree::sum_of;
use crate::{Error, Params, Result, StepDescriptor, TrainingCall};

/// A call that all ranks of a training must make together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ComparedCall {
    /// The name of the function.
    pub(crate) name: &'static str,
    /// The request of a step or an evaluation.
    pub(crate) descriptor: Option<StepDescriptor>,
}

/// Forks of the communicators between pipelines that only compare calls. They are separate, because another pipeline
/// can be in a step, which uses the communicators themselves.
#[derive(Default)]
pub(super) struct CallGroups {
    pub(super) shards: Option<Communicator>,
    pub(super) data: Option<Communicator>,
}

impl<M: Params> StepEngine<M> {
    /// Announces a call without a descriptor and compares it. A step does not use this: its first messages have
    /// channels of their own.
    ///
    /// # Errors
    /// The ranks of all pipelines have not all made this call: every rank gets the error.
    pub(crate) fn agree_to_call(&mut self, name: &'static str) -> Result<()> {
        self.announce(name);
        let call = ComparedCall { name, descriptor: None };
        // The descriptor of an evaluation is not negative.
        let agreed = self.compare_calls(call, hash(name.bytes()).cast_signed() | i64::MIN);
        self.or_abort(agreed)
    }

    /// Returns the error of a call with another number of micro-batches than the schedule has for all pipelines. If all
    /// ranks have made it, every rank gets the error, and training can continue.
    pub(crate) fn refuse_step(&mut self, requested: StepDescriptor) -> Error {
        let name = match requested.call {
            TrainingCall::Accumulate => "accumulate other",
            _ => "step(other)",
        };
        self.announce(name);
        let call = ComparedCall { name, descriptor: Some(requested) };
        // The ranks that compute the scheduled number have announced another name.
        let agreed = self.compare_calls(call, requested.encode());
        let (scheduled, requested) = (self.scheduled(), requested.micro_batches);
        let refused = agreed.and(Err::<(), _>(Error::ScheduledMicroBatches { scheduled, requested }));
        self.or_abort(refused).expect_err("the step is refused")
    }

    /// Returns an error on every rank of all pipelines unless all have the same number, which stands for this call.
    fn compare_calls(&mut self, call: ComparedCall, number: i64) -> Result<()> {
        let all = self.of_all(&[number])?;
        if all.iter().all(|there| *there == all[0]) { Ok(()) } else { Err(self.calls_differ(call)) }
    }

    /// Returns the error of ranks that have made different calls or have updated their parameters differently. All
    /// ranks call this.
    pub(crate) fn calls_differ(&mut self, call: ComparedCall) -> Error {
        let [first, second] = words(call.name);
        let world_rank = self.world.members_in_world()[self.world.rank()] as i64;
        let descriptor = call.descriptor.map_or(-1, StepDescriptor::encode);
        let all = match self.of_all(&[world_rank, first, second, descriptor]) {
            Ok(all) => all,
            Err(error) => return error,
        };
        let (calls, _) = all.as_chunks::<4>();
        match calls.iter().position(|there| there[1..] != calls[0][1..]) {
            Some(at) => difference(calls[0], at, calls[at]),
            None => {
                let (mut groups, updates, infos) = self.groups_with_updates();
                updates.differ(&mut groups, infos)
            }
        }
    }

    /// Returns an error unless all ranks of all pipelines have called for the same evaluation or join, with at least one
    /// micro-batch. In a join, `own` is the number of this pipeline's micro-batches.
    pub(crate) fn agree_in_pipelines(&mut self, descriptor: StepDescriptor, own: usize) -> Result<()> {
        let joins = descriptor.call == TrainingCall::Join;
        // If updates are equal, the numbers differ exactly if the requests differ, and vice versa.
        let number = descriptor.encode() ^ self.updates.number();
        let name = if joins { "join" } else { "evaluate" };
        self.compare_calls(ComparedCall { name, descriptor: Some(descriptor) }, number)?;
        let micro_batches = match joins {
            true => self.micro_batches + self.agree_to_join(own)?,
            false => descriptor.micro_batches,
        };
        if micro_batches == 0 { Err(Error::NoMicroBatches) } else { Ok(()) }
    }

    /// Returns the number of micro-batches of all pipelines in a join. It is an error if the ranks of a pipeline have
    /// different numbers, or more than the schedule.
    fn agree_to_join(&mut self, own: usize) -> Result<usize> {
        let (all, ranks) = (self.of_all(&[to_be_summed(own as u64)])?, self.world.world_size());
        let number = |own: i64| usize::try_from(own).unwrap_or_default();
        for (pipeline, of_pipeline) in all.chunks(ranks).enumerate() {
            if let Some(rank) = of_pipeline.iter().position(|there| *there != of_pipeline[0]) {
                let (there, on_first) = (number(of_pipeline[rank]), number(of_pipeline[0]));
                return Err(Error::JoinsDiffer { pipeline, rank, there, on_first });
            }
        }
        let scheduled = self.pipeline.as_ref().map_or(0, |pipeline| pipeline.schedule.micro_batches());
        let firsts = || all.iter().step_by(ranks).map(|&own| number(own));
        match firsts().find(|&own| own > scheduled) {
            Some(given) => Err(Error::JoinedMicroBatches { scheduled, given }),
            None => Ok(firsts().sum()),
        }
    }

    /// Sums the numbers of a step over all ranks, except those behind the totals, which are summed over the ranks with
    /// the same stages. Returns the sum of all losses.
    ///
    /// Only the ranks of the last stage have losses. Those of all pipelines are added first, and the sums then in the
    /// canonical order.
    pub(crate) fn sum_over_pipelines(&mut self, numbers: &mut [i64]) -> Result<f32> {
        let mut loss = [sum_of(std::mem::take(&mut self.losses))];
        let Self { world, groups: Groups { shards, replicas, .. }, pipeline, .. } = self;
        let is_last = pipeline.as_ref().is_some_and(|pipeline| pipeline.last_rank() == world.rank());
        for group in [shards, replicas] {
            if is_last {
                group.all_reduce(&mut loss, ReduceOp::Sum).map_err(Error::communication)?;
            }
            group.all_reduce(numbers, ReduceOp::Sum).map_err(Error::communication)?;
        }
        // One rank of each pipeline has the loss, so a sum of its bits passes it on.
        let (own, _) = numbers.split_at_mut(StepConsensus::TOTALS);
        let mut totals = own.to_vec();
        totals.push(if is_last { loss[0].to_bits().into() } else { 0 });
        world.all_reduce(&mut totals, ReduceOp::Sum).map_err(Error::communication)?;
        let bits = totals.pop().and_then(|bits| u32::try_from(bits).ok());
        own.copy_from_slice(&totals);
        Ok(f32::from_bits(bits.expect("it was made of as many bits")))
    }

    /// Gathers numbers of every rank of all pipelines, in the order of the pipelines. All of them call this.
    fn of_all(&mut self, own: &[i64]) -> Result<Vec<i64>> {
        let calls = self.pipeline.iter_mut().map(|pipeline| &mut pipeline.call_groups);
        let others = calls.flat_map(|CallGroups { shards, data }| shards.iter_mut().chain(data));
        agreement::gather_over([&mut self.world].into_iter().chain(others), own.to_vec())
    }
}

/// Returns the error if the call of rank `at` differs from the first rank's call.
fn difference(first: [i64; 4], at: usize, call: [i64; 4]) -> Error {
    let rank = |call: [i64; 4]| usize::try_from(call[0]).unwrap_or_default();
    if first[1..3] == call[1..3] {
        let (there, on_rank_0) = (StepDescriptor::decode(call[3]), StepDescriptor::decode(first[3]));
        return Error::StepsDiffer { rank: at, there, on_rank_0 };
    }
    let (there, here) = (text([call[1], call[2]]), text([first[1], first[2]]));
    Error::CallsDiffer { rank: rank(call), there, other: Some(rank(first)), here, source: None }
}

/// Returns the first 16 bytes of a name as numbers.
fn words(name: &str) -> [i64; 2] {
    let mut bytes = [0; 16];
    let len = name.len().min(16);
    bytes[..len].copy_from_slice(&name.as_bytes()[..len]);
    bytemuck::cast(bytes)
}

/// Returns the name that [`words`] has encoded.
fn text(words: [i64; 2]) -> String {
    let bytes: [u8; 16] = bytemuck::cast(words);
    String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned()
}
