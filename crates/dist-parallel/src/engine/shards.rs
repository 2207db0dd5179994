//! The state that a rank has in a checkpoint: its shard of every flat parameter, and all buffers.

use super::{Agreement, Stage, StepEngine};
use crate::checkpoint::accumulated;
use crate::fsdp::{Degrees, Groups};
use crate::updates::Updates;
use crate::{
    Chunk, Communicator, Error, ParamInfo, Params, Result, ShardMetadata, Shards, Slice, Values, ValuesMut,
    mutation_check,
};

impl<M: Params> Shards for StepEngine<M> {
    fn infos(&self) -> &[ParamInfo] {
        &self.master_infos
    }

    fn parameters(&self) -> ShardMetadata<Chunk> {
        self.metadata(self.held_chunks().collect())
    }

    fn slices(&self) -> ShardMetadata<Slice> {
        let trained = self.held_chunks().filter(|chunk| self.master_infos[chunk.parameter].trainable);
        self.metadata(trained.map(|chunk| Slice { number: chunk.parameter, chunk }).collect())
    }

    fn untrained_to_save(&self) -> Vec<Chunk> {
        // Every shard has all values of the buffers, and a part of the frozen parameters.
        let (is_first_copy, is_first_shard) = (self.copies().0 == 0, self.groups.shards.rank() == 0);
        let saves = |chunk: &Chunk| {
            let ParamInfo { trainable, buffer, .. } = &self.master_infos[chunk.parameter];
            is_first_copy && !trainable && (is_first_shard || buffer.is_none())
        };
        self.held_chunks().filter(saves).collect()
    }

    fn frozen_checksums(&self) -> Result<Vec<(usize, u32)>> {
        let Stage { plan, model, .. } = &self.stages[0];
        let Degrees { shards, frees, .. } = plan.degrees;
        if frees || shards == 1 {
            return Ok(Vec::new());
        }
        let flat_params = plan.layout.flat_params().map(|(_, flat_param)| flat_param);
        let frozen = flat_params.filter(|flat_param| !flat_param.trainable);
        let places = frozen.flat_map(|flat_param| &flat_param.places);
        places.map(|place| Ok((place.parameter, mutation_check::checksum(model, place.parameter)?))).collect()
    }

    fn unsaved(&self) -> Option<String> {
        accumulated(self.micro_batches)
    }

    fn read(&self, chunk: Chunk, f: &mut dyn FnMut(Values<'_>)) -> Result<()> {
        let stage = self.stages.iter().find(|stage| stage.range.contains(&chunk.parameter));
        let stage = stage.ok_or(Error::Freed)?;
        stage.read(stage.own_chunk(chunk), self.groups.shards.rank(), f)
    }

    fn write(&mut self, chunk: Chunk, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<()> {
        let stage = self.stages.iter_mut().find(|stage| stage.range.contains(&chunk.parameter));
        let stage = stage.ok_or(Error::Freed)?;
        stage.change(stage.own_chunk(chunk), self.groups.shards.rank(), |values| {
            f(values);
            Ok(())
        })
    }

    fn updates(&self) -> u64 {
        self.updates.hash()
    }

    fn check_alike(&mut self) -> Result<()> {
        let (mut groups, updates, infos) = self.groups_with_updates();
        updates.check(&mut groups, infos)
    }

    fn loaded(&mut self) -> Result<()> {
        self.reset()?;
        let published = self.all_gather_updates(|_| true).and_then(|()| self.broadcast_ties());
        self.or_abort(published)
    }

    fn steps(&self) -> u64 {
        self.passes.steps()
    }

    fn set_steps(&mut self, steps: u64) {
        let pass = self.passes.set_steps(steps);
        self.begin_forward(pass);
    }

    fn communicator_mut(&mut self) -> &mut Communicator {
        self.follow();
        let sharded = self.pipeline.as_mut().and_then(|pipeline| pipeline.sharded.as_mut());
        sharded.unwrap_or(&mut self.world)
    }

    fn replicas_mut(&mut self) -> Option<&mut Communicator> {
        self.pipeline.is_some().then_some(&mut self.groups.replicas)
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

            fn replicas_mut(&mut self) -> Option<&mut $crate::Communicator> {
                $crate::checkpoint::Shards::replicas_mut(&mut self.$field)
            }
        }
    };
}

pub use __delegate_shards as delegate_shards;

impl<M: Params> StepEngine<M> {
    /// Returns the groups that together have all ranks, the updates of this rank, and the parameters.
    pub(crate) fn groups_with_updates(&mut self) -> (Vec<&mut Communicator>, &Updates, &[ParamInfo]) {
        let Self { world, groups: Groups { shards, replicas, .. }, updates, model_infos, pipeline, .. } =
            self;
        let groups = match pipeline {
            Some(_) => vec![world, shards, replicas],
            None => vec![world],
        };
        (groups, updates, model_infos)
    }

    /// Returns what this rank holds first of the parameters that are not tied to an earlier one. Parameters of several
    /// stages belong to the first of them, and there to the first shard.
    fn held_chunks(&self) -> impl Iterator<Item = Chunk> {
        let rank = self.groups.shards.rank();
        let of_stage = move |stage: &Stage<M>| {
            let (first, chunks) = (stage.range.start, stage.plan.layout.held_chunks(rank));
            chunks.into_iter().map(move |chunk| Chunk { parameter: first + chunk.parameter, ..chunk })
        };
        let is_tied = |parameter| self.pipeline.as_ref().is_some_and(|pipeline| pipeline.is_tied(parameter));
        self.stages.iter().flat_map(of_stage).filter(move |chunk| {
            self.master_infos[chunk.parameter].same_as.is_none() && (rank == 0 || !is_tied(chunk.parameter))
        })
    }

    /// Returns this rank's number among those that hold the same state, and their number. One of several pipelines saves,
    /// so the others do not count.
    fn copies(&self) -> (usize, usize) {
        let replicas = match (&self.pipeline, self.agreement) {
            (Some(_), _) => return (0, 1),
            (None, Agreement::OwnRank) => &self.world,
            (None, Agreement::BeforeRounds | Agreement::AtEnd) => &self.groups.replicas,
        };
        (replicas.rank(), replicas.world_size())
    }

    fn metadata<T>(&self, chunks: Vec<T>) -> ShardMetadata<T> {
        let (copy, copies) = self.copies();
        ShardMetadata { chunks, copy, copies }
    }
}

impl<M> Stage<M> {
    /// Converts a chunk of a parameter of the whole model, which this stage has.
    const fn own_chunk(&self, chunk: Chunk) -> Chunk {
        Chunk { parameter: chunk.parameter - self.range.start, ..chunk }
    }
}
