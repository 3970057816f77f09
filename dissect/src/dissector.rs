//! State of a dissection, and the way of a packet through the layers.

use std::net::IpAddr;

use ::rtrs::proto::Uuid;
use roce_bth::{Class, Packet, Qpn, Service as Transport};
use roce_port::cm::{
    cma::ServiceId,
    mad::{MAD_LEN, Message as CmMessage},
};

use crate::{
    conns::{Conn, Conns},
    cx::{Cx, Found, Meta},
    exchange::{ExchangeId, Exchanges, Key, Note, Number, Scope},
    field::Dissection,
    flow::{Message, Step},
    layers::{bth, lnet, mad, other, private, rds, rtrs},
    paths::Paths,
    recognize,
    service::Service,
};

/// Dissects the packets of a capture, in their order.
///
/// It learns connections and their services from the connection manager's messages: at most 1024 connections, of which the oldest are
/// dropped, with 64 KiB of unfinished messages each.
#[derive(Debug, Default)]
pub struct Dissector {
    conns: Conns,
    exchanges: Exchanges,
    paths: Paths,
}

impl Dissector {
    /// Creates a dissector that has seen no packet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Dissects the next packet.
    pub fn packet(&mut self, meta: &Meta, packet: &Packet<'_>) -> Dissection {
        let mut dissection = Dissection {
            frame: meta.frame,
            time_ns: meta.time_ns,
            connection: None,
            service: None,
            exchange: None,
            repeated: false,
            layers: vec![bth::layer(packet)],
        };
        let header = packet.header.bth;
        let transport = header.opcode.info().service;
        if header.dest_qp == Qpn::GSI && transport == Transport::Ud {
            self.management(meta, packet, &mut dissection);
            return dissection;
        }
        let (src, dst, qpn) = (meta.src.ip(), meta.dst.ip(), header.dest_qp.value());
        if self.conns.of_packet(src, dst, qpn).is_none() {
            let answers = matches!(header.opcode.info().class, Class::Acknowledge | Class::ReadResponse);
            let known = answers && self.conns.acknowledged((src, dst), qpn, header.psn);
            if let Some(service) = recognize::service(packet).filter(|_| !known) {
                self.recognize((src, dst), qpn, service);
            }
        }
        let Self {
            conns,
            exchanges,
            paths,
        } = self;
        let found = conns.of_packet(src, dst, qpn);
        if let Some((conn, direction)) = found {
            let mut cx = Cx {
                meta,
                conn,
                direction,
                exchanges,
                paths,
            };
            dissection.connection = Some(cx.conn.id);
            dissection.service = Some(cx.conn.service);
            connection(&mut cx, packet, &mut dissection);
        }
        dissection
    }

    /// Enters a connection whose request was not seen.
    fn recognize(&mut self, (src, dst): (IpAddr, IpAddr), qpn: u32, service: Service) {
        let dropped = self
            .conns
            .recognize((src, dst), qpn, service, || self.exchanges.fresh());
        self.forget(dropped);
        let Some((conn, _)) = self.conns.of_packet(src, dst, qpn) else {
            return;
        };
        if service == Service::Rtrs && conn.path.is_none() {
            // A path of its own, with a name that no session has.
            let mut name = [0; 16];
            name[8..].copy_from_slice(&conn.id.to_be_bytes());
            conn.path = Some(Uuid(name));
            self.paths.recognize(Uuid(name));
        }
    }

    fn management(&mut self, meta: &Meta, packet: &Packet<'_>, dissection: &mut Dissection) {
        let at = packet.header.bytes().len();
        let parsed = mad::layer(packet.payload, at);
        dissection.layers.push(parsed.layer);
        let Some(mad) = parsed.mad else { return };
        let kind = mad.message.attribute();
        let data = packet.payload.get(parsed.private_at..MAD_LEN).unwrap_or_default();
        let data = private_data(&mad.message, data);
        let mut data_at = at + parsed.private_at;
        let mut own = data;
        if mad::has_cma(kind)
            && let Some(layer) = private::rdma_cm(data, data_at)
        {
            dissection.layers.push(layer);
            own = data.get(private::CMA_LEN..).unwrap_or_default();
            data_at += private::CMA_LEN;
        }
        if let CmMessage::SidrReq(_) | CmMessage::SidrRep(_) = mad.message {
            dissection.exchange = Some(self.sidr(meta, &mad.message));
            let layer = private::layer(Service::Other, 0, kind, own, data_at);
            dissection.layers.extend(layer);
            return;
        }
        let (id, repeated) = self.learn(meta, &mad.message, own).unzip();
        dissection.repeated = repeated.unwrap_or_default();
        let conn = id.and_then(|id| self.conns.get_mut(id));
        let (service, port) = conn.as_ref().map_or((Service::Other, 0), |c| (c.service, c.port()));
        if let Some(conn) = conn {
            dissection.connection = Some(conn.id);
            dissection.service = Some(conn.service);
            dissection.exchange = Some(conn.exchange);
        }
        let layer = private::layer(service, port, kind, own, data_at);
        dissection.layers.extend(layer);
    }

    /// Learns from a message of the connection manager. Returns the number of its connection, and whether it is a REQ that was seen before.
    fn learn(&mut self, meta: &Meta, message: &CmMessage, private_data: &[u8]) -> Option<(u64, bool)> {
        let ends = (meta.src.ip(), meta.dst.ip());
        if let CmMessage::Req(req) = message {
            let (id, dropped) = self.conns.request(ends, req, || self.exchanges.fresh());
            let Some(dropped) = dropped else {
                return Some((id, true));
            };
            self.forget(dropped);
            let conn = self.conns.get_mut(id)?;
            learn_service(conn, &mut self.paths, req.service_id, private_data);
            return Some((id, false));
        }
        let id = self.conns.of_mad(ends, mad::comm_ids(message))?;
        if let CmMessage::Rep(rep) = message {
            let dropped = self.conns.reply(id, rep);
            self.forget(dropped);
            let conn = self.conns.get_mut(id)?;
            match conn.service {
                Service::Rtrs => {
                    if let Ok(rsp) = ::rtrs::proto::ConnRsp::parse(private_data)
                        && let Some(path) = self.paths.get_mut(conn.path)
                    {
                        path.accept(rsp);
                    }
                }
                Service::Lnet => lnet::accepted(conn, private_data),
                _ => {}
            }
        }
        Some((id, false))
    }

    fn forget(&mut self, conns: Vec<Conn>) {
        for conn in conns {
            self.paths.leave(conn.path);
        }
    }

    /// Returns the exchange of a request and its answer.
    fn sidr(&mut self, meta: &Meta, message: &CmMessage) -> ExchangeId {
        let (asker, number, asks) = match message {
            CmMessage::SidrReq(m) => (meta.src.ip(), m.request_id, true),
            CmMessage::SidrRep(m) => (meta.dst.ip(), m.request_id, false),
            _ => (meta.src.ip(), 0, false),
        };
        let other = if asks { meta.dst.ip() } else { meta.src.ip() };
        let key = Key(Scope::Pair(asker, other, 0), Number::Sidr, number.into());
        if let Some(open) = self.exchanges.get(key) {
            return open.id;
        }
        let id = self.exchanges.fresh();
        self.exchanges.enter(key, meta.open(id, Note::None));
        id
    }
}

/// Returns the private data of a message that has any meaning: that of a REJ, if the consumer sent it.
fn private_data<'a>(message: &CmMessage, data: &'a [u8]) -> &'a [u8] {
    const CONSUMER: u16 = 28;
    match message {
        CmMessage::Rej(rej) if rej.reason != CONSUMER => &[],
        _ => data,
    }
}

/// Finds the service of a new connection.
fn learn_service(conn: &mut Conn, paths: &mut Paths, service_id: u64, private_data: &[u8]) {
    let service = Service::of(ServiceId(service_id));
    conn.service = match service {
        Service::Other if private::is_rtrs(private_data) => Service::Rtrs,
        other => other,
    };
    match conn.service {
        Service::Rtrs => {
            if let Ok(req) = ::rtrs::proto::ConnReq::parse(private_data) {
                conn.path = Some(req.path_uuid);
                conn.cid = req.cid.get();
                paths.join(req.path_uuid);
            }
        }
        Service::Rds => {
            if let Ok(data) = ::rds::proto::Private::parse(conn.port(), private_data) {
                conn.rds_tos = data.common().tos.into();
            }
        }
        _ => {}
    }
}

/// Dissects a packet of a known connection.
fn connection(cx: &mut Cx<'_>, packet: &Packet<'_>, dissection: &mut Dissection) {
    let psn = packet.header.bth.psn;
    let (own, peer) = (cx.direction as usize, cx.direction.reverse() as usize);
    match packet.header.bth.opcode.info().class {
        Class::Send | Class::Write => message(cx, packet, dissection),
        Class::ReadRequest | Class::Atomic | Class::AtomicWrite | Class::Flush => {
            if cx.conn.flows[own].is_done(psn) {
                dissection.repeated = true;
                dissection.exchange = cx.conn.flows[own].exchange(psn);
                return;
            }
            let reth = packet.header.reth();
            let is_read = packet.header.bth.opcode.info().class == Class::ReadRequest;
            let packets = match reth.filter(|_| is_read) {
                Some(reth) => reth.dma_len.div_ceil(cx.conn.mtu).clamp(1, 1 << 23),
                None => 1,
            };
            let exchange = reth.and_then(|reth| match cx.conn.service {
                Service::Rds => Some(rds::rdma(cx, &reth)),
                _ => None,
            });
            dissection.exchange = exchange;
            cx.conn.flows[own].remember((psn, psn.add(packets - 1)), exchange);
        }
        Class::ReadResponse | Class::Acknowledge | Class::AtomicAcknowledge | Class::SelectiveAcknowledge => {
            dissection.exchange = cx.conn.flows[peer].exchange(psn);
        }
        Class::Cnp => {}
    }
}

/// Dissects a packet of a SEND or WRITE.
fn message(cx: &mut Cx<'_>, packet: &Packet<'_>, dissection: &mut Dissection) {
    let (psn, own) = (packet.header.bth.psn, cx.direction as usize);
    match cx.conn.flows[own].push(packet, packet.header.bytes().len()) {
        Step::Whole(message) => {
            let found = layers(cx, &message);
            let exchange = found.exchange.or(message.exchange);
            cx.conn.flows[own].finish(&message, exchange);
            dissection.exchange = exchange;
            dissection.layers.extend(found.layers);
            if message.packets > 1 {
                let text = format!("message of {} packets, {} bytes", message.packets, message.len());
                dissection.layers.insert(1, other::part(text));
            }
        }
        Step::Part { len, starts, repeated } => {
            if starts {
                let exchange = match packet.header.reth() {
                    Some(reth) => begin(cx, &reth),
                    None => begin_send(cx, packet.payload),
                };
                cx.conn.flows[own].set_exchange(exchange);
            }
            dissection.repeated = repeated;
            dissection.exchange = cx.conn.flows[own].exchange(psn);
            if !repeated {
                dissection
                    .layers
                    .push(other::part(format!("part of a message, {len} bytes so far")));
            }
        }
        Step::Repeated => {
            dissection.repeated = true;
            dissection.exchange = cx.conn.flows[own].exchange(psn);
        }
        Step::Lost => {
            let text = "part of a message whose beginning is missing";
            dissection.layers.push(other::part(text.to_owned()));
        }
    }
}

/// Returns the exchange of a WRITE of several packets, when it begins.
fn begin(cx: &mut Cx<'_>, reth: &roce_bth::Reth) -> Option<ExchangeId> {
    match cx.conn.service {
        Service::Rtrs => rtrs::begin(cx, reth),
        Service::Rds => Some(rds::rdma(cx, reth)),
        Service::Lnet => lnet::rdma(cx, reth),
        _ => None,
    }
}

/// Returns the exchange of a SEND of several packets, when it begins.
fn begin_send(cx: &mut Cx<'_>, payload: &[u8]) -> Option<ExchangeId> {
    match cx.conn.service {
        Service::Rtrs => rtrs::begin_send(cx),
        Service::Rds => rds::begin_send(cx, payload),
        Service::Lnet => Some(lnet::begin_send(cx, payload)),
        _ => None,
    }
}

/// Dissects a complete message.
fn layers(cx: &mut Cx<'_>, message: &Message<'_>) -> Found {
    match cx.conn.service {
        Service::Rtrs => rtrs::message(cx, message),
        Service::Rds => rds::message(cx, message),
        Service::Lnet => lnet::message(cx, message),
        _ => other::message(cx, message),
    }
}
