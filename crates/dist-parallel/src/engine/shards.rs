//! The state that a rank has in a checkpoint: its shard of every flat parameter, and all buffers.

use super::StepEngine;
use crate::checkpoint::accumulated;
use crate::fsdp::{Degrees, ReplicatedParameter, ShardChunk};
use crate::{
    Chunk, Communicator, Error, ParamInfo, Params, Result, ShardMetadata, Shards, Slice, Values, ValuesMut,
    mutation_check, params,
};

impl<M: Params> Shards for StepEngine<M> {
    fn infos(&self) -> &[ParamInfo] {
        &self.kept
    }

    fn parameters(&self) -> ShardMetadata<Chunk> {
        self.held(self.held_chunks().into_iter().map(HeldState::chunk).collect())
    }

    fn slices(&self) -> ShardMetadata<Slice> {
        let trained = self.chunks().into_iter().filter(|(_, chunk)| self.kept[chunk.parameter].trainable);
        let slice = |(_, chunk): (_, ShardChunk)| Slice { number: chunk.parameter, chunk: outside(chunk) };
        self.held(trained.map(slice).collect())
    }

    fn untrained_to_save(&self) -> Vec<Chunk> {
        let saves = |held: &HeldState| match held {
            HeldState::Part(_, chunk) => {
                self.groups.replicas.rank() == 0 && !self.kept[chunk.parameter].trainable
            }
            HeldState::ReplicatedParameter(_) => self.world.rank() == 0,
        };
        self.held_chunks().into_iter().filter(saves).map(HeldState::chunk).collect()
    }

    fn frozen_checksums(&self) -> Result<Vec<(usize, u32)>> {
        let Degrees { shards, frees, .. } = self.plan.degrees;
        if frees || shards == 1 {
            return Ok(Vec::new());
        }
        let flat_params = self.plan.layout.flat_params().map(|(_, flat_param)| flat_param);
        let frozen = flat_params.filter(|flat_param| !flat_param.trainable);
        let places = frozen.flat_map(|flat_param| &flat_param.places);
        places
            .map(|place| Ok((place.parameter, mutation_check::checksum(&self.model, place.parameter)?)))
            .collect()
    }

    fn unsaved(&self) -> Option<String> {
        accumulated(self.micro_batches)
    }

    fn read(&self, chunk: Chunk, f: &mut dyn FnMut(Values<'_>)) -> Result<()> {
        match self.locate_chunk(chunk)? {
            HeldState::Part(place, chunk) => self.parameters.read(place, chunk, &self.model, f),
            HeldState::ReplicatedParameter(whole) => params::read(&self.model, whole.parameter, f),
        }
    }

    fn write(&mut self, chunk: Chunk, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<()> {
        let change = |values: ValuesMut<'_>| {
            f(values);
            Ok(())
        };
        match self.locate_chunk(chunk)? {
            HeldState::Part(place, chunk) => self.parameters.change(place, chunk, &mut self.model, change),
            HeldState::ReplicatedParameter(whole) => params::write(&mut self.model, whole.parameter, change),
        }
    }

    fn updates(&self) -> u64 {
        self.updates.hash()
    }

    fn check_alike(&mut self) -> Result<()> {
        let Self { updates, world, kept, .. } = self;
        updates.check(&mut [world], kept)
    }

    fn loaded(&mut self) -> Result<()> {
        self.reset()?;
        self.all_gather_updates(|_| true)
    }

    fn steps(&self) -> u64 {
        self.passes.steps()
    }

    fn set_steps(&mut self, steps: u64) {
        let pass = self.passes.set_steps(steps);
        self.model.begin_forward(pass);
    }

    fn communicator_mut(&mut self) -> &mut Communicator {
        &mut self.world
    }
}

/// Implements [`Shards`] for a trainer by its `engine`.
macro_rules! delegate_shards {
    (<$parameter:ident $(: $bound:path)?> $trainer:ty) => {
        impl<$parameter $(: $bound)?> $crate::Shards for $trainer {
            fn infos(&self) -> &[$crate::ParamInfo] {
                $crate::Shards::infos(&self.engine)
            }

            fn parameters(&self) -> $crate::ShardMetadata<$crate::Chunk> {
                self.engine.parameters()
            }

            fn untrained_to_save(&self) -> Vec<$crate::Chunk> {
                self.engine.untrained_to_save()
            }

            fn slices(&self) -> $crate::ShardMetadata<$crate::Slice> {
                self.engine.slices()
            }

            fn unsaved(&self) -> Option<String> {
                self.engine.unsaved()
            }

            fn read(&self, chunk: $crate::Chunk, f: &mut dyn FnMut($crate::Values<'_>)) -> $crate::Result<()> {
                self.engine.read(chunk, f)
            }

            fn write(
                &mut self,
                chunk: $crate::Chunk,
                f: &mut dyn FnMut($crate::ValuesMut<'_>),
            ) -> $crate::Result<()> {
                self.engine.write(chunk, f)
            }

            fn frozen_checksums(&self) -> $crate::Result<Vec<(usize, u32)>> {
                self.engine.frozen_checksums()
            }

            fn check_alike(&mut self) -> $crate::Result<()> {
                self.engine.check_alike()
            }

            fn updates(&self) -> u64 {
                self.engine.updates()
            }

            fn loaded(&mut self) -> $crate::Result<()> {
                self.engine.loaded()
            }

            fn steps(&self) -> u64 {
                self.engine.steps()
            }

            fn set_steps(&mut self, steps: u64) {
                self.engine.set_steps(steps);
            }

            fn communicator_mut(&mut self) -> &mut $crate::Communicator {
                &mut self.engine.world
            }
        }
    };
}

pub(crate) use delegate_shards;

/// The values that a rank holds of one parameter.
#[derive(Clone, Copy)]
enum HeldState {
    /// A chunk of its shard of a flat parameter, and the position of the flat parameter.
    Part((usize, usize), ShardChunk),
    /// All of a buffer.
    ReplicatedParameter(ReplicatedParameter),
}

impl HeldState {
    const fn chunk(self) -> Chunk {
        match self {
            Self::Part(_, chunk) => outside(chunk),
            Self::ReplicatedParameter(ReplicatedParameter { parameter, len, .. }) => {
                Chunk { parameter, offset: 0, len }
            }
        }
    }
}

impl<M: Params> StepEngine<M> {
    /// Returns everything that this rank holds, in the order of the checkpoint.
    fn held_chunks(&self) -> Vec<HeldState> {
        let parts = self.chunks().into_iter().map(|(place, chunk)| HeldState::Part(place, chunk));
        parts.chain(self.plan.layout.buffers().map(HeldState::ReplicatedParameter)).collect()
    }

    fn held<T>(&self, chunks: Vec<T>) -> ShardMetadata<T> {
        let replicas = &self.groups.replicas;
        ShardMetadata { chunks, copy: replicas.rank(), copies: replicas.world_size() }
    }

    /// Returns this rank's location of a chunk: the position of its flat parameter and the chunk in this rank's
    /// shard, or a buffer.
    fn locate_chunk(&self, chunk: Chunk) -> Result<HeldState> {
        let index = chunk.parameter;
        let Some(location) = *self.plan.layout.locations.get(index).ok_or(Error::NoSlot { index })? else {
            let dtype = self.kept[index].dtype;
            return Ok(HeldState::ReplicatedParameter(ReplicatedParameter {
                parameter: index,
                len: chunk.len,
                dtype,
            }));
        };
        let flat_param = &self.plan.layout.units[location.unit].flat_params[location.flat_param];
        let kept = flat_param.chunk(location.place, self.groups.shards.rank());
        let kept = kept.filter(|kept| outside(*kept) == chunk).ok_or(Error::Freed)?;
        Ok(HeldState::Part((location.unit, location.flat_param), kept))
    }
}

/// Converts a chunk of a shard to a chunk of a parameter.
const fn outside(chunk: ShardChunk) -> Chunk {
    Chunk { parameter: chunk.parameter, offset: chunk.offset, len: chunk.len }
}
