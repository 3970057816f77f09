//! A node of `rds` in the place of either kernel in captures of RDS.
//!
//! The node gets what its captured peer has sent, when the captured side had it, and its programs send what those of the captured side
//! sent. Each SEND of the node, and its private data, has to be what the kernel's was, byte for byte; the manifest says where it is not, and
//! why. Attempts to connect that came to nothing are left out: when to try again is a matter of chance on either side.

mod compare;
mod kind;
mod manifest;
mod player;
#[path = "../../../../rtrs/tests/support/provider.rs"]
mod provider;
mod record;

use std::{collections::BTreeMap, net::IpAddr};

use crate::{error::Error, fixture::fixtures, verdict::Verdict};

use compare::compare;
use kind::Kind;
use manifest::{Entry, Manifest};
use player::Player;

fn side(entry: &Entry, record: &record::Record, side: IpAddr) -> Verdict {
    let name = format!("rds/{}, our side {side}", entry.file);
    let mut verdict = Verdict::default();
    let played = match Player::play(record, side, &entry.replay.settings) {
        Ok(played) => played,
        Err(e) => return Verdict::wrong(format!("{name}: {e}")),
    };
    let found = compare(record, &played, side);
    let mut counts = BTreeMap::<Kind, (usize, usize)>::new();
    for difference in &found.differences {
        counts.entry(difference.kind).or_default().0 += 1;
    }
    let kinds: String = counts.iter().map(|(kind, (n, _))| format!(", {n} {kind:?}")).collect();
    verdict.seen.push(format!(
        "{name}: {} of {} SENDs and {} private data equal{kinds}",
        found.equal, found.theirs, found.private
    ));
    for allowed in entry.replay.differences.iter().filter(|allowed| allowed.side == side) {
        counts.entry(allowed.kind).or_default().1 = allowed.count;
        if allowed.reason.len() < 20 || allowed.kind == Kind::Other {
            verdict.wrong.push(format!("{name}: {:?} has no reason", allowed.kind));
        }
    }
    for (kind, (n, allowed)) in counts {
        if n != allowed {
            let list = found.differences.iter().filter(|difference| difference.kind == kind);
            let list: String = list.take(12).map(|difference| format!("\n    {difference}")).collect();
            let wrong = format!("{name}: {n} differences of kind {kind:?}, the manifest says {allowed}:{list}");
            verdict.wrong.push(wrong);
        }
    }
    if found.equal == 0 && found.theirs > 0 && found.differences.iter().any(|d| d.kind == Kind::Other) {
        verdict.wrong.push(format!("{name}: nothing is equal"));
    }
    verdict
        .wrong
        .extend(played.wrong.into_iter().map(|wrong| format!("{name}: {wrong}")));
    verdict
}

/// Replays the captures of RDS whose name contains `only`.
///
/// # Errors
/// When there is no manifest.
pub fn replay_rds(only: &str) -> Result<Verdict, Error> {
    let mut verdict = Verdict::default();
    for entry in Manifest::read()?
        .capture
        .iter()
        .filter(|entry| entry.file.contains(only))
    {
        let Entry { file, replay } = entry;
        if replay.sides.len() < 2 && replay.note.as_deref().unwrap_or_default().len() < 10 {
            verdict
                .wrong
                .push(format!("rds/{file}: a side is not replayed, and no note says why"));
        }
        let record = match record::read(&fixtures().join("rds").join(file)) {
            Ok(record) => record,
            Err(e) => {
                verdict.wrong.push(format!("rds/{file}: {e}"));
                continue;
            }
        };
        for addr in &replay.sides {
            verdict.extend(side(entry, &record, *addr));
        }
    }
    Ok(verdict)
}
