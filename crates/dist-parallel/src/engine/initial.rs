//! The initial values of the parameters.

use dist_collectives::Communicator;

use crate::broadcast::{broadcast_bucket, coalesced};
use crate::flat::Flat;
use crate::fsdp::{FlatParameter, Layout};
use crate::{Error, ParamInfo, Params, Result, ValuesMut, agreement, params};

/// The source of the initial values.
pub(crate) enum InitialValues<'a> {
    /// Rank 0's model. One flat parameter is broadcast at a time.
    OfRank0,
    /// Rank 0's model, which has been broadcast.
    Broadcast,
    /// A function that gives every rank the same values.
    Given(Given<'a>),
}

impl InitialValues<'_> {
    /// Writes the initial values of a flat parameter into `whole`, on every rank.
    pub(super) fn fill(
        &mut self,
        world: &mut Communicator,
        model: &impl Params,
        flat_param: &FlatParameter,
        whole: &mut Flat,
    ) -> Result<()> {
        match self {
            Self::OfRank0 => {
                if world.rank() == 0 {
                    params::pack(model, &flat_param.places, whole)?;
                }
                let len = whole.len();
                whole.slice_mut(0, len).broadcast(world, 0)
            }
            Self::Broadcast => params::pack(model, &flat_param.places, whole),
            Self::Given(values) => {
                let mut places = flat_param.places.iter();
                places.try_for_each(|place| {
                    values.fill(place.parameter, whole.slice_mut(place.offset, place.len))
                })
            }
        }
    }

    /// Writes the initial values of its buffers into every rank's model.
    pub(super) fn fill_buffers(
        &mut self,
        world: &mut Communicator,
        model: &mut impl Params,
        layout: &Layout,
    ) -> Result<()> {
        match self {
            Self::OfRank0 => {
                let plan = coalesced(model.infos(), |info| info.buffer.is_some());
                plan.buckets().iter().try_for_each(|bucket| broadcast_bucket(world, model, bucket, 0))
            }
            Self::Broadcast => Ok(()),
            Self::Given(values) => layout.buffers().try_for_each(|buffer| {
                params::write(model, buffer.parameter, |memory| values.fill(buffer.parameter, memory))
            }),
        }
    }

    /// Returns an error unless all ranks have received the same initial values.
    pub(super) fn check(&self, world: &mut Communicator, infos: &[ParamInfo]) -> Result<()> {
        let Self::Given(values) = self else { return Ok(()) };
        let all = agreement::gather(world, [agreement::fingerprint(&values.checksums)])?;
        if all.iter().all(|theirs| *theirs == all[0]) {
            return Ok(());
        }
        let count = values.checksums.len();
        let mut all = vec![0; count * world.world_size()];
        world.all_gather(&values.checksums, &mut all).map_err(Error::communication)?;
        let differs = |&at: &usize| all[at] != all[at % count];
        let at = (0..all.len()).find(differs).unwrap_or_default();
        Err(Error::InitialValuesDiffer { rank: at / count, parameter: infos[at % count].name.clone() })
    }
}

/// A function that returns initial values, and the checksums by parameter of the values so far.
pub(crate) struct Given<'a> {
    pub(crate) values: &'a mut dyn FnMut(usize, ValuesMut<'_>),
    pub(crate) checksums: Vec<u32>,
}

impl Given<'_> {
    #[expect(clippy::unnecessary_wraps, reason = "it is used where filling may fail")]
    fn fill(&mut self, parameter: usize, mut memory: ValuesMut<'_>) -> Result<()> {
        (self.values)(parameter, memory.reborrow());
        self.checksums[parameter] = crc32fast::hash(memory.as_values().as_bytes());
        Ok(())
    }
}
