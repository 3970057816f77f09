//! INIT_QP_ATTR: what a program's queue pair must be set to (`rdma_init_qp_attr`, `ib_cm_init_qp_attr`).

use roce::{AccessFlags, QpState, verbs::attr::QpAttrMask};
use roce_port::cm::ConnTransport;

use super::{
    Errno, Result,
    abi::QpAttrResp,
    backend::Backend,
    context::{Context, Service},
    query::{PORT, Path},
    state::State,
};

/// Attributes of queue pairs that answer reliably: RC, and the target of an XRC connection.
const RESPONDER: QpAttrMask = QpAttrMask::MAX_DEST_RD_ATOMIC.union(QpAttrMask::MIN_RNR_TIMER);
/// Attributes of queue pairs that ask reliably: RC, and the initiator of an XRC connection.
const REQUESTER: QpAttrMask = QpAttrMask::RETRY_CNT
    .union(QpAttrMask::RNR_RETRY)
    .union(QpAttrMask::MAX_RD_ATOMIC);

/// Returns the attributes of the transitions to RTR and RTS beyond those of unreliable queue pairs (`cm_init_qp_rtr_attr`,
/// `cm_init_qp_rts_attr`).
fn extra(transport: ConnTransport, passive: bool) -> (QpAttrMask, QpAttrMask) {
    let none = QpAttrMask::empty();
    match transport {
        ConnTransport::Rc => (RESPONDER, REQUESTER | QpAttrMask::TIMEOUT),
        ConnTransport::Xrc if passive => (RESPONDER, QpAttrMask::TIMEOUT),
        ConnTransport::Xrc => (none, REQUESTER | QpAttrMask::TIMEOUT),
        ConnTransport::Uc => (none, none),
    }
}

const INIT: QpAttrMask = QpAttrMask::STATE.union(QpAttrMask::PKEY_INDEX).union(QpAttrMask::PORT);

/// The attributes for a transition to `state` (`enum ibv_qp_state`).
///
/// # Errors
/// EINVAL when the id does not know them yet or not any more.
pub(crate) fn attributes<B: Backend>(ctx: &Context<B>, state: u32) -> Result<QpAttrResp> {
    if state > QpState::Err as u32 {
        return Err(Errno::INVAL);
    }
    ctx.cma_dev()?;
    let mut attr = QpAttrResp {
        state,
        ..QpAttrResp::default()
    };
    let connecting = ctx.handle.is_some() && ctx.state == State::Connect;
    let mask = match ctx.service {
        Service::Datagram => {
            attr.qkey = ctx.qkey();
            attr.port_num = PORT;
            INIT | QpAttrMask::QKEY
        }
        _ if ctx.handle.is_none() => {
            attr.port_num = PORT;
            INIT | QpAttrMask::ACCESS_FLAGS
        }
        _ if !connecting => return Err(Errno::INVAL),
        _ if state == QpState::Init as u32 => init(ctx, &mut attr),
        _ if state == QpState::Rtr as u32 => rtr(ctx, &mut attr)?,
        _ if state == QpState::Rts as u32 => rts(ctx, &mut attr)?,
        _ => return Err(Errno::INVAL),
    };
    attr.mask = mask.bits();
    if let Some(timeout) = ctx.ack_timeout.filter(|_| mask.contains(QpAttrMask::TIMEOUT)) {
        attr.timeout = timeout;
    }
    Ok(attr)
}

fn init<B: Backend>(ctx: &Context<B>, attr: &mut QpAttrResp) -> QpAttrMask {
    let mut access = AccessFlags::REMOTE_WRITE;
    if ctx.path.map_or(ctx.responder_resources, |p| p.responder_resources) > 0 {
        access |= AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC;
    }
    attr.access = access.bits();
    attr.port_num = PORT;
    INIT | QpAttrMask::ACCESS_FLAGS
}

fn rtr<B: Backend>(ctx: &Context<B>, attr: &mut QpAttrResp) -> Result<QpAttrMask> {
    let path = ctx.path.ok_or(Errno::INVAL)?;
    attr.ah_attr = Path::of(ctx)?.ah();
    attr.path_mtu = path.mtu as i32;
    attr.dest_qp_num = path.qpn.value();
    attr.rq_psn = ctx.psn;
    attr.max_dest_rd_atomic = path.responder_resources;
    let base = QpAttrMask::STATE | QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
    Ok(base | extra(path.transport, ctx.passive).0)
}

fn rts<B: Backend>(ctx: &Context<B>, attr: &mut QpAttrResp) -> Result<QpAttrMask> {
    let path = ctx.path.ok_or(Errno::INVAL)?;
    attr.sq_psn = path.sq_psn.value();
    attr.retry_cnt = path.retry_cnt;
    attr.rnr_retry = path.rnr_retry;
    attr.max_rd_atomic = path.initiator_depth;
    attr.timeout = path.timeout;
    Ok(QpAttrMask::STATE | QpAttrMask::SQ_PSN | extra(path.transport, ctx.passive).1)
}
