//! Values of arguments.

use std::ops::RangeInclusive;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use dist_collectives::{DType, ReduceOp, ReductionOrder};
use dist_transport::tcp::Medium;

/// A number of ranks that one machine can run.
pub(crate) fn ranks(text: &str) -> Result<usize, String> {
    count(text, "ranks", 1..=RANKS_MAX)
}

/// A number of ranks that have somebody to talk to.
pub(crate) fn several_ranks(text: &str) -> Result<usize, String> {
    count(text, "ranks", 2..=RANKS_MAX)
}

/// A number of machines.
pub(crate) fn nodes(text: &str) -> Result<usize, String> {
    count(text, "machines", 1..=NODES_MAX)
}

/// How many there are of something.
pub(crate) fn count(text: &str, things: &str, range: RangeInclusive<usize>) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| range.contains(count));
    count.ok_or_else(|| format!("this is not a number of {things} from {} to {}", range.start(), range.end()))
}

/// What messages go through.
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

/// With as many ranks on each as there may be, there are no more than a world can have.
const NODES_MAX: usize = 1 << 19;

/// What a machine may be asked to start: a guard against a slip of the finger.
const RANKS_MAX: usize = 4096;

/// A length of time in seconds, with a fraction if need be.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| "this is not a number of seconds, as in 0, 5 or 0.25".to_owned())
}

/// A number of bytes, in units of 2^10, 2^20 or 2^30 if K, M or G follows.
pub(crate) fn bytes(text: &str) -> Result<usize, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K') => (&text[..text.len() - 1], 10),
        Some(b'M') => (&text[..text.len() - 1], 20),
        Some(b'G') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: usize =
        digits.parse().map_err(|_| "a size is a whole number, as in 8, 64K, 1M or 2G".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "this is more than there is memory for".to_owned())
}

pub(crate) fn dtype() -> impl TypedValueParser<Value = DType> {
    named(DType::ALL.map(DType::name), DType::parse)
}

pub(crate) fn reduce_op() -> impl TypedValueParser<Value = ReduceOp> {
    named(ReduceOp::PLAIN.map(ReduceOp::name), ReduceOp::parse)
}

pub(crate) fn order() -> impl TypedValueParser<Value = ReductionOrder> {
    named(ReductionOrder::ALL.map(ReductionOrder::name), ReductionOrder::parse)
}

/// One of these names, which the help lists.
fn named<T: Clone + Send + Sync + 'static, const N: usize>(
    names: [&'static str; N],
    parse: fn(&str) -> Option<T>,
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(names).map(move |name| parse(&name).expect("it has one of the names"))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("0", Some(0))]
    #[case("8", Some(8))]
    #[case("64K", Some(65_536))]
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
