//! A UDP payload: what parses is emitted again byte for byte, and no ICRC function trips over any of it.

use roce_bth::{BTH_LEN, Header, ICRC_LEN, MAX_HEADER_LEN, Opcode, Packet};
use roce_icrc::{Flow, Recovery, check_datagram};

/// See the module.
pub fn run(data: &[u8]) {
    let flow = Flow::try_from(("10.0.0.1:50000".parse().unwrap(), "10.0.0.2:4791".parse().unwrap())).unwrap();
    if let Recovery::Exact(id) = flow.recover(data, 0) {
        assert!(flow.verify(id, data));
    }
    check_datagram(data);
    let Ok(packet) = Packet::parse(data) else { return };
    let mut out = [0; MAX_HEADER_LEN];
    let header = Header::from(packet.header);
    let len = header.emit(&mut out);
    assert_eq!(len, header.wire_len());
    // The reserved bytes of a CNP are sent as zeros, whatever came.
    let kept = if packet.header.bth.opcode == Opcode::Cnp {
        BTH_LEN
    } else {
        len
    };
    assert_eq!(out[..kept], data[..kept]);
    assert_eq!(
        len + packet.payload.len() + usize::from(packet.header.bth.pad) + ICRC_LEN,
        data.len()
    );
}
