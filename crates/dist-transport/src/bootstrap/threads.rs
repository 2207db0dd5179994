//! A warning if this process computes with more threads than its share of the cores.

use std::fs::DirEntry;
use std::time::Duration;

use crate::bootstrap::session::Session;
use crate::{Deadline, Runtime, warning};

/// The variable for the number of threads of rayon, which candle and other libraries compute with.
const THREADS: &str = "RAYON_NUM_THREADS";

/// The time until the first check. The pause between two checks doubles up to the longest.
const FIRST_LOOK: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(64);

/// A check of this process's number of threads, which warns once if there are too many.
#[derive(Debug)]
pub(crate) struct ThreadWatch {
    next: Option<Deadline>,
    pause: Duration,
}

impl ThreadWatch {
    /// Creates a check, which does nothing if the program has switched the warning off.
    pub(crate) fn new(runtime: &Runtime, warns: bool) -> Self {
        let next = warns.then(|| runtime.deadline(FIRST_LOOK));
        Self { next, pause: FIRST_LOOK }
    }

    /// Counts the threads if a check is due, and warns if this rank has a pool of more threads than its share of the
    /// cores.
    pub(crate) fn look(&mut self, session: &Session) {
        let runtime = &session.runtime;
        if !self.next.is_some_and(|next| runtime.expired(next)) {
            return;
        }
        self.pause = (2 * self.pause).min(PAUSE_MAX);
        let (ranks, cores) = session.ranks_on_own_cores();
        let pool = pool(std::env::var(THREADS).ok().as_deref(), cores);
        let excess = threads().and_then(|threads| Excess::find(threads, pool, cores, ranks));
        self.next = excess.is_none().then(|| runtime.deadline(self.pause));
        if let Some(excess) = excess {
            warning::show(excess.text(session.rank.index()));
        }
    }
}

/// Returns the number of threads of rayon: the value of the variable, or one for each core that the process may use.
fn pool(variable: Option<&str>, cores: usize) -> usize {
    variable.and_then(|threads| threads.trim().parse().ok()).filter(|&threads| threads > 0).unwrap_or(cores)
}

/// A pool of more threads than a rank's share of the cores.
#[derive(Debug, PartialEq, Eq)]
struct Excess {
    pool: usize,
    share: usize,
    cores: usize,
    ranks: usize,
}

impl Excess {
    /// Returns the excess if a process has at least `pool` threads and its share of the cores is smaller. A
    /// process with fewer threads has no such pool: it computes in another way, or has not started to.
    fn find(threads: usize, pool: usize, cores: usize, ranks: usize) -> Option<Self> {
        let share = (cores / ranks).max(1);
        (pool > share && threads >= pool).then_some(Self { pool, share, cores, ranks })
    }

    fn text(&self, rank: usize) -> String {
        let Self { pool, share, cores, ranks } = self;
        format!(
            "rank {rank} computes with {pool} threads, and its share of {cores} cores that {ranks} ranks use is {share}: the ranks \
             slow each other down. Set {THREADS}={share} for each rank, or leave the variable unset and start the ranks by distctl run"
        )
    }
}

/// Returns the number of threads of this process, except its first thread and this library's threads, which
/// wait most of the time. Returns `None` if the system does not report it.
fn threads() -> Option<usize> {
    let tasks = std::fs::read_dir("/proc/self/task").ok()?;
    Some(tasks.flatten().filter(|task| !is_own(task)).count())
}

/// Returns `true` for the first thread of this process and for those of this library.
fn is_own(task: &DirEntry) -> bool {
    let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    name.starts_with("dist-") || task.file_name().to_str() == Some(&std::process::id().to_string())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::of_rayon_on_all_cores(8, None, 8, 4, Some(2))]
    #[case::that_somebody_has_set(8, Some("8"), 2, 1, Some(2))]
    #[case::on_one_core(2, Some("2"), 1, 3, Some(1))]
    #[case::of_fewer_cores_than_ranks(2, None, 2, 4, Some(1))]
    fn a_pool_above_the_share_is_found(
        #[case] threads: usize,
        #[case] variable: Option<&str>,
        #[case] cores: usize,
        #[case] ranks: usize,
        #[case] share: Option<usize>,
    ) {
        let excess = Excess::find(threads, pool(variable, cores), cores, ranks);
        assert_eq!(excess.map(|excess| excess.share), share);
    }

    #[rstest]
    #[case::as_distctl_sets_it(4, Some("2"), 8, 4)]
    #[case::of_one_rank(8, None, 8, 1)]
    #[case::that_is_bound_to_its_cores(2, None, 2, 1)]
    #[case::without_a_pool(3, None, 8, 4)]
    #[case::with_a_variable_that_says_nothing(1, Some("0"), 2, 1)]
    #[case::with_a_variable_that_is_no_number(1, Some("many"), 2, 1)]
    fn other_pools_are_not(
        #[case] threads: usize,
        #[case] variable: Option<&str>,
        #[case] cores: usize,
        #[case] ranks: usize,
    ) {
        assert_eq!(Excess::find(threads, pool(variable, cores), cores, ranks), None);
    }

    #[test]
    fn a_program_without_the_warning_counts_no_threads() {
        let runtime = Runtime::system();
        assert!(ThreadWatch::new(&runtime, true).next.is_some());
        assert!(ThreadWatch::new(&runtime, false).next.is_none());
    }

    #[test]
    fn the_warning_names_the_variable_to_set() {
        let text = Excess { pool: 8, share: 2, cores: 8, ranks: 4 }.text(3);
        assert!(
            text.starts_with(
                "rank 3 computes with 8 threads, and its share of 8 cores that 4 ranks use is 2"
            ),
            "{text}"
        );
        assert!(text.contains("Set RAYON_NUM_THREADS=2"), "{text}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn threads_of_the_program_are_counted_and_those_of_this_library_are_not() {
        let runtime = Runtime::system();
        // Other tests may run in this process, whose threads come and go: each thread is looked at by itself.
        let threads = ["dist-worker-1", "compute"].map(|name| {
            let (end, mut ended) = runtime.mailbox::<()>();
            let (begin, mut begun) = runtime.mailbox();
            let work = move || {
                begin.send(std::fs::read_link("/proc/thread-self").unwrap());
                let _ = ended.receive(None);
            };
            let thread = runtime.spawn(name, work).unwrap();
            (begun.receive(None).unwrap(), end, thread)
        });
        let tasks: Vec<_> = std::fs::read_dir("/proc/self/task").unwrap().flatten().collect();
        let counted = |path: &std::path::Path| {
            let task = tasks.iter().find(|task| Some(task.file_name().as_os_str()) == path.file_name());
            !is_own(task.unwrap())
        };
        assert_eq!(threads.each_ref().map(|(path, ..)| counted(path)), [false, true]);
        assert!(super::threads().unwrap() >= 1);
        for (_, end, thread) in threads {
            drop(end);
            thread.join().unwrap();
        }
    }
}
