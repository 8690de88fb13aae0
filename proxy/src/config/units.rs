//! Durations and sizes as people write them.

use std::time::Duration;

/// A duration in text: numbers with units, largest first (`600s`, `250ms`, `1m30s`, `1.5h`).
pub(super) fn duration(text: &str) -> Option<Duration> {
    let mut rest = text.trim();
    if rest.is_empty() {
        return None;
    }
    let mut total = Duration::ZERO;
    let mut last = f64::INFINITY;
    while !rest.is_empty() {
        let (number, after) = number(rest)?;
        let end = after
            .find(|c: char| !c.is_ascii_alphabetic())
            .unwrap_or(after.len());
        let (unit, after) = after.split_at(end);
        let unit = match unit {
            "ms" => 0.001,
            "s" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        // `1s1m` or `1s1s` is a slip of the pen, not a duration.
        if unit >= last {
            return None;
        }
        last = unit;
        total = total.checked_add(Duration::try_from_secs_f64(number * unit).ok()?)?;
        rest = after;
    }
    Some(total)
}

/// A number of bytes in text: `65536`, `64KiB`, `16MiB`, `1GiB` (powers of 1024), `1kB`, `10MB` (powers of 1000).
pub(super) fn size(text: &str) -> Option<u64> {
    let (number, unit) = number(text.trim())?;
    let unit = match unit.trim() {
        "" | "B" => 1.0,
        "KiB" | "Ki" => 1024.0,
        "MiB" | "Mi" => 1024.0 * 1024.0,
        "GiB" | "Gi" => 1024.0 * 1024.0 * 1024.0,
        "kB" | "KB" | "k" => 1e3,
        "MB" | "M" => 1e6,
        "GB" | "G" => 1e9,
        _ => return None,
    };
    let bytes = number * unit;
    // 2^53: past it a float no longer names a byte.
    (bytes <= 9e15).then_some(bytes as u64)
}

/// A duration as [`duration`] reads it.
pub(super) fn show(d: Duration) -> String {
    if d.subsec_millis() == 0 && d.subsec_nanos() == 0 {
        format!("{}s", d.as_secs())
    } else {
        format!("{}ms", d.as_secs_f64() * 1000.0)
    }
}

fn number(text: &str) -> Option<(f64, &str)> {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    Some((digits.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        for (text, ms) in [
            ("600s", 600_000),
            ("250ms", 250),
            ("1m30s", 90_000),
            ("1.5h", 5_400_000),
            ("2min", 120_000),
            ("0s", 0),
        ] {
            assert_eq!(duration(text), Some(Duration::from_millis(ms)), "{text}");
        }
        for text in [
            "",
            "5",
            "s",
            "-1s",
            "1s1m",
            "1s1s",
            "5 s",
            "5d",
            "1e9s",
            "9999999999999999999999h",
            ".s",
        ] {
            assert_eq!(duration(text), None, "{text}");
        }
    }

    #[test]
    fn shown_durations_read_back() {
        for ms in [0, 1, 250, 1_000, 1_500, 600_000] {
            let d = Duration::from_millis(ms);
            assert_eq!(duration(&show(d)), Some(d));
        }
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("65536", 65_536),
            ("64KiB", 65_536),
            ("16 MiB", 16 << 20),
            ("1Gi", 1 << 30),
            ("1.5MB", 1_500_000),
            ("0", 0),
        ] {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        for text in ["", "-1", "1TiBB", "x", "1e30", "99999999GiB"] {
            assert_eq!(size(text), None, "{text}");
        }
    }
}
