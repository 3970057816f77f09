//! Packets as lines.

use std::fmt::Write;

use ferroce_dissect::{Base, Dissection, Field, Layer};
use roce_bth::{Bth, Opcode};
use roce_verbs::shown;

use super::reading::{Packets, Part};

/// Columns of a line.
const COLUMNS: usize = 120;
/// Columns that what a packet holds has at least, however long its addresses are.
const LEAST: usize = 40;
/// Layers of the connection manager's messages.
const MANAGEMENT: [&str; 3] = ["MAD", "CM", "RDMA_CM"];

/// Number, time, sender, receiver: the beginning of a line.
fn head(packets: &Packets, seconds: f64) -> String {
    let number = packets.reviewed.index;
    match packets.report() {
        Some(report) => format!("{number:>5} {seconds:>10.6} {} > {}", report.src.ip(), report.dst.ip()),
        None => format!("{number:>5} {seconds:>10.6}"),
    }
}

/// Line of a frame without a packet that a receiver would take.
pub(super) fn of_frame(packets: &Packets, seconds: f64) -> String {
    let text = match packets.report() {
        Some(report) => report.summary.to_string(),
        None => "not read".to_owned(),
    };
    cut(format!("{} ", head(packets, seconds)), &text)
}

/// Line of a packet.
pub(super) fn of_part(packets: &Packets, part: &Part, seconds: f64) -> String {
    let head = format!("{}:{:#x} ", head(packets, seconds), part.bth.dest_qp.value());
    let repeated = if part.is_repeated() { "repeated: " } else { "" };
    cut(head, &format!("{repeated}{}", summary(part)))
}

/// Opcode, PSN and the innermost layer.
pub(super) fn summary(part: &Part) -> String {
    let packet = format!("{} {}", short(part.bth.opcode), part.bth.psn);
    let Some(dissection) = &part.dissection else {
        return format!("{packet} | cut by the capture");
    };
    if let Some(text) = management(dissection) {
        return shown(&text).to_string();
    }
    let inner = dissection
        .layers
        .iter()
        .skip(1)
        .rfind(|layer| !layer.summary.is_empty());
    match inner {
        Some(layer) => format!("{packet} | {}", shown(&layer.summary)),
        None => format!("{packet}{}", shown(headers(dissection, &part.bth))),
    }
}

/// Message of the connection manager, and what its private data says.
fn management(dissection: &Dissection) -> Option<String> {
    let message = ["CM", "MAD"].iter().find_map(|name| dissection.layer(name))?;
    let inner = dissection
        .layers
        .last()
        .filter(|layer| !MANAGEMENT.contains(&layer.name));
    Some(match inner.filter(|layer| !layer.summary.is_empty()) {
        Some(layer) => {
            let words: Vec<_> = message.summary.split(' ').take(2).collect();
            format!("{} | {}", words.join(" "), layer.summary)
        }
        None => message.summary.clone(),
    })
}

/// Extended headers: what the line of the base transport header has behind opcode, queue pair and PSN.
fn headers<'a>(dissection: &'a Dissection, bth: &Bth) -> &'a str {
    let known = format!("{} qp {} psn {}", bth.opcode, bth.dest_qp, bth.psn);
    let layer = dissection.layers.first();
    layer
        .and_then(|layer| layer.summary.strip_prefix(&known))
        .unwrap_or_default()
}

/// Name of an opcode without what the most have: `Write Only+imm`.
fn short(opcode: Opcode) -> String {
    let name = opcode.info().name;
    let name = name.strip_prefix("RC ").unwrap_or(name);
    let name = name.replace("RDMA ", "").replace(" with Immediate", "+imm");
    name.replace(" with Invalidate", "+inv").replace("Acknowledge", "Ack")
}

fn cut(mut head: String, text: &str) -> String {
    let room = COLUMNS.saturating_sub(head.chars().count()).max(LEAST);
    if text.chars().count() <= room {
        head += text;
    } else {
        head.extend(text.chars().take(room - 1));
        head.push('…');
    }
    head
}

/// All fields of a packet, a line each.
pub(super) fn tree(dissection: &Dissection) -> String {
    let mut out = String::new();
    for layer in &dissection.layers {
        write_layer(&mut out, layer);
    }
    out
}

fn write_layer(out: &mut String, layer: &Layer) {
    let base = match layer.base {
        Base::Packet => "",
        Base::Message => " (offsets in the message)",
    };
    // Writing to a String cannot fail.
    let _ = writeln!(out, "      {}: {}{base}", layer.name, shown(&layer.summary));
    layer.fields.iter().for_each(|field| write_field(out, field, 8));
}

fn write_field(out: &mut String, field: &Field, indent: usize) {
    let place = match field.len {
        0 => String::new(),
        len => format!("{}+{len}", field.offset),
    };
    let _ = writeln!(out, "{:indent$}{place:>7}  {}: {}", "", field.name, shown(&field.value));
    field
        .children
        .iter()
        .for_each(|child| write_field(out, child, indent + 2));
}
