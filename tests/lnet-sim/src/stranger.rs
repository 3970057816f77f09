//! Stranger: knows addresses and the protocol, sees nothing, and asks nodes for connections in the name of others.

use std::net::{IpAddr, SocketAddr};

use lnet::proto::{Body, ConnParams, Message, Nid, PORT};
use roce_bth::ROCE_UDP_PORT;
use roce_port::cm::{cma::HEADER_LEN, mad::Mad};
use roce_sim::{
    Frame, Rng,
    forge::{Endpoint, acceptable_req, seal, to_gsi},
};

/// Forges a request to connect from one node to another, which it has no reason to refuse, but sometimes for its private data.
pub(crate) fn request(from: Nid, to: Nid, rng: &mut Rng) -> Frame {
    let addr = |nid: Nid| IpAddr::from(nid.address());
    let end = |nid: Nid| Endpoint {
        addr: addr(nid),
        guid: nid.0,
        port: PORT,
        qpns: Vec::new(),
    };
    let mut req = acceptable_req(&end(from), &end(to), rng);
    let params = ConnParams {
        queue_depth: rng.pick(&[1, 2, 2, 300]),
        max_frags: 256,
        max_msg_size: 4096,
    };
    let message = Message {
        src_stamp: rng.number(),
        dst_stamp: rng.pick(&[0, 0, 0, 7]),
        ..Message::new(from, to, Body::ConnReq(params))
    };
    let data = message.to_bytes();
    req.private_data[HEADER_LEN..HEADER_LEN + data.len()].copy_from_slice(&data);
    let mut bytes = to_gsi(&Mad::new(rng.number(), req).emit(), rng);
    let (src, identification) = (SocketAddr::new(addr(from), ROCE_UDP_PORT), rng.number() as u16);
    seal(src, addr(to), identification, &mut bytes);
    Frame {
        src,
        dst: addr(to),
        tos: 0,
        identification,
        segment_len: 0,
        bytes,
        damaged: false,
    }
}
