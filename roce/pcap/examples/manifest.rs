//! Measures the captures that `pcap-fixtures/manifest.toml` lists and prints the manifest again: counts, addresses and
//! flows are measured, all else is kept as it is.
//!
//! `cargo run -p roce-pcap --example manifest > /tmp/m && mv /tmp/m pcap-fixtures/manifest.toml`

use std::{collections::BTreeMap, error::Error, fs, path::Path};

use roce_pcap::check_file_with;
use toml::{Table, Value};

const HEAD: &str = "\
# What each capture shows and what `ferroce pcap check` must say of it. README.md says where they come from.
# frames to flows are measured (cargo run -p roce-pcap --example manifest) and compared by roce/pcap's tests;
# check.py computes the same counts with zlib's crc32 and nothing of ours.
";

struct Flow {
    /// PSN of the first request: those of responses are the other side's.
    start_psn: Option<i64>,
    opcode: &'static str,
    frames: i64,
}

fn measure(path: &Path, entry: &mut Table) -> Result<(), Box<dyn Error>> {
    let mut flows = BTreeMap::<(String, String, i64), Flow>::new();
    let report = check_file_with(path, |frame| {
        if let (Some(qp), Some(psn), Some(opcode)) = (frame.dest_qp, frame.psn, frame.opcode) {
            let (src, dst) = (frame.src.ip().to_string(), frame.dst.ip().to_string());
            let flow = flows.entry((src, dst, qp.into())).or_insert(Flow {
                start_psn: None,
                opcode,
                frames: 0,
            });
            if !opcode.contains("Acknowledge") && !opcode.contains("Response") {
                flow.start_psn.get_or_insert(psn.into());
            }
            flow.frames += 1;
        }
    })?;
    let mut addresses: Vec<&String> = flows.keys().flat_map(|(src, dst, _)| [src, dst]).collect();
    addresses.sort();
    addresses.dedup();
    let addresses = addresses.into_iter().map(|a| Value::from(a.as_str())).collect();
    entry.insert("addresses".into(), Value::Array(addresses));
    for (key, count) in [
        ("frames", report.frames),
        ("roce_frames", report.roce_frames),
        ("icrc_ok", report.icrc_ok),
        ("icrc_bad", report.icrc_bad),
    ] {
        entry.insert(key.into(), Value::Integer(count.try_into()?));
    }
    let flows = flows.into_iter().map(|((src, dst, qp), flow)| {
        let mut row = Table::new();
        row.insert("src".into(), src.into());
        row.insert("dst".into(), dst.into());
        row.insert("dest_qp".into(), qp.into());
        if let Some(psn) = flow.start_psn {
            row.insert("start_psn".into(), psn.into());
        }
        row.insert("first_opcode".into(), flow.opcode.into());
        row.insert("frames".into(), flow.frames.into());
        Value::Table(row)
    });
    entry.insert("flows".into(), Value::Array(flows.collect()));
    Ok(())
}

/// Prints how tests/replay uses the capture: written by hand, so it is kept.
fn print_replay(replay: &Table) {
    println!("\n[capture.replay]");
    for key in ["sides", "note", "settings", "ends"] {
        if let Some(value) = replay.get(key) {
            println!("{key} = {value}");
        }
    }
    if let Some(differences) = replay.get("differences").and_then(Value::as_array) {
        println!("differences = [");
        for difference in differences {
            println!("    {difference},");
        }
        println!("]");
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../pcap-fixtures");
    let manifest: Table = fs::read_to_string(dir.join("manifest.toml"))?.parse()?;
    let captures = manifest["capture"].as_array().ok_or("no [[capture]]")?;
    print!("{HEAD}");
    for common in manifest
        .get("everywhere")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        println!(
            "\n[[everywhere]]\nkind = {}\nreason = {}",
            common["kind"], common["reason"]
        );
    }
    for capture in captures {
        let mut entry = capture.as_table().ok_or("not a table")?.clone();
        measure(&dir.join(entry["file"].as_str().ok_or("no file")?), &mut entry)?;
        println!("\n[[capture]]");
        // Described first, measured after.
        for key in [
            "file",
            "source",
            "program",
            "kernel",
            "shows",
            "path_mtu",
            "addresses",
            "frames",
            "roce_frames",
            "icrc_ok",
            "icrc_bad",
        ] {
            if let Some(value) = entry.get(key) {
                println!("{key} = {value}");
            }
        }
        println!("flows = [");
        for flow in entry["flows"].as_array().into_iter().flatten() {
            println!("    {flow},");
        }
        println!("]");
        if let Some(replay) = entry.get("replay").and_then(Value::as_table) {
            print_replay(replay);
        }
    }
    Ok(())
}
