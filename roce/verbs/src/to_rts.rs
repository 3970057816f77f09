//! Attributes that take a queue pair to RTS.

use roce_bth::{Psn, Qpn, RnrTimer};

use crate::{
    attr::{AccessFlags, AddressVector, Mtu, QpAttr, QpAttrMask as M, QpState, QpType},
    legal,
};

impl QpAttr {
    /// All that takes a queue pair of any service from RESET to RTS, of which each [step](Self::step) has a part. Usual values: every
    /// remote access but flushes, PSNs from 0, 4 READs, 0.64 ms after RNR NAK, 67 ms and 7 retries.
    pub fn to_rts(av: AddressVector, path_mtu: Mtu, dest_qpn: Qpn) -> Self {
        Self {
            access: Some(AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC),
            pkey_index: Some(0),
            port: Some(1),
            qkey: Some(0),
            av: Some(av),
            path_mtu: Some(path_mtu),
            dest_qpn: Some(dest_qpn),
            rq_psn: Some(Psn::new(0)),
            sq_psn: Some(Psn::new(0)),
            max_dest_rd_atomic: Some(4),
            max_rd_atomic: Some(4),
            min_rnr_timer: Some(RnrTimer::new(12)),
            timeout: Some(14),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            ..Self::default()
        }
    }

    /// Returns the attributes that the transition to INIT, RTR or RTS requires ([`legal::transition`]), and no others. Any other state
    /// needs nothing but its name.
    #[must_use]
    pub fn step(&self, qp_type: QpType, to: QpState) -> Self {
        let from = match to {
            QpState::Rtr => QpState::Init,
            QpState::Rts => QpState::Rtr,
            _ => QpState::Reset,
        };
        let required = legal::transition(qp_type, from, to).map_or(M::empty(), |t| t.required);
        Self {
            state: Some(to),
            ..self.only(required)
        }
    }

    /// The steps to INIT, RTR and RTS.
    pub fn steps(&self, qp_type: QpType) -> [Self; 3] {
        [QpState::Init, QpState::Rtr, QpState::Rts].map(|to| self.step(qp_type, to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_is_legal_for_every_service() {
        let addr = "192.0.2.1".parse().unwrap();
        let way = QpAttr::to_rts(AddressVector::new(addr, addr), Mtu::B1024, Qpn::new(17));
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
