//! Pictures of fixtures, and of more packets than they have pixels. `UPDATE_PAGES=1 cargo test -p ferroce --lib plot` writes those of
//! the book.

use std::{collections::BTreeMap, path::PathBuf};

use clap::Parser;
use roce_bth::{NakCode, Opcode};
use roce_pcap::judge::{Endpoint, EventKind};
use roxmltree::{Document, ParsingOptions};

use super::{overview::Extent, *};

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    args: PlotArgs,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn picture(fixture: &str, options: &[&str]) -> Result<String, Failure> {
    let file = root().join("pcap-fixtures").join(fixture);
    let args = [&["plot", file.to_str().unwrap()], options].concat();
    let args = Command::try_parse_from(args).unwrap_or_else(|e| panic!("{e}")).args;
    draw(&mut Source::open(&file)?, &file, &args)
}

/// Numbers of a picture: of the legend by class, and of the marks that are drawn.
#[derive(Default, Debug)]
struct Found {
    legend: BTreeMap<String, u64>,
    drawn: BTreeMap<String, usize>,
    titles: Vec<String>,
}

fn parse(svg: &str) -> Found {
    let document =
        Document::parse_with_options(svg, ParsingOptions::default()).unwrap_or_else(|e| panic!("{e}: {svg}"));
    let mut found = Found::default();
    for path in document.descendants().filter(|node| node.has_tag_name("path")) {
        let class = path.attribute("class").unwrap();
        if let Some(class) = class.strip_suffix(" sample") {
            let label = path.next_siblings().find(|node| node.has_tag_name("text")).unwrap();
            let (_, count) = label.text().unwrap().rsplit_once('(').unwrap();
            *found.legend.entry(class.to_owned()).or_default() += count.trim_end_matches(')').parse::<u64>().unwrap();
            continue;
        }
        let data = path.attribute("d").unwrap();
        *found.drawn.entry(class.to_owned()).or_default() += data.matches('M').count();
        let titles = path.descendants().filter(|node| node.has_tag_name("title"));
        found
            .titles
            .extend(titles.map(|title| title.text().unwrap().to_owned()));
    }
    found
}

#[test]
fn pictures_of_the_book_follow_the_code() {
    for (name, fixture) in [
        ("write", "write-bw.pcap"),
        ("loss", "loss-write-twice-client.pcap"),
        ("rnr", "rnr-send.pcap"),
    ] {
        let file = root().join("docs/captures").join(format!("{name}.svg"));
        let drawn = picture(fixture, &[]).unwrap();
        if std::env::var_os("UPDATE_PAGES").is_some() {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, &drawn).unwrap();
        }
        assert!(
            fs::read_to_string(&file).unwrap_or_default() == drawn,
            "docs/captures/{name}.svg differs: `UPDATE_PAGES=1 cargo test -p ferroce --lib plot` writes it"
        );
    }
}

#[test]
fn losses_are_marked_each_in_its_class() {
    let found = parse(&picture("loss-write-twice-client.pcap", &[]).unwrap());
    let legend = [("ack", 2), ("again", 4), ("data", 22), ("nak", 1)].map(|(class, n)| (class.to_owned(), n));
    assert_eq!(found.legend, legend.into());
    assert_eq!((found.drawn["again"], found.drawn["nak"]), (4, 1));
    assert!(
        found
            .titles
            .iter()
            .any(|title| title == "frame 21: NAK, expected PSN 0x000002"),
        "{:?}",
        found.titles
    );

    let found = parse(&picture("rnr-send.pcap", &[]).unwrap());
    assert_eq!(
        (found.legend["rnr"], found.legend["nak"], found.legend["again"]),
        (8, 8, 24)
    );
    // Each of its RNR NAKs has a line as long as its wait.
    assert_eq!((found.drawn["rnr"], found.drawn["rnr tail"]), (8, 8));

    let found = parse(&picture("loss-write-server.pcap", &[]).unwrap());
    assert_eq!((found.legend["gap"], found.drawn["gap"]), (1, 1));

    let found = parse(&picture("write-bw.pcap", &[]).unwrap());
    let classes: Vec<_> = found.legend.keys().map(String::as_str).collect();
    assert_eq!((classes, found.titles.len()), (vec!["ack", "data"], 0));
}

#[test]
fn latency_and_throughput_have_a_panel_for_each_direction() {
    let svg = picture("verbs-ops.pcap", &["--kind", "latency"]).unwrap();
    assert_eq!(svg.matches("<g ").count(), 2);
    let found = parse(&svg);
    assert!(found.legend["data"] > 5 && found.legend["response"] > 2, "{found:?}");

    let svg = picture("read-bw.pcap", &["--kind", "throughput", "--dark"]).unwrap();
    assert_eq!(svg.matches("<g ").count(), 1, "only the responder sends payload");
    assert_eq!(parse(&svg).legend, [("goodput".to_owned(), 50)].into());
    assert!(!svg.contains("prefers-color-scheme"));
    assert!(picture("read-bw.pcap", &[]).unwrap().contains("prefers-color-scheme"));

    let svg = picture("rnr-send.pcap", &["--kind", "throughput"]).unwrap();
    let found = parse(&svg);
    assert_eq!((found.legend["wasted"], found.legend["rnr"]), (24, 8), "{found:?}");
}

#[test]
fn a_picture_without_marks_is_an_error() {
    let error = |fixture: &str, options: &[&str]| picture(fixture, options).unwrap_err().text().unwrap().to_owned();
    assert!(error("udaddy.pcap", &[]).contains("no packets with PSNs"));
    assert!(error("udaddy.pcap", &["--kind", "latency"]).contains("no request"));
    assert!(error("write-bw.pcap", &["--conversation", "7"]).contains("no conversation 7"));
    assert!(error("scapy-cnp.pcap", &[]).contains("no RoCEv2 conversation"));
}

#[test]
fn a_picture_of_a_million_packets_is_small_and_has_every_loss() {
    const PACKETS: i64 = 1_000_000;
    let end = |last: u8| Endpoint {
        addr: [10, 0, 0, last].into(),
        qpn: Some(1),
    };
    let chosen = Chosen {
        index: 0,
        service: "RC",
        name: None,
        ends: [end(1), end(2)],
        time_ns: [0, PACKETS as u64 * 1000],
        pauses: vec![],
        psns: [Some(Extent { from: 0, to: PACKETS }), None],
        flows: [None, None],
    };
    let mut picture = Box::new(sequence::Sequence::new(&chosen));
    let mut event = |n: i64, sender: usize, opcode: Opcode, kind: EventKind| {
        picture.event(&Event {
            frame: n as u64 + 1,
            time_ns: n as u64 * 1000,
            conversation: 0,
            sender,
            generation: 0,
            src: [10, 0, 0, 1].into(),
            src_port: 1,
            congestion: false,
            bytes: 1024,
            opcode,
            kind,
        });
    };
    for psn in 0..PACKETS {
        let request = |repeated| EventKind::Request {
            psn,
            psns: 1,
            repeated,
            skipped: 0,
            ends: true,
        };
        event(psn, 0, Opcode::RcSendOnly, request(false));
        let round_trip_ns = None;
        event(psn, 1, Opcode::RcAcknowledge, EventKind::Ack { psn, round_trip_ns });
        if psn % 250_000 == 100_000 {
            let code = NakCode::PsnSequenceError;
            event(psn, 1, Opcode::RcAcknowledge, EventKind::Nak { psn, code });
            event(psn, 0, Opcode::RcSendOnly, request(true));
        }
    }
    let svg = svg::document("many", &picture.finish(), false);
    let found = parse(&svg);
    assert!(svg.len() < 100_000, "{} bytes", svg.len());
    assert_eq!(
        (found.legend["data"], found.legend["ack"]),
        (PACKETS as u64, PACKETS as u64)
    );
    assert_eq!(
        (found.drawn["nak"], found.drawn["again"], found.titles.len()),
        (4, 4, 8)
    );
}
