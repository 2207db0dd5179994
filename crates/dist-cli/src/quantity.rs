//! Times, speeds and sizes as people write them.

/// Parses a time such as `25us`, `1.5ms`, `2s` or `300ns`. Returns seconds.
pub(crate) fn time(text: &str) -> Result<f64, String> {
    const UNITS: [(&str, f64); 4] = [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];
    let seconds = scaled(text, &UNITS).ok_or("a time is a number and a unit, as in 25us, 1.5ms or 2s")?;
    if seconds.is_finite() && (0.0..=TIME_MAX).contains(&seconds) {
        Ok(seconds)
    } else {
        Err(format!("a time is between 0 and {TIME_MAX} s"))
    }
}

/// Maximum time in seconds. The sum of many such times is still finite.
const TIME_MAX: f64 = 1e9;

/// Parses a speed in bits such as `10Gbps` or `100Mbps`, or in bytes such as `1.2GB/s` or `500MB/s`. Returns
/// seconds per byte.
pub(crate) fn speed(text: &str) -> Result<f64, String> {
    const UNITS: [(&str, f64); 8] = [
        ("Kbps", 125.0),
        ("Mbps", 125e3),
        ("Gbps", 125e6),
        ("Tbps", 125e9),
        ("KB/s", 1e3),
        ("MB/s", 1e6),
        ("GB/s", 1e9),
        ("TB/s", 1e12),
    ];
    let bytes = scaled(text, &UNITS).ok_or("a speed is a number and a unit, as in 10Gbps or 1.2GB/s")?;
    if bytes.is_finite() && bytes >= 1.0 {
        Ok(1.0 / bytes)
    } else {
        Err("a speed is at least a byte per second".to_owned())
    }
}

fn scaled(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    // The longest matching unit wins: `ms` also ends with `s`.
    let fits = units.iter().filter(|(unit, _)| text.ends_with(unit));
    let (unit, scale) = fits.max_by_key(|(unit, _)| unit.len())?;
    let number: f64 = text[..text.len() - unit.len()].trim_end().parse().ok()?;
    Some(number * scale)
}

/// Formats a time with three significant digits.
pub(crate) fn show_time(seconds: f64) -> String {
    let (value, unit) = match seconds {
        s if s >= 1.0 => (s, "s"),
        s if s >= 1e-3 => (s * 1e3, "ms"),
        s => (s * 1e6, "us"),
    };
    let digits = match value {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$} {unit}")
}

/// Formats a number of bytes with a binary unit.
pub(crate) fn show_bytes(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = (bytes.max(1).ilog2() / 10) as usize;
    let value = bytes as f64 / 1024_f64.powi(i32::try_from(unit).unwrap_or(0));
    let whole = value.fract() == 0.0 || value >= 100.0;
    if whole { format!("{value:.0} {}", UNITS[unit]) } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Rounds to this number of decimal places.
pub(crate) fn rounded(value: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("25us", Some(25e-6))]
    #[case("1.5 ms", Some(1.5e-3))]
    #[case("2s", Some(2.0))]
    #[case("0ns", Some(0.0))]
    #[case("25", None)]
    #[case("-1us", None)]
    #[case("nans", None)]
    #[case("1e300s", None)]
    #[case("us", None)]
    fn times_have_units(#[case] text: &str, #[case] seconds: Option<f64>) {
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-12 * b;
        assert!(match (time(text), seconds) {
            (Ok(a), Some(b)) => close(a, b),
            (Err(_), None) => true,
            _ => false,
        });
    }

    #[rstest]
    #[case("10Gbps", Some(0.8))]
    #[case("100Mbps", Some(80.0))]
    #[case("1.25GB/s", Some(0.8))]
    #[case("0Gbps", None)]
    #[case("10G", None)]
    #[case("infGbps", None)]
    fn speeds_are_in_bits_or_in_bytes(#[case] text: &str, #[case] nanoseconds: Option<f64>) {
        let got = speed(text).ok().map(|seconds| (seconds * 1e12).round() / 1e3);
        assert_eq!(got, nanoseconds);
    }

    #[test]
    fn people_see_three_digits_or_so() {
        let times = [3.4e-7, 1.2345e-5, 0.25, 61.0].map(show_time);
        assert_eq!(times, ["0.34 us", "12.3 us", "250 ms", "61.0 s"]);
        let bytes = [0, 1023, 1536, 25 << 20, u64::MAX].map(show_bytes);
        assert_eq!(bytes, ["0 B", "1023 B", "1.5 KiB", "25 MiB", "16 EiB"]);
    }
}
