//! Connections begin and end.

use core::{net::IpAddr, time::Duration};

use roce_bth::RnrTimer;
use roce_verbs::{
    Instant,
    provider::{CmKind, CmRef, ConnParams, Cx, DeviceIx, PdId, Provider, QpId, RejectReason, VerbsError},
};
use zerocopy::IntoBytes as _;

use super::{Node, Output, port_of};
use crate::{
    conn::{Answer, Broken, Link, LinkId, Phase, Refused},
    key::PairKey,
    proto::{ConnCommon, ConnV4, ConnV6, Private, Reject, Version},
};

/// READs and atomics at a time, either way, unless device or peer want fewer.
const DEPTH: u8 = 128;
/// Time for the answer to a request to connect, as long as the kernel's 16 requests take. An overloaded host answers late, and a request
/// that is withdrawn before only makes more work for it.
const TIMEOUT: Duration = Duration::from_secs(100);
/// Pause of a peer whose message no receive waits for: 320 us, as the kernel's.
const RNR_TIMER: u8 = 10;

/// Connect request of a peer.
pub(super) struct Request<'a> {
    pub(super) cm: CmRef,
    pub(super) device: DeviceIx,
    pub(super) private_data: &'a [u8],
    /// READs and atomics that the peer answers at a time, and that it sends.
    pub(super) depths: [u8; 2],
}

impl Node {
    /// Begins to connect.
    pub(super) fn begin(&mut self, cx: &mut Cx<'_>, key: PairKey) {
        let dst = (key.remote, port_of(key.remote)).into();
        match cx.provider.cm_resolve(Some(key.local), dst) {
            Ok(cm) => {
                let link = self.links.insert(Link::new(key, cm, self.config.rings));
                self.by_cm.insert(cm, link);
                if let Some(connection) = self.connections.get_mut(&key) {
                    connection.phase = Phase::Connecting(link);
                }
            }
            Err(e) => self.retry_later(cx, key, e.into()),
        }
    }

    /// An attempt came to nothing before there was a link.
    fn retry_later(&mut self, cx: &mut Cx<'_>, key: PairKey, why: Broken) {
        let due = self.next_attempt(cx, key);
        if let Some(connection) = self.connections.get_mut(&key) {
            connection.phase = Phase::Down(due);
            self.out.push_back(Output::Down(key, why));
        }
    }

    /// When to connect again: a random time in an interval that doubles, so that two that connect at once do not for ever.
    fn next_attempt(&mut self, cx: &mut Cx<'_>, key: PairKey) -> Instant {
        let longest = self
            .connections
            .get_mut(&key)
            .map_or(self.config.reconnect_max, |connection| {
                connection.next_backoff(&self.config)
            });
        cx.now + Duration::from_nanos(cx.below(longest.as_nanos() as u64))
    }

    /// Handles an event of a link's connection.
    pub(super) fn link_event(&mut self, cx: &mut Cx<'_>, link: LinkId, kind: &CmKind) {
        if self.links.get(link).is_none_or(|link| link.is_closing) {
            return;
        }
        let done = match kind {
            CmKind::Resolved { device } => self.resolved(cx, link, *device),
            CmKind::Established { private_data } => self.check_answer(link, private_data),
            CmKind::Rejected { reason, .. } => Err(Broken::Rejected(*reason)),
            CmKind::Unreachable(why) => Err(Broken::Unreachable(*why)),
            CmKind::ConnectError(text) => Err(Broken::Local(text.clone())),
            CmKind::Disconnected => Err(Broken::Disconnected),
            CmKind::AddressChange => Err(Broken::Local("the address is gone".into())),
            CmKind::ConnectRequest { .. } | CmKind::TimewaitExit => return,
        };
        match (done, kind) {
            (Ok(()), CmKind::Established { .. }) => self.established(cx, link),
            (Ok(()), _) => {}
            (Err(why), _) => self.lose(cx, link, why),
        }
    }

    /// The device is known: creates the queue pair and connects.
    fn resolved(&mut self, cx: &mut Cx<'_>, id: LinkId, device: DeviceIx) -> Result<(), Broken> {
        let qp = self.create(cx.provider, id, device)?;
        let link = &self.links[id];
        let limits = &cx.provider.devices()[usize::from(device.0)].limits;
        let params = params(
            link.key,
            Version::V3_1,
            [DEPTH.min(limits.max_qp_rd_atom), DEPTH.min(limits.max_qp_init_rd_atom)],
        );
        Ok(cx.provider.cm_connect(link.cm, qp, &params)?)
    }

    fn create(&mut self, provider: &mut dyn Provider, id: LinkId, device: DeviceIx) -> Result<QpId, VerbsError> {
        let pd = self.domain(provider, device)?;
        let created = self.links[id].create(provider, (device, pd));
        // Also of a queue pair whose receives could not be posted: it is drained.
        if let Some(qp) = self.links[id].qp() {
            self.by_qp.insert(qp, id);
        }
        created
    }

    pub(super) fn domain(&mut self, provider: &mut dyn Provider, device: DeviceIx) -> Result<PdId, VerbsError> {
        if let Some(pd) = self.pds.get(&device) {
            return Ok(*pd);
        }
        let pd = provider.alloc_pd(device)?;
        self.pds.insert(device, pd);
        Ok(pd)
    }

    /// Checks the private data of the peer's REP. It may lack all of it (the kernel takes that for 4.1), and its other fields tell nothing.
    fn check_answer(&self, link: LinkId, private_data: &[u8]) -> Result<(), Broken> {
        let accepting = |c: &crate::conn::Connection| !matches!(c.phase, Phase::Connecting(of) if of == link);
        let key = self.links[link].key;
        if self.connections.get(&key).is_none_or(accepting) {
            return Ok(());
        }
        let Ok(private) = Private::parse(port_of(key.remote), private_data) else {
            return Ok(());
        };
        match private.common().version() {
            Version { major: 0 | 4, .. } | Version::V3_1 => Ok(()),
            other => Err(Broken::Version(other)),
        }
    }

    /// Handles a peer's connect request.
    pub(super) fn request(&mut self, cx: &mut Cx<'_>, request: &Request<'_>) {
        if let Err(why) = self.try_accept(cx, request) {
            let peer = cx.provider.cm_addrs(request.cm).and_then(|(_, peer)| peer);
            let data = Reject::INCOMPATIBLE.to_bytes();
            if cx
                .provider
                .cm_reject(request.cm, RejectReason::CONSUMER, &data)
                .is_err()
            {
                // The peer has withdrawn it meanwhile.
                cx.provider.cm_destroy(request.cm);
            }
            if let Some(peer) = peer {
                self.out.push_back(Output::Refused { peer: peer.ip(), why });
            }
        }
    }

    fn try_accept(&mut self, cx: &mut Cx<'_>, request: &Request<'_>) -> Result<(), Refused> {
        if self.stopping {
            return Err(Refused::Stopping);
        }
        let (local, peer) = cx.provider.cm_addrs(request.cm).ok_or(Refused::Short)?;
        let peer = peer.ok_or(Refused::Short)?.ip();
        let (key, version) = read(local.ip(), peer, request.private_data)?;
        let connection = self.connection(key).ok_or(Refused::Limit)?;
        let instead_of = match connection.phase.answer(key.local > key.remote) {
            Answer::Accept { instead_of } => instead_of,
            Answer::Reject => {
                self.counters.ib_connect_raced += 1;
                return Err(Refused::Race);
            }
        };
        // Our own request must be gone before the answer leaves: a repetition of it would make the peer drop what it has just begun.
        if let Some(link) = instead_of {
            self.close_link(cx.provider, link);
            if let Some(connection) = self.connections.get_mut(&key)
                && let Some(phase) = connection.phase.lost(link, cx.now)
            {
                connection.phase = phase;
            }
        }
        self.accept(cx, request, key, version);
        Ok(())
    }

    fn accept(&mut self, cx: &mut Cx<'_>, request: &Request<'_>, key: PairKey, version: Version) {
        let id = self.links.insert(Link::new(key, request.cm, self.config.rings));
        self.by_cm.insert(request.cm, id);
        if let Some(connection) = self.connections.get_mut(&key) {
            connection.phase = connection.phase.accepted(id);
        }
        let [answers, sends] = request.depths;
        let accepted = self.create(cx.provider, id, request.device).and_then(|qp| {
            let params = params(key, version, [DEPTH.min(sends), DEPTH.min(answers)]);
            cx.provider.cm_accept(request.cm, qp, &params)
        });
        if let Err(e) = accepted {
            self.lose(cx, id, e.into());
        }
    }

    /// A link is established, by the connection manager's word or because the peer uses it.
    pub(super) fn established(&mut self, cx: &mut Cx<'_>, id: LinkId) {
        let Some(link) = self.links.get(id) else { return };
        let key = link.key;
        let Some(connection) = self.connections.get_mut(&key) else {
            return;
        };
        let Some((phase, replaced)) = connection.phase.established(id) else {
            return;
        };
        connection.phase = phase;
        if let Some(old) = replaced {
            self.counters.ib_listen_closed_stale += 1;
            let dropped = connection.restart();
            self.release(&dropped);
            self.out.push_back(Output::Down(key, Broken::Replaced));
            self.close_link(cx.provider, old);
        }
        if let Some(connection) = self.connections.get_mut(&key) {
            connection.up();
        }
        self.dirty.insert(key);
        self.out.push_back(Output::Up(key));
    }

    /// A link has failed.
    pub(super) fn lose(&mut self, cx: &mut Cx<'_>, id: LinkId, why: Broken) {
        let Some(key) = self.links.get(id).map(|link| link.key) else {
            return;
        };
        self.close_link(cx.provider, id);
        let Some(connection) = self.connections.get(&key) else {
            return;
        };
        let carried = connection.phase.link() == Some(id);
        // Whether it is one of the connection's; the time does not matter for that.
        if connection.phase.lost(id, cx.now).is_none() {
            return;
        }
        let due = self.next_attempt(cx, key);
        let Some(connection) = self.connections.get_mut(&key) else {
            return;
        };
        if let Some(phase) = connection.phase.lost(id, due) {
            connection.phase = phase;
        }
        if carried {
            let dropped = connection.restart();
            self.release(&dropped);
            self.counters.conn_reset += 1;
        }
        self.out.push_back(Output::Down(key, why));
        self.forget_blank(key);
        self.dirty.insert(key);
    }

    /// Forgets a connection of which there is nothing to remember: anybody can ask for one in the name of any address.
    fn forget_blank(&mut self, key: PairKey) {
        if self.connections.get(&key).is_some_and(|c| c.is_blank(&self.config)) {
            self.connections.remove(&key);
            self.dirty.remove(&key);
        }
    }

    /// Ends a link, whatever becomes of its connection. It goes when it is drained.
    pub(super) fn close_link(&mut self, provider: &mut dyn Provider, id: LinkId) {
        let Some(link) = self.links.get_mut(id).filter(|link| !link.is_closing) else {
            return;
        };
        link.is_closing = true;
        let ended = link.fail();
        let qp = link.qp();
        self.operations_ended(ended);
        let link = &self.links[id];
        match qp {
            Some(qp) => {
                provider.cm_disconnect(link.cm);
                provider.drain(qp);
            }
            None => self.remove_link(provider, id),
        }
    }

    /// Nothing of a link is under way.
    pub(super) fn remove_link(&mut self, provider: &mut dyn Provider, id: LinkId) {
        let Some(link) = self.links.try_remove(id) else { return };
        self.by_cm.remove(&link.cm);
        if let Some(qp) = link.qp() {
            self.by_qp.remove(&qp);
        }
        link.destroy(provider);
        self.free_domains(provider);
    }
}

/// Reads the private data of a REQ. The addresses in it name the connection, so they have to be those of the packet: with others anybody
/// could end or take the place of any pair's.
fn read(local: IpAddr, peer: IpAddr, private_data: &[u8]) -> Result<(PairKey, Version), Refused> {
    let private = Private::parse(port_of(peer), private_data).map_err(|_| Refused::Short)?;
    if private.addresses() != (peer, local) {
        return Err(Refused::Addresses);
    }
    let common = private.common();
    let version = common.version().answer(common.minors.get()).ok_or(Refused::Version)?;
    let tos = common.tos;
    Ok((
        PairKey {
            local,
            remote: peer,
            tos,
        },
        version,
    ))
}

/// Returns the parameters of a connection. `depths`: READs and atomics that we answer, and that we send.
fn params(key: PairKey, version: Version, depths: [u8; 2]) -> ConnParams {
    let common = ConnCommon::new(version, key.tos, 0, 0);
    let private_data = match (key.local, key.remote) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => ConnV4::new(src, dst, common).as_bytes().to_vec(),
        (IpAddr::V6(src), IpAddr::V6(dst)) => ConnV6::new(src, dst, common).as_bytes().to_vec(),
        // No socket sends from one to the other.
        _ => Vec::new(),
    };
    ConnParams {
        private_data,
        responder_resources: depths[0],
        initiator_depth: depths[1],
        timeout: Some(TIMEOUT),
        tos: Some(key.tos),
        min_rnr_timer: Some(RnrTimer::new(RNR_TIMER)),
        ..ConnParams::default()
    }
}
