//! 7: the scripts of specs/scripts, played on the kernel; `specs/scripts/kernel.toml` says what it does otherwise than they expect.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Deserialize;

use super::{Ctx, Direction, JUMBO, Scenario};
use crate::{Error, far::Ip};

/// Time that a kernel on an emulated processor may be late, seconds.
const LATE: &str = "2";
/// Time for all scripts.
const TIME: Duration = Duration::from_secs(1800);
/// Scripts of the short set: a responder's acknowledgement, gap, duplicate and refusal, and a requester's retry.
const SHORT: [&str; 6] = ["send", "write", "gap", "duplicate-send", "no-right", "read-refused"];

pub(super) fn list() -> Vec<Scenario> {
    let scenario = |name, run: fn(&mut Ctx<'_>) -> Result<String, Error>| {
        // They break rules, and have wrong ICRCs: the capture is the player's own.
        Scenario::new(7, name, Direction::Both, run).shape(JUMBO).nets(0)
    };
    vec![
        scenario("scripts", |c| play(c, Ip::V4, &[])).waits(),
        scenario("scripts-v6", |c| play(c, Ip::V6, &[])),
        scenario("scripts-short", |c| play(c, Ip::V4, &SHORT)).ci(),
    ]
}

/// Differences that are known.
#[derive(Deserialize)]
pub(crate) struct Known {
    #[serde(default)]
    difference: Vec<Difference>,
    #[serde(default)]
    not_run: Vec<NotRun>,
}

/// Step at which a kernel does something else.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Difference {
    script: String,
    /// Line of the script.
    line: u32,
    kernel: Vec<String>,
    /// A part of what the player prints.
    found: String,
    /// Beginning of a row of specs/kernel.md. A test reads it.
    #[cfg_attr(not(test), expect(dead_code))]
    row: String,
}

/// Script that can't be played on a kernel.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NotRun {
    script: String,
    kernel: Vec<String>,
    /// A part of what the player prints.
    why: String,
}

fn specs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../specs")
}

#[cfg(test)]
impl Known {
    /// Returns the scripts that are named.
    pub(crate) fn scripts(&self) -> impl Iterator<Item = &str> {
        let differences = self.difference.iter().map(|d| d.script.as_str());
        differences.chain(self.not_run.iter().map(|n| n.script.as_str()))
    }

    /// Returns the beginnings of rows of specs/kernel.md.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &str> {
        self.difference.iter().map(|d| d.row.as_str())
    }
}

impl Known {
    pub(crate) fn read() -> Result<Self, Error> {
        Self::parse(&fs::read_to_string(specs().join("scripts/kernel.toml"))?)
    }

    fn parse(text: &str) -> Result<Self, Error> {
        Ok(toml::from_str(text)?)
    }

    /// Returns the lines of the player's output that are not as known, and what is known and did not come. `played`: names of scripts.
    fn compare(&self, kernel: &str, played: &BTreeSet<String>, text: &str) -> Vec<String> {
        let of = |kernels: &[String], script: &str| kernels.iter().any(|k| k == kernel) && played.contains(script);
        let differences = self.difference.iter().filter(|d| of(&d.kernel, &d.script));
        let not_run = self.not_run.iter().filter(|n| of(&n.kernel, &n.script));
        let mut expected: Vec<(String, &str)> = differences
            .map(|d| (format!("{}.play:{}: ", d.script, d.line), d.found.as_str()))
            .chain(not_run.map(|n| (format!("{}.play: not run: ", n.script), n.why.as_str())))
            .collect();
        let mut wrong = Vec::new();
        for line in text.lines().filter(|line| !line.contains(".play: good (")) {
            let line = line.rsplit_once("specs/scripts/").map_or(line, |(_, line)| line);
            match expected
                .iter()
                .position(|(start, part)| line.starts_with(start.as_str()) && line.contains(part))
            {
                Some(at) => drop(expected.swap_remove(at)),
                None => wrong.push(line.to_owned()),
            }
        }
        wrong.extend(
            expected
                .iter()
                .map(|(start, part)| format!("known, and not found: {start}{part}")),
        );
        let missing = played.iter().filter(|name| !text.contains(&format!("/{name}.play:")));
        wrong.extend(missing.map(|name| format!("{name} was not played")));
        wrong
    }
}

/// Returns the names of the scripts to play: those in `names`, else all over IPv4, or all that are over IPv6 alone.
fn chosen(ip: Ip, names: &[&str]) -> Result<BTreeSet<String>, Error> {
    let mut chosen = BTreeSet::new();
    for entry in fs::read_dir(specs().join("scripts"))? {
        let path = entry?.path();
        if path.extension().is_none_or(|e| e != "play") {
            continue;
        }
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let only_v6 = fs::read_to_string(&path)?.contains(" ip=6");
        let wanted = match names {
            [] => only_v6 == (ip == Ip::V6),
            _ => names.contains(&name.as_str()),
        };
        if wanted {
            chosen.insert(name);
        }
    }
    Ok(chosen)
}

/// Plays scripts on the guest's kernel.
fn play(c: &mut Ctx<'_>, ip: Ip, names: &[&str]) -> Result<String, Error> {
    let scripts = chosen(ip, names)?;
    let kernel = c.kernel()?.series();
    let (mut agent, at) = c.far.agent("verbs-agent", ip, &c.dir)?;
    let (to, from, at) = (c.far.addr(ip)?.to_string(), c.host(ip)?.to_string(), at.to_string());
    let pcap = c.path("played.pcap");
    let mut args = vec![
        "pcap", "play", "--to", &to, "--from", &from, "--agent", &at, "--late", LATE, "--pcap", &pcap,
    ];
    let paths: Vec<String> = scripts
        .iter()
        .map(|name| specs().join(format!("scripts/{name}.play")).display().to_string())
        .collect();
    args.extend(paths.iter().map(String::as_str));
    let mut player = c.ferroce("play", &args)?;
    // Its exit status says that there are differences, as there are.
    player.wait_gone(TIME)?;
    let text = player.text();
    drop(player);
    agent.kill();
    let wrong = Known::read()?.compare(kernel, &scripts, &text);
    if !wrong.is_empty() {
        return Err(format!(
            "{} of {} lines are not as known:\n{}",
            wrong.len(),
            text.lines().count(),
            wrong.join("\n")
        )
        .into());
    }
    let good = text.matches(".play: good (").count();
    Ok(format!(
        "{good} of {} scripts as specified, the others as known",
        scripts.len()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &str = r#"
[[difference]]
script = "gap"
line = 5
kernel = ["6.1"]
found = "the host sent ack"
row = "a row"

[[not_run]]
script = "flush"
kernel = ["6.1", "6.12"]
why = "no FLUSH"
"#;

    #[test]
    fn what_is_not_known_and_what_is_gone_are_told() {
        let known = Known::parse(KNOWN).expect("TOML");
        let played: BTreeSet<String> = ["gap", "flush", "send"].map(str::to_owned).into();
        let compare = |kernel: &str, text: &str| known.compare(kernel, &played, text);
        let none: [&str; 0] = [];
        let flush = "/x/specs/scripts/flush.play: not run: the host has no FLUSH\n";
        let gap = "specs/scripts/gap.play:5: < nak psn=1: the host sent ack psn=0: it is an acknowledgement\n";
        let good = "specs/scripts/send.play: good (3 steps, 2 packets)\n";
        assert_eq!(compare("6.1", &format!("{flush}{gap}{good}")), none);
        assert_eq!(compare("6.12", &format!("{flush}{gap}{good}")).len(), 1);
        let fixed = "specs/scripts/gap.play: good (9 steps, 7 packets)\n";
        assert_eq!(compare("6.12", &format!("{flush}{fixed}{good}")), none);
        let gone = compare("6.1", &format!("{flush}{fixed}{good}"));
        assert_eq!(gone, ["known, and not found: gap.play:5: the host sent ack"]);
        assert_eq!(
            compare("6.1", &format!("{flush}{gap}{good}error: no agent"))[0],
            "error: no agent"
        );
        // The player ended before it came to a script.
        assert_eq!(compare("6.12", flush), ["gap was not played", "send was not played"]);
    }
}
