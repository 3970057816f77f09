//! The SVG document: style, axes, legend.

use std::fmt::Write as _;

use super::{
    marks::{Shape, escaped},
    panel::{HEIGHT, LEFT, Layer, Named, Panel, RIGHT, WIDTH},
    scale::{label, short_time},
};

/// Heights above and below the marks of a panel.
const ABOVE: f64 = 62.0;
const BELOW: f64 = 44.0;
/// Height of the title.
const TITLE: f64 = 34.0;
/// Letters of 13 px are about as wide, pixels.
const LETTER: f64 = 6.9;

const LIGHT: &str = "--ink:#24292f;--back:#ffffff;--grid:#d8dee4;--data:#0b62c4;--read:#9a6ac8;--response:#12856b;--ack:#6e7781;\
    --gap:#b58900;--again:#d1242f;--rnr:#c4580a;--nak:#a40e26;--cnp:#8250df";
const DARK: &str = "--ink:#e6edf3;--back:#0d1117;--grid:#30363d;--data:#58a6ff;--read:#b392f0;--response:#3fb68b;--ack:#9198a1;\
    --gap:#e3b341;--again:#ff6b60;--rnr:#f0883e;--nak:#ffa198;--cnp:#d2a8ff";
const RULES: &str = "svg{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif}text{fill:var(--ink)}.back{fill:var(--back)}\
    .title{font-weight:600;font-size:16px}.small{font-size:12px}.grid{stroke:var(--grid)}.pause{fill:var(--grid);opacity:.6}path{fill:none;stroke-width:2}\
    .data{stroke:var(--data)}.read{stroke:var(--read)}.response{stroke:var(--response)}\
    .ack{stroke:var(--ack);stroke-width:1.5}.gap{stroke:var(--gap);stroke-width:4;stroke-dasharray:3 2}.again{stroke:var(--again);stroke-width:3}\
    .rnr{stroke:var(--rnr)}.tail{stroke-width:1.5}.nak{stroke:var(--nak);stroke-width:2.5}\
    .fatal{stroke:var(--nak);fill:var(--nak)}.cnp{stroke:var(--cnp);fill:var(--cnp)}\
    .goodput{stroke:var(--data);fill:var(--data);fill-opacity:.25;stroke-width:1.5}.wasted{stroke:var(--again);stroke-width:1.5}";

/// Writes text; `anchor` is SVG's `text-anchor`.
fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, class: &str, text: &str) {
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" class=\"{class}\">{}</text>",
        escaped(text)
    );
}

/// Returns the document.
pub(super) fn document(title: &str, panels: &[Panel], dark: bool) -> String {
    let height = TITLE + panels.len() as f64 * (ABOVE + HEIGHT + BELOW);
    let style = match dark {
        true => format!("svg{{{DARK}}}{RULES}"),
        false => format!("svg{{{LIGHT}}}@media(prefers-color-scheme:dark){{svg{{{DARK}}}}}{RULES}"),
    };
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         role=\"img\" aria-label=\"{label}\"><style>{style}</style>\n<rect class=\"back\" width=\"{WIDTH}\" height=\"{height}\" rx=\"6\"/>\n",
        label = escaped(title)
    );
    text(&mut out, (14.0, 25.0), "start", "title", title);
    for (n, panel) in panels.iter().enumerate() {
        let top = TITLE + n as f64 * (ABOVE + HEIGHT + BELOW) + ABOVE;
        let _ = writeln!(out, "<g transform=\"translate(0 {top})\">");
        draw(&mut out, panel);
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

fn draw(out: &mut String, panel: &Panel) {
    text(out, (14.0, -38.0), "start", "", &panel.title);
    legend(out, &panel.layers);
    for (y, label) in &panel.ticks {
        let _ = writeln!(
            out,
            "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{RIGHT}\" y2=\"{y:.1}\"/>"
        );
        text(out, (LEFT - 8.0, y + 4.0), "end", "small", label);
    }
    let (unit, size) = panel.time.unit;
    for (x, value) in panel.time.ticks() {
        let _ = writeln!(
            out,
            "<line class=\"grid\" x1=\"{x:.1}\" y1=\"0\" x2=\"{x:.1}\" y2=\"{HEIGHT}\"/>"
        );
        text(out, (x, HEIGHT + 18.0), "middle", "small", &label(value / size));
    }
    for ([from, to], ns) in panel.time.pauses() {
        let (width, x) = (to - from - 8.0, f64::midpoint(from, to) + 4.0);
        let _ = writeln!(
            out,
            "<rect class=\"pause\" x=\"{:.1}\" y=\"0\" width=\"{width:.1}\" height=\"{HEIGHT}\"/>\n\
             <text class=\"small\" text-anchor=\"middle\" transform=\"translate({x:.1} {}) rotate(-90)\">no packets for {}</text>",
            from + 4.0,
            HEIGHT / 2.0,
            short_time(ns)
        );
    }
    let axis = format!("{unit} since the first packet");
    text(
        out,
        (f64::midpoint(LEFT, RIGHT), HEIGHT + 36.0),
        "middle",
        "small",
        &axis,
    );
    for layer in panel.layers.iter().filter(|layer| layer.count() > 0) {
        layer.draw(out);
    }
}

/// Writes the legend: sample, name and number of each class that has marks.
fn legend(out: &mut String, layers: &[Named]) {
    let mut x = 14.0;
    for named in layers.iter().filter(|named| named.count() > 0) {
        let y = -18.0;
        let sample = match &named.layer {
            Layer::Segments(_) => format!("M{:.1} {:.1}v14", x + 6.0, y - 7.0),
            Layer::Points(_, Shape::Dot) => Shape::Dot.path(x + 6.0, y),
            Layer::Points(_, shape) => shape.path(x + 6.0, y),
            Layer::Staircase(_) | Layer::Path(..) => format!("M{x:.1} {:.1}h6v-6h6", y + 3.0),
        };
        let _ = writeln!(out, "<path class=\"{} sample\" d=\"{sample}\"/>", named.class);
        let label = format!("{} ({})", named.label, named.count());
        text(out, (x + 18.0, y + 4.0), "start", "small", &label);
        x += 18.0 + label.chars().count() as f64 * LETTER * 0.93 + 16.0;
    }
}
