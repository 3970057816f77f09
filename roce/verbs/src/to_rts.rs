//! The way of a queue pair to RTS.

use crate::{AccessFlags, AddressVector, Mtu, Psn, QpAttr, QpAttrMask as M, QpState, QpType, Qpn, RnrTimer, legal};

/// All that takes a queue pair of any service from RESET to RTS. A step carries what its transition requires
/// ([`legal::transition`]) and nothing else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ToRts {
    /// Rights of the peer.
    pub access: AccessFlags,
    /// Queue key (UD).
    pub qkey: u32,
    /// Path to the peer.
    pub av: AddressVector,
    /// Path MTU.
    pub path_mtu: Mtu,
    /// The peer's queue pair.
    pub dest_qpn: Qpn,
    /// First PSN expected.
    pub rq_psn: Psn,
    /// First PSN sent.
    pub sq_psn: Psn,
    /// Outstanding READs and atomics as responder.
    pub max_dest_rd_atomic: u8,
    /// Outstanding READs and atomics as requester.
    pub max_rd_atomic: u8,
    /// Waiting time that RNR NAKs ask for.
    pub min_rnr_timer: RnrTimer,
    /// Local ACK timeout code: 4.096 us * 2^code, 0 = for ever.
    pub timeout: u8,
    /// Retries after timeouts and sequence errors, 0 to 7.
    pub retry_cnt: u8,
    /// Retries after RNR NAK, 7 = for ever.
    pub rnr_retry: u8,
}

impl ToRts {
    /// Usual values: every remote access but flushes, PSNs from 0, 4 READs, 0.64 ms after RNR NAK, 67 ms and 7 retries.
    pub const fn new(av: AddressVector, path_mtu: Mtu, dest_qpn: Qpn) -> Self {
        Self {
            access: AccessFlags::REMOTE_WRITE
                .union(AccessFlags::REMOTE_READ)
                .union(AccessFlags::REMOTE_ATOMIC),
            qkey: 0,
            av,
            path_mtu,
            dest_qpn,
            rq_psn: Psn::new(0),
            sq_psn: Psn::new(0),
            max_dest_rd_atomic: 4,
            max_rd_atomic: 4,
            min_rnr_timer: RnrTimer::new(12),
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
        }
    }

    /// The step to a state: INIT, RTR or RTS. Any other needs nothing but its name.
    pub fn step(&self, qp_type: QpType, to: QpState) -> QpAttr {
        let from = match to {
            QpState::Rtr => QpState::Init,
            QpState::Rts => QpState::Rtr,
            _ => QpState::Reset,
        };
        let required = legal::transition(qp_type, from, to).map_or(M::empty(), |t| t.required);
        let has = |mask| required.contains(mask);
        QpAttr {
            state: Some(to),
            access: has(M::ACCESS_FLAGS).then_some(self.access),
            pkey_index: has(M::PKEY_INDEX).then_some(0),
            port: has(M::PORT).then_some(1),
            qkey: has(M::QKEY).then_some(self.qkey),
            av: has(M::AV).then_some(self.av),
            path_mtu: has(M::PATH_MTU).then_some(self.path_mtu),
            dest_qpn: has(M::DEST_QPN).then_some(self.dest_qpn),
            rq_psn: has(M::RQ_PSN).then_some(self.rq_psn),
            max_dest_rd_atomic: has(M::MAX_DEST_RD_ATOMIC).then_some(self.max_dest_rd_atomic),
            min_rnr_timer: has(M::MIN_RNR_TIMER).then_some(self.min_rnr_timer),
            timeout: has(M::TIMEOUT).then_some(self.timeout),
            retry_cnt: has(M::RETRY_CNT).then_some(self.retry_cnt),
            rnr_retry: has(M::RNR_RETRY).then_some(self.rnr_retry),
            sq_psn: has(M::SQ_PSN).then_some(self.sq_psn),
            max_rd_atomic: has(M::MAX_RD_ATOMIC).then_some(self.max_rd_atomic),
            ..QpAttr::default()
        }
    }

    /// The steps to INIT, RTR and RTS.
    pub fn steps(&self, qp_type: QpType) -> [QpAttr; 3] {
        [QpState::Init, QpState::Rtr, QpState::Rts].map(|to| self.step(qp_type, to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_is_legal_for_every_service() {
        let addr = "192.0.2.1".parse().unwrap();
        let way = ToRts::new(AddressVector::new(addr, addr), Mtu::B1024, Qpn::new(17));
        for qp_type in QpType::ALL {
            let mut from = QpState::Reset;
            for attr in way.steps(qp_type) {
                let to = attr.state.unwrap();
                assert_eq!(
                    legal::check_transition(qp_type, from, to, attr.mask()),
                    Ok(()),
                    "{qp_type:?} {to:?}"
                );
                from = to;
            }
            assert_eq!(from, QpState::Rts);
        }
        let rtr = way.step(QpType::Rc, QpState::Rtr);
        assert_eq!((rtr.dest_qpn, rtr.max_dest_rd_atomic), (Some(Qpn::new(17)), Some(4)));
        assert_eq!(way.step(QpType::Ud, QpState::Rtr).av, None);
    }
}
