//! Parses the coordinator's address as users write it: a host and a port.

use std::net::{Ipv4Addr, Ipv6Addr};

/// The expected form of a host, for errors about the variable that names one.
pub(crate) const HOST: &str =
    "a host name or an IP address: it must have no scheme, no port (that is MASTER_PORT) and no blanks";

/// The longest name that the domain name system allows.
const NAME_BYTES_MAX: usize = 253;

/// Splits `host:port` into a host and a port. The brackets of an IPv6 address are removed. Returns `None` if
/// the host or the port is malformed.
pub(crate) fn split(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    // Without brackets, the end of an IPv6 address is ambiguous.
    let is_clear = before_port(host)? == host;
    let is_number = port.bytes().all(|byte| byte.is_ascii_digit());
    Some((without_brackets(host), port.parse().ok()?)).filter(|_| is_clear && is_number)
}

/// Returns the host in the form that precedes a port: an IPv6 address gets brackets, as in `[::1]`. Returns
/// `None` if the host is malformed.
pub(crate) fn before_port(host: &str) -> Option<String> {
    let bare = without_brackets(host);
    if !is_host(bare) || (bare != host && !is_ipv6(bare)) {
        return None;
    }
    Some(if is_ipv6(bare) { format!("[{bare}]") } else { bare.to_owned() })
}

/// Returns `true` if the host is an IPv6 address, optionally with an interface, as in `fe80::1%eth0`.
pub(crate) fn is_ipv6(host: &str) -> bool {
    let (address, interface) = host.split_once('%').unwrap_or((host, "0"));
    let is_name =
        !interface.is_empty() && interface.chars().all(|char| char.is_ascii_graphic() && char != ']');
    is_name && address.parse::<Ipv6Addr>().is_ok()
}

fn without_brackets(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// Returns `true` if the host is well-formed. A name that the system does not know yet may be known later.
fn is_host(host: &str) -> bool {
    let name = host.strip_suffix('.').unwrap_or(host);
    let is_label = |label: &str| {
        !label.is_empty() && label.chars().all(|char| char.is_alphanumeric() || char == '-' || char == '_')
    };
    let is_name = name.len() <= NAME_BYTES_MAX && name.split('.').all(is_label);
    // No name ends in a number. `127.1` is a short form of an address that the system understands.
    let ends_in_number = name.rsplit('.').next().is_some_and(|last| last.parse::<u128>().is_ok());
    let is_ipv4 = || host.parse::<Ipv4Addr>().is_ok() || (host == name && is_short_ipv4(host));
    is_ipv6(host) || is_name && (!ends_in_number || is_ipv4())
}

/// Returns `true` for a short form of an IPv4 address, which has one to three numbers, as `127.1` for
/// 127.0.0.1.
fn is_short_ipv4(host: &str) -> bool {
    let numbers: Option<Vec<u32>> = host.split('.').map(|number| number.parse().ok()).collect();
    let Some((last, first)) = numbers.as_ref().and_then(|numbers| numbers.split_last()) else { return false };
    let bytes_left = 4_usize.saturating_sub(first.len());
    bytes_left > 1 && first.iter().all(|&byte| byte < 256) && u64::from(*last) < 1 << (8 * bytes_left)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("node0", Some("node0"))]
    #[case("node-0.example.org.", Some("node-0.example.org."))]
    #[case("my_service", Some("my_service"))]
    #[case("10.0.0.1", Some("10.0.0.1"))]
    #[case("127.1", Some("127.1"))]
    #[case("::1", Some("[::1]"))]
    #[case("[::1]", Some("[::1]"))]
    #[case("fe80::1%lo", Some("[fe80::1%lo]"))]
    #[case("fe80::1%2", Some("[fe80::1%2]"))]
    #[case::empty("", None)]
    #[case::trailing_blank("127.0.0.1 ", None)]
    #[case::leading_blank(" 127.0.0.1", None)]
    #[case::line_end("node0\n", None)]
    #[case::scheme("tcp://127.0.0.1", None)]
    #[case::port("127.0.0.1:29500", None)]
    #[case::port_of_a_name("node0:29500", None)]
    #[case::port_of_ipv6("[::1]:29500", None)]
    #[case::half_a_bracket("[::1", None)]
    #[case::name_in_brackets("[node0]", None)]
    #[case::path("node0/", None)]
    #[case::user("me@node0", None)]
    #[case::two_hosts("node0,node1", None)]
    #[case::empty_label("node0..org", None)]
    #[case::byte_that_is_none("10.0.0.256", None)]
    #[case::five_numbers("10.0.0.0.1", None)]
    #[case::no_interface("fe80::1%", None)]
    #[case::blank_in_interface("fe80::1%lo ", None)]
    fn a_host_is_a_name_or_an_address_and_nothing_else(#[case] host: &str, #[case] expected: Option<&str>) {
        assert_eq!(before_port(host).as_deref(), expected, "{host:?}");
        let address = expected.unwrap_or(host).to_owned() + ":29500";
        let split = split(&address).map(|(host, port)| (before_port(host), port));
        assert_eq!(split, expected.map(|host| (Some(host.to_owned()), 29500)), "{address:?}");
    }

    #[rstest]
    #[case("node0")]
    #[case("node0:")]
    #[case("node0:70000")]
    #[case("node0:+1")]
    #[case("node0:29500 ")]
    #[case("::1:29500")]
    fn an_address_without_a_clear_port_is_refused(#[case] address: &str) {
        assert_eq!(split(address), None);
    }
}
