//! Parsers of argument values.

use std::ops::RangeInclusive;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use dist_collectives::{DType, ReduceOp, ReductionOrder};
use dist_transport::process::Medium;

/// Parses a number of ranks that one machine can run.
pub(crate) fn ranks(text: &str) -> Result<usize, String> {
    count(text, "ranks", 1..=RANKS_MAX)
}

/// Parses a number of ranks, at least 2.
pub(crate) fn several_ranks(text: &str) -> Result<usize, String> {
    count(text, "ranks", 2..=RANKS_MAX)
}

/// Parses a number of machines.
pub(crate) fn nodes(text: &str) -> Result<usize, String> {
    count(text, "machines", 1..=NODES_MAX)
}

/// Parses a number of `things` in a range.
pub(crate) fn count(text: &str, things: &str, range: RangeInclusive<usize>) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| range.contains(count));
    count.ok_or_else(|| format!("this is not a number of {things} from {} to {}", range.start(), range.end()))
}

/// The transport of messages.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub(crate) enum TransportName {
    Auto,
    Tcp,
    Shm,
}

impl TransportName {
    pub(crate) fn medium(self) -> Medium {
        match self {
            Self::Auto => Medium::Auto,
            Self::Tcp => Medium::Tcp,
            Self::Shm => Medium::Shm,
        }
    }
}

/// With the maximum number of ranks on each machine, this gives the largest possible world.
const NODES_MAX: usize = 1 << 19;

/// Maximum number of ranks on one machine. It protects against typing errors.
const RANKS_MAX: usize = 4096;

/// Parses a duration in seconds, with or without a fraction.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| "this is not a number of seconds, as in 0, 5 or 0.25".to_owned())
}

/// Parses a number of bytes. A unit of 2^10, 2^20, 2^30 or 2^40 may follow: `K`, `M`, `G` or `T`, in either
/// case, or `KiB` …
pub(crate) fn bytes(text: &str) -> Result<usize, String> {
    let unit_start = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(unit_start);
    let shift = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        "kb" | "mb" | "gb" | "tb" => {
            return Err("write KiB, MiB, GiB or TiB, or K, M, G or T: these are powers of 1024".to_owned());
        }
        _ => return Err(SIZE.to_owned()),
    };
    let number: usize = digits.parse().map_err(|_| SIZE.to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "this size is too large".to_owned())
}

const SIZE: &str = "a size is a whole number, as in 8, 64K, 1M, 1MiB or 2G";

pub(crate) fn dtype() -> impl TypedValueParser<Value = DType> {
    named(DType::ALL.map(DType::name), DType::parse)
}

pub(crate) fn reduce_op() -> impl TypedValueParser<Value = ReduceOp> {
    named(ReduceOp::PLAIN.map(ReduceOp::name), ReduceOp::parse)
}

pub(crate) fn order() -> impl TypedValueParser<Value = ReductionOrder> {
    named(ReductionOrder::ALL.map(ReductionOrder::name), ReductionOrder::parse)
}

/// Returns `true` if two names differ at most by `-` and `_`, as `all_reduce`, `all-reduce` and `allreduce` do.
pub(crate) fn same_name(a: &str, b: &str) -> bool {
    let abbreviation = |name: &'_ str| name.replace(['-', '_'], "");
    abbreviation(a) == abbreviation(b)
}

/// Returns a name that the help lists, with its other spellings, which the help does not list.
pub(crate) fn possible_value(name: &'static str) -> PossibleValue {
    let spellings = [name.replace('_', "-"), name.replace('_', "")];
    let aliases = spellings.into_iter().filter(|spelling| spelling != name);
    PossibleValue::new(name).aliases(aliases.collect::<std::collections::BTreeSet<_>>())
}

/// Returns a parser of one of these names, which the help lists.
fn named<T: Clone + Send + Sync + 'static, const N: usize>(
    names: [&'static str; N],
    parse: fn(&str) -> Option<T>,
) -> impl TypedValueParser<Value = T> {
    let values = names.map(possible_value);
    PossibleValuesParser::new(values).map(move |name| {
        let name = names.into_iter().find(|known| same_name(known, &name)).expect("it is one of the names");
        parse(name).expect("it is one of the names")
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("0", Some(0))]
    #[case("8", Some(8))]
    #[case("64K", Some(65_536))]
    #[case("64k", Some(65_536))]
    #[case("64 KiB", Some(65_536))]
    #[case("1m", Some(1 << 20))]
    #[case("1MiB", Some(1 << 20))]
    #[case("1mib", Some(1 << 20))]
    #[case("3GiB", Some(3 << 30))]
    #[case("1T", Some(1 << 40))]
    #[case("8B", Some(8))]
    #[case("1MB", None)]
    #[case("1MiBs", None)]
    #[case("é", None)]
    #[case("1M", Some(1 << 20))]
    #[case("2G", Some(2 << 30))]
    #[case("", None)]
    #[case("K", None)]
    #[case("-1", None)]
    #[case("1.5M", None)]
    #[case("99999999999999G", None)]
    fn sizes_are_whole_numbers_with_a_unit(#[case] text: &str, #[case] expected: Option<usize>) {
        assert_eq!(bytes(text).ok(), expected);
    }

    #[test]
    fn seconds_are_not_negative() {
        assert_eq!(seconds("0.25"), Ok(Duration::from_millis(250)));
        assert!(seconds("-1").is_err() && seconds("soon").is_err());
    }
}
