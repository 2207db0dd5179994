//! Joins a job by TCP and shared memory, or by MPI, as `DIST_TRANSPORT` says.

use std::ffi::{OsStr, OsString};

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
            Self::WithoutMpi => false,
            Self::Join(source) => source.is_timeout(),
            #[cfg(feature = "mpi")]
            Self::Mpi(source) => source.is_timeout(),
        }
    }

    /// Returns the rank that the error is about, if it is about one.
    pub fn peer(&self) -> Option<usize> {
        match self {
            Self::WithoutMpi => None,
            Self::Join(source) => source.peer(),
            #[cfg(feature = "mpi")]
            Self::Mpi(source) => source.peer(),
        }
    }
}

/// Joins the job that a launcher has started this process for.
///
/// If `DIST_TRANSPORT` is `mpi`, messages go through MPI, as with [`dist_mpi::init`](https://docs.rs/dist-mpi); the
/// feature `mpi` is needed. Otherwise this is [`Communicator::from_env`].
///
/// ```
/// let comm = dist::init()?;
/// assert_eq!((comm.rank(), comm.world_size()), (0, 1));
/// # Ok::<_, dist::InitError>(())
/// ```
///
/// # Errors
/// If the ranks do not join in time, a variable is invalid, or MPI is asked for and the program was built without it.
#[doc(alias = "MPI_Init")]
#[doc(alias = "init_process_group")]
pub fn init() -> Result<Communicator, InitError> {
    if is_mpi(std::env::var_os("DIST_TRANSPORT")) {
        return init_mpi();
    }
    Ok(Communicator::from_env()?)
}

fn is_mpi(transport: Option<OsString>) -> bool {
    transport.as_deref() == Some(OsStr::new("mpi"))
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
    use super::*;

    #[test]
    fn only_the_word_mpi_asks_for_mpi() {
        for (transport, expected) in
            [(None, false), (Some("auto"), false), (Some(""), false), (Some("mpi"), true)]
        {
            assert_eq!(is_mpi(transport.map(OsString::from)), expected, "{transport:?}");
        }
    }

    #[cfg(not(feature = "mpi"))]
    #[test]
    fn a_program_without_mpi_names_the_feature() {
        let message = init_mpi().unwrap_err().to_string();
        assert!(message.contains("feature mpi"), "{message}");
    }
}
