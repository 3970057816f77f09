//! Prometheus's text format.

use std::fmt::{Display, Write};

/// Name, help and value of a metric of a `T`.
pub(super) type Metric<T> = (&'static str, &'static str, fn(&T) -> u64);
/// Labels of a value.
pub(super) type Labels = Vec<(&'static str, String)>;

/// Text so far, and the name of the metric begun last.
#[derive(Default)]
pub(super) struct Metrics(String, String);

impl Metrics {
    /// Begins a metric.
    pub(super) fn begin(&mut self, name: &str, help: &str, kind: &str) {
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
        name.clone_into(&mut self.1);
    }

    pub(super) fn into_text(self) -> String {
        self.0
    }

    /// Writes a value of the metric begun last.
    pub(super) fn value(&mut self, labels: &[(&str, String)], value: impl Display) {
        let labels: Vec<_> = labels
            .iter()
            .map(|(name, value)| format!("{name}=\"{}\"", escaped(value)))
            .collect();
        let _ = match labels.is_empty() {
            true => writeln!(self.0, "{} {value}", self.1),
            false => writeln!(self.0, "{}{{{}}} {value}", self.1, labels.join(",")),
        };
    }

    /// Writes metrics of all objects.
    pub(super) fn all<T>(&mut self, (prefix, kind): (&str, &str), metrics: &[Metric<T>], objects: &[(Labels, &T)]) {
        let suffix = if kind == "counter" { "_total" } else { "" };
        for (name, help, value) in metrics {
            self.begin(&format!("ferroce_{prefix}_{name}{suffix}"), help, kind);
            for (labels, object) in objects {
                self.value(labels, value(object));
            }
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_can_have_any_name_in_them() {
        let mut out = Metrics::default();
        out.begin("a", "B.", "gauge");
        out.value(&[("name", "x\"y\\z\n".to_owned())], 1);
        out.value(&[], 0.5);
        assert_eq!(
            out.0,
            "# HELP a B.\n# TYPE a gauge\na{name=\"x\\\"y\\\\z\\n\"} 1\na 0.5\n"
        );
    }
}
