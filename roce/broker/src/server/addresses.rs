//! Which sockets a member gets for an address, and when an address is closed.
//!
//! Of two sockets, one bound to the packet's address and one bound to all, the kernel takes the former. So
//!
//! - an address has the group of its own if there is one, else that of all addresses of its IP version;
//! - it gets one of its own only as long as there is none of all;
//! - who has all addresses has a socket in their group, and one in the group of each single address, of which there are no new
//!   ones from then on.

use std::{io, net::IpAddr, os::fd::OwnedFd, time::Duration};

use roce_net::now;
use roce_verbs::Instant;

use super::{
    broker::Broker,
    gsi::Gsi,
    requests::{Outcome, refused},
};
use crate::{
    group::{Group, GroupError, Steering, bound_to, family_addresses},
    proto::{MAX_GROUPS, Place, Refusal, Reply},
};

/// Time after a start for which groups stay open for living members of a former broker that have not rejoined.
const ABSENT_TIMEOUT: Duration = Duration::from_secs(60);

impl Broker {
    /// The group that packets to an address come to.
    pub(super) fn group_of(&self, addr: IpAddr) -> Option<usize> {
        let covers = || self.groups.iter().find(|(_, g)| g.covers(addr)).map(|(key, _)| key);
        self.own_group(addr).or_else(covers)
    }

    fn own_group(&self, addr: IpAddr) -> Option<usize> {
        let own = self.groups.iter().find(|(_, g)| g.group.addr() == addr);
        own.map(|(key, _)| key)
    }

    /// `given`: what a member had of a former broker, see [`Request::Open`](crate::proto::Request::Open).
    pub(super) fn open(
        &mut self,
        client: usize,
        place: Place,
        addr: IpAddr,
        again: bool,
        given: Vec<OwnedFd>,
    ) -> Outcome {
        let Some((trusted, uid)) = self.clients.get(client).map(|c| (c.trusted, c.uid)) else {
            return Outcome::Pending;
        };
        let (sockets, had) = self.take_given(given, trusted, uid);
        let exactly = again && !had.is_empty();
        let wanted = if exactly { had } else { self.wanted(addr) };
        let mut groups = Vec::new();
        for one in &wanted {
            let present = if exactly {
                self.own_group(*one)
            } else {
                self.group_of(*one)
            };
            if present.is_none()
                && let Err((counter, text)) = self.make_room(uid)
            {
                return Outcome::OverQuota(counter, text);
            }
            match present.map_or_else(|| self.open_group(*one, uid), Ok) {
                Ok(key) => groups.push(key),
                // Sockets that came with a request do not wait with it.
                Err(GroupError::Taken(_)) if self.is_rejoining(now()) && sockets.is_empty() => {
                    return Outcome::Later;
                }
                // A host without IPv6 still has the other half of the unspecified address.
                Err(GroupError::Io { source, .. })
                    if wanted.len() > 1 && source.raw_os_error() == Some(libc::EAFNOSUPPORT) => {}
                Err(e) => return refused(Refusal::Address, e.explain()),
            }
        }
        let mut served = None;
        if let Some(c) = self.clients.get_mut(client) {
            // A further socket would take the place of the first, which brings what comes to another address if it is for all.
            if self.steering == Steering::Array && !again && groups.iter().any(|g| c.opened.contains(g)) {
                served = groups
                    .first()
                    .and_then(|key| self.groups.get(*key))
                    .map(|g| g.group.addr());
                if groups.len() > 1 || served == Some(addr) {
                    return refused(Refusal::Invalid, "the process has its socket of that address");
                }
            }
            c.opened.extend(&groups);
            if let Some(page) = &mut c.page {
                page.add_address(addr);
            }
        }
        let handed_out = match (served, again && self.steering == Steering::Array) {
            (Some(by), _) => Ok(Outcome::Reply(
                Reply::Opened {
                    addrs: vec![by],
                    vault: false,
                },
                vec![],
            )),
            (None, true) => self.take_back(&groups, place, sockets),
            (None, false) => self.hand_out(&groups, place, again, trusted),
        };
        match handed_out {
            Ok(outcome) => outcome,
            Err(e) => refused(Refusal::Internal, format!("the sockets can't be handed out: {e}")),
        }
    }

    /// Takes what a member brings: the sockets that are to be its own again, and of which addresses it had some.
    fn take_given(&mut self, given: Vec<OwnedFd>, trusted: bool, uid: u32) -> (Vec<OwnedFd>, Vec<IpAddr>) {
        if self.steering == Steering::Index && trusted {
            let had = given.into_iter().filter_map(|vault| self.adopt(vault, uid));
            return (vec![], had.collect());
        }
        let had = given.iter().filter_map(bound_to).collect();
        match self.steering {
            Steering::Array => (given, had),
            Steering::Index => (vec![], had),
        }
    }

    /// The addresses whose groups a member gets sockets of.
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

    fn hand_out(&self, groups: &[usize], place: Place, again: bool, trusted: bool) -> io::Result<Outcome> {
        let vault = trusted && self.steering == Steering::Index;
        let (mut addrs, mut fds) = (Vec::new(), Vec::new());
        for gsi in groups.iter().filter_map(|key| self.groups.get(*key)) {
            addrs.push(gsi.group.addr());
            fds.push(match again {
                true => gsi.group.retake(place.slot)?,
                false => gsi.group.take(place)?,
            });
            if vault {
                fds.push(gsi.group.vault().try_clone_to_owned()?);
            }
        }
        Ok(Outcome::Reply(Reply::Opened { addrs, vault }, fds))
    }

    /// A member has its sockets: each is again what its group's packets for the place go to.
    fn take_back(&self, groups: &[usize], place: Place, sockets: Vec<OwnedFd>) -> io::Result<Outcome> {
        let groups: Vec<&Group> = groups
            .iter()
            .filter_map(|k| Some(&self.groups.get(*k)?.group))
            .collect();
        for socket in sockets {
            // Of one of the groups; which, the group itself knows best.
            let mut result = Err(io::ErrorKind::NotFound.into());
            for group in &groups {
                result = group.give_again(place, socket.try_clone()?);
                if result.is_ok() {
                    break;
                }
            }
            result?;
        }
        let addrs = groups.iter().map(|g| g.addr()).collect();
        Ok(Outcome::Reply(Reply::Opened { addrs, vault: false }, vec![]))
    }

    /// Takes a group back that a member kept; its address.
    fn adopt(&mut self, vault: OwnedFd, uid: u32) -> Option<IpAddr> {
        let group = match Group::adopt(vault) {
            Ok(group) => group,
            Err(e) => {
                tracing::warn!("what a process kept is of no use: {e}");
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
                self.store_vault(&group);
                group
            }
        };
        let io = |source| GroupError::Io {
            context: "watching a group",
            source,
        };
        self.add_group(group, uid).map_err(io)?;
        self.own_group(addr).ok_or(GroupError::NotLocal(addr))
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
        let over = |g: &Gsi| g.idle_since.is_some_and(|since| now >= since + self.idle);
        let keys: Vec<usize> = self.groups.iter().filter(|(_, g)| over(g)).map(|(k, _)| k).collect();
        keys.into_iter().for_each(|key| self.close_group(key));
        // Restored groups are useful only as long as their former members may rejoin.
        if !absent && !self.is_rejoining(now) && now >= self.started + self.idle {
            for group in std::mem::take(&mut self.restored) {
                self.remove_vault(group.addr());
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
        for fd in gsi.descriptors() {
            self.unwatch(fd);
        }
        self.remove_vault(gsi.group.addr());
    }

    /// Closes the selected groups that are unused, to make room for a requested one.
    ///
    /// Closes none while members of a former broker may rejoin.
    pub(super) fn close_unused(&mut self, which: impl Fn(&Gsi) -> bool) {
        if !self.slots.absent().is_empty() {
            return;
        }
        let keys = self.groups.iter().filter(|(_, g)| which(g)).map(|(key, _)| key);
        let keys: Vec<usize> = keys.filter(|key| self.is_idle(*key)).collect();
        keys.into_iter().for_each(|key| self.close_group(key));
    }

    /// Returns the number of groups that count for a user: those it uses, and unused ones that it requested.
    pub(super) fn groups_of(&self, uid: u32) -> usize {
        let uses = |key: &usize| self.clients.iter().any(|(_, c)| c.uid == uid && c.opened.contains(key));
        let counts = |(key, g): &(usize, &Gsi)| uses(key) || (g.owner == uid && self.is_idle(*key));
        self.groups.iter().filter(counts).count()
    }

    /// Makes room for another group of a user by closing unused ones.
    ///
    /// # Errors
    /// Counter and text of the refusal, if the user's quota or the broker's limit is exhausted.
    pub(super) fn make_room(&mut self, uid: u32) -> Result<(), (&'static str, String)> {
        if self.groups_of(uid) >= self.quotas.addresses {
            self.close_unused(|g| g.owner == uid);
        }
        if self.groups_of(uid) >= self.quotas.addresses {
            let max = self.quotas.addresses;
            let text = format!("user {uid} has {max} addresses open, which is its limit (--max-addresses)");
            return Err(("refused_addresses", text));
        }
        if self.groups.len() >= MAX_GROUPS {
            self.close_unused(|_| true);
        }
        match self.groups.len() < MAX_GROUPS {
            true => Ok(()),
            false => Err((
                "refused_addresses",
                format!("the broker has {MAX_GROUPS} addresses open, which is its limit"),
            )),
        }
    }

    /// Stores a group's vault in systemd's file descriptor store.
    pub(super) fn store_vault(&self, group: &Group) {
        if let Err(e) = self.notify.keep(group.addr(), group.vault()) {
            tracing::warn!("can't store the sockets with systemd: {e}");
        }
    }

    /// Removes a group's vault from systemd's file descriptor store.
    fn remove_vault(&self, addr: IpAddr) {
        if let Err(e) = self.notify.drop_kept(addr) {
            tracing::warn!("can't remove closed sockets from systemd's store: {e}");
        }
    }
}
