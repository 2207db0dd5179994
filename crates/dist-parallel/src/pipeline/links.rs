//! All links of one rank to the stages before and after its own.

use std::collections::BTreeMap;

use dist_collectives::Communicator;

use super::PipelineSchedule;
use super::link::{LinkReceiver, LinkSender};
use crate::{Error, Result};

/// The links by the number of this rank's stage.
#[derive(Default)]
pub(super) struct StageLinks {
    pub(super) outputs: BTreeMap<usize, LinkSender>,
    pub(super) inputs: BTreeMap<usize, LinkReceiver>,
    pub(super) input_gradients: BTreeMap<usize, LinkSender>,
    pub(super) output_gradients: BTreeMap<usize, LinkReceiver>,
}

impl StageLinks {
    /// Creates the links of all ranks, without communication.
    pub(super) fn new(comm: &mut Communicator, schedule: &PipelineSchedule) -> Result<Self> {
        let mut links = Self::default();
        for stage in (0..schedule.stages()).filter(|&stage| schedule.is_sent(stage)) {
            let (here, there) = (schedule.placement()[stage], schedule.placement()[stage + 1]);
            match pair(comm, here, there)? {
                Some(LinkEnd::LinkSender(link)) => _ = links.outputs.insert(stage, link),
                Some(LinkEnd::LinkReceiver(link)) => _ = links.inputs.insert(stage + 1, link),
                None => {}
            }
            match pair(comm, there, here)? {
                Some(LinkEnd::LinkSender(link)) => _ = links.input_gradients.insert(stage + 1, link),
                Some(LinkEnd::LinkReceiver(link)) => _ = links.output_gradients.insert(stage, link),
                None => {}
            }
        }
        Ok(links)
    }

    /// Inherits the timeout and the reduction order of the communicator between the stages.
    pub(super) fn follow(&mut self, comm: &Communicator) {
        self.outputs.values_mut().chain(self.input_gradients.values_mut()).for_each(|link| link.follow(comm));
        self.inputs.values_mut().chain(self.output_gradients.values_mut()).for_each(|link| link.follow(comm));
    }

    /// Starts a step in which every link carries this number of messages.
    pub(super) fn begin(&mut self, messages: usize) {
        let receivers = self.inputs.values_mut().chain(self.output_gradients.values_mut());
        receivers.for_each(|link| link.begin(messages));
    }

    /// Starts an evaluation of `micro_batches` micro-batches, in which no gradients are sent.
    pub(super) fn begin_evaluation(&mut self, micro_batches: usize) {
        self.inputs.values_mut().for_each(|link| link.begin_any(micro_batches));
    }

    pub(super) fn bytes_sent(&self) -> u64 {
        self.outputs.values().chain(self.input_gradients.values()).map(LinkSender::bytes_sent).sum()
    }

    /// Waits until all messages were received.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.outputs.values_mut().chain(self.input_gradients.values_mut()).try_for_each(LinkSender::finish)
    }

    /// Waits for everything in flight and ignores the results.
    pub(super) fn forget(&mut self) {
        self.outputs.values_mut().chain(self.input_gradients.values_mut()).for_each(LinkSender::forget);
        self.inputs.values_mut().chain(self.output_gradients.values_mut()).for_each(LinkReceiver::forget);
    }
}

/// This rank's end of a link.
pub(super) enum LinkEnd {
    LinkSender(LinkSender),
    LinkReceiver(LinkReceiver),
}

/// Returns the link from one rank to another. `None` on ranks that are not at its ends. All ranks call this.
///
/// It is a fork instead of a group of two, so that errors have the caller's rank numbers.
pub(super) fn pair(comm: &mut Communicator, from: usize, to: usize) -> Result<Option<LinkEnd>> {
    let comm = comm.fork().map_err(Error::communication)?;
    Ok(match comm.rank() {
        rank if rank == from => Some(LinkEnd::LinkSender(LinkSender::new(comm, to))),
        rank if rank == to => Some(LinkEnd::LinkReceiver(LinkReceiver::new(comm, from))),
        _ => None,
    })
}
