//! A capture file: the checker ends with an error or a report whose counts agree, and every frame can be copied,
//! also with comments and without addresses.

use std::io;

use roce_pcap::{Capture, PcapNgWriter, Settings, Survey, check_reader};

/// See the module.
pub fn run(data: &[u8]) {
    let mut seen = 0;
    let Ok(report) = check_reader("fuzz", data, |frame| seen += u64::from(frame.index > 0)) else {
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
    copies(data, report.frames);
}

/// Copies with comments, and without addresses, have all frames.
fn copies(data: &[u8], frames: u64) {
    let capture = || Capture::new(data).expect("it has been read");
    let writer = || PcapNgWriter::new(io::sink()).expect("a sink takes all");
    let survey = Survey::new("fuzz", &[], &mut capture());
    let annotated = roce_pcap::annotate(&survey, &mut capture(), &mut writer());
    assert_eq!(annotated.expect("a sink takes all").0, frames);
    let anonymized = roce_pcap::anonymize(&Settings::default(), &mut capture(), &mut writer());
    assert_eq!(anonymized.expect("a sink takes all").frames, frames);
}
