//! Routing of packets to members.

use roce_icrc::Flow;
use roce_net::now;
use roce_port::RxMeta;
use roce_port::cm::{
    Translation,
    mad::{MAD_LEN, Mad, Message},
};

use super::{
    broker::Broker,
    gsi::{Target, target},
};
use crate::proto::Place;

/// Offsets of management class, method and transaction ID in a MAD, bytes (IBA 13.4.3).
const MAD_CLASS: usize = 1;
const MAD_METHOD: usize = 3;
const MAD_TRANSACTION: usize = 8;
/// Response bit of a MAD's method.
const METHOD_RESPONSE: u8 = 0x80;

impl Broker {
    /// Routes a packet that slot 0 received or a member handed over.
    pub(super) fn route(&mut self, meta: &RxMeta, bytes: &[u8]) {
        match target(bytes) {
            Target::Nobody(counter) => self.count(counter),
            Target::Member(place) => self.forward(place, meta, bytes),
            Target::Gsi(mad) => {
                let Some(key) = self.group_of(meta.local) else {
                    return self.count("drop_local_address");
                };
                if !self.groups.get_mut(key).is_some_and(|gsi| gsi.is_sound(meta, bytes)) {
                    self.count("icrc_errors");
                    return self.look_for_translation(meta, bytes, mad);
                }
                self.route_mad(key, meta, bytes, mad);
            }
        }
    }

    pub(super) fn route_mad(&mut self, group: usize, meta: &RxMeta, bytes: &[u8], mad: &[u8; MAD_LEN]) {
        if mad[MAD_CLASS] != roce_port::cm::mad::CLASS {
            return match transaction_owner(mad) {
                Some(place) => self.forward(place, meta, bytes),
                None => self.count("drop_bad_mad"),
            };
        }
        let Ok(Mad { message, .. }) = Mad::parse(mad) else {
            return self.count("drop_bad_mad");
        };
        self.count("rx_mads");
        let (now, remote) = (now(), meta.remote.ip());
        if self.tracker.admit(now, remote, &message).is_err() {
            return self.count("drop_requests");
        }
        // A killed process's connection has an ID of a generation that rests: its slot may be another member's by now.
        if self.orphans.observe(remote, &message) {
            return;
        }
        let owner = self.owner(meta, &message);
        if let Some(member) = owner.and_then(|place| self.clients.get(self.member_at(place)?)?.place) {
            self.tracker.forwarded(now, member, remote, &message);
            return self.forward(member, meta, bytes);
        }
        if self.is_rejoining(now) {
            // It may be for a member that has not rejoined or reported its connections. The peer retries.
            return self.count("drop_settling");
        }
        if let Some(gsi) = self.groups.get_mut(group) {
            gsi.answer(now, meta, mad);
        }
        self.count("answered_mads");
    }

    /// Returns the place that a connection manager message is for.
    fn owner(&self, meta: &RxMeta, message: &Message) -> Option<Place> {
        let by_id = |id: u32| Some(Place::of_comm_id(id)).filter(|p| p.is_valid());
        let by_remote = || self.tracker.owner(now(), meta.remote.ip(), message);
        let by_service = |service: u64| {
            let is_member = |place| self.member_at(place).is_some();
            self.ports.listener(service, meta.local, is_member)
        };
        match message {
            Message::Req(m) => by_remote().or_else(|| by_service(m.service_id)),
            Message::SidrReq(m) => by_service(m.service_id),
            Message::Rej(m) => by_id(m.remote_comm_id).or_else(by_remote),
            _ => message.receiver_id().and_then(by_id),
        }
    }

    /// Forwards a packet to the member at a place.
    fn forward(&mut self, place: Place, meta: &RxMeta, bytes: &[u8]) {
        let Some(client) = self.member_at(place).and_then(|key| self.clients.get(key)) else {
            return self.count("drop_no_process");
        };
        let sent = client.forward(*meta, bytes);
        self.count(if sent { "forwarded" } else { "drop_process_busy" });
    }

    /// Reports a request that was dropped because of its ICRC if that proves address translation.
    ///
    /// The process that listens for the service gets the request too, no more than one in 10 s: it drops the request for the same reason,
    /// and tells its user, who may not see the broker's log.
    fn look_for_translation(&mut self, meta: &RxMeta, bytes: &[u8], mad: &[u8; MAD_LEN]) {
        let Ok(flow) = Flow::try_from((meta.remote, (meta.local, roce_bth::ROCE_UDP_PORT).into())) else {
            return;
        };
        let Some((found, report)) = self.translations.examine(now(), &flow, bytes) else {
            return;
        };
        self.count("icrc_translated");
        if !report {
            return;
        }
        tracing::warn!("a connect request was {found}. {}", Translation::ADVICE);
        let listener = Mad::parse(mad).ok().and_then(|mad| self.owner(meta, &mad.message));
        if let Some(place) = listener {
            self.forward(place, meta, bytes);
        }
    }
}

/// Returns the place that a response of another management class is for, by its transaction ID. `None` for requests.
fn transaction_owner(mad: &[u8; MAD_LEN]) -> Option<Place> {
    let place = Place::of_comm_id(u32::from_be_bytes(*mad[MAD_TRANSACTION..].first_chunk()?));
    let is_response = mad[MAD_METHOD] & METHOD_RESPONSE != 0;
    (is_response && place.is_valid()).then_some(place)
}
