//! Operations that give all ranks, or one of them, what others have.

use dist_algos::Source;
use dist_algos::direct::Task;

use super::direct::Job;
use super::shares::Shares;
use super::{Engine, Manner, nothing_to_combine, partition, room};
use crate::{AllGather, Broadcast, Call, Element, Gather, Operation, Result, Scatter};

impl Engine {
    pub(crate) fn broadcast<T: Element>(
        &mut self,
        buffer: &mut [T],
        root: usize,
        manner: &Manner<'_>,
    ) -> Result<()> {
        self.check_root(Operation::Broadcast, root)?;
        let world_size = self.world_size();
        let job = Job::of::<T>(Task::Broadcast { root }, buffer.len(), size_of_val(buffer), manner.sizes);
        let largest = |parts| partition::<T>(buffer.len(), parts).chunk_bytes_max();
        if let Some(parts) = self.begin_directly::<Broadcast>(&job, largest, manner)? {
            let cut = partition::<T>(buffer.len(), parts);
            return self.run_directly((buffer, cut), None, None, &manner.due);
        }
        let algorithm = self.choose::<Broadcast>(size_of_val(buffer), manner)?;
        let call =
            Call { root: Some(self.code(root)), ..self.chosen::<T, _>(&algorithm, buffer.len(), manner) };
        let call = self.begin(call);
        let partition = partition::<T>(buffer.len(), algorithm.chunks(world_size));
        let rank = self.rank();
        let schedule = algorithm.steps(rank, root);
        self.run(&call, schedule, buffer, partition, &mut nothing_to_combine, manner.deadline())
    }

    pub(crate) fn all_gather<T: Element>(
        &mut self,
        input: &[T],
        output: &mut [T],
        manner: &Manner<'_>,
    ) -> Result<()> {
        self.check_parts(Operation::AllGather, output.len(), input.len())?;
        let shares = Shares::even(input.len(), self.world_size());
        self.all_gather_shares(input, &shares, output, manner)
    }

    pub(crate) fn all_gather_v<T: Element>(
        &mut self,
        input: &[T],
        counts: &[usize],
        output: &mut [T],
        manner: &Manner<'_>,
    ) -> Result<()> {
        let operation = Operation::AllGather;
        let shares = Shares::counted(operation, counts, self.world_size())?;
        Self::check_length(operation, "input", counts[self.rank().index()], input.len())?;
        Self::check_length(operation, "output", shares.total(), output.len())?;
        self.all_gather_shares(input, &shares, output, manner)
    }

    pub(crate) fn all_gather_in_place<T: Element>(
        &mut self,
        buffer: &mut [T],
        manner: &Manner<'_>,
    ) -> Result<()> {
        let part = self.check_divisible(Operation::AllGather, buffer.len())?;
        self.all_gather_in(&Shares::even(part, self.world_size()), buffer, manner)
    }

    fn all_gather_shares<T: Element>(
        &mut self,
        input: &[T],
        shares: &Shares,
        output: &mut [T],
        manner: &Manner<'_>,
    ) -> Result<()> {
        let own = self.rank().index();
        if self.begin_gather::<T>(Source::Input, shares, manner)? {
            let (part, whole) = (shares.of(own..own + 1), shares.partition::<T>());
            let input = Some((input, part.partition::<T>()));
            return self.run_directly((output, whole), input, None, &manner.due);
        }
        output[shares.range(own)].copy_from_slice(input);
        self.all_gather_by_messages(shares, output, manner)
    }

    fn all_gather_in<T: Element>(
        &mut self,
        shares: &Shares,
        buffer: &mut [T],
        manner: &Manner<'_>,
    ) -> Result<()> {
        if self.begin_gather::<T>(Source::Buffer, shares, manner)? {
            let memory = (buffer, shares.partition::<T>());
            return self.run_directly(memory, None, None, &manner.due);
        }
        self.all_gather_by_messages(shares, buffer, manner)
    }

    /// Begins an all_gather that is done directly; not, if it is done by messages.
    fn begin_gather<T: Element>(&mut self, of: Source, shares: &Shares, manner: &Manner<'_>) -> Result<bool> {
        let job = Job::of::<T>(
            Task::AllGather { of },
            shares.count(),
            shares.total().saturating_mul(size_of::<T>()),
            shares.digest(manner.sizes),
        );
        let largest = |_| shares.partition::<T>().chunk_bytes_max();
        Ok(self.begin_directly::<AllGather>(&job, largest, manner)?.is_some())
    }

    fn all_gather_by_messages<T: Element>(
        &mut self,
        shares: &Shares,
        buffer: &mut [T],
        manner: &Manner<'_>,
    ) -> Result<()> {
        let rank = self.rank();
        let algorithm = self.choose::<AllGather>(size_of_val(buffer), manner)?;
        let schedule = algorithm.steps(rank, rank.index());
        let call = self.begin(self.shared::<T, _>(&algorithm, shares, manner));
        self.run(&call, schedule, buffer, shares.partition::<T>(), &mut nothing_to_combine, manner.deadline())
    }

    pub(crate) fn gather<T: Element>(
        &mut self,
        input: &[T],
        output: &mut [T],
        root: usize,
        manner: &Manner<'_>,
    ) -> Result<()> {
        if self.rank().index() == root {
            self.check_parts(Operation::Gather, output.len(), input.len())?;
        }
        let shares = Shares::even(input.len(), self.world_size());
        self.gather_shares(input, &shares, output, root, manner)
    }

    pub(crate) fn gather_v<T: Element>(
        &mut self,
        input: &[T],
        counts: &[usize],
        output: &mut [T],
        root: usize,
        manner: &Manner<'_>,
    ) -> Result<()> {
        let operation = Operation::Gather;
        let shares = Shares::counted(operation, counts, self.world_size())?;
        Self::check_length(operation, "input", counts[self.rank().index()], input.len())?;
        if self.rank().index() == root {
            Self::check_length(operation, "output", shares.total(), output.len())?;
        }
        self.gather_shares(input, &shares, output, root, manner)
    }

    fn gather_shares<T: Element>(
        &mut self,
        input: &[T],
        shares: &Shares,
        output: &mut [T],
        root: usize,
        manner: &Manner<'_>,
    ) -> Result<()> {
        self.check_root(Operation::Gather, root)?;
        let rank = self.rank();
        let algorithm = self.choose::<Gather>(shares.total().saturating_mul(size_of::<T>()), manner)?;
        let call = self
            .begin(Call { root: Some(self.code(root)), ..self.shared::<T, _>(&algorithm, shares, manner) });
        let own = shares.of(rank.index()..rank.index() + 1);
        let algorithm = algorithm.flat();
        let held = algorithm.held(rank, root);
        let passing = shares.of(held.first()..held.end());
        let mut memory = std::mem::take(&mut self.copy);
        let buffer = match rank.index() {
            index if index == root => output,
            _ => room(&mut memory, passing.total(), &mut *self.transport)?,
        };
        if !held.is_empty() {
            buffer[passing.range(rank.index())].copy_from_slice(input);
        }
        let steps = algorithm.schedule(rank, root);
        let done = self.run_from(
            &call,
            steps,
            (input, own.partition::<T>()),
            (buffer, passing.partition::<T>()),
            manner.deadline(),
        );
        self.copy = memory;
        done
    }

    pub(crate) fn scatter<T: Element>(
        &mut self,
        input: &[T],
        output: &mut [T],
        root: usize,
        manner: &Manner<'_>,
    ) -> Result<()> {
        if self.rank().index() == root {
            self.check_parts(Operation::Scatter, input.len(), output.len())?;
        }
        let shares = Shares::even(output.len(), self.world_size());
        self.scatter_shares(input, &shares, output, root, manner)
    }

    pub(crate) fn scatter_v<T: Element>(
        &mut self,
        input: &[T],
        counts: &[usize],
        output: &mut [T],
        root: usize,
        manner: &Manner<'_>,
    ) -> Result<()> {
        let operation = Operation::Scatter;
        let shares = Shares::counted(operation, counts, self.world_size())?;
        Self::check_length(operation, "output", counts[self.rank().index()], output.len())?;
        if self.rank().index() == root {
            Self::check_length(operation, "input", shares.total(), input.len())?;
        }
        self.scatter_shares(input, &shares, output, root, manner)
    }

    fn scatter_shares<T: Element>(
        &mut self,
        input: &[T],
        shares: &Shares,
        output: &mut [T],
        root: usize,
        manner: &Manner<'_>,
    ) -> Result<()> {
        self.check_root(Operation::Scatter, root)?;
        let rank = self.rank();
        let algorithm = self.choose::<Scatter>(shares.total().saturating_mul(size_of::<T>()), manner)?;
        let call = self
            .begin(Call { root: Some(self.code(root)), ..self.shared::<T, _>(&algorithm, shares, manner) });
        let algorithm = algorithm.flat();
        let held = algorithm.held(rank, root);
        let passing = shares.of(held.first()..held.end());
        let source = shares.of(if rank.index() == root { 0..rank.world_size() } else { 0..0 });
        let source = (if rank.index() == root { input } else { &[] }, source.partition::<T>());
        let steps = algorithm.schedule(rank, root);
        if passing.total() == output.len() && held.first() == rank.index() {
            // Nothing but its own part comes to this rank.
            let cut = passing.partition::<T>();
            return self.run_from(&call, steps, source, (output, cut), manner.deadline());
        }
        let mut memory = std::mem::take(&mut self.copy);
        let buffer = room(&mut memory, passing.total(), &mut *self.transport)?;
        let cut = passing.partition::<T>();
        let done = self.run_from(&call, steps, source, (buffer, cut), manner.deadline());
        if done.is_ok() {
            output.copy_from_slice(if held.is_empty() {
                &input[shares.range(rank.index())]
            } else {
                &buffer[passing.range(rank.index())]
            });
        }
        self.copy = memory;
        done
    }
}
