//! Figures: what ferroce reaches, compared with a reference that was measured in the same rounds.

use serde::{Deserialize, Deserializer, Serialize};

/// Values of one contestant, one per round.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Series {
    pub(crate) name: String,
    #[serde(deserialize_with = "numbers")]
    pub(crate) values: Vec<f64>,
}

/// Reads numbers. JSON has null for one that is not finite.
fn numbers<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<f64>, D::Error> {
    let numbers = Vec::<Option<f64>>::deserialize(from)?;
    Ok(numbers.into_iter().map(|number| number.unwrap_or(f64::NAN)).collect())
}

/// Target of a ratio.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Target {
    None,
    AtLeast(f64),
    AtMost(f64),
    Within(f64, f64),
}

impl Target {
    pub(crate) fn is_met(self, ratio: f64) -> bool {
        match self {
            Self::None => true,
            Self::AtLeast(least) => ratio >= least,
            Self::AtMost(most) => ratio <= most,
            Self::Within(least, most) => (least..=most).contains(&ratio),
        }
    }

    pub(crate) fn text(self) -> String {
        match self {
            Self::None => String::new(),
            Self::AtLeast(least) => format!("at least {least}"),
            Self::AtMost(most) => format!("at most {most}"),
            Self::Within(least, most) => format!("{least} to {most}"),
        }
    }
}

/// A figure of ferroce, with its reference.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) unit: String,
    #[serde(deserialize_with = "numbers")]
    pub(crate) ferroce: Vec<f64>,
    pub(crate) reference: Series,
    pub(crate) target: Target,
}

/// Median, minimum and maximum.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Spread {
    pub(crate) fn of(values: &[f64]) -> Self {
        let mut sorted: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        let at = |i: usize| sorted.get(i).copied().unwrap_or(f64::NAN);
        Self {
            median: if n % 2 == 1 {
                at(n / 2)
            } else {
                (at((n / 2).wrapping_sub(1)) + at(n / 2)) / 2.0
            },
            least: at(0),
            most: at(n.wrapping_sub(1)),
        }
    }
}

/// A number with three significant digits.
pub(crate) fn rounded(value: f64) -> String {
    match value {
        v if !v.is_finite() => "not measured".to_owned(),
        v if v >= 99.95 => format!("{v:.0}"),
        v if v >= 9.995 => format!("{v:.1}"),
        v if v >= 0.9995 => format!("{v:.2}"),
        v => format!("{v:.3}"),
    }
}

impl Figure {
    /// Ratio of each round: ferroce to the reference of the same round.
    pub(crate) fn ratio(&self) -> Spread {
        let rounds = self.ferroce.iter().zip(&self.reference.values);
        Spread::of(
            &rounds
                .map(|(ferroce, reference)| ferroce / reference)
                .collect::<Vec<_>>(),
        )
    }

    pub(crate) fn meets_target(&self) -> bool {
        self.target.is_met(self.ratio().median)
    }

    /// Which direction is better: by the target, else by the unit.
    pub(crate) fn better(&self) -> &'static str {
        match self.target {
            Target::Within(..) => "half is fair",
            _ if ["us", "KiB", "k instructions", "packets"].contains(&self.unit.as_str()) => "less",
            _ => "more",
        }
    }

    /// A value with the figure's unit.
    pub(crate) fn with_unit(&self, value: f64) -> String {
        match value.is_finite() {
            true => format!("{} {}", rounded(value), self.unit),
            false => rounded(value),
        }
    }
}

/// Form of a part's plot.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Form {
    /// Two bars for each figure.
    Bars,
    /// Lines through figures called "PANEL, X", a panel for each PANEL.
    Lines,
}

/// Circumstances of a measurement.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Environment {
    pub(crate) commit: String,
    pub(crate) date: String,
    pub(crate) kernel: String,
    pub(crate) processor: String,
    pub(crate) processors: usize,
    pub(crate) rounds: u32,
    /// Duration of each measurement.
    pub(crate) seconds: f64,
}

/// A part of the page.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) about: &'static str,
    pub(crate) form: Form,
    /// Circumstances, if they differ from those of the other parts.
    pub(crate) environment: Option<Environment>,
    /// An error is the reason why the part was not run.
    pub(crate) figures: Result<Vec<Figure>, String>,
}

/// Columns of a measurement in rounds. Each contestant adds a value per round.
#[derive(Default)]
pub(crate) struct Columns(Vec<Series>);

impl Columns {
    pub(crate) fn add(&mut self, name: &str, value: f64) {
        match self.0.iter_mut().find(|s| s.name == name) {
            Some(series) => series.values.push(value),
            None => self.0.push(Series {
                name: name.to_owned(),
                values: vec![value],
            }),
        }
    }

    fn get(&self, name: &str) -> Series {
        let found = self.0.iter().find(|s| s.name == name);
        found.cloned().unwrap_or_else(|| Series {
            name: name.to_owned(),
            values: vec![],
        })
    }

    /// One column compared with another.
    pub(crate) fn figure(&self, name: &str, unit: &str, ferroce: &str, reference: &str, target: Target) -> Figure {
        Figure {
            name: name.to_owned(),
            unit: unit.to_owned(),
            ferroce: self.get(ferroce).values,
            reference: self.get(reference),
            target,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_the_middle_and_the_ends() {
        let spread = |values: &[f64]| {
            let s = Spread::of(values);
            (s.least, s.median, s.most)
        };
        assert_eq!(spread(&[3.0, 1.0, 2.0]), (1.0, 2.0, 3.0));
        assert_eq!(spread(&[4.0, 1.0, f64::NAN, 2.0, 3.0]), (1.0, 2.5, 4.0));
        assert!(Spread::of(&[]).median.is_nan());
    }

    #[test]
    fn ratios_are_those_of_each_round() {
        let mut columns = Columns::default();
        // The machine is twice as slow in the second round.
        for (ours, other) in [(9.0, 10.0), (4.5, 5.0), (8.0, 10.0)] {
            columns.add("write", ours);
            columns.add("ceiling", other);
        }
        let figure = columns.figure("WRITE", "GB/s", "write", "ceiling", Target::AtLeast(0.85));
        assert_eq!(figure.ratio().median, 0.9);
        assert_eq!(figure.ratio().least, 0.8);
        assert!(figure.meets_target());
        assert!(!Target::AtMost(0.5).is_met(0.9) && Target::Within(0.3, 0.7).is_met(0.3));
        let missing = columns.figure("READ", "GB/s", "read", "ceiling", Target::AtLeast(0.9));
        assert!(!missing.meets_target(), "a figure without values misses its target");
    }

    #[test]
    fn figures_survive_a_file() {
        let mut columns = Columns::default();
        for (ferroce, reference) in [(9.0, 10.0), (f64::NAN, 5.0)] {
            columns.add("write", ferroce);
            columns.add("ceiling", reference);
        }
        let figure = columns.figure("WRITE", "GB/s", "write", "ceiling", Target::Within(0.85, 1.0));
        let text = serde_json::to_string(&figure).unwrap();
        let read: Figure = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (read.ratio(), read.target, read.better()),
            (figure.ratio(), figure.target, "half is fair")
        );
        assert_eq!(read.with_unit(9.876), "9.88 GB/s");
        assert_eq!(
            [0.123_45, 99.96, 123.4].map(rounded),
            ["0.123", "100", "123"].map(str::to_owned)
        );
    }
}
