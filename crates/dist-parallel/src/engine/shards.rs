//! The state that a rank has in a checkpoint: its shard of every flat parameter, and all buffers.

use super::{Agreement, StepEngine};
use crate::checkpoint::accumulated;
use crate::fsdp::{Degrees, ShardChunk};
use crate::{
    Chunk, Communicator, ParamInfo, Params, Result, ShardMetadata, Shards, Slice, Values, ValuesMut,
    mutation_check,
};

impl<M: Params> Shards for StepEngine<M> {
    fn infos(&self) -> &[ParamInfo] {
        &self.kept
    }

    fn parameters(&self) -> ShardMetadata<Chunk> {
        self.held(self.held_chunks())
    }

    fn slices(&self) -> ShardMetadata<Slice> {
        let trained = self.chunks().into_iter().filter(|(_, chunk)| self.kept[chunk.parameter].trainable);
        let slice =
            |(_, chunk): (_, ShardChunk)| Slice { number: chunk.parameter, chunk: chunk.in_parameter() };
        self.held(trained.map(slice).collect())
    }

    fn untrained_to_save(&self) -> Vec<Chunk> {
        let saves = |chunk: &Chunk| match self.stage.plan.layout.locations[chunk.parameter] {
            Some(_) => self.replicas().rank() == 0 && !self.kept[chunk.parameter].trainable,
            None => self.world.rank() == 0,
        };
        self.held_chunks().into_iter().filter(saves).collect()
    }

    fn frozen_checksums(&self) -> Result<Vec<(usize, u32)>> {
        let Degrees { shards, frees, .. } = self.stage.plan.degrees;
        if frees || shards == 1 {
            return Ok(Vec::new());
        }
        let flat_params = self.stage.plan.layout.flat_params().map(|(_, flat_param)| flat_param);
        let frozen = flat_params.filter(|flat_param| !flat_param.trainable);
        let places = frozen.flat_map(|flat_param| &flat_param.places);
        places
            .map(|place| Ok((place.parameter, mutation_check::checksum(&self.stage.model, place.parameter)?)))
            .collect()
    }

    fn unsaved(&self) -> Option<String> {
        accumulated(self.micro_batches)
    }

    fn read(&self, chunk: Chunk, f: &mut dyn FnMut(Values<'_>)) -> Result<()> {
        self.stage.read(chunk, self.groups.shards.rank(), f)
    }

    fn write(&mut self, chunk: Chunk, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<()> {
        self.stage.change(chunk, self.groups.shards.rank(), |values| {
            f(values);
            Ok(())
        })
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
        self.stage.model.begin_forward(pass);
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

impl<M: Params> StepEngine<M> {
    fn held_chunks(&self) -> Vec<Chunk> {
        self.stage.plan.layout.held_chunks(self.groups.shards.rank())
    }

    /// Returns the ranks that hold the same state.
    fn replicas(&self) -> &Communicator {
        match self.agreement {
            Agreement::OwnRank => &self.world,
            Agreement::BeforeRounds | Agreement::AtEnd => &self.groups.replicas,
        }
    }

    fn held<T>(&self, chunks: Vec<T>) -> ShardMetadata<T> {
        let replicas = self.replicas();
        ShardMetadata { chunks, copy: replicas.rank(), copies: replicas.world_size() }
    }
}
