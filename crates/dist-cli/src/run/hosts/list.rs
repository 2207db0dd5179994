//! The hosts of a job, from `--hosts` or a host file.

use std::path::Path;
use std::str::FromStr;

use crate::Error;
use crate::parse::ranks;

/// A host and the number of processes to start there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// The host's name for ssh, such as `node0`, `me@node0` or an address.
    pub(super) name: String,
    /// `None` stands for the number in `-n`.
    ranks: Option<usize>,
}

impl FromStr for Host {
    type Err = String;

    /// Parses `node0`, `me@node0:4` or `[fd00::1]:4`.
    fn from_str(text: &str) -> Result<Self, String> {
        let is_bare_ipv6 = !text.contains('[') && text.matches(':').count() > 1;
        if is_bare_ipv6 {
            return Err("write an IPv6 address in brackets, as in [fd00::1]:4".to_owned());
        }
        let after_bracket = text.rfind(']').unwrap_or(0);
        let (name, count) = match text[after_bracket..].rfind(':') {
            Some(colon) => {
                let (name, count) = text.split_at(after_bracket + colon);
                (name, Some(ranks(&count[1..])?))
            }
            None => (text, None),
        };
        let name: String = name.chars().filter(|c| !['[', ']'].contains(c)).collect();
        // ssh would parse a name with a leading dash as an option.
        if name.is_empty() || name.starts_with('-') || name.contains(char::is_whitespace) {
            return Err("this is not a host, as in node0, me@node0:4 or [fd00::1]:4".to_owned());
        }
        Ok(Self { name, ranks: count })
    }
}

/// Reads a host file: a host on each line, such as `node0`, `node0:4` or `node0 slots=4`; `#` begins a
/// comment.
pub(crate) fn read(path: &Path) -> Result<Vec<Host>, Error> {
    let text = std::fs::read_to_string(path);
    let text = text.map_err(|source| Error::Read { path: path.to_owned(), source })?;
    let lines = text.lines().enumerate();
    let lines = lines.map(|(line, text)| (line + 1, text.split('#').next().unwrap_or("").trim()));
    let hosts = lines.filter(|(_, text)| !text.is_empty()).map(|(line, text)| {
        parse_line(text).map_err(|reason| Error::Line { path: path.to_owned(), line, reason })
    });
    hosts.collect()
}

fn parse_line(text: &str) -> Result<Host, String> {
    let mut words = text.split_ascii_whitespace();
    let mut host: Host = words.next().unwrap_or("").parse()?;
    for word in words {
        match word.split_once('=') {
            Some(("slots", count)) if host.ranks.is_none() => host.ranks = Some(ranks(count)?),
            Some(("max_slots" | "max-slots", _)) => {}
            _ => return Err(format!("{word:?} is neither slots=N nor a comment")),
        }
    }
    Ok(host)
}

/// Returns the number of processes of each host. A host without a number gets the number in `-n`.
pub(crate) fn counts(hosts: &[Host], ranks: Option<usize>) -> Result<Vec<usize>, Error> {
    for (index, host) in hosts.iter().enumerate() {
        if hosts[..index].iter().any(|earlier| earlier.name == host.name) {
            let name = &host.name;
            return Err(Error::Usage(format!(
                "host {name} is listed twice: list it once, with all its ranks"
            )));
        }
    }
    let count = |host: &Host| {
        let name = &host.name;
        let missing =
            || Error::Usage(format!("how many ranks are on host {name}? Write {name}:N, or give -n N"));
        host.ranks.or(ranks).ok_or_else(missing)
    };
    if hosts.is_empty() {
        return Err(Error::Usage("the list of hosts is empty".to_owned()));
    }
    hosts.iter().map(count).collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("node0", Some(("node0", None)))]
    #[case("node0:4", Some(("node0", Some(4))))]
    #[case("me@node0:4", Some(("me@node0", Some(4))))]
    #[case("10.0.0.1:2", Some(("10.0.0.1", Some(2))))]
    #[case("[fd00::1]:4", Some(("fd00::1", Some(4))))]
    #[case("[fd00::1]", Some(("fd00::1", None)))]
    #[case("fd00::1", None)]
    #[case("node0:0", None)]
    #[case("node0:", None)]
    #[case("", None)]
    #[case(":4", None)]
    #[case("-oProxyCommand=x:4", None)]
    fn a_host_has_a_name_and_may_have_a_number(
        #[case] text: &str,
        #[case] expected: Option<(&str, Option<usize>)>,
    ) {
        let expected = expected.map(|(name, ranks)| Host { name: name.to_owned(), ranks });
        assert_eq!(text.parse().ok(), expected);
    }

    #[rstest]
    #[case("# two machines\na slots=4 max_slots=8\n\nb:2 # the small one\n", Ok(vec![("a", 4), ("b", 2)]))]
    #[case("a\n", Ok(vec![("a", 3)]))]
    #[case("a\nb cores=2\n", Err("line 2: \"cores=2\" is neither slots=N nor a comment"))]
    #[case("a:2 slots=2\n", Err("line 1: \"slots=2\" is neither"))]
    #[case("a\na\n", Err("host a is listed twice"))]
    #[case("\n", Err("the list of hosts is empty"))]
    fn a_host_file_has_a_host_on_each_line(
        #[case] text: &str,
        #[case] expected: Result<Vec<(&str, usize)>, &str>,
    ) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let hosts = read(file.path()).and_then(|hosts| Ok((counts(&hosts, Some(3))?, hosts)));
        match expected {
            Ok(expected) => {
                let (counts, hosts) = hosts.unwrap();
                let names = hosts.iter().map(|host| host.name.as_str());
                assert_eq!(names.zip(counts).collect::<Vec<_>>(), expected);
            }
            Err(words) => {
                let message = hosts.unwrap_err().to_string();
                assert!(message.contains(words), "{message}");
            }
        }
    }

    #[test]
    fn a_host_without_a_number_needs_the_option_n() {
        let message = counts(&["a".parse().unwrap()], None).unwrap_err().to_string();
        assert_eq!(message, "how many ranks are on host a? Write a:N, or give -n N");
    }
}
