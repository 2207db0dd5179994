//! Checkpoints that are saved on some ranks and loaded on others.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rstest::rstest;

use super::holder::{DIVISIONS, ModelDivision};
use super::{load, on_ranks, save, saved};
use crate::checkpoint::disk::DiskOperation;
use crate::checkpoint::index::{CHECKED_BYTES, Index};
use crate::checkpoint::{Checkpoints, INDEX, Shards, Slice};
use crate::{OptimizerState as _, Sgd, SgdOptions, SliceStates};

#[rstest]
fn any_ranks_and_division_load_a_save_of_any_others(
    #[values(1, 2, 3, 4, 5, 6)] before: usize,
    #[values(1, 2, 3, 4, 5, 6)] after: usize,
) {
    let directory = tempfile::tempdir().unwrap();
    for (number, from) in DIVISIONS.into_iter().enumerate() {
        let path = directory.path().join(number.to_string());
        saved(&path, before, from, &[7]);
        for to in DIVISIONS {
            let path = path.clone();
            let loaded = on_ranks(after, to, move |holder| {
                let step = load(&mut Checkpoints::at(&path), holder).unwrap();
                (step, holder.is_of(7, true), holder.loaded)
            });
            assert_eq!(loaded, vec![(Some(7), true, 1); after], "{from:?} to {to:?}");
        }
    }
}

#[test]
fn without_a_checkpoint_nothing_is_loaded() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("not yet");
    let loaded = on_ranks(3, ModelDivision::Even, move |holder| {
        holder.fill(5);
        (load(&mut Checkpoints::at(&path), holder).unwrap(), holder.is_of(5, true), holder.loaded)
    });
    assert_eq!(loaded, [(None, true, 0); 3]);
}

#[test]
fn the_newest_checkpoint_is_loaded_by_default_and_older_ones_by_their_step() {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), 2, ModelDivision::Even, &[10, 20, 15, 10]);
    let path = directory.path().to_owned();
    let loaded = on_ranks(3, ModelDivision::Even, move |holder| {
        let mut checkpoints = Checkpoints::at(&path);
        let newest = load(&mut checkpoints, holder).unwrap();
        let is_newest = holder.is_of(10, true);
        let (mut trainer, optimizer) = holder.parts();
        checkpoints.load_step(20, &mut trainer, Some(optimizer)).unwrap();
        (newest, is_newest, holder.is_of(20, true), checkpoints.steps().unwrap())
    });
    assert_eq!(loaded, vec![(Some(10), true, true, vec![10, 20, 15, 10]); 3]);
}

#[test]
fn only_the_last_checkpoints_are_kept() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    on_ranks(2, ModelDivision::Replicated, move |holder| {
        let mut checkpoints = Checkpoints::at(&path).keep_last(NonZeroUsize::new(2).unwrap());
        for step in [1, 2, 3, 4] {
            holder.fill(step);
            save(&mut checkpoints, holder, step).unwrap();
        }
    });
    // Rank 0 removes the old ones, and the other rank does not wait for it.
    assert_eq!(Checkpoints::at(directory.path()).steps().unwrap(), [3, 4]);
    let left = std::fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(left, 3, "two checkpoints and the owner's record: nothing is left of those that were removed");
}

#[test]
fn parameters_alone_can_be_loaded_and_saved() {
    let directory = tempfile::tempdir().unwrap();
    let (with, without) = (directory.path().join("with"), directory.path().join("without"));
    saved(&with, 2, ModelDivision::Even, &[7]);
    let loaded = on_ranks(3, ModelDivision::Even, move |holder| {
        let (mut trainer, _) = holder.parts();
        assert_eq!(Checkpoints::at(&with).load(&mut trainer, None).unwrap(), Some(7));
        let alone = holder.is_of(7, false) && !holder.is_of(7, true);
        let (mut trainer, _) = holder.parts();
        Checkpoints::at(&without).save(&mut trainer, None, 7).unwrap();
        assert_eq!(Checkpoints::at(&without).load(&mut trainer, None).unwrap(), Some(7));
        let other_kind = [load(&mut Checkpoints::at(&without), holder).unwrap_err().to_string(), {
            let mut sgd = Sgd::new(SgdOptions::default()).unwrap();
            let (mut trainer, _) = holder.parts();
            Checkpoints::at(&with).load(&mut trainer, Some(&mut sgd)).unwrap_err().to_string()
        }];
        (alone, holder.is_of(7, false), other_kind)
    });
    for (alone, after, [no_state, other_kind]) in loaded {
        assert!(alone && after);
        assert!(
            no_state.contains("the optimizer of this training is adamw, that of the checkpoint none"),
            "{no_state}"
        );
        assert!(
            other_kind.contains("the optimizer of this training is sgd, that of the checkpoint adamw"),
            "{other_kind}"
        );
    }
}

#[test]
fn a_copy_is_taken_at_the_call_and_saves_that_were_started_end_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let outcome = on_ranks(3, ModelDivision::Even, move |holder| {
        let mut checkpoints = Checkpoints::at(&path);
        let start = |checkpoints: &mut Checkpoints, holder: &mut super::Holder, step| {
            holder.fill(step);
            let (mut trainer, optimizer) = holder.parts();
            checkpoints.start_save(&mut trainer, Some(optimizer), step).unwrap()
        };
        let first = start(&mut checkpoints, holder, 1);
        let mut second = start(&mut checkpoints, holder, 2);
        drop(start(&mut checkpoints, holder, 3));
        // Training continues.
        holder.fill(40);
        holder.comm.barrier().unwrap();
        assert_eq!((first.step(), second.step()), (1, 2));
        // The third save has ended, so the earlier ones have too.
        let done = second.is_done();
        first.wait().unwrap();
        second.wait().unwrap();
        save(&mut checkpoints, holder, 40).unwrap();
        let steps = checkpoints.steps().unwrap();
        let all_of_one_step = steps.iter().map(|&step| {
            let (mut trainer, optimizer) = holder.parts();
            checkpoints.load_step(step, &mut trainer, Some(optimizer)).unwrap();
            holder.step()
        });
        (done, all_of_one_step.collect::<Vec<_>>())
    });
    assert_eq!(outcome, vec![(true, vec![Some(1), Some(2), Some(3), Some(40)]); 3]);
}

/// The disk does not start before the ranks have compared their requests.
#[test]
fn training_goes_on_while_a_save_waits_for_its_disk() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let loaded = on_ranks(2, ModelDivision::Even, move |holder| {
        holder.fill(1);
        let (begin, begun) = holder.comm.runtime().mailbox::<()>();
        let begun = Mutex::new(begun);
        let mut checkpoints = Checkpoints::at(&path);
        checkpoints.disk.mutation_check = Some(Arc::new(move |act, _| {
            if act == DiskOperation::Create {
                // The mailbox closes when the disk may start.
                let _closed = begun.lock().unwrap().receive(None);
            }
            Ok(())
        }));
        let (mut trainer, optimizer) = holder.parts();
        let mut saving = checkpoints.start_save(&mut trainer, Some(optimizer), 1).unwrap();
        holder.fill(2);
        holder.comm.barrier().unwrap();
        let done = saving.is_done();
        drop(begin);
        saving.wait().unwrap();
        (done, load(&mut Checkpoints::at(&path), holder).unwrap(), holder.is_of(1, true))
    });
    assert_eq!(loaded, [(false, Some(1), true); 2]);
}

/// The load returns the last save, even if the disk is slow.
#[test]
fn a_save_that_was_started_ends_before_anything_is_loaded() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let loaded = on_ranks(2, ModelDivision::Even, move |holder| {
        let mut checkpoints = Checkpoints::at(&path);
        let mut start = |checkpoints: &mut Checkpoints, step| {
            holder.fill(step);
            let (mut trainer, optimizer) = holder.parts();
            checkpoints.start_save(&mut trainer, Some(optimizer), step).unwrap()
        };
        let savings = [1, 2, 3].map(|step| start(&mut checkpoints, step));
        holder.fill(4);
        let newest = (load(&mut checkpoints, holder).unwrap(), holder.is_of(3, true));
        savings.into_iter().for_each(|saving| saving.wait().unwrap());
        newest
    });
    assert_eq!(loaded, [(Some(3), true); 2]);
}

#[test]
fn waiting_for_a_save_ends_at_its_limit_and_the_save_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let waited = on_ranks(2, ModelDivision::Even, move |holder| {
        holder.fill(1);
        let mut checkpoints = Checkpoints::at(&path);
        if holder.comm.rank() == 1 {
            // The other rank's save waits for this one.
            let runtime = holder.comm.runtime().clone();
            runtime.sleep(std::time::Duration::from_secs(30));
        }
        let (mut trainer, optimizer) = holder.parts();
        let saving = checkpoints.start_save(&mut trainer, Some(optimizer), 1).unwrap();
        match saving.wait_timeout(std::time::Duration::from_secs(20)) {
            Ok(outcome) => {
                outcome.unwrap();
                false
            }
            Err(saving) => {
                saving.wait().unwrap();
                true
            }
        }
    });
    assert_eq!(waited, [true, false]);
}

/// Returns the tensors and ranges that a rank needs.
fn needs(trainer: &dyn Shards, states: &SliceStates) -> Vec<(String, usize, usize)> {
    let infos = trainer.infos();
    let parameters = trainer.parameters().chunks.into_iter();
    let mut needs: Vec<_> =
        parameters.map(|chunk| (infos[chunk.parameter].name.clone(), chunk.offset, chunk.len)).collect();
    for Slice { number, chunk } in trainer.slices().chunks {
        let dtype = infos[chunk.parameter].dtype;
        let name = |state: &str| format!("optimizer/{state}/{}", infos[chunk.parameter].name);
        if states.get(number).is_some() {
            needs.extend(states.arrays(dtype).map(|(state, _)| (name(state), chunk.offset, chunk.len)));
            needs.extend(states.scalars().map(|state| (name(state), 0, 1)));
        }
    }
    needs
}

/// Each rank reads the headers of the files that it needs or that are its share to check, and the blocks that it
/// needs.
#[rstest]
#[case::the_same_ranks(4, 4)]
#[case::more(2, 6)]
#[case::fewer(6, 4)]
#[case::one(3, 1)]
fn a_rank_reads_the_bytes_that_it_needs(#[case] before: usize, #[case] after: usize) {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), before, ModelDivision::Even, &[9]);
    let path = directory.path().to_owned();
    let reads = on_ranks(after, ModelDivision::Even, move |holder| {
        let bytes = Arc::new(AtomicU64::new(0));
        let mut checkpoints = Checkpoints::at(&path);
        let counted = bytes.clone();
        checkpoints.disk.mutation_check = Some(Arc::new(move |act, _| {
            if let DiskOperation::Read { bytes } = act {
                counted.fetch_add(bytes as u64, Ordering::Relaxed);
            }
            Ok(())
        }));
        load(&mut checkpoints, holder).unwrap();
        let (trainer, optimizer) = holder.parts();
        (bytes.load(Ordering::Relaxed), needs(&trainer, optimizer.states().unwrap()))
    });
    let checkpoint = directory.path().join("checkpoint-1-step-9");
    let bytes = std::fs::read(checkpoint.join(INDEX)).unwrap();
    let index = Index::decode(&checkpoint.join(INDEX), &bytes).unwrap();
    for (rank, (read, needs)) in reads.into_iter().enumerate() {
        let mut files: std::collections::BTreeSet<usize> =
            (0..before).filter(|file| file % after == rank).collect();
        let mut expected = 0;
        for (name, offset, len) in needs {
            let tensor = index.tensors.iter().find(|tensor| tensor.name.to_string() == name).unwrap();
            for run in &tensor.runs {
                let run_bytes = (run.len * tensor.dtype.size()) as u64;
                assert!(run_bytes <= CHECKED_BYTES as u64, "a run of this small model is one block");
                if run.offset < offset + len && offset < run.offset + run.len {
                    files.insert(run.file);
                    expected += run_bytes;
                }
            }
        }
        expected += files.iter().map(|&file| index.files[file].header_bytes).sum::<u64>();
        assert_eq!(read, expected, "rank {rank}");
    }
}
