//! `specs/rxe-faults.md`: faults of the kernel that were fixed, and the tests that show that we don't have them.

use std::collections::BTreeSet;

use super::test_functions::Tests;

/// Columns: commit, date, fault, whether it concerns us, tests.
const COLUMNS: usize = 5;
/// Commit that no public source prints.
const UNKNOWN: &str = "–";
/// Beginning of the fourth column of faults that can't be ours.
const ELSEWHERE: &str = "not applicable: ";

/// Finds rows that lack something, and tests that do not exist.
pub(super) fn findings(page: &str, text: &str, tests: &mut Tests) -> Vec<String> {
    let mut findings = Vec::new();
    let mut commits = BTreeSet::new();
    for (number, line) in text.lines().enumerate() {
        let Some(cells) = row(line) else { continue };
        let mut find = |text: String| findings.push(format!("{page}:{}: {text}", number + 1));
        let &[commit, date, fault, concern, shown] = &cells[..] else {
            find(format!("{} columns, {COLUMNS} expected", cells.len()));
            continue;
        };
        if commit != UNKNOWN {
            if commit.len() != 12 || !commit.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
                find(format!(
                    "{commit}: expected the first 12 digits of a commit, or {UNKNOWN}"
                ));
            }
            if !commits.insert(commit) {
                find(format!("{commit} is there twice"));
            }
        }
        if !is_date(date) {
            find(format!("{date}: expected a date such as 2024-01-31"));
        }
        if fault.is_empty() || concern.is_empty() {
            find("a column is empty".to_owned());
        }
        let named: Vec<&str> = shown.split('`').skip(1).step_by(2).collect();
        match concern.strip_prefix(ELSEWHERE) {
            Some(_) if !named.is_empty() => find("names tests of what is not applicable".to_owned()),
            Some(reason) if reason.trim().is_empty() => find("needs a reason".to_owned()),
            None if named.is_empty() => find("no test shows that we don't have it".to_owned()),
            _ => {}
        }
        for test in named.into_iter().filter(|test| !tests.exists(test)) {
            find(format!("no test {test}"));
        }
    }
    findings
}

/// Cells of a row of a table; none of its first two lines.
fn row(line: &str) -> Option<Vec<&str>> {
    let inside = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    let cells: Vec<&str> = inside.split(" | ").map(str::trim).collect();
    let is_head = cells[0] == "commit" || cells[0].starts_with("---");
    (!is_head).then_some(cells)
}

fn is_date(text: &str) -> bool {
    let numbers = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
    let lengths: Vec<usize> = text.split('-').map(str::len).collect();
    lengths == [4, 2, 2] && text.split('-').all(numbers)
}

#[cfg(test)]
mod tests {
    use super::{Tests, findings};

    #[test]
    fn each_row_has_a_test_or_a_reason() {
        // Tests run in the crate's folder.
        let test = "test `src/specs/faults.rs::each_row_has_a_test_or_a_reason`";
        for (row, expected) in [
            (format!("0123456789ab | 2022-01-31 | fault | concern | {test}"), 0),
            (
                "0123456789ab | 2022-01-31 | fault | not applicable: locks | –".to_owned(),
                0,
            ),
            ("0123456789ab | 2022-01-31 | fault | not applicable:  | –".to_owned(), 1),
            (
                format!("0123456789ab | 2022-01-31 | fault | not applicable: locks | {test}"),
                1,
            ),
            ("0123456789ab | 2022-01-31 | fault | concern | –".to_owned(), 1),
            (
                "0123456789ab | 2022-01-31 | fault | concern | test `src/a.rs::b`".to_owned(),
                1,
            ),
            (format!("– | 2022-01-31 | fault | concern | {test}"), 0),
            (format!("0123456789a | 2022-01-31 | fault | concern | {test}"), 1),
            (format!("0123456789ab | 31.1.2022 | fault | concern | {test}"), 1),
            (format!("0123456789ab | 2022-01-31 |  | concern | {test}"), 1),
            ("0123456789ab | 2022-01-31 | fault".to_owned(), 1),
        ] {
            let page = format!(
                "Text\n\n| commit | date | fault | ours | shown by |\n| --- | --- | --- | --- | --- |\n| {row} |\n"
            );
            let found = findings("page", &page, &mut Tests::default());
            assert_eq!(found.len(), expected, "{row}: {found:?}");
        }
    }

    #[test]
    fn a_commit_has_one_row() {
        let row = "| 0123456789ab | 2022-01-31 | fault | not applicable: locks | – |\n";
        assert_eq!(
            findings("page", &row.repeat(2), &mut Tests::default()),
            ["page:2: 0123456789ab is there twice"]
        );
    }
}
