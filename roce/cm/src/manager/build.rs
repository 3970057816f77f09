//! Builds outgoing messages with the kernel's field values (`cm_format_*`, `cma_connect_ib`, `cma_accept_ib`).

use core::time::Duration;

use roce_verbs::{PKey, Psn, Qpn, attr::ack_timeout, provider::RejectReason};

use super::conn::Conn;
use crate::{
    cma::{self, CmaHeader, REQ_PRIVATE_DATA, ServiceId},
    guid,
    mad::{Drep, Dreq, Mra, Rej, Rep, Req, Rtu, Subject, Transport, pad},
    types::{AcceptArgs, CmConfig, CmError, ConnTransport, ConnectArgs},
};

/// Hop limit of paths, as in the kernel's REQs.
pub(super) const HOP_LIMIT: u8 = 64;
/// LID of routed paths (`IB_LID_PERMISSIVE`).
const LID_PERMISSIVE: u16 = 0xffff;

/// Size of a REP's private data, bytes.
const REP_PRIVATE_DATA: usize = 196;

/// Extended transport type of an XRC REQ (IBTA Annex A14).
pub(super) const EXTENDED_XRC: u8 = 1;

/// Returns the time of a code. 0 is the shortest; in a local ACK timeout it means infinite.
pub(super) fn code_time(code: u8) -> Duration {
    ack_timeout(code).unwrap_or(Duration::from_nanos(4096))
}

/// Returns the local ACK timeout code, the exponent of about delay + 2 * lifetime (IBA 12.7.34; `cm_ack_timeout`).
pub(super) fn ack_timeout_code(ack_delay: u8, packet_life_time: u8) -> u8 {
    let twice_life = packet_life_time + 1;
    let code = if twice_life >= ack_delay {
        twice_life + u8::from(ack_delay >= packet_life_time)
    } else {
        ack_delay + u8::from(twice_life + 1 >= ack_delay)
    };
    code.min(31)
}

/// Checks the length of private data and pads it.
pub(super) fn private_data<const N: usize>(data: &[u8]) -> Result<[u8; N], CmError> {
    pad(data).ok_or(CmError::PrivateData {
        given: data.len(),
        max: N,
    })
}

/// Checks the length of an accept's private data.
pub(super) fn check_accept_data(data: &[u8]) -> Result<(), CmError> {
    private_data(data).map(|_: [u8; REP_PRIVATE_DATA]| ())
}

pub(super) fn req(config: &CmConfig, args: &ConnectArgs, comm_id: u32, src_port: u16) -> Result<Req, CmError> {
    let (local, remote) = (args.local.ip(), args.remote.ip());
    let header = CmaHeader {
        port: src_port,
        src: local,
        dst: remote,
    };
    let user: [u8; REQ_PRIVATE_DATA] = private_data(&args.params.private_data)?;
    let mut data = [0; 92];
    data[..cma::HEADER_LEN].copy_from_slice(&header.emit());
    data[cma::HEADER_LEN..].copy_from_slice(&user);
    let (transport, extended_transport) = match args.transport {
        ConnTransport::Rc => (Transport::Rc, 0),
        ConnTransport::Uc => (Transport::Uc, 0),
        ConnTransport::Xrc => (Transport::Extended, EXTENDED_XRC),
    };
    // An XRC initiator answers no requests (`cm_format_req`).
    let is_xrc = args.transport == ConnTransport::Xrc;
    Ok(Req {
        transport,
        extended_transport,
        local_comm_id: comm_id,
        service_id: ServiceId::new(args.space, args.remote.port()).0,
        local_ca_guid: config.ca_guid,
        local_qkey: guid::source_qkey(args.src_port),
        local_qpn: args.qpn,
        responder_resources: if is_xrc { 0 } else { args.params.responder_resources },
        initiator_depth: args.params.initiator_depth,
        remote_cm_response_timeout: config.response_timeout,
        flow_control: args.flow_control,
        starting_psn: args.start_psn,
        local_cm_response_timeout: config.response_timeout,
        retry_count: if is_xrc { 0 } else { args.params.retry_count.min(7) },
        pkey: PKey::DEFAULT,
        path_mtu: args.mtu as u8,
        rnr_retry_count: if is_xrc { 0 } else { args.params.rnr_retry_count.min(7) },
        max_cm_retries: config.max_retries.min(15),
        srq: args.srq && !is_xrc,
        primary_local_lid: LID_PERMISSIVE,
        primary_remote_lid: LID_PERMISSIVE,
        primary_local_gid: local.into(),
        primary_remote_gid: remote.into(),
        primary_flow_label: cma::flow_label(src_port, args.remote.port()),
        primary_traffic_class: args.params.tos.unwrap_or(0),
        primary_hop_limit: HOP_LIMIT,
        primary_ack_timeout: ack_timeout_code(config.ca_ack_delay, config.packet_life_time),
        private_data: data,
        ..Req::default()
    })
}

pub(super) fn rep(config: &CmConfig, c: &Conn, args: &AcceptArgs, depths: (u8, u8)) -> Result<Rep, CmError> {
    if c.offer.transport == ConnTransport::Xrc {
        // An XRC target's QPN is in the EECN field (`cm_format_rep`).
        return Ok(Rep {
            local_comm_id: c.local_id,
            remote_comm_id: c.remote_id.unwrap_or(0),
            local_qkey: guid::source_qkey(args.src_port),
            local_eecn: args.qpn.value(),
            starting_psn: args.start_psn,
            responder_resources: depths.0,
            target_ack_delay: config.ca_ack_delay,
            rnr_retry_count: args.params.rnr_retry_count.min(7),
            srq: true,
            local_ca_guid: config.ca_guid,
            private_data: private_data(&args.params.private_data)?,
            ..Rep::default()
        });
    }
    Ok(Rep {
        local_comm_id: c.local_id,
        remote_comm_id: c.remote_id.unwrap_or(0),
        local_qkey: guid::source_qkey(args.src_port),
        local_qpn: args.qpn,
        starting_psn: Psn::new(args.start_psn.value()),
        responder_resources: depths.0,
        initiator_depth: depths.1,
        target_ack_delay: config.ca_ack_delay,
        flow_control: args.flow_control,
        rnr_retry_count: args.params.rnr_retry_count.min(7),
        srq: args.srq,
        local_ca_guid: config.ca_guid,
        private_data: private_data(&args.params.private_data)?,
        ..Rep::default()
    })
}

/// Returns the queue pair named by a REP (`cm_rep_get_qpn`).
pub(super) fn qpn_of(rep: &Rep, transport: ConnTransport) -> Qpn {
    match transport {
        ConnTransport::Xrc => Qpn::new(rep.local_eecn),
        ConnTransport::Rc | ConnTransport::Uc => rep.local_qpn,
    }
}

pub(super) fn rtu(c: &Conn) -> Rtu {
    Rtu {
        local_comm_id: c.local_id,
        remote_comm_id: c.remote_id.unwrap_or(0),
        ..Rtu::default()
    }
}

pub(super) fn mra(config: &CmConfig, c: &Conn, subject: Subject) -> Mra {
    Mra {
        local_comm_id: c.local_id,
        remote_comm_id: c.remote_id.unwrap_or(0),
        subject,
        service_timeout: config.service_timeout,
        ..Mra::default()
    }
}

/// Builds the REJ of a connection. Truncates additional information to 72 bytes.
pub(super) fn rej(c: &Conn, subject: Subject, reason: RejectReason, info: &[u8], data: [u8; 148]) -> Rej {
    let info = &info[..info.len().min(72)];
    Rej {
        local_comm_id: c.local_id,
        remote_comm_id: c.remote_id.unwrap_or(0),
        subject,
        info_length: info.len() as u8,
        reason: reason.0,
        info: pad(info).unwrap_or([0; 72]),
        private_data: data,
    }
}

/// Builds a REJ without a connection (`cm_issue_rej`). Truncates additional information to 72 bytes.
pub(super) fn bare_rej(local_id: u32, remote_id: u32, subject: Subject, reason: RejectReason, info: &[u8]) -> Rej {
    let info = &info[..info.len().min(72)];
    Rej {
        local_comm_id: local_id,
        remote_comm_id: remote_id,
        subject,
        info_length: info.len() as u8,
        reason: reason.0,
        info: pad(info).unwrap_or([0; 72]),
        ..Rej::default()
    }
}

pub(super) fn dreq(c: &Conn) -> Dreq {
    Dreq {
        local_comm_id: c.local_id,
        remote_comm_id: c.remote_id.unwrap_or(0),
        remote_qpn: c.peer.map(|p| p.qpn).unwrap_or_default(),
        ..Dreq::default()
    }
}

pub(super) fn drep(local_id: u32, remote_id: u32) -> Drep {
    Drep {
        local_comm_id: local_id,
        remote_comm_id: remote_id,
        ..Drep::default()
    }
}
