//! The state that a rank of a pipeline has in a checkpoint: its shard of the parameters of its stages.

use super::Pipeline;
use crate::checkpoint::accumulated;
use crate::engine::Stage;
use crate::{
    Chunk, Communicator, Error, ParamInfo, Result, Sequence, ShardMetadata, Shards, Slice, Values, ValuesMut,
};

/// One pipeline has the whole model, or several that shard their stages. If there are more, the first saves.
impl<A> Shards for Pipeline<A> {
    #[expect(clippy::misnamed_getters, reason = "a checkpoint has the types of the master values")]
    fn infos(&self) -> &[ParamInfo] {
        &self.kept
    }

    fn parameters(&self) -> ShardMetadata<Chunk> {
        ShardMetadata::alone(self.held().collect())
    }

    fn untrained_to_save(&self) -> Vec<Chunk> {
        // Every shard has all values of the buffers, and a part of the frozen parameters.
        let is_first = self.groups.shards.rank() == 0;
        let saves = |chunk: &Chunk| {
            let ParamInfo { trainable, buffer, .. } = &self.infos[chunk.parameter];
            !trainable && (is_first || buffer.is_none())
        };
        self.held().filter(saves).collect()
    }

    fn slices(&self) -> ShardMetadata<Slice> {
        let trained = self.held().filter(|chunk| self.infos[chunk.parameter].trainable);
        ShardMetadata::alone(trained.map(|chunk| Slice { number: chunk.parameter, chunk }).collect())
    }

    fn unsaved(&self) -> Option<String> {
        accumulated(self.calls * self.total())
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
        self.check_updates()
    }

    fn loaded(&mut self) -> Result<()> {
        self.forget();
        self.updates.forget();
        self.computes = false;
        let Self { stages, groups, .. } = self;
        let published = stages.iter_mut().try_for_each(|stage| stage.publish(groups, |_| true));
        let published = published.and_then(|()| self.broadcast_ties());
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
        self.sharded.as_mut().unwrap_or(&mut self.comm)
    }

    fn replicas_mut(&mut self) -> Option<&mut Communicator> {
        Some(&mut self.groups.replicas)
    }
}

impl<A> Pipeline<A> {
    /// Returns what this rank holds first of the parameters that are not tied to an earlier one. Parameters of several
    /// stages belong to the first of them, and there to the first shard.
    fn held(&self) -> impl Iterator<Item = Chunk> {
        let rank = self.groups.shards.rank();
        let of_stage = move |stage: &Stage<Sequence<A>>| {
            let (first, chunks) = (stage.range.start, stage.plan.layout.held_chunks(rank));
            chunks.into_iter().map(move |chunk| Chunk { parameter: first + chunk.parameter, ..chunk })
        };
        let is_tied = |parameter: usize| self.ties.iter().any(|tie| tie.parameter == parameter);
        self.stages.iter().flat_map(of_stage).filter(move |chunk| {
            self.infos[chunk.parameter].same_as.is_none() && (rank == 0 || !is_tied(chunk.parameter))
        })
    }
}

impl<A> Stage<Sequence<A>> {
    /// Converts a chunk of a parameter of the whole model, which this stage has.
    const fn own_chunk(&self, chunk: Chunk) -> Chunk {
        Chunk { parameter: chunk.parameter - self.range.start, ..chunk }
    }
}
