//! The report of a run with `--peer`: Markdown and JSON in a folder with captures and logs, which is packed to be sent.

use std::{
    fmt::Write as _,
    fs,
    io::{Read as _, Write as _},
    net::IpAddr,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::json;

use crate::{
    Error,
    facts::Facts,
    lab::Places,
    peer_mode::Peer,
    report::{Outcome, Verdict},
};

/// Bytes of a capture that a report keeps of its start, and of its end.
const KEPT: usize = 2 << 20;
/// Version of the JSON's format.
const FORMAT: u32 = 1;

/// A new folder for a report, named by the peer and the time.
pub(crate) fn folder(peer: IpAddr) -> Result<PathBuf, Error> {
    let peer = peer.to_string().replace(':', "-");
    let path = PathBuf::from(format!("ferroce-report-{peer}-{}", date("%Y%m%d-%H%M%S")?));
    fs::create_dir(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(path)
}

/// Now, in UTC.
fn date(format: &str) -> Result<String, Error> {
    let out = Command::new("date").args(["-u", &format!("+{format}")]).output()?;
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

/// What program this is: a kit says it, a source tree's git.
fn version() -> String {
    let beside = std::env::current_exe().ok().map(|exe| exe.with_file_name("VERSION"));
    let said = beside.and_then(|file| fs::read_to_string(file).ok());
    let git = || {
        let out = Command::new("git")
            .args(["describe", "--always", "--dirty"])
            .output()
            .ok()?;
        Some(String::from_utf8_lossy(&out.stdout).into_owned())
    };
    let commit = said.or_else(git).unwrap_or_default();
    format!("{} {}", env!("CARGO_PKG_VERSION"), commit.trim())
        .trim()
        .to_owned()
}

/// Writes `report.md` and `report.json`, packs the folder, and says where they are.
pub(crate) fn write(peer: &Peer, places: &Places, outcomes: &[Outcome]) -> Result<(), Error> {
    let about = [
        ("ferroce", version()),
        ("date", date("%Y-%m-%d %H:%M:%S UTC")?),
        ("peer", peer.addr.to_string()),
        ("interface here", peer.interface.clone()),
        (
            "captures",
            peer.uncaptured.as_ref().map_or_else(
                || "in the folders of scenarios".to_owned(),
                |why| format!("none: {why}"),
            ),
        ),
    ];
    // The namespace of a run has another view of the network; these are only texts.
    fs::write(places.logs.join("report.md"), markdown(&about, peer, outcomes))?;
    let about: serde_json::Map<_, _> = about.iter().map(|(k, v)| ((*k).to_owned(), json!(v))).collect();
    let report = json!({ "format": FORMAT, "about": about, "hosts": peer.hosts, "scenarios": outcomes });
    fs::write(
        places.logs.join("report.json"),
        serde_json::to_string_pretty(&report)? + "\n",
    )?;
    match pack(&places.logs) {
        Ok(file) => println!("report: {} (report.md in it)", file.display()),
        Err(e) => println!("report: {} ({e})", places.logs.join("report.md").display()),
    }
    Ok(())
}

/// Packs the folder beside it.
fn pack(logs: &Path) -> Result<PathBuf, Error> {
    let (Some(parent), Some(name)) = (logs.parent(), logs.file_name()) else {
        return Err("nothing to pack".into());
    };
    let mut file = name.to_owned();
    file.push(".tar.gz");
    let file = parent.join(file);
    let done = Command::new("tar")
        .arg("-C")
        .arg(parent)
        .arg("-czf")
        .arg(&file)
        .arg(name)
        .output()?;
    match done.status.success() {
        true => Ok(file),
        false => Err(format!("tar: {}", String::from_utf8_lossy(&done.stderr).trim()).into()),
    }
}

fn markdown(about: &[(&str, String)], peer: &Peer, outcomes: &[Outcome]) -> String {
    let count = |verdict| outcomes.iter().filter(|o| o.result == verdict).count();
    let counts = Verdict::ALL.map(|verdict| format!("{} {}", count(verdict), verdict.text()));
    let mut text = format!("# ferroce with an RDMA device\n\n{}\n\n", counts.join(", "));
    table(&mut text, about.iter().map(|(name, value)| (*name, value.as_str())));
    let sides: [(&str, &Facts); 2] = [("The peer", &peer.hosts.there), ("This host", &peer.hosts.here)];
    for (title, facts) in sides {
        let _ = write!(text, "\n## {title}\n\n");
        table(&mut text, facts.all());
    }
    text += "\n## Scenarios\n\n| scenario | direction | result | seconds | what was seen |\n| --- | --- | --- | --- | --- |\n";
    for o in outcomes {
        let seen = cell(o.detail.lines().next().unwrap_or_default());
        let (name, direction, result) = (&o.name, &o.direction, o.result.text());
        let _ = writeln!(text, "| {name} | {direction} | {result} | {:.1} | {seen} |", o.seconds);
    }
    for o in outcomes.iter().filter(|o| o.result == Verdict::Failed) {
        let story: Vec<_> = o.detail.lines().take(60).collect();
        let _ = write!(
            text,
            "\n### {}\n\n```\n{}\n```\n",
            o.name,
            story.join("\n").replace("```", "'''")
        );
    }
    text
}

fn table<'a>(text: &mut String, rows: impl Iterator<Item = (&'a str, &'a str)>) {
    text.push_str("| | |\n| --- | --- |\n");
    for (name, value) in rows {
        let _ = writeln!(text, "| {} | {} |", cell(name), cell(value));
    }
}

/// Text of a table: the peer's words don't become something else.
fn cell(text: &str) -> String {
    let short: String = text.chars().take(300).collect();
    short
        .replace('|', "\\|")
        .replace('<', "&lt;")
        .replace(['\n', '\r'], " ")
}

/// Takes the middle out of a large capture.
pub(crate) fn shorten(pcap: &Path) -> Result<(), Error> {
    let mut data = Vec::new();
    fs::File::open(pcap)?.read_to_end(&mut data)?;
    let Some(cut) = middle(&data, KEPT) else { return Ok(()) };
    let mut file = fs::File::create(pcap)?;
    file.write_all(&data[..cut.start])?;
    file.write_all(&data[cut.end..])?;
    fs::write(
        pcap.with_extension("shortened"),
        format!("{} bytes of the middle are not there\n", cut.len()),
    )?;
    Ok(())
}

/// Bytes of whole packets between the first and the last `kept` bytes of a capture, as tcpdump writes it on this machine.
fn middle(data: &[u8], kept: usize) -> Option<std::ops::Range<usize>> {
    let (file_header, packet_header) = (24, 16);
    if data.len() <= 2 * kept + file_header {
        return None;
    }
    let (mut at, mut start) = (file_header, None);
    while let Some(len) = data.get(at + 8..at + 12) {
        if start.is_none() && at >= kept {
            start = Some(at);
        }
        if let Some(start) = start.filter(|_| at >= data.len() - kept) {
            return (at > start).then_some(start..at);
        }
        at += packet_header + u32::from_ne_bytes(len.try_into().ok()?) as usize;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Hosts;

    fn outcome(name: &str, result: Verdict, detail: &str) -> Outcome {
        Outcome {
            name: name.to_owned(),
            number: 1,
            direction: "both".to_owned(),
            guest: "peer".to_owned(),
            result,
            seconds: 1.25,
            detail: detail.to_owned(),
            optional: false,
        }
    }

    #[test]
    fn a_report_has_hosts_and_each_scenario() {
        let mut peer = Peer::for_report("192.0.2.1".parse().expect("an address"));
        peer.hosts = Hosts {
            there: Facts::parse("device=mlx5_0\ndriver=mlx5|core\n"),
            ..Hosts::default()
        };
        let outcomes = [
            outcome("ops-v4", Verdict::Passed, "80 operations: passed"),
            outcome("rping", Verdict::NotRun, "no rping there"),
            outcome("cm", Verdict::Failed, "first line\nsecond <line>"),
        ];
        let text = markdown(&[("ferroce", "1".to_owned())], &peer, &outcomes);
        for part in [
            "1 passed, 1 failed, 1 not run",
            "| device | mlx5_0 |",
            "| driver | mlx5\\|core |",
            "| ops-v4 | both | passed | 1.2 | 80 operations: passed |",
            "| rping | both | not run | 1.2 | no rping there |",
            "### cm\n\n```\nfirst line\nsecond <line>\n```",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn a_capture_loses_whole_packets_of_its_middle() {
        let packet = |n: u8, len: usize| {
            let mut bytes = vec![0; 8];
            bytes.extend((len as u32).to_ne_bytes());
            bytes.extend([0; 4]);
            bytes.extend(vec![n; len]);
            bytes
        };
        let mut data = vec![0; 24];
        (0..100).for_each(|n| data.extend(packet(n, 50 + usize::from(n))));
        let cut = middle(&data, 1000).expect("it is large");
        assert!(
            cut.start >= 1000 && data.len() - cut.end <= 1000,
            "{cut:?} of {}",
            data.len()
        );
        let rest = [&data[..cut.start], &data[cut.end..]].concat();
        // What is left is packets, the first and the last among them.
        let (mut at, mut seen) = (24, Vec::new());
        while at < rest.len() {
            let len = u32::from_ne_bytes(rest[at + 8..at + 12].try_into().expect("4 bytes")) as usize;
            assert!(rest[at + 16..at + 16 + len].iter().all(|b| *b == rest[at + 16]));
            seen.push(rest[at + 16]);
            at += 16 + len;
        }
        assert_eq!((at, seen.first(), seen.last()), (rest.len(), Some(&0), Some(&99)));
        assert!(seen.len() < 60);
        assert_eq!(middle(&data, data.len()), None);
        assert_eq!(middle(&[255; 3000], 1000), None);
    }
}
