//! Private data of the connection manager's messages: RDMA_CM's header, and what a service puts there.

use ::lnet::proto::{Message as Kib, Reject as KibReject};
use ::rds::proto::{Private, Reject as RdsReject};
use ::rtrs::proto::{ConnReq, ConnRsp, MsgFlags, ProtoError};
use roce_port::cm::{
    cma::{CmaHeader, HEADER_LEN},
    mad::Attribute,
};

use super::lnet;
use crate::{
    field::{Base, Field, Layer},
    service::Service,
};

/// Returns the layer of RDMA_CM's header, if private data begins with one.
pub(crate) fn rdma_cm(data: &[u8], at: usize) -> Option<Layer> {
    let header = CmaHeader::parse(data)?;
    let mut layer = Layer::new("RDMA_CM", Base::Packet);
    layer.summary = format!("from {} port {} to {}", header.src, header.port, header.dst);
    layer.push("CMA version", data[0], at, 1);
    layer.push("IP version", data[1] >> 4, at + 1, 1);
    layer.push("source port", header.port, at + 2, 2);
    layer.push("source address", header.src, at + 4, 16);
    layer.push("destination address", header.dst, at + 20, 16);
    Some(layer)
}

/// Bytes of RDMA_CM's header.
pub(crate) const CMA_LEN: usize = HEADER_LEN;

/// Returns whether the private data of a REQ, behind RDMA_CM's header, is that of RTRS.
pub(crate) fn is_rtrs(data: &[u8]) -> bool {
    !matches!(
        ConnReq::parse(data),
        Err(ProtoError::Magic(_) | ProtoError::Short { .. })
    )
}

/// Returns the layer of a service's private data. `port` is the one that the REQ names.
pub(crate) fn layer(service: Service, port: u16, kind: Attribute, data: &[u8], at: usize) -> Option<Layer> {
    let found = match (service, kind) {
        (Service::Rtrs, Attribute::Req) => Some(rtrs_request(data, at)),
        (Service::Rtrs, Attribute::Rep | Attribute::Rej) => Some(rtrs_response(data, at, kind)),
        (Service::Rds, Attribute::Req | Attribute::Rep) => Some(rds(port, data, at)),
        (Service::Rds, Attribute::Rej) => Some(rds_reject(data, at)),
        (Service::Lnet, Attribute::Req | Attribute::Rep) => Some(kib(data, at)),
        (Service::Lnet, Attribute::Rej) => Some(kib_reject(data, at)),
        _ => None,
    };
    if data.iter().all(|b| *b == 0) {
        return None;
    }
    found.or_else(|| {
        let mut layer = Layer::new("private data", Base::Packet);
        layer.fields.push(Field::bytes("private data", data, at));
        Some(layer)
    })
}

/// Returns a layer of bytes that can't be read.
fn failed(name: &'static str, why: impl std::fmt::Display, data: &[u8], at: usize) -> Layer {
    let mut layer = Layer::new(name, Base::Packet);
    layer.summary = format!("{name}: {why}");
    layer.fields.push(Field::not_understood(why, data, at));
    layer
}

fn rtrs_request(data: &[u8], at: usize) -> Layer {
    let req = match ConnReq::parse(data) {
        Ok(req) => req,
        Err(why) => return failed("RTRS", why, data, at),
    };
    let mut layer = Layer::new("RTRS", Base::Packet);
    layer.summary = format!(
        "RTRS connection request, connection {} of {}, path {}, session {}{}",
        req.cid,
        req.cid_num,
        req.path_uuid,
        req.session_uuid,
        if req.first_conn() { ", new session" } else { "" }
    );
    layer.push("magic", format!("{:#06x}", ::rtrs::proto::MAGIC), at + 2, 2);
    layer.push("version", format!("{}.{}", data[5], data[4]), at + 4, 2);
    layer.push("connection", req.cid, at + 6, 2);
    layer.push("connections", req.cid_num, at + 8, 2);
    layer.push("reconnects", req.recon_cnt, at + 10, 2);
    layer.push("path", req.path_uuid, at + 12, 16);
    layer.push("session", req.session_uuid, at + 28, 16);
    layer.push("new session", req.first_conn(), at + 44, 1);
    layer
}

fn rtrs_response(data: &[u8], at: usize, kind: Attribute) -> Layer {
    let rsp = match ConnRsp::parse(data) {
        Ok(rsp) => rsp,
        Err(why) => return failed("RTRS", why, data, at),
    };
    let mut layer = Layer::new("RTRS", Base::Packet);
    let names: Vec<_> = rsp.flags().iter_names().map(|(name, _)| name).collect();
    layer.summary = match kind {
        Attribute::Rej => format!("RTRS reject, error {}", rsp.errno()),
        _ => format!(
            "RTRS connection response, queue depth {}, I/O up to {} bytes{}",
            rsp.queue_depth,
            rsp.max_io_size,
            if rsp.flags().contains(MsgFlags::NEW_RKEY) {
                ", new keys"
            } else {
                ""
            }
        ),
    };
    layer.push("magic", format!("{:#06x}", ::rtrs::proto::MAGIC), at, 2);
    layer.push("version", format!("{}.{}", data[3], data[2]), at + 2, 2);
    layer.push("error", rsp.errno(), at + 4, 2);
    layer.push("queue depth", rsp.queue_depth, at + 6, 2);
    layer.push("largest I/O", rsp.max_io_size, at + 8, 4);
    layer.push("room for headers", rsp.max_hdr_size, at + 12, 4);
    layer.push(
        "flags",
        format!("{:#x} {}", rsp.flags().bits(), names.join(" ")),
        at + 16,
        4,
    );
    layer
}

fn rds(port: u16, data: &[u8], at: usize) -> Layer {
    let private = match Private::parse(port, data) {
        Ok(private) => private,
        Err(why) => return failed("RDS", why, data, at),
    };
    let (common, (src, dst)) = (private.common(), private.addresses());
    let mut layer = Layer::new("RDS", Base::Packet);
    layer.summary = format!("RDS {src} to {dst} version {} tos {}", common.version(), common.tos);
    let len = if src.is_ipv4() { 4 } else { 16 };
    layer.push("source address", src, at, len);
    layer.push("destination address", dst, at + len, len);
    let at = at + 2 * len;
    layer.push("version", common.version(), at, 2);
    layer.push("minor versions", format!("{:#06x}", common.minors), at + 2, 2);
    layer.push("type of service", common.tos, at + 4, 1);
    layer.push("last sequence received", common.ack_seq, at + 8, 8);
    layer.push("credits", common.credits, at + 16, 4);
    layer
}

fn rds_reject(data: &[u8], at: usize) -> Layer {
    let reject = match RdsReject::parse(data) {
        Ok(reject) => reject,
        Err(why) => return failed("RDS", why, data, at),
    };
    let mut layer = Layer::new("RDS", Base::Packet);
    let then = if reject.retries() {
        "connects again"
    } else {
        "waits for ever"
    };
    layer.summary = format!("RDS reject {}", reject.0);
    layer.push("reject", format!("{} (a kernel {then})", reject.0), at, RdsReject::LEN);
    layer
}

fn kib(data: &[u8], at: usize) -> Layer {
    match Kib::parse(data) {
        Ok(message) => lnet::message_layer(&message, data, Base::Packet, at),
        Err(why) => lnet::failed_layer(&why, data, Base::Packet, at),
    }
}

fn kib_reject(data: &[u8], at: usize) -> Layer {
    let reject = match KibReject::parse(data) {
        Ok(reject) => reject,
        Err(why) => return failed("LNet", why, data, at),
    };
    let mut layer = Layer::new("LNet", Base::Packet);
    layer.summary = format!("LNet reject: {}", reject.why);
    layer.push("magic", format!("{:#x}", ::lnet::proto::MAGIC), at, 4);
    layer.push("version", format!("{:#x}", reject.version), at + 4, 2);
    layer.push("reason", reject.why, at + 6, 1);
    layer.push("incarnation", format!("{:#x}", reject.incarnation), at + 8, 8);
    layer.fields.push(lnet::conn_params(&reject.params, at + 16));
    layer
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    #[test]
    fn a_reject_of_rtrs_has_its_error() {
        let mut data = ConnRsp::reject(104).as_bytes().to_vec();
        data.resize(148, 0);
        let found = layer(Service::Rtrs, 1234, Attribute::Rej, &data, 128).unwrap();
        assert_eq!(found.summary, "RTRS reject, error 104");
        assert!(
            found
                .fields
                .iter()
                .all(|f| f.offset >= 128 && f.offset + f.len <= 128 + ConnRsp::LEN)
        );
    }

    #[test]
    fn private_data_of_other_services_is_shown_as_bytes() {
        let found = layer(Service::Other, 7, Attribute::Req, b"hello\0\0", 10).unwrap();
        assert_eq!(found.fields[0].value, "68656c6c6f and 2 zero bytes");
        assert!(layer(Service::Other, 7, Attribute::Req, &[0; 56], 10).is_none());
        let rtrs = layer(Service::Rtrs, 7, Attribute::Rep, b"hello", 10).unwrap();
        assert_eq!(rtrs.fields[0].name, crate::field::NOT_UNDERSTOOD);
    }
}
