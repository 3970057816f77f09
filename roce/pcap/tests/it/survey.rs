//! Copies that need two readings: annotated captures, chosen frames, a file for each conversation.

use std::fs;

use roce_bth::{Opcode, Qpn};
use roce_pcap::{Capture, PcapNgWriter, Report, Rule, Selection, Setup, Survey, check_reader};

use crate::common::{self, capture_of, ethernet, ip_datagram, packet, v4};

fn fixture(name: &str) -> Vec<u8> {
    fs::read(common::fixture(name)).unwrap()
}

fn survey(file: &[u8]) -> Survey {
    Survey::new("file", &Setup::default(), &mut Capture::new(file).unwrap())
}

fn annotated(file: &[u8]) -> Vec<u8> {
    let mut out = PcapNgWriter::new(Vec::new()).unwrap();
    roce_pcap::annotate(&survey(file), &mut Capture::new(file).unwrap(), &mut out).unwrap();
    out.finish().unwrap()
}

fn comments(file: &[u8]) -> Vec<(u64, Vec<String>)> {
    let mut capture = Capture::new(file).unwrap();
    let mut all = vec![];
    while let Some(frame) = capture.next_frame() {
        let frame = frame.unwrap();
        if !frame.comments().is_empty() {
            all.push((frame.index, frame.comments().to_vec()));
        }
    }
    all
}

fn check(file: &[u8]) -> Report {
    check_reader("file", file, |_| {}).unwrap()
}

/// The numbers of the frames that are selected.
fn selected(file: &[u8], selection: &Selection) -> Vec<u64> {
    let survey = survey(file);
    let mut found = vec![];
    let each = |_: &roce_pcap::Frame<'_>, frame: &roce_pcap::Reviewed| {
        if selection.matches(frame) {
            found.push(frame.index);
        }
        Ok::<(), std::convert::Infallible>(())
    };
    survey.review(&mut Capture::new(file).unwrap(), each).unwrap();
    found
}

#[test]
fn findings_become_comments_of_the_frames_that_break_the_rules() {
    // Found at the end of the capture, about its first frame.
    let late = comments(&annotated(&fixture("retry-exceeded-client.pcap")));
    assert_eq!(late.len(), 1, "{late:?}");
    assert_eq!(late[0].0, 1);
    let text = &late[0].1[0];
    assert!(
        text.starts_with("ferroce warning no-answer: ") && text.ends_with("; at fault: 10.77.0.1"),
        "{text}"
    );
    // A rule that one peer breaks three times, of which a report only counts two.
    let again = comments(&annotated(&fixture("annex-a19.pcap")));
    assert_eq!(again.iter().map(|(frame, _)| *frame).collect::<Vec<_>>(), [11, 13, 15]);
    assert!(
        again
            .iter()
            .all(|(_, texts)| texts[0].starts_with("ferroce error frame-icrc: "))
    );
}

#[test]
fn comments_that_are_there_are_kept_and_added_once() {
    let file = fixture("nak-write-rkey.pcap");
    let mut capture = Capture::new(&file[..]).unwrap();
    let mut own = PcapNgWriter::new(Vec::new()).unwrap();
    while let Some(frame) = capture.next_frame() {
        own.copy(&frame.unwrap(), ["mine"]).unwrap();
    }
    let once = annotated(&own.finish().unwrap());
    let texts = comments(&once);
    assert!(texts.len() > 1 && texts.iter().all(|(_, texts)| texts[0] == "mine"));
    let commented: Vec<_> = texts.iter().filter(|(_, texts)| texts.len() > 1).collect();
    assert_eq!(commented.len(), 1);
    assert!(commented[0].1[1].contains("nak-fatal"), "{commented:?}");
    assert_eq!(comments(&annotated(&once)), texts);
}

#[test]
fn a_capture_that_breaks_off_is_copied_up_to_there() {
    let mut file = fixture("nak-write-rkey.pcap");
    let frames = check(&file).frames;
    file.truncate(file.len() - 1);
    let survey = survey(&file);
    assert!(!survey.report().complete);
    assert_eq!(check(&annotated(&file)).frames, frames - 1);
}

#[test]
fn conditions_of_one_kind_are_alternatives_and_of_different_kinds_all_hold() {
    let file = fixture("nak-write-rkey.pcap");
    let all = check(&file).frames;
    let of_rules = |rules: Vec<Rule>| Selection {
        rules,
        ..Selection::default()
    };
    assert_eq!(selected(&file, &Selection::default()).len() as u64, all);
    assert_eq!(selected(&file, &of_rules(vec![Rule::NakFatal])), [7]);
    assert_eq!(selected(&file, &of_rules(vec![Rule::Msn, Rule::NakFatal])), [7]);
    assert!(selected(&file, &of_rules(vec![Rule::Msn])).is_empty());
    let both = Selection {
        frames: 1..=6,
        ..of_rules(vec![Rule::NakFatal])
    };
    assert!(selected(&file, &both).is_empty());
    let bad = Selection {
        bad: true,
        ..Selection::default()
    };
    assert!(selected(&file, &bad).is_empty(), "the NAK is a note");
    assert_eq!(selected(&fixture("annex-a19.pcap"), &bad), [11, 13, 15]);
    let writes = Selection {
        opcodes: vec![Opcode::RcWriteFirst],
        ..Selection::default()
    };
    assert_eq!(selected(&file, &writes), [3]);
}

#[test]
fn a_queue_pair_brings_its_conversation_with_the_messages_that_made_it() {
    let file = fixture("rnbd.pcap");
    let whole = check(&file);
    assert_eq!(whole.conversations[1].name.as_deref(), Some("RTRS"));
    let end = whole.conversations[1].ends[0];
    let by_qp = Selection {
        queue_pairs: vec![(Some(end.addr), Qpn::new(end.qpn.unwrap()))],
        ..Selection::default()
    };
    let by_number = Selection {
        conversations: vec![whole.conversations[1].index],
        ..Selection::default()
    };
    let found = selected(&file, &by_qp);
    assert_eq!(found, selected(&file, &by_number));
    let packets: u64 = whole.conversations[1].packets.iter().sum();
    assert_eq!(found.len() as u64, packets + 3, "REQ, REP and RTU");
    let of_peer = Selection {
        addresses: vec![end.addr],
        ..Selection::default()
    };
    assert_eq!(selected(&file, &of_peer).len() as u64, whole.frames);
}

#[test]
fn files_of_conversations_are_judged_as_the_whole_is() {
    let dir = tempfile::tempdir().unwrap();
    let names = fs::read_dir(common::fixture("")).unwrap().map(|e| e.unwrap().path());
    let mut several = 0;
    for path in names.filter(|path| path.extension().is_some_and(|e| e == "pcap")) {
        let file = fs::read(&path).unwrap();
        let whole = check(&file);
        let out = dir.path().join(path.file_stem().unwrap());
        let parts = roce_pcap::split(&survey(&file), &mut Capture::new(&file[..]).unwrap(), &out).unwrap();
        assert_eq!(parts.iter().map(|part| part.frames).sum::<u64>(), whole.frames);
        several += usize::from(parts.len() > 1);
        for part in &parts {
            let report = check(&fs::read(&part.path).unwrap());
            assert_eq!(report.frames, part.frames, "{}", part.path.display());
            let Some(index) = part.conversation else {
                assert!(part.path.ends_with("other.pcapng"));
                continue;
            };
            let of_whole = whole.conversations.iter().find(|c| c.index == index).unwrap();
            let [of_part] = &report.conversations[..] else {
                panic!("{}: {:?}", part.path.display(), report.conversations);
            };
            assert_eq!((of_part.ends, of_part.packets), (of_whole.ends, of_whole.packets));
            assert_eq!(
                (of_part.errors, of_part.warnings, of_part.verdict, &of_part.name),
                (of_whole.errors, of_whole.warnings, of_whole.verdict, &of_whole.name),
                "{}",
                part.path.display()
            );
        }
    }
    assert!(several > 3, "captures with several conversations");
}

#[test]
fn a_folder_with_files_is_not_split_into() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("mine"), "precious").unwrap();
    let frame = ethernet(0x0800, &ip_datagram(v4(), 1, &packet(b"data")));
    let file = capture_of(1, &[(&frame, None)]);
    let e = roce_pcap::split(&survey(&file), &mut Capture::new(&file[..]).unwrap(), dir.path()).unwrap_err();
    assert!(e.to_string().contains("not empty"), "{e}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}
