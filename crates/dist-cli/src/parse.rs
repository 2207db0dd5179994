//! Values of arguments.

use std::time::Duration;

/// A number of ranks: at least 1.
pub(crate) fn ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("a world has at least 1 rank".to_owned()),
        Ok(ranks) if ranks <= RANKS_MAX => Ok(ranks),
        Ok(_) => Err(format!("this machine cannot run more than {RANKS_MAX} processes for one job")),
        Err(_) => Err("this is not a number of ranks".to_owned()),
    }
}

/// What a machine may be asked to start: a guard against a slip of the finger.
const RANKS_MAX: usize = 4096;

/// A length of time in seconds, with a fraction if need be.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().map_err(|e| e.to_string())?;
    Duration::try_from_secs_f64(seconds).map_err(|e| e.to_string())
}
