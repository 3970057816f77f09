//! The scripts of specs/scripts, on our engine.

use std::{
    fs,
    path::{Path, PathBuf},
};

use roce_pcap::{Severity, Writer, check_reader};
use roce_script::{Direction, Outcome, Script};

fn specs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../specs")
}

/// Returns names and texts of all scripts.
fn scripts() -> Vec<(String, String)> {
    let folder = specs().join("scripts");
    let entries = fs::read_dir(folder).expect("specs/scripts");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut all: Vec<_> = paths
        .filter(|path| path.extension().is_some_and(|e| e == "play"))
        .map(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            (name, fs::read_to_string(&path).expect("a readable script"))
        })
        .collect();
    all.sort();
    all
}

fn describe(name: &str, outcome: &Outcome) -> String {
    let mut text = String::new();
    for record in &outcome.records {
        let sign = match record.direction {
            Direction::Sent => '>',
            Direction::Received => '<',
        };
        text += &format!("{:>12} {sign} {}\n", record.datagram.at.as_micros(), record.text);
    }
    for mismatch in &outcome.mismatches {
        text += &format!("{name}:{}: {}\n", mismatch.line, mismatch.text);
    }
    text
}

#[test]
fn each_script_gets_the_answers_that_it_expects() {
    let mut wrong = Vec::new();
    let all = scripts();
    for (name, text) in &all {
        match Script::parse(text) {
            Err(e) => wrong.push(format!("{name}:{e}")),
            Ok(script) => {
                let outcome = script.play();
                if !outcome.is_good() {
                    wrong.push(describe(name, &outcome));
                }
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        all.len(),
        wrong.join("\n")
    );
    assert!(all.len() >= 100, "{} scripts", all.len());
}

/// Returns what the hosts of a script counted, and why their queue pairs failed.
fn counts(name: &str, outcome: &Outcome) -> String {
    let counted = outcome.counters.named().filter(|(_, n)| *n > 0);
    let counted: Vec<_> = counted.map(|(counter, n)| format!("{counter} {n}")).collect();
    let mut text = format!("{name}: {}\n", counted.join(", "));
    let mut failures: Vec<String> = outcome
        .failures
        .iter()
        .map(|failure| masked(&failure.to_string()))
        .collect();
    failures.dedup();
    for failure in failures {
        text += &format!("    {failure}\n");
    }
    text
}

/// Replaces numbers of queue pairs, which differ in each run of a script, and addresses in memory.
fn masked(failure: &str) -> String {
    let mut words: Vec<&str> = failure.split(' ').collect();
    for at in 0..words.len() {
        let address = words[at].len() >= 14 && words[at].starts_with(|c: char| c.is_ascii_digit());
        if address || (at > 0 && words[at - 1] == "QP") {
            words[at] = "…";
        }
    }
    words.join(" ")
}

/// The counters and messages that `ferroce stat` and events show, as in `tests/counts.txt`. `UPDATE_GOLDEN=1` writes it; a script that is
/// not in it is not compared.
#[test]
fn scripts_count_and_explain_what_happens() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/counts.txt");
    let all: Vec<(String, String)> = scripts()
        .into_iter()
        .map(|(name, text)| {
            let counts = counts(&name, &Script::parse(&text).expect(&name).play());
            (name, counts)
        })
        .collect();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        let text: String = all.iter().map(|(_, counts)| counts.as_str()).collect();
        fs::write(&path, text).expect("tests/counts.txt");
    }
    let mut expected = fs::read_to_string(&path).expect("tests/counts.txt");
    for (name, counts) in all {
        if expected.contains(&format!("{name}:")) {
            assert!(expected.contains(&counts), "tests/counts.txt does not have:\n{counts}");
            expected = expected.replacen(&counts, "", 1);
        }
    }
    assert_eq!(expected, "", "of no script");
}

/// Each script begins with `# RULE-ID: text` of the rule that it is about, or `# SECTION: text`.
#[test]
fn each_script_names_a_rule_or_a_section() {
    let rules: toml::Table = fs::read_to_string(specs().join("rules.toml"))
        .expect("specs/rules.toml")
        .parse()
        .expect("TOML");
    let ids: Vec<&str> = rules["rule"]
        .as_array()
        .expect("rules")
        .iter()
        .filter_map(|rule| rule["id"].as_str())
        .collect();
    for (name, text) in scripts() {
        let first = text
            .lines()
            .next()
            .and_then(|line| line.strip_prefix("# "))
            .unwrap_or_default();
        let (subject, says) = first.split_once(": ").unwrap_or_default();
        let known = ids.contains(&subject) || subject.starts_with("IBA ");
        assert!(known && says.len() > 20, "{name} begins with {first:?}");
    }
}

/// `ferroce pcap check` finds no error of the host in any script.
#[test]
fn the_judge_finds_no_fault_with_the_host() {
    let (mut wrong, mut against_scripts) = (Vec::new(), 0);
    for (name, text) in scripts() {
        let outcome = Script::parse(&text).expect(&name).play();
        let mut writer = Writer::new(Vec::new()).expect("a capture");
        for record in &outcome.records {
            let d = &record.datagram;
            // A packet between addresses of two IP versions can't be written.
            let _ = writer.write(d.at.as_nanos() as u64, d.src, d.dst, &d.bytes, d.identification);
        }
        let bytes = writer.finish().expect("a capture");
        let report = check_reader(&name, &bytes[..], |_| {}).expect(&name);
        against_scripts += usize::from(report.findings.iter().any(|f| f.severity == Severity::Error));
        let host = ["192.0.2.1", "2001:db8::1"].map(|addr| addr.parse().ok());
        for finding in report.findings.iter().filter(|f| host.contains(&f.at_fault)) {
            if finding.severity == Severity::Error {
                wrong.push(format!(
                    "{name}: frame {}: {}: {}",
                    finding.frame,
                    finding.rule.id(),
                    finding.text
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // Scripts break rules: the judge sees that.
    assert!(against_scripts >= 20, "{against_scripts}");
}
