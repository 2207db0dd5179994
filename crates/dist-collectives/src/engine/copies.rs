//! Operations that copy elements without reducing them: broadcast, all_gather, gather and scatter.

use bytemuck::Pod;
use dist_algos::direct::DirectCollective;
use dist_algos::{MessageAlgorithm, Source};

use super::memory::{CallBuffer, CallInput, CallOperands};
use super::plan_cache::{CallKey, Collective, PlanId};
use super::rank_layout::RankLayout;
use super::{CallOptions, Engine, copy, partition, reserve};
use crate::{Operation, Result};

impl Engine {
    pub(crate) fn broadcast<T: Pod>(
        &mut self,
        buffer: &mut [T],
        root: usize,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.check_root(Operation::Broadcast, root)?;
        let collective = Collective::Direct(DirectCollective::Broadcast { root });
        let key = CallKey::of::<T>(collective, buffer.len(), size_of_val(buffer), options.sizes);
        let largest = |parts| partition(buffer.len(), size_of::<T>(), parts).chunk_bytes_max();
        let plan = self.compile(&key, largest, options)?;
        self.execute_moving(plan, CallOperands::of(buffer), options)
    }

    pub(crate) fn all_gather<T: Pod>(
        &mut self,
        input: CallInput<'_, T>,
        counts: Option<&[usize]>,
        output: &mut [T],
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let (operation, whole) = (Operation::AllGather, Some(("output", output.len())));
        let layout = &self.layout(operation, counts, ("input", input.elements.len()), whole)?;
        let own = layout.of_rank(self.rank.index());
        let collective = Collective::Direct(DirectCollective::AllGather { of: Source::Input });
        let key = CallKey::in_parts::<T>(collective, layout, options).on(input.ownership);
        let plan = self.compile_in_parts::<T>(&key, layout, options)?;
        let memory = CallOperands::in_parts(output, layout).with_input(input.elements, &own);
        self.execute_moving(plan, memory, options)
    }

    pub(crate) fn all_gather_in_place<'a, T: Pod>(
        &mut self,
        buffer: impl Into<CallBuffer<'a, T>>,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let mut buffer = buffer.into();
        let part = self.check_divisible(Operation::AllGather, buffer.elements().len())?;
        let layout = &RankLayout::even(part, self.world_size());
        let collective = Collective::Direct(DirectCollective::AllGather { of: Source::Buffer });
        let key = CallKey::in_parts::<T>(collective, layout, options).on(buffer.ownership());
        let plan = self.compile_in_parts::<T>(&key, layout, options)?;
        self.execute_moving(plan, CallOperands::in_parts(buffer.into_elements(), layout), options)
    }

    pub(crate) fn gather<T: Pod>(
        &mut self,
        input: &[T],
        counts: Option<&[usize]>,
        output: &mut [T],
        root: usize,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let whole = (self.rank.index() == root).then_some(("output", output.len()));
        let layout = &self.layout(Operation::Gather, counts, ("input", input.len()), whole)?;
        self.check_root(Operation::Gather, root)?;
        let (rank, collective) = (self.rank, Collective::Gather { root });
        let (plan, algorithm) = self.compile_rooted::<T>(collective, layout, options)?;
        let held = algorithm.held(rank, root);
        let (own, passing) = (layout.of_rank(rank.index()), layout.of(held.first()..held.end()));
        let mut memory = std::mem::take(&mut self.copy);
        let buffer = match rank.index() {
            index if index == root => output,
            _ => reserve(&mut memory, passing.total(), &mut *self.transport)?,
        };
        let all = CallOperands::in_parts(buffer, &passing).with_input(input, &own);
        let done = self.execute_moving(plan, all, options);
        self.copy = memory;
        done
    }

    pub(crate) fn scatter<T: Pod>(
        &mut self,
        input: &[T],
        counts: Option<&[usize]>,
        output: &mut [T],
        root: usize,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let whole = (self.rank.index() == root).then_some(("input", input.len()));
        let layout = &self.layout(Operation::Scatter, counts, ("output", output.len()), whole)?;
        self.check_root(Operation::Scatter, root)?;
        let (rank, collective) = (self.rank, Collective::Scatter { root });
        let (plan, algorithm) = self.compile_rooted::<T>(collective, layout, options)?;
        let held = algorithm.held(rank, root);
        let passing = layout.of(held.first()..held.end());
        let source = layout.of(if rank.index() == root { 0..rank.world_size() } else { 0..0 });
        let sent = if rank.index() == root { input } else { &[] };
        if passing.total() == output.len() && held.first() == rank.index() {
            // This rank receives only its own part.
            let memory = CallOperands::in_parts(output, &passing).with_input(sent, &source);
            return self.execute_moving(plan, memory, options);
        }
        let mut memory = std::mem::take(&mut self.copy);
        let buffer = reserve(&mut memory, passing.total(), &mut *self.transport)?;
        let all = CallOperands::in_parts(&mut *buffer, &passing).with_input(sent, &source);
        let done = self.execute_moving(plan, all, options);
        if done.is_ok() {
            let part = if held.is_empty() {
                &input[layout.range(rank.index())]
            } else {
                &buffer[passing.range(rank.index())]
            };
            copy(part, output);
        }
        self.copy = memory;
        done
    }

    /// Compiles a gather or a scatter. Returns the plan and its algorithm.
    fn compile_rooted<T: Pod>(
        &mut self,
        collective: Collective,
        layout: &RankLayout,
        options: &CallOptions<'_>,
    ) -> Result<(PlanId, &'static MessageAlgorithm)> {
        let key = CallKey::in_parts::<T>(collective, layout, options);
        let plan = self.compile_in_parts::<T>(&key, layout, options)?;
        let algorithm = self.plan_cache.get(plan).message_algorithm();
        Ok((plan, algorithm.expect("gather and scatter have no other algorithms")))
    }
}
