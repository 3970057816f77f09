//! Docstrings begin with a noun or a verb: not with a question word, behind which a reader has to look for the subject.

use crate::{
    Result,
    lint::{CRATES, none, sources},
};

/// First words that docstrings must not have.
const REFUSED: [&str; 10] = [
    "What",
    "Whatever",
    "Who",
    "Whom",
    "Whoever",
    "Whose",
    "Where",
    "Wherever",
    "Those",
    "Something",
];
/// Folders whose docstrings still have them. Delete each that is done: the lint asks for it.
const UNDONE: &[&str] = &[
    "rnbd",
    "rtrs",
    "tests/apps",
    "tests/bare",
    "tests/fuzz",
    "tests/interop",
    "tests/replay",
    "tests/rig",
    "tests/soak",
    "tests/src",
    "tests/tests",
    "tests/wire",
];

/// Checks all crates but those that are undone.
pub(super) fn check() -> Result<()> {
    let mut findings = Vec::new();
    let mut undone: Vec<_> = UNDONE.iter().map(|folder| (folder, 0)).collect();
    for (file, text) in sources(&CRATES)? {
        let found = refused(&text);
        match undone.iter_mut().find(|(folder, _)| file.starts_with(folder)) {
            Some((_, count)) => *count += found.len(),
            None => findings.extend(
                found
                    .iter()
                    .map(|(line, word)| format!("{}:{line}: a docstring begins with \"{word}\"", file.display())),
            ),
        }
    }
    let done = undone.iter().filter(|(_, count)| *count == 0);
    findings.extend(done.map(|(folder, _)| format!("{folder}: delete it from UNDONE, its docstrings are done")));
    none(&findings)
}

/// Finds docstrings that begin with a refused word: their lines, and the word.
fn refused(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut inside = false;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_start();
        let doc = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
        let first = doc.filter(|_| !inside).and_then(|doc| doc.split_whitespace().next());
        if let Some(word) = first.filter(|word| REFUSED.contains(word)) {
            found.push((index + 1, word));
        }
        inside = doc.is_some();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::refused;

    #[test]
    fn first_words_of_docstrings_are_found() {
        let text = "//! What this is.\n\n/// Whose it is.\nstruct A;\n    /// Those of `A`.\n    fn f() {}";
        assert_eq!(refused(text), [(1, "What"), (3, "Whose"), (5, "Those")]);
    }

    #[test]
    fn other_words_and_lines_are_not() {
        let text = "/// Returns it.\n/// What it is, says [`A`].\nfn f() {}\n// What for\n/// Whatsoever.\n/// `What`";
        assert!(refused(text).is_empty());
    }
}
