//! Panels of a picture: axes, marks and legend.

use roce_pcap::judge::Event;

use super::{
    marks::{Points, Segments, Shape, Staircase},
    overview::Chosen,
    scale::Scale,
    time::TimeScale,
};

/// Width of a picture, pixels.
pub(super) const WIDTH: f64 = 1000.0;
/// Pixels between which time goes.
pub(super) const LEFT: f64 = 86.0;
pub(super) const RIGHT: f64 = WIDTH - 24.0;
/// Height of the space for marks.
pub(super) const HEIGHT: f64 = 300.0;

/// Picture that takes the packets of a conversation.
pub(super) trait Picture {
    /// Takes a packet.
    fn event(&mut self, event: &Event);
    /// Returns its panels.
    fn finish(self: Box<Self>) -> Vec<Panel>;
}

/// Marks of one class.
pub(super) enum Layer {
    Segments(Segments),
    Points(Points, Shape),
    Staircase(Staircase),
    /// A path, and how many packets it stands for.
    Path(String, u64),
}

/// Layer with its class and its line of the legend.
pub(super) struct Named {
    pub(super) class: &'static str,
    pub(super) label: &'static str,
    pub(super) layer: Layer,
}

impl Named {
    pub(super) const fn new(class: &'static str, label: &'static str, layer: Layer) -> Self {
        Self { class, label, layer }
    }

    pub(super) const fn count(&self) -> u64 {
        match &self.layer {
            Layer::Segments(marks) => marks.count,
            Layer::Points(marks, _) => marks.count,
            Layer::Staircase(line) => line.count,
            Layer::Path(_, count) => *count,
        }
    }

    pub(super) fn draw(&self, out: &mut String) {
        match &self.layer {
            Layer::Segments(marks) => marks.draw(self.class, out),
            Layer::Points(marks, shape) => marks.draw(self.class, *shape, out),
            Layer::Staircase(line) => line.draw(self.class, RIGHT, out),
            Layer::Path(path, _) => out.push_str(&format!("<path class=\"{}\" d=\"{path}\"/>\n", self.class)),
        }
    }
}

/// Panel of one direction. Its marks lie between 0 (top) and [`HEIGHT`].
pub(super) struct Panel {
    pub(super) title: String,
    pub(super) time: TimeScale,
    /// Pixels and labels of the vertical axis.
    pub(super) ticks: Vec<(f64, String)>,
    /// Layers from the lowest to the topmost.
    pub(super) layers: Vec<Named>,
}

/// Distance of marks from the sides of a panel.
pub(super) const MARGIN: f64 = 8.0;

/// Returns the horizontal scale of a conversation, without its longest pauses.
pub(super) fn time_scale(chosen: &Chosen) -> TimeScale {
    TimeScale::new(chosen.duration_ns(), &chosen.pauses, [LEFT + MARGIN, RIGHT - MARGIN])
}

/// Pixels of a vertical scale, for its least and its largest value.
pub(super) const HEIGHTS: [f64; 2] = [HEIGHT - MARGIN, MARGIN];

/// Returns the ticks of a vertical scale.
pub(super) fn ticks(scale: &Scale, label: impl Fn(f64) -> String) -> Vec<(f64, String)> {
    let ticks = scale.ticks(6.0).into_iter();
    ticks.map(|value| (scale.at(value), label(value))).collect()
}
