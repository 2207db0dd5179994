//! Environment variables other than those for joining.

use dist_transport::Error as TransportError;

use crate::{Crossovers, Error, Result};

/// Returns the sizes from which ranks that share memory use each direct algorithm, from `DIST_CROSSOVERS`. If the
/// variable is not set, these are the measured values. [`Communicator::from_env`](crate::Communicator::from_env)
/// calls this.
///
/// # Errors
/// If the variable is invalid.
pub fn crossovers_from_env() -> Result<Crossovers> {
    crossovers(|name| std::env::var(name).ok())
}

fn crossovers(get: impl Fn(&'static str) -> Option<String>) -> Result<Crossovers> {
    let name = "DIST_CROSSOVERS";
    let Some(value) = get(name).filter(|value| !value.is_empty()) else { return Ok(Crossovers::default()) };
    value.parse().map_err(|_| {
        let expected = "staged=BYTES, write_to_all=BYTES, read_from_all=BYTES, read_ordinary=BYTES or several, as in staged=64K,write_to_all=1M";
        Error::Join(TransportError::InvalidVariable { name, value, expected }.into())
    })
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn crossovers_are_measured_values_unless_the_environment_sets_others() {
        for silent in [None, Some(String::new())] {
            assert_eq!(crossovers(|_| silent.clone()).unwrap(), Crossovers::default());
        }
        let said = crossovers(|name| (name == "DIST_CROSSOVERS").then(|| "staged=1M".to_owned())).unwrap();
        assert_eq!((said.staged, said.write_to_all), (Some(1 << 20), None));
    }

    #[test]
    fn an_invalid_crossover_is_refused_with_the_variable_and_its_value() {
        let refused = crossovers(|_| Some("staged=many".to_owned())).unwrap_err();
        let source = refused.source().unwrap().to_string();
        assert!(source.starts_with("DIST_CROSSOVERS=\"staged=many\" is not staged=BYTES,"), "{source}");
    }
}
