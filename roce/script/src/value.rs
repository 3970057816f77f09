//! Values of a script's fields: numbers, times, places in memory, data.

use core::time::Duration;

use roce_verbs::QpState;

use crate::{error::ScriptError, names, words::Word};

/// Longest time that a line may name. Virtual time costs only the timers that run in it.
const LONGEST: Duration = Duration::from_secs(3600);
/// Largest payload that a script may name, bytes: that of the largest region.
pub(crate) const MAX_BYTES: u64 = 16 << 20;

/// Reads a number below 2^`bits`, decimal or hexadecimal.
pub(crate) fn number(word: Word<'_>, bits: u32) -> Result<u64, ScriptError> {
    let value = match word.text.strip_prefix("0x") {
        Some(hex) if hex.starts_with('+') => None,
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None if word.text.starts_with('+') => None,
        None => word.text.parse().ok(),
    };
    match value {
        Some(value) if bits >= 64 || value >> bits == 0 => Ok(value),
        _ => Err(word.error(format!("a number below 2^{bits}"))),
    }
}

/// Reads a number below 2^8.
pub(crate) fn byte(word: Word<'_>, bits: u32) -> Result<u8, ScriptError> {
    Ok(number(word, bits.min(8))? as u8)
}

/// Reads a number below 2^32 or fewer bits.
pub(crate) fn small(word: Word<'_>, bits: u32) -> Result<u32, ScriptError> {
    Ok(number(word, bits.min(32))? as u32)
}

/// Reads a number of bytes that fit into memory.
pub(crate) fn bytes(word: Word<'_>) -> Result<usize, ScriptError> {
    match number(word, 64) {
        Ok(n) if n <= MAX_BYTES => Ok(n as usize),
        _ => Err(word.error(format!("a number of bytes, at most {MAX_BYTES}"))),
    }
}

/// Reads a time: a number with the unit `us`, `ms` or `s`.
pub(crate) fn duration(word: Word<'_>) -> Result<Duration, ScriptError> {
    let units: [(&str, u64); 3] = [("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)];
    let nanos = units.iter().find_map(|(unit, nanos)| {
        let digits = word.text.strip_suffix(unit).filter(|digits| !digits.starts_with('+'))?;
        digits.parse::<u64>().ok()?.checked_mul(*nanos)
    });
    match nanos.map(Duration::from_nanos) {
        Some(time) if time <= LONGEST => Ok(time),
        _ => Err(word.error("a time of at most 3600s, such as 50ms, 10us or 2s")),
    }
}

/// Address or key: of a region with an offset, or a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    /// Index of the region. `None`: a number.
    pub(crate) region: Option<usize>,
    /// Offset, or the number.
    pub(crate) offset: u64,
}

impl Place {
    pub(crate) const fn number(offset: u64) -> Self {
        Self { region: None, offset }
    }
}

/// Reads a number, `REGION`, `REGION+N` or `REGION-N`.
pub(crate) fn place(word: Word<'_>, regions: &[String], bits: u32) -> Result<Place, ScriptError> {
    if word.text.starts_with(|c: char| c.is_ascii_digit()) {
        return number(word, bits).map(Place::number);
    }
    let plus = word.split('+').map(|(name, n)| (name, n, false));
    let signed = plus.or_else(|| word.split('-').map(|(name, n)| (name, n, true)));
    let (name, offset) = match signed {
        None => (word, 0),
        Some((name, n, false)) => (name, number(n, 63)?),
        Some((name, n, true)) => (name, number(n, 63)?.wrapping_neg()),
    };
    Ok(Place {
        region: Some(region(name, regions)?),
        offset,
    })
}

/// Reads the name of a region.
pub(crate) fn region(word: Word<'_>, regions: &[String]) -> Result<usize, ScriptError> {
    let index = regions.iter().position(|name| name == word.text);
    index.ok_or_else(|| word.error(format!("a number or a region of the qp lines ({})", regions.join(", "))))
}

/// Origin of a payload's bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// Script's bytes for packets from this PSN on.
    Psn(u32),
    /// Bytes that a region had in the beginning.
    Region(usize, u64),
    /// A byte, repeated.
    Fill(u8),
    /// Given bytes.
    Bytes(Vec<u8>),
}

/// Payload: its length and, if known, its bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Data {
    pub(crate) len: usize,
    pub(crate) source: Option<Source>,
}

/// Reads `LEN`, `LEN:psnN`, `LEN:REGION+OFFSET`, `LEN:0xNN` or `hex:DIGITS`.
pub(crate) fn data(word: Word<'_>, regions: &[String]) -> Result<Data, ScriptError> {
    let Some((len, source)) = word.split(':') else {
        let len = bytes(word)?;
        return Ok(Data { len, source: None });
    };
    if len.text == "hex" {
        let bytes = hex(source)?;
        return Ok(Data {
            len: bytes.len(),
            source: Some(Source::Bytes(bytes)),
        });
    }
    let len = bytes(len)?;
    let psn = source
        .text
        .strip_prefix("psn")
        .filter(|n| n.starts_with(|c: char| c.is_ascii_digit()));
    let source = match psn {
        Some(psn) => Source::Psn(small(source.part(psn, 3), 24)?),
        None if source.text.starts_with(|c: char| c.is_ascii_digit()) => Source::Fill(byte(source, 8)?),
        None => {
            let place = place(source, regions, 64)?;
            Source::Region(place.region.unwrap_or(0), place.offset)
        }
    };
    Ok(Data {
        len,
        source: Some(source),
    })
}

/// Reads hexadecimal digits, two a byte.
pub(crate) fn hex(word: Word<'_>) -> Result<Vec<u8>, ScriptError> {
    let digits: Option<Vec<u8>> = word.text.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect();
    match digits {
        Some(digits) if digits.len().is_multiple_of(2) => {
            Ok(digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
        }
        _ => Err(word.error("pairs of hexadecimal digits")),
    }
}

/// Reads the state of a queue pair.
pub(crate) fn state(word: Word<'_>) -> Result<QpState, ScriptError> {
    names::lookup(&names::STATES, word.text).ok_or_else(|| word.error(names::list(&names::STATES)))
}
