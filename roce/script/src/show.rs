//! Packets as lines of a script.

use core::fmt::Write as _;

use roce_bth::{Class, Header, Opcode, PKey, Packet, Service, Syndrome};

use crate::{memory::Memory, names};

/// Writes a packet as a line of a script would name it. `service`: the queue pair's.
pub(crate) fn packet(bytes: &[u8], memory: &Memory, service: Service) -> String {
    let packet = match Packet::parse(bytes) {
        Ok(packet) => packet,
        Err(e) => return format!("{} bytes that are no packet: {e}", bytes.len()),
    };
    let header = Header::from(packet.header);
    let mut out = name(&header, service);
    let _ = write!(out, " psn={}", header.bth.psn.value());
    if let Some(aeth) = header.aeth {
        if let (Syndrome::Rnr(timer), Class::Acknowledge) = (aeth.syndrome, header.bth.opcode.info().class) {
            let _ = write!(out, " timer={}", timer.code());
        }
        let _ = write!(out, " msn={}", aeth.msn.value());
    }
    if let Some(feth) = header.feth {
        let (placement, selectivity) = (feth.placement.bits(), feth.selectivity.bits());
        let _ = write!(out, " placement={placement} selectivity={selectivity}");
    }
    let named = header.reth.map(|reth| (reth.va, reth.rkey));
    if let Some((va, rkey)) = named.or_else(|| header.atomic_eth.map(|eth| (eth.va, eth.rkey))) {
        let (va, rkey) = (memory.show_address(rkey, va), memory.show_key(rkey));
        let _ = write!(out, " va={va} rkey={rkey}");
    }
    if let Some(reth) = header.reth {
        let _ = write!(out, " len={}", reth.dma_len);
    }
    if let Some(eth) = header.atomic_eth {
        let _ = match header.bth.opcode {
            Opcode::RcFetchAdd | Opcode::XrcFetchAdd => write!(out, " add={}", eth.swap_add),
            _ => write!(out, " compare={} swap={}", eth.compare, eth.swap_add),
        };
    }
    if let Some(value) = header.atomic_ack {
        let _ = write!(out, " value={value}");
    }
    if let Some(imm) = header.imm {
        let _ = write!(out, " imm={imm}");
    }
    if let Some(key) = header.ieth {
        let _ = write!(out, " inv={}", memory.show_key(key));
    }
    flags(&mut out, &header);
    if !packet.payload.is_empty() {
        let _ = write!(out, " payload={}", packet.payload.len());
    }
    out
}

fn name(header: &Header, service: Service) -> String {
    let opcode = header.bth.opcode;
    match (opcode.info().class, header.aeth.map(|aeth| aeth.syndrome)) {
        (Class::Acknowledge, Some(Syndrome::Ack(_))) => "ack".to_owned(),
        (Class::Acknowledge, Some(Syndrome::Rnr(_))) => "rnr".to_owned(),
        (Class::Acknowledge, Some(Syndrome::Nak(code))) => format!("nak {}", names::name_of(&names::NAKS, code)),
        (_, Some(Syndrome::Reserved(byte))) => format!("{} syndrome={byte:#x}", names::of_opcode(opcode, service)),
        _ => names::of_opcode(opcode, service),
    }
}

fn flags(out: &mut String, header: &Header) {
    let bth = &header.bth;
    let flags = [
        ("ackreq", bth.ack_req),
        ("se", bth.solicited),
        ("fecn", bth.fecn),
        ("becn", bth.becn),
        ("migreq", bth.migreq),
    ];
    for (name, _) in flags.iter().filter(|(_, on)| *on) {
        let _ = write!(out, " {name}");
    }
    if bth.pkey != PKey::DEFAULT {
        let _ = write!(out, " pkey={:#x}", bth.pkey.0);
    }
}
