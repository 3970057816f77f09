//! Marks of a picture, few however many packets there are: those in one place become one.

use std::{collections::BTreeMap, fmt::Write as _};

/// Segments that are nearer are drawn as one, pixels.
const NEAR: f64 = 1.5;
/// Least height of a segment, pixels.
const LEAST: f64 = 3.0;
/// Height of a bracket, pixels.
const TAIL: f64 = 9.0;
/// Side of the square in which points are one, pixels.
const CELL: f64 = 3.0;

/// Escapes text of an element or an attribute.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

/// Text that a browser shows for marks of one place.
#[derive(Clone, Debug, Default)]
struct Note {
    first: String,
    count: u64,
}

impl Note {
    fn title(&self) -> String {
        match (self.first.as_str(), self.count) {
            ("", _) => String::new(),
            (first, 1) => format!("<title>{}</title>", escaped(first)),
            (first, n) => format!("<title>{}; {} more here</title>", escaped(first), n - 1),
        }
    }
}

/// Vertical segments: a packet is one at its time, from its PSN to the next.
#[derive(Default, Debug)]
pub(super) struct Segments {
    /// By column of a pixel: top, bottom, note.
    columns: BTreeMap<i64, Vec<(f64, f64, Note)>>,
    pub(super) count: u64,
}

impl Segments {
    /// Adds a segment; `note` gives the text for the first in its place.
    pub(super) fn add(&mut self, x: f64, ends: [f64; 2], note: impl FnOnce() -> String) {
        self.count += 1;
        let (mut top, mut bottom) = (ends[0].min(ends[1]), ends[0].max(ends[1]));
        if bottom - top < LEAST {
            let middle = f64::midpoint(top, bottom);
            (top, bottom) = (middle - LEAST / 2.0, middle + LEAST / 2.0);
        }
        let column = self.columns.entry(x.round() as i64).or_default();
        let touches = |known: &(f64, f64, Note)| top <= known.1 + NEAR && known.0 <= bottom + NEAR;
        let Some(at) = column.iter().position(touches) else {
            let (first, count) = (note(), 1);
            column.push((top, bottom, Note { first, count }));
            return;
        };
        let known = &mut column[at];
        (known.0, known.1) = (known.0.min(top), known.1.max(bottom));
        known.2.count += 1;
        // It may now touch others.
        let (top, bottom, _) = *known;
        let mut joined = column[at].clone();
        let mut n = 0;
        column.retain(|other| {
            let apart = n == at || other.0 > bottom + NEAR || other.1 < top - NEAR;
            if !apart {
                (joined.0, joined.1) = (joined.0.min(other.0), joined.1.max(other.1));
                joined.2.count += other.2.count;
            }
            n += 1;
            apart
        });
        if let Some(known) = column.iter_mut().find(|known| (known.0, known.1) == (top, bottom)) {
            *known = joined;
        }
    }

    /// Writes them as one path, or each by itself if they have notes.
    pub(super) fn draw(&self, class: &str, out: &mut String) {
        let all = self
            .columns
            .iter()
            .flat_map(|(x, column)| column.iter().map(move |s| (x, s)));
        let (noted, plain): (Vec<_>, Vec<_>) = all.partition(|(_, (_, _, note))| !note.first.is_empty());
        if !plain.is_empty() {
            let path = plain.iter().fold(String::new(), |mut path, (x, (top, bottom, _))| {
                let _ = write!(path, "M{x} {top:.1}V{bottom:.1}");
                path
            });
            let _ = writeln!(out, "<path class=\"{class}\" d=\"{path}\"/>");
        }
        for (x, (top, bottom, note)) in noted {
            let title = note.title();
            let _ = writeln!(
                out,
                "<path class=\"{class}\" d=\"M{x} {top:.1}V{bottom:.1}\">{title}</path>"
            );
        }
    }
}

/// Shape of a point.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Shape {
    Dot,
    Cross,
    Diamond,
    Triangle,
}

impl Shape {
    /// Returns its path.
    pub(super) fn path(self, x: f64, y: f64) -> String {
        match self {
            Self::Dot => format!("M{:.1} {y:.1}a1 1 0 1 0 2 0a1 1 0 1 0 -2 0", x - 1.0),
            Self::Cross => format!("M{:.1} {:.1}l9 9m0 -9l-9 9", x - 4.5, y - 4.5),
            Self::Diamond => format!("M{x:.1} {:.1}l5 5l-5 5l-5 -5z", y - 5.0),
            Self::Triangle => format!("M{:.1} {:.1}h8l-4 -8z", x - 4.0, y + 4.0),
        }
    }
}

/// Points.
#[derive(Default, Debug)]
pub(super) struct Points {
    /// By cell: place of the first, and its note.
    cells: BTreeMap<(i64, i64), (f64, f64, Note)>,
    /// Horizontal brackets that begin at points, by cell: their ends.
    tails: BTreeMap<(i64, i64), f64>,
    pub(super) count: u64,
}

impl Points {
    /// Adds a point; `note` gives the text for the first in its place.
    pub(super) fn add(&mut self, x: f64, y: f64, note: impl FnOnce() -> String) {
        self.count += 1;
        let cell = cell(x, y);
        let (_, _, note) = self.cells.entry(cell).or_insert_with(|| {
            (
                x,
                y,
                Note {
                    first: note(),
                    count: 0,
                },
            )
        });
        note.count += 1;
    }

    /// Adds a point with a horizontal bracket to `end`.
    pub(super) fn add_with_tail(&mut self, x: f64, y: f64, end: f64, note: impl FnOnce() -> String) {
        self.add(x, y, note);
        let known = self.tails.entry(cell(x, y)).or_insert(end);
        *known = known.max(end);
    }

    /// Writes them as one path, or each by itself if they have notes.
    pub(super) fn draw(&self, class: &str, shape: Shape, out: &mut String) {
        for (cell, end) in &self.tails {
            if let Some((x, y, _)) = self.cells.get(cell) {
                let _ = writeln!(
                    out,
                    "<path class=\"{class} tail\" d=\"M{x:.1} {y:.1}v-{TAIL}H{end:.1}v{TAIL}\"/>"
                );
            }
        }
        let (noted, plain): (Vec<_>, Vec<_>) = self.cells.values().partition(|(_, _, note)| !note.first.is_empty());
        if !plain.is_empty() {
            let path: String = plain.iter().map(|(x, y, _)| shape.path(*x, *y)).collect();
            let _ = writeln!(out, "<path class=\"{class}\" d=\"{path}\"/>");
        }
        for (x, y, note) in noted {
            let (path, title) = (shape.path(*x, *y), note.title());
            let _ = writeln!(out, "<path class=\"{class}\" d=\"{path}\">{title}</path>");
        }
    }
}

fn cell(x: f64, y: f64) -> (i64, i64) {
    ((x / CELL).floor() as i64, (y / CELL).floor() as i64)
}

/// Line that only rises, in steps.
#[derive(Default, Debug)]
pub(super) struct Staircase {
    /// By column of a pixel: height of its first and last step.
    columns: BTreeMap<i64, (f64, f64)>,
    last: Option<f64>,
    pub(super) count: u64,
}

impl Staircase {
    /// Adds a step, which is ignored if it is below the last (a larger `y`).
    pub(super) fn add(&mut self, x: f64, y: f64) {
        self.count += 1;
        self.raise(x, y);
    }

    /// Adds a step of another packet, which is not counted.
    pub(super) fn raise(&mut self, x: f64, y: f64) {
        if self.last.is_some_and(|last| y > last) {
            return;
        }
        self.last = Some(y);
        self.columns.entry(x.round() as i64).or_insert((y, y)).1 = y;
    }

    /// Writes it, to the right end of its panel.
    pub(super) fn draw(&self, class: &str, end: f64, out: &mut String) {
        let mut path = String::new();
        for (x, (first, last)) in &self.columns {
            let _ = match path.is_empty() {
                true => write!(path, "M{x} {first:.1}V{last:.1}"),
                false => write!(path, "H{x}V{last:.1}"),
            };
        }
        if !path.is_empty() {
            let _ = writeln!(out, "<path class=\"{class}\" d=\"{path}H{end:.1}\"/>");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_of_one_place_are_one_and_others_stay() {
        let mut segments = Segments::default();
        for n in 0..1000 {
            segments.add(10.0, [f64::from(n % 10), f64::from(n % 10 + 1)], String::new);
        }
        segments.add(10.0, [100.0, 110.0], String::new);
        segments.add(11.0, [5.0, 5.0], || "frame 7".to_owned());
        // It joins two.
        segments.add(10.0, [10.0, 100.0], String::new);
        let mut out = String::new();
        segments.draw("data", &mut out);
        assert_eq!(segments.count, 1003);
        assert_eq!(out.matches('M').count(), 2, "{out}");
        assert!(
            out.contains("V110.0") && out.contains("<title>frame 7</title>"),
            "{out}"
        );
    }

    #[test]
    fn points_are_bounded_and_none_is_lost() {
        let mut points = Points::default();
        for n in 0..100_000u32 {
            points.add(f64::from(n % 900), f64::from(n % 300), || format!("<{n}>"));
        }
        let mut out = String::new();
        points.draw("nak", Shape::Cross, &mut out);
        let drawn = out.matches("<path").count();
        assert!((100..=30_000).contains(&drawn), "{drawn}");
        assert!(out.contains("&lt;0>; ") && points.count == 100_000);
    }

    #[test]
    fn a_staircase_only_rises() {
        let mut line = Staircase::default();
        for (x, y) in [(0.0, 90.0), (5.0, 80.0), (6.0, 85.0), (7.0, 70.0), (7.2, 60.0)] {
            line.add(x, y);
        }
        let mut out = String::new();
        line.draw("ack", 100.0, &mut out);
        assert!(out.contains("M0 90.0V90.0H5V80.0H7V60.0H100.0"), "{out}");
    }
}
