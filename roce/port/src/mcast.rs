//! Multicast groups and their members.

use core::net::IpAddr;
use std::collections::BTreeMap;

use roce_bth::Qpn;
use roce_verbs::{DeviceLimits, provider::VerbsError};

/// Members by group.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    members: BTreeMap<IpAddr, Vec<Qpn>>,
}

impl Groups {
    pub(crate) fn members(&self, group: IpAddr) -> &[Qpn] {
        self.members.get(&group).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn add(&mut self, limits: &DeviceLimits, group: IpAddr, qpn: Qpn) -> Result<bool, VerbsError> {
        if self.members(group).contains(&qpn) {
            return Ok(false);
        }
        if self.members.values().map(Vec::len).sum::<usize>() >= limits.max_total_mcast_qp_attach as usize {
            return Err(VerbsError::Limit("memberships in multicast groups"));
        }
        if !self.members.contains_key(&group) && self.members.len() >= limits.max_mcast_grp as usize {
            return Err(VerbsError::Limit("multicast groups"));
        }
        if self.members(group).len() >= limits.max_mcast_qp_attach as usize {
            return Err(VerbsError::Limit("queue pairs of a multicast group"));
        }
        self.members.entry(group).or_default().push(qpn);
        Ok(true)
    }

    pub(crate) fn remove(&mut self, group: IpAddr, qpn: Qpn) -> bool {
        let Some(members) = self.members.get_mut(&group) else {
            return false;
        };
        let found = members.iter().position(|m| *m == qpn);
        found.map(|at| members.remove(at));
        if members.is_empty() {
            self.members.remove(&group);
        }
        found.is_some()
    }

    /// Removes a queue pair from all groups.
    pub(crate) fn forget(&mut self, qpn: Qpn) {
        self.members.retain(|_, members| {
            members.retain(|m| *m != qpn);
            !members.is_empty()
        });
    }

    pub(crate) fn of(&self, qpn: Qpn) -> impl Iterator<Item = IpAddr> {
        self.members
            .iter()
            .filter(move |(_, m)| m.contains(&qpn))
            .map(|(g, _)| *g)
    }
}
