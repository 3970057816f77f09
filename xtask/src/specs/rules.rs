//! `specs/rules.toml`: the rules that captures are judged by.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use serde::Deserialize;

use super::test_functions::Tests;
use crate::{Result, files};

/// Rules, and the refusals of the engine that no rule is about.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Rules {
    #[serde(rename = "rule")]
    pub(super) rules: Vec<Rule>,
    /// Reasons, by the engine's name.
    #[serde(default)]
    pub(super) engine_only: BTreeMap<String, String>,
}

/// Rule.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Rule {
    pub(super) id: String,
    pub(super) severity: Severity,
    pub(super) fault: Fault,
    pub(super) text: String,
    pub(super) source: String,
    /// Counters and refusals of the engine for what breaks the rule.
    #[serde(default)]
    pub(super) engine: Vec<String>,
    /// Tests that show it and don't name its variant.
    #[serde(default)]
    pub(super) tests: Vec<String>,
}

/// Severity, by its name in `roce_pcap::Severity`.
#[derive(Deserialize, Clone, Copy, Debug)]
#[serde(rename_all = "lowercase")]
pub(super) enum Severity {
    Error,
    Warning,
    Note,
}

/// Side at fault, by its name in `roce_pcap::Fault`.
#[derive(Deserialize, Clone, Copy, Debug)]
#[serde(rename_all = "lowercase")]
pub(super) enum Fault {
    Sender,
    Receiver,
    Network,
    Capture,
    None,
}

impl Rule {
    /// Returns the name of its variant: `psn-start` is `PsnStart`.
    pub(super) fn variant(&self) -> String {
        let capitalized = |part: &str| {
            let mut letters = part.chars();
            letters
                .next()
                .map(|first| first.to_ascii_uppercase().to_string() + letters.as_str())
        };
        self.id.split('-').filter_map(capitalized).collect()
    }
}

impl Rules {
    pub(super) fn read(path: &str) -> Result<Self> {
        files::toml(Path::new(path))
    }

    /// Returns whether a rule has this ID.
    pub(super) fn has(&self, id: &str) -> bool {
        self.rules.iter().any(|rule| rule.id == id)
    }

    /// Finds IDs that are malformed or there twice, and empty texts.
    pub(super) fn contradictions(&self) -> Vec<String> {
        let mut findings = Vec::new();
        let mut ids = BTreeSet::new();
        for rule in &self.rules {
            let part = |part: &str| {
                part.starts_with(|c: char| c.is_ascii_lowercase())
                    && part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
            };
            if !rule.id.split('-').all(part) {
                findings.push(format!(
                    "rule {}: an ID is lower-case words with hyphens between",
                    rule.id
                ));
            }
            if !ids.insert(&rule.id) {
                findings.push(format!("rule {} is there twice", rule.id));
            }
            if rule.text.trim().is_empty() || rule.source.trim().is_empty() {
                findings.push(format!("rule {} needs text and source", rule.id));
            }
        }
        findings
    }

    /// Finds rules without a test, and tests that do not exist.
    pub(super) fn untested(&self, tests: &mut Tests) -> Result<Vec<String>> {
        let mut named = Tests::rules_named_in("roce/pcap/tests")?;
        named.extend(Tests::rules_named_in("dissect/tests")?);
        let mut findings = Vec::new();
        for rule in &self.rules {
            let missing = rule.tests.iter().filter(|test| !tests.exists(test));
            findings.extend(missing.map(|test| format!("rule {}: no test {test}", rule.id)));
            if rule.tests.is_empty() && !named.contains(&rule.variant()) {
                findings.push(format!(
                    "rule {}: no test in roce/pcap/tests or dissect/tests names Rule::{}",
                    rule.id,
                    rule.variant()
                ));
            }
        }
        Ok(findings)
    }
}

#[cfg(test)]
mod tests {
    use super::Rules;

    const RULE: &str = "severity = \"note\"\nfault = \"none\"\ntext = \"T.\"\nsource = \"S\"\n";

    fn rules(ids: &[&str]) -> Rules {
        let text: String = ids
            .iter()
            .map(|id| format!("[[rule]]\nid = \"{id}\"\n{RULE}"))
            .collect();
        toml::from_str(&text).expect("rules")
    }

    #[test]
    fn variants_are_ids_in_camel_case() {
        assert_eq!(rules(&["frame-roce-v1"]).rules[0].variant(), "FrameRoceV1");
    }

    #[test]
    fn malformed_and_repeated_ids_are_found() {
        assert!(rules(&["a-b", "a-c"]).contradictions().is_empty());
        for ids in [["a", "a"], ["a", "B"], ["a", "a--b"], ["a", "a-1"], ["a", ""]] {
            assert_eq!(rules(&ids).contradictions().len(), 1, "{ids:?}");
        }
    }

    #[test]
    fn unknown_fields_are_errors() {
        let text = format!("[[rule]]\nid = \"a\"\n{RULE}sauce = \"\"\n");
        assert!(toml::from_str::<Rules>(&text).is_err());
    }
}
