//! Operations that move elements and combine none.

use super::{Engine, Manner, nothing_to_combine, partition};
use crate::{AllGather, Barrier, Broadcast, Call, Element, Operation, Result};

impl Engine {
    pub(crate) fn all_gather<T: Element>(
        &mut self,
        input: &[T],
        output: &mut [T],
        manner: Manner,
    ) -> Result<()> {
        self.check_parts(Operation::AllGather, output.len(), input.len())?;
        output[self.rank().index() * input.len()..][..input.len()].copy_from_slice(input);
        self.all_gather_in_place(output, manner)
    }

    pub(crate) fn all_gather_in_place<T: Element>(&mut self, buffer: &mut [T], manner: Manner) -> Result<()> {
        let part = self.check_divisible(Operation::AllGather, buffer.len())?;
        let rank = self.rank();
        let algorithm: AllGather = manner.settings.choose(rank.world_size(), size_of_val(buffer))?;
        let schedule = algorithm.schedule(rank).expect("settings choose what the world supports");
        let call = self.begin(Call { sizes: manner.sizes, ..self.collective::<T>(algorithm, part) });
        let partition = partition::<T>(buffer.len(), rank.world_size());
        self.run(&call, schedule, buffer, partition, &mut nothing_to_combine, manner.deadline)
    }

    pub(crate) fn broadcast<T: Element>(
        &mut self,
        buffer: &mut [T],
        root: usize,
        manner: Manner,
    ) -> Result<()> {
        let root_code = self.check_root(Operation::Broadcast, root)?;
        let world_size = self.world_size();
        let algorithm: Broadcast = manner.settings.choose(world_size, size_of_val(buffer))?;
        let call = self.collective::<T>(algorithm, buffer.len());
        let call = self.begin(Call { root: Some(root_code), sizes: manner.sizes, ..call });
        let partition = partition::<T>(buffer.len(), algorithm.chunks(world_size));
        let schedule = algorithm.schedule(self.rank(), root);
        self.run(&call, schedule, buffer, partition, &mut nothing_to_combine, manner.deadline)
    }

    pub(crate) fn barrier(&mut self, manner: Manner) -> Result<()> {
        let algorithm: Barrier = manner.settings.choose(self.world_size(), 0)?;
        let call = self.begin(Call { dtype: None, ..self.collective::<u8>(algorithm, 0) });
        let (schedule, nothing) = (algorithm.schedule(self.rank()), partition::<u8>(0, 1));
        self.run::<u8>(&call, schedule, &mut [], nothing, &mut nothing_to_combine, manner.deadline)
    }
}
