//! Multicast groups: which queue pairs get what is sent to them.

use core::net::IpAddr;
use std::collections::BTreeMap;

use roce_bth::Qpn;
use roce_verbs::{DeviceLimits, QpType, provider::VerbsError};

use crate::port::{Port, invalid};

/// Members by group.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    members: BTreeMap<IpAddr, Vec<Qpn>>,
    total: usize,
}

impl Groups {
    pub(crate) fn members(&self, group: IpAddr) -> &[Qpn] {
        self.members.get(&group).map_or(&[], Vec::as_slice)
    }

    fn add(&mut self, limits: &DeviceLimits, group: IpAddr, qpn: Qpn) -> Result<bool, VerbsError> {
        if self.members(group).contains(&qpn) {
            return Ok(false);
        }
        if self.total >= limits.max_total_mcast_qp_attach as usize {
            return Err(VerbsError::Limit("memberships in multicast groups"));
        }
        if !self.members.contains_key(&group) && self.members.len() >= limits.max_mcast_grp as usize {
            return Err(VerbsError::Limit("multicast groups"));
        }
        if self.members(group).len() >= limits.max_mcast_qp_attach as usize {
            return Err(VerbsError::Limit("queue pairs of a multicast group"));
        }
        self.members.entry(group).or_default().push(qpn);
        self.total += 1;
        Ok(true)
    }

    fn remove(&mut self, group: IpAddr, qpn: Qpn) -> bool {
        let Some(members) = self.members.get_mut(&group) else {
            return false;
        };
        let before = members.len();
        members.retain(|m| *m != qpn);
        let removed = members.len() < before;
        if members.is_empty() {
            self.members.remove(&group);
        }
        self.total -= usize::from(removed);
        removed
    }

    /// Takes a queue pair out of all groups.
    pub(crate) fn forget(&mut self, qpn: Qpn) {
        let groups: Vec<IpAddr> = self.of(qpn).collect();
        for group in groups {
            self.remove(group, qpn);
        }
    }

    fn of(&self, qpn: Qpn) -> impl Iterator<Item = IpAddr> {
        self.members
            .iter()
            .filter(move |(_, m)| m.contains(&qpn))
            .map(|(g, _)| *g)
    }
}

impl Port {
    /// Has what is sent to a group delivered to a datagram queue pair (`ibv_attach_mcast`). The driver must see to it that
    /// the group's packets arrive. `false`: it is a member already.
    ///
    /// # Errors
    /// When the address is no group's, the queue pair does not take datagrams, or a limit is reached.
    pub fn attach_mcast(&mut self, qpn: Qpn, group: IpAddr) -> Result<bool, VerbsError> {
        let group = group.to_canonical();
        let qp_type = self.qps[self.slot(qpn)?].qp.config().qp_type;
        if qp_type != QpType::Ud {
            return Err(invalid("only UD queue pairs can be members of multicast groups"));
        }
        if !group.is_multicast() {
            return Err(VerbsError::Address(format!(
                "{group} is not a multicast group's address"
            )));
        }
        self.groups.add(&self.config.limits, group, qpn)
    }

    /// Ends a membership.
    ///
    /// # Errors
    /// When the queue pair is not a member.
    pub fn detach_mcast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), VerbsError> {
        match self.groups.remove(group.to_canonical(), qpn) {
            true => Ok(()),
            false => Err(invalid(format_args!("the queue pair is not a member of {group}"))),
        }
    }

    /// The groups that a queue pair is a member of.
    pub fn mcast_groups(&self, qpn: Qpn) -> Vec<IpAddr> {
        self.groups.of(qpn).collect()
    }
}
