//! Output of commands, and their failures.

use std::{
    borrow::Cow,
    fmt,
    io::{self, Write},
    process::ExitCode,
};

use rnbd::Errno;
use serde::Serialize;

/// Shown under every long help.
pub(crate) const AFTER_HELP: &str = "\
Exit status:
  0    done, or ended cleanly by ctrl-C or SIGTERM
  1    failed: the message says what and what to do
  2    wrong usage; in `pcap` also a file that can't be read
  3    `pcap check`: not all could be checked; `filter`, `show`: no frame matches; `anonymize`: some are judged differently;
       `play`: a script was not run
  130  ended by a second ctrl-C

Environment:
  FERROCE_LOG      log filter, such as `debug` or `rtrs=trace,info`; wins over -v and -q
  FERROCE_CONTROL  control socket that `ctl` uses";

/// Why a command ends with an exit status other than 0.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    text: Option<String>,
    errno: Option<Errno>,
}

impl Failure {
    /// The arguments make no sense (status 2).
    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self::with_status(2, text)
    }

    /// Failure with status 1.
    pub(crate) fn failed(text: impl Into<String>) -> Self {
        Self::with_status(1, text)
    }

    /// Failure with status 1, with the text of an error.
    pub(crate) fn of(e: impl fmt::Display) -> Self {
        Self::failed(e.to_string())
    }

    /// Failure with a status of its own.
    pub(crate) fn with_status(code: u8, text: impl Into<String>) -> Self {
        Self {
            code,
            text: Some(text.into()),
            errno: None,
        }
    }

    /// Failure that has been printed already.
    pub(crate) const fn reported(code: u8) -> Self {
        Self {
            code,
            text: None,
            errno: None,
        }
    }

    /// The same, with the error number for those who ask by way of a control socket or an attribute.
    pub(crate) fn with_errno(self, errno: Errno) -> Self {
        Self {
            errno: Some(errno),
            ..self
        }
    }

    /// The error number; where there is none of its own, EINVAL for wrong usage and else EIO.
    pub(crate) fn errno(&self) -> Errno {
        let other = if self.code == 2 { Errno::EINVAL } else { Errno::EIO };
        self.errno.unwrap_or(other)
    }

    /// The message, if it has not been printed already.
    pub(crate) fn text(&self) -> Option<&str> {
        self.text.as_deref()
    }

    /// Prints the message and gives the exit status.
    pub(crate) fn report(self) -> ExitCode {
        if let Some(text) = self.text {
            // Nobody may be reading: then the status has to do.
            let _ = writeln!(io::stderr(), "error: {text}");
        }
        ExitCode::from(self.code)
    }
}

impl From<io::Error> for Failure {
    /// An error while printing. A reader that has seen enough (`| head`) is no failure worth a message.
    fn from(e: io::Error) -> Self {
        if e.kind() == io::ErrorKind::BrokenPipe {
            Self::reported(1)
        } else {
            Self::failed(format!("can't write the output: {e}"))
        }
    }
}

/// Prints a line, and so that a program that reads it gets it now.
pub(crate) fn line(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    Ok(out.flush()?)
}

/// Prints a text that has its ends of lines.
pub(crate) fn text(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Prints a value as one line of JSON.
pub(crate) fn json(value: &impl Serialize) -> Result<(), Failure> {
    line(&json_text(value))
}

/// Returns a value as JSON that does nothing to a terminal.
pub(crate) fn json_text(value: &impl Serialize) -> String {
    let json = serde_json::to_string(value).unwrap_or_else(|e| {
        // Only of maps whose keys are no strings.
        tracing::error!("a line has no JSON: {e}");
        String::new()
    });
    escape_json(&json).into_owned()
}

/// Escapes in JSON what it allows in strings and a terminal may obey: DEL, the control characters above it (0x9b begins a
/// terminal's command), other ends of lines, and what changes the direction of writing. Such characters are nowhere else.
fn escape_json(text: &str) -> Cow<'_, str> {
    let acts = |c: char| matches!(c, '\u{7f}'..='\u{9f}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if !text.contains(acts) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match acts(c) {
            // All of them fit in four digits.
            true => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            false => out.push(c),
        }
    }
    out.into()
}

/// Bytes for people: `1.5 GiB`.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = UNITS[0];
    for next in &UNITS[1..] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    format!("{value:.1} {unit}")
}

#[cfg(test)]
mod tests {
    use super::{bytes, escape_json};

    #[test]
    fn json_does_nothing_to_a_terminal_and_stays_what_it_is() {
        let name = "\u{1b}[2J\n\u{9b}31m\u{7f}\u{202e}\u{2028}\u{2069}ß\"";
        let text = serde_json::to_string(&[name]).unwrap();
        let safe = escape_json(&text);
        assert!(
            !safe.contains(char::is_control) && !safe.contains(['\u{202e}', '\u{2028}', '\u{2069}']),
            "{safe}"
        );
        assert_eq!(serde_json::from_str::<[String; 1]>(&safe).unwrap(), [name]);
        assert_eq!(escape_json("[\"ß\"]"), "[\"ß\"]");
    }

    #[test]
    fn bytes_for_people() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(200 << 20), "200.0 MiB");
        assert_eq!(bytes(u64::MAX), "16384.0 PiB");
    }
}
