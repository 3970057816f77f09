//! The lines that the demo shows: on the terminal as they come, and kept for [`super::record`].

use std::{
    cell::RefCell,
    io::IsTerminal as _,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

/// Columns that a line fits into, the times at the right edge included.
pub(super) const COLUMNS: usize = 100;

/// How a line looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Title of the next lines.
    Title,
    /// A command as a user types it; the text begins with the prompt.
    Command,
    /// Output of a program, or an event.
    Output,
    /// Result of a step.
    Done,
    /// Part of the summary.
    Table,
}

impl Kind {
    /// ANSI attributes: the 16 colours that every theme has, and none where the theme's own text colour does.
    const fn ansi(self) -> &'static str {
        match self {
            Self::Title => "1;36",
            Self::Command => "1",
            Self::Output => "2",
            Self::Done => "32",
            Self::Table => "",
        }
    }
}

/// A line that was shown.
#[derive(Clone, Debug)]
pub(super) struct Line {
    /// Since the demo's begin.
    pub(super) at: Duration,
    pub(super) kind: Kind,
    pub(super) text: String,
}

/// The terminal, or what is in its place.
pub(super) struct Screen {
    started: Instant,
    step: RefCell<Instant>,
    steps: RefCell<u32>,
    lines: RefCell<Vec<Line>>,
    colours: bool,
}

impl Screen {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self {
            started: now,
            step: RefCell::new(now),
            steps: RefCell::new(0),
            lines: RefCell::default(),
            colours: std::io::stdout().is_terminal() && !plain,
        }
    }

    /// Shows text, which may have several lines.
    pub(super) fn show(&self, kind: Kind, text: &str) {
        for text in text.lines() {
            if self.colours {
                println!("\x1b[{}m{text}\x1b[0m", kind.ansi());
            } else {
                println!("{text}");
            }
            self.lines.borrow_mut().push(Line {
                at: self.started.elapsed(),
                kind,
                text: text.to_owned(),
            });
        }
    }

    /// Begins a step.
    pub(super) fn step(&self, what: &str) {
        *self.steps.borrow_mut() += 1;
        *self.step.borrow_mut() = Instant::now();
        let number = *self.steps.borrow();
        self.show(Kind::Title, &format!("{number}  {what}"));
    }

    /// Shows a command of a host.
    pub(super) fn command(&self, host: &str, text: &str) {
        self.show(Kind::Command, &format!("   {host}$ {text}"));
    }

    /// Shows output, or an event.
    pub(super) fn output(&self, text: &str) {
        for line in text.lines() {
            self.show(Kind::Output, &format!("   {line}"));
        }
    }

    /// Ends a step: what came of it, and at the right edge the seconds it took.
    pub(super) fn done(&self, result: &str) {
        let took = format!("{:.1} s", self.step.borrow().elapsed().as_secs_f64());
        let left = format!("   ok: {result}");
        let gap = COLUMNS.saturating_sub(left.chars().count()).max(took.len() + 1);
        self.show(Kind::Done, &format!("{left}{took:>gap$}"));
    }

    /// Shows two columns with a head.
    pub(super) fn table(&self, head: (&str, &str), rows: &[(&str, String)]) {
        let all = || core::iter::once((head.0, head.1)).chain(rows.iter().map(|(a, b)| (*a, b.as_str())));
        let width = |column: fn((&str, &str)) -> usize| all().map(column).max().unwrap_or(0);
        let (first, second) = (width(|(a, _)| a.chars().count()), width(|(_, b)| b.chars().count()));
        for (i, (a, b)) in all().enumerate() {
            self.show(Kind::Table, &format!("| {a:first$} | {b:second$} |"));
            if i == 0 {
                self.show(
                    Kind::Table,
                    &format!("|{:-<1$}|{2:-<3$}|", "", first + 2, "", second + 2),
                );
            }
        }
    }

    /// Time since the begin.
    pub(super) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// The lines so far.
    pub(super) fn lines(&self) -> Vec<Line> {
        self.lines.borrow().clone()
    }
}

/// A bar with bytes, hidden when there is no terminal.
pub(super) fn bar(what: &str, bytes: u64) -> ProgressBar {
    let template = "   {msg:12} [{bar:40}] {bytes:>10} / {total_bytes} {bytes_per_sec}";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(bytes)
        .with_style(style.progress_chars("=> "))
        .with_message(what.to_owned())
}

#[cfg(test)]
mod tests {
    use super::{COLUMNS, Kind, Screen};

    #[test]
    fn a_table_is_aligned_and_a_step_ends_at_the_right_edge() {
        let screen = Screen::new();
        screen.step("first");
        screen.done("all of it");
        screen.table(
            ("what", "result"),
            &[("a", "1".to_owned()), ("longer", "123456789".to_owned())],
        );
        let lines = screen.lines();
        assert_eq!((lines[0].kind, &*lines[0].text), (Kind::Title, "1  first"));
        assert_eq!(lines[1].text.len(), COLUMNS);
        assert!(lines[1].text.starts_with("   ok: all of it ") && lines[1].text.ends_with(" s"));
        let table: Vec<_> = lines[2..].iter().map(|line| &*line.text).collect();
        assert_eq!(
            table,
            [
                "| what   | result    |",
                "|--------|-----------|",
                "| a      | 1         |",
                "| longer | 123456789 |",
            ]
        );
    }
}
