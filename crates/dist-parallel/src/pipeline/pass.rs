//! The part of a pass that only pipelines have: messages between stages, ties, and times.

use std::time::Duration;

use dist_collectives::transport::Runtime;

use super::activations::{Activations, TensorMeta};
use super::links::StageLinks;
use super::ties::{self, Node};
use super::{Action, Item, Span};
use crate::flat::Flat;
use crate::fsdp::Groups;
use crate::{Error, Result, Values};

/// The messages, ties and times of one pass.
pub(crate) struct PipelinePass<'a, A> {
    pub(super) links: &'a mut StageLinks,
    pub(super) nodes: &'a mut [Node],
    pub(super) activations: &'a dyn Activations<A>,
    /// `true` in a step, `false` in an evaluation.
    pub(super) trains: bool,
    pub(super) runtime: &'a Runtime,
    /// The time at which the call began.
    pub(super) began: Duration,
    pub(super) spans: &'a mut Vec<Span>,
    pub(super) kept_most: &'a mut usize,
}

impl<A> PipelinePass<'_, A> {
    /// Returns the time since the call began.
    pub(crate) fn now(&self) -> Duration {
        self.runtime.now().saturating_sub(self.began)
    }

    /// Records the time of a computation of a stage since `start`. The units of a stage are one computation. `kept` is
    /// the number of activations that are held now.
    pub(crate) fn record(&mut self, action: Action, start: Duration, kept: usize) {
        if !self.trains {
            return;
        }
        let end = self.now();
        match self.spans.last_mut().filter(|span| span.action == action) {
            Some(span) => span.end = end,
            None => self.spans.push(Span { action, start, end }),
        }
        *self.kept_most = (*self.kept_most).max(kept);
    }

    pub(crate) fn send_activation(&mut self, item: Item, output: A, groups: &mut Groups) -> Result<()> {
        let stage = item.stage;
        let (got, values) = self.to_flat(&output)?;
        drop(output);
        let link = self.links.outputs.get_mut(&stage).expect(LINKED);
        let too_many = Error::TooManyDims { stage, dims: got.shape.len() };
        if !self.trains {
            groups.timed(|| link.finish())?;
            return link.send_any(&got, values).ok_or(too_many);
        }
        if let Some(expected) = link.meta().filter(|expected| **expected != got) {
            return Err(Error::ActivationShape { stage, expected: expected.clone(), got });
        }
        link.collect()?;
        link.send(&got, values).ok_or(too_many)?;
        if self.activations.gradients_have_the_same_shape() {
            self.links.output_gradients.get_mut(&stage).expect(LINKED).expect(got);
        }
        Ok(())
    }

    pub(crate) fn receive_activation(&mut self, item: Item, groups: &mut Groups) -> Result<A> {
        let link = self.links.inputs.get_mut(&item.stage).expect(LINKED);
        let (meta, values) = groups.timed(|| link.receive())?;
        let input = self.unflatten(&meta, &values)?;
        if self.trains && self.activations.gradients_have_the_same_shape() {
            self.links.input_gradients.get_mut(&item.stage).expect(LINKED).expect(meta);
        }
        Ok(input)
    }

    pub(crate) fn send_gradient(&mut self, item: Item, gradient: &A) -> Result<()> {
        let stage = item.stage;
        let (got, values) = self.to_flat(gradient)?;
        let link = self.links.input_gradients.get_mut(&stage).expect(LINKED);
        if let Some(expected) = link.meta().filter(|expected| **expected != got) {
            return Err(Error::GradientShape { stage, expected: expected.clone(), got });
        }
        link.collect()?;
        link.send(&got, values).ok_or(Error::TooManyDims { stage, dims: got.shape.len() })
    }

    pub(crate) fn receive_gradient(&mut self, item: Item, groups: &mut Groups) -> Result<A> {
        let link = self.links.output_gradients.get_mut(&item.stage).expect(LINKED);
        let (meta, values) = groups.timed(|| link.receive())?;
        self.unflatten(&meta, &values)
    }

    /// Adds the gradient of a parameter of several stages to its tie. `parameter` is its index in the whole model.
    pub(crate) fn report_tied(
        &mut self,
        (tie, stage): (usize, usize),
        micro_batch: usize,
        parameter: usize,
        values: Values<'_>,
    ) -> Result<()> {
        let node = self.nodes.iter_mut().find(|node| (node.tie, node.stage) == (tie, stage));
        node.map_or(Ok(()), |node| node.report(micro_batch, parameter, values))
    }

    /// Ends the backward of a micro-batch in a stage, and passes on the sums of ties that are complete. `is_whole` is
    /// `false` after its first half.
    pub(crate) fn end_backward(&mut self, item: Item, is_whole: bool) -> Result<()> {
        let of_stage = self.nodes.iter_mut().filter(|node| is_whole && node.stage == item.stage);
        of_stage.for_each(|node| node.end(item.micro_batch));
        ties::pass_on(self.nodes, false)
    }

    fn to_flat(&self, activation: &A) -> Result<(TensorMeta, Flat)> {
        let mut parts = None;
        let read = self.activations.to_flat(activation, &mut |shape, values| {
            parts =
                Some((TensorMeta { dtype: values.dtype(), shape: shape.to_vec() }, Flat::copy_of(values)));
        });
        read.map_err(Error::compute)?;
        parts.filter(|(meta, values)| meta.len() == Some(values.len())).ok_or(Error::NoActivation)
    }

    fn unflatten(&self, meta: &TensorMeta, values: &Flat) -> Result<A> {
        let made = self.activations.unflatten(&meta.shape, values.slice(0, values.len()));
        made.map_err(Error::compute)
    }
}

/// The schedule was proven, so a stage has the links of its actions.
const LINKED: &str = "a proven schedule has the link";
