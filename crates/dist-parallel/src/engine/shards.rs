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

/// Implements [`Shards`](crate::checkpoint::Shards) for a trainer by one of its fields. `loaded` is called before that of
/// the field.
#[doc(hidden)]
#[macro_export]
macro_rules! __delegate_shards {
    (
        $(#[$meta:meta])*
        impl $(<$parameter:ident $(: $bound:path)?>)? Shards for $trainer:ty, $field:ident $(, $loaded:path)?
    ) => {
        $(#[$meta])*
        impl $(<$parameter $(: $bound)?>)? $crate::checkpoint::Shards for $trainer {
            fn infos(&self) -> &[$crate::ParamInfo] {
                $crate::checkpoint::Shards::infos(&self.$field)
            }

            fn parameters(&self) -> $crate::checkpoint::ShardMetadata<$crate::checkpoint::Chunk> {
                $crate::checkpoint::Shards::parameters(&self.$field)
            }

            fn untrained_to_save(&self) -> Vec<$crate::checkpoint::Chunk> {
                $crate::checkpoint::Shards::untrained_to_save(&self.$field)
            }

            fn slices(&self) -> $crate::checkpoint::ShardMetadata<$crate::checkpoint::Slice> {
                $crate::checkpoint::Shards::slices(&self.$field)
            }

            fn unsaved(&self) -> Option<String> {
                $crate::checkpoint::Shards::unsaved(&self.$field)
            }

            fn leaves_out(&self, tensor: &str) -> bool {
                $crate::checkpoint::Shards::leaves_out(&self.$field, tensor)
            }

            fn read(
                &self,
                chunk: $crate::checkpoint::Chunk,
                f: &mut dyn FnMut($crate::Values<'_>),
            ) -> $crate::Result<()> {
                $crate::checkpoint::Shards::read(&self.$field, chunk, f)
            }

            fn write(
                &mut self,
                chunk: $crate::checkpoint::Chunk,
                f: &mut dyn FnMut($crate::ValuesMut<'_>),
            ) -> $crate::Result<()> {
                $crate::checkpoint::Shards::write(&mut self.$field, chunk, f)
            }

            fn frozen_checksums(&self) -> $crate::Result<Vec<(usize, u32)>> {
                $crate::checkpoint::Shards::frozen_checksums(&self.$field)
            }

            fn check_alike(&mut self) -> $crate::Result<()> {
                $crate::checkpoint::Shards::check_alike(&mut self.$field)
            }

            fn updates(&self) -> u64 {
                $crate::checkpoint::Shards::updates(&self.$field)
            }

            fn loaded(&mut self) -> $crate::Result<()> {
                $($loaded(self);)?
                $crate::checkpoint::Shards::loaded(&mut self.$field)
            }

            fn steps(&self) -> u64 {
                $crate::checkpoint::Shards::steps(&self.$field)
            }

            fn set_steps(&mut self, steps: u64) {
                $crate::checkpoint::Shards::set_steps(&mut self.$field, steps);
            }

            fn communicator_mut(&mut self) -> &mut $crate::Communicator {
                $crate::checkpoint::Shards::communicator_mut(&mut self.$field)
            }
        }
    };
}

pub use __delegate_shards as delegate_shards;

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
