//! Operations that copy elements of some ranks to all ranks, or to one rank.

use dist_algos::direct::{DirectCollective, Ownership};
use dist_algos::{MessageAlgorithm, Source};

use super::arithmetic::Arithmetic;
use super::direct::{Input, ReductionBuffer};
use super::plan_cache::{CallKey, Collective, ProgramKind};
use super::rank_layout::RankLayout;
use super::{CallOptions, Engine, copy, from_input, in_place, nothing_to_combine, partition, room};
use crate::{Element, Operation, Result};

impl Engine {
    pub(crate) fn broadcast<T: Element>(
        &mut self,
        buffer: &mut [T],
        root: usize,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.check_root(Operation::Broadcast, root)?;
        let collective = Collective::Direct(DirectCollective::Broadcast { root });
        let key = CallKey::of::<T>(collective, buffer.len(), size_of_val(buffer), options.sizes);
        let largest = |parts| partition::<T>(buffer.len(), parts).chunk_bytes_max();
        match self.begin_collective(&key, largest, options)? {
            ProgramKind::Direct { parts } => {
                let partition = partition::<T>(buffer.len(), parts);
                self.run_directly((buffer, partition), None, &Arithmetic::NONE, &options.due)
            }
            ProgramKind::Messages { chunks } => {
                let partition = partition::<T>(buffer.len(), chunks);
                self.run(in_place(buffer, partition), &mut nothing_to_combine, &options.due)
            }
        }
    }

    pub(crate) fn all_gather<T: Element>(
        &mut self,
        input: Input<'_, T>,
        counts: Option<&[usize]>,
        output: &mut [T],
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let (operation, whole) = (Operation::AllGather, Some(("output", output.len())));
        let layout = &self.layout(operation, counts, ("input", input.len()), whole)?;
        let own = self.rank.index();
        let collective = Collective::Direct(DirectCollective::AllGather { of: Source::Input });
        let program = self.begin_with_layout::<T>(collective, None, input.ownership(), layout, options)?;
        let input = input.elements();
        match program {
            ProgramKind::Direct { .. } => {
                let (part, whole) = (layout.of(own..own + 1), layout.partition::<T>());
                let input = Some((input, part.partition::<T>()));
                self.run_directly((output, whole), input, &Arithmetic::NONE, &options.due)
            }
            ProgramKind::Messages { .. } => {
                copy(input, &mut output[layout.range(own)]);
                let memory = in_place(output, layout.partition::<T>());
                self.run(memory, &mut nothing_to_combine, &options.due)
            }
        }
    }

    pub(crate) fn all_gather_in_place<'a, T: Element>(
        &mut self,
        held: impl Into<ReductionBuffer<'a, T>>,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let (buffer, ownership) = held.into().into_parts();
        let part = self.check_divisible(Operation::AllGather, buffer.len())?;
        let layout = RankLayout::even(part, self.world_size());
        let collective = Collective::Direct(DirectCollective::AllGather { of: Source::Buffer });
        let program = self.begin_with_layout::<T>(collective, None, ownership, &layout, options)?;
        let partition = layout.partition::<T>();
        match program {
            ProgramKind::Direct { .. } => {
                self.run_directly((buffer, partition), None, &Arithmetic::NONE, &options.due)
            }
            ProgramKind::Messages { .. } => {
                self.run(in_place(buffer, partition), &mut nothing_to_combine, &options.due)
            }
        }
    }

    pub(crate) fn gather<T: Element>(
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
        let algorithm = self.begin_rooted::<T>(collective, layout, options)?;
        let own = layout.of(rank.index()..rank.index() + 1);
        let held = algorithm.held(rank, root);
        let passing = layout.of(held.first()..held.end());
        let mut memory = std::mem::take(&mut self.copy);
        let buffer = match rank.index() {
            index if index == root => output,
            _ => room(&mut memory, passing.total(), &mut *self.transport)?,
        };
        if !held.is_empty() {
            copy(input, &mut buffer[passing.range(rank.index())]);
        }
        let all = from_input((input, own.partition::<T>()), (buffer, passing.partition::<T>()));
        let done = self.run(all, &mut nothing_to_combine, &options.due);
        self.copy = memory;
        done
    }

    pub(crate) fn scatter<T: Element>(
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
        let algorithm = self.begin_rooted::<T>(collective, layout, options)?;
        let held = algorithm.held(rank, root);
        let passing = layout.of(held.first()..held.end());
        let source = layout.of(if rank.index() == root { 0..rank.world_size() } else { 0..0 });
        let source = (if rank.index() == root { input } else { &[] }, source.partition::<T>());
        if passing.total() == output.len() && held.first() == rank.index() {
            // This rank receives only its own part.
            let partition = passing.partition::<T>();
            let memory = from_input(source, (output, partition));
            return self.run(memory, &mut nothing_to_combine, &options.due);
        }
        let mut memory = std::mem::take(&mut self.copy);
        let buffer = room(&mut memory, passing.total(), &mut *self.transport)?;
        let partition = passing.partition::<T>();
        let all = from_input(source, (&mut *buffer, partition));
        let done = self.run(all, &mut nothing_to_combine, &options.due);
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

    /// Begins a gather or a scatter and returns the algorithm.
    fn begin_rooted<T: Element>(
        &mut self,
        collective: Collective,
        layout: &RankLayout,
        options: &CallOptions<'_>,
    ) -> Result<&'static MessageAlgorithm> {
        self.begin_with_layout::<T>(collective, None, [Ownership::Borrowed; 2], layout, options)?;
        Ok(self.flat().1)
    }
}
