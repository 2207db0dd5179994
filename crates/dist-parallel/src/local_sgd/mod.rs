//! Ranks that train by themselves and meet now and then: local SGD (Stich, 2018, arXiv:1805.09767) and DiLoCo
//! (Douillard et al., 2023, arXiv:2311.08105).
//!
//! For links on which a step's gradients take longer than the step.

mod checkpoint;
mod weight;

use std::fmt;

use dist_collectives::{Communicator, ReduceOp};

pub(crate) use checkpoint::SyncedModel;

use self::weight::RankWeight;
use crate::abort::or_abort;
use crate::broadcast::broadcast;
use crate::buffers::Buffers;
use crate::flat::Flat;
use crate::{
    BoxError, Bucket, BucketBytes, BucketPlace, BucketPlan, Error, Loss, Momentum, Optimizer, Params, Result,
    Sgd, SgdOptions, ValuesMut, agreement, params,
};

/// Training in which every rank steps by itself, on its own data with an optimizer of its own, and all ranks meet after
/// a number of steps: then what is trained is the same on all of them again, to the last bit.
/// [Buffers](crate::ParamInfo::buffer), such as the running means of a batch norm, are synchronised at every meeting, by the
/// ranks whose steps count. A frozen parameter that a rank changes is that rank's own.
///
/// ```
/// use dist_collectives::Communicator;
/// use dist_parallel::{LocalSgd, LocalSgdOptions};
/// # use dist_parallel::{BoxError, FloatType, ParamInfo, Params, Values, ValuesMut};
/// # struct Number([ParamInfo; 1], [f32; 1]);
/// # impl Params for Number {
/// #     fn infos(&self) -> &[ParamInfo] { &self.0 }
/// #     fn read(&self, _: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
/// #         f(Values::F32(&self.1));
/// #         Ok(())
/// #     }
/// #     fn write(&mut self, _: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
/// #         f(ValuesMut::F32(&mut self.1));
/// #         Ok(())
/// #     }
/// # }
/// use dist_transport::sim;
///
/// let outcome = sim::run(1, 2, |transport| {
///     let comm = Communicator::new(transport);
///     let target = comm.rank() as f32;
///     # let model = Number([ParamInfo::new("w", [1], FloatType::F32)], [5.0]);
///     let mut local = LocalSgd::new(comm, model, LocalSgdOptions::average(4)).unwrap();
///     for _ in 0..20 {
///         // Any computation and any optimizer.
///         let inner_step = |model: &mut Number| {
///             let error = model.1[0] - target;
///             model.1[0] -= 0.3 * error;
///             Ok(error * error)
///         };
///         local.step_with(inner_step).unwrap();
///     }
///     let traffic = local.traffic();
///     assert_eq!((traffic.steps, traffic.sync_points), (20, 5));
///     assert_eq!(traffic.bytes_saved(), 3 * traffic.bytes_sent);
///     local.model().1[0]
/// });
/// assert!(outcome.results.iter().all(|weight| (weight - 0.5).abs() < 0.02));
/// ```
///
/// Every rank takes as many steps, and counts as much as every other, unless its steps say how much they count: by their
/// [`Loss`]. Then a rank counts for what its steps since the last meeting do: the mean of the ranks' parameters, or of what they
/// have changed, is weighted by that. Ranks need not have taken as many steps then, so one that has run out of data can go on
/// [sync_point](Self::synchronise) the others.
///
/// An error on one rank aborts the job, so that no other waits for it.
///
/// # Checkpoints
///
/// What all ranks have in common right after a meeting can be [saved](Self::save): the parameters, and with DiLoCo the
/// velocity. What a rank's own optimizer keeps is its own, and is not.
pub struct LocalSgd<M> {
    comm: Communicator,
    model: M,
    inner_steps: usize,
    plan: BucketPlan,
    buffers: Buffers,
    /// What DiLoCo keeps: for each bucket the parameters of the last meeting, and by parameter the velocities.
    start: Vec<Flat>,
    outer: Option<Sgd>,
    keeps_start: bool,
    /// Since the ranks last came to meet: steps of this rank, the sum of their losses, and what they count.
    steps: usize,
    losses: f32,
    count: u64,
    /// Whether steps of this rank say how much they count, as far as it has taken any.
    weighted: bool,
    traffic: LocalTraffic,
}

/// Settings of [`LocalSgd`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocalSgdOptions {
    /// Steps from one meeting to the next, at least 1.
    pub inner_steps: usize,
    /// What is made of the ranks' parameters when they meet.
    pub outer: OuterStep,
}

/// What is made of the ranks' parameters when they meet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OuterStep {
    /// Their mean, weighted by what the ranks' steps count: local SGD.
    Average,
    /// A step from the parameters of the meeting before, along the mean of what the ranks have changed, with Nesterov's
    /// momentum: DiLoCo. It keeps the parameters of the last meeting, and a velocity as large.
    Nesterov {
        /// The learning rate; 0.7 in the paper.
        learning_rate: f64,
        /// How much of the earlier steps stays; 0.9 in the paper.
        momentum: f64,
    },
}

impl LocalSgdOptions {
    /// Local SGD with so many steps between meetings.
    pub const fn average(inner_steps: usize) -> Self {
        Self { inner_steps, outer: OuterStep::Average }
    }

    /// DiLoCo with so many steps between meetings, and the paper's outer step.
    #[doc(alias = "DiLoCo")]
    pub const fn diloco(inner_steps: usize) -> Self {
        Self { inner_steps, outer: OuterStep::Nesterov { learning_rate: 0.7, momentum: 0.9 } }
    }
}

/// What came of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct LocalStep {
    /// This rank's loss, or sum of losses, as it was computed.
    pub loss: f32,
    /// What came of the meeting, if this step was followed by one.
    pub sync_point: Option<SyncPoint>,
}

/// What came of a meeting.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct SyncPoint {
    /// The mean of the losses of all ranks' steps since the meeting before, or of all that they [count](crate::Loss).
    pub loss: f32,
    /// How many bytes this rank has sent for it.
    pub bytes_sent: u64,
}

/// What was sent so far, and what would have been.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LocalTraffic {
    /// Steps of this rank.
    pub steps: u64,
    /// Meetings.
    pub sync_points: u64,
    /// Bytes that this rank has sent for all meetings, counted by the transport.
    pub bytes_sent: u64,
    /// Bytes that it would have sent for a meeting after each step that one has followed: meetings all send the same.
    pub bytes_without: u64,
}

impl LocalTraffic {
    /// Bytes that were not sent, because there was no meeting after each step.
    pub const fn bytes_saved(&self) -> u64 {
        self.bytes_without - self.bytes_sent
    }
}

impl<M: Params> LocalSgd<M> {
    /// Begins to train `model` on all ranks of the group. Every rank then has rank 0's parameters.
    ///
    /// # Errors
    /// On every rank, if a setting makes no sense, or parameters or options differ between ranks. If communication fails.
    pub fn new(mut comm: Communicator, model: M, options: LocalSgdOptions) -> Result<Self> {
        let LocalSgdOptions { inner_steps, outer } = options;
        let settings = [
            agreement::setting("the number of inner steps", inner_steps),
            agreement::setting("the outer step", outer),
        ];
        agreement::check(&mut comm, model.infos(), &settings)?;
        params::validate(model.infos())?;
        if inner_steps == 0 {
            return Err(Error::Setting { name: "the number of inner steps", value: 0.0 });
        }
        let outer_optimizer = match outer {
            OuterStep::Average => None,
            OuterStep::Nesterov { learning_rate, momentum } => {
                let momentum = Momentum::Nesterov(momentum);
                let options = SgdOptions { learning_rate, momentum, weight_decay: 0.0 };
                Some(Sgd::new(options)?.named("diloco"))
            }
        };
        let plan = BucketPlan::new(model.infos(), BucketBytes::default());
        let buffers = Buffers::new(model.infos());
        let mut local = Self {
            comm,
            model,
            buffers,
            inner_steps,
            plan,
            start: Vec::new(),
            keeps_start: outer_optimizer.is_some(),
            outer: outer_optimizer,
            steps: 0,
            losses: 0.0,
            count: 0,
            weighted: false,
            traffic: LocalTraffic::default(),
        };
        let begun = broadcast(&mut local.comm, &mut local.model).and_then(|()| local.start_here());
        or_abort(&mut local.comm, begun)?;
        Ok(local)
    }

    /// Takes a step of this rank alone: `inner` computes, changes the parameters and returns the [`Loss`], which says how much
    /// the step counts. After every so many steps the ranks meet.
    ///
    /// Each rank has to take other examples, or all compute the same: [`data`](crate::data) shows how they are dealt.
    ///
    /// # Errors
    /// If `inner` fails, if only some of the steps since the last meeting say how much they count, or as for
    /// [`synchronise`](Self::synchronise).
    pub fn step_with<C: Loss>(
        &mut self,
        inner: impl FnOnce(&mut M) -> Result<C, BoxError>,
    ) -> Result<LocalStep> {
        let computed = match self.steps {
            1.. if self.weighted != C::WEIGHTED => Err(Error::PartlyWeighted),
            _ => inner(&mut self.model).map_err(Error::compute),
        };
        let (loss, count) = or_abort(&mut self.comm, computed)?.weighted();
        self.steps += 1;
        self.losses += loss;
        self.count = self.count.saturating_add(count);
        self.weighted = C::WEIGHTED;
        if count > 0 {
            self.buffers.record_forward();
        }
        self.traffic.steps += 1;
        let sync_point = if self.steps >= self.inner_steps { Some(self.synchronise()?) } else { None };
        Ok(LocalStep { loss, sync_point })
    }

    /// Lets the ranks meet now, as after the last step of a training whose steps are not a multiple. Every rank calls
    /// it, after as many steps unless these say how much they count.
    ///
    /// If they do, a rank that has taken no step, or none that counts, only gets the parameters of the others. So a rank that
    /// has run out of data meets until it is told that no rank has taken a step, as all ranks are then. It waits for the others'
    /// next meeting, and no longer than the communicator's timeout.
    ///
    /// ```
    /// # use dist_collectives::Communicator;
    /// # use dist_parallel::{BoxError, FloatType, ParamInfo, Params, Values, ValuesMut};
    /// # struct Number([ParamInfo; 1], [f32; 1]);
    /// # impl Params for Number {
    /// #     fn infos(&self) -> &[ParamInfo] { &self.0 }
    /// #     fn read(&self, _: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
    /// #         f(Values::F32(&self.1));
    /// #         Ok(())
    /// #     }
    /// #     fn write(&mut self, _: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
    /// #         f(ValuesMut::F32(&mut self.1));
    /// #         Ok(())
    /// #     }
    /// # }
    /// use dist_parallel::{Error, LocalSgd, LocalSgdOptions};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let comm = Communicator::new(transport);
    ///     // Rank 0 has five texts, rank 1 has one: of so many tokens.
    ///     let mut texts = if comm.rank() == 0 { vec![1, 2, 0, 0, 3] } else { vec![6] }.into_iter();
    ///     # let model = Number([ParamInfo::new("w", [1], FloatType::F32)], [0.0]);
    ///     let mut local = LocalSgd::new(comm, model, LocalSgdOptions::average(2)).unwrap();
    ///     loop {
    ///         let with_synced_model = match texts.next() {
    ///             Some(tokens) => local.step_with(|model| Ok((model.1[0], tokens))).map(drop),
    ///             None => local.synchronise().map(drop),
    ///         };
    ///         match with_synced_model {
    ///             // Somebody has taken steps, though they may count for nothing.
    ///             Ok(()) | Err(Error::ZeroWeight { micro_batches: 1.. }) => {}
    ///             Err(Error::ZeroWeight { .. }) => break,
    ///             Err(error) => panic!("{error}"),
    ///         }
    ///     }
    ///     local.traffic().sync_points
    /// });
    /// // After two steps, and after rank 0's last one. It is none where nothing counts, or nothing is left.
    /// assert_eq!(outcome.results, [2; 2]);
    /// ```
    ///
    /// # Errors
    /// [`ZeroWeight`](Error::ZeroWeight) on every rank if steps say how much they count, and none does. The steps, whose
    /// number it tells, are over and the next can be taken; the parameters are left as they are, which may not be the same on all
    /// ranks until the next meeting at which something counts. [`InnerStepsDiffer`](Error::InnerStepsDiffer) if the
    /// ranks have not taken as many steps, and these do not say how much they count, and
    /// [`PartlyWeighted`](Error::PartlyWeighted) if only those of some ranks do: every rank has the same error, and the job ends.
    /// If the model does not hand out its parameters, or communication fails.
    pub fn synchronise(&mut self) -> Result<SyncPoint> {
        self.comm.announce("synchronise", "synchronise");
        let sent_before = self.comm.traffic().bytes_sent;
        let with_synced_model = self.try_synchronise();
        // Where nothing counts the next steps begin anew, too.
        let steps = std::mem::take(&mut self.steps);
        (self.losses, self.count) = (0.0, 0);
        if let Err(Error::InnerStepsDiffer { .. } | Error::PartlyWeighted) = with_synced_model {
            // Nobody ends the job before all ranks have found that out. If the barrier fails, the job has ended.
            let _all_know = self.comm.barrier();
        }
        let loss = or_abort(&mut self.comm, with_synced_model)?;
        let bytes_sent = self.comm.traffic().bytes_sent - sent_before;
        self.traffic.sync_points += 1;
        self.traffic.bytes_sent += bytes_sent;
        self.traffic.bytes_without += bytes_sent * (steps as u64).max(1);
        Ok(SyncPoint { loss, bytes_sent })
    }

    /// How many steps this rank has taken since the ranks last came to meet.
    pub(crate) const fn steps(&self) -> usize {
        self.steps
    }

    /// Begins anew from the parameters that the model has, which are the same on every rank.
    pub(crate) fn start_here(&mut self) -> Result<()> {
        (self.steps, self.losses, self.count) = (0, 0.0, 0);
        if !self.keeps_start {
            return Ok(());
        }
        let buckets = self.plan.buckets().iter();
        self.start = buckets.map(|bucket| parameters(&self.model, bucket)).collect::<Result<_>>()?;
        Ok(())
    }

    /// What was sent so far, and what would have been.
    pub const fn traffic(&self) -> LocalTraffic {
        self.traffic
    }

    /// The model.
    pub const fn model(&self) -> &M {
        &self.model
    }

    /// The model, to evaluate it.
    pub const fn model_mut(&mut self) -> &mut M {
        &mut self.model
    }

    /// The communicator, to be asked.
    pub const fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// The communicator, for what else the ranks have to say to each other.
    pub const fn communicator_mut(&mut self) -> &mut Communicator {
        &mut self.comm
    }

    /// Ends the training and gives back what it was made of.
    pub fn into_parts(self) -> (Communicator, M) {
        (self.comm, self.model)
    }

    /// Gives every rank the same parameters, and the mean loss.
    fn try_synchronise(&mut self) -> Result<f32> {
        let Self { comm, model, plan, buffers, start, outer, steps, losses, count, weighted, .. } = self;
        let weight = RankWeight::agree(comm, *steps, *count, *weighted)?;
        let mut loss = [*losses];
        let op = if weight.total.is_some() { ReduceOp::Sum } else { ReduceOp::Mean };
        comm.all_reduce(&mut loss, op).map_err(Error::communication)?;
        ValuesMut::F32(&mut loss).divide(weight.total.unwrap_or((*steps).max(1)));
        for (number, bucket) in plan.buckets().iter().enumerate() {
            let mut own = parameters(model, bucket)?;
            match outer {
                None => {
                    weight.mean(&mut own, comm)?;
                    params::unpack(model, &bucket.places, &own)?;
                }
                Some(optimizer) => {
                    let start = &mut start[number];
                    own.subtract_from(start);
                    weight.mean(&mut own, comm)?;
                    for &BucketPlace { parameter, offset, len } in &bucket.places {
                        optimizer.update(parameter, start.slice_mut(offset, len), own.slice(offset, len))?;
                    }
                    params::unpack(model, &bucket.places, start)?;
                }
            }
        }
        buffers.synchronise([comm], model)?;
        Ok(loss[0])
    }
}

/// The parameters of one bucket, one after the other.
fn parameters(model: &impl Params, bucket: &Bucket) -> Result<Flat> {
    let mut flat = Flat::zeros(bucket.dtype, bucket.len());
    params::pack(model, &bucket.places, &mut flat)?;
    Ok(flat)
}

impl<M> fmt::Debug for LocalSgd<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalSgd({:?}, {} of {} steps)", self.comm, self.steps, self.inner_steps)
    }
}
