//! `specs/points.toml`: compliance points of the specification, and what covers each.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use serde::Deserialize;

use super::{rules::Rules, test_functions::Tests};
use crate::{Result, files};

/// Points whose text is known.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Points {
    /// Series that are known as a whole, with their last numbers.
    complete: BTreeMap<String, u32>,
    #[serde(rename = "point")]
    points: Vec<Point>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Point {
    /// Number of the specification, such as `CA17-20`.
    id: String,
    /// Contents, in our words.
    text: String,
    /// Public source of the number and the contents.
    known: String,
    /// IDs of rules of the judge.
    #[serde(default)]
    rules: Vec<String>,
    /// Tests of the engine.
    #[serde(default)]
    tests: Vec<String>,
    /// Reason why nothing covers it.
    except: Option<String>,
}

impl Points {
    pub(super) fn read(path: &str) -> Result<Self> {
        files::toml(Path::new(path))
    }

    /// Returns how many are covered, in one line.
    pub(super) fn coverage(&self) -> String {
        let count = |is: fn(&Point) -> bool| self.points.iter().filter(|point| is(point)).count();
        format!(
            "{} points known, {} covered by rules, {} by engine tests ({} by both), {} excepted",
            self.points.len(),
            count(|point| !point.rules.is_empty()),
            count(|point| !point.tests.is_empty()),
            count(|point| !point.rules.is_empty() && !point.tests.is_empty()),
            count(|point| point.except.is_some()),
        )
    }

    /// Finds malformed, repeated and missing points, those that nothing covers, and names that do not exist.
    pub(super) fn findings(&self, rules: &Rules, tests: &mut Tests) -> Vec<String> {
        let mut findings = self.missing();
        let mut ids = BTreeSet::new();
        for point in &self.points {
            let mut find = |text: &str| findings.push(format!("point {}: {text}", point.id));
            if !is_id(&point.id) {
                find("expected a number such as C9-88, o9-20, C12-7.1.1 or CA17-20");
            }
            if !ids.insert(&point.id) {
                find("is there twice");
            }
            if point.text.trim().is_empty() || point.known.trim().is_empty() {
                find("needs a text, and the source of it");
            }
            let covered = !point.rules.is_empty() || !point.tests.is_empty();
            match &point.except {
                None if !covered => find("has neither rule nor test, and is not excepted"),
                Some(_) if covered => find("is covered and excepted"),
                Some(reason) if reason.trim().is_empty() => find("is excepted without a reason"),
                _ => {}
            }
            for rule in point.rules.iter().filter(|rule| !rules.has(rule)) {
                find(&format!("no rule {rule}"));
            }
            for test in point.tests.iter().filter(|test| !tests.exists(test)) {
                find(&format!("no test {test}"));
            }
        }
        findings
    }

    /// Finds points that a complete series lacks.
    fn missing(&self) -> Vec<String> {
        let series = self.complete.iter();
        let ids = series.flat_map(|(series, last)| (1..=*last).map(move |n| format!("{series}-{n}")));
        ids.filter(|id| self.points.iter().all(|point| point.id != *id))
            .map(|id| format!("point {id} is missing"))
            .collect()
    }
}

/// Returns whether an ID is one of chapter 9, chapter 12 or Annex A17.
fn is_id(id: &str) -> bool {
    let Some((series, number)) = id.split_once('-') else {
        return false;
    };
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let series = series.strip_prefix(['C', 'o']);
    matches!(series, Some("9" | "12" | "A17")) && number.split('.').all(digits)
}

#[cfg(test)]
mod tests {
    use super::{Points, is_id};
    use crate::specs::{rules::Rules, test_functions::Tests};

    #[test]
    fn ids_are_those_of_the_chapters() {
        for id in ["C9-88", "o9-20", "C9-43.1.1", "C12-1", "CA17-46", "oA17-1"] {
            assert!(is_id(id), "{id}");
        }
        for id in ["C9", "C9-", "C9-x", "C10-1", "C9-1.", "9-1", "A17-1"] {
            assert!(!is_id(id), "{id}");
        }
    }

    fn points(points: &str) -> Points {
        toml::from_str(&format!("[complete]\nCA17 = 1\n{points}")).expect("points")
    }

    fn point(id: &str, rest: &str) -> String {
        format!("[[point]]\nid = \"{id}\"\ntext = \"T.\"\nknown = \"K\"\n{rest}\n")
    }

    #[test]
    fn each_point_is_covered_or_excepted_by_names_that_exist() {
        let rules: Rules = toml::from_str(
            "[[rule]]\nid = \"a\"\nseverity = \"note\"\nfault = \"none\"\ntext = \"T.\"\nsource = \"S\"\n",
        )
        .expect("rules");
        // Tests run in the crate's folder.
        let test = "tests = [\"src/specs/points.rs::ids_are_those_of_the_chapters\"]";
        for (rest, findings) in [
            ("rules = [\"a\"]", 0),
            (test, 0),
            ("except = \"why\"", 0),
            ("", 1),
            ("except = \"\"", 1),
            ("rules = [\"a\"]\nexcept = \"why\"", 1),
            ("rules = [\"b\"]", 1),
            ("tests = [\"src/specs/points.rs::none\"]", 1),
        ] {
            let found = points(&point("CA17-1", rest)).findings(&rules, &mut Tests::default());
            assert_eq!(found.len(), findings, "{rest}: {found:?}");
        }
        let other = points(&point("C9-1", "rules = [\"a\"]"));
        assert_eq!(
            other.findings(&rules, &mut Tests::default()),
            ["point CA17-1 is missing"]
        );
        let twice = points(&point("CA17-1", "rules = [\"a\"]").repeat(2));
        assert_eq!(
            twice.findings(&rules, &mut Tests::default()),
            ["point CA17-1: is there twice"]
        );
    }

    #[test]
    fn coverage_counts_points() {
        let text = point("CA17-1", "rules = [\"a\"]\ntests = [\"b\"]") + &point("C9-1", "except = \"why\"");
        let expected = "2 points known, 1 covered by rules, 1 by engine tests (1 by both), 1 excepted";
        assert_eq!(points(&text).coverage(), expected);
    }
}
