//! Tables for people.

use roce_verbs::shown;

use crate::output::{self, Failure};

/// Prints rows below their heads, in aligned columns.
pub(super) fn print(heads: Vec<String>, rows: Vec<Vec<String>>) -> Result<(), Failure> {
    lines(heads, rows).iter().try_for_each(|line| output::line(line))
}

fn lines(heads: Vec<String>, rows: Vec<Vec<String>>) -> Vec<String> {
    let mut all = vec![heads];
    // Clients choose the names of devices and sessions.
    all.extend(
        rows.into_iter()
            .map(|row| row.iter().map(|cell| shown(cell).to_string()).collect()),
    );
    let len = |cell: &String| cell.chars().count();
    let width = |column| {
        all.iter()
            .filter_map(|row: &Vec<String>| row.get(column).map(len))
            .max()
    };
    let line = |row: &Vec<String>| {
        let cells = row.iter().enumerate();
        let cells: Vec<_> = cells
            .map(|(column, cell)| format!("{cell:0$}", width(column).unwrap_or(0)))
            .collect();
        cells.join("  ").trim_end().to_owned()
    };
    all.iter().map(line).collect()
}

/// Prints names with their values.
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
        let lines = lines(vec!["NAME".into(), "WHAT".into()], rows.into());
        assert_eq!(lines[0], "NAME       WHAT");
        assert_eq!(lines[1], "ä          longer than the head");
        assert_eq!(lines[2], "\\u{1b}[2J");
    }
}
