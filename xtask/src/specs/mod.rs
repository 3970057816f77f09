//! Rules and specification points as data: what is generated from `specs/`, and checks that its names exist.

mod engine;
mod faults;
mod generate;
mod points;
mod rules;
mod test_functions;

use std::{fs, path::Path};

use crate::{
    Result, files,
    specs::{engine::Engine, points::Points, rules::Rules, test_functions::Tests},
};

/// Rules of the judge.
const RULES: &str = "specs/rules.toml";
/// Points of the specification.
const POINTS: &str = "specs/points.toml";
/// Faults of the kernel that were fixed.
const FAULTS: &str = "specs/rxe-faults.md";
/// Generated file.
const GENERATED: &str = "roce/pcap/src/rule.rs";

/// `cargo xtask specs`: checks everything, and prints what is covered. `write` writes the generated file first.
pub(crate) fn run(write: bool) -> Result<()> {
    let rules = Rules::read(RULES)?;
    if write {
        let text = generate::text(&rules.rules);
        fs::write(GENERATED, text).map_err(files::failed(Path::new(GENERATED)))?;
    }
    let points = Points::read(POINTS)?;
    verify(&rules, &points)?;
    println!("{}", points.coverage());
    Ok(())
}

/// Checks that the generated file is current and that names exist, as a lint.
pub(crate) fn check() -> Result<()> {
    verify(&Rules::read(RULES)?, &Points::read(POINTS)?)
}

fn verify(rules: &Rules, points: &Points) -> Result<()> {
    let mut tests = Tests::default();
    let mut findings = rules.contradictions();
    findings.extend(stale(rules)?);
    findings.extend(rules.untested(&mut tests)?);
    findings.extend(Engine::read()?.findings(rules));
    findings.extend(points.findings(rules, &mut tests));
    findings.extend(faults::findings(FAULTS, &files::text(Path::new(FAULTS))?, &mut tests));
    match findings.is_empty() {
        true => Ok(()),
        false => Err(findings.join("\n")),
    }
}

/// Returns whether the generated file is another one.
fn stale(rules: &Rules) -> Result<Option<String>> {
    let current = files::text(Path::new(GENERATED))? == generate::text(&rules.rules);
    Ok((!current).then(|| format!("{GENERATED} does not fit {RULES}: run `cargo xtask specs --write`")))
}
