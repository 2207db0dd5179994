//! The state that a rank of a pipeline has in a checkpoint: the parameters of its stages.

use super::Pipeline;
use crate::{
    Chunk, Communicator, Error, ParamInfo, Result, ShardMetadata, Shards, Slice, Values, ValuesMut, params,
};

/// One pipeline has the whole model. If there are several, the first saves. A pipeline with sharded stages has no
/// whole parameters and refuses to be saved or loaded.
impl<A> Shards for Pipeline<A> {
    fn infos(&self) -> &[ParamInfo] {
        self.infos()
    }

    fn parameters(&self) -> ShardMetadata<Chunk> {
        ShardMetadata::alone(self.held().collect())
    }

    fn slices(&self) -> ShardMetadata<Slice> {
        let trained = self.held().filter(|chunk| self.infos()[chunk.parameter].trainable);
        ShardMetadata::alone(trained.map(|chunk| Slice { number: chunk.parameter, chunk }).collect())
    }

    fn read(&self, Chunk { parameter, .. }: Chunk, f: &mut dyn FnMut(Values<'_>)) -> Result<()> {
        let own =
            self.stages.iter().find(|stage| stage.parameters.contains(&parameter)).expect(OF_OWN_STAGES);
        let parameter = parameter - own.parameters.start;
        if own.is_sharded(parameter) {
            return Err(Error::Freed);
        }
        params::read(&own.model, parameter, f)
    }

    fn write(&mut self, Chunk { parameter, .. }: Chunk, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<()> {
        let own = self.stages.iter_mut().find(|stage| stage.parameters.contains(&parameter));
        let own = own.expect(OF_OWN_STAGES);
        let parameter = parameter - own.parameters.start;
        if own.is_sharded(parameter) {
            return Err(Error::Freed);
        }
        params::write(&mut own.model, parameter, |values| {
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
        let told = self.broadcast_ties();
        self.or_abort(told)
    }

    fn steps(&self) -> u64 {
        self.passes.steps()
    }

    fn set_steps(&mut self, steps: u64) {
        let pass = self.passes.set_steps(steps);
        self.begin_forward(pass);
    }

    fn communicator_mut(&mut self) -> &mut Communicator {
        self.communicator_mut()
    }

    fn replicas_mut(&mut self) -> Option<&mut Communicator> {
        self.follow();
        self.data.as_mut()
    }
}

impl<A> Pipeline<A> {
    /// Returns the parameters that are not tied to an earlier one and that this rank has first, each as one chunk.
    fn held(&self) -> impl Iterator<Item = Chunk> {
        let all = self.stages.iter().flat_map(|stage| stage.parameters.clone());
        all.filter(|&parameter| self.infos()[parameter].same_as.is_none()).map(|parameter| Chunk {
            parameter,
            offset: 0,
            len: self.infos()[parameter].len(),
        })
    }
}

const OF_OWN_STAGES: &str = "this rank lists only pieces of its own stages";
