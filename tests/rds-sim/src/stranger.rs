//! Stranger: knows addresses and the protocol, sees nothing, and asks nodes for connections in the name of others.

use std::net::{IpAddr, SocketAddr};

use rds::proto::{ConnCommon, ConnV4, ConnV6, PORT_V4, PORT_V6, Version};
use roce_bth::ROCE_UDP_PORT;
use roce_port::cm::{cma::HEADER_LEN, mad::Mad};
use roce_sim::{
    Frame, Rng,
    forge::{Endpoint, acceptable_req, seal, to_gsi},
};
use zerocopy::IntoBytes as _;

/// Forges a request to connect from one address to another, which a node has no reason to refuse, but sometimes for its private data.
pub(crate) fn request(from: IpAddr, to: IpAddr, rng: &mut Rng) -> Frame {
    let port = if from.is_ipv4() { PORT_V4 } else { PORT_V6 };
    let end = |addr| Endpoint {
        addr,
        guid: guid(addr),
        port,
        qpns: Vec::new(),
    };
    let mut req = acceptable_req(&end(from), &end(to), rng);
    let data = private_data(from, to, rng);
    req.private_data[HEADER_LEN..HEADER_LEN + data.len()].copy_from_slice(&data);
    let mut bytes = to_gsi(&Mad::new(rng.number(), req).emit(), rng);
    let (src, identification) = (SocketAddr::new(from, ROCE_UDP_PORT), rng.number() as u16);
    seal(src, to, identification, &mut bytes);
    Frame {
        src,
        dst: to,
        tos: 0,
        identification,
        segment_len: 0,
        bytes,
        damaged: false,
    }
}

/// Any GUID will do.
fn guid(addr: IpAddr) -> u64 {
    match addr {
        IpAddr::V4(addr) => u32::from(addr).into(),
        IpAddr::V6(addr) => u128::from(addr) as u64,
    }
}

fn private_data(from: IpAddr, to: IpAddr, rng: &mut Rng) -> Vec<u8> {
    let version = rng.pick(&[
        Version::V3_1,
        Version::V3_1,
        Version::V4_1,
        Version { major: 2, minor: 0 },
    ]);
    let common = ConnCommon::new(version, rng.pick(&[0, 0, 8, 77]), rng.number(), rng.pick(&[0, 0, 9]));
    match (from, to) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => ConnV4::new(src, dst, common).as_bytes().to_vec(),
        (IpAddr::V6(src), IpAddr::V6(dst)) => ConnV6::new(src, dst, common).as_bytes().to_vec(),
        _ => Vec::new(),
    }
}
