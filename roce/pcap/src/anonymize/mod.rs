//! Copies of captures without addresses, keys and data.
//!
//! Frames keep their number, lengths, times, PSNs and queue pair numbers, and each is judged as it was: that is checked while copying.
//! Addresses become others with the same common prefixes. Virtual addresses move by a distance of their key. Checksums and
//! ICRCs are made again; those that were wrong stay wrong. What is not understood is filled with zeros.

mod address;
mod checksum;
mod cm;
mod frame;
mod packet;
mod secret;

use std::{
    io::{self, Read, Write},
    mem,
};

use crate::{
    checker::Checker,
    finding::Finding,
    pcapng_writer::PcapNgWriter,
    reader::{Capture, Error, Frame},
};

pub use packet::Filling;

use frame::Frames;
use secret::Secret;

/// Settings of a copy.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Settings {
    /// Key: the same key gives the same copy. Whoever knows it can test guesses.
    pub key: [u8; 32],
    /// Payload of the copy.
    pub filling: Filling,
    /// Keep private data of connection messages behind the RDMA_CM header.
    pub keep_private: bool,
    /// Seconds by which times move.
    pub shift_secs: i64,
}

impl Settings {
    /// Returns the key of a text.
    pub fn key_of(seed: &str) -> [u8; 32] {
        Secret::of(seed)
    }
}

/// Result of a copy.
#[derive(Default, Debug)]
pub struct Anonymized {
    /// Frames that were copied.
    pub frames: u64,
    /// Frames whose findings differ from those of the original.
    pub judged_differently: u64,
    /// The first of them.
    pub first_different: Option<u64>,
    /// Reason for which the capture could not be read to its end.
    pub broken: Option<Error>,
}

/// Copies a capture without addresses, keys and data. Comments and names of interfaces are left out.
///
/// # Errors
/// The writer's.
pub fn anonymize<R: Read, W: Write>(
    settings: &Settings,
    capture: &mut Capture<R>,
    out: &mut PcapNgWriter<W>,
) -> io::Result<Anonymized> {
    let mut frames = Frames::new(Secret::new(settings.key), settings.filling, settings.keep_private);
    let mut comparison = Comparison::default();
    let mut result = Anonymized::default();
    let shift_ns = settings.shift_secs.saturating_mul(1_000_000_000);
    let mut last_ns = 0;
    out.omit_names();
    while let Some(frame) = capture.next_frame() {
        let frame = match frame {
            Ok(frame) => frame,
            Err(e) => {
                result.broken = Some(e);
                break;
            }
        };
        let data = frames.replace(&frame);
        let copy = frame.replaced(&data, frame.time_ns.saturating_add_signed(shift_ns));
        comparison.frame(&frame, &copy, &mut result);
        out.copy(&copy, [])?;
        result.frames += 1;
        last_ns = copy.time_ns;
    }
    comparison.finish(&mut result);
    out.copy_drops(capture.interfaces(), last_ns)?;
    Ok(result)
}

/// Judges original and copy.
struct Comparison {
    original: Checker,
    copy: Checker,
}

impl Default for Comparison {
    fn default() -> Self {
        let checker = || {
            let mut checker = Checker::new("");
            checker.keep_findings();
            checker
        };
        Self {
            original: checker(),
            copy: checker(),
        }
    }
}

impl Comparison {
    fn frame(&mut self, original: &Frame<'_>, copy: &Frame<'_>, result: &mut Anonymized) {
        self.original.frame(original, |_, _| {});
        self.copy.frame(copy, |_, _| {});
        let findings = [self.original.take_findings(), self.copy.take_findings()];
        compare(findings, original.index, result);
    }

    fn finish(self, result: &mut Anonymized) {
        let last = result.frames;
        let findings = [self.original, self.copy].map(|checker| checker.finish_with_findings().1);
        compare(findings, last, result);
    }
}

/// Notes a difference between findings that show at a frame.
fn compare([mut original, mut copy]: [Vec<Finding>; 2], frame: u64, result: &mut Anonymized) {
    let rules = |findings: &mut Vec<Finding>| {
        let mut rules: Vec<_> = mem::take(findings)
            .into_iter()
            .map(|f| (f.frame, f.rule.id()))
            .collect();
        rules.sort_unstable();
        rules
    };
    if rules(&mut original) != rules(&mut copy) {
        result.judged_differently += 1;
        result.first_different.get_or_insert(frame);
    }
}
