//! Sockets that a member gets for an address, and the time at which an address is closed.
//!
//! Of two sockets, one bound to the packet's address and one bound to all, the kernel takes the former. So
//!
//! - an address has the group of its own if there is one, else that of all addresses of its IP version;
//! - it gets one of its own only as long as there is none of all;
//! - a member that has all addresses has a socket in their group, and one in the group of each single address, of which there are no
//!   new ones from then on.

use std::{io, net::IpAddr, os::fd::OwnedFd, time::Duration};

use roce_net::now;
use roce_verbs::Instant;

use super::{
    broker::Broker,
    gsi::Gsi,
    requests::{Hold, Member, Outcome, refused},
};
use crate::{
    error::{Error, context},
    group::{Group, GroupError, Steering, bound_to, family_addresses},
    proto::{MAX_GROUPS, Place, Refusal, Reply},
};

/// Time after a start for which groups stay open for living members of a former broker that have not rejoined.
const ABSENT_TIMEOUT: Duration = Duration::from_secs(60);

impl Broker {
    /// Returns the group that packets to an address come to.
    pub(super) fn group_of(&self, addr: IpAddr) -> Option<usize> {
        let covers = || self.groups.iter().find(|(_, g)| g.covers(addr)).map(|(key, _)| key);
        self.own_group(addr).or_else(covers)
    }

    fn own_group(&self, addr: IpAddr) -> Option<usize> {
        let own = self.groups.iter().find(|(_, g)| g.group.addr() == addr);
        own.map(|(key, _)| key)
    }

    /// Opens an address for a member. `given`: the descriptors that it had of a former broker, see
    /// [`Request::Open`](crate::proto::Request::Open).
    pub(super) fn open(&mut self, member: &Member, addr: IpAddr, again: bool, given: Vec<OwnedFd>) -> Outcome {
        let isolated = self.steering == Steering::Array;
        let (sockets, had) = self.take_given(given, member);
        let exactly = again && !had.is_empty();
        let wanted = if exactly { had } else { self.wanted(addr) };
        let groups = self.groups_for(member.uid, &wanted, exactly, sockets.is_empty())?;
        let addrs: Vec<IpAddr> = groups.iter().map(|key| self.groups[*key].group.addr()).collect();
        let client = &mut self.clients[member.key];
        // A further socket would take the place of the first, which brings what comes to another address if it is for all.
        let served = isolated && !again && groups.iter().any(|g| client.opened.contains(g));
        if served && (groups.len() > 1 || addrs == [addr]) {
            return refused(Refusal::Invalid, "the process has its socket of that address");
        }
        client.opened.extend(&groups);
        if let Some(page) = &mut client.page {
            page.add_address(addr);
        }
        let vault = member.trusted && !isolated;
        let fds = match again && isolated {
            _ if served => Ok(vec![]),
            true => self.take_back(member.place, sockets).map(|()| vec![]),
            false => self.hand_out(&groups, member.place, again, vault),
        };
        match fds {
            Ok(fds) => Ok((Reply::Opened { addrs, vault }, fds)),
            Err(e) => refused(Refusal::Internal, format!("the sockets can't be handed out: {e}")),
        }
    }

    /// Returns the groups of addresses, which are opened if need be. `exactly`: each has its own. `may_wait`: for members of a former
    /// broker.
    fn groups_for(&mut self, uid: u32, wanted: &[IpAddr], exactly: bool, may_wait: bool) -> Result<Vec<usize>, Hold> {
        let mut groups = Vec::new();
        for addr in wanted.iter().copied() {
            let present = if exactly {
                self.own_group(addr)
            } else {
                self.group_of(addr)
            };
            if let Some(key) = present {
                groups.push(key);
                continue;
            }
            self.make_room(uid)?;
            match self.open_group(addr, uid) {
                Ok(key) => groups.push(key),
                Err(GroupError::Taken(_)) if may_wait && self.is_rejoining(now()) => return Err(Hold::Later),
                // A host without IPv6 still has the other half of the unspecified address.
                Err(GroupError::System(Error::Io { source, .. }))
                    if wanted.len() > 1 && source.raw_os_error() == Some(libc::EAFNOSUPPORT) => {}
                Err(e) => return refused(Refusal::Address, e.explain()),
            }
        }
        Ok(groups)
    }

    /// Takes what a member brings. Returns the sockets that are to be its own again, and the addresses of which it had some.
    fn take_given(&mut self, given: Vec<OwnedFd>, member: &Member) -> (Vec<OwnedFd>, Vec<IpAddr>) {
        if self.steering == Steering::Array {
            let had = given.iter().filter_map(bound_to).collect();
            return (given, had);
        }
        let had = given.into_iter().filter_map(|fd| match member.trusted {
            true => self.adopt(fd, member.uid),
            false => bound_to(&fd),
        });
        (vec![], had.collect())
    }

    /// Returns the addresses whose groups a member gets sockets of.
    fn wanted(&mut self, addr: IpAddr) -> Vec<IpAddr> {
        let mut wanted = family_addresses(addr);
        if addr.is_unspecified() {
            let versions: Vec<bool> = wanted.iter().map(IpAddr::is_ipv4).collect();
            let single = |one: IpAddr| !one.is_unspecified() && versions.contains(&one.is_ipv4());
            self.close_unused(|g| single(g.group.addr()));
            let groups = self.groups.iter().map(|(_, g)| g.group.addr());
            wanted.extend(groups.filter(|one| single(*one)));
        }
        wanted
    }

    fn hand_out(&self, groups: &[usize], place: Place, again: bool, vault: bool) -> io::Result<Vec<OwnedFd>> {
        let mut fds = Vec::new();
        for key in groups {
            let group = &self.groups[*key].group;
            fds.push(match again {
                true => group.retake(place.slot)?,
                false => group.take(place)?,
            });
            if vault {
                fds.push(group.vault().try_clone_to_owned()?);
            }
        }
        Ok(fds)
    }

    /// Takes the sockets that a member has: each is again the one that its group's packets for the place go to.
    fn take_back(&self, place: Place, sockets: Vec<OwnedFd>) -> io::Result<()> {
        for socket in sockets {
            let key = bound_to(&socket).and_then(|addr| self.own_group(addr));
            let key = key.ok_or(io::ErrorKind::NotFound)?;
            self.groups[key].group.give_again(place, socket)?;
        }
        Ok(())
    }

    /// Takes a group back that a member kept. Returns its address.
    fn adopt(&mut self, vault: OwnedFd, uid: u32) -> Option<IpAddr> {
        let group = match Group::adopt(vault) {
            Ok(group) => group,
            Err(e) => {
                tracing::warn!("a process has kept descriptors that are of no use: {e}");
                return None;
            }
        };
        let addr = group.addr();
        if self.own_group(addr).is_none() {
            tracing::info!(%addr, "a group is taken over");
            if let Err(e) = self.add_group(group, uid) {
                tracing::warn!("a group can't be taken over: {e}");
                return None;
            }
        }
        Some(addr)
    }

    fn open_group(&mut self, addr: IpAddr, uid: u32) -> Result<usize, GroupError> {
        let kept = self.restored.iter().position(|g| g.addr() == addr);
        let group = match kept {
            Some(index) => self.restored.swap_remove(index),
            None => {
                let beside: Vec<IpAddr> = self.groups.iter().map(|(_, g)| g.group.addr()).collect();
                let group = Group::open(addr, self.steering, &beside)?;
                self.notify.keep(addr, group.vault());
                group
            }
        };
        Ok(self.add_group(group, uid).map_err(context("watching a group"))?)
    }

    /// Closes groups unused for `idle`, so that a program without the broker can bind the port.
    pub(super) fn close_idle_groups(&mut self, now: Instant) {
        let absent = !self.slots.absent().is_empty() && now < self.started + ABSENT_TIMEOUT;
        let idle: Vec<(usize, bool)> = self
            .groups
            .iter()
            .map(|(key, _)| (key, !absent && self.is_idle(key)))
            .collect();
        for (key, idle) in idle {
            let Some(gsi) = self.groups.get_mut(key) else { continue };
            gsi.idle_since = if idle { gsi.idle_since.or(Some(now)) } else { None };
        }
        let over = |g: &Gsi| g.idle_since.is_some_and(|since| now >= since + self.config.idle);
        let keys: Vec<usize> = self.groups.iter().filter(|(_, g)| over(g)).map(|(k, _)| k).collect();
        keys.into_iter().for_each(|key| self.close_group(key));
        // Restored groups are useful only as long as their former members may rejoin.
        if !absent && !self.is_rejoining(now) && now >= self.started + self.config.idle {
            for group in std::mem::take(&mut self.restored) {
                self.notify.drop_kept(group.addr());
            }
        }
    }

    /// Returns whether no client has sockets of a group and no DREQ must be sent from it.
    fn is_idle(&self, key: usize) -> bool {
        let used = self.clients.iter().any(|(_, c)| c.opened.contains(&key));
        let has_dreqs = |g: &Gsi| self.orphans.needs(|local| g.covers(local));
        !used && !self.groups.get(key).is_some_and(has_dreqs)
    }

    fn close_group(&mut self, key: usize) {
        let Some(gsi) = self.groups.try_remove(key) else { return };
        tracing::info!(addr = %gsi.group.addr(), "closing an address");
        self.notify.drop_kept(gsi.group.addr());
    }

    /// Closes the selected groups that are unused, to make room for a requested one.
    ///
    /// Closes none while members of a former broker may rejoin.
    fn close_unused(&mut self, which: impl Fn(&Gsi) -> bool) {
        if !self.slots.absent().is_empty() {
            return;
        }
        let keys = self.groups.iter().filter(|(_, g)| which(g)).map(|(key, _)| key);
        let keys: Vec<usize> = keys.filter(|key| self.is_idle(*key)).collect();
        keys.into_iter().for_each(|key| self.close_group(key));
    }

    /// Returns the number of groups that count for a user: those it uses, and unused ones that it requested.
    fn groups_of(&self, uid: u32) -> usize {
        let uses = |key: &usize| self.clients.iter().any(|(_, c)| c.uid == uid && c.opened.contains(key));
        let counts = |(key, g): &(usize, &Gsi)| uses(key) || (g.owner == uid && self.is_idle(*key));
        self.groups.iter().filter(counts).count()
    }

    /// Makes room for another group of a user by closing unused ones.
    fn make_room(&mut self, uid: u32) -> Result<(), Hold> {
        let max = self.config.quotas.addresses;
        if self.groups_of(uid) >= max {
            self.close_unused(|g| g.owner == uid);
        }
        if self.groups.len() >= MAX_GROUPS {
            self.close_unused(|_| true);
        }
        let text = if self.groups_of(uid) >= max {
            format!("user {uid} has {max} addresses open, which is its limit (--max-addresses)")
        } else if self.groups.len() >= MAX_GROUPS {
            format!("the broker has {MAX_GROUPS} addresses open, which is its limit")
        } else {
            return Ok(());
        };
        self.over_quota("refused_addresses", text)
    }
}
