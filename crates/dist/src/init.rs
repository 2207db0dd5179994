//! Joins a job by TCP and shared memory, or by MPI, as the environment says.

use dist_collectives::Communicator;

/// An error of [`init`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InitError {
    /// `DIST_TRANSPORT=mpi`, and the program has no MPI.
    #[error(
        "DIST_TRANSPORT=mpi, and this program was built without MPI: build it with the feature mpi of dist, or unset the variable"
    )]
    WithoutMpi,
    /// MPI knows only this process, although its launcher has started several.
    #[error(
        "the launcher has started {started} processes ({variable}), but MPI knows only this one: start them with the \
         launcher of the MPI library that this program is linked with, or under srun with its --mpi option"
    )]
    OtherLauncher {
        /// The number of processes that the launcher has started.
        started: String,
        /// The variable that says so.
        variable: &'static str,
    },
    /// The job was not joined.
    #[error(transparent)]
    Join(#[from] dist_collectives::Error),
    /// The job was not joined through MPI.
    #[cfg(feature = "mpi")]
    #[error(transparent)]
    Mpi(#[from] dist_mpi::Error),
}

impl InitError {
    /// Returns `true` if a deadline passed, on this rank or on another.
    pub fn is_timeout(&self) -> bool {
        match self {
            Self::WithoutMpi | Self::OtherLauncher { .. } => false,
            Self::Join(source) => source.is_timeout(),
            #[cfg(feature = "mpi")]
            Self::Mpi(source) => source.is_timeout(),
        }
    }

    /// Returns the rank that the error is about, if it is about one.
    pub fn peer(&self) -> Option<usize> {
        match self {
            Self::WithoutMpi | Self::OtherLauncher { .. } => None,
            Self::Join(source) => source.peer(),
            #[cfg(feature = "mpi")]
            Self::Mpi(source) => source.peer(),
        }
    }
}

/// Joins the job that a launcher has started this process for.
///
/// Messages go through MPI, as with [`dist_mpi::init`](https://docs.rs/dist-mpi), in two cases:
/// - `DIST_TRANSPORT` is `mpi`.
/// - An MPI launcher has started several processes, neither `MASTER_ADDR` nor `RANK` or `WORLD_SIZE` is set, and
///   `DIST_TRANSPORT` is `auto` or not set. Known are Open MPI (`OMPI_COMM_WORLD_SIZE`), MPICH and its relatives
///   (`PMI_SIZE`), and `srun --mpi=pmix` (`PMIX_RANK`).
///
/// Both need the feature `mpi`. Otherwise this is [`Communicator::from_env`].
///
/// ```
/// let comm = dist::init()?;
/// assert_eq!((comm.rank(), comm.world_size()), (0, 1));
/// # Ok::<_, dist::InitError>(())
/// ```
///
/// # Errors
/// If the ranks do not join in time, a variable is missing or invalid, `DIST_TRANSPORT` is `mpi` and the program was built
/// without MPI, or the launcher belongs to another MPI library.
#[doc(alias = "MPI_Init")]
#[doc(alias = "init_process_group")]
pub fn init() -> Result<Communicator, InitError> {
    let get = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    if uses_mpi(get, cfg!(feature = "mpi")) {
        let comm = init_mpi()?;
        check_world_size(get, comm.world_size())?;
        return Ok(comm);
    }
    Ok(Communicator::from_env()?)
}

/// Variables with the number of processes that an MPI launcher has started.
const SIZES: [&str; 2] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"];
/// The number of processes that srun has started.
const SLURM_SIZE: &str = "SLURM_STEP_NUM_TASKS";
/// A variable that the plugin of srun for PMIx sets.
const PMIX: &str = "PMIX_RANK";

/// Returns `true` if messages go through MPI, in a program that was built with it or without it.
fn uses_mpi(get: impl Fn(&str) -> Option<String>, has_mpi: bool) -> bool {
    let is_set = |name: &str| get(name).is_some_and(|value| !value.is_empty());
    match get("DIST_TRANSPORT").as_deref() {
        Some("mpi") => true,
        None | Some("" | "auto") => {
            let has_place = ["MASTER_ADDR", "RANK", "WORLD_SIZE"].into_iter().any(is_set);
            let has_launcher = match started(&get) {
                Some((SLURM_SIZE, _)) => is_set(PMIX),
                started => started.is_some(),
            };
            has_mpi && !has_place && has_launcher
        }
        Some(_) => false,
    }
}

/// Returns the number of processes that a launcher of MPI has started, and the variable that says so, if there are several.
/// mpirun may start its processes in a step of Slurm, so its own variables come first.
fn started(get: impl Fn(&str) -> Option<String>) -> Option<(&'static str, String)> {
    let read = |name| Some((name, get(name).filter(|size| !size.is_empty())?));
    let mut sizes: Vec<_> = SIZES.into_iter().filter_map(read).collect();
    if sizes.is_empty() {
        sizes.extend(read(SLURM_SIZE));
    }
    sizes.into_iter().find(|(_, size)| size != "1")
}

/// Returns an error if MPI knows one process where its launcher has started several. A launcher of another MPI library
/// starts processes that would each be a job of their own.
fn check_world_size(get: impl Fn(&str) -> Option<String>, world_size: usize) -> Result<(), InitError> {
    match started(get) {
        Some((variable, started)) if world_size == 1 => Err(InitError::OtherLauncher { started, variable }),
        _ => Ok(()),
    }
}

#[cfg(feature = "mpi")]
fn init_mpi() -> Result<Communicator, InitError> {
    Ok(dist_mpi::init()?)
}

#[cfg(not(feature = "mpi"))]
fn init_mpi() -> Result<Communicator, InitError> {
    Err(InitError::WithoutMpi)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    type Variables<'a> = &'a [(&'a str, &'a str)];

    fn variables(set: Variables<'_>) -> impl Fn(&str) -> Option<String> {
        move |name| set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    }

    const OPEN_MPI: (&str, &str) = ("OMPI_COMM_WORLD_SIZE", "4");
    const MPICH: (&str, &str) = ("PMI_SIZE", "4");
    const SRUN: [(&str, &str); 2] = [("SLURM_STEP_NUM_TASKS", "4"), ("PMIX_RANK", "0")];
    const ADDRESS: (&str, &str) = ("MASTER_ADDR", "node0");

    #[rstest]
    #[case::alone(&[], false)]
    #[case::open_mpi(&[OPEN_MPI], true)]
    #[case::mpich(&[MPICH], true)]
    #[case::srun_with_pmix(&SRUN, true)]
    #[case::srun_without_pmix(&SRUN[..1], false)]
    #[case::a_slurm_batch_script(&[("SLURM_NTASKS", "4"), SRUN[1]], false)]
    #[case::one_process(&[("OMPI_COMM_WORLD_SIZE", "1")], false)]
    #[case::empty(&[("PMI_SIZE", "")], false)]
    #[case::with_an_address(&[OPEN_MPI, ADDRESS], false)]
    #[case::with_an_empty_address(&[OPEN_MPI, ("MASTER_ADDR", "")], true)]
    #[case::with_a_rank(&[MPICH, ("RANK", "0")], false)]
    #[case::with_a_world_size(&[MPICH, ("WORLD_SIZE", "4")], false)]
    #[case::auto(&[OPEN_MPI, ("DIST_TRANSPORT", "auto")], true)]
    #[case::not_set(&[OPEN_MPI, ("DIST_TRANSPORT", "")], true)]
    #[case::tcp(&[OPEN_MPI, ("DIST_TRANSPORT", "tcp")], false)]
    fn a_program_with_mpi_uses_it_under_an_mpi_launcher_that_gives_no_address(
        #[case] set: Variables<'_>,
        #[case] expected: bool,
    ) {
        assert_eq!(uses_mpi(variables(set), true), expected);
        assert!(!uses_mpi(variables(set), false), "a program without MPI joins by TCP");
    }

    #[test]
    fn the_word_mpi_asks_for_mpi_with_any_launcher() {
        for set in [&[("DIST_TRANSPORT", "mpi")][..], &[("DIST_TRANSPORT", "mpi"), ADDRESS]] {
            assert!(
                [true, false].map(|has_mpi| uses_mpi(variables(set), has_mpi)) == [true, true],
                "{set:?}"
            );
        }
    }

    #[rstest]
    #[case(&[OPEN_MPI], 4, None)]
    #[case(&[OPEN_MPI], 1, Some("has started 4 processes (OMPI_COMM_WORLD_SIZE)"))]
    #[case(&SRUN, 1, Some("has started 4 processes (SLURM_STEP_NUM_TASKS)"))]
    #[case(&[("PMI_SIZE", "1")], 1, None)]
    #[case::one_of_mpirun_in_a_step(&[("OMPI_COMM_WORLD_SIZE", "1"), SRUN[0]], 1, None)]
    #[case(&[], 1, None)]
    fn processes_of_the_launcher_of_another_library_do_not_run_alone(
        #[case] set: Variables<'_>,
        #[case] world_size: usize,
        #[case] expected: Option<&str>,
    ) {
        let error = check_world_size(variables(set), world_size).err().map(|error| error.to_string());
        match (&error, expected) {
            (Some(error), Some(expected)) => assert!(error.contains(expected), "{error}"),
            _ => assert_eq!(error.as_deref(), expected),
        }
    }

    #[cfg(not(feature = "mpi"))]
    #[test]
    fn a_program_without_mpi_names_the_feature() {
        let message = init_mpi().unwrap_err().to_string();
        assert!(message.contains("feature mpi"), "{message}");
    }
}
