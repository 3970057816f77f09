//! State table of connections and resolutions, and its actions.

use core::time::Duration;

use roce_verbs::{
    Instant, Mtu,
    provider::{NoAnswer, RejectReason},
};

use super::{
    Manager, attribute_of, build,
    build::{MAX_RETRIES, PACKET_LIFE_TIME, RESPONSE_TIMEOUT, SERVICE_TIMEOUT, code_time},
    conn::{Conn, Exchange, jittered},
    state::{
        Input::{self, self as I},
        State::{self, self as S},
    },
    validation::Cause,
};
use crate::cm::{
    drops::DropReason,
    mad::{Attribute, Drep, Dreq, Mad, Message, Mra, Rej, Rep, Req, Rtu, SidrRep, Subject},
    types::{ConnId, Event},
};

/// Reject reason: the message names a communication ID that does not exist.
pub(super) const INVALID_COMM_ID: RejectReason = RejectReason(6);
/// Longest service timeout accepted from a peer's MRA, a code: 137 s. Longer ones are cut to it.
const MAX_SERVICE_TIMEOUT: u8 = 25;
/// Time for which a SIDR_REP is repeated for duplicates of its request.
const LINGER: Duration = Duration::from_secs(20);
/// Longest timewait, whatever ACK timeout the peer named.
const MAX_TIMEWAIT: Duration = Duration::from_secs(10);
/// MRAs of a peer that extend one exchange.
const MAX_EXTENSIONS: u8 = 4;

impl Manager {
    /// Performs an input.
    ///
    /// # Errors
    /// The state does not allow the input. Nothing has changed.
    pub(super) fn step(&mut self, now: Instant, id: ConnId, input: Input<'_>) -> Result<(), State> {
        let step = self.with(id, |m, c| m.perform(now, c, input));
        step.unwrap_or(Err(State::Over))
    }

    /// Table of the legal inputs: state, input, action. Others are refused (a call) or dropped and counted (a MAD).
    ///
    /// # Errors
    /// The state does not allow the input. Nothing has changed.
    pub(super) fn perform(&mut self, now: Instant, c: &mut Conn, input: Input<'_>) -> Result<(), State> {
        let before = c.state;
        tracing::trace!(conn = c.id.0, state = ?before, ?input, "cm");
        match (before, input) {
            // A connection that is being made.
            (S::ReqSent | S::ReqExtended, I::Mra(Subject::Req, code))
            | (S::RepSent | S::RepExtended, I::Mra(Subject::Rep, code)) => self.extend(now, c, code),
            (S::ReqSent | S::ReqExtended, I::Rep(rep)) => self.take_reply(c, rep),
            (S::ReqSent | S::ReqExtended, I::Dreq(transaction_id)) => {
                // The REP was overtaken or lost: for the consumer nothing was ever connected.
                self.report_end(c, rejected(c.id, RejectReason::CONSUMER, Vec::new(), &[0; 148]));
                self.take_dreq(now, c, transaction_id);
            }
            (S::ReqSent | S::ReqExtended, I::Disconnect) => self.refuse(now, c, RejectReason::TIMEOUT, [0; 148]),
            (S::RepReceived | S::ReqReceived, I::Disconnect) => self.refuse(now, c, RejectReason::CONSUMER, [0; 148]),
            (S::RepReceived | S::ReqReceived, I::Reject(reason, data)) => self.refuse(now, c, reason, data),
            (S::RepReceived, I::Rep(_)) | (S::ReqReceived, I::Req) => self.answer_mra(now, c),
            (S::RepReceived, I::QpReady) => {
                self.table.enter(c, S::Established);
                self.send_rtu(c);
            }
            (S::ReqReceived, I::Accept(rep)) => {
                self.table.enter(c, S::RepSent);
                self.start_exchange(now, c, &Mad::new(c.transaction_id, *rep), self.config.give_up);
            }
            // Its sender has given up, or may never have sent it: no message.
            (S::ReqReceived, I::Timer | I::Displaced) => {
                self.end(c, rejected(c.id, RejectReason::TIMEOUT, Vec::new(), &[0; 148]));
            }
            (S::RepSent, I::Displaced) => self.end(c, timed_out(c.id)),
            (S::RepSent, I::Req) => {
                wait_for_peer(now, c);
                self.resend(c, Cause::Answer);
            }
            (S::RepSent | S::RepExtended, I::Rtu | I::Communication) => self.establish(c),
            (S::RepReceived | S::RepExtended, I::Stale) => {
                let reason = RejectReason::STALE_CONNECTION;
                self.report_end(c, rejected(c.id, reason, Vec::new(), &[0; 148]));
                match before {
                    S::RepReceived => self.refuse(now, c, reason, [0; 148]),
                    _ => self.send_dreq(now, c),
                }
            }
            (S::ReqSent | S::ReqExtended | S::RepReceived, I::Rej(rej))
            | (S::ReqReceived | S::RepSent | S::RepExtended, I::Rej(rej)) => self.take_rejection(now, c, rej),
            // One that stands or is ending. A DREQ may come before that.
            (S::Established, I::Rep(_)) => self.send_rtu(c),
            (S::Established, I::Rtu) => self.reassure(c),
            (S::Established, I::Doubt) => self.challenge(now, c),
            (S::RepSent | S::RepExtended, I::Disconnect) => self.send_dreq(now, c),
            (S::Established, I::Disconnect | I::Stale) => self.send_dreq(now, c),
            (S::RepReceived | S::RepSent | S::RepExtended | S::Established | S::DreqSent, I::Dreq(transaction_id)) => {
                self.take_dreq(now, c, transaction_id);
            }
            (S::Established | S::DreqSent, I::Rej(_)) | (S::DreqSent, I::Drep) => self.disconnected(now, c, false),
            (S::Timewait, I::Req) => self.reject_late(c, Subject::Req, RejectReason::STALE_CONNECTION),
            (S::Timewait, I::Rep(_)) => self.reject_late(c, Subject::Rep, INVALID_COMM_ID),
            (S::Timewait, I::Rtu) => self.reject_late(c, Subject::Other, INVALID_COMM_ID),
            (S::Timewait | S::Refused, I::Dreq(transaction_id)) => self.answer_drep(c, transaction_id),
            (S::Timewait, I::Timer) => {
                self.report(c, Event::TimewaitExit { conn: c.id });
                self.table.enter(c, S::Over);
            }
            (S::Refused, I::Req | I::Rep(_) | I::Rtu) | (S::SidrAnswered, I::SidrReq) => self.repeat(c),
            (S::ReqSent | S::SidrSent, I::Undeliverable(why)) => {
                self.counters.undeliverable += 1;
                self.end(c, Event::Unreachable { conn: c.id, why });
            }
            // Resolutions.
            (S::SidrSent, I::SidrRep(rep)) => self.end(c, resolved(c.id, rep)),
            (S::SidrReceived, I::SidrReq) => {
                self.table.set_timer(c, Some(now + self.config.give_up));
                self.counters.count_drop(DropReason::Duplicate);
            }
            (S::SidrReceived, I::Answer(rep)) => self.send_answer(now, c, rep),
            (S::SidrReceived, I::Displaced) | (S::Refused | S::SidrReceived | S::SidrAnswered, I::Timer) => {
                self.table.enter(c, S::Over);
            }
            // Duplicates that need no answer, and timers of what we have sent.
            (S::RepExtended | S::Established, I::Req)
            | (S::DreqSent, I::Req | I::Rep(_) | I::Rtu)
            | (S::Timewait, I::Drep) => self.counters.count_drop(DropReason::Duplicate),
            (S::ReqSent | S::ReqExtended | S::RepSent | S::RepExtended, I::Timer)
            | (S::Established | S::DreqSent | S::SidrSent, I::Timer) => self.retry(now, c),
            (state, _) => return Err(state),
        }
        Ok(())
    }

    /// Makes a connection or resolution of a request of ours, which may stay without any answer for `timeout`.
    pub(super) fn begin(&mut self, now: Instant, c: Conn, request: impl Into<Message>, timeout: Duration) -> ConnId {
        let mut c = self.table.register(c);
        let mad = Mad::new(c.transaction_id, request);
        self.start_exchange(now, &mut c, &mad, timeout);
        let id = c.id;
        self.table.put(c);
        id
    }

    /// Sends a message that awaits an answer, and starts its timer. It may stay without any answer for `give_up`.
    fn start_exchange(&mut self, now: Instant, c: &mut Conn, mad: &Mad, give_up: Duration) {
        let first = self.config.first_pause();
        let (mad, deadline) = (mad.emit(), now + give_up);
        let pause = self.pause(c, first);
        c.exchange = Some(Box::new(Exchange {
            mad,
            retries: c.max_retries,
            pause: (2 * first).min(c.max_pause),
            extended: false,
            extensions: MAX_EXTENSIONS,
            deadline,
        }));
        self.table.set_timer(c, Some((now + pause).min(deadline)));
        self.send_of(c, mad, Cause::Own);
    }

    /// Returns the pause before a retransmission. It is never shorter than our first one if the request is the peer's.
    fn pause(&mut self, c: &Conn, pause: Duration) -> Duration {
        let jittered = jittered(&mut self.rng, pause, c.max_pause);
        match c.is_active() {
            true => jittered,
            false => jittered.max(self.config.first_retry),
        }
    }

    /// Sends the message that awaits an answer again.
    fn resend(&mut self, c: &mut Conn, cause: Cause) {
        if let Some(mad) = c.exchange.as_ref().map(|e| e.mad)
            && self.send_of(c, mad, cause)
        {
            self.counters.count_retried(attribute_of(&mad));
        }
    }

    /// Retransmits the message that awaits an answer, or ends the exchange.
    fn retry(&mut self, now: Instant, c: &mut Conn) {
        if let Some(e) = c.exchange.as_mut().filter(|e| e.retries > 0 && now < e.deadline) {
            let (pause, deadline) = (e.pause, e.deadline);
            e.retries -= 1;
            e.extended = false;
            e.pause = (2 * pause).min(c.max_pause);
            let at = now + self.pause(c, pause);
            self.table.set_timer(c, Some(at.min(deadline)));
            return self.resend(c, Cause::Own);
        }
        self.counters.timeouts += 1;
        match c.state {
            S::Established => return self.send_dreq(now, c),
            S::DreqSent => return self.disconnected(now, c, true),
            S::SidrSent => return self.end(c, timed_out(c.id)),
            _ => {}
        }
        let was_half_open = c.state.is_half_open();
        if c.validation.is_proven() {
            self.refuse(now, c, RejectReason::TIMEOUT, [0; 148]);
        }
        self.report_end(c, timed_out(c.id));
        if was_half_open {
            // The peer may have sent its RTU and believe that it is connected: only a DREQ is acknowledged.
            self.send_dreq(now, c);
        }
    }

    /// Establishes an accepted connection, by the peer's RTU or data, and keeps the REP that waited for it.
    fn establish(&mut self, c: &mut Conn) {
        self.table.prove(c);
        c.answer = c.exchange.as_ref().map(|e| Box::new(e.mad));
        self.table.enter(c, S::Established);
        let private_data = Vec::new();
        self.report(
            c,
            Event::Established {
                conn: c.id,
                private_data,
            },
        );
    }

    /// Sends the REP again to a peer that may have lost the connection, until it answers.
    fn challenge(&mut self, now: Instant, c: &mut Conn) {
        let reply = c.answer.as_deref().filter(|_| c.exchange.is_none());
        let Some(Ok(mad)) = reply.map(|reply| Mad::parse(reply)) else {
            return;
        };
        self.start_exchange(now, c, &mad, self.config.give_up);
        // As many as for our own requests: too few would end an established connection.
        if let Some(e) = &mut c.exchange {
            e.retries = MAX_RETRIES;
        }
    }

    /// Ends a challenge, if there is one: the peer still has the connection.
    fn reassure(&mut self, c: &mut Conn) {
        self.table.set_timer(c, None);
        if c.exchange.take().is_none() {
            self.counters.count_drop(DropReason::Duplicate);
        }
    }

    /// Ends a connection or resolution with this event.
    fn end(&mut self, c: &mut Conn, event: Event) {
        self.report_end(c, event);
        self.table.enter(c, S::Over);
    }

    /// Restarts the timer with the time that the peer's MRA requests (`cm_mra_handler`).
    ///
    /// A second MRA while that time runs is a duplicate. Their number is limited, because a request must not stay half-open for ever.
    fn extend(&mut self, now: Instant, c: &mut Conn, code: u8) {
        let service = code_time(code.min(MAX_SERVICE_TIMEOUT));
        let at = now + service + code_time(PACKET_LIFE_TIME + 1);
        let Some(e) = c.exchange.as_mut().filter(|e| !e.extended && e.extensions > 0) else {
            self.counters.count_drop(DropReason::Duplicate);
            return;
        };
        e.extended = true;
        e.extensions -= 1;
        e.pause = self.config.first_pause().min(c.max_pause);
        e.deadline = at + self.config.give_up;
        c.state = match c.state {
            S::ReqSent => S::ReqExtended,
            S::RepSent => S::RepExtended,
            other => other,
        };
        self.counters.extended += 1;
        self.table.set_timer(c, Some(at));
    }

    /// Sends an MRA for the REQ or REP that came again.
    fn answer_mra(&mut self, now: Instant, c: &mut Conn) {
        c.granted = true;
        let subject = match c.state {
            S::ReqReceived => Subject::Req,
            _ => Subject::Rep,
        };
        if subject == Subject::Req {
            // The peer waits as long, and then repeats its REQ.
            let timeout = code_time(SERVICE_TIMEOUT) + self.config.give_up;
            self.table.set_timer(c, Some(now + timeout));
        }
        let mra = Mra {
            subject,
            service_timeout: SERVICE_TIMEOUT,
            ..Mra::between(c.ids())
        };
        self.answer_to(c, c.transaction_id, mra);
    }

    fn send_rtu(&mut self, c: &mut Conn) {
        self.answer_to(c, c.transaction_id, Rtu::between(c.ids()));
    }

    fn answer_drep(&mut self, c: &mut Conn, transaction_id: u64) {
        self.answer_to(c, transaction_id, Drep::between(c.ids()));
    }

    /// Takes the DREQ that ends a connection.
    fn take_dreq(&mut self, now: Instant, c: &mut Conn, transaction_id: u64) {
        self.answer_drep(c, transaction_id);
        self.disconnected(now, c, false);
    }

    /// Returns the DREQ of a connection.
    pub(super) fn dreq(&self, c: &Conn) -> Mad {
        let dreq = Dreq {
            remote_qpn: c.peer.qpn,
            ..Dreq::between(c.ids())
        };
        Mad::new(self.transaction(c.local_id), dreq)
    }

    /// Sends a DREQ. If the peer's address must not get even that, the connection ends without.
    fn send_dreq(&mut self, now: Instant, c: &mut Conn) {
        if !c.validation.allows(Attribute::Dreq, Cause::Own) {
            self.counters.withheld += 1;
            self.disconnected(now, c, true);
            return;
        }
        self.table.enter(c, S::DreqSent);
        self.start_exchange(now, c, &self.dreq(c), self.config.give_up);
    }

    /// Ends a connection that was established: reports it and enters timewait. `timed_out`: our DREQ was not answered.
    fn disconnected(&mut self, now: Instant, c: &mut Conn, timed_out: bool) {
        self.report_end(c, Event::Disconnected { conn: c.id, timed_out });
        self.enter_timewait(now, c);
    }

    /// Enters timewait for the local ACK timeout, twice a packet's life (IBA 12.9.8.4; `cm_enter_timewait`).
    fn enter_timewait(&mut self, now: Instant, c: &mut Conn) {
        self.table.enter(c, S::Timewait);
        let wait = code_time(c.peer.timeout).min(MAX_TIMEWAIT);
        self.table.set_timer(c, Some(now + wait));
    }

    /// Sends a REJ.
    fn refuse(&mut self, now: Instant, c: &mut Conn, reason: RejectReason, private_data: [u8; 148]) {
        let subject = match c.state {
            S::ReqReceived => Subject::Req,
            S::RepReceived => Subject::Rep,
            _ => Subject::Other,
        };
        let guid = self.config.ca_guid.to_be_bytes();
        // A timeout is found by our GUID and communication ID: the peer's may not be known (IBA table 109).
        let info: &[u8] = if reason == RejectReason::TIMEOUT { &guid } else { &[] };
        let rej = Rej {
            private_data,
            ..build::rej(c.ids(), subject, reason, info)
        };
        let mut linger = 2 * code_time(RESPONSE_TIMEOUT);
        if c.granted {
            linger += code_time(SERVICE_TIMEOUT);
        }
        self.send_final(now, c, S::Refused, rej, linger);
    }

    /// Answers a SIDR_REQ.
    fn send_answer(&mut self, now: Instant, c: &mut Conn, rep: &SidrRep) {
        let rep = SidrRep {
            request_id: c.ids().1,
            service_id: c.service_id,
            ..*rep
        };
        self.send_final(now, c, S::SidrAnswered, rep, LINGER);
    }

    /// Enters a final state with an answer that is repeated for duplicates of the request as long as the state lasts.
    fn send_final(&mut self, now: Instant, c: &mut Conn, state: State, answer: impl Into<Message>, linger: Duration) {
        self.table.enter(c, state);
        c.answer = Some(Box::new(Mad::new(c.transaction_id, answer).emit()));
        self.table.set_timer(c, Some(now + linger));
        self.repeat(c);
    }

    fn repeat(&mut self, c: &mut Conn) {
        if let Some(mad) = c.answer.as_deref().copied() {
            self.send_of(c, mad, Cause::Answer);
        }
    }

    /// Rejects a REQ, REP or RTU of a connection that has ended.
    fn reject_late(&mut self, c: &mut Conn, subject: Subject, reason: RejectReason) {
        self.answer_to(c, c.transaction_id, build::rej(c.ids(), subject, reason, &[]));
    }

    /// Records the peer's queue pair from a REP, whose numbers are known to be unused.
    fn take_reply(&mut self, c: &mut Conn, rep: &Rep) {
        let path = build::replier(c, rep);
        c.remote_id = Some(rep.local_comm_id);
        c.remote_guid = rep.local_ca_guid;
        c.peer = path;
        self.table.enter(c, S::RepReceived);
        self.table.index_remote(c);
        let event = Event::Reply {
            conn: c.id,
            path,
            private_data: rep.private_data.to_vec(),
        };
        self.report(c, event);
    }

    /// Sends the REQ again with the path MTU that its rejection names (IBA table 109). Returns false if it names none below ours.
    ///
    /// The new REQ has a communication ID of its own, so that rejections of repetitions of the old one don't concern it. At most four
    /// can follow one another, because each offers less.
    fn offer_smaller_mtu(&mut self, now: Instant, c: &mut Conn, info: &[u8]) -> bool {
        let named = info.first().copied().and_then(Mtu::from_code);
        let Some(mtu) = named.filter(|mtu| *mtu < c.peer.mtu) else {
            return false;
        };
        let Some(exchange) = &c.exchange else { return false };
        let left = exchange.deadline.saturating_since(now);
        let Ok(Message::Req(req)) = Mad::parse(&exchange.mad).map(|mad| mad.message) else {
            return false;
        };
        let (remote, offered) = (c.remote, c.peer.mtu);
        tracing::info!(%remote, "path MTU {} is more than the peer can do: asking for {}", offered.bytes(), mtu.bytes());
        let local_comm_id = self.new_comm_id();
        self.table.renumber(c, local_comm_id);
        self.table.enter(c, S::ReqSent);
        c.peer.mtu = mtu;
        c.transaction_id = self.transaction(local_comm_id);
        let req = Req {
            local_comm_id,
            path_mtu: mtu as u8,
            ..req
        };
        self.start_exchange(now, c, &Mad::new(c.transaction_id, req), left);
        true
    }

    fn take_rejection(&mut self, now: Instant, c: &mut Conn, rej: &Rej) {
        let reason = RejectReason(rej.reason);
        let info = valid(&rej.info, rej.info_length);
        if reason == RejectReason::INVALID_MTU && self.offer_smaller_mtu(now, c, &info) {
            return;
        }
        self.report_end(c, rejected(c.id, reason, info, &rej.private_data));
        if reason == RejectReason::STALE_CONNECTION || c.state == S::RepReceived {
            self.enter_timewait(now, c);
        } else {
            self.table.enter(c, S::Over);
        }
    }
}

/// Extends the wait for the RTU of a peer that repeats its REQ: as long as that says from now on, at most 69 s. An overloaded host
/// repeats it by a timer and gets to our REP much later; a connection that is given up before only makes more work for it.
fn wait_for_peer(now: Instant, c: &mut Conn) {
    let wait = c.max_pause * (u32::from(c.max_retries) + 1);
    if let Some(e) = &mut c.exchange {
        e.deadline = e.deadline.max(now + wait);
    }
}

/// Returns the event of an attempt that was not answered in time.
fn timed_out(conn: ConnId) -> Event {
    let why = NoAnswer::Timeout;
    Event::Unreachable { conn, why }
}

fn rejected(conn: ConnId, reason: RejectReason, info: Vec<u8>, data: &[u8; 148]) -> Event {
    Event::Rejected {
        conn,
        reason,
        info,
        private_data: data.to_vec(),
    }
}

fn resolved(conn: ConnId, rep: &SidrRep) -> Event {
    Event::Resolved {
        conn,
        status: rep.status,
        qpn: rep.qpn,
        qkey: rep.qkey,
        info: valid(&rep.info, rep.info_length),
        private_data: rep.private_data.to_vec(),
    }
}

/// Returns the valid part of additional information.
fn valid(info: &[u8; 72], len: u8) -> Vec<u8> {
    info.get(..usize::from(len)).unwrap_or(info).to_vec()
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};

    use super::*;
    use crate::cm::types::CmConfig;

    /// Lists all states. A new state does not compile before it is listed.
    macro_rules! states {
        ($($state:ident),* $(,)?) => {
            const STATES: &[State] = &[$(State::$state),*];

            const _: fn(State) = |state| match state {
                $(State::$state => {})*
            };
        };
    }

    states![
        ReqSent,
        ReqExtended,
        RepReceived,
        ReqReceived,
        RepSent,
        RepExtended,
        Established,
        DreqSent,
        Timewait,
        Refused,
        SidrSent,
        SidrReceived,
        SidrAnswered,
        Over,
    ];

    /// Performs an input in a state. Returns whether it is legal.
    fn is_legal(state: State, input: Input<'_>) -> bool {
        let mut m = Manager::new(CmConfig::new(7, Mtu::B1024), [1; 32]);
        let [local, remote] = [1, 2].map(|n| SocketAddr::new(IpAddr::from([192, 0, 2, n]), 7000));
        let peer = build::datagram_peer(local, remote);
        let c = m.table.register(Conn::new(Instant::ZERO, state, (local, remote), peer));
        let id = c.id;
        m.table.put(c);
        m.step(Instant::ZERO, id, input).is_ok()
    }

    #[test]
    fn every_timed_state_has_a_timer_and_every_attempt_can_be_ended() {
        for s in STATES {
            let timed = !matches!(s, State::RepReceived | State::Over);
            assert_eq!(is_legal(*s, Input::Timer), timed, "{s:?}");
            let is_sidr = matches!(s, State::SidrSent | State::SidrReceived | State::SidrAnswered);
            let has_ended = matches!(s, State::DreqSent | State::Timewait | State::Refused | State::Over);
            if !is_sidr && !has_ended {
                assert!(is_legal(*s, Input::Disconnect), "{s:?} can be ended");
            }
        }
    }
}
