//! What is measured: figures of ours, each beside something that was measured in the same rounds.

use serde_json::{Value, json};

/// Values of one contestant, one of each round.
#[derive(Clone, Debug, Default)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) values: Vec<f64>,
}

/// What the ratio is meant to be.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Aim {
    None,
    AtLeast(f64),
    AtMost(f64),
    Within(f64, f64),
}

impl Aim {
    pub(crate) fn is_reached(self, ratio: f64) -> bool {
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

    /// Where the plot has its marks.
    pub(crate) fn marks(self) -> Vec<f64> {
        match self {
            Self::None => vec![],
            Self::AtLeast(x) | Self::AtMost(x) => vec![x],
            Self::Within(a, b) => vec![a, b],
        }
    }
}

/// Ours beside another.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) unit: &'static str,
    pub(crate) ours: Vec<f64>,
    pub(crate) beside: Series,
    pub(crate) aim: Aim,
}

/// A median with the least and the most.
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

impl Figure {
    /// The ratios of the rounds: in each, ours to the other's of the same round.
    pub(crate) fn ratio(&self) -> Spread {
        let rounds = self.ours.iter().zip(&self.beside.values);
        Spread::of(&rounds.map(|(ours, other)| ours / other).collect::<Vec<_>>())
    }

    pub(crate) fn is_reached(&self) -> bool {
        self.aim.is_reached(self.ratio().median)
    }

    pub(crate) fn to_json(&self) -> Value {
        let ratio = self.ratio();
        json!({
            "name": self.name,
            "unit": self.unit,
            "ours": self.ours,
            "beside": { "name": self.beside.name, "values": self.beside.values },
            "ratio": { "median": ratio.median, "least": ratio.least, "most": ratio.most },
            "aim": self.aim.text(),
            "reached": self.is_reached(),
        })
    }
}

/// A part of the page.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) about: &'static str,
    /// Or why there are none.
    pub(crate) figures: Result<Vec<Figure>, String>,
}

/// Columns of a measurement in rounds: each contestant adds its value when its turn comes.
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

    /// One column beside another.
    pub(crate) fn figure(&self, name: &str, unit: &'static str, ours: &str, beside: &str, aim: Aim) -> Figure {
        Figure {
            name: name.to_owned(),
            unit,
            ours: self.get(ours).values,
            beside: self.get(beside),
            aim,
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
        let figure = columns.figure("WRITE", "GB/s", "write", "ceiling", Aim::AtLeast(0.85));
        assert_eq!(figure.ratio().median, 0.9);
        assert_eq!(figure.ratio().least, 0.8);
        assert!(figure.is_reached());
        assert!(!Aim::AtMost(0.5).is_reached(0.9) && Aim::Within(0.3, 0.7).is_reached(0.3));
        let missing = columns.figure("READ", "GB/s", "read", "ceiling", Aim::AtLeast(0.9));
        assert!(!missing.is_reached(), "what was not measured is not reached");
    }
}
