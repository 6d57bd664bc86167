//! Parses sizes, durations and fractions on the command line.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);

struct Unit {
    name: &'static str,
    bytes: u64,
}

/// The units in which a size is printed, largest first.
const BINARY_UNITS: [Unit; 4] = [
    Unit { name: "TiB", bytes: 1 << 40 },
    Unit { name: "GiB", bytes: 1 << 30 },
    Unit { name: "MiB", bytes: 1 << 20 },
    Unit { name: "KiB", bytes: 1 << 10 },
];

/// The units that are accepted in addition to [`BINARY_UNITS`].
const DECIMAL_UNITS: [Unit; 5] = [
    Unit { name: "TB", bytes: 1_000_000_000_000 },
    Unit { name: "GB", bytes: 1_000_000_000 },
    Unit { name: "MB", bytes: 1_000_000 },
    Unit { name: "KB", bytes: 1_000 },
    Unit { name: "B", bytes: 1 },
];

impl ByteSize {
    /// Returns the number of bytes, limited to `usize::MAX`.
    #[must_use]
    pub fn to_usize(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || {
            format!(
                "{text:?} is not a size from 0 to 2^64 - 1 bytes: use a number with or without a unit, e.g. 512MiB, \
                 1.5GiB"
            )
        };
        let text = text.trim();
        let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
        // Kubernetes writes `Gi` instead of `GiB`.
        let unit = text[digits.len()..].to_ascii_lowercase();
        let is_named = |known: &&Unit| {
            let name = known.name.to_ascii_lowercase();
            name == unit || name.strip_suffix('b') == Some(&unit)
        };
        let unit = BINARY_UNITS.iter().chain(&DECIMAL_UNITS).find(is_named).ok_or_else(invalid)?;
        let digits = digits.trim_end();
        if let Ok(number) = digits.parse::<u64>() {
            return number.checked_mul(unit.bytes).map(Self).ok_or_else(invalid);
        }
        let number: f64 = digits.parse().map_err(|_| invalid())?;
        let product = number * unit.bytes as f64;
        // Above 2^53 bytes, the product may be rounded. Sizes of that order need not be exact to the byte.
        if product >= 0.0 && product < u64::MAX as f64 { Ok(Self(product as u64)) } else { Err(invalid()) }
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = BINARY_UNITS.iter().find(|unit| self.0 >= unit.bytes && self.0.is_multiple_of(unit.bytes));
        match unit {
            Some(unit) => write!(formatter, "{}{}", self.0 / unit.bytes, unit.name),
            None => write!(formatter, "{}", self.0),
        }
    }
}

/// Parses a duration such as `30s`, `20ms` or `2m`. A number without a unit is in seconds.
///
/// # Errors
/// The text is not a duration. The message says how to write one.
pub fn duration(text: &str) -> Result<Duration, String> {
    let invalid = || {
        format!(
            "{text:?} is not a duration: use a number with the unit us, ms, s, m or h, e.g. 30s, 500ms, 2m"
        )
    };
    let digits = text.trim_end_matches(|letter: char| letter.is_alphabetic());
    let seconds = match &text[digits.len()..] {
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(invalid()),
    };
    let number: f64 = digits.trim().parse().map_err(|_| invalid())?;
    Duration::try_from_secs_f64(number * seconds).map_err(|_| invalid())
}

/// The shortest interval at which an action can be repeated.
const INTERVAL_MIN: Duration = Duration::from_millis(100);

/// Parses the interval at which an action is repeated: a [`duration`] of at least 100 ms.
///
/// # Errors
/// The text is not a duration, or the duration is too short.
pub fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration(text)?;
    if interval < INTERVAL_MIN {
        return Err(format!("{text:?} is too short: the interval must be at least {INTERVAL_MIN:?}"));
    }
    Ok(interval)
}

/// Parses a number from 0 to 1.
///
/// # Errors
/// The text is not such a number.
pub fn fraction(text: &str) -> Result<f32, String> {
    let fraction = text.parse().ok().filter(|fraction| (0.0..=1.0).contains(fraction));
    fraction.ok_or_else(|| format!("{text:?} is not a number from 0 to 1"))
}

/// Parses a number greater than 0 and less than 1.
///
/// # Errors
/// The text is not such a number.
pub fn proper_fraction(text: &str) -> Result<f32, String> {
    let fraction = text.parse().ok().filter(|fraction: &f32| *fraction > 0.0 && *fraction < 1.0);
    fraction.ok_or_else(|| format!("{text:?} is not a number greater than 0 and less than 1, such as 0.95"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_and_decimal_units() {
        let size = |text: &str| text.parse::<ByteSize>().ok().map(|size| size.0);
        assert_eq!(size("512"), Some(512));
        assert_eq!(size("64b"), Some(64));
        assert_eq!(size("2 GiB"), Some(2 << 30));
        assert_eq!(size("1.5Gi"), Some(3 << 29));
        assert_eq!(size("3MB"), Some(3_000_000));
        assert_eq!(size("1k"), Some(1_000));
        for wrong in ["", "GiB", "-1", "1 parsec", "99999999TiB", "nan"] {
            assert_eq!(size(wrong), None, "{wrong:?}");
        }
        let printed = [1 << 30, 3 << 19, 1000, 0].map(|bytes| ByteSize(bytes).to_string());
        assert_eq!(printed, ["1GiB", "1536KiB", "1000", "0"]);
    }

    #[test]
    fn durations_have_units() {
        assert_eq!(duration("30"), Ok(Duration::from_secs(30)));
        assert_eq!(duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(duration("250us"), Ok(Duration::from_micros(250)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(duration("1h"), Ok(Duration::from_secs(3600)));
        for wrong in ["", "s", "-1s", "1 week", "nan"] {
            assert!(duration(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn intervals_are_at_least_100_ms() {
        assert_eq!(interval("100ms"), Ok(Duration::from_millis(100)));
        assert_eq!(
            interval("0s"),
            Err("\"0s\" is too short: the interval must be at least 100ms".to_owned())
        );
        assert!(interval("99ms").is_err() && interval("x").is_err());
    }

    #[test]
    fn fractions_are_from_0_to_1() {
        assert_eq!((fraction("0"), fraction("1"), fraction("0.5")), (Ok(0.0), Ok(1.0), Ok(0.5)));
        assert!(fraction("1.1").is_err() && fraction("x").is_err() && fraction("nan").is_err());
        assert!(proper_fraction("0").is_err() && proper_fraction("1").is_err());
        assert_eq!(proper_fraction("0.95"), Ok(0.95));
    }
}
