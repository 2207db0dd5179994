//! The address of a rendezvous: a host and a port.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A host, by name or IP address, and a port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl Address {
    /// Parses an address such as `node0:29500`, `10.0.0.1:29500` or `[fd00::1]:29500`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let wrong = || "this is not a host and a port, as in node0:29500 or [fd00::1]:29500".to_owned();
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let port = port.parse().ok().filter(|&port| port > 0).ok_or_else(wrong)?;
        match bare.unwrap_or(host) {
            "" => Err(wrong()),
            // Without brackets, an IPv6 address and a port are ambiguous.
            host if bare.is_none() && host.contains(':') => Err(wrong()),
            host => Ok(Self { host: host.to_owned(), port }),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("node0:29500", Some("node0:29500"))]
    #[case("[fd00::1]:29500", Some("[fd00::1]:29500"))]
    #[case("fd00::1:29500", None)]
    #[case("10.0.0.1", None)]
    #[case(":29500", None)]
    #[case("10.0.0.1:0", None)]
    #[case("10.0.0.1:65536", None)]
    fn an_address_is_a_host_and_a_port(#[case] text: &str, #[case] expected: Option<&str>) {
        assert_eq!(Address::parse(text).ok().map(|address| address.to_string()).as_deref(), expected);
    }
}
