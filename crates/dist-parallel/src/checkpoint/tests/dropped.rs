//! State in a checkpoint is ignored only at the user's request.

use std::path::{Path, PathBuf};

use dist_transport::sim;
use rstest::rstest;

use super::holder::{Holder, ModelDivision, infos};
use super::{load, on_ranks, same_fault, save};
use crate::checkpoint::{CheckpointProblem, Checkpoints};
use crate::{Communicator, OptimizerState as _, ParamInfo};

/// Returns the model, with its own or a tied head, and with a trained or a frozen scale.
fn model(tied: bool, frozen: bool) -> Vec<ParamInfo> {
    let mut infos = infos();
    infos[5].same_as = tied.then_some(0);
    infos[3].trainable = !frozen;
    infos
}

/// Saves the values of step 1 on two ranks with this model.
fn saved(directory: &Path, infos: Vec<ParamInfo>) {
    let directory = directory.to_owned();
    let outcome = sim::run(1, 2, move |transport| {
        let mut holder = Holder::with_infos(Communicator::new(transport), ModelDivision::Even, infos.clone());
        holder.fill(1);
        save(&mut Checkpoints::at(&directory), &mut holder, 1)
    });
    assert!(outcome.results.iter().all(Result::is_ok), "{:?}", outcome.results);
}

/// Loads on two ranks with this model. Returns each result, and `true` if the rank then has the values of step 1.
fn loaded(
    infos: Vec<ParamInfo>,
    with_optimizer: bool,
    checkpoints: impl Fn() -> Checkpoints + Send + Sync + 'static,
) -> Vec<(crate::Result<Option<u64>>, bool)> {
    let outcome = sim::run(1, 2, move |transport| {
        let mut holder = Holder::with_infos(Communicator::new(transport), ModelDivision::Even, infos.clone());
        holder.fill(5);
        let outcome = if with_optimizer {
            load(&mut checkpoints(), &mut holder)
        } else {
            checkpoints().load(&mut holder.parts().0, None)
        };
        assert!(outcome.is_ok() || holder.is_of(5, true), "nothing is changed");
        (outcome, holder.is_of(1, false))
    });
    outcome.results
}

#[track_caller]
fn fault(results: Vec<(crate::Result<Option<u64>>, bool)>) -> crate::CheckpointError {
    same_fault(results.into_iter().map(|(outcome, _)| outcome).collect())
}

#[rstest]
fn a_head_of_its_own_is_not_loaded_into_a_model_whose_head_is_tied(
    #[values(false, true)] with_optimizer: bool,
) {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), model(false, false));
    let path = directory.path().to_owned();
    let fault = fault(loaded(model(true, false), with_optimizer, move || Checkpoints::at(&path)));
    let tensor = fault.tensor.as_deref().unwrap();
    assert!(tensor.ends_with("head") && tensor.starts_with("optimizer/") == with_optimizer, "{fault}");
    assert_eq!(fault.problem, CheckpointProblem::Tied { same_as: "embed".to_owned() });
    let path = directory.path().to_owned();
    let outcome =
        loaded(model(true, false), with_optimizer, move || Checkpoints::at(&path).leave_out(["head"]));
    assert!(outcome.iter().all(|(outcome, is_loaded)| matches!(outcome, Ok(Some(1))) && *is_loaded));
}

#[rstest]
fn state_of_a_parameter_that_is_frozen_now_is_not_dropped_in_silence() {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), model(true, false));
    let path = directory.path().to_owned();
    let refused = fault(loaded(model(true, true), true, move || Checkpoints::at(&path)));
    assert_eq!(refused.tensor.as_deref(), Some("optimizer/mean/scale"));
    assert_eq!(refused.problem, CheckpointProblem::NotTrained);
    let path = directory.path().to_owned();
    let told = move || Checkpoints::at(&path).leave_out_state_of(["scale"]);
    let outcome = loaded(model(true, true), true, told);
    assert!(outcome.iter().all(|(outcome, is_loaded)| matches!(outcome, Ok(Some(1))) && *is_loaded));
}

#[test]
fn a_tensor_that_the_model_has_not_can_be_left_out() {
    let directory = tempfile::tempdir().unwrap();
    let mut more = model(true, false);
    more.push(ParamInfo::new("more", [3], crate::FloatType::F32));
    saved(directory.path(), more);
    let path = directory.path().to_owned();
    let refused = fault(loaded(model(true, false), true, move || Checkpoints::at(&path)));
    assert_eq!((refused.tensor.as_deref(), refused.problem), (Some("more"), CheckpointProblem::NotInModel));
    let path = directory.path().to_owned();
    let outcome = loaded(model(true, false), true, move || Checkpoints::at(&path).leave_out(["more"]));
    assert!(outcome.iter().all(|(outcome, is_loaded)| matches!(outcome, Ok(Some(1))) && *is_loaded));
}

#[test]
fn a_parameter_whose_tensor_is_left_out_is_missing() {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), model(true, false));
    let path = directory.path().to_owned();
    let refused =
        fault(loaded(model(true, false), true, move || Checkpoints::at(&path).leave_out(["scale"])));
    assert_eq!(
        (refused.tensor.as_deref(), refused.problem),
        (Some("scale"), CheckpointProblem::NotInCheckpoint)
    );
}

#[test]
fn ranks_that_leave_out_different_tensors_get_an_error() {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), model(true, false));
    let path = directory.path().to_owned();
    let results = on_ranks(2, ModelDivision::Even, move |holder| {
        let names: Vec<&str> = if holder.comm.rank() == 1 { vec!["head"] } else { Vec::new() };
        load(&mut Checkpoints::at(&path).leave_out(names), holder)
    });
    let fault = same_fault(results).to_string();
    assert!(
        fault.contains("rank 1 loads the newest checkpoint with adamw, leaving out {\"head\"}"),
        "{fault}"
    );
}

#[test]
fn state_of_a_slice_that_the_trainer_does_not_list_is_not_dropped_by_a_save() {
    let directory = tempfile::tempdir().unwrap();
    let path: PathBuf = directory.path().to_owned();
    let results = on_ranks(2, ModelDivision::Even, move |holder| {
        holder.fill(1);
        if holder.comm.rank() == 1 {
            holder.optimizer.states_mut().unwrap().restart(77, crate::FloatType::F32, 3);
        }
        save(&mut Checkpoints::at(&path), holder, 1)
    });
    let fault = same_fault(results);
    assert_eq!((fault.rank, fault.problem), (Some(1), CheckpointProblem::UnlistedState { slice: 77 }));
}
