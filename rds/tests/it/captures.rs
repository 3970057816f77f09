//! The kernel's messages, read and emitted again byte for byte.

use std::{collections::HashMap, net::IpAddr};

use rds::proto::{
    BitmapFragment, ConnCommon, ConnV4, ConnV6, Extension, Fragment, Header, Kind, PORT_V4, PORT_V6, Private,
    ProtoError, RdmaCookie, Reject,
};
use zerocopy::IntoBytes;

use crate::capture::{Cm, Item, read, read_of};

/// Captures of RDS: names, and whether a kernel is on both sides. In the others it has address 10.77.0.1.
fn captures() -> Vec<(String, bool)> {
    let folder = std::fs::read_dir(crate::capture::folder().join("rds")).unwrap();
    let names = folder.map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut all: Vec<_> = names
        .filter(|name| name.ends_with(".pcap"))
        .map(|name| (format!("rds/{name}"), !name.starts_with("odd-")))
        .collect();
    all.push(("rds.pcap".to_owned(), true));
    assert!(all.len() > 35, "{all:?}");
    all
}

/// Makes a header again from what it says.
fn rebuilt(header: &Header) -> Header {
    let ports = (header.sport.get(), header.dport.get());
    let (sequence, ack, len) = (header.sequence.get(), header.ack.get(), header.len.get());
    let mut ours = match header.kind() {
        Kind::Bitmap => Header::bitmap(ack),
        Kind::Ack => Header::ack_only(ack),
        _ => Header::new(sequence, ack, len, ports, header.flags()),
    };
    let extensions: Vec<Extension> = header.extensions().collect();
    ours.set_extensions(rds::proto::pack(&extensions).unwrap());
    ours.credit = header.credit;
    ours.seal();
    ours
}

/// Makes private data again from what it says.
fn rebuilt_private(private: &Private<'_>) -> Vec<u8> {
    let common = private.common();
    let ours = ConnCommon::new(common.version(), common.tos, common.ack_seq.get(), common.credits.get());
    match private.addresses() {
        (IpAddr::V4(src), IpAddr::V4(dst)) => ConnV4::new(src, dst, ours).as_bytes().to_vec(),
        (IpAddr::V6(src), IpAddr::V6(dst)) => ConnV6::new(src, dst, ours).as_bytes().to_vec(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_message_of_a_kernel_is_made_again() {
    let (mut all_sends, mut all_private) = (0, 0);
    for (name, both) in captures() {
        let (mut sends, mut port) = (0, 0);
        for item in read_of(&name, (!both).then_some([10, 77, 0, 1])) {
            match item {
                Item::Private(frame, Cm::Rej, _, data) => {
                    let known = [Reject::INCOMPATIBLE.to_bytes(), [0; 4]];
                    assert!(
                        known.iter().any(|bytes| data.starts_with(bytes)),
                        "{name} frame {frame}"
                    );
                }
                Item::Private(frame, cm, to, data) => {
                    if cm == Cm::Req {
                        port = to;
                        assert!([PORT_V4, PORT_V6].contains(&port), "{name} frame {frame}");
                    }
                    let private = Private::parse(port, &data).unwrap();
                    let ours = rebuilt_private(&private);
                    let (same, rest) = data.split_at(ours.len());
                    assert_eq!(same, ours, "{name} frame {frame}");
                    assert!(rest.iter().all(|b| *b == 0));
                    all_private += 1;
                }
                Item::Send(frame, bytes) => {
                    sends += 1;
                    let (header, data) = Header::parse(&bytes).unwrap_or_else(|e| panic!("{name} frame {frame}: {e}"));
                    assert_eq!(&rebuilt(header), header, "{name} frame {frame}");
                    assert_eq!([header.as_bytes(), data].concat(), bytes);
                }
            }
        }
        assert!(sends >= 4 || name.contains("no-answer"), "{name}: {sends} sends");
        all_sends += sends;
    }
    assert!(
        all_sends > 900 && all_private > 100,
        "{all_sends} sends, {all_private} private data"
    );
}

/// Kinds of a capture's messages, each counted once, and not by fragments.
fn kinds(name: &str) -> HashMap<Kind, usize> {
    let mut counts = HashMap::new();
    let mut fragment = HashMap::new();
    for item in read(name) {
        let Item::Send(frame, bytes) = item else { continue };
        let (header, data) = Header::parse(&bytes).unwrap();
        // Messages of one sender don't interleave; the ports tell the senders apart, except for maps.
        let key = (
            header.sequence.get(),
            header.sport.get(),
            header.len.get(),
            header.ack.get(),
        );
        let index = fragment.entry(key).or_insert(0);
        assert_eq!(data.len(), header.fragment_len(*index), "{name} frame {frame}");
        Fragment::parse(&bytes, *index).unwrap();
        if header.kind() == Kind::Bitmap {
            BitmapFragment::parse(*index, data).unwrap();
        }
        *index += 1;
        if *index == header.fragments() {
            *counts.entry(header.kind()).or_insert(0) += 1;
            fragment.remove(&key);
        }
    }
    counts
}

#[test]
fn messages_are_those_that_the_captures_show() {
    let of = |name: &str, kind| kinds(name).get(&kind).copied().unwrap_or(0);
    let ping = "rds/ping.pcap";
    assert_eq!(of(ping, Kind::Bitmap), 2);
    assert_eq!((of(ping, Kind::Ping), of(ping, Kind::Pong)), (5, 5));
    assert_eq!((of(ping, Kind::Data), of(ping, Kind::Ack)), (2, 1));
    let connect = "rds/connect-v4.pcap";
    assert_eq!(
        (
            of(connect, Kind::Data),
            of(connect, Kind::Bitmap),
            of(connect, Kind::Ack)
        ),
        (3, 2, 1)
    );
}

#[test]
fn port_4002_becomes_congested_and_free() {
    let mut seen: Vec<Vec<u16>> = Vec::new();
    for item in read("rds/congestion.pcap") {
        let Item::Send(_, bytes) = item else { continue };
        let (header, data) = Header::parse(&bytes).unwrap();
        if header.kind() == Kind::Bitmap {
            let ports = BitmapFragment::parse(0, data).unwrap().ports().collect();
            if seen.last() != Some(&ports) {
                seen.push(ports);
            }
        }
    }
    // The second fragments, of ports from 32,768 on, are empty.
    let congested = seen.iter().filter(|ports| **ports == [4002]).count();
    assert_eq!(congested, 3, "{seen:?}");
    assert!(seen.iter().all(|ports| ports.is_empty() || *ports == [4002]));
}

#[test]
fn rdma_extensions_name_key_offset_and_bytes() {
    let extensions = |name: &str| {
        let sends = read(name).into_iter().filter_map(|item| match item {
            Item::Send(_, bytes) => Some(bytes),
            Item::Private(..) => None,
        });
        sends
            .flat_map(|bytes| Header::parse(&bytes).unwrap().0.extensions().collect::<Vec<_>>())
            .collect::<Vec<_>>()
    };
    let old = extensions("rds/rdma-write.pcap");
    assert_eq!(old[0], Extension::RdmaDest(RdmaCookie::new(0x400, 0x64)));
    assert_eq!(old[1..], [Extension::Rdma { rkey: 0x400 }; 2]);
    let new = extensions("rds/rdma-write-7.3-7.3.pcap");
    let direction = rds::proto::RdmaDirection::Write;
    assert_eq!(
        new,
        [
            Extension::RdmaDest(RdmaCookie::new(0x300, 0x64)),
            Extension::Rdma { rkey: 0x300 },
            Extension::RdmaBytes {
                bytes: 0x2000,
                direction
            },
            Extension::Rdma { rkey: 0x300 },
            Extension::RdmaBytes {
                bytes: 0x7d0,
                direction
            },
        ]
    );
}

#[test]
fn broken_frames_are_errors() {
    let mut errors = Vec::new();
    for item in read("rds/odd-breaks.pcap") {
        let Item::Send(_, bytes) = item else { continue };
        match Header::parse(&bytes) {
            Err(error) => errors.push(error),
            Ok((header, data)) if data.len() > header.len.get() as usize => {
                errors.extend(Fragment::parse(&bytes, 0).err());
            }
            Ok(_) => {}
        }
    }
    assert!(
        errors.iter().any(|e| matches!(e, ProtoError::Checksum { .. })),
        "{errors:?}"
    );
    assert!(
        errors.iter().any(|e| matches!(e, ProtoError::Short { len: 40, .. })),
        "{errors:?}"
    );
}
