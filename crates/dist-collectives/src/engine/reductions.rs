//! Operations that combine elements of different ranks.

use super::{Engine, Manner, copy_of, partition};
use crate::{AllReduce, Call, Element, Operation, Reduce, ReduceOp, ReduceScatter, Result};

impl Engine {
    pub(crate) fn all_reduce<T: Element>(
        &mut self,
        buffer: &mut [T],
        op: ReduceOp,
        manner: Manner,
    ) -> Result<()> {
        Self::check_op::<T>(op)?;
        let (world_size, deadline) = (self.world_size(), manner.deadline);
        let algorithm: AllReduce = manner.settings.choose(world_size, size_of_val(buffer))?;
        let call = self.begin(self.reduction::<T>(algorithm, buffer.len(), op, manner));
        let arithmetic = self.arithmetic::<T>(&call, op, deadline)?;
        arithmetic.prepare(buffer);
        let partition = partition::<T>(buffer.len(), algorithm.chunks(world_size));
        let phases = algorithm.phases(self.rank());
        let combine = &mut arithmetic.combine::<T>();
        self.run(&call, phases.reduce, buffer, partition, combine, deadline)?;
        for chunk in phases.owned.indices() {
            let bytes = partition.range(chunk);
            arithmetic.finish(&mut buffer[bytes.start / size_of::<T>()..bytes.end / size_of::<T>()]);
        }
        self.run(&call, phases.gather, buffer, partition, combine, deadline)
    }

    pub(crate) fn reduce<T: Element>(
        &mut self,
        buffer: &mut [T],
        op: ReduceOp,
        root: usize,
        manner: Manner,
    ) -> Result<()> {
        let root_code = self.check_root(Operation::Reduce, root)?;
        Self::check_op::<T>(op)?;
        let (world_size, deadline) = (self.world_size(), manner.deadline);
        let algorithm: Reduce = manner.settings.choose(world_size, size_of_val(buffer))?;
        let call = Call { root: Some(root_code), ..self.reduction::<T>(algorithm, buffer.len(), op, manner) };
        let call = self.begin(call);
        let arithmetic = self.arithmetic::<T>(&call, op, deadline)?;
        arithmetic.prepare(buffer);
        let partition = partition::<T>(buffer.len(), algorithm.chunks(world_size));
        let schedule = algorithm.schedule(self.rank(), root);
        self.run(&call, schedule, buffer, partition, &mut arithmetic.combine::<T>(), deadline)?;
        if self.rank().index() == root {
            arithmetic.finish(buffer);
        }
        Ok(())
    }

    pub(crate) fn reduce_scatter<T: Element>(
        &mut self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
        manner: Manner,
    ) -> Result<()> {
        self.check_parts(Operation::ReduceScatter, input.len(), output.len())?;
        let mut memory = std::mem::take(&mut self.copy);
        let copy = copy_of(&mut memory, input);
        let done = self.reduce_scatter_in_place(copy, op, manner).map(|part| output.copy_from_slice(part));
        self.copy = memory;
        done
    }

    /// The own part of the buffer, which has the result.
    pub(crate) fn reduce_scatter_in_place<'a, T: Element>(
        &mut self,
        buffer: &'a mut [T],
        op: ReduceOp,
        manner: Manner,
    ) -> Result<&'a mut [T]> {
        let part = self.check_divisible(Operation::ReduceScatter, buffer.len())?;
        Self::check_op::<T>(op)?;
        let (rank, deadline) = (self.rank(), manner.deadline);
        let algorithm: ReduceScatter = manner.settings.choose(rank.world_size(), size_of_val(buffer))?;
        let schedule = algorithm.schedule(rank).expect("settings choose what the world supports");
        let call = self.begin(self.reduction::<T>(algorithm, part, op, manner));
        let arithmetic = self.arithmetic::<T>(&call, op, deadline)?;
        arithmetic.prepare(buffer);
        let partition = partition::<T>(buffer.len(), rank.world_size());
        self.run(&call, schedule, buffer, partition, &mut arithmetic.combine::<T>(), deadline)?;
        let own = &mut buffer[rank.index() * part..][..part];
        arithmetic.finish(own);
        Ok(own)
    }
}
