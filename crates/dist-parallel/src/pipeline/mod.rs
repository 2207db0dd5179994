//! Pipeline parallelism: each rank has some stages of the model, and micro-batches flow through them.
//!
//! A [`PipelineSchedule`] contains the actions of every rank, in order. It is pure data. [`ScheduleKind::schedule`]
//! generates it. [`PipelineSchedule::validate`] proves that it is complete, ordered, free of deadlock and within its
//! bound of activations. [`Timeline::predict`] computes the time of every action.
//!
//! ```
//! use std::time::Duration;
//! use dist_parallel::pipeline::{Costs, ScheduleKind, StageCost, Timeline};
//!
//! let schedule = ScheduleKind::OneForwardOneBackward.schedule(4, 8)?;
//! assert_eq!(schedule.validate()?.kept, [4, 3, 2, 1]);
//! let unit = Duration::from_millis(1);
//! let stage = StageCost { forward: unit, input_gradient: unit, weight_gradient: unit };
//! let timeline = Timeline::predict(&schedule, &Costs::uniform(4, stage));
//! assert_eq!(timeline.makespan(), (8 + 3) * 3 * unit);
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```

mod action;
mod activations;
mod consensus;
mod draw;
mod evaluate;
mod flaw;
mod generate;
mod kind;
mod link;
mod links;
mod measure;
mod parameters;
mod pass;
mod placeholder;
mod runtime;
mod schedule;
mod split;
mod stage;
mod state;
mod step;
mod ties;
mod timeline;
mod validate;

pub use action::{Action, Item};
pub use activations::{Activations, PlainVectors, TensorMeta};
pub(crate) use consensus::ComparedCall;
pub use draw::{Panel, svg};
pub use flaw::{Flaw, ScheduleProof};
pub use kind::ScheduleKind;
pub use measure::measure_blocks;
pub(crate) use pass::PipelinePass;
pub use placeholder::Placeholder;
pub use runtime::Pipeline;
pub use schedule::PipelineSchedule;
pub use split::{split_by_cost, split_into_stages};
pub(crate) use state::PipelineState;
pub use timeline::{Costs, Span, StageCost, Timeline};
