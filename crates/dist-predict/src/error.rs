//! Errors of predictions.

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

dist_transport::error_enum! {
/// An error of a prediction.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There are more steps than can be followed one by one.
    #[error("the schedules of all ranks have more than {limit} steps together")]
    TooManySteps {
        /// The maximum number of steps.
        limit: u64,
    },
    /// The schedules of the ranks do not fit together.
    #[error(transparent)]
    Schedule(#[from] dist_algos::Error),
}
}
