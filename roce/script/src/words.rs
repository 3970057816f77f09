//! Words of a line, with their columns.

use crate::error::ScriptError;

/// Word of a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Word<'a> {
    pub(crate) text: &'a str,
    line: usize,
    column: usize,
}

impl<'a> Word<'a> {
    /// Creates the error that something else was expected here.
    pub(crate) fn error(&self, expected: impl Into<String>) -> ScriptError {
        ScriptError::new(self.line, self.column, expected, self.text)
    }

    /// Splits `KEY=VALUE`. `None`: no equals sign.
    pub(crate) fn assignment(&self) -> Option<(Word<'a>, Word<'a>)> {
        let (key, value) = self.text.split_once('=')?;
        let key = Word { text: key, ..*self };
        Some((key, self.part(value, key.text.chars().count() + 1)))
    }

    /// Returns a part of the word that begins `skipped` characters behind its start.
    pub(crate) fn part(&self, text: &'a str, skipped: usize) -> Word<'a> {
        Word {
            text,
            line: self.line,
            column: self.column + skipped,
        }
    }

    /// Splits at the first `at`; the second part lacks it. `None`: it is not in the word.
    pub(crate) fn split(&self, at: char) -> Option<(Word<'a>, Word<'a>)> {
        let (left, right) = self.text.split_once(at)?;
        Some((Word { text: left, ..*self }, self.part(right, left.chars().count() + 1)))
    }
}

/// Words of a line, in order.
#[derive(Clone, Debug)]
pub(crate) struct Words<'a> {
    rest: &'a str,
    line: usize,
    column: usize,
}

impl<'a> Words<'a> {
    pub(crate) const fn new(line: usize, text: &'a str) -> Self {
        Self {
            rest: text,
            line,
            column: 1,
        }
    }

    /// Returns the next word, or an empty one at the end of the line.
    pub(crate) fn word(&mut self) -> Word<'a> {
        let text = self.rest.trim_start();
        let column = self.column + self.rest.chars().count() - text.chars().count();
        let len = match text.starts_with('#') {
            true => 0,
            false => text.find(char::is_whitespace).unwrap_or(text.len()),
        };
        let (word, rest) = text.split_at(len);
        // A comment ends the line.
        (self.rest, self.column) = match len {
            0 => ("", column),
            _ => (rest, column + word.chars().count()),
        };
        Word {
            text: word,
            line: self.line,
            column,
        }
    }

    /// Expects the end of the line.
    pub(crate) fn end(&mut self) -> Result<(), ScriptError> {
        match self.next() {
            Some(word) => Err(word.error("the end of the line")),
            None => Ok(()),
        }
    }
}

impl<'a> Iterator for Words<'a> {
    type Item = Word<'a>;

    fn next(&mut self) -> Option<Word<'a>> {
        Some(self.word()).filter(|word| !word.text.is_empty())
    }
}
