//! What the broker and its members read of each other, and the state file of a former broker: what can be read is written
//! and read again as the same.

use roce_broker::fuzz;

/// The first byte says what the rest is; see the module.
pub fn run(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    match kind % 6 {
        0 => same(rest, fuzz::from_member),
        1 => same(rest, fuzz::from_broker),
        2 => fuzz::packet(rest),
        3 => _ = fuzz::state(rest),
        4 => same(&record(rest), fuzz::from_member),
        _ => same(&record(rest), fuzz::from_broker),
    }
}

/// A record whose length is right: the first line is the message, the rest its payload.
fn record(bytes: &[u8]) -> Vec<u8> {
    let end = bytes.iter().position(|b| *b == b'\n').unwrap_or(bytes.len());
    let (message, payload) = bytes.split_at(end);
    let len = u32::try_from(message.len()).unwrap_or(u32::MAX).to_le_bytes();
    [&len[..], message, payload].concat()
}

fn same(bytes: &[u8], read: fn(&[u8]) -> Option<Vec<u8>>) {
    if let Some(written) = read(bytes) {
        assert_eq!(read(&written).as_ref(), Some(&written), "what was written");
    }
}
