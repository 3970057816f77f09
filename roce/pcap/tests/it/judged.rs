//! Findings and conversations of all fixtures and damaged captures. `UPDATE_GOLDEN=1` writes them to `tests/judged.txt`.

use std::{fmt::Write, fs, path::Path};

use roce_pcap::{Report, judge::Summary};

use crate::{
    common::{fixture, report_of},
    damage::damaged_captures,
};

fn conversation(c: &Summary) -> String {
    let [a, b] = c.ends.map(|end| match end.qpn {
        Some(qpn) => format!("{} QP {qpn:#x}", end.addr),
        None => end.addr.to_string(),
    });
    let mut text = format!("{} {} {a}, {b}, {:?}", c.index, c.service, c.origin);
    for (name, value) in [("name", &c.name), ("MTU", &c.mtu.map(|mtu| mtu.to_string()))] {
        if let Some(value) = value {
            write!(text, ", {name} {value}").unwrap();
        }
    }
    write!(text, ", packets {:?}, again {:?}", c.packets, c.repeated).unwrap();
    let us = (c.time_ns[1] - c.time_ns[0]) / 1000;
    write!(
        text,
        ", {us} us, {} errors, {} warnings, {}",
        c.errors,
        c.warnings,
        c.verdict.words()
    )
    .unwrap();
    for why in &c.not_checked {
        write!(text, "; not checked: {why}").unwrap();
    }
    text
}

fn describe(name: &str, report: &Report) -> String {
    let mut text = format!("{name}\n");
    for f in &report.findings {
        let at = f.conversation.map_or("-".to_owned(), |index| index.to_string());
        write!(text, "  [{at}] frame {}", f.frame).unwrap();
        if f.count > 1 {
            write!(text, " and {} more until {}", f.count - 1, f.last_frame).unwrap();
        }
        writeln!(text, ": {f}").unwrap();
    }
    for c in &report.conversations {
        writeln!(text, "  {}", conversation(c)).unwrap();
    }
    text
}

#[test]
fn all_captures_are_judged_as_written_down() {
    let mut names: Vec<String> = fs::read_dir(fixture(""))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".pcap"))
        .collect();
    names.sort();
    let fixtures = names.into_iter().map(|name| {
        let file = fs::read(fixture(&name)).unwrap();
        (name, file)
    });
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/judged.txt");
    let update = std::env::var_os("UPDATE_GOLDEN").is_some();
    let written = fs::read_to_string(&path).unwrap_or_default();
    let (mut expected, mut all) = (written.as_str(), String::new());
    for (name, file) in fixtures.chain(damaged_captures()) {
        let found = describe(&name, &report_of(&file));
        match expected.strip_prefix(&found) {
            Some(rest) => expected = rest,
            None => assert!(
                update,
                "found:\n{found}written down:\n{}",
                expected.get(..found.len()).unwrap_or(expected)
            ),
        }
        all += &found;
    }
    assert!(update || expected.is_empty(), "{expected}");
    if update {
        fs::write(&path, &all).unwrap();
    }
}
