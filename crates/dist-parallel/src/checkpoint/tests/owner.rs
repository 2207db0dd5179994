//! One job at a time saves to a directory, also on file systems without locks.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rstest::rstest;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::holder::ModelDivision;
use super::{load, on_ranks, same_fault, save};
use crate::checkpoint::disk::{Disk, DiskOperation};
use crate::checkpoint::owner::{OWNER, Owner};
use crate::checkpoint::{CheckpointProblem, Checkpoints};

/// Returns a file system whose locks fail with this error, or work.
fn disk(lock_error: Option<i32>) -> Disk {
    let mutation_check = move |act, _: &Path| match (act, lock_error) {
        (DiskOperation::Lock, Some(number)) => Err(io::Error::from_raw_os_error(number)),
        _ => Ok(()),
    };
    Disk { mutation_check: Some(Arc::new(mutation_check)), ..Disk::default() }
}

#[rstest]
fn a_second_owner_is_refused_while_the_first_lives(
    #[values(None, Some(ENOTSUP), Some(ENOLCK))] lock_error: Option<i32>,
) {
    let directory = tempfile::tempdir().unwrap();
    let disk = disk(lock_error);
    let (mut first, mut second) = (Owner::default(), Owner::default());
    let token = first.claim(&disk, directory.path()).unwrap();
    assert_eq!(first.claim(&disk, directory.path()).unwrap(), token);
    let refused = second.claim(&disk, directory.path()).unwrap_err();
    assert!(matches!(&refused.problem, CheckpointProblem::InUse { .. }), "{refused}");
    let process = format!("process {} on host ", std::process::id());
    assert!(refused.to_string().contains(&process), "{refused}");
    first.check(&disk, directory.path()).unwrap();
    drop(first);
    second.claim(&disk, directory.path()).unwrap();
}

/// On some file systems another host does not see this host's lock.
#[test]
fn a_job_whose_directory_another_has_taken_saves_no_more() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let results = on_ranks(2, ModelDivision::Even, move |holder| {
        let mut checkpoints = Checkpoints::at(&path);
        holder.fill(1);
        save(&mut checkpoints, holder, 1).unwrap();
        if holder.comm.rank() == 0 {
            let record = fs::read_to_string(path.join(OWNER)).unwrap();
            let record =
                record.replacen("\"pid\":", "\"pid\":1", 1).replacen("\"host\":\"", "\"host\":\"other-", 1);
            fs::write(path.join(OWNER), record).unwrap();
        }
        holder.fill(2);
        let refused = save(&mut checkpoints, holder, 2);
        assert_eq!(load(&mut checkpoints, holder).unwrap(), Some(1));
        refused
    });
    let fault = same_fault(results);
    assert!(
        matches!(&fault.problem, CheckpointProblem::InUse { owner } if owner.contains("on host other-")),
        "{fault}"
    );
}

/// The lock holder is a process on another host, or a child of a dead process.
#[rstest]
#[case::a_dead_process_of_this_host(|record: String| record.replacen("\"process_started\":", "\"process_started\":1", 1), true)]
#[case::a_process_of_another_host(|record: String| record.replacen("\"pids_of\":\"", "\"pids_of\":\"other", 1), false)]
#[case::one_that_does_not_say(|_| String::new(), false)]
fn a_lock_counts_unless_its_job_is_known_to_be_dead(
    #[case] change: fn(String) -> String,
    #[case] is_dead: bool,
) {
    let directory = tempfile::tempdir().unwrap();
    let disk = Disk::default();
    let mut dead = Owner::default();
    dead.claim(&disk, directory.path()).unwrap();
    drop(dead);
    let path = directory.path().join(OWNER);
    fs::write(&path, change(fs::read_to_string(&path).unwrap())).unwrap();
    let child = File::open(&path).unwrap();
    child.try_lock().unwrap();
    let claimed = Owner::default().claim(&disk, directory.path());
    assert_eq!(claimed.is_ok(), is_dead, "{claimed:?}");
}

/// Without locks, only the record of a process that is known to live keeps others out.
#[rstest]
#[case::a_dead_process(|record: String| record.replacen("\"process_started\":", "\"process_started\":1", 1))]
#[case::a_process_of_another_host(|record: String| record.replacen("\"pids_of\":\"", "\"pids_of\":\"other", 1))]
#[case::half_a_record(|record: String| record[..record.len() / 2].to_owned())]
fn the_directory_of_a_dead_job_is_taken_over(
    #[case] change: fn(String) -> String,
    #[values(None, Some(ENOTSUP))] lock_error: Option<i32>,
) {
    let directory = tempfile::tempdir().unwrap();
    let disk = disk(lock_error);
    let mut dead = Owner::default();
    dead.claim(&disk, directory.path()).unwrap();
    let path = directory.path().join(OWNER);
    let record = fs::read_to_string(&path).unwrap();
    drop(dead);
    fs::write(&path, change(record)).unwrap();
    let mut owner = Owner::default();
    owner.claim(&disk, directory.path()).unwrap();
    owner.check(&disk, directory.path()).unwrap();
}

#[test]
fn a_directory_that_was_removed_and_made_again_is_claimed_again() {
    let directory = tempfile::tempdir().unwrap();
    let disk = Disk::default();
    let mut owner = Owner::default();
    owner.claim(&disk, directory.path()).unwrap();
    fs::remove_file(directory.path().join(OWNER)).unwrap();
    owner.claim(&disk, directory.path()).unwrap();
    assert!(Owner::default().claim(&disk, directory.path()).is_err());
}

#[test]
fn another_trainer_of_the_job_is_refused_and_the_first_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let results = on_ranks(3, ModelDivision::Even, move |holder| {
        let (mut first, mut second) = (Checkpoints::at(&path), Checkpoints::at(&path));
        holder.fill(1);
        save(&mut first, holder, 1).unwrap();
        let refused = save(&mut second, holder, 2);
        save(&mut first, holder, 3).unwrap();
        assert_eq!(first.steps().unwrap(), [1, 3]);
        refused
    });
    let fault = same_fault(results);
    let CheckpointProblem::InUse { owner } = &fault.problem else { panic!("{fault}") };
    assert!(owner.contains("this same process with another trainer"), "{fault}");
}

/// A counter of warnings.
struct Warnings(Arc<AtomicUsize>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[rstest]
fn checkpoints_are_saved_with_one_warning_if_directories_cannot_be_synced(
    #[values(EINVAL, ENOTSUP, ENOSYS)] number: i32,
) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("checkpoints");
    let warnings = on_ranks(1, ModelDivision::Even, move |holder| {
        let warnings = Arc::new(AtomicUsize::new(0));
        let counted = Warnings(Arc::clone(&warnings));
        tracing::subscriber::with_default(counted, || {
            let mut checkpoints = Checkpoints::at(&path);
            checkpoints.disk.mutation_check = Some(Arc::new(move |act, _| match act {
                DiskOperation::SyncDirectory => Err(io::Error::from_raw_os_error(number)),
                _ => Ok(()),
            }));
            for step in 1..=3 {
                holder.fill(step);
                save(&mut checkpoints, holder, step).unwrap();
            }
            assert_eq!(load(&mut checkpoints, holder).unwrap(), Some(3));
        });
        warnings.load(Ordering::Relaxed)
    });
    assert_eq!(warnings, [1]);
}

#[rstest]
fn a_disk_error_names_the_operation_and_the_file(
    #[values(
        DiskOperation::SyncDirectory,
        DiskOperation::Sync,
        DiskOperation::Create,
        DiskOperation::Rename,
        DiskOperation::Lock
    )]
    act: DiskOperation,
) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let results = on_ranks(2, ModelDivision::Even, move |holder| {
        let mut checkpoints = Checkpoints::at(&path);
        checkpoints.disk.mutation_check =
            Some(Arc::new(
                move |now, _| {
                    if now == act { Err(io::Error::from_raw_os_error(EIO)) } else { Ok(()) }
                },
            ));
        holder.fill(1);
        save(&mut checkpoints, holder, 1)
    });
    let fault = same_fault(results).to_string();
    let said = format!("cannot {act} {}", directory.path().parent().unwrap().display());
    assert!(fault.contains(&said) && fault.contains("Input/output error"), "{fault}");
}

/// The numbers of Linux.
const EIO: i32 = 5;
const EINVAL: i32 = 22;
const ENOLCK: i32 = 37;
const ENOSYS: i32 = 38;
const ENOTSUP: i32 = 95;
