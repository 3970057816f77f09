//! Values of options.

use std::time::Duration;

use roce::DeviceConfig;

/// Bytes, with K, M or G (powers of 1024) behind the number if wanted.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.trim_end_matches("iB").trim_end_matches('B').to_ascii_uppercase() {
        t if t.ends_with('K') => (t[..t.len() - 1].to_owned(), 10),
        t if t.ends_with('M') => (t[..t.len() - 1].to_owned(), 20),
        t if t.ends_with('G') => (t[..t.len() - 1].to_owned(), 30),
        t => (t, 0),
    };
    let number: u64 = digits
        .parse()
        .map_err(|_| format!("{text:?} is not a size (write 65536, 64K, 8M)"))?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| format!("{text} is too large"))
}

/// Bytes that fit in 32 bits.
pub(crate) fn size32(text: &str) -> Result<u32, String> {
    u32::try_from(size(text)?).map_err(|_| format!("{text} is too large"))
}

/// Bytes of something in memory.
pub(crate) fn memory(text: &str) -> Result<usize, String> {
    usize::try_from(size(text)?).map_err(|_| format!("{text} is too large"))
}

/// How many engines a device has.
pub(crate) fn shards(text: &str) -> Result<usize, String> {
    let most = DeviceConfig::MAX_SHARDS;
    let number = text.parse().ok().filter(|n| (1..=most).contains(n));
    number.ok_or_else(|| format!("{text:?} is not a number from 1 to {most}"))
}

/// Seconds, with a fraction if wanted, more than zero.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text
        .parse()
        .map_err(|_| format!("{text:?} is not a number of seconds"))?;
    match Duration::try_from_secs_f64(number) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err(format!("{text}: must be more than 0 seconds")),
    }
}

/// Finds a value that was given more than once.
pub(crate) fn twice<T: PartialEq>(all: &[T]) -> Option<&T> {
    all.iter()
        .enumerate()
        .find_map(|(n, value)| all[..n].contains(value).then_some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(size("65536"), Ok(65536));
        assert_eq!(size("64k"), Ok(65536));
        assert_eq!(size("8MiB"), Ok(8 << 20));
        assert_eq!(size("1G"), Ok(1 << 30));
        for bad in ["", "K", "-1", "1.5M", "99999999999G", "ä"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        assert!(size32("4G").is_err());
    }

    #[test]
    fn times() {
        assert_eq!(seconds("0.2"), Ok(Duration::from_millis(200)));
        for bad in ["0", "-1", "NaN", "inf", "x"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
