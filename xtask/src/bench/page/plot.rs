//! Plots of the page, as SVG. Each has its own background and follows the colour scheme of its reader.

use std::fmt::Write as _;

use super::figure::{Figure, Form, Part, Spread, rounded};

const WIDTH: f64 = 900.0;
/// Sans-serif letters of 13 px are about as wide, px.
const LETTER: f64 = 6.9;
const STYLE: &str = "<style>\
    svg{--ink:#24292f;--back:#ffffff;--grid:#d0d7de;--c0:#1a7f64;--c1:#8c959f;--c2:#bf5a1f;\
    font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif}\
    @media(prefers-color-scheme:dark){svg{--ink:#e6edf3;--back:#0d1117;--grid:#3d444d;--c0:#3fb68b;--c1:#768390;--c2:#f0883e}}\
    text{fill:var(--ink)}.back{fill:var(--back)}.grid{stroke:var(--grid)}.spread{stroke:var(--ink)}.title{font-weight:600;font-size:16px}.small{font-size:11px}\
    .c0{fill:var(--c0);stroke:var(--c0)}.c1{fill:var(--c1);stroke:var(--c1)}.c2{fill:var(--c2);stroke:var(--c2)}\
    .line{fill:none;stroke-width:2.5}</style>";

/// Draws the figures of a part.
pub(super) fn draw(part: &Part, figures: &[Figure]) -> String {
    match part.form {
        Form::Bars => bars(part.title, figures),
        Form::Lines => lines(&panels(figures)),
    }
}

/// Frames a drawing.
fn svg(width: f64, height: f64, title: &str, body: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         role=\"img\" aria-label=\"{title}\">{STYLE}\n<rect class=\"back\" width=\"{width}\" height=\"{height}\" rx=\"6\"/>\n\
         {body}</svg>\n",
        title = escaped(title)
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

/// Writes text; `anchor` is SVG's `text-anchor`.
fn text(x: f64, y: f64, anchor: &str, class: &str, text: &str) -> String {
    format!(
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" class=\"{class}\">{}</text>\n",
        escaped(text)
    )
}

fn stroke(class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) -> String {
    format!("<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>\n")
}

/// Bars of ferroce and of its references with their values. Figures of one unit share a scale.
fn bars(title: &str, figures: &[Figure]) -> String {
    const ROW: f64 = 42.0;
    const TOP: f64 = 44.0;
    let letters = |text: &str| text.chars().count() as f64 * LETTER;
    let names = figures.iter().map(|f| letters(&f.name)).fold(120.0, f64::max) + 24.0;
    let value = |f: &Figure| letters(&format!("{} {}", f.with_unit(1000.0), f.reference.name));
    let values = figures.iter().map(value).fold(120.0, f64::max) + 16.0;
    let room = (WIDTH - names - values).max(120.0);
    let scale = |unit: &str| {
        let of_unit = figures.iter().filter(|f| f.unit == unit);
        let ends = of_unit.flat_map(|f| [Spread::of(&f.ferroce).most, Spread::of(&f.reference.values).median]);
        room / ends.filter(|x| x.is_finite()).fold(f64::MIN_POSITIVE, f64::max)
    };
    let mut body = text(12.0, 26.0, "start", "title", title);
    for (row, f) in figures.iter().enumerate() {
        let (y, scale) = (TOP + row as f64 * ROW, scale(&f.unit));
        body += &text(names - 10.0, y + 15.0, "end", "", &f.name);
        body += &text(names - 10.0, y + 31.0, "end", "", &format!("{} is better", f.better()));
        let (ferroce, reference) = (Spread::of(&f.ferroce), Spread::of(&f.reference.values));
        for (bar, class, spread, name) in [
            (0.0, "c0", ferroce, "ferroce"),
            (1.0, "c1", reference, f.reference.name.as_str()),
        ] {
            let (width, y) = (spread.median * scale, y + 3.0 + bar * 17.0);
            if !width.is_finite() {
                continue;
            }
            let _ = writeln!(
                body,
                "<rect class=\"{class}\" x=\"{names:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"14\"/>"
            );
            let label = format!("{} {name}", f.with_unit(spread.median));
            let end = if bar == 0.0 { spread.most * scale } else { width };
            body += &text(names + end + 8.0, y + 12.0, "start", "", &label);
        }
        let middle = y + 10.0;
        body += &stroke(
            "spread",
            (names + ferroce.least * scale, middle),
            (names + ferroce.most * scale, middle),
        );
    }
    svg(WIDTH, TOP + figures.len() as f64 * ROW + 10.0, title, &body)
}

/// A diagram of lines over the same values.
pub(super) struct Panel {
    title: String,
    unit: String,
    better: &'static str,
    xs: Vec<String>,
    /// Medians of each line, in the order of `xs`.
    lines: Vec<(String, Vec<f64>)>,
}

/// Panels of figures that are called "PANEL, X".
pub(super) fn panels(figures: &[Figure]) -> Vec<Panel> {
    let mut panels: Vec<Panel> = Vec::new();
    for figure in figures {
        let (title, x) = figure.name.split_once(", ").unwrap_or(("", &figure.name));
        let at = panels.iter().position(|panel| panel.title == title).unwrap_or_else(|| {
            panels.push(Panel {
                title: title.to_owned(),
                unit: figure.unit.clone(),
                better: figure.better(),
                xs: vec![],
                lines: vec![],
            });
            panels.len() - 1
        });
        panels[at].add(x, "ferroce", &figure.ferroce);
        panels[at].add(x, &figure.reference.name, &figure.reference.values);
    }
    panels
}

impl Panel {
    fn add(&mut self, x: &str, name: &str, values: &[f64]) {
        let x = self.xs.iter().position(|known| known == x).unwrap_or_else(|| {
            self.xs.push(x.to_owned());
            self.xs.len() - 1
        });
        let line = self
            .lines
            .iter()
            .position(|(known, _)| known == name)
            .unwrap_or_else(|| {
                self.lines.push((name.to_owned(), vec![]));
                self.lines.len() - 1
            });
        let points = &mut self.lines[line].1;
        points.resize(points.len().max(x + 1), f64::NAN);
        points[x] = Spread::of(values).median;
    }

    /// Ticks of the vertical axis, from the lowest to the highest: decades over sizes of messages, else steps from zero.
    fn ticks(&self) -> (bool, Vec<f64>) {
        let values = self.lines.iter().flat_map(|(_, points)| points);
        let values = values.copied().filter(|v| v.is_finite() && *v > 0.0);
        let (least, most) = values.fold((f64::MAX, f64::MIN_POSITIVE), |(a, b), v| (a.min(v), b.max(v)));
        if self.xs.iter().all(|x| x.ends_with('B')) {
            let (from, to) = (least.log10().floor() as i32, most.log10().ceil() as i32);
            return (true, (from..=to).map(|e| 10f64.powi(e)).collect());
        }
        let decade = 10f64.powf(most.log10().floor());
        let fitting = [0.2, 0.5, 1.0, 2.0].map(|step| step * decade);
        let step = fitting
            .into_iter()
            .find(|step| most / step <= 6.0)
            .unwrap_or(2.0 * decade);
        let steps = (most / step).ceil() as i32;
        (false, (0..=steps).map(|n| f64::from(n) * step).collect())
    }

    fn draw(&self, left: f64, width: f64, height: f64) -> String {
        let (logarithmic, ticks) = self.ticks();
        let axis = |v: f64| if logarithmic { v.log10() } else { v };
        let (low, high) = (axis(ticks[0]), axis(*ticks.last().unwrap_or(&1.0)));
        let (x0, x1, top, bottom) = (
            left + 58.0,
            left + width - 16.0,
            84.0 + 18.0 * (self.lines.len() as f64 - 2.0).max(0.0),
            height - 42.0,
        );
        let y = |v: f64| bottom - (axis(v) - low) / (high - low) * (bottom - top);
        let x = |n: usize| x0 + 12.0 + n as f64 * (x1 - x0 - 24.0) / (self.xs.len().max(2) - 1) as f64;
        let mut body = text(
            left + 14.0,
            24.0,
            "start",
            "title",
            &format!("{}, {}", self.title, self.unit),
        );
        for (n, (name, _)) in self.lines.iter().enumerate() {
            let c = class(name);
            let row = 44.0 + n as f64 * 18.0;
            let _ = writeln!(
                body,
                "<rect class=\"{c}\" x=\"{:.1}\" y=\"{:.1}\" width=\"16\" height=\"4\"/>",
                left + 14.0,
                row - 6.0
            );
            body += &text(left + 36.0, row, "start", "", name);
        }
        for tick in &ticks {
            body += &stroke("grid", (x0, y(*tick)), (x1, y(*tick)));
            let label = if *tick == 0.0 { "0".to_owned() } else { plain(*tick) };
            body += &text(x0 - 6.0, y(*tick) + 4.0, "end", "", &label);
        }
        for (n, name) in self.xs.iter().enumerate() {
            body += &text(x(n), bottom + 18.0, "middle", "small", name);
        }
        body += &text(
            (x0 + x1) / 2.0,
            bottom + 35.0,
            "middle",
            "",
            &format!("{} is better", self.better),
        );
        for (name, points) in &self.lines {
            let c = class(name);
            let shown = points
                .iter()
                .enumerate()
                .filter(|(_, v)| v.is_finite() && (!logarithmic || **v > 0.0));
            let places: Vec<_> = shown.map(|(n, v)| (x(n), y(*v))).collect();
            let path: Vec<_> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let _ = writeln!(
                body,
                "<polyline class=\"{c} line\" points=\"{}\" style=\"fill:none\"/>",
                path.join(" ")
            );
            for (x, y) in places {
                let _ = writeln!(body, "<circle class=\"{c}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>");
            }
        }
        body
    }
}

/// Class of a line: each contestant has one colour in all panels.
fn class(name: &str) -> &'static str {
    match name {
        "ferroce" => "c0",
        "TCP" => "c2",
        _ => "c1",
    }
}

/// A tick's number without zeroes at its end.
fn plain(tick: f64) -> String {
    let text = rounded(tick);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// Draws panels side by side.
pub(super) fn lines(panels: &[Panel]) -> String {
    const HEIGHT: f64 = 330.0;
    let width = WIDTH / panels.len().max(2) as f64;
    let drawn = panels
        .iter()
        .enumerate()
        .map(|(n, panel)| panel.draw(n as f64 * width, width, HEIGHT));
    let titles: Vec<_> = panels.iter().map(|panel| panel.title.as_str()).collect();
    svg(
        width * panels.len() as f64,
        HEIGHT,
        &titles.join(", "),
        &drawn.collect::<String>(),
    )
}

#[cfg(test)]
mod tests {
    use super::{super::figure::Columns, *};
    use crate::bench::page::figure::Target;

    fn figures() -> Vec<Figure> {
        let mut columns = Columns::default();
        for (name, value) in [("a", 200.0), ("b", 100.0), ("c", 3.0)] {
            columns.add(name, value);
        }
        let figure = |name, reference| columns.figure(name, "MB/s", "a", reference, Target::None);
        vec![
            figure("goodput, no loss", "b"),
            figure("goodput, 1 %", "b"),
            figure("goodput, 1 %", "c"),
        ]
    }

    #[test]
    fn bars_have_the_values_and_share_a_scale() {
        let svg = bars("<Loss>", &figures()[..1]);
        assert!(
            svg.starts_with("<svg") && svg.contains("&lt;Loss>") && svg.contains("prefers-color-scheme:dark"),
            "{svg}"
        );
        assert!(
            svg.contains("200 MB/s ferroce") && svg.contains("100 MB/s b") && svg.contains("more is better"),
            "{svg}"
        );
        let widths: Vec<f64> = svg
            .split("<rect class=\"c")
            .skip(1)
            .filter_map(|rect| rect.split("width=\"").nth(1)?.split('"').next()?.parse().ok())
            .collect();
        assert!((widths[0] / widths[1] - 2.0).abs() < 0.01, "{widths:?}");
    }

    #[test]
    fn a_panel_has_a_line_for_each_contestant() {
        let panels = panels(&figures());
        let [panel] = &panels[..] else {
            panic!("{} panels", panels.len())
        };
        assert_eq!(
            (panel.title.as_str(), panel.xs.len(), panel.lines.len()),
            ("goodput", 2, 3)
        );
        assert!(panel.lines[2].1[0].is_nan() && panel.lines[2].1[1] == 3.0);
        assert_eq!(panel.ticks(), (false, vec![0.0, 50.0, 100.0, 150.0, 200.0]));
        let mut columns = Columns::default();
        columns.add("a", 0.04);
        columns.add("b", 3.0);
        let figure = |name, ferroce, other| columns.figure(name, "GB/s", ferroce, other, Target::None);
        let by_size = [
            figure("bandwidth, 64 B", "a", "b"),
            figure("bandwidth, 1 MiB", "b", "b"),
        ];
        let sizes = super::panels(&by_size).remove(0);
        assert_eq!(sizes.ticks(), (true, vec![0.01, 0.1, 1.0, 10.0]));
        assert_eq!(lines(&panels).matches("<polyline").count(), 3);
        assert_eq!(["ferroce", "ferroce, go-back-N", "TCP"].map(class), ["c0", "c1", "c2"]);
        assert_eq!([0.5, 100.0, 20.0].map(plain), ["0.5", "100", "20"].map(str::to_owned));
    }
}
