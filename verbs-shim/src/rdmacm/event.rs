//! Events as librdmacm reads them.

use roce_port::cm::RemoteQp;
use zerocopy::IntoBytes;

use crate::log;

use super::{
    abi::{AhAttr, ConnParam, EventResp, EventType, MAX_PRIVATE_DATA, UdParam, zeroed},
    addr::Addr,
    backend::Backend,
    context::Context,
};

/// `RDMA_CM_EVENT_*` with what belongs to it.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) kind: EventType,
    /// A negative errno, a reject reason, or a SIDR status.
    pub(crate) status: i32,
    pub(crate) param: Param,
    pub(crate) private_data: Vec<u8>,
}

/// The parameters of an event.
#[derive(Debug, Default)]
pub(crate) enum Param {
    /// None.
    #[default]
    None,
    /// The peer's queue pair, and what it offers.
    Conn(RemoteQp),
    /// Destination of datagrams.
    Ud { qpn: u32, qkey: u32, ah: AhAttr },
}

impl Event {
    pub(crate) fn new(kind: EventType) -> Self {
        Self {
            kind,
            status: 0,
            param: Param::None,
            private_data: Vec::new(),
        }
    }

    pub(crate) fn failed(kind: EventType, status: i32) -> Self {
        Self {
            status,
            ..Self::new(kind)
        }
    }

    pub(crate) fn with_data(mut self, data: Vec<u8>) -> Self {
        self.private_data = data;
        self
    }

    pub(crate) fn with(mut self, param: Param) -> Self {
        self.param = param;
        self
    }

    /// Describes an event that reports an error.
    pub(crate) fn failure(&self, local: &Addr, remote: &Addr) -> String {
        let name = match self.kind {
            EventType::AddrError => "RDMA_CM_EVENT_ADDR_ERROR",
            EventType::Unreachable => "RDMA_CM_EVENT_UNREACHABLE",
            EventType::Rejected => "RDMA_CM_EVENT_REJECTED",
            EventType::MulticastJoin => "RDMA_CM_EVENT_MULTICAST_ERROR",
            _ => "an event of RDMA_CM",
        };
        let reason = match (self.kind, self.status) {
            (EventType::Rejected, 8) => "reason 8: nobody listens at the port".to_owned(),
            (EventType::Rejected, 28) => "reason 28: the program there has rejected the request".to_owned(),
            (EventType::Rejected, 26) => "reason 26: the path MTU is too large for it".to_owned(),
            (EventType::Rejected, reason) => format!("reason {reason}"),
            (_, status) if status < 0 => log::error_text(-status),
            (_, status) => format!("status {status}"),
        };
        let from = local.ip().map_or_else(String::new, |ip| format!(" from {ip}"));
        let to = remote.ip().map_or_else(String::new, |ip| format!(" to {ip}"));
        format!("{name}{from}{to}: {reason}")
    }

    /// The structure for an id with datagrams or connections.
    pub(crate) fn emit(&self, uid: u64, id: u32, datagram: bool) -> EventResp {
        let mut resp: EventResp = zeroed();
        resp.uid = uid;
        resp.id = id;
        resp.event = self.kind as u32;
        resp.status = self.status as u32;
        let data = &self.private_data[..self.private_data.len().min(MAX_PRIVATE_DATA - 1)];
        if datagram {
            let mut ud: UdParam = zeroed();
            if let Param::Ud { qpn, qkey, ah } = self.param {
                (ud.qp_num, ud.qkey, ud.ah_attr) = (qpn, qkey, ah);
            }
            ud.private_data[..data.len()].copy_from_slice(data);
            ud.private_data_len = data.len() as u8;
            resp.param.copy_from_slice(ud.as_bytes());
        } else {
            let mut conn: ConnParam = zeroed();
            if let Param::Conn(path) = &self.param {
                conn.qp_num = path.qpn.value();
                conn.responder_resources = path.responder_resources;
                conn.initiator_depth = path.initiator_depth;
                conn.flow_control = path.flow_control.into();
                conn.retry_count = path.retry_cnt;
                conn.rnr_retry_count = path.rnr_retry;
                conn.srq = path.srq.into();
            }
            conn.private_data[..data.len()].copy_from_slice(data);
            conn.private_data_len = data.len() as u8;
            resp.param[..size_of::<ConnParam>()].copy_from_slice(conn.as_bytes());
        }
        resp
    }

    /// The structure for an id.
    pub(crate) fn emit_for<B: Backend>(&self, ctx: &Context<B>, id: u32) -> EventResp {
        self.emit(ctx.uid, id, ctx.service.is_datagram())
    }
}
