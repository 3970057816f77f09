//! Actions of the state table.

use core::time::Duration;

use roce_verbs::{
    Instant, Mtu,
    provider::{NoAnswer, RejectReason},
};

use super::{
    Manager, address_vector, build,
    build::code_time,
    conn::{Exchange, jittered},
    receive::INVALID_COMM_ID,
    state::{Action, Input, State},
    validation::Cause,
};
use crate::{
    guid,
    mad::{Attribute, MAD_LEN, Mad, Message, Rej, Rep, Req, Subject},
    types::{ConnId, DropReason, Event, RemoteQp},
};

/// How often a peer may ask for more time for one answer.
const MAX_EXTENSIONS: u8 = 4;

/// Data of an input.
pub(super) enum Detail<'a> {
    /// Nothing.
    None,
    /// A REP: received, or to send.
    Reply(&'a Rep),
    /// An RTU.
    Ready,
    /// Service timeout code of an MRA.
    Service(u8),
    /// A REJ received.
    Rejection(&'a Rej),
    /// Transaction of a DREQ.
    Transaction(u64),
    /// Why and with what private data we refuse.
    Refusal(RejectReason, [u8; 148]),
    /// Why the peer gets nothing.
    NoAnswer(NoAnswer),
}

impl Manager {
    /// Looks the input up in the table and does what it says.
    ///
    /// # Errors
    /// The state, when it doesn't allow the input; nothing has changed then.
    pub(super) fn step(&mut self, now: Instant, id: ConnId, input: Input, detail: Detail<'_>) -> Result<(), State> {
        let state = self.table.get(id).map_or(State::Over, |c| c.state);
        let action = state.action(input).ok_or(state)?;
        tracing::trace!(conn = id.0, ?state, ?input, ?action, "cm");
        self.counters.expired += u64::from((action, input) == (Action::Forget, Input::Timer));
        self.perform(now, id, state, action, detail);
        Ok(())
    }

    fn perform(&mut self, now: Instant, id: ConnId, state: State, action: Action, detail: Detail<'_>) {
        match (action, detail) {
            (Action::AnswerMra, _) => self.answer_mra(now, id, state),
            (Action::Resend, _) => self.resend(id, Cause::Answer),
            (Action::AnswerRtu, _) => self.send_rtu(id),
            (Action::AnswerDrep, Detail::Transaction(tid)) => self.answer_drep(id, tid),
            (Action::RepeatRej, _) => self.repeat_rej(id),
            (Action::RejectLate, detail) => self.reject_late(id, &detail),
            (Action::Extend, Detail::Service(code)) => self.extend(now, id, code),
            (Action::TakeReply, Detail::Reply(rep)) => self.take_reply(id, rep),
            (Action::SendRtu, _) => {
                self.table.enter(id, State::Established);
                self.send_rtu(id);
            }
            (Action::SendRep, Detail::Reply(rep)) => {
                let tid = self.table.get(id).map_or(0, |c| c.transaction_id);
                self.table.enter(id, State::RepSent);
                self.start_exchange(now, id, &Mad::new(tid, *rep));
            }
            (Action::Establish, _) => {
                self.table.prove(id);
                self.keep_reply(id);
                self.table.enter(id, State::Established);
                self.tell(Event::Established {
                    conn: id,
                    private_data: Vec::new(),
                });
            }
            (Action::Refuse, Detail::Refusal(reason, data)) => self.refuse(now, id, state, reason, data),
            (Action::Refuse, _) => self.refuse(now, id, state, default_reason(state), [0; 148]),
            (Action::TakeRejection, Detail::Rejection(rej)) => self.take_rejection(now, id, state, rej),
            (Action::Challenge, _) => self.challenge(now, id),
            (Action::Reassure, _) => self.reassure(id),
            (Action::SendDreq, _) => self.send_dreq(now, id),
            (Action::TakeDreq, Detail::Transaction(tid)) => {
                if matches!(state, State::ReqSent | State::ReqExtended) {
                    // The REP was overtaken or lost: for the consumer nothing was ever connected.
                    self.tell_end(id, rejected(id, RejectReason::CONSUMER, &[], [0; 148]));
                }
                self.answer_drep(id, tid);
                self.disconnected(now, id, false);
            }
            (Action::EnterTimewait, _) => self.disconnected(now, id, false),
            (Action::Abandon, _) => {
                self.tell_end(id, rejected(id, RejectReason::STALE_CONNECTION, &[], [0; 148]));
                if matches!(state, State::RepSent | State::RepExtended) {
                    self.send_dreq(now, id);
                } else {
                    self.refuse(now, id, state, RejectReason::STALE_CONNECTION, [0; 148]);
                }
            }
            (Action::Forget, _) => self.forget(id, state),
            (Action::Retry, _) => self.retry(now, id, state),
            (Action::GiveUp, Detail::NoAnswer(why)) => {
                self.counters.undeliverable += 1;
                self.tell_end(id, Event::Unreachable { conn: id, why });
                self.table.enter(id, State::Over);
            }
            (Action::ExitTimewait, _) => {
                self.tell(Event::TimewaitExit { conn: id });
                self.table.enter(id, State::Over);
            }
            (Action::End, _) => self.table.enter(id, State::Over),
            (Action::Ignore, _) => self.counters.count_drop(DropReason::Duplicate),
            // The receiving side and the calls pass the detail that belongs to the input.
            (action, _) => debug_assert!(false, "{action:?} without its detail"),
        }
    }

    /// Sends a message that awaits an answer, and starts its timer.
    pub(super) fn start_exchange(&mut self, now: Instant, id: ConnId, mad: &Mad) {
        self.start_patient_exchange(now, id, mad, self.config.give_up);
    }

    /// Starts an exchange that may stay without any answer for `give_up`.
    pub(super) fn start_patient_exchange(&mut self, now: Instant, id: ConnId, mad: &Mad, give_up: Duration) {
        let first = self.config.first_retry.max(Duration::from_millis(1));
        let Some(max_pause) = self.table.get(id).map(|c| c.max_pause) else {
            return;
        };
        let bytes = mad.emit();
        let pause = self.pause(id, first, max_pause);
        let Some(c) = self.table.get_mut(id) else { return };
        c.exchange = Some(Box::new(Exchange {
            mad: bytes,
            retries: c.max_retries,
            pause: (2 * first).min(max_pause),
            extended: false,
            extensions: MAX_EXTENSIONS,
            deadline: now + give_up,
        }));
        self.table.set_timer(id, Some((now + pause).min(now + give_up)));
        self.send_bytes(id, mad.message.attribute(), bytes, Cause::Own);
    }

    /// The pause before a retransmission. To a peer that asked us it is never shorter than our first one.
    fn pause(&mut self, id: ConnId, pause: Duration, longest: Duration) -> Duration {
        let jittered = jittered(&mut self.rng, pause, longest);
        match self.table.get(id) {
            Some(c) if !c.active => jittered.max(self.config.first_retry),
            _ => jittered,
        }
    }

    /// Sends what awaits an answer again.
    fn resend(&mut self, id: ConnId, cause: Cause) {
        let waiting = self.table.get(id).and_then(|c| c.exchange.as_ref()).map(|e| e.mad);
        if let Some(bytes) = waiting {
            let attribute = attribute_of(&bytes);
            if self.send_bytes(id, attribute, bytes, cause) {
                self.counters.count_retried(attribute);
            }
        }
    }

    /// The timer of a message that awaits an answer.
    fn retry(&mut self, now: Instant, id: ConnId, state: State) {
        let next = self.table.get(id).and_then(|c| {
            let e = c.exchange.as_ref()?;
            (e.retries > 0 && now < e.deadline).then_some((e.pause, c.max_pause))
        });
        if let Some((pause, max)) = next {
            let at = now + self.pause(id, pause, max);
            let Some(e) = self.table.get_mut(id).and_then(|c| c.exchange.as_mut()) else {
                return;
            };
            e.retries -= 1;
            e.extended = false;
            e.pause = (2 * pause).min(max);
            let at = at.min(e.deadline);
            self.table.set_timer(id, Some(at));
            self.resend(id, Cause::Own);
            return;
        }
        self.counters.timeouts += 1;
        if state == State::Established {
            self.send_dreq(now, id);
            return;
        }
        if state == State::DreqSent {
            self.disconnected(now, id, true);
            return;
        }
        if self.table.get(id).is_some_and(|c| c.validation.is_proven()) {
            self.refuse(now, id, state, RejectReason::TIMEOUT, [0; 148]);
        }
        self.tell_end(id, timed_out(id));
        if state.is_half_open() {
            // The peer may have sent its RTU and hold itself connected: only a DREQ is certain to arrive.
            self.send_dreq(now, id);
        }
    }

    /// Keeps the REP that waited for the RTU.
    fn keep_reply(&mut self, id: ConnId) {
        if let Some(c) = self.table.get_mut(id) {
            c.reply = c.exchange.as_ref().map(|e| Box::new(e.mad));
        }
    }

    /// Sends the REP again to a peer that may have forgotten the connection, until it says whether it has.
    fn challenge(&mut self, now: Instant, id: ConnId) {
        let reply = self.table.get(id).filter(|c| c.exchange.is_none());
        let Some(reply) = reply.and_then(|c| c.reply.as_deref()) else {
            return;
        };
        let Ok(mad) = Mad::parse(reply) else { return };
        self.start_exchange(now, id, &mad);
        // As patient as with what is of our own making: too few tries would end what stands.
        if let Some(e) = self.table.get_mut(id).and_then(|c| c.exchange.as_mut()) {
            e.retries = self.config.max_retries;
        }
    }

    /// An RTU for a connection that stands: it answers a challenge, if there is one.
    fn reassure(&mut self, id: ConnId) {
        let asked = self.table.get_mut(id).and_then(|c| c.exchange.take());
        self.table.set_timer(id, None);
        if asked.is_none() {
            self.counters.count_drop(DropReason::Duplicate);
        }
    }

    /// A request of which nobody has to be told but the consumer.
    fn forget(&mut self, id: ConnId, state: State) {
        let end = match state {
            State::ReqReceived => rejected(id, RejectReason::TIMEOUT, &[], [0; 148]),
            _ => timed_out(id),
        };
        self.tell_end(id, end);
        self.table.enter(id, State::Over);
    }

    /// An MRA of the peer's: the timer starts anew with the time that it asks for (`cm_mra_handler`).
    ///
    /// A second one while that time runs is a duplicate, and there are only so many: a request must not stay half-open
    /// for ever.
    fn extend(&mut self, now: Instant, id: ConnId, code: u8) {
        let service = code_time(code.min(self.config.max_service_timeout));
        let ack = code_time(self.config.packet_life_time + 1);
        let first = self.config.first_retry.max(Duration::from_millis(1));
        let at = now + service + ack;
        let deadline = at + self.config.give_up;
        let Some(c) = self.table.get_mut(id) else { return };
        let max_pause = c.max_pause;
        let Some(e) = c.exchange.as_mut().filter(|e| !e.extended && e.extensions > 0) else {
            self.counters.count_drop(DropReason::Duplicate);
            return;
        };
        e.extended = true;
        e.extensions -= 1;
        e.pause = first.min(max_pause);
        e.deadline = deadline;
        c.state = match c.state {
            State::ReqSent => State::ReqExtended,
            State::RepSent => State::RepExtended,
            other => other,
        };
        self.counters.extended += 1;
        self.table.set_timer(id, Some(at));
    }

    fn answer_mra(&mut self, now: Instant, id: ConnId, state: State) {
        let subject = if state == State::ReqReceived {
            Subject::Req
        } else {
            Subject::Rep
        };
        let Some(c) = self.table.get_mut(id) else { return };
        c.granted = true;
        let mad = Mad::new(c.transaction_id, build::mra(&self.config, c, subject));
        if state == State::ReqReceived {
            // So long the peer waits, and then asks again.
            let patience = code_time(self.config.service_timeout) + self.config.give_up;
            self.table.set_timer(id, Some(now + patience));
        }
        self.answer_with(id, &mad);
    }

    fn send_rtu(&mut self, id: ConnId) {
        let Some(c) = self.table.get(id) else { return };
        let mad = Mad::new(c.transaction_id, build::rtu(c));
        self.answer_with(id, &mad);
    }

    fn answer_drep(&mut self, id: ConnId, transaction_id: u64) {
        let Some(c) = self.table.get(id) else { return };
        let mad = Mad::new(transaction_id, build::drep(c.local_id, c.remote_id.unwrap_or(0)));
        self.answer_with(id, &mad);
    }

    /// Sends a DREQ. If the peer's address may not even get that, the end is not told and needs no answer.
    fn send_dreq(&mut self, now: Instant, id: ConnId) {
        let Some(c) = self.table.get(id) else { return };
        if !c.validation.allows(Attribute::Dreq, Cause::Own) {
            self.counters.withheld += 1;
            self.disconnected(now, id, true);
            return;
        }
        let mad = Mad::new(self.transaction(c.local_id), build::dreq(c));
        self.table.enter(id, State::DreqSent);
        self.start_exchange(now, id, &mad);
    }

    /// Ends a connection that was established: timewait, and the event if it was not told yet. `timed_out`: nobody answered
    /// our DREQ.
    fn disconnected(&mut self, now: Instant, id: ConnId, timed_out: bool) {
        self.tell_end(id, Event::Disconnected { conn: id, timed_out });
        self.enter_timewait(now, id);
    }

    /// Timewait lasts for the local ACK timeout, twice a packet's life (IBA 12.9.8.4; `cm_enter_timewait`).
    fn enter_timewait(&mut self, now: Instant, id: ConnId) {
        let ours = build::ack_timeout_code(self.config.ca_ack_delay, self.config.packet_life_time);
        let code = self.table.get(id).and_then(|c| c.peer).map_or(ours, |p| p.timeout);
        self.table.enter(id, State::Timewait);
        let wait = code_time(code).min(self.config.max_timewait);
        self.table.set_timer(id, Some(now + wait));
    }

    /// Sends a REJ and keeps it for a while.
    fn refuse(&mut self, now: Instant, id: ConnId, state: State, reason: RejectReason, data: [u8; 148]) {
        let subject = match state {
            State::ReqReceived => Subject::Req,
            State::RepReceived => Subject::Rep,
            _ => Subject::Other,
        };
        let guid = self.config.ca_guid.to_be_bytes();
        // A timeout is found by our GUID and communication ID: the peer's may not be known (IBA table 109).
        let info: &[u8] = if reason == RejectReason::TIMEOUT { &guid } else { &[] };
        let Some(c) = self.table.get(id) else { return };
        let mad = Mad::new(c.transaction_id, build::rej(c, subject, reason, info, data));
        let bytes = mad.emit();
        self.table.enter(id, State::Refused);
        if let Some(c) = self.table.get_mut(id) {
            c.rejection = Some(Box::new(bytes));
        }
        let mut linger = 2 * code_time(self.config.response_timeout);
        if self.table.get(id).is_some_and(|c| c.granted) {
            linger += code_time(self.config.service_timeout);
        }
        self.table.set_timer(id, Some(now + linger));
        self.send_bytes(id, Attribute::Rej, bytes, Cause::Answer);
    }

    fn repeat_rej(&mut self, id: ConnId) {
        if let Some(bytes) = self.table.get(id).and_then(|c| c.rejection.as_deref().copied()) {
            self.send_bytes(id, Attribute::Rej, bytes, Cause::Answer);
        }
    }

    /// A REQ, REP or RTU of a connection that has ended.
    fn reject_late(&mut self, id: ConnId, detail: &Detail<'_>) {
        let Some(c) = self.table.get(id) else { return };
        let (subject, reason) = match detail {
            Detail::Reply(_) => (Subject::Rep, INVALID_COMM_ID),
            Detail::Ready => (Subject::Other, INVALID_COMM_ID),
            _ => (Subject::Req, RejectReason::STALE_CONNECTION),
        };
        let mad = Mad::new(c.transaction_id, build::rej(c, subject, reason, &[], [0; 148]));
        self.answer_with(id, &mad);
    }

    /// Takes over what a REP says of the peer. The receiving side has checked that its numbers are free.
    fn take_reply(&mut self, id: ConnId, rep: &Rep) {
        let Some(c) = self.table.get_mut(id) else { return };
        let path = RemoteQp {
            av: address_vector(c.local.ip(), c.remote.ip(), c.offer.traffic_class),
            qpn: build::qpn_of(rep, c.offer.transport),
            sq_psn: rep.starting_psn,
            mtu: c.offer.mtu,
            responder_resources: rep.initiator_depth,
            initiator_depth: rep.responder_resources,
            timeout: build::ack_timeout_code(rep.target_ack_delay, self.config.packet_life_time),
            retry_cnt: c.offer.retry_count,
            rnr_retry: rep.rnr_retry_count,
            transport: c.offer.transport,
            flow_control: rep.flow_control,
            srq: rep.srq,
            keeps_packets: guid::keeps_packets(rep.local_ca_guid),
            src_port: guid::source_port(rep.local_ca_guid, rep.local_qkey),
        };
        c.remote_id = Some(rep.local_comm_id);
        c.remote_guid = rep.local_ca_guid;
        c.peer = Some(path);
        self.table.enter(id, State::RepReceived);
        self.table.index_remote(id);
        self.tell(Event::Reply {
            conn: id,
            path,
            private_data: rep.private_data.to_vec(),
        });
    }

    /// Sends the REQ again with the path MTU that its rejection names (IBA table 109). False: it names none below ours.
    ///
    /// The new REQ has a communication ID of its own, so that rejections of repetitions of the old one don't concern it. At most four
    /// can follow one another, because each offers less.
    fn offer_smaller_mtu(&mut self, now: Instant, id: ConnId, info: &[u8]) -> bool {
        let named = info.first().copied().and_then(Mtu::from_code);
        let Some(c) = self.table.get(id) else { return false };
        let Some(mtu) = named.filter(|mtu| *mtu < c.offer.mtu) else {
            return false;
        };
        let Some(exchange) = &c.exchange else { return false };
        let (left, remote, offered) = (exchange.deadline.saturating_since(now), c.remote, c.offer.mtu);
        let Ok(Message::Req(req)) = Mad::parse(&exchange.mad).map(|mad| mad.message) else {
            return false;
        };
        tracing::info!(%remote, "path MTU {} is more than the peer can do: asking for {}", offered.bytes(), mtu.bytes());
        let local_comm_id = self.new_comm_id();
        let transaction_id = self.transaction(local_comm_id);
        self.table.renumber(id, local_comm_id);
        self.table.enter(id, State::ReqSent);
        if let Some(c) = self.table.get_mut(id) {
            c.offer.mtu = mtu;
            c.transaction_id = transaction_id;
        }
        let req = Req {
            local_comm_id,
            path_mtu: mtu as u8,
            ..req
        };
        self.start_patient_exchange(now, id, &Mad::new(transaction_id, req), left);
        true
    }

    fn take_rejection(&mut self, now: Instant, id: ConnId, state: State, rej: &Rej) {
        let reason = RejectReason(rej.reason);
        let info = rej.info.get(..usize::from(rej.info_length)).unwrap_or(&rej.info);
        if reason == RejectReason::INVALID_MTU && self.offer_smaller_mtu(now, id, info) {
            return;
        }
        self.tell_end(id, rejected(id, reason, info, rej.private_data));
        if reason == RejectReason::STALE_CONNECTION || state == State::RepReceived {
            self.enter_timewait(now, id);
        } else {
            self.table.enter(id, State::Over);
        }
    }
}

/// The end of an attempt that nobody answered in time.
fn timed_out(conn: ConnId) -> Event {
    let why = NoAnswer::Timeout;
    Event::Unreachable { conn, why }
}

/// Why we refuse when the consumer only said that it is over (`cm_destroy_id`).
fn default_reason(state: State) -> RejectReason {
    match state {
        State::ReqSent | State::ReqExtended => RejectReason::TIMEOUT,
        _ => RejectReason::CONSUMER,
    }
}

fn rejected(conn: ConnId, reason: RejectReason, info: &[u8], data: [u8; 148]) -> Event {
    Event::Rejected {
        conn,
        reason,
        info: info.to_vec(),
        private_data: data.to_vec(),
    }
}

/// The attribute of a MAD that we made.
fn attribute_of(bytes: &[u8; MAD_LEN]) -> Attribute {
    Attribute::from_id(u16::from_be_bytes([bytes[16], bytes[17]])).unwrap_or(Attribute::Req)
}

/// The path MTU with a code, if we can do it.
pub(super) fn usable_mtu(code: u8, max: Mtu) -> Option<Mtu> {
    Mtu::from_code(code).filter(|m| *m <= max)
}
