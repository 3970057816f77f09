//! Copies of captures with the judge's findings as comments.

use std::{
    collections::HashSet,
    io::{self, Read, Write},
};

use crate::{finding::Finding, pcapng_writer::PcapNgWriter, reader::Capture, survey::Survey};

/// Comments that are added to a frame at most; the last one counts the others.
const MAX_COMMENTS: usize = 64;
/// Longest comment, bytes.
const MAX_COMMENT: usize = 1024;

/// Returns findings as comments of frame `index`: `ferroce error psn-reused: …; at fault: 10.0.0.2`. One of another frame names that.
pub fn comments(index: u64, findings: &[Finding]) -> Vec<String> {
    let mut seen = HashSet::new();
    let mut texts: Vec<String> = findings
        .iter()
        .map(|finding| {
            let own = finding.frame == index;
            let other = if own {
                String::new()
            } else {
                format!("; frame {}", finding.frame)
            };
            bounded(format!("ferroce {finding}{other}"))
        })
        .filter(|text| seen.insert(text.clone()))
        .collect();
    if texts.len() > MAX_COMMENTS {
        let more = texts.len() - (MAX_COMMENTS - 1);
        texts.truncate(MAX_COMMENTS - 1);
        texts.push(format!("ferroce: {more} more findings"));
    }
    texts
}

fn bounded(mut text: String) -> String {
    if text.len() > MAX_COMMENT {
        let end = (0..=MAX_COMMENT).rev().find(|&n| text.is_char_boundary(n));
        text.truncate(end.unwrap_or(0));
        text.push('…');
    }
    text
}

/// Copies all frames of a capture that was surveyed, with findings as comments behind those that frames have. A comment
/// that is there already is not added again. Returns the number of frames, and of those that got comments.
///
/// # Errors
/// The writer's.
pub fn annotate<R: Read, W: Write>(
    survey: &Survey,
    capture: &mut Capture<R>,
    out: &mut PcapNgWriter<W>,
) -> io::Result<(u64, u64)> {
    let (mut frames, mut commented, mut last_ns) = (0, 0, 0);
    survey.review(capture, |frame, reviewed| {
        let mut texts = comments(frame.index, &reviewed.findings);
        texts.retain(|text| !frame.comments().contains(text));
        frames += 1;
        commented += u64::from(!texts.is_empty());
        last_ns = frame.time_ns;
        out.copy(frame, texts.iter().map(String::as_str))
    })?;
    out.copy_drops(capture.interfaces(), last_ns)?;
    Ok((frames, commented))
}
