//! Collectives in arguments, and what their speeds are compared by.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use dist_collectives::{Algorithm, Operation};

/// Reads the name of a collective that there are algorithms of.
pub(crate) fn collective() -> impl TypedValueParser<Value = Operation> {
    let names =
        Operation::ALL.into_iter().filter(|&operation| has_algorithms(operation)).map(Operation::name);
    PossibleValuesParser::new(names).map(|name| Operation::parse(&name).expect("it is one of the names"))
}

/// The collective of this name, if there are algorithms of it.
pub(crate) fn parse(name: &str) -> Option<Operation> {
    Operation::parse(name).filter(|&operation| has_algorithms(operation))
}

/// An exclusive scan is measured and predicted as a scan.
fn has_algorithms(operation: Operation) -> bool {
    operation != Operation::ExclusiveScan && Algorithm::of(operation).next().is_some()
}

/// By what the bytes per second of a rank's input are multiplied to give those on its link.
pub(crate) fn bus_factor(operation: Operation, world_size: usize) -> f64 {
    let n = world_size as f64;
    match operation {
        Operation::AllReduce => 2.0 * (n - 1.0) / n,
        Operation::ReduceScatter | Operation::AllToAll | Operation::Scatter => (n - 1.0) / n,
        Operation::AllGather | Operation::Gather => n - 1.0,
        _ => 1.0,
    }
}
