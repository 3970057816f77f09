//! The plots of the page: the ratio of each figure with its spread, and where it is meant to be.

use std::path::Path;

use plotters::{
    coord::Shift,
    prelude::{
        ChartBuilder, Circle, Color, DrawingArea, IntoDrawingArea, IntoFont, PathElement, RGBColor, Rectangle,
        SVGBackend, Text, WHITE,
    },
    style::text_anchor::{HPos, Pos, VPos},
};

use super::figure::{Figure, Part};
use crate::Result;

const WIDTH: u32 = 900;
const ROW: u32 = 30;
/// Above and below the rows.
const EDGE: u32 = 84;
/// For the names, at least and at most, and what a letter takes.
const NAMES: (u32, u32) = (330, 560);
const LETTER: f64 = 6.6;

const REACHED: RGBColor = RGBColor(0x2a, 0x7f, 0x62);
const MISSED: RGBColor = RGBColor(0xc2, 0x5b, 0x2a);
const INK: RGBColor = RGBColor(0x33, 0x33, 0x33);
const FAINT: RGBColor = RGBColor(0xd8, 0xd8, 0xd8);

/// Draws a part's figures into a file.
pub(crate) fn draw(part: &Part, file: &Path) -> Result<()> {
    let figures = part.figures.as_deref().map_err(Clone::clone)?;
    let height = ROW * figures.len() as u32 + EDGE;
    let area = SVGBackend::new(file, (WIDTH, height)).into_drawing_area();
    rows(&area, part.title, figures)
        .and_then(|()| area.present().map_err(|e| e.to_string()))
        .map_err(|e| format!("{}: {e}", file.display()))
}

fn label(figure: &Figure) -> String {
    format!("{} / {}", figure.name, figure.beside.name)
}

/// The width of the column of names.
fn names(figures: &[Figure]) -> u32 {
    let letters = figures.iter().map(|f| label(f).chars().count()).max().unwrap_or(0);
    ((letters as f64 * LETTER) as u32 + 16).clamp(NAMES.0, NAMES.1)
}

fn rows(area: &DrawingArea<SVGBackend<'_>, Shift>, title: &str, figures: &[Figure]) -> Result<()> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    area.fill(&WHITE).map_err(|e| text(&e))?;
    let most = figures
        .iter()
        .flat_map(|f| f.aim.marks().into_iter().chain([f.ratio().most]))
        .filter(|x| x.is_finite())
        .fold(1.0, f64::max);
    let n = figures.len() as f64;
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 18))
        .margin(10)
        .x_label_area_size(40)
        .y_label_area_size(names(figures))
        .build_cartesian_2d(0.0..most * 1.08, n..0.0)
        .map_err(|e| text(&e))?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .light_line_style(WHITE)
        .bold_line_style(FAINT)
        .x_labels(9)
        .x_desc("ratio to what is beside it; bar: median, line: spread, mark: aim")
        .label_style(("sans-serif", 12, &INK))
        .draw()
        .map_err(|e| text(&e))?;
    let name_style = ("sans-serif", 13)
        .into_font()
        .color(&INK)
        .pos(Pos::new(HPos::Right, VPos::Center));
    for (row, figure) in figures.iter().enumerate() {
        let (top, middle, bottom) = (row as f64 + 0.2, row as f64 + 0.5, row as f64 + 0.8);
        let ratio = figure.ratio();
        let color = if figure.is_reached() { REACHED } else { MISSED };
        let bar = Rectangle::new([(0.0, top), (ratio.median, bottom)], color.mix(0.75).filled());
        chart.draw_series([bar]).map_err(|e| text(&e))?;
        let line = PathElement::new([(ratio.least, middle), (ratio.most, middle)], INK.stroke_width(1));
        chart.draw_series([line]).map_err(|e| text(&e))?;
        let ends = [ratio.least, ratio.most].map(|x| Circle::new((x, middle), 2, INK.filled()));
        chart.draw_series(ends).map_err(|e| text(&e))?;
        let marks = figure.aim.marks().into_iter();
        let marks =
            marks.map(|x| PathElement::new([(x, row as f64 + 0.08), (x, row as f64 + 0.92)], INK.stroke_width(2)));
        chart.draw_series(marks).map_err(|e| text(&e))?;
        let (x, y) = chart.backend_coord(&(0.0, middle));
        let name = Text::new(label(figure), (x - 8, y), name_style.clone());
        area.draw(&name).map_err(|e| text(&e))?;
    }
    Ok(())
}
