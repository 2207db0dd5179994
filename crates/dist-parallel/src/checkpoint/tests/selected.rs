//! Saves of trained parameters only, and of finite values only.

use dist_transport::sim;
use rstest::rstest;

use super::holder::{DIVISIONS, Holder, ModelDivision, infos};
use super::{load, on_ranks, same_fault, save};
use crate::checkpoint::{CheckpointProblem, Checkpoints, Saving};
use crate::flat::Flat;
use crate::{Communicator, FloatType, ParamInfo};

/// The number of the frozen parameter among those that have memory of their own.
const FROZEN: usize = 4;

/// Returns the model with a buffer at the end.
fn with_buffer() -> Vec<ParamInfo> {
    let mut infos = infos();
    infos.push(ParamInfo::buffer("running mean", [3], FloatType::F32));
    infos
}

fn program<T: Send + 'static>(
    ranks: usize,
    program: impl Fn(&mut Holder) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let run = move |transport| {
        let comm = Communicator::new(transport);
        program(&mut Holder::with_infos(comm, ModelDivision::Replicated, with_buffer()))
    };
    sim::run(ranks as u64, ranks, run).results
}

fn copies(holder: &Holder) -> Vec<Flat> {
    holder.values.iter().map(|values| Flat::copy_of(values.slice(0, values.len()))).collect()
}

#[test]
fn frozen_parameters_can_be_left_out_and_stay_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    program(3, move |holder| {
        holder.fill(1);
        save(&mut Checkpoints::at(&path).only_trained(), holder, 1).unwrap();
    });
    let path = directory.path().to_owned();
    let refused = program(2, move |holder| load(&mut Checkpoints::at(&path), holder));
    let refused = same_fault(refused);
    assert_eq!(
        (refused.tensor.as_deref(), refused.problem),
        (Some("frozen"), CheckpointProblem::NotInCheckpoint)
    );
    let path = directory.path().to_owned();
    program(2, move |holder| {
        holder.fill(1);
        let expected = copies(holder);
        holder.fill(5);
        let before = copies(holder);
        load(&mut Checkpoints::at(&path).only_trained(), holder).unwrap();
        for (number, values) in copies(holder).iter().enumerate() {
            let expected = if number == FROZEN { &before[number] } else { &expected[number] };
            let len = values.len();
            assert_eq!(values.slice(0, len), expected.slice(0, len), "{number}");
        }
    });
}

#[test]
fn a_checkpoint_with_frozen_parameters_is_loaded_whole() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    program(2, move |holder| {
        holder.fill(1);
        save(&mut Checkpoints::at(&path), holder, 1).unwrap();
        holder.fill(5);
        load(&mut Checkpoints::at(&path).only_trained(), holder).unwrap();
        assert!(holder.is_of(1, true));
    });
}

#[test]
fn ranks_get_an_error_if_one_leaves_out_frozen_parameters() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let results = program(2, move |holder| {
        let checkpoints = Checkpoints::at(&path);
        let mut checkpoints = if holder.comm.rank() == 1 { checkpoints.only_trained() } else { checkpoints };
        save(&mut checkpoints, holder, 1)
    });
    let fault = same_fault(results).to_string();
    assert!(fault.contains("rank 1 saves step 1 with adamw, only what is trained, rank 0 saves"), "{fault}");
}

/// Every rank gets the first rank that would have written an infinite value or NaN. All values of the
/// optimizer's state, of frozen parameters and of buffers can be saved.
#[rstest]
fn values_that_are_not_finite_are_refused_on_all_ranks(
    #[values(0, 1, 2, 3, 4)] division: usize,
    #[values(f64::NAN, f64::INFINITY, f64::NEG_INFINITY)] odd: f64,
    #[values(false, true)] copied: bool,
) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let results = on_ranks(3, DIVISIONS[division], move |holder| {
        let save = |holder: &mut Holder, step| {
            let mut checkpoints = Checkpoints::at(&path).only_finite();
            let (mut trainer, optimizer) = holder.parts();
            if copied {
                checkpoints.start_save(&mut trainer, Some(optimizer), step).and_then(Saving::wait)
            } else {
                checkpoints.save(&mut trainer, Some(optimizer), step)
            }
        };
        holder.fill(1);
        // The frozen parameter is the only one of f16.
        for values in &mut holder.values {
            if let Flat::F16(values) = values {
                values.fill(half::f16::NAN);
            }
        }
        save(holder, 1).unwrap();
        // The scale is the only value of f64.
        for values in &mut holder.values {
            if let Flat::F64(values) = values {
                values.fill(odd);
            }
        }
        save(holder, 2)
    });
    let fault = same_fault(results);
    assert_eq!(fault.tensor.as_deref(), Some("scale"));
    assert_eq!(fault.problem, CheckpointProblem::NotFinite { index: 0, value: odd.to_string() });
    assert!(fault.rank.is_some());
    assert_eq!(Checkpoints::at(directory.path()).steps().unwrap(), [1]);
}
