//! Tables for people.

use roce_verbs::shown;

use crate::output::{self, Failure};

/// Prints rows below their heads, with columns as wide as they have to be.
pub(super) fn print(heads: &[&str], rows: &[Vec<String>]) -> Result<(), Failure> {
    for line in lines(heads, rows) {
        output::line(&line)?;
    }
    Ok(())
}

fn lines(heads: &[&str], rows: &[Vec<String>]) -> Vec<String> {
    let heads: Vec<String> = heads.iter().map(|head| (*head).to_owned()).collect();
    // Who has a device or a session has named it.
    let rows = rows
        .iter()
        .map(|row| row.iter().map(|cell| shown(cell).to_string()).collect());
    let all: Vec<Vec<String>> = std::iter::once(heads).chain(rows).collect();
    let width = |column: usize| {
        let cells = all.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or_default()
    };
    let line = |row: &Vec<String>| {
        let cell = |(column, cell): (usize, &String)| {
            let padding = width(column) - cell.chars().count();
            format!("{cell}{}", " ".repeat(padding))
        };
        let cells: Vec<String> = row.iter().enumerate().map(cell).collect();
        cells.join("  ").trim_end().to_owned()
    };
    all.iter().map(line).collect()
}

/// Prints names with what they stand for.
pub(super) fn facts(rows: &[(&str, String)]) -> Result<(), Failure> {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    for (name, value) in rows {
        output::line(format!("{name:width$}  {}", shown(value)).trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::lines;

    #[test]
    fn columns_are_aligned_and_do_nothing_to_a_terminal() {
        let rows = [
            vec!["ä".to_owned(), "longer than the head".into()],
            vec!["\u{1b}[2J".into(), String::new()],
        ];
        let lines = lines(&["NAME", "WHAT"], &rows);
        assert_eq!(lines[0], "NAME       WHAT");
        assert_eq!(lines[1], "ä          longer than the head");
        assert_eq!(lines[2], "\\u{1b}[2J");
    }
}
