//! Processes that are killed during a save, before each file-system operation of each rank.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dist_testkit::process;
use rustix::process::{Signal, getpid, kill_process};

use super::holder::{Holder, ModelDivision};
use super::{load, on_ranks, save};
use crate::Communicator;
use crate::checkpoint::Checkpoints;
use crate::checkpoint::disk::DiskOperation;

const RANKS: usize = 3;
const KILLS: usize = 50;
const NAME: &str = "checkpoint::tests::kill::a_rank_killed_at_any_moment_of_a_save_leaves_a_whole_checkpoint";

/// Every job continues from the newest checkpoint, which must be complete, and saves the next. One of its ranks is
/// killed during the save.
#[test]
fn a_rank_killed_at_any_moment_of_a_save_leaves_a_whole_checkpoint() {
    if let Some(rank) = process::rank() {
        return die(rank);
    }
    let directory = tempfile::tempdir().unwrap();
    let acts = acts_of_a_save(&directory.path().join("rehearsal"));
    let moments =
        acts.iter().enumerate().flat_map(|(rank, acts)| (0..acts.len()).map(move |act| (rank, act)));
    let moments: Vec<(usize, usize)> = moments.collect();
    // The rename of the directory commits the checkpoint.
    let renamed = acts[0].iter().position(|act| *act == DiskOperation::Rename).unwrap();
    let path = directory.path().join("checkpoints");
    let mut newest = None;
    for &(victim, act) in moments.iter().cycle().take(KILLS.max(moments.len())) {
        let variables = [
            ("CHECKPOINTS", path.display().to_string()),
            ("VICTIM", victim.to_string()),
            ("MOMENT", act.to_string()),
        ];
        let variables = variables.each_ref().map(|(name, value)| (*name, &**value));
        let job = process::ranks_with(RANKS, NAME, Duration::from_secs(30), &variables);
        let moment = format!("rank {victim} before {:?}, its act {act}", acts[victim][act]);
        assert_eq!(job.ranks[victim].status.and_then(|status| status.signal()), Some(9), "{moment}: {job:?}");
        assert!(job.ranks.iter().all(|rank| rank.status.is_some()), "{moment}: a rank hangs: {job:?}");
        let (step, whole) = newest_whole(&path);
        assert!(whole, "{moment}: {step:?} is not whole");
        let committed = victim == 0 && act > renamed;
        assert_eq!(
            step,
            if committed { newest.map_or(Some(1), |step| Some(step + 1)) } else { newest },
            "{moment}"
        );
        newest = step;
    }
}

/// Returns the operations of each rank in a save that removes an old checkpoint. Removals depend on leftovers and are
/// left out.
fn acts_of_a_save(path: &Path) -> Vec<Vec<DiskOperation>> {
    let path = path.to_owned();
    on_ranks(RANKS, ModelDivision::Even, move |holder| {
        let acts = Arc::new(Mutex::new(Vec::new()));
        for step in 1..=3 {
            let seen = acts.clone();
            seen.lock().unwrap().clear();
            holder.fill(step);
            let mut checkpoints = checkpoints(&path);
            checkpoints.disk.mutation_check = Some(Arc::new(move |act, _| {
                if act != DiskOperation::Remove {
                    seen.lock().unwrap().push(act);
                }
                Ok(())
            }));
            save(&mut checkpoints, holder, step).unwrap();
        }
        acts.lock().unwrap().clone()
    })
}

fn checkpoints(path: &Path) -> Checkpoints {
    Checkpoints::at(path).keep_last(std::num::NonZeroUsize::new(2).unwrap())
}

/// Returns the newest checkpoint's step, and `true` if one process can load its values.
fn newest_whole(path: &Path) -> (Option<u64>, bool) {
    let path = path.to_owned();
    let loaded = on_ranks(1, ModelDivision::Replicated, move |holder| {
        let step = load(&mut checkpoints(&path), holder).unwrap();
        (step, step.is_none_or(|step| holder.is_of(step % super::holder::STEPS, true)))
    });
    loaded[0]
}

/// Runs one rank of a job in which a rank is killed.
fn die(rank: usize) {
    let variable = |name| std::env::var(name).unwrap();
    let [victim, moment]: [usize; 2] = ["VICTIM", "MOMENT"].map(|name| variable(name).parse().unwrap());
    let path = PathBuf::from(variable("CHECKPOINTS"));
    let mut holder = Holder::new(Communicator::from_env().unwrap(), ModelDivision::Even);
    let mut checkpoints = checkpoints(&path);
    let step = load(&mut checkpoints, &mut holder).unwrap();
    let next = step.map_or(1, |step| step + 1);
    holder.fill(next % super::holder::STEPS);
    if rank == victim {
        let acts = AtomicUsize::new(0);
        checkpoints.disk.mutation_check = Some(Arc::new(move |act, _| {
            if act != DiskOperation::Remove && acts.fetch_add(1, Ordering::Relaxed) == moment {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            Ok(())
        }));
    }
    // A surviving rank gets an error or has already finished.
    let _outcome = save(&mut checkpoints, &mut holder, next);
}
