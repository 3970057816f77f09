//! Tables of text with aligned columns.

use std::io::{self, Write};

/// Prints a table, the last column without padding. Nothing without rows.
pub(super) fn print<const N: usize>(out: &mut impl Write, head: [&str; N], rows: &[[String; N]]) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let head = head.map(str::to_owned);
    let all = || [&head].into_iter().chain(rows);
    let width = |column: usize| all().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N - 1).map(width).collect();
    for row in all() {
        for (text, width) in row.iter().zip(&widths) {
            write!(out, "{text:width$}  ")?;
        }
        writeln!(out, "{}", row[N - 1])?;
    }
    Ok(())
}
