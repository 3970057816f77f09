//! Time axis: long pauses are cut out of it.

use super::scale::{Scale, Unit, unit_of_time};

/// Pauses that are remembered; one less may be cut out.
const PAUSES: usize = 9;
/// Width of a pause that is cut out, pixels.
const CUT: f64 = 26.0;
/// Wanted distance of ticks, pixels: they are at least as far apart.
const DISTANCE: f64 = 90.0;
/// Least distance of two labels, pixels.
const APART: f64 = 52.0;

/// Longest times without packets.
#[derive(Clone, Default, Debug)]
pub(super) struct Pauses {
    last_ns: Option<u64>,
    /// Beginning and end, the longest first.
    longest: Vec<(u64, u64)>,
}

impl Pauses {
    /// Takes the time of a packet.
    pub(super) fn packet(&mut self, now_ns: u64) {
        let Some(last) = self
            .last_ns
            .replace(self.last_ns.map_or(now_ns, |last| last.max(now_ns)))
        else {
            return;
        };
        if now_ns <= last {
            return;
        }
        let length = |pause: &(u64, u64)| pause.1 - pause.0;
        let at = self.longest.partition_point(|known| length(known) >= now_ns - last);
        if at < PAUSES {
            self.longest.insert(at, (last, now_ns));
            self.longest.truncate(PAUSES);
        }
    }

    /// Returns the pauses to cut out of `duration_ns`: they are much longer than all else, and than other pauses.
    pub(super) fn to_cut(&self, duration_ns: u64) -> Vec<(u64, u64)> {
        let mut rest = duration_ns;
        let pairs = self.longest.iter().zip(self.longest.iter().skip(1));
        for (n, (pause, next)) in pairs.enumerate() {
            let (length, shorter) = (pause.1 - pause.0, next.1 - next.0);
            rest = rest.saturating_sub(length);
            if length / 2 >= rest && length / 8 >= shorter {
                let mut cut = self.longest[..=n].to_vec();
                cut.sort_unstable();
                return cut;
            }
        }
        vec![]
    }
}

/// Horizontal scale: nanoseconds since the conversation's first packet, to pixels.
#[derive(Clone, Debug)]
pub(super) struct TimeScale {
    /// Parts between pauses.
    parts: Vec<Scale>,
    pub(super) unit: Unit,
}

impl TimeScale {
    /// Creates a scale; `pauses` are cut out.
    pub(super) fn new(duration_ns: u64, pauses: &[(u64, u64)], [left, right]: [f64; 2]) -> Self {
        let cut: u64 = pauses.iter().map(|(from, to)| to - from).sum();
        let shown = duration_ns.saturating_sub(cut).max(1) as f64;
        let per_ns = (right - left - CUT * pauses.len() as f64) / shown;
        let mut parts = vec![];
        let (mut from, mut x) = (0, left);
        for (begin, end) in pauses.iter().copied().chain([(duration_ns, duration_ns)]) {
            // A part of one packet has no width.
            let width = (begin.saturating_sub(from)) as f64 * per_ns;
            parts.push(Scale::linear([from as f64, begin as f64], [x, x + width]));
            (from, x) = (end, x + width + CUT);
        }
        Self {
            parts,
            unit: unit_of_time(shown),
        }
    }

    /// Returns the pixel of a time.
    pub(super) fn at(&self, ns: u64) -> f64 {
        let ns = ns as f64;
        let after = self.parts.iter().position(|part| ns <= part.most());
        match after {
            None => self.parts.last().map_or(0.0, |part| part.at(ns)),
            Some(n) if n > 0 && ns < self.parts[n].least() => {
                let (before, after) = (&self.parts[n - 1], &self.parts[n]);
                let pause = [before.most(), after.least()];
                Scale::linear(pause, [before.at(pause[0]), after.at(pause[1])]).at(ns)
            }
            Some(n) => self.parts[n].at(ns),
        }
    }

    /// Returns pixels and values of ticks.
    pub(super) fn ticks(&self) -> Vec<(f64, f64)> {
        let width = |part: &Scale| part.at(part.most()) - part.at(part.least());
        let widest = self.parts.iter().max_by(|a, b| width(a).total_cmp(&width(b)));
        let Some(step) = widest.and_then(|part| part.step((width(part) / DISTANCE).max(1.0))) else {
            return vec![];
        };
        let mut ticks: Vec<(f64, f64)> = vec![];
        for part in &self.parts {
            let mut values = part.multiples(step);
            if values.is_empty() {
                values.push(part.least());
            }
            for value in values {
                let x = part.at(value);
                if ticks.last().is_none_or(|(last, _)| x - last >= APART) {
                    ticks.push((x, value));
                }
            }
        }
        ticks
    }

    /// Returns pixels and length of the pauses that are cut out.
    pub(super) fn pauses(&self) -> impl Iterator<Item = ([f64; 2], f64)> {
        self.parts.windows(2).map(|pair| {
            let (from, to) = (pair[0].most(), pair[1].least());
            ([pair[0].at(from), pair[1].at(to)], to - from)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pauses(times: &[u64]) -> Vec<(u64, u64)> {
        let mut pauses = Pauses::default();
        times.iter().for_each(|time| pauses.packet(*time));
        pauses.to_cut(times.iter().max().unwrap() - times.iter().min().unwrap())
    }

    #[test]
    fn only_pauses_much_longer_than_all_else_are_cut_out() {
        assert_eq!(pauses(&[0, 10, 20, 30, 40]), []);
        assert_eq!(pauses(&[0, 10, 20, 1000, 1010, 1020]), [(20, 1000)]);
        assert_eq!(pauses(&[0, 10, 1000, 1010, 2100, 2110]), [(10, 1000), (1010, 2100)]);
        // A pause of the order of the others stays.
        assert_eq!(pauses(&[0, 100, 200, 300, 600]), []);
        // Times that go back.
        assert_eq!(pauses(&[0, 10, 5, 20, 15, 1000, 990, 1010]), [(20, 1000)]);
    }

    #[test]
    fn times_have_pixels_in_order_and_ticks_lie_apart() {
        let scale = TimeScale::new(1020, &[(20, 1000)], [0.0, 426.0]);
        assert_eq!(
            [0, 20, 1000, 1020, 5000].map(|ns| scale.at(ns)),
            [0.0, 200.0, 226.0, 426.0, 426.0]
        );
        assert_eq!(scale.at(510), 213.0);
        let ticks = scale.ticks();
        assert!(
            ticks.len() >= 4 && ticks.windows(2).all(|pair| pair[1].0 - pair[0].0 >= APART),
            "{ticks:?}"
        );
        assert!(ticks.iter().any(|(_, value)| *value == 1010.0), "{ticks:?}");
        assert_eq!(scale.pauses().collect::<Vec<_>>(), [([200.0, 226.0], 980.0)]);
        let moment = TimeScale::new(0, &[], [0.0, 100.0]);
        assert!(moment.at(0).is_finite() && moment.ticks().len() < 100);
    }
}
