//! File-system errors and damaged files: every rank gets an error, and nothing changes.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use half::f16;
use rstest::rstest;

use super::holder::{Holder, ModelDivision};
use super::{load, on_ranks, same_fault, save, saved};
use crate::Error;
use crate::checkpoint::disk::{Disk, DiskOperation};
use crate::checkpoint::owner::Owner;
use crate::checkpoint::{CheckpointProblem, Checkpoints, Chunk, INDEX, directory};

/// Every operation of every rank fails once. All ranks get the same error, or none if the save was already complete.
/// Either the previous checkpoint or the new one is the newest, and the next save succeeds.
#[rstest]
fn a_failure_at_any_moment_of_a_save_is_an_error_on_all_ranks(#[values(0, 1, 2)] unlucky: usize) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let outcomes = on_ranks(3, ModelDivision::Even, move |holder| {
        let mut outcomes = Vec::new();
        let mut moment = 0;
        holder.fill(1);
        save(&mut Checkpoints::at(&path), holder, 1).unwrap();
        loop {
            let mut checkpoints = Checkpoints::at(&path).keep_last(std::num::NonZeroUsize::MIN);
            let acts = Arc::new(AtomicUsize::new(0));
            if holder.comm.rank() == unlucky {
                let acts = acts.clone();
                checkpoints.disk.mutation_check = Some(Arc::new(move |_, _| {
                    let now = acts.fetch_add(1, Ordering::Relaxed) == moment;
                    if now { Err(io::Error::other("no space left")) } else { Ok(()) }
                }));
            }
            holder.fill(2);
            checkpoints.set_state("step", &2).unwrap();
            let outcome = save(&mut checkpoints, holder, 2).map_err(|error| error.to_string());
            // One owner at a time saves to the directory.
            drop(checkpoints);
            let mut failed = [u8::from(acts.load(Ordering::Relaxed) > moment)];
            holder.comm.broadcast(&mut failed, unlucky).unwrap();
            // Other values, to see that the load overwrites them.
            holder.fill(9);
            let mut checkpoints = Checkpoints::at(&path);
            let step = load(&mut checkpoints, holder).unwrap();
            assert!(holder.is_of(step.unwrap(), true));
            // The state of the program belongs to the same checkpoint.
            assert_eq!(checkpoints.state("step").ok(), step.filter(|&step| step == 2));
            drop(checkpoints);
            if failed == [0] {
                return outcomes;
            }
            if let Err(error) = &outcome {
                assert!(
                    error.contains(&format!("on rank {unlucky}")) && error.contains("no space left"),
                    "{error}"
                );
            }
            outcomes.push((outcome, step));
            holder.fill(1);
            save(&mut Checkpoints::at(&path).keep_last(std::num::NonZeroUsize::MIN), holder, 1).unwrap();
            holder.comm.barrier().unwrap();
            moment += 1;
        }
    });
    assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "all ranks are told the same");
    let failures = outcomes[0].iter().filter(|(outcome, _)| outcome.is_err()).count();
    assert!(failures >= 3, "only {failures} of {} acts can fail", outcomes[0].len());
    for (outcome, step) in &outcomes[0] {
        assert_eq!(*step, Some(if outcome.is_ok() { 2 } else { 1 }), "{outcome:?}");
    }
}

/// Each is synced before the next is created in it.
#[test]
fn the_names_of_all_directories_that_are_made_are_put_on_the_disk() {
    let there = tempfile::tempdir().unwrap();
    let acts = Arc::new(Mutex::new(Vec::new()));
    let (seen, base) = (acts.clone(), there.path().to_owned());
    let mutation_check = Arc::new(move |act, path: &Path| {
        if act != DiskOperation::Open {
            seen.lock().unwrap().push((act, path.strip_prefix(&base).unwrap().to_owned()));
        }
        Ok(())
    });
    let disk = Disk { mutation_check: Some(mutation_check), ..Disk::default() };
    directory::begin(&disk, &there.path().join("a/b/c"), 1, &mut Owner::default()).unwrap();
    let expected = [
        (DiskOperation::MakeDirectory, "a"),
        (DiskOperation::SyncDirectory, ""),
        (DiskOperation::MakeDirectory, "a/b"),
        (DiskOperation::SyncDirectory, "a"),
        (DiskOperation::MakeDirectory, "a/b/c"),
        (DiskOperation::SyncDirectory, "a/b"),
    ];
    assert_eq!(acts.lock().unwrap()[..6], expected.map(|(act, path)| (act, PathBuf::from(path))));
}

/// Tests run in the directory of their package, which has these directories.
#[rstest]
#[case::bare("src", ".")]
#[case::below_another("src/checkpoint", "src")]
fn the_name_of_the_directory_is_put_on_the_disk(#[case] path: &str, #[case] parent: &str) {
    let mutation_check = Arc::new(|act, path: &Path| match act {
        DiskOperation::MakeDirectory | DiskOperation::Open => Ok(()),
        _ => Err(io::Error::other(format!("{act:?} of {}", path.display()))),
    });
    let disk = Disk { mutation_check: Some(mutation_check), ..Disk::default() };
    let fault = directory::begin(&disk, Path::new(path), 1, &mut Owner::default()).unwrap_err().to_string();
    assert!(fault.contains(&format!("SyncDirectory of {parent}")), "{fault}");
}

#[derive(Debug, Clone, Copy)]
enum Harm {
    Remove,
    Shorten,
    Lengthen,
    Empty,
}

fn harm(path: &Path, harm: Harm) {
    let mut bytes = fs::read(path).unwrap();
    match harm {
        Harm::Remove => return fs::remove_file(path).unwrap(),
        Harm::Shorten => {
            bytes.pop();
        }
        Harm::Lengthen => bytes.push(b' '),
        Harm::Empty => bytes.clear(),
    }
    fs::write(path, bytes).unwrap();
}

#[rstest]
fn files_that_are_missing_or_have_another_size_are_named_on_every_rank(
    #[values("part-1-of-3.safetensors", "part-2-of-3.safetensors", "part-3-of-3.safetensors", INDEX)]
    file: &'static str,
    #[values(Harm::Remove, Harm::Shorten, Harm::Lengthen, Harm::Empty)] how: Harm,
    #[values(1, 2, 4)] ranks: usize,
    #[values(ModelDivision::Replicated, ModelDivision::Last)] division: ModelDivision,
) {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), 3, ModelDivision::Even, &[1, 2]);
    let file = directory.path().join("checkpoint-2-step-2").join(file);
    harm(&file, how);
    let path = directory.path().to_owned();
    let results = on_ranks(ranks, division, move |holder| {
        holder.fill(5);
        let loaded = load(&mut Checkpoints::at(&path), holder);
        assert!(holder.is_of(5, true) && holder.loaded == 0, "nothing is changed");
        // The previous checkpoint can still be loaded.
        let (mut trainer, optimizer) = holder.parts();
        Checkpoints::at(&path).load_step(1, &mut trainer, Some(optimizer)).unwrap();
        assert!(holder.is_of(1, true));
        loaded
    });
    let fault = same_fault(results);
    assert_eq!(fault.path, file);
    assert!(fault.rank.is_some());
    let is_index = file.ends_with(INDEX);
    match (how, fault.problem) {
        (Harm::Remove, CheckpointProblem::Missing) => {}
        (Harm::Empty, CheckpointProblem::Malformed(_)) if is_index => {}
        (Harm::Shorten | Harm::Lengthen | Harm::Empty, CheckpointProblem::Size { .. }) => {}
        (how, problem) => panic!("{how:?}: {problem:?}"),
    }
}

/// Changes every byte of every file, one at a time.
#[test]
fn a_changed_byte_anywhere_is_noticed_by_every_rank() {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), 2, ModelDivision::Even, &[1]);
    let checkpoint = directory.path().join("checkpoint-1-step-1");
    let path = directory.path().to_owned();
    let noticed = on_ranks(2, ModelDivision::Even, move |holder| {
        holder.fill(5);
        let mut noticed = Vec::new();
        for name in ["part-1-of-2.safetensors", "part-2-of-2.safetensors", INDEX] {
            let file = checkpoint.join(name);
            let bytes = fs::read(&file).unwrap();
            for place in 0..bytes.len() {
                let bit = 1 << (place % 8);
                let mut changed = bytes.clone();
                changed[place] ^= bit;
                if holder.comm.rank() == 0 {
                    fs::write(&file, &changed).unwrap();
                }
                holder.comm.barrier().unwrap();
                let fault = match load(&mut Checkpoints::at(&path), holder) {
                    Err(Error::Checkpoint(fault)) => *fault,
                    other => panic!("byte {place} of {name}: {other:?}"),
                };
                assert_eq!(fault.path, file, "byte {place}: {fault}");
                assert!(holder.is_of(5, true) && holder.loaded == 0, "byte {place} of {name}");
                noticed.push(fault);
            }
            holder.comm.barrier().unwrap();
            if holder.comm.rank() == 0 {
                fs::write(&file, &bytes).unwrap();
            }
        }
        holder.comm.barrier().unwrap();
        assert_eq!(load(&mut Checkpoints::at(&path), holder).unwrap(), Some(1));
        noticed
    });
    assert_eq!(noticed[0], noticed[1]);
    let named = noticed[0].iter().filter(|fault| fault.tensor.is_some()).count();
    assert!(named > 500, "the tensor is named where one is concerned: {named} times");
}

/// All ranks get the error of one rank's trainer, in a save and in a load.
#[rstest]
fn a_trainer_that_refuses_is_named_on_every_rank(#[values(false, true)] copied: bool) {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), 2, ModelDivision::Even, &[1]);
    let path = directory.path().to_owned();
    let results = on_ranks(2, ModelDivision::Even, move |holder| {
        holder.fill(5);
        *holder.refuses.lock().unwrap() = (holder.comm.rank() == 1).then_some(1);
        let loaded = load(&mut Checkpoints::at(&path), holder);
        let mut checkpoints = Checkpoints::at(&path);
        let saved = if copied {
            let (mut trainer, optimizer) = holder.parts();
            checkpoints.start_save(&mut trainer, Some(optimizer), 5).unwrap().wait()
        } else {
            save(&mut checkpoints, holder, 5)
        };
        assert!(holder.is_of(5, true) && holder.loaded == 0, "nothing is changed");
        assert_eq!(checkpoints.steps().unwrap(), [1]);
        (loaded, saved)
    });
    let (loaded, saved): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    for fault in [same_fault(loaded), same_fault(saved)] {
        assert_eq!((fault.rank, fault.tensor.is_some()), (Some(1), true));
        assert!(matches!(&fault.problem, CheckpointProblem::Trainer(_)), "{fault}");
    }
}

#[rstest]
#[case::past_the_end(0, 10, 6)]
#[case::past_every_number(0, usize::MAX, 2)]
#[case::of_nothing(99, 0, 1)]
#[case::of_another_name(5, 0, 1)]
fn a_trainer_with_a_piece_that_no_parameter_has_is_refused(
    #[case] parameter: usize,
    #[case] offset: usize,
    #[case] len: usize,
) {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), 2, ModelDivision::Even, &[1]);
    let path = directory.path().to_owned();
    let results = on_ranks(2, ModelDivision::Even, move |holder| {
        holder.fill(5);
        if holder.comm.rank() == 1 {
            holder.list_slice(Chunk { parameter, offset, len });
        }
        let mut checkpoints = Checkpoints::at(&path);
        (load(&mut checkpoints, holder), save(&mut checkpoints, holder, 5))
    });
    let (loaded, saved): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    for fault in [same_fault(loaded), same_fault(saved)] {
        assert!(matches!(&fault.problem, CheckpointProblem::Trainer(_)), "{fault}");
        assert_eq!(fault.rank, Some(1));
    }
}

#[rstest]
#[case::step(|rank: usize| (rank as u64, true), "rank 1 saves step 1 with adamw, rank 0 saves step 0 with adamw")]
#[case::optimizer(|rank: usize| (0, rank == 0), "rank 1 saves step 0 without an optimizer")]
fn ranks_with_different_save_requests_get_an_error(
    #[case] what: fn(usize) -> (u64, bool),
    #[case] expected: &str,
) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let results = on_ranks(3, ModelDivision::Even, move |holder| {
        holder.fill(5);
        let (step, with_optimizer) = what(holder.comm.rank());
        let (mut trainer, optimizer) = holder.parts();
        let optimizer: Option<&dyn crate::OptimizerState> =
            if with_optimizer { Some(optimizer) } else { None };
        Checkpoints::at(&path).save(&mut trainer, optimizer, step)
    });
    let fault = same_fault(results).to_string();
    assert!(fault.contains(expected), "{fault}");
    let left: Vec<PathBuf> =
        fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[rstest]
#[case::step(Some(1), true, "rank 1 loads step 1 with adamw, rank 0 loads the newest checkpoint with adamw")]
#[case::optimizer(None, false, "rank 1 loads the newest checkpoint without an optimizer")]
fn ranks_with_different_load_requests_get_an_error_and_change_nothing(
    #[case] step: Option<u64>,
    #[case] with_optimizer: bool,
    #[case] expected: &str,
) {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), 3, ModelDivision::Even, &[1, 2]);
    let path = directory.path().to_owned();
    let results = on_ranks(3, ModelDivision::Even, move |holder| {
        holder.fill(5);
        let (step, with_optimizer) =
            if holder.comm.rank() == 1 { (step, with_optimizer) } else { (None, true) };
        let (mut trainer, optimizer) = holder.parts();
        let optimizer: Option<&mut dyn crate::OptimizerState> =
            if with_optimizer { Some(optimizer) } else { None };
        let mut checkpoints = Checkpoints::at(&path);
        let loaded = match step {
            Some(step) => checkpoints.load_step(step, &mut trainer, optimizer),
            None => checkpoints.load(&mut trainer, optimizer).map(drop),
        };
        assert!(holder.is_of(5, true) && holder.loaded == 0, "nothing is changed");
        loaded
    });
    let fault = same_fault(results).to_string();
    assert!(fault.contains(expected), "{fault}");
}

#[test]
fn a_step_that_was_not_saved_is_an_error_on_every_rank() {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), 1, ModelDivision::Even, &[1]);
    let path = directory.path().to_owned();
    let results = on_ranks(3, ModelDivision::Even, move |holder| {
        let (mut trainer, optimizer) = holder.parts();
        Checkpoints::at(&path).load_step(2, &mut trainer, Some(optimizer))
    });
    assert_eq!(same_fault(results).problem, CheckpointProblem::Missing);
}

#[test]
fn a_rank_that_is_gone_ends_the_save_of_the_others() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let errors = on_ranks(3, ModelDivision::Even, move |holder| {
        holder.fill(1);
        if holder.comm.rank() == 2 {
            holder.comm.abort("enough");
            return true;
        }
        matches!(save(&mut Checkpoints::at(&path), holder, 1), Err(Error::Communication(_)))
    });
    assert_eq!(errors, [true; 3]);
}

/// Each rank would write a part of a replicated parameter, and the checkpoint would be a mixture.
#[rstest]
fn ranks_that_hold_different_values_of_one_parameter_save_nothing(
    #[values(ModelDivision::Replicated, ModelDivision::Scattered, ModelDivision::OptimizerOnly)]
    division: ModelDivision,
    #[values(false, true)] copied: bool,
) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let fault = same_fault(on_ranks(4, division, move |holder| {
        let mut checkpoints = Checkpoints::at(&path);
        holder.fill(1);
        save(&mut checkpoints, holder, 1).unwrap();
        holder.fill(if holder.comm.rank() == 3 { 3 } else { 2 });
        let failed = if copied {
            let (mut trainer, optimizer) = holder.parts();
            checkpoints.start_save(&mut trainer, Some(optimizer), 2).unwrap().wait()
        } else {
            save(&mut checkpoints, holder, 2)
        };
        assert_eq!(checkpoints.steps().unwrap(), [1]);
        failed
    }));
    assert!(matches!(fault.problem, CheckpointProblem::Diverged { rank: 3, other: 0 | 1 }), "{fault}");
    assert!(fault.to_string().contains("hold different values of it"), "{fault}");
}

/// On some file systems a file cannot be removed while it is read.
#[test]
fn a_directory_that_cannot_be_removed_blocks_no_save() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    on_ranks(2, ModelDivision::Even, move |holder| {
        let mut checkpoints = Checkpoints::at(&path).keep_last(std::num::NonZeroUsize::MIN);
        checkpoints.disk.mutation_check = Some(Arc::new(|act, _| match act {
            DiskOperation::Remove => Err(io::Error::other("another process reads it")),
            _ => Ok(()),
        }));
        for step in 1..=3 {
            holder.fill(step);
            save(&mut checkpoints, holder, step).unwrap();
            assert_eq!(load(&mut checkpoints, holder).unwrap(), Some(step));
            assert!(holder.is_of(step, true));
        }
        assert_eq!(checkpoints.steps().unwrap(), [3]);
    });
}

/// A running mean can differ between ranks. The save takes that of rank 0 only.
#[test]
fn frozen_parameters_can_differ_between_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    on_ranks(3, ModelDivision::Replicated, move |holder| {
        holder.fill(1);
        let frozen =
            holder.infos.iter().filter(|info| info.same_as.is_none()).position(|info| !info.trainable);
        let values = |holder: &mut Holder, f: &dyn Fn(&mut [f16])| match holder.values[frozen.unwrap()]
            .slice_mut(0, 11)
        {
            crate::ValuesMut::F16(values) => f(values),
            other => panic!("{other:?}"),
        };
        let own = f16::from_f32(f32::from(u8::try_from(holder.comm.rank()).unwrap()));
        values(holder, &|values| values.fill(own));
        let mut checkpoints = Checkpoints::at(&path);
        save(&mut checkpoints, holder, 1).unwrap();
        load(&mut checkpoints, holder).unwrap();
        values(holder, &|values| assert_eq!(values, [f16::ZERO; 11]));
    });
}
