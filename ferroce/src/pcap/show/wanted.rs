//! Frames that are wanted.

use clap::ValueEnum;
use roce_pcap::{Finding, Selection, Severity};

use super::reading::Packets;

/// Layers by the names that users give them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum LayerName {
    Rtrs,
    Rnbd,
    Rds,
    Lnet,
    Cm,
}

impl LayerName {
    const fn layers(self) -> &'static [&'static str] {
        match self {
            Self::Rtrs => &["RTRS"],
            Self::Rnbd => &["RNBD"],
            Self::Rds => &["RDS"],
            Self::Lnet => &["LNet"],
            Self::Cm => &["CM", "MAD", "RDMA_CM"],
        }
    }
}

/// Conditions on frames.
pub(super) struct Wanted {
    pub(super) selection: Selection,
    /// Layers, of which a frame has one.
    pub(super) layers: Vec<LayerName>,
}

impl Wanted {
    /// Returns whether a frame matches.
    pub(super) fn matches(&self, packets: &Packets) -> bool {
        let has = |name: &LayerName| {
            let dissections = packets.parts.iter().filter_map(|part| part.dissection.as_ref());
            let mut layers = dissections.flat_map(|dissection| &dissection.layers);
            layers.any(|layer| name.layers().contains(&layer.name))
        };
        self.selection.matches(&packets.reviewed) && (self.layers.is_empty() || self.layers.iter().any(has))
    }

    /// Returns whether a finding that no frame brings is wanted.
    pub(super) fn has_finding(&self, finding: &Finding) -> bool {
        let wanted = &self.selection;
        let of_rule = wanted.rules.is_empty() || wanted.rules.contains(&finding.rule);
        let of_one = finding
            .conversation
            .is_some_and(|index| wanted.conversations.contains(&index));
        of_rule
            && (wanted.conversations.is_empty() || of_one)
            && wanted.frames.contains(&finding.frame)
            && (!wanted.bad || finding.severity >= Severity::Warning)
    }
}
