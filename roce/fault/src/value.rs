//! Values of rules.

use std::time::Duration;

/// Reads a probability: `1%`, `0.01`, `100%`.
pub(crate) fn probability(text: &str) -> Result<f64, String> {
    let wrong = || format!("{text:?} is no probability: 1%, 0.01 or 100%");
    let (number, unit) = text.strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
    let number: f64 = number.trim().parse().map_err(|_| wrong())?;
    let value = number / unit;
    // 1 may be meant as 1% or as 100%.
    let ambiguous = unit == 1.0 && number == 1.0 && !text.contains('.');
    match (0.0..=1.0).contains(&value) && !ambiguous {
        true => Ok(value),
        false => Err(wrong()),
    }
}

/// Reads a time: `500ns`, `20us`, `5ms`, `1s`.
pub(crate) fn time(text: &str) -> Result<Duration, String> {
    let units = [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];
    let found = units.iter().find_map(|(unit, seconds)| {
        let number: f64 = text.strip_suffix(unit)?.trim().parse().ok()?;
        Duration::try_from_secs_f64(number * seconds).ok()
    });
    found
        .filter(|time| *time <= Duration::from_secs(3600))
        .ok_or_else(|| format!("{text:?} is no time up to an hour: 20us, 5ms or 1s"))
}

/// Reads a number of bytes: `1500`, `64K`, `8M`, `1G` (powers of 1024).
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let units = [('K', 10), ('M', 20), ('G', 30)];
    let unit = units
        .iter()
        .find(|(unit, _)| text.to_ascii_uppercase().ends_with(*unit));
    let (digits, shift) = unit.map_or((text, 0), |(_, shift)| (&text[..text.len() - 1], *shift));
    let number = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(1 << shift));
    number.ok_or_else(|| format!("{text:?} is no number of bytes: 65536, 64K or 8M"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_units() {
        assert_eq!(
            [probability("1%"), probability("0.5"), probability("1.0")],
            [Ok(0.01), Ok(0.5), Ok(1.0)]
        );
        assert_eq!(probability("100%"), Ok(1.0));
        for bad in ["1", "101%", "-1%", "", "%", "NaN", "NaN%", "inf"] {
            assert!(probability(bad).is_err(), "{bad}");
        }
        let times = ["500ns", "20us", "5ms", "1.5s"].map(|text| time(text).map(|t| t.as_nanos()));
        assert_eq!(times, [Ok(500), Ok(20_000), Ok(5_000_000), Ok(1_500_000_000)]);
        for bad in ["5", "-1s", "s", "2h", "7200s", "NaNs"] {
            assert!(time(bad).is_err(), "{bad}");
        }
        assert_eq!(["7", "64k", "1G"].map(bytes), [Ok(7), Ok(64 << 10), Ok(1 << 30)]);
        for bad in ["", "K", "1.5M", "99999999999G", "ä"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }
}
