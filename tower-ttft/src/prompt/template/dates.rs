//! `strftime_now`: the date and time as a template wants them written. In UTC, as containers run; a server elsewhere gives
//! other days for some hours, which self-verification cannot see but the audit of prompt tokens can.
use std::{
    fmt::Write,
    time::{SystemTime, UNIX_EPOCH},
};

const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Python's `strftime` in the C locale; none for a directive that is not known here.
pub(super) fn strftime(now: SystemTime, format: &str) -> Option<String> {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    let (year, month, day) = civil(days);
    let weekday = *DAYS.get(((days + 4) % 7) as usize)?;
    let month_name = *MONTHS.get(month as usize - 1)?;
    let day_of_year = days - days_before(year) + 1;
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next()?;
        let padded = directive != '-';
        if !padded {
            directive = chars.next()?;
        }
        let mut number = |value: u64, width: usize| {
            if padded {
                let _ = write!(out, "{value:0width$}");
            } else {
                let _ = write!(out, "{value}");
            }
        };
        match directive {
            'Y' => number(year, 4),
            'y' => number(year % 100, 2),
            'm' => number(month, 2),
            'd' => number(day, 2),
            'H' => number(hour, 2),
            'I' => number(hour12, 2),
            'M' => number(minute, 2),
            'S' => number(second, 2),
            'j' => number(day_of_year, 3),
            'B' => out.push_str(month_name),
            'b' | 'h' => out.push_str(month_name.get(..3)?),
            'A' => out.push_str(weekday),
            'a' => out.push_str(weekday.get(..3)?),
            'p' => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            'F' => out.push_str(&strftime(now, "%Y-%m-%d")?),
            'T' => out.push_str(&strftime(now, "%H:%M:%S")?),
            '%' => out.push('%'),
            _ => return None,
        }
    }
    Some(out)
}

/// Year, month and day of a day since 1970 (Hinnant, "chrono-Compatible Low-Level Date Algorithms", civil_from_days).
fn civil(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let era = z / 146_097;
    let day_of_era = z % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 {
        month_index + 3
    } else {
        month_index - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    (year, month, day)
}

/// Days from 1970 to the first of January of a year.
fn days_before(year: u64) -> u64 {
    let y = year - 1;
    let leaps = |y: u64| y / 4 - y / 100 + y / 400;
    (year - 1970) * 365 + leaps(y) - leaps(1969)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn at(seconds: u64, format: &str) -> Option<String> {
        strftime(UNIX_EPOCH + Duration::from_secs(seconds), format)
    }

    // Written by Python's datetime in UTC.
    #[test]
    fn dates_are_pythons() {
        for (seconds, want) in [
            (0, "Thursday 01 January 1970 00:00:00 AM 001"),
            (951_782_400, "Tuesday 29 February 2000 00:00:00 AM 060"),
            (1_735_689_599, "Tuesday 31 December 2024 23:59:59 PM 366"),
            (1_796_086_825, "Tuesday 01 December 2026 01:00:25 AM 335"),
        ] {
            assert_eq!(
                at(seconds, "%A %d %B %Y %H:%M:%S %p %j").as_deref(),
                Some(want)
            );
        }
        assert_eq!(at(0, "%d %b %Y").as_deref(), Some("01 Jan 1970"));
        assert_eq!(
            at(46_800, "%-d %I %y%% %a %F %T").as_deref(),
            Some("1 01 70% Thu 1970-01-01 13:00:00")
        );
        assert_eq!(at(0, "%Q"), None);
        assert_eq!(at(0, "%"), None);
    }
}
