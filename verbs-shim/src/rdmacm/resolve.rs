//! BIND, RESOLVE_ADDR and RESOLVE_ROUTE: which address and device an id has, and how it reaches its peer.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::RawFd,
    sync::OnceLock,
    time::Duration,
};

use roce_port::cm::cma::{PortSpace, ServiceId};

use super::{
    Errno, Result,
    abi::EventType,
    addr::Addr,
    backend::{Backend, CmaDevice},
    context::Resolution,
    event::Event,
    ports::Owner,
    state::{Op, State},
    ucma::Ucma,
};

/// How many ports that others leave free are looked at for one that is free here too.
const PORT_TRIES: usize = 64;

/// Whether IPv6 sockets leave IPv4 to others by default (`net.ipv6.bindv6only`).
fn v6_only() -> bool {
    static SETTING: OnceLock<bool> = OnceLock::new();
    *SETTING
        .get_or_init(|| std::fs::read_to_string("/proc/sys/net/ipv6/bindv6only").is_ok_and(|text| text.trim() != "0"))
}

/// The port space of a local address: an InfiniBand address names its own (`cma_select_ib_ps`).
fn space_of(space: PortSpace, local: &Addr) -> Result<PortSpace> {
    let Addr::Ib(ib) = local else { return Ok(space) };
    let named = ServiceId(ib.sid & ib.sid_mask).space();
    let fits = |named: &PortSpace| *named == space || space == PortSpace::Ib;
    named.filter(fits).ok_or(Errno(libc::EPROTONOSUPPORT))
}

fn needs_scope(addr: &Addr) -> bool {
    matches!(addr, Addr::Ip(SocketAddr::V6(a)) if a.ip().is_unicast_link_local() && a.scope_id() == 0)
}

fn is_localhost(ip: IpAddr) -> bool {
    ip == Ipv4Addr::LOCALHOST || ip == Ipv6Addr::LOCALHOST || ip.is_unspecified()
}

impl<B: Backend> Ucma<B> {
    /// Gives an id its local address (`rdma_bind_addr`). `keep`: the port is kept from other processes as well, since the
    /// program may be going to listen.
    ///
    /// # Errors
    /// EINVAL when it has one, EADDRINUSE and EADDRNOTAVAIL when it can't have this one, ENODEV when no device has it.
    pub(crate) fn bind(&mut self, fd: RawFd, id: u32, local: Addr, keep: bool) -> Result<()> {
        let (ctx, backend) = self.get_with(fd, id)?;
        ctx.check(Op::Bind)?;
        if needs_scope(&local) {
            return Err(Errno::INVAL.because("a link-local address needs its interface (sin6_scope_id)"));
        }
        let cma_dev = match &local {
            _ if local.is_any() => None,
            Addr::Ip(ip) => match backend.cma_dev_of(ip.ip()) {
                // A loopback address that no device has stands for any (`cma_any_addr`).
                Err(_) if ip.ip().is_loopback() => None,
                cma_dev => Some(cma_dev?),
            },
            Addr::Ib(_) => {
                return Err(Errno::NODEV.because("this device has IP addresses, and none of InfiniBand (AF_IB)"));
            }
        };
        let space = space_of(ctx.space, &local)?;
        let afonly = ctx.afonly.unwrap_or_else(|| match &local {
            Addr::Ip(SocketAddr::V6(_)) => v6_only(),
            _ => true,
        });
        let remote = match ctx.remote.same_family(&local) {
            true => ctx.remote,
            false => local.any_like(),
        };
        let owner = Owner {
            id,
            local: cma_dev.map_or_else(|| local.at_any(), |_| local),
            remote,
            reuse: ctx.reuse,
            afonly,
        };
        let (port, hold) = self.take_port(space, owner, keep)?;
        let ctx = self.get(fd, id)?;
        ctx.hold = hold;
        (ctx.space, ctx.local, ctx.remote) = (space, local.with_port(port), remote);
        (ctx.cma_dev, ctx.bound, ctx.afonly) = (cma_dev, true, Some(afonly));
        ctx.step(Op::Bind)
    }

    /// Gives an id a port, and returns it.
    fn take_port(&mut self, space: PortSpace, owner: Owner, keep: bool) -> Result<(u16, Option<B::Hold>)> {
        let (number, port, addr) = (space as u16, owner.local.port(), owner.scope());
        if !keep || owner.local.ip().is_none() {
            return Ok((self.ports.bind(number, owner)?, None));
        }
        if port != 0 {
            self.ports.bind(number, owner)?;
            let kept = self.backend.reserve(space, port, addr, owner.reuse);
            let kept = kept.inspect_err(|_| self.ports.release(number, port, owner.id))?;
            return Ok((port, Some(kept.1)));
        }
        // What is free among processes may be another id's here: those that are refused are kept until one fits, so that
        // none comes twice.
        let mut refused = Vec::new();
        loop {
            let (found, hold) = self.backend.reserve(space, 0, addr, owner.reuse)?;
            let owner = Owner {
                local: owner.local.with_port(found),
                ..owner
            };
            match self.ports.bind(number, owner) {
                Ok(port) => return Ok((port, Some(hold))),
                Err(e) if refused.len() == PORT_TRIES => return Err(e),
                Err(_) => refused.push(hold),
            }
        }
    }

    /// Finds the way to a peer (`rdma_resolve_addr`). ADDR_RESOLVED or ADDR_ERROR follows, within the timeout (`None`: there is
    /// none).
    ///
    /// # Errors
    /// ENETUNREACH and the like when there is no route; EINVAL when the id's state or address does not fit.
    pub(crate) fn resolve_addr(
        &mut self,
        fd: RawFd,
        id: u32,
        (src, dst): (Option<Addr>, Addr),
        timeout: Option<Duration>,
    ) -> Result<()> {
        let ctx = self.get(fd, id)?;
        ctx.check(Op::ResolveAddr)?;
        let Addr::Ip(mut remote) = dst else {
            return Err(Errno::NODEV.because("this device has IP addresses, and none of InfiniBand (AF_IB)"));
        };
        if ctx.state == State::Idle {
            self.bind(fd, id, src.unwrap_or_else(|| dst.any_like()), false)?;
        }
        let (ctx, backend) = self.get_with(fd, id)?;
        let Some(mut local) = ctx.local.ip().filter(|l| l.is_ipv4() == remote.is_ipv4()) else {
            return Err(Errno::INVAL.because("source and destination are not of one IP version"));
        };
        let nowhere =
            |ip: IpAddr, backend: &mut B| ip.is_unspecified() || (ip.is_loopback() && backend.cma_dev_of(ip).is_err());
        let from = match ctx.cma_dev {
            None => backend.some_address(remote.is_ipv6()),
            Some(_) => Some(local.ip()),
        };
        // With a device on the loopback network others of its addresses are other processes' devices, but for `localhost`.
        let elsewhere = from.is_some_and(|from| from.is_loopback()) && !is_localhost(remote.ip());
        if nowhere(remote.ip(), backend) && !elsewhere {
            // As with sockets: the host itself (`cma_resolve_loopback`).
            remote.set_ip(from.ok_or(Errno::NODEV)?);
        }
        if nowhere(local.ip(), backend) {
            local.set_ip(match from {
                // The system would name `localhost`.
                Some(from) if elsewhere && remote.ip().is_loopback() => from,
                _ => backend.source_for(remote)?,
            });
        } else if !remote.ip().is_multicast() {
            backend.source_for(remote)?;
        }
        match backend.cma_dev_of(local.ip()) {
            Ok(cma_dev) => self.resolve_neighbour(id, (local, remote), cma_dev, timeout),
            Err(e) => {
                self.report_event(id, &Event::failed(EventType::AddrError, -e.0));
                Ok(())
            }
        }
    }

    fn resolve_neighbour(
        &mut self,
        id: u32,
        (local, remote): (SocketAddr, SocketAddr),
        cma_dev: CmaDevice,
        timeout: Option<Duration>,
    ) -> Result<()> {
        let ticket = self.ticket();
        let (ctx, backend) = self.parts(id).ok_or(Errno::NOENT)?;
        let query = backend.resolve_neighbour(ticket, (local.ip(), remote), timeout)?;
        ctx.step(Op::ResolveAddr)?;
        match query {
            None => self.on_addr_resolved(id, (local, remote), cma_dev),
            Some(query) => {
                ctx.resolution = Some(Resolution {
                    ticket,
                    _query: query,
                    local,
                    remote,
                    cma_dev,
                });
            }
        }
        Ok(())
    }

    fn on_addr_resolved(&mut self, id: u32, (local, remote): (SocketAddr, SocketAddr), cma_dev: CmaDevice) {
        let Some((ctx, _)) = self.parts(id) else { return };
        if ctx.step(Op::AddrResolved).is_err() {
            return;
        }
        ctx.cma_dev = Some(cma_dev);
        (ctx.local, ctx.remote) = (Addr::Ip(local), Addr::Ip(remote));
        self.update_owner(id);
        self.report_event(id, &Event::new(EventType::AddrResolved));
    }

    /// An address resolution has ended. Unless it succeeded its id is as before, and may try again.
    pub(crate) fn on_neighbour(&mut self, ticket: u64, resolved: bool) {
        let Some(id) = self.by_ticket(ticket) else { return };
        let Some((ctx, _)) = self.parts(id) else { return };
        let Some(ended) = ctx.resolution.take() else { return };
        match resolved {
            true => self.on_addr_resolved(id, (ended.local, ended.remote), ended.cma_dev),
            false if ctx.step(Op::AddrFailed).is_ok() => {
                self.report_event(id, &Event::failed(EventType::AddrError, -libc::ETIMEDOUT));
            }
            false => {}
        }
    }

    /// Makes the path (`rdma_resolve_route`). ROUTE_RESOLVED follows.
    ///
    /// # Errors
    /// EINVAL when the address is not resolved.
    pub(crate) fn resolve_route(&mut self, fd: RawFd, id: u32) -> Result<()> {
        let ctx = self.get(fd, id)?;
        ctx.cma_dev()?;
        ctx.step(Op::ResolveRoute)?;
        self.report_event(id, &Event::new(EventType::RouteResolved));
        Ok(())
    }
}
