//! Converts queue pair attributes between `ibv_qp_attr` and the transport's `QpAttr`.

use roce::{
    AccessFlags, Mtu, Psn, QpAttr, QpState, Qpn, RnrTimer,
    verbs::{PathMigState, QpAttrMask as M},
};

use crate::{
    abi::{IBV_QPT_XRC_RECV, IBV_QPT_XRC_SEND, c_enum, ibv_qp_attr},
    ah,
    core::Core,
    gids, mr,
    ret::{Errno, Result},
};

/// Returns the transport's state for an `ibv_qp_state`, or EINVAL.
fn state(value: c_enum) -> Result<QpState> {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    [Reset, Init, Rtr, Rts, Sqd, Sqe, Err]
        .into_iter()
        .find(|s| *s as c_enum == value)
        .ok_or_else(|| Errno::INVAL.because(format_args!("{value} is no state of a queue pair")))
}

/// Attributes that this device does not have: an alternate path, a rate limit (`IBV_QP_RATE_LIMIT`).
const UNSUPPORTED: u32 = M::ALT_PATH.bits() | 1 << 25;

/// Removes the attributes that uverbs ignores for a type of queue pair (`modify_qp_mask`).
///
/// Each half of an XRC connection ignores attributes of the other half; perftest sets both.
fn without_ignored(kind: c_enum, mask: u32) -> u32 {
    let ignored = match kind {
        IBV_QPT_XRC_SEND => M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
        IBV_QPT_XRC_RECV => M::MAX_RD_ATOMIC | M::RETRY_CNT | M::RNR_RETRY,
        _ => M::empty(),
    };
    mask & !ignored.bits()
}

/// Converts the arguments of `ibv_modify_qp` for a queue pair of type `kind`.
///
/// # Errors
/// EINVAL for values out of range, EOPNOTSUPP for attributes that this device does not have.
pub(crate) fn from_c(core: &Core, kind: c_enum, a: &ibv_qp_attr, mask: u32) -> Result<QpAttr> {
    if mask & UNSUPPORTED != 0 {
        return Err(Errno::NOTSUP
            .because("IBV_QP_ALT_PATH and IBV_QP_RATE_LIMIT: this device has no alternate path and no rate limit"));
    }
    let mask = without_ignored(kind, mask);
    // No state transition changes queue sizes (`qp_state_table`).
    let known = M::from_bits(mask).filter(|m| !m.contains(M::CAP));
    let mask = known
        .ok_or_else(|| Errno::INVAL.because(format_args!("attr_mask {mask:#x} has unknown bits or IBV_QP_CAP")))?;
    let mut out = QpAttr::default();
    let has = |bit: M| mask.contains(bit);
    if has(M::STATE) {
        out.state = Some(state(a.qp_state)?);
    }
    if has(M::CUR_STATE) {
        out.cur_state = Some(state(a.cur_qp_state)?);
    }
    if has(M::PATH_MIG_STATE) {
        if a.path_mig_state != PathMigState::Migrated as c_enum {
            return Err(Errno::NOTSUP.because("path_mig_state: this device has no alternate path"));
        }
        out.path_mig_state = Some(PathMigState::Migrated);
    }
    if has(M::ACCESS_FLAGS) {
        out.access = Some(mr::access_flags(a.qp_access_flags)?);
    }
    if has(M::AV) {
        out.av = Some(ah::address_vector(core, &a.ah_attr)?);
    }
    if has(M::PATH_MTU) {
        let mtu = u8::try_from(a.path_mtu).ok().and_then(Mtu::from_code);
        let no_mtu = || {
            Errno::INVAL.because(format_args!(
                "path_mtu {}: expected IBV_MTU_256 (1) to IBV_MTU_4096 (5)",
                a.path_mtu
            ))
        };
        out.path_mtu = Some(mtu.ok_or_else(no_mtu)?);
    }
    out.en_sqd_async_notify = has(M::EN_SQD_ASYNC_NOTIFY).then_some(a.en_sqd_async_notify != 0);
    out.pkey_index = has(M::PKEY_INDEX).then_some(a.pkey_index);
    out.port = has(M::PORT).then_some(a.port_num);
    out.qkey = has(M::QKEY).then_some(a.qkey);
    out.timeout = has(M::TIMEOUT).then_some(a.timeout);
    out.retry_cnt = has(M::RETRY_CNT).then_some(a.retry_cnt);
    out.rnr_retry = has(M::RNR_RETRY).then_some(a.rnr_retry);
    out.rq_psn = has(M::RQ_PSN).then(|| Psn::new(a.rq_psn));
    out.max_rd_atomic = has(M::MAX_RD_ATOMIC).then_some(a.max_rd_atomic);
    out.min_rnr_timer = has(M::MIN_RNR_TIMER).then(|| RnrTimer::new(a.min_rnr_timer));
    out.sq_psn = has(M::SQ_PSN).then(|| Psn::new(a.sq_psn));
    out.max_dest_rd_atomic = has(M::MAX_DEST_RD_ATOMIC).then_some(a.max_dest_rd_atomic);
    out.dest_qpn = has(M::DEST_QPN).then(|| Qpn::new(a.dest_qp_num));
    Ok(out)
}

/// Converts attributes to what `ibv_query_qp` reports.
pub(crate) fn to_c(core: &Core, q: &QpAttr) -> ibv_qp_attr {
    let state = q.state.unwrap_or_default() as c_enum;
    let mut a = ibv_qp_attr {
        qp_state: state,
        cur_qp_state: q.cur_state.map_or(state, |s| s as c_enum),
        path_mtu: q.path_mtu.map_or(0, |m| m as c_enum),
        path_mig_state: q.path_mig_state.unwrap_or_default() as c_enum,
        qkey: q.qkey.unwrap_or(0),
        rq_psn: q.rq_psn.map_or(0, Psn::value),
        sq_psn: q.sq_psn.map_or(0, Psn::value),
        dest_qp_num: q.dest_qpn.map_or(0, Qpn::value),
        qp_access_flags: q.access.map_or(0, |f: AccessFlags| f.bits()),
        pkey_index: q.pkey_index.unwrap_or(0),
        en_sqd_async_notify: q.en_sqd_async_notify.unwrap_or(false).into(),
        sq_draining: q.sq_draining.into(),
        max_rd_atomic: q.max_rd_atomic.unwrap_or(0),
        max_dest_rd_atomic: q.max_dest_rd_atomic.unwrap_or(0),
        min_rnr_timer: q.min_rnr_timer.map_or(0, RnrTimer::code),
        port_num: q.port.unwrap_or(1),
        timeout: q.timeout.unwrap_or(0),
        retry_cnt: q.retry_cnt.unwrap_or(0),
        rnr_retry: q.rnr_retry.unwrap_or(0),
        ..ibv_qp_attr::default()
    };
    if let Some(av) = q.av {
        let grh = &mut a.ah_attr.grh;
        grh.dgid = gids::gid_of(av.remote);
        grh.sgid_index = core
            .device
            .gids
            .find(av.local)
            .and_then(|i| u8::try_from(i).ok())
            .unwrap_or(0);
        grh.hop_limit = av.hop_limit;
        grh.traffic_class = av.traffic_class;
        a.ah_attr.is_global = 1;
    }
    a.ah_attr.port_num = a.port_num;
    a
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::IBV_QPT_RC;

    #[test]
    fn xrc_ignores_attributes_of_the_other_half() {
        let receive = M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        let send = M::MAX_RD_ATOMIC | M::RETRY_CNT | M::RNR_RETRY;
        let all = M::all().bits();
        assert_eq!(without_ignored(IBV_QPT_XRC_SEND, all), all & !receive.bits());
        assert_eq!(without_ignored(IBV_QPT_XRC_RECV, all), all & !send.bits());
        assert_eq!(without_ignored(IBV_QPT_RC, all), all);
    }
}
