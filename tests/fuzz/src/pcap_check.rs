//! A capture file: the checker ends with an error or a report whose counts agree, and every frame can be copied, also with
//! comments, without addresses, and by its conversation.

use std::io;

use ferroce_dissect::{ProtocolJudge, check_reader};
use roce_pcap::{Capture, Checker, Flows, PcapNgWriter, Report, Selection, Settings, Survey};

/// Most conversations of a capture that is split: each makes a file.
const MAX_SPLIT: usize = 4;

/// See the module.
pub fn run(data: &[u8]) {
    let mut seen = 0;
    let Ok(report) = check_reader("fuzz", data, |frame| {
        seen += 1;
        assert!(!frame.summary.to_string().is_empty());
    }) else {
        return;
    };
    assert_eq!(seen, report.roce_frames);
    assert_eq!(
        report.icrc_ok + report.icrc_bad + report.icrc_unchecked,
        report.roce_frames
    );
    assert!(report.roce_packets >= report.roce_frames && report.roce_frames <= report.frames);
    assert!(report.bad_frames <= report.roce_frames);
    let mut capture = Capture::new(data).expect("it has been read");
    let mut writer = PcapNgWriter::new(io::sink()).expect("a sink takes all");
    let mut copied = 0;
    while let Some(Ok(frame)) = capture.next_frame() {
        writer.copy(&frame, ["checked"]).expect("it has been read");
        copied += 1;
    }
    assert_eq!(copied, report.frames);
    flows(data);
    copies(data, &report);
}

/// Flows have each packet that belongs to a conversation.
fn flows(data: &[u8]) {
    let (mut checker, mut flows, mut packets) = (Checker::new("fuzz"), Flows::new(), 0);
    let mut capture = Capture::new(data).expect("it has been read");
    while let Some(Ok(frame)) = capture.next_frame() {
        checker.frame(&frame, |event, _| {
            packets += 1;
            flows.event(event);
        });
    }
    let report = flows.finish(checker.judge());
    let counted: u64 = report.flows.iter().map(|flow| flow.packets).sum();
    assert_eq!(counted + report.packets_left_out, packets);
}

/// Copies with comments, without addresses, and of conversations have all frames.
fn copies(data: &[u8], report: &Report) {
    let capture = || Capture::new(data).expect("it has been read");
    let writer = || PcapNgWriter::new(io::sink()).expect("a sink takes all");
    let survey = Survey::new("fuzz", &ProtocolJudge::setup(&[]), &mut capture());
    assert_eq!(survey.report(), report);
    let annotated = roce_pcap::annotate(&survey, &mut capture(), &mut writer());
    assert_eq!(annotated.expect("a sink takes all").0, report.frames);
    let anonymized = roce_pcap::anonymize(&Settings::default(), &mut capture(), &mut writer());
    assert_eq!(anonymized.expect("a sink takes all").frames, report.frames);
    let (all, bad) = (
        Selection::default(),
        Selection {
            bad: true,
            ..Selection::default()
        },
    );
    let each = |_: &roce_pcap::Frame<'_>, frame: &roce_pcap::Reviewed| {
        assert!(all.matches(frame));
        assert!(!bad.matches(frame) || !frame.findings.is_empty());
        Ok::<(), ()>(())
    };
    survey.review(&mut capture(), each).expect("it has no errors");
    if (1..=MAX_SPLIT).contains(&report.conversations.len()) {
        let dir = tempfile::tempdir().expect("a folder");
        let parts = roce_pcap::split(&survey, &mut capture(), dir.path()).expect("files");
        assert_eq!(parts.iter().map(|part| part.frames).sum::<u64>(), report.frames);
    }
}
