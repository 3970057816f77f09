//! Errors of a script's text, with their position.

/// Error in the text of a script.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{line}:{column}: expected {expected}, found {found}")]
pub struct ScriptError {
    line: usize,
    column: usize,
    expected: String,
    found: String,
}

/// Longest part of a word that an error quotes, characters.
const QUOTED: usize = 40;

impl ScriptError {
    /// Creates an error about `found`; an empty text stands for the end of the line.
    pub(crate) fn new(line: usize, column: usize, expected: impl Into<String>, found: &str) -> Self {
        let mut quoted: String = found.chars().take(QUOTED).collect();
        if quoted.len() < found.len() {
            quoted.push('…');
        }
        Self {
            line,
            column,
            expected: expected.into(),
            found: match found.is_empty() {
                true => "the end of the line".to_owned(),
                false => format!("{quoted:?}"),
            },
        }
    }

    /// Returns the line, from 1.
    pub const fn line(&self) -> usize {
        self.line
    }

    /// Returns the column in characters, from 1.
    pub const fn column(&self) -> usize {
        self.column
    }

    /// Returns the text that would have been right.
    pub fn expected(&self) -> &str {
        &self.expected
    }
}
