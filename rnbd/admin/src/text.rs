//! Texts that are written to files, read as the kernel reads them.

use rnbd::Errno;
use rnbd_host::control::Refused;

/// Without the newline that `echo` puts behind it (`sysfs_streq`).
pub(crate) fn line(text: &str) -> &str {
    text.strip_suffix('\n').unwrap_or(text)
}

pub(crate) fn invalid(text: impl Into<String>) -> Refused {
    Refused::new(Errno::EINVAL, text)
}

/// Files that take a `1` and nothing else.
pub(crate) fn one(text: &str) -> Result<(), Refused> {
    match line(text) {
        "1" => Ok(()),
        other => Err(invalid(format!("{other:?}: only 1 can be written"))),
    }
}

/// A number without sign: decimal, hexadecimal after `0x`, octal after `0` (`kstrtoul` of base 0).
pub(crate) fn unsigned(text: &str) -> Result<u64, Refused> {
    let digits = line(text);
    let digits = digits.strip_prefix('+').unwrap_or(digits);
    let (digits, base) = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(hex) => (hex, 16),
        None if digits.len() > 1 && digits.starts_with('0') => (&digits[1..], 8),
        None => (digits, 10),
    };
    if digits.is_empty() || !digits.chars().all(|c| c.is_digit(base)) {
        return Err(invalid(format!("{:?} is not a number", line(text))));
    }
    u64::from_str_radix(digits, base).map_err(|_| Refused::new(Errno::ERANGE, format!("{digits} is too large")))
}

/// A decimal number (`kstrtoint` of base 10).
pub(crate) fn signed(text: &str) -> Result<i32, Refused> {
    let text = line(text);
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(invalid(format!("{text:?} is not a number")));
    }
    text.parse()
        .map_err(|_| Refused::new(Errno::ERANGE, format!("{text} is too large")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_the_kernel_reads_them() {
        for (text, number) in [
            ("0", 0),
            ("10\n", 10),
            ("0x10", 16),
            ("0X1f\n", 31),
            ("010", 8),
            ("+7", 7),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(unsigned(text), Ok(number), "{text}");
        }
        for wrong in ["", "\n", "x", "0x", "08", "-1", " 1", "1 ", "1\n\n", "1K", "++1"] {
            assert_eq!(unsigned(wrong).unwrap_err().errno, Errno::EINVAL, "{wrong:?}");
        }
        assert_eq!(unsigned("18446744073709551616").unwrap_err().errno, Errno::ERANGE);
        assert_eq!((signed("-1\n"), signed("9999")), (Ok(-1), Ok(9999)));
        for wrong in ["", "-", "0x1", "1.5", "--1"] {
            assert_eq!(signed(wrong).unwrap_err().errno, Errno::EINVAL, "{wrong:?}");
        }
        assert_eq!(signed("2147483648").unwrap_err().errno, Errno::ERANGE);
    }
}
