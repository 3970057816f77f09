//! Service ID resolution: which queue pair serves a service ID by datagrams (IBA 12.11)? One request, one answer.
//!
//! Beyond the kernel: an answer is kept for a while and repeated for duplicates of its request, so that a lost SIDR_REP
//! does not make the consumer decide a second time; a peer is known by its address besides its request ID.

use core::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};
use std::collections::{BTreeMap, BTreeSet};

use roce_verbs::{Instant, PKey, provider::NoAnswer};

use super::{
    Manager, build, canonical,
    conn::jittered,
    half_open::{Displaced, HalfOpen},
    quote::Quote,
    rate::{PeerGroup, TokenBucket},
};
use crate::{
    cma::{CmaHeader, HEADER_LEN, ServiceId},
    mad::{Attribute, MAD_LEN, Mad, SidrRep, SidrReq, sidr_status},
    types::{CmConfig, CmError, ConnId, DropReason, Event, ListenId, ResolveArgs, SidrAnswer},
};

/// How long an answer is repeated for duplicates of its request.
const LINGER: Duration = Duration::from_secs(20);

/// Stage of a resolution.
enum Stage {
    /// We asked: the request, retransmissions left, the next pause, and when to give up.
    Asked {
        mad: Box<[u8; MAD_LEN]>,
        retries: u8,
        pause: Duration,
        deadline: Instant,
    },
    /// A peer asked, the consumer decides.
    Waiting,
    /// A peer asked and was answered.
    Answered(Box<[u8; MAD_LEN]>),
    /// Nothing more happens.
    Over,
}

/// Names a request of a peer's: its address, request ID and transaction.
type RemoteKey = (IpAddr, u32, u64);

struct Sidr {
    stage: Stage,
    listener: Option<ListenId>,
    local: SocketAddr,
    remote: SocketAddr,
    request_id: u32,
    transaction_id: u64,
    service_id: u64,
    /// The question counts towards the listener's backlog.
    in_backlog: bool,
    /// Repetitions of the question that are answered.
    repeats: TokenBucket,
    /// Destroyed by the consumer.
    detached: bool,
    timer: Option<Instant>,
}

impl Sidr {
    fn key(&self) -> RemoteKey {
        (self.remote.ip(), self.request_id, self.transaction_id)
    }

    fn group(&self) -> PeerGroup {
        PeerGroup::of(self.remote.ip())
    }
}

/// All resolutions of a manager.
#[derive(Default)]
pub(super) struct Resolutions {
    table: BTreeMap<ConnId, Sidr>,
    /// Ours, by request ID.
    asked: BTreeMap<u32, ConnId>,
    /// Questions of peers.
    theirs: BTreeMap<RemoteKey, ConnId>,
    timers: BTreeSet<(Instant, ConnId)>,
    /// Questions in [`Stage::Waiting`]. No question proves an address: there is no answer to our answer.
    waiting: HalfOpen,
    /// Answered, and destroyed by the consumer.
    lingering: BTreeSet<ConnId>,
}

impl Resolutions {
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether a question of ours waits for its answer.
    pub(super) fn is_asking(&self) -> bool {
        !self.asked.is_empty()
    }

    pub(super) fn is_asked(&self, request_id: u32) -> bool {
        self.asked.contains_key(&request_id)
    }

    /// Whether a peer's question is known.
    pub(super) fn knows(&self, peer: IpAddr, request_id: u32, transaction_id: u64) -> bool {
        self.theirs.contains_key(&(peer, request_id, transaction_id))
    }

    /// Whether the consumer still has this one.
    pub(super) fn is_attached(&self, id: ConnId) -> bool {
        self.table.get(&id).is_some_and(|s| !s.detached)
    }

    pub(super) fn addresses(&self, id: ConnId) -> Option<(SocketAddr, SocketAddr)> {
        self.table.get(&id).filter(|s| !s.detached).map(|s| (s.local, s.remote))
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// A question that waits for the consumer.
    fn insert_question(&mut self, id: ConnId, s: Sidr) {
        self.theirs.insert(s.key(), id);
        self.waiting.enter(id, s.group(), false);
        if let Some(listener) = s.listener {
            self.waiting.backlogs.take(listener, s.group());
        }
        self.table.insert(id, s);
    }

    /// It does not wait any more.
    fn settle(&mut self, id: ConnId, stage: Stage) {
        let Some(s) = self.table.get_mut(&id) else { return };
        if matches!(core::mem::replace(&mut s.stage, stage), Stage::Waiting) {
            self.waiting.leave(id, s.group());
        }
    }

    /// The question does not wait for the consumer any more.
    pub(super) fn leave_backlog(&mut self, id: ConnId) {
        let Some(s) = self.table.get_mut(&id) else { return };
        if core::mem::take(&mut s.in_backlog)
            && let Some(listener) = s.listener
        {
            self.waiting.backlogs.free(listener, s.group());
        }
    }

    /// Whether there is room for one more question of `peer` at a listener, and who gives way to it.
    fn room_for(
        &self,
        peer: PeerGroup,
        listener: ListenId,
        backlog: u32,
        config: &CmConfig,
    ) -> Result<Displaced, DropReason> {
        self.waiting.room_for(peer, listener, backlog, config)
    }

    fn set_timer(&mut self, id: ConnId, at: Option<Instant>) {
        let Some(s) = self.table.get_mut(&id) else { return };
        if let Some(old) = core::mem::replace(&mut s.timer, at) {
            self.timers.remove(&(old, id));
        }
        if let Some(at) = at {
            self.timers.insert((at, id));
        }
    }

    fn remove(&mut self, id: ConnId) {
        self.set_timer(id, None);
        self.settle(id, Stage::Over);
        self.leave_backlog(id);
        self.lingering.remove(&id);
        let Some(s) = self.table.remove(&id) else { return };
        if self.asked.get(&s.request_id) == Some(&id) {
            self.asked.remove(&s.request_id);
        }
        if self.theirs.get(&s.key()) == Some(&id) {
            self.theirs.remove(&s.key());
        }
    }

    /// Nothing more happens: gone when the consumer has let go of it already.
    fn end(&mut self, id: ConnId) {
        self.set_timer(id, None);
        match self.table.get(&id) {
            Some(s) if !s.detached => {
                let key = s.key();
                if self.theirs.get(&key) == Some(&id) {
                    self.theirs.remove(&key);
                }
                self.settle(id, Stage::Over);
            }
            _ => self.remove(id),
        }
    }
}

impl Manager {
    /// Asks a peer which queue pair serves a port. [`Event::Resolved`] or [`Event::Unreachable`] follows.
    ///
    /// # Errors
    /// When an argument is wrong or a limit is reached.
    pub fn resolve(&mut self, now: Instant, args: &ResolveArgs) -> Result<ConnId, CmError> {
        let (local, remote) = (canonical(args.local), canonical(args.remote));
        let unusable = |ip: IpAddr| ip.is_unspecified() || ip.is_multicast();
        if local.is_ipv4() != remote.is_ipv4() || unusable(local.ip()) || unusable(remote.ip()) {
            return Err(CmError::Address);
        }
        if self.sidr.len() >= self.config.max_connections {
            return Err(CmError::Limit);
        }
        let port = self.local_port(local.port());
        let header = CmaHeader {
            port,
            src: local.ip(),
            dst: remote.ip(),
        };
        let user: [u8; 216 - HEADER_LEN] = build::private_data(&args.private_data)?;
        let mut private_data = [0; 216];
        private_data[..HEADER_LEN].copy_from_slice(&header.emit());
        private_data[HEADER_LEN..].copy_from_slice(&user);
        let request_id = self.new_comm_id();
        let service_id = ServiceId::new(args.space, remote.port()).0;
        let transaction_id = self.transaction(request_id);
        let mad = Mad::new(
            transaction_id,
            SidrReq {
                request_id,
                pkey: PKey::DEFAULT,
                service_id,
                private_data,
            },
        )
        .emit();
        let id = self.table.fresh_id();
        let pause = self.config.first_retry.max(Duration::from_millis(1));
        self.sidr.asked.insert(request_id, id);
        self.sidr.table.insert(
            id,
            Sidr {
                stage: Stage::Asked {
                    mad: Box::new(mad),
                    retries: self.config.max_retries,
                    pause: 2 * pause,
                    deadline: now + self.config.give_up,
                },
                listener: None,
                local: SocketAddr::new(local.ip(), port),
                remote,
                request_id,
                transaction_id,
                service_id,
                in_backlog: false,
                repeats: TokenBucket::default(),
                detached: false,
                timer: None,
            },
        );
        let longest = build::code_time(self.config.response_timeout);
        let first = jittered(&mut self.rng, pause, longest).min(self.config.give_up);
        self.sidr.set_timer(id, Some(now + first));
        self.send_to(local.ip(), remote.ip(), Attribute::SidrReq, mad);
        Ok(id)
    }

    /// Answers an [`Event::SidrRequest`]. The resolution is over; destroy it.
    ///
    /// # Errors
    /// When it does not wait for an answer, or there are more than 136 bytes of private data.
    pub fn answer(&mut self, now: Instant, id: ConnId, answer: &SidrAnswer) -> Result<(), CmError> {
        let private_data = build::private_data(&answer.private_data)?;
        let s = self.sidr.table.get_mut(&id).filter(|s| !s.detached);
        let s = s.ok_or(CmError::NoConnection)?;
        if !matches!(s.stage, Stage::Waiting) {
            return Err(CmError::Answered);
        }
        let rep = SidrRep {
            request_id: s.request_id,
            status: answer.status,
            qpn: answer.qpn,
            service_id: s.service_id,
            qkey: answer.qkey,
            private_data,
            ..SidrRep::default()
        };
        let mad = Mad::new(s.transaction_id, rep).emit();
        let (local, remote) = (s.local.ip(), s.remote.ip());
        self.sidr.settle(id, Stage::Answered(Box::new(mad)));
        self.sidr.leave_backlog(id);
        self.sidr.set_timer(id, Some(now + LINGER));
        self.send_to(local, remote, Attribute::SidrRep, mad);
        Ok(())
    }

    /// Forgets a resolution; what a peer waits for is refused. False: there is none of this name.
    pub(super) fn destroy_sidr(&mut self, now: Instant, id: ConnId) -> bool {
        let Some(s) = self.sidr.table.get(&id).filter(|s| !s.detached) else {
            return false;
        };
        match s.stage {
            Stage::Waiting => {
                let refusal = SidrAnswer {
                    status: sidr_status::REJECT,
                    ..SidrAnswer::default()
                };
                let _ = self.answer(now, id, &refusal);
            }
            Stage::Answered(_) => {}
            Stage::Asked { .. } | Stage::Over => {
                self.sidr.remove(id);
                return true;
            }
        }
        if let Some(s) = self.sidr.table.get_mut(&id) {
            s.detached = true;
            self.sidr.lingering.insert(id);
        }
        true
    }

    pub(super) fn on_sidr_timers(&mut self, now: Instant) {
        while let Some(&(at, id)) = self.sidr.timers.first() {
            if at > now {
                return;
            }
            self.sidr.set_timer(id, None);
            self.on_sidr_timer(now, id);
        }
    }

    fn on_sidr_timer(&mut self, now: Instant, id: ConnId) {
        let longest = build::code_time(self.config.response_timeout);
        let Some(s) = self.sidr.table.get_mut(&id) else { return };
        let again = match &mut s.stage {
            Stage::Asked {
                mad,
                retries,
                pause,
                deadline,
            } if *retries > 0 && now < *deadline => {
                let at = (now + jittered(&mut self.rng, *pause, longest)).min(*deadline);
                *retries -= 1;
                *pause = (2 * *pause).min(longest);
                Some((at, **mad))
            }
            Stage::Asked { .. } => None,
            Stage::Waiting | Stage::Answered(_) | Stage::Over => {
                self.counters.expired += u64::from(matches!(s.stage, Stage::Waiting));
                self.sidr.end(id);
                return;
            }
        };
        let (local, remote, request_id) = (s.local.ip(), s.remote.ip(), s.request_id);
        match again {
            Some((at, mad)) => {
                self.sidr.set_timer(id, Some(at));
                self.counters.count_retried(Attribute::SidrReq);
                self.send_to(local, remote, Attribute::SidrReq, mad);
            }
            None => {
                self.counters.timeouts += 1;
                self.give_up_asking(id, request_id, NoAnswer::Timeout);
            }
        }
    }

    fn give_up_asking(&mut self, id: ConnId, request_id: u32, why: NoAnswer) {
        self.tell(Event::Unreachable { conn: id, why });
        self.sidr.asked.remove(&request_id);
        self.sidr.end(id);
    }

    /// ICMP says that a question of ours was not delivered: [`Manager::handle_undeliverable`].
    pub(super) fn on_sidr_undeliverable(&mut self, remote: IpAddr, quote: &Quote<'_>, why: NoAnswer) -> bool {
        let Some(id) = self.sidr.asked.get(&quote.id()).copied() else {
            return false;
        };
        let asked = self.sidr.table.get(&id).filter(|s| s.remote.ip() == remote);
        if !asked.is_some_and(|s| matches!(&s.stage, Stage::Asked { mad, .. } if quote.is_of(mad))) {
            return false;
        }
        self.counters.undeliverable += 1;
        self.give_up_asking(id, quote.id(), why);
        true
    }

    /// A question of a peer's (`cm_sidr_req_handler`, `cma_ib_req_handler`). `way`: our address and the peer's.
    pub(super) fn on_sidr_req(
        &mut self,
        now: Instant,
        way: (IpAddr, IpAddr),
        tid: u64,
        req: &SidrReq,
    ) -> Result<(), DropReason> {
        let (local, remote) = way;
        if let Some(id) = self.sidr.theirs.get(&(remote, req.request_id, tid)) {
            return self.on_repeated_question(now, *id);
        }
        let service = ServiceId(req.service_id);
        let found = self.listener_for(local, service).filter(|l| l.is_datagram());
        let header = CmaHeader::parse(&req.private_data).ok();
        let header = header.filter(|h| (h.src.to_canonical(), h.dst.to_canonical()) == (remote, local));
        let (listener, backlog, header) = match (found, header) {
            (Some(l), Some(header)) => (l.id, l.backlog, header),
            (found, _) => {
                let status = match found {
                    None => sidr_status::UNSUPPORTED,
                    Some(_) => sidr_status::REJECT,
                };
                self.refuse_sidr((local, remote), tid, req, status);
                return Ok(());
            }
        };
        self.admit_question(now, listener, backlog, remote)?;
        let id = self.table.fresh_id();
        let (Some(space), port) = (service.space(), service.0 as u16) else {
            return Err(DropReason::Field);
        };
        let entry = Sidr {
            stage: Stage::Waiting,
            listener: Some(listener),
            local: SocketAddr::new(local, port),
            remote: SocketAddr::new(remote, header.port),
            request_id: req.request_id,
            transaction_id: tid,
            service_id: req.service_id,
            in_backlog: true,
            repeats: TokenBucket::default(),
            detached: false,
            timer: None,
        };
        let (ours, theirs) = (entry.local, entry.remote);
        self.sidr.insert_question(id, entry);
        self.sidr.set_timer(id, Some(now + self.config.give_up));
        self.tell(Event::SidrRequest {
            listener,
            conn: id,
            local: ours,
            remote: theirs,
            space,
            private_data: req.private_data[HEADER_LEN..].to_vec(),
        });
        Ok(())
    }

    /// A question that we know: its answer is repeated, or it goes on waiting.
    fn on_repeated_question(&mut self, now: Instant, id: ConnId) -> Result<(), DropReason> {
        let limit = self.config.repeat_rate;
        let s = self.sidr.table.get_mut(&id).ok_or(DropReason::UnknownConnection)?;
        if !s.repeats.take(now, limit) {
            return Err(DropReason::Rate);
        }
        if let Stage::Answered(mad) = &s.stage {
            let (local, remote, mad) = (s.local.ip(), s.remote.ip(), **mad);
            self.send_to(local, remote, Attribute::SidrRep, mad);
            return Ok(());
        }
        self.sidr.set_timer(id, Some(now + self.config.give_up));
        Err(DropReason::Duplicate)
    }

    /// Makes room for a question. Dropped when there is none: the peer repeats it.
    fn admit_question(
        &mut self,
        now: Instant,
        listener: ListenId,
        backlog: u32,
        remote: IpAddr,
    ) -> Result<(), DropReason> {
        let room = self
            .sidr
            .room_for(PeerGroup::of(remote), listener, backlog, &self.config)?;
        if self.sidr.len() >= self.config.max_lingering && !self.forget_answer() {
            return Err(DropReason::Connections);
        }
        if let Some(id) = self.count_displaced(now, remote, room) {
            self.sidr.end(id);
        }
        Ok(())
    }

    /// Makes room: forgets the oldest answer that nobody holds any more.
    fn forget_answer(&mut self) -> bool {
        let Some(id) = self.sidr.lingering.first().copied() else {
            return false;
        };
        self.sidr.remove(id);
        self.counters.forgotten += 1;
        true
    }

    fn refuse_sidr(&mut self, way: (IpAddr, IpAddr), tid: u64, req: &SidrReq, status: u8) {
        let rep = SidrRep {
            request_id: req.request_id,
            status,
            service_id: req.service_id,
            ..SidrRep::default()
        };
        self.send_to(way.0, way.1, Attribute::SidrRep, Mad::new(tid, rep).emit());
    }

    /// The answer to a question of ours.
    pub(super) fn on_sidr_rep(&mut self, local: IpAddr, remote: IpAddr, rep: &SidrRep) -> Result<(), DropReason> {
        let id = self.sidr.asked.get(&rep.request_id).copied();
        let id = id.ok_or(DropReason::UnknownConnection)?;
        let s = self.sidr.table.get(&id).ok_or(DropReason::UnknownConnection)?;
        if (s.local.ip(), s.remote.ip()) != (local, remote) {
            return Err(DropReason::WrongAddress);
        }
        if s.service_id != rep.service_id {
            return Err(DropReason::Field);
        }
        self.tell(Event::Resolved {
            conn: id,
            status: rep.status,
            qpn: rep.qpn,
            qkey: rep.qkey,
            info: rep
                .info
                .get(..usize::from(rep.info_length))
                .unwrap_or(&rep.info)
                .to_vec(),
            private_data: rep.private_data.to_vec(),
        });
        self.sidr.asked.remove(&rep.request_id);
        self.sidr.end(id);
        Ok(())
    }
}
