//! An SVG of the terminal: the demo's lines light up as they came, and stay.
//!
//! It has a background of its own, so that it is legible on light and on dark pages. Lines to come are dim instead of absent: a
//! frozen first frame still shows what the demo does. Where a page is printed, or animation is not wanted or not supported, all
//! lines are bright at once.

use std::fmt::Write as _;

use super::screen::{COLUMNS, Kind, Line};

/// Pixels: the size of the font, a character's width (0.6 of it in the usual monospaced fonts) and a line's height.
const FONT: f64 = 13.0;
const CHARACTER: f64 = 7.8;
const LINE: f64 = 18.0;
/// Pixels around the text, and of the bar above it.
const MARGIN: f64 = 18.0;
const BAR: f64 = 34.0;
/// Seconds that the animation takes at most. Longer demos are shown faster.
const LONGEST: f64 = 12.0;

/// Contrast to the background is at least 6:1 for all (WCAG AA wants 4.5:1).
const COLOURS: &str = "\
.bg{fill:#0d1117;stroke:#484f58}\
.title{fill:#58c7f3;font-weight:bold}\
.command{fill:#f0f6fc;font-weight:bold}\
.output{fill:#9da7b3}\
.done{fill:#56d364}\
.table{fill:#d1d7e0}";

const fn class(kind: Kind) -> &'static str {
    match kind {
        Kind::Title => "title",
        Kind::Command => "command",
        Kind::Output => "output",
        Kind::Done => "done",
        Kind::Table => "table",
    }
}

/// The picture of these lines.
pub(super) fn svg(lines: &[Line]) -> String {
    let spaced = spaced(lines);
    let width = COLUMNS as f64 * CHARACTER + 2.0 * MARGIN;
    let height = BAR + spaced.len() as f64 * LINE + MARGIN;
    let total = lines.last().map_or(0.0, |line| line.at.as_secs_f64());
    let speed = (total / LONGEST).max(1.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\" \
         role=\"img\" aria-labelledby=\"title\">\n\
         <title id=\"title\">A terminal that runs cargo xtask demo</title>\n\
         <style>text{{font:{FONT}px ui-monospace,SFMono-Regular,Menlo,Consolas,\"DejaVu Sans Mono\",monospace;white-space:pre}}\
         {COLOURS}\
         @keyframes show{{from{{opacity:.45}}to{{opacity:1}}}}\
         @media screen and (prefers-reduced-motion:no-preference){{.line{{animation:show 1ms linear both}}}}</style>\n\
         <rect class=\"bg\" x=\"0.5\" y=\"0.5\" width=\"{:.0}\" height=\"{:.0}\" rx=\"8\"/>\n",
        width - 1.0,
        height - 1.0,
    );
    for (i, colour) in ["#ff5f56", "#ffbd2e", "#27c93f"].iter().enumerate() {
        let x = MARGIN + 2.0 + 20.0 * i as f64;
        let _ = writeln!(out, "<circle cx=\"{x:.0}\" cy=\"18\" r=\"6\" fill=\"{colour}\"/>");
    }
    for (i, line) in spaced.iter().enumerate() {
        let Some(line) = line else { continue };
        let y = BAR + i as f64 * LINE + FONT;
        let delay = line.at.as_secs_f64() / speed;
        let _ = writeln!(
            out,
            "<text class=\"line {}\" x=\"{MARGIN:.0}\" y=\"{y:.0}\" style=\"animation-delay:{delay:.2}s\" xml:space=\"preserve\">{}</text>",
            class(line.kind),
            escaped(&line.text)
        );
    }
    out.push_str("</svg>\n");
    out
}

/// The lines with room above each title and above the summary.
fn spaced(lines: &[Line]) -> Vec<Option<&Line>> {
    let mut out: Vec<Option<&Line>> = Vec::new();
    let mut before = None;
    for line in lines {
        let new_block = line.kind == Kind::Title || (line.kind == Kind::Table && before == Some(Kind::Done));
        if new_block && before.is_some() {
            out.push(None);
        }
        before = Some(line.kind);
        out.push(Some(line));
    }
    out
}

/// Text as XML has it.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn line(seconds: u64, kind: Kind, text: &str) -> Line {
        Line {
            at: Duration::from_secs(seconds),
            kind,
            text: text.to_owned(),
        }
    }

    #[test]
    fn every_line_is_drawn_in_order_and_within_the_picture() {
        let lines = [
            line(0, Kind::Command, "$ cargo xtask demo"),
            line(1, Kind::Title, "1  first"),
            line(6, Kind::Done, "   ok: a < b && c > d"),
            line(24, Kind::Table, "| what | result |"),
        ];
        let picture = svg(&lines);
        let texts: Vec<_> = picture.lines().filter(|l| l.starts_with("<text")).collect();
        assert_eq!(texts.len(), lines.len());
        assert!(
            texts[2].contains(">   ok: a &lt; b &amp;&amp; c &gt; d</text>"),
            "{}",
            texts[2]
        );
        // Twice as fast, to end with the longest time.
        let delays: Vec<_> = texts.iter().map(|t| attribute(t, "animation-delay:", 's')).collect();
        assert_eq!(delays, [0.0, 0.5, 3.0, 12.0]);
        let places: Vec<_> = texts.iter().map(|t| attribute(t, " y=\"", '"')).collect();
        assert!(places.is_sorted_by(|a, b| a < b), "{places:?}");
        assert!(places[1] - places[0] > 1.5 * LINE, "room above a title");
        assert!(places[3] < attribute(&picture, "height=\"", '"'), "{places:?}");
    }

    fn attribute(text: &str, name: &str, end: char) -> f64 {
        let (_, rest) = text.split_once(name).unwrap();
        rest.split(end).next().unwrap().parse().unwrap()
    }

    #[test]
    fn the_picture_in_the_repository_is_of_a_demo_that_passed() {
        let path = crate::cargo::workspace_root().join(super::super::RECORD);
        let picture = std::fs::read_to_string(path).unwrap();
        assert!(picture.contains("demo passed in"));
        assert!(
            picture.contains(COLOURS),
            "made by another version: cargo xtask demo --record"
        );
    }
}
