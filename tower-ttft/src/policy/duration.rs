//! Durations as people write them: `600s`, `250ms`, `2m`, `1h`, also joined (`1m30s`). The same form that Kubernetes
//! takes in its resources (Go's `time.ParseDuration`), without signs and fractions of nanoseconds.

use serde::{Deserializer, Serializer, de::Error as _};
use std::time::Duration;

/// Why a text is no duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DurationError {
    /// Nothing there.
    #[error("an empty duration; write for example \"30s\"")]
    Empty,
    /// A number without a unit.
    #[error("{0:?} has no unit; write one of ms, s, m, h, for example \"{0}s\"")]
    NoUnit(String),
    /// A unit that is not known, or no number before it.
    #[error("{0:?} is no duration; write for example \"250ms\", \"30s\", \"1m30s\" or \"1h\"")]
    Malformed(String),
    /// More than can be kept.
    #[error("{0:?} is too long")]
    TooLong(String),
}

/// Units, the longer names first where one begins another.
const UNITS: [(&str, u64); 6] = [
    ("ns", 1),
    ("us", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// Reads a duration.
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    let all = text.trim();
    if all.is_empty() {
        return Err(DurationError::Empty);
    }
    if all == "0" {
        return Ok(Duration::ZERO);
    }
    let malformed = || DurationError::Malformed(all.to_owned());
    let mut rest = all;
    let mut nanos = 0f64;
    while !rest.is_empty() {
        let digits = rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .ok_or_else(|| DurationError::NoUnit(all.to_owned()))?;
        let (number, tail) = rest.split_at(digits);
        let number: f64 = number.parse().map_err(|_| malformed())?;
        let letters = tail
            .find(|c: char| !c.is_ascii_alphabetic())
            .unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(letters);
        let scale = UNITS
            .iter()
            .find(|(name, _)| *name == unit)
            .map(|(_, scale)| *scale)
            .ok_or_else(malformed)?;
        nanos += number * scale as f64;
        rest = tail;
    }
    if !nanos.is_finite() || nanos >= u64::MAX as f64 {
        return Err(DurationError::TooLong(all.to_owned()));
    }
    Ok(Duration::from_nanos(nanos.round() as u64))
}

/// Writes a duration in the largest unit that divides it.
pub fn format(d: Duration) -> String {
    let nanos = d.as_nanos();
    if nanos == 0 {
        return "0s".to_owned();
    }
    // Minutes and hours only for whole multiples that people would write so; 600 s stays 600s below an hour.
    for (unit, scale) in [
        ("h", 3_600_000_000_000),
        ("s", 1_000_000_000),
        ("ms", 1_000_000),
        ("us", 1_000),
    ] {
        if nanos.is_multiple_of(scale) {
            return format!("{}{unit}", nanos / scale);
        }
    }
    format!("{nanos}ns")
}

/// For `#[serde(with = "…")]`.
pub fn serialize<S: Serializer>(d: &Duration, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&format(*d))
}

/// For `#[serde(with = "…")]`.
pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Duration, D::Error> {
    struct Text;
    impl serde::de::Visitor<'_> for Text {
        type Value = Duration;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a duration with a unit, for example \"30s\"")
        }

        fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<Duration, E> {
            parse(v).map_err(E::custom)
        }

        fn visit_u64<E: serde::de::Error>(self, v: u64) -> Result<Duration, E> {
            Err(E::custom(DurationError::NoUnit(v.to_string())))
        }

        fn visit_f64<E: serde::de::Error>(self, v: f64) -> Result<Duration, E> {
            Err(E::custom(DurationError::NoUnit(v.to_string())))
        }
    }
    // Untyped formats (YAML, JSON) tell a number from a text; both are answered with the remedy.
    d.deserialize_any(Text).map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, millis) in [
            ("600s", 600_000),
            ("250ms", 250),
            ("1m30s", 90_000),
            ("1h", 3_600_000),
            ("1.5s", 1_500),
            (" 2m ", 120_000),
            ("0", 0),
            ("0s", 0),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn refuses_with_a_remedy() {
        assert_eq!(parse("30"), Err(DurationError::NoUnit("30".into())));
        assert_eq!(parse(""), Err(DurationError::Empty));
        for bad in ["s", "3 s", "-3s", "3d", "1..2s", "1s x"] {
            assert_eq!(
                parse(bad),
                Err(DurationError::Malformed(bad.into())),
                "{bad}"
            );
        }
        assert!(matches!(
            parse("99999999999h"),
            Err(DurationError::TooLong(_))
        ));
    }

    #[test]
    fn what_is_written_is_read_back() {
        for d in [
            0,
            1,
            999,
            1_000,
            2_500_000,
            600_000_000_000,
            7_200_000_000_000u64,
        ] {
            let d = Duration::from_nanos(d);
            assert_eq!(parse(&format(d)), Ok(d));
        }
        assert_eq!(format(Duration::from_secs(600)), "600s");
    }
}
