//! Every line of `specs/kernel.md` names something that shows it, and that exists. `cargo xtask specs` checks the other files there.

use std::{collections::BTreeSet, fs, path::Path};

use crate::scenarios::{self, scripts::Known};

fn read(root: &Path, path: &str) -> String {
    fs::read_to_string(root.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// What a last column says: kinds, each with names. A kind's names stand in backticks behind it.
fn references(cell: &str) -> Vec<(&str, &str)> {
    let mut kind = "";
    let mut found = Vec::new();
    for (n, piece) in cell.split('`').enumerate() {
        if n % 2 == 1 {
            found.push((kind, piece));
        } else if let Some(word) = piece.split_whitespace().find(|w| KINDS.contains(w)) {
            kind = word;
        }
    }
    found
}

const KINDS: [&str; 6] = ["scenario", "case", "replay", "capture", "test", "script"];

/// Files of captures in which our engine takes a side.
fn replayed(manifest: &str) -> BTreeSet<String> {
    let entries = manifest.split("[[capture]]").skip(1);
    let played = entries.filter(|e| e.contains("\nsides = [\""));
    let file = |e: &str| Some(e.split_once("file = \"")?.1.split_once(".pcap")?.0.to_owned());
    played.filter_map(file).collect()
}

#[test]
fn everything_that_specs_name_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let scenarios: BTreeSet<String> = scenarios::all().into_iter().map(|s| s.name).collect();
    let cases: serde_json::Value =
        serde_json::from_str(&read(&root, "tests/interop/expect/errors.json")).expect("JSON");
    let captures = replayed(&read(&root, "pcap-fixtures/manifest.toml"));
    let exists = |kind: &str, name: &str| match kind {
        "scenario" => scenarios.contains(name),
        "case" => cases.get(name).is_some(),
        "script" => root.join(format!("specs/scripts/{name}.play")).exists(),
        "capture" => root.join(format!("pcap-fixtures/{name}.pcap")).exists(),
        "replay" => captures.iter().any(|c| c == name),
        "test" => name.split_once("::").is_some_and(|(file, function)| {
            let text = fs::read_to_string(root.join(file)).unwrap_or_default();
            let lines: Vec<&str> = text.lines().map(str::trim).collect();
            if file.ends_with(".c") {
                return lines.contains(&format!("static void {function}(void)").as_str());
            }
            let start = format!("fn {function}()");
            lines.windows(2).any(|l| l[0] == "#[test]" && l[1].starts_with(&start))
        }),
        _ => false,
    };
    let mut wrong = Vec::new();
    let mut lines = 0;
    let text = read(&root, "specs/kernel.md");
    let rows = text.lines().filter(|l| l.starts_with("| ") && !l.starts_with("| ---"));
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").collect();
        let last = cells.last().copied().unwrap_or_default().trim();
        if last == "shown by" {
            continue;
        }
        lines += 1;
        let found = references(last);
        if cells.len() != 4 || found.is_empty() {
            wrong.push(format!("nothing shows: {row}"));
        }
        let missing = found.iter().filter(|(kind, name)| !exists(kind, name));
        wrong.extend(missing.map(|(kind, name)| format!("no {kind} {name}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(lines > 20, "{lines}");
}

/// The table of known differences names scripts that exist, and rows that say more.
#[test]
fn each_difference_of_a_script_has_its_row() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = read(&root, "specs/kernel.md");
    let known = Known::read().expect("specs/scripts/kernel.toml");
    let exists = |script: &&str| root.join(format!("specs/scripts/{script}.play")).exists();
    let lost: Vec<&str> = known.scripts().filter(|script| !exists(script)).collect();
    assert!(lost.is_empty(), "no scripts {lost:?}");
    let is_row = |row: &&str| {
        text.lines()
            .any(|line| line.strip_prefix("| ").is_some_and(|line| line.starts_with(*row)))
    };
    let missing: BTreeSet<&str> = known.rows().filter(|row| !is_row(row)).collect();
    assert!(missing.is_empty(), "no rows {missing:#?}");
}
