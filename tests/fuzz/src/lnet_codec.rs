//! All parsers of what an LNet node's peers send: messages of o2iblnd in both byte orders, rejects, headers of LNet, ping information, messages
//! of lnet_selftest, and NIDs as text. What can be read is written again as it came, and read again as the same.

use lnet::{
    proto::{Body, ByteOrder, Checksum, LnetHdr, Message, Nid, PingInfo, Reject, peek},
    selftest::proto as selftest,
};
use zerocopy::{FromBytes, IntoBytes};

/// Where a message of o2iblnd has its length.
const NOB: core::ops::Range<usize> = 8..12;

/// The first byte says what the rest is; see the module.
pub fn run(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    match kind % 7 {
        0 => message(rest),
        1 => message(&whole(rest)),
        2 => reject(rest),
        3 => _ = LnetHdr::ref_from_prefix(rest).map(|(hdr, _)| header(hdr)),
        4 => ping_info(rest),
        5 => selftest_message(rest),
        _ => _ = core::str::from_utf8(rest).map(nid),
    }
}

/// A message whose length is right.
fn whole(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let len = bytes.len() as u32;
    if let (Ok(peek), Some(nob)) = (peek(&bytes), bytes.get_mut(NOB)) {
        nob.copy_from_slice(&match peek.order {
            ByteOrder::Little => len.to_le_bytes(),
            ByteOrder::Big => len.to_be_bytes(),
        });
    }
    bytes
}

fn message(bytes: &[u8]) {
    let Ok(message) = Message::parse(bytes) else { return };
    assert!(peek(bytes).is_ok_and(|peek| peek.order == message.order && peek.kind == message.body.kind() as u8));
    let again = message.to_bytes();
    assert_eq!(Some(&again[..]), bytes.get(..again.len()), "{message:?}");
    assert_eq!(Message::parse(&again), Ok(message), "without the padding");
    assert!(
        Message::parse(&again[..again.len() - 1]).is_err(),
        "a message that is cut off"
    );
    let order = match message.order {
        ByteOrder::Little => ByteOrder::Big,
        ByteOrder::Big => ByteOrder::Little,
    };
    let other = Message { order, ..message };
    assert_eq!(Message::parse(&other.to_bytes()), Ok(other), "in the other byte order");
    for signed in [true, false] {
        let mut sealed = message;
        sealed.seal(signed);
        let judged = sealed.judge_checksum();
        assert!(matches!(judged, Checksum::Signed | Checksum::Unsigned), "{judged:?}");
    }
    message.judge_checksum();
    if let Some(hdr) = message.body.hdr() {
        header(hdr);
    }
    if let Body::PutAck { desc, .. } | Body::GetReq { desc, .. } = message.body {
        let all: Vec<_> = desc.frags.iter().collect();
        assert!(!all.is_empty() && all.len() == desc.frags.len() && desc.frags.get(all.len()).is_none());
        assert_eq!(desc.nob(), all.iter().map(|frag| u64::from(frag.nob)).sum::<u64>());
    }
}

fn reject(bytes: &[u8]) {
    let Ok(reject) = Reject::parse(bytes) else { return };
    let again = reject.to_bytes();
    let there = bytes.len().min(Reject::LEN);
    assert_eq!(again[..there], bytes[..there]);
    assert!(again[there..].iter().all(|byte| *byte == 0), "bytes that did not come");
    assert_eq!(Reject::parse(&again), Ok(reject));
    assert!(!reject.why.to_string().is_empty());
}

fn header(hdr: &LnetHdr) {
    let Ok(operation) = hdr.operation() else {
        assert!(hdr.check().is_err());
        return;
    };
    if let Ok(checked) = hdr.check() {
        assert_eq!(checked, operation);
    }
    let again = LnetHdr::new(hdr.dst(), hdr.src(), hdr.payload_length.get(), &operation);
    assert_eq!(again.operation(), Ok(operation));
    // All but process IDs and bytes that the operation does not use.
    let pairs = again.as_bytes().iter().zip(hdr.as_bytes()).enumerate();
    for (at, (ours, theirs)) in pairs.filter(|(at, _)| !(16..24).contains(at)) {
        assert!(ours == theirs || *ours == 0, "byte {at} of {hdr:?}");
    }
}

fn ping_info(bytes: &[u8]) {
    let parsed = PingInfo::parse(bytes);
    assert!(parsed.is_err() || PingInfo::is(bytes));
    let Ok(info) = parsed else { return };
    let interfaces: Vec<_> = info.interfaces().collect();
    assert!(interfaces.len() <= info.count as usize && interfaces.len() <= bytes.len() / 16);
    let is_cut = interfaces.len() < info.count as usize;
    assert!(!is_cut || info.rest().len() < 16, "an interface was left out");
    let again = PingInfo::emit(info.order, info.features, info.pid, &interfaces, info.rest());
    assert!(is_cut || again == bytes);
    let read = PingInfo::parse(&again).expect("what was written");
    assert_eq!(
        (read.order, read.features, read.pid),
        (info.order, info.features, info.pid)
    );
    assert!(read.interfaces().eq(interfaces) && read.rest() == info.rest());
}

fn selftest_message(bytes: &[u8]) {
    let (head, data) = bytes.split_at(bytes.len().min(selftest::MESSAGE_LEN));
    let Ok(message) = selftest::Message::parse(head) else {
        return;
    };
    let again = message.to_bytes();
    assert_eq!(selftest::Message::parse(&again), Ok(message));
    // All but fields that are not used.
    for (at, (ours, theirs)) in again.iter().zip(head).enumerate() {
        assert!(ours == theirs || *ours == 0, "byte {at} of {message:?}");
    }
    let body = message.body;
    assert_ne!(
        body.service().is_some(),
        body.status().is_some(),
        "a request or a reply"
    );
    if let selftest::Body::Test { .. } = body {
        test(&message);
    }
    let nodes = message.destinations(data);
    assert_eq!(nodes.len(), data.len() / selftest::DEST_LEN);
    let little = selftest::Message::new(message.features, body);
    assert_eq!(little.destinations(&selftest::destinations_to_bytes(&nodes)), nodes);
    let is_kept = |pattern: selftest::Pattern| pattern.is_kept(data, message.order);
    assert!(is_kept(selftest::Pattern::None));
    assert!(!is_kept(selftest::Pattern::Full) || is_kept(selftest::Pattern::Simple));
}

/// Parameters of a test.
fn test(message: &selftest::Message) {
    let Ok(wanted) = message.test() else { return };
    let mut again = *message;
    if let selftest::Body::Test { parameters, .. } = &mut again.body {
        *parameters = wanted.to_bytes(message.order, message.features);
    }
    assert_eq!(again.test(), Ok(wanted));
}

fn nid(text: &str) {
    let Ok(nid) = text.parse::<Nid>() else { return };
    assert_eq!(nid.to_string().parse(), Ok(nid), "{text:?}");
}
