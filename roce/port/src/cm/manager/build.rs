//! Builds outgoing messages with the kernel's field values (`cm_format_*`, `cma_connect_ib`, `cma_accept_ib`).

use core::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use roce_verbs::{
    AddressVector, Mtu, PKey, Qpn,
    attr::ack_timeout,
    provider::{RejectReason, VerbsError},
};

use super::conn::Conn;
use crate::cm::{
    cma::{self, CmaHeader, ServiceId},
    guid,
    mad::{Rej, Rep, Req, Subject, Transport},
    types::{AcceptArgs, CmConfig, ConnTransport, ConnectArgs, RemoteQp},
};

/// CM response timeout of both sides in our REQs (`CMA_CM_RESPONSE_TIMEOUT`), a code: 4.3 s. Plus two packet lifetimes it is also the
/// longest pause between two of our retransmissions.
pub(super) const RESPONSE_TIMEOUT: u8 = 20;
/// Retransmissions of a REQ, REP or DREQ, also named in our REQs (`CMA_MAX_CM_RETRIES`).
pub(super) const MAX_RETRIES: u8 = 15;
/// Lifetime of packets on paths (`CMA_IBOE_PACKET_LIFETIME`), a code: 1.1 s.
pub(super) const PACKET_LIFE_TIME: u8 = 18;
/// Delay of our ACKs (`RXE_LOCAL_CA_ACK_DELAY`), a code: 0.13 s.
const CA_ACK_DELAY: u8 = 15;
/// Service timeout in our MRAs (`CMA_CM_MRA_SETTING`), a code: 69 s.
pub(super) const SERVICE_TIMEOUT: u8 = 24;
/// Hop limit of paths, as in the kernel's REQs.
const HOP_LIMIT: u8 = 64;
/// LID of routed paths (`IB_LID_PERMISSIVE`).
const LID_PERMISSIVE: u16 = 0xffff;

/// Extended transport type of an XRC REQ (IBTA Annex A14).
pub(super) const EXTENDED_XRC: u8 = 1;

/// Returns the time of a code. 0 is the shortest; in a local ACK timeout it means infinite.
pub(super) fn code_time(code: u8) -> Duration {
    ack_timeout(code).unwrap_or(Duration::from_nanos(4096))
}

/// Returns the local ACK timeout code, the exponent of about delay + 2 * lifetime (IBA 12.7.34; `cm_ack_timeout`).
fn ack_timeout_code(ack_delay: u8) -> u8 {
    let twice_life = PACKET_LIFE_TIME + 1;
    let code = if twice_life >= ack_delay {
        twice_life + u8::from(ack_delay >= PACKET_LIFE_TIME)
    } else {
        ack_delay + u8::from(twice_life + 1 >= ack_delay)
    };
    code.min(31)
}

/// Returns `head` and the consumer's private data, zero-padded.
///
/// # Errors
/// The data is too long.
pub(super) fn private_data<const N: usize>(head: &[u8], data: &[u8]) -> Result<[u8; N], VerbsError> {
    let (given, max) = (data.len(), N - head.len());
    if given > max {
        return Err(VerbsError::Invalid(format!(
            "{given} bytes of private data, at most {max}"
        )));
    }
    let mut out = [0; N];
    let (first, rest) = out.split_at_mut(head.len());
    first.copy_from_slice(head);
    rest[..given].copy_from_slice(data);
    Ok(out)
}

/// Returns the private data of a REP.
///
/// # Errors
/// The data is too long.
pub(super) fn accept_data(data: &[u8]) -> Result<[u8; 196], VerbsError> {
    private_data(&[], data)
}

/// Returns the path between two addresses.
fn address_vector(local: IpAddr, remote: IpAddr, traffic_class: u8) -> AddressVector {
    AddressVector {
        hop_limit: HOP_LIMIT,
        traffic_class,
        ..AddressVector::new(local, remote)
    }
}

/// Returns the peer of a resolution, of which only the address is known.
pub(super) fn datagram_peer(local: SocketAddr, remote: SocketAddr) -> RemoteQp {
    let av = address_vector(local.ip(), remote.ip(), 0);
    RemoteQp::new(av, Mtu::B256, ConnTransport::default())
}

/// Returns the peer of our REQ, of whose queue pair nothing is known.
pub(super) fn requested_peer(args: &ConnectArgs) -> RemoteQp {
    let (local, remote) = (args.local.ip(), args.remote.ip());
    let av = address_vector(local, remote, args.params.tos.unwrap_or(0));
    RemoteQp {
        timeout: ack_timeout_code(CA_ACK_DELAY),
        retry_cnt: args.params.retry_count.min(7),
        ..RemoteQp::new(av, args.mtu, args.qp.transport)
    }
}

/// Returns the queue pair that a peer's REP names.
pub(super) fn replier(c: &Conn, rep: &Rep) -> RemoteQp {
    RemoteQp {
        qpn: qpn_of(rep, c.peer.transport),
        sq_psn: rep.starting_psn,
        responder_resources: rep.initiator_depth,
        initiator_depth: rep.responder_resources,
        timeout: ack_timeout_code(rep.target_ack_delay),
        rnr_retry: rep.rnr_retry_count,
        flow_control: rep.flow_control,
        srq: rep.srq,
        keeps_packets: guid::keeps_packets(rep.local_ca_guid),
        src_port: guid::source_port(rep.local_ca_guid, rep.local_qkey),
        ..c.peer
    }
}

/// Returns the queue pair that a peer's REQ names, within the limits of our port.
pub(super) fn requester(config: &CmConfig, local: IpAddr, remote: IpAddr, req: &Req) -> RemoteQp {
    let av = address_vector(local, remote, req.primary_traffic_class);
    let max = config.mtus.of(local);
    let mtu = usable_mtu(req.path_mtu, max).unwrap_or(max);
    RemoteQp {
        qpn: req.local_qpn,
        sq_psn: req.starting_psn,
        responder_resources: req.initiator_depth,
        initiator_depth: req.responder_resources,
        timeout: match req.primary_ack_timeout {
            0 => ack_timeout_code(CA_ACK_DELAY),
            code => code,
        },
        retry_cnt: req.retry_count,
        rnr_retry: req.rnr_retry_count,
        flow_control: req.flow_control,
        srq: req.srq,
        keeps_packets: guid::keeps_packets(req.local_ca_guid),
        src_port: guid::source_port(req.local_ca_guid, req.local_qkey),
        ..RemoteQp::new(av, mtu, transport_of(req).unwrap_or_default())
    }
}

/// Returns the transport that a REQ requests, if we have it (`cm_req_get_qp_type`).
pub(super) fn transport_of(req: &Req) -> Option<ConnTransport> {
    match (req.transport, req.extended_transport) {
        (Transport::Rc, _) => Some(ConnTransport::Rc),
        (Transport::Uc, _) => Some(ConnTransport::Uc),
        (Transport::Extended, EXTENDED_XRC) => Some(ConnTransport::Xrc),
        _ => None,
    }
}

/// Returns the path MTU with a code, if it is at most `max`.
pub(super) fn usable_mtu(code: u8, max: Mtu) -> Option<Mtu> {
    Mtu::from_code(code).filter(|m| *m <= max)
}

/// Builds a REQ. Addresses are canonical, ports known.
pub(super) fn req(config: &CmConfig, args: &ConnectArgs, comm_id: u32) -> Result<Req, VerbsError> {
    let header = CmaHeader::new(args.local, args.remote);
    let (transport, extended_transport) = match args.qp.transport {
        ConnTransport::Rc => (Transport::Rc, 0),
        ConnTransport::Uc => (Transport::Uc, 0),
        ConnTransport::Xrc => (Transport::Extended, EXTENDED_XRC),
    };
    // An XRC initiator answers no requests (`cm_format_req`).
    let is_xrc = args.qp.transport == ConnTransport::Xrc;
    Ok(Req {
        transport,
        extended_transport,
        local_comm_id: comm_id,
        service_id: ServiceId::new(args.space, args.remote.port()).0,
        local_ca_guid: config.ca_guid,
        local_qkey: guid::source_qkey(args.qp.src_port),
        local_qpn: args.qp.qpn,
        responder_resources: if is_xrc { 0 } else { args.params.responder_resources },
        initiator_depth: args.params.initiator_depth,
        remote_cm_response_timeout: RESPONSE_TIMEOUT,
        flow_control: args.qp.flow_control,
        starting_psn: args.qp.start_psn,
        local_cm_response_timeout: RESPONSE_TIMEOUT,
        retry_count: if is_xrc { 0 } else { args.params.retry_count.min(7) },
        pkey: PKey::DEFAULT,
        path_mtu: args.mtu as u8,
        rnr_retry_count: if is_xrc { 0 } else { args.params.rnr_retry_count.min(7) },
        max_cm_retries: MAX_RETRIES,
        srq: args.qp.srq && !is_xrc,
        primary_local_lid: LID_PERMISSIVE,
        primary_remote_lid: LID_PERMISSIVE,
        primary_local_gid: args.local.ip(),
        primary_remote_gid: args.remote.ip(),
        primary_flow_label: cma::flow_label(args.local.port(), args.remote.port()),
        primary_traffic_class: args.params.tos.unwrap_or(0),
        primary_hop_limit: HOP_LIMIT,
        primary_ack_timeout: ack_timeout_code(CA_ACK_DELAY),
        private_data: private_data(&header.emit(), &args.params.private_data)?,
        ..Req::default()
    })
}

/// Builds the REP of a connection with the depths of this path.
pub(super) fn rep(config: &CmConfig, c: &Conn, args: &AcceptArgs, path: &RemoteQp) -> Result<Rep, VerbsError> {
    // An XRC target's QPN is in the EECN field, and it sends no requests (`cm_format_rep`).
    let is_xrc = c.peer.transport == ConnTransport::Xrc;
    let (qpn, eecn) = match is_xrc {
        true => (Qpn::default(), args.qp.qpn.value()),
        false => (args.qp.qpn, 0),
    };
    Ok(Rep {
        local_qkey: guid::source_qkey(args.qp.src_port),
        local_qpn: qpn,
        local_eecn: eecn,
        starting_psn: args.qp.start_psn,
        responder_resources: path.responder_resources,
        initiator_depth: if is_xrc { 0 } else { path.initiator_depth },
        target_ack_delay: CA_ACK_DELAY,
        flow_control: args.qp.flow_control && !is_xrc,
        rnr_retry_count: args.params.rnr_retry_count.min(7),
        srq: args.qp.srq || is_xrc,
        local_ca_guid: config.ca_guid,
        private_data: accept_data(&args.params.private_data)?,
        ..Rep::between(c.ids())
    })
}

/// Returns the queue pair named by a REP (`cm_rep_get_qpn`).
pub(super) fn qpn_of(rep: &Rep, transport: ConnTransport) -> Qpn {
    match transport {
        ConnTransport::Xrc => Qpn::new(rep.local_eecn),
        ConnTransport::Rc | ConnTransport::Uc => rep.local_qpn,
    }
}

/// Builds a REJ without private data. Truncates additional information to 72 bytes.
pub(super) fn rej(ids: (u32, u32), subject: Subject, reason: RejectReason, info: &[u8]) -> Rej {
    let mut rej = Rej {
        subject,
        info_length: info.len().min(72) as u8,
        reason: reason.0,
        ..Rej::between(ids)
    };
    rej.info.iter_mut().zip(info).for_each(|(to, from)| *to = *from);
    rej
}
