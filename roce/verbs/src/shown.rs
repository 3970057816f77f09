//! Text of others, fit to be shown.

use core::fmt::{self, Write};

/// Longest text that is shown whole, characters. Names of RTRS and RNBD have at most 254 bytes.
const MAX: usize = 255;

/// A name or message that a peer or another user chose, for terminals and logs; see [`shown`].
#[derive(Clone, Copy, Debug)]
pub struct Shown<'a>(&'a str);

/// Shows `text` without letting it act: control characters, ends of lines, marks that change the direction of writing and what
/// else is not printed is escaped as in Rust's literals, and so is the backslash; after 255 characters there is only `…`.
pub const fn shown(text: &str) -> Shown<'_> {
    Shown(text)
}

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, c) in self.0.chars().enumerate() {
            match c {
                _ if n == MAX => return f.write_char('…'),
                // Nothing is quoted here.
                '\'' | '"' => f.write_char(c)?,
                c => write!(f, "{}", c.escape_debug())?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_acts_on_a_terminal_is_escaped() {
        let show = |text: &str| shown(text).to_string();
        assert_eq!(show("disk 1, \"größer\" 'ß' 磁盘"), "disk 1, \"größer\" 'ß' 磁盘");
        assert_eq!(show("a\x1b[2J\r\nerror: b\0"), "a\\u{1b}[2J\\r\\nerror: b\\0");
        assert_eq!(
            show("\u{9b}31m\u{202e}\u{2028}\u{7f}"),
            "\\u{9b}31m\\u{202e}\\u{2028}\\u{7f}"
        );
        assert_eq!(show("\\n"), "\\\\n", "not to be taken for an escape");
    }

    #[test]
    fn nothing_is_shown_without_end() {
        let long = "\u{1b}".repeat(100_000);
        assert_eq!(shown(&long).to_string().chars().count(), MAX * 6 + 1);
        assert_eq!(shown(&"x".repeat(MAX)).to_string(), "x".repeat(MAX));
    }
}
