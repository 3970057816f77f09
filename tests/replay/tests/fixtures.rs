//! Every capture of `pcap-fixtures`, with our engine in the place of each side that the manifest names.

use std::{collections::BTreeMap, net::IpAddr};

use ferroce_replay::{Difference, Entry, Kind, Manifest, Outcome, connections, fixtures, load, play};

/// What is wrong with a side's replay, in words.
fn judge(entry: &Entry, side: IpAddr, outcomes: &[Outcome]) -> Vec<String> {
    let mut wrong = Vec::new();
    let differences: Vec<&Difference> = outcomes.iter().flat_map(|o| &o.differences).collect();
    let mut counts = BTreeMap::<Kind, (usize, Option<usize>)>::new();
    for difference in &differences {
        counts.entry(difference.kind).or_insert((0, Some(0))).0 += 1;
    }
    for allowed in entry.replay.differences.iter().filter(|a| a.side == side) {
        let count = counts.entry(allowed.kind).or_insert((0, Some(0)));
        let repeat = matches!(
            allowed.kind,
            Kind::OnlyTheirRepeat | Kind::OnlyOurRepeat | Kind::AckRequest
        );
        match allowed.count {
            None if !repeat => wrong.push(format!("{:?} needs a count", allowed.kind)),
            None => count.1 = None,
            Some(n) => count.1 = Some(n),
        }
        if allowed.reason.len() < 20 {
            wrong.push(format!("{:?} has no reason", allowed.kind));
        }
    }
    for (kind, (found, allowed)) in counts {
        if allowed.is_some_and(|n| n != found) {
            let list = differences.iter().filter(|d| d.kind == kind).take(12);
            let list: Vec<String> = list.map(|d| format!("\n    frame {}: {}", d.frame, d.detail)).collect();
            wrong.push(format!(
                "{found} differences of kind {kind:?}, the manifest says {allowed:?}:{}",
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

fn replay(entry: &Entry) -> Vec<String> {
    let file = &entry.file;
    let events = load(&fixtures().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
    let found = connections(&events, entry.path_mtu);
    if entry.replay.sides.is_empty() {
        let note = entry.replay.note.as_deref().unwrap_or_default();
        return if note.len() < 10 {
            vec![format!("{file}: not replayed, and no note says why")]
        } else {
            vec![]
        };
    }
    let mut wrong = Vec::new();
    if found.is_empty() {
        wrong.push(format!("{file}: no connection"));
    }
    for side in &entry.replay.sides {
        let mut outcomes = Vec::new();
        for connection in &found {
            match play(connection, *side, entry.path_mtu, &entry.replay.settings) {
                Ok(outcome) => outcomes.push(outcome),
                Err(e) => wrong.push(format!("{file}, our side {side}: {e}")),
            }
        }
        let equal: usize = outcomes.iter().map(|o| o.equal).sum();
        let theirs: usize = outcomes.iter().map(|o| o.theirs).sum();
        let mut kinds = BTreeMap::<Kind, usize>::new();
        outcomes
            .iter()
            .flat_map(|o| &o.differences)
            .for_each(|d| *kinds.entry(d.kind).or_default() += 1);
        let kinds: Vec<String> = kinds.iter().map(|(kind, n)| format!(", {n} {kind:?}")).collect();
        println!(
            "{file}: our side {side}: {equal} of {theirs} packets equal{}",
            kinds.concat()
        );
        if theirs == 0 {
            wrong.push(format!("{file}, our side {side}: it sends nothing"));
        }
        wrong.extend(
            judge(entry, *side, &outcomes)
                .into_iter()
                .map(|w| format!("{file}, our side {side}: {w}")),
        );
    }
    wrong
}

#[test]
fn our_engine_does_what_each_captured_side_did() {
    let only = std::env::var("REPLAY_ONLY").unwrap_or_default();
    let manifest = Manifest::read().unwrap();
    let chosen = manifest.capture.iter().filter(|e| e.file.contains(&only));
    let wrong: Vec<String> = chosen.flat_map(replay).collect();
    assert!(wrong.is_empty(), "{} findings\n{}", wrong.len(), wrong.join("\n"));
}
