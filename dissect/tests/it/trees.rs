//! Trees of fields, and their JSON.

use ferroce_dissect::{Base, Field, Layer};
use serde_json::Value;

use crate::common::dissect;

fn field<'a>(layer: &'a Layer, name: &str) -> &'a Field {
    let found = layer.fields.iter().find(|f| f.name == name);
    found.unwrap_or_else(|| panic!("{name} in {layer:#?}"))
}

#[test]
fn a_block_request_is_a_tree_of_its_bytes() {
    let all = dissect("rnbd.pcap");
    // RNBD read in a WRITE of 56 bytes: message of 24 bytes behind a user header of 32.
    let read = &all[34];
    assert_eq!(read.frame, 35);
    let names: Vec<_> = read.layers.iter().map(|l| l.name).collect();
    assert_eq!(names, ["BTH", "RTRS", "RNBD"]);
    let (bth, rtrs, rnbd) = (&read.layers[0], &read.layers[1], &read.layers[2]);
    assert!(read.layers.iter().all(|l| l.base == Base::Packet));
    let reth = field(bth, "RETH");
    assert_eq!((reth.offset, reth.len, reth.children.len()), (12, 16, 3));
    assert_eq!(field(bth, "immediate data").offset, 28);
    let payload = field(bth, "payload").offset;
    assert_eq!(payload, 32);
    let device = field(rnbd, "device");
    assert_eq!(
        (device.offset, device.len, device.value.as_str()),
        (payload + 4, 4, "0")
    );
    let descriptor = field(rtrs, "descriptor");
    assert_eq!((descriptor.offset, descriptor.len), (payload + 32 + 8, 16));
    assert_eq!(descriptor.children[2].value, "4096");
    assert_eq!(field(rtrs, "chunk").len, 0, "of the immediate");
}

#[test]
fn a_message_of_several_packets_has_offsets_in_the_message() {
    let all = dissect("rnbd.pcap");
    let info = &all[16];
    assert_eq!(info.frame, 17);
    let rtrs = info.layer("RTRS").unwrap();
    assert_eq!(rtrs.base, Base::Message);
    let pieces: Vec<_> = rtrs.fields.iter().filter(|f| f.name == "descriptor").collect();
    assert_eq!(pieces.len(), 512);
    assert_eq!((pieces[0].offset, pieces[511].offset), (8, 8 + 511 * 16));
}

#[test]
fn json_has_the_keys_of_the_types() {
    let all = dissect("lnet/ping.pcap");
    let json: Value = serde_json::to_value(&all[5]).unwrap();
    assert_eq!(json["frame"], 6);
    assert_eq!(json["service"], "lnet");
    assert_eq!(json["connection"], 1);
    assert_eq!(json["exchange"], 2);
    assert_eq!(json["repeated"], false);
    assert_eq!(json["layers"][1]["name"], "LNet");
    assert_eq!(json["layers"][1]["base"], "packet");
    let fields = json["layers"][1]["fields"].as_array().unwrap();
    let header = fields.iter().find(|f| f["name"] == "LNet header").unwrap();
    assert_eq!((&header["offset"], &header["len"]), (&(12 + 48).into(), &72.into()));
    assert_eq!(header["children"][4]["value"], "REPLY");
}
