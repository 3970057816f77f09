//! Counters and refusals of the engine, by which `specs/rules.toml` names what it refuses.

use std::{collections::BTreeSet, path::Path};

use super::rules::Rules;
use crate::{Result, files};

/// A list of names in a source file.
struct List {
    file: &'static str,
    /// Line before the names, which end with a line `}`.
    begin: &'static str,
    /// Text before each name in `specs/rules.toml`.
    prefix: &'static str,
    /// Beginnings of the names that stand for something refused, for which a rule or a reason must be there.
    refused: &'static [&'static str],
}

/// All lists.
const LISTS: [List; 4] = [
    List {
        file: "roce/port/src/counters.rs",
        begin: "port_counters! {",
        prefix: "",
        refused: &["drop_", "icrc_", "rp_cnp_ignored"],
    },
    List {
        file: "roce/qp/src/counters.rs",
        begin: "counters! {",
        prefix: "",
        refused: &["dropped_", "qkey_violations"],
    },
    List {
        file: "roce/port/src/cm/drops.rs",
        begin: "drop_reasons! {",
        prefix: "cm_drop_",
        refused: &[""],
    },
    List {
        file: "roce/qp/src/refusal.rs",
        begin: "pub(crate) enum Refusal {",
        prefix: "Refusal::",
        refused: &[""],
    },
];

/// Names of the engine.
pub(super) struct Engine {
    all: BTreeSet<String>,
    refused: BTreeSet<String>,
}

impl Engine {
    pub(super) fn read() -> Result<Self> {
        let mut engine = Self {
            all: BTreeSet::new(),
            refused: BTreeSet::new(),
        };
        for list in &LISTS {
            let names = names(&files::text(Path::new(list.file))?, list.begin);
            if names.is_empty() {
                return Err(format!("{}: no names after a line {:?}", list.file, list.begin));
            }
            for name in names {
                let full = format!("{}{name}", list.prefix);
                if list.refused.iter().any(|begin| name.starts_with(begin)) {
                    engine.refused.insert(full.clone());
                }
                engine.all.insert(full);
            }
        }
        Ok(engine)
    }

    /// Finds names that the engine does not have, and refusals that have neither rule nor reason, or both.
    pub(super) fn findings(&self, rules: &Rules) -> Vec<String> {
        let mut findings = Vec::new();
        let mut judged = BTreeSet::new();
        for rule in &rules.rules {
            for name in &rule.engine {
                if !self.all.contains(name) {
                    findings.push(format!("rule {}: the engine has no {name}", rule.id));
                }
                judged.insert(name);
            }
        }
        for (name, reason) in &rules.engine_only {
            if !self.all.contains(name) {
                findings.push(format!("engine_only: the engine has no {name}"));
            }
            if judged.contains(name) {
                findings.push(format!("engine_only: {name} has a rule"));
            }
            if reason.trim().is_empty() {
                findings.push(format!("engine_only: {name} needs a reason"));
            }
        }
        let known = |name: &&String| judged.contains(name) || rules.engine_only.contains_key(*name);
        let unknown = self.refused.iter().filter(|name| !known(name));
        findings.extend(unknown.map(|name| format!("{name} of the engine has no rule, and no reason in engine_only")));
        findings
    }
}

/// Names of a list: fields, variants, or quoted names behind variants.
fn names(text: &str, begin: &str) -> Vec<String> {
    let lines = text.lines().skip_while(|line| *line != begin).skip(1);
    let inside = lines.take_while(|line| *line != "}").map(str::trim);
    let code = inside.filter(|line| line.ends_with(',') && !line.starts_with("//"));
    code.map(|line| line.split('"').nth(1).unwrap_or(line.trim_end_matches(',')))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{Engine, names};
    use crate::specs::rules::Rules;

    #[test]
    fn fields_variants_and_quoted_names_are_read() {
        let text = "list! {\n    /// One, with a comma,\n    one,\n    Two \"two\",\n}\nthree,\n";
        assert_eq!(names(text, "list! {"), ["one", "two"]);
        assert!(names(text, "other! {").is_empty());
    }

    #[test]
    fn each_refusal_has_a_rule_or_a_reason() {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let engine = Engine {
            all: set(&["rx", "drop_a", "drop_b"]),
            refused: set(&["drop_a", "drop_b"]),
        };
        let rules = |engine: &str, only: &str| -> Rules {
            let head = "id = \"a\"\nseverity = \"note\"\nfault = \"none\"\ntext = \"T.\"\nsource = \"S\"\n";
            toml::from_str(&format!("[[rule]]\n{head}engine = [{engine}]\n[engine_only]\n{only}\n")).expect("rules")
        };
        for (of_rule, only, findings) in [
            ("\"drop_a\"", "drop_b = \"why\"", 0),
            ("\"drop_a\", \"rx\"", "drop_b = \"why\"", 0),
            ("\"drop_a\"", "", 1),
            ("\"drop_a\"", "drop_b = \"\"", 1),
            ("\"drop_a\", \"drop_b\"", "drop_b = \"why\"", 1),
            ("\"drop_a\", \"drop_c\"", "drop_b = \"why\"", 1),
            ("\"drop_a\"", "drop_b = \"why\"\ndrop_c = \"why\"", 1),
        ] {
            let found = engine.findings(&rules(of_rule, only));
            assert_eq!(found.len(), findings, "{of_rule}; {only}: {found:?}");
        }
    }
}
