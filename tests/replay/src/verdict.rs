//! Comparison of replays with the manifest.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use roce_replay::{Connection, Difference, Kind, Outcome, play};

use crate::{
    error::Error,
    fixture::connections,
    manifest::{Entry, Manifest},
};

/// Returns what is wrong with a side's replay, in words.
fn judge(entry: &Entry, side: IpAddr, outcomes: &[Outcome], everywhere: &BTreeSet<Kind>) -> Vec<String> {
    let mut wrong = Vec::new();
    let differences: Vec<&Difference> = outcomes.iter().flat_map(|o| &o.differences).collect();
    let mut counts = BTreeMap::<Kind, (usize, usize)>::new();
    for difference in &differences {
        counts.entry(difference.kind).or_default().0 += 1;
    }
    for allowed in entry.replay.differences.iter().filter(|a| a.side == side) {
        counts.entry(allowed.kind).or_default().1 = allowed.count;
        if allowed.reason.len() < 20 {
            wrong.push(format!("{:?} has no reason", allowed.kind));
        }
    }
    for (kind, (found, allowed)) in counts {
        if found != allowed && !everywhere.contains(&kind) {
            let list = differences.iter().filter(|d| d.kind == kind).take(12);
            let list: Vec<String> = list.map(|d| format!("\n    {d}")).collect();
            wrong.push(format!(
                "{found} differences of kind {kind:?}, the manifest says {allowed}:{}",
                list.concat()
            ));
        }
    }
    for outcome in outcomes {
        wrong.extend(outcome.wrong_memory.iter().cloned());
        let failed = outcome.failed.map(|s| format!("{s:?}"));
        let expected = entry.replay.ends.get(&side);
        if failed.as_ref() != expected && (failed.is_some() || outcomes.len() == 1) {
            wrong.push(format!("work requests end with {failed:?}, not {expected:?}"));
        }
        if failed.is_none() && outcome.succeeded < outcome.posted && !entry.replay.settings.ends_early {
            wrong.push(format!(
                "{} of {} work requests completed",
                outcome.succeeded, outcome.posted
            ));
        }
    }
    wrong
}

/// Result of all replays.
#[derive(Debug, Default)]
pub struct Verdict {
    /// A line for each side of each capture: how much was equal, and what was not.
    pub seen: Vec<String>,
    /// Findings: what the manifest does not allow.
    pub wrong: Vec<String>,
}

impl Verdict {
    pub(crate) fn extend(&mut self, other: Self) {
        self.seen.extend(other.seen);
        self.wrong.extend(other.wrong);
    }

    pub(crate) fn wrong(finding: String) -> Self {
        Self {
            seen: Vec::new(),
            wrong: vec![finding],
        }
    }
}

/// Replays a capture as its entry says.
fn replay(entry: &Entry, path: &Path, everywhere: &BTreeSet<Kind>) -> Verdict {
    let (file, how) = (&entry.file, &entry.replay);
    if how.sides.is_empty() {
        return match how.note.as_deref().unwrap_or_default().len() {
            0..10 => Verdict::wrong(format!("{file}: not replayed, and no note says why")),
            _ => Verdict::default(),
        };
    }
    let found = match connections(path) {
        Ok(found) => found,
        Err(e) => return Verdict::wrong(format!("{file}: {e}")),
    };
    if found.is_empty() {
        return Verdict::wrong(format!("{file}: no connection"));
    }
    let mut verdict = Verdict::default();
    for side in &how.sides {
        verdict.extend(replay_side(entry, *side, &found, everywhere));
    }
    verdict
}

fn replay_side(entry: &Entry, side: IpAddr, connections: &[Connection], everywhere: &BTreeSet<Kind>) -> Verdict {
    let name = format!("{}, our side {side}", entry.file);
    let mut verdict = Verdict::default();
    let mut outcomes = Vec::new();
    for connection in connections {
        let Some(side) = connection.side(side) else {
            verdict.wrong.push(format!("{name}: it has no such end"));
            continue;
        };
        match play(connection, side, entry.path_mtu, &entry.replay.settings) {
            Ok(outcome) => outcomes.push(outcome),
            Err(e) => verdict.wrong.push(format!("{name}: {e}")),
        }
    }
    let equal: usize = outcomes.iter().map(|o| o.equal).sum();
    let theirs: usize = outcomes.iter().map(|o| o.theirs).sum();
    let mut kinds = BTreeMap::<Kind, usize>::new();
    for difference in outcomes.iter().flat_map(|o| &o.differences) {
        *kinds.entry(difference.kind).or_default() += 1;
    }
    let kinds: String = kinds.iter().map(|(kind, n)| format!(", {n} {kind:?}")).collect();
    verdict
        .seen
        .push(format!("{name}: {equal} of {theirs} packets equal{kinds}"));
    if theirs == 0 {
        verdict.wrong.push(format!("{name}: it sends nothing"));
    }
    let wrong = judge(entry, side, &outcomes, everywhere);
    verdict.wrong.extend(wrong.into_iter().map(|w| format!("{name}: {w}")));
    verdict
}

/// Replays all captures of the manifest whose name contains `only`, each from where `locate` says; where it says nothing,
/// the capture is left out.
///
/// # Errors
/// When there is no manifest.
pub fn replay_all(only: &str, locate: impl Fn(&str) -> Option<PathBuf>) -> Result<Verdict, Error> {
    let manifest = Manifest::read()?;
    let mut verdict = Verdict::default();
    for common in &manifest.everywhere {
        if !common.kind.proves_itself() || common.reason.len() < 20 {
            verdict.wrong.push(format!(
                "{:?} can't be allowed everywhere, or has no reason",
                common.kind
            ));
        }
    }
    let everywhere = manifest.everywhere.iter().map(|c| c.kind).collect();
    for entry in &manifest.capture {
        if let Some(path) = locate(&entry.file).filter(|_| entry.file.contains(only)) {
            verdict.extend(replay(entry, &path, &everywhere));
        }
    }
    Ok(verdict)
}

/// Replays a folder of new captures, as the manifest says of those with the same names.
///
/// # Errors
/// When the folder or the manifest can't be read.
pub fn replay_folder(dir: &Path) -> Result<Verdict, Error> {
    let known: BTreeSet<String> = Manifest::read()?.capture.into_iter().map(|e| e.file).collect();
    let failed = |e: std::io::Error| Error::Unsuitable(format!("{}: {e}", dir.display()));
    let mut there = BTreeSet::new();
    for file in fs::read_dir(dir).map_err(failed)? {
        let name = file.map_err(failed)?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".pcap") {
            there.insert(name);
        }
    }
    let mut verdict = replay_all("", |file| there.contains(file).then(|| dir.join(file)))?;
    let unknown = there.difference(&known);
    verdict
        .wrong
        .extend(unknown.map(|f| format!("{f}: the manifest does not say how it is replayed")));
    Ok(verdict)
}
