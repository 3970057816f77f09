//! Scales of axes: from values to pixels, and their ticks.

/// Linear or logarithmic scale.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    values: [f64; 2],
    pixels: [f64; 2],
    logarithmic: bool,
}

impl Scale {
    /// Creates a linear scale.
    pub(super) fn linear(values: [f64; 2], pixels: [f64; 2]) -> Self {
        let [from, to] = values;
        Self {
            values: [from, if to > from { to } else { from + 1.0 }],
            pixels,
            logarithmic: false,
        }
    }

    /// Creates a logarithmic scale of whole decades around positive values.
    pub(super) fn logarithmic([from, to]: [f64; 2], pixels: [f64; 2]) -> Self {
        let decade = |value: f64| value.max(1.0).log10();
        let (low, high) = (decade(from).floor(), decade(to).ceil());
        Self {
            values: [low, high.max(low + 1.0)],
            pixels,
            logarithmic: true,
        }
    }

    /// Returns the pixel of a value, within the scale's.
    pub(super) fn at(&self, value: f64) -> f64 {
        let value = if self.logarithmic {
            value.max(1.0).log10()
        } else {
            value
        };
        let [from, to] = self.values;
        let part = ((value - from) / (to - from)).clamp(0.0, 1.0);
        self.pixels[0] + part * (self.pixels[1] - self.pixels[0])
    }

    /// Returns at most about `count` round values.
    pub(super) fn ticks(&self, count: f64) -> Vec<f64> {
        let [from, to] = self.values;
        if self.logarithmic {
            return ((from as i32)..=(to as i32)).map(|power| 10f64.powi(power)).collect();
        }
        self.step(count).map(|step| self.multiples(step)).unwrap_or_default()
    }

    /// Returns the round number that fits a linear scale about `count` times.
    pub(super) fn step(&self, count: f64) -> Option<f64> {
        let rough = (self.values[1] - self.values[0]) / count;
        let decade = 10f64.powf(rough.log10().floor());
        let fits = |step: &f64| *step >= rough;
        let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * decade).into_iter().find(fits)?;
        (step.is_finite() && step > 0.0).then_some(step)
    }

    /// Returns the multiples of a step on a linear scale, at most a hundred.
    pub(super) fn multiples(&self, step: f64) -> Vec<f64> {
        let [from, to] = self.values;
        let (first, last) = ((from / step).ceil() as i64, (to / step + 1e-9).floor() as i64);
        (first..=last).take(100).map(|n| n as f64 * step).collect()
    }

    /// Returns the least value of a linear scale.
    pub(super) const fn least(&self) -> f64 {
        self.values[0]
    }

    /// Returns the largest value of a linear scale.
    pub(super) const fn most(&self) -> f64 {
        self.values[1]
    }
}

/// Unit of an axis: its name, and how many of the base unit it has.
pub(super) type Unit = (&'static str, f64);

const TIMES: [Unit; 4] = [("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)];
const RATES: [Unit; 4] = [("bit/s", 1.0), ("kbit/s", 1e3), ("Mbit/s", 1e6), ("Gbit/s", 1e9)];

/// Returns the unit for times up to this one.
pub(super) fn unit_of_time(ns: f64) -> Unit {
    fitting(&TIMES, ns)
}

/// Returns the unit for bit rates up to this one.
pub(super) fn unit_of_rate(bits: f64) -> Unit {
    fitting(&RATES, bits)
}

fn fitting(units: &[Unit; 4], most: f64) -> Unit {
    units
        .iter()
        .rfind(|(_, size)| most >= *size)
        .copied()
        .unwrap_or(units[0])
}

/// Writes a tick's value without zeroes at its end.
pub(super) fn label(value: f64) -> String {
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

/// Writes a round time: `100 us`.
pub(super) fn decade(ns: f64) -> String {
    let (name, size) = unit_of_time(ns);
    format!("{} {name}", label(ns / size))
}

/// Writes a time with one digit behind the point: `2.3 s`.
pub(super) fn short_time(ns: f64) -> String {
    let (name, size) = unit_of_time(ns);
    format!("{:.1} {name}", ns / size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within_the_scale() {
        let scale = Scale::linear([0.0, 637.0], [0.0, 100.0]);
        assert_eq!(scale.ticks(6.0), [0.0, 200.0, 400.0, 600.0]);
        assert_eq!((scale.at(0.0), scale.at(637.0), scale.at(1e9)), (0.0, 100.0, 100.0));
        let scale = Scale::linear([5.0, 5.0], [0.0, 10.0]);
        assert!(scale.at(5.0).is_finite() && scale.ticks(5.0).len() > 1);
        let scale = Scale::logarithmic([3_000.0, 2e6], [100.0, 0.0]);
        assert_eq!(scale.ticks(5.0), [1e3, 1e4, 1e5, 1e6, 1e7]);
        assert_eq!((scale.at(1e3), scale.at(1e7), scale.at(0.0)), (100.0, 0.0, 100.0));
    }

    #[test]
    fn labels_are_short() {
        assert_eq!([label(0.0), label(0.25), label(200.0)], ["0", "0.25", "200"]);
        assert_eq!([decade(1e5), decade(1e9), decade(1.0)], ["100 us", "1 s", "1 ns"]);
    }
}
