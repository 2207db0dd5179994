//! Files with the links of single pairs of hosts.

use std::fs;
use std::path::Path;

use dist_predict::LinkModel;

use crate::Error;
use crate::quantity;

/// A link in one direction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Pair {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) link: LinkModel,
}

/// Reads a file with links between `hosts` hosts.
pub(super) fn read(path: &Path, hosts: usize) -> Result<Vec<Pair>, Error> {
    let text = fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    let mut pairs = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let both = parse(line, hosts).map_err(|reason| Error::Line {
            path: path.to_owned(),
            line: index + 1,
            reason,
        })?;
        pairs.extend(both);
    }
    Ok(pairs)
}

/// Parses a line: `0-1 50ms 100Mbps` is both directions, `0>1 50ms 100Mbps` one.
fn parse(line: &str, hosts: usize) -> Result<Vec<Pair>, String> {
    let words: Vec<_> = line.split_whitespace().collect();
    let [pair, latency, bandwidth] = words[..] else {
        return Err("a link is two hosts, a latency and a bandwidth, as in 0-1 50ms 100Mbps".to_owned());
    };
    let link = LinkModel { latency: quantity::time(latency)?, byte: quantity::speed(bandwidth)? };
    let host = |text: &str| match text.parse() {
        Ok(host) if host < hosts => Ok(host),
        Ok(host) => Err(format!("there is no host {host}: the {hosts} hosts are numbered from 0")),
        Err(_) => Err(format!("{text:?} is not a host: hosts are numbered from 0")),
    };
    let (from, to, both) = match (pair.split_once('-'), pair.split_once('>')) {
        (Some((from, to)), _) => (host(from)?, host(to)?, true),
        (None, Some((from, to))) => (host(from)?, host(to)?, false),
        (None, None) => {
            return Err(format!("{pair:?} is not a pair of hosts: 0-1 is both directions, 0>1 is one"));
        }
    };
    if from == to {
        return Err(format!("host {from} has no link to itself"));
    }
    let back = Pair { from: to, to: from, link };
    Ok([Pair { from, to, link }].into_iter().chain(both.then_some(back)).collect())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn a_line_is_one_direction_or_both() {
        let link = LinkModel { latency: 0.05, byte: 1.0 / 12.5e6 };
        let (there, back) = (Pair { from: 0, to: 2, link }, Pair { from: 2, to: 0, link });
        assert_eq!(parse("0-2 50ms 100Mbps", 3), Ok(vec![there, back]));
        assert_eq!(parse("2>0  50ms\t100Mbps", 3), Ok(vec![back]));
    }

    #[rstest]
    #[case("0-3 50ms 100Mbps", "there is no host 3: the 3 hosts")]
    #[case("0-x 50ms 100Mbps", "\"x\" is not a host")]
    #[case("1-1 50ms 100Mbps", "host 1 has no link to itself")]
    #[case("1 2 50ms 100Mbps", "a link is two hosts")]
    #[case("0+1 50ms 100Mbps", "0-1 is both directions")]
    #[case("0-1 50 100Mbps", "a time is a number and a unit")]
    #[case("0-1 50ms fast", "a speed is a number and a unit")]
    fn a_line_that_is_not_a_link_is_rejected_with_the_reason(#[case] line: &str, #[case] reason: &str) {
        let error = parse(line, 3).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
}
