//! Routing of packets to members.

use roce_cm::mad::{Mad, Message};
use roce_net::now;

use super::{
    broker::Broker,
    gsi::{Arrival, Target, target},
};
use crate::proto::{Meta, Place, ToClient};

/// Offsets of management class, method and transaction ID in a MAD, bytes (IBA 13.4.3).
const MAD_CLASS: usize = 1;
const MAD_METHOD: usize = 3;
const MAD_TRANSACTION: usize = 8;
/// Response bit of a MAD's method.
const METHOD_RESPONSE: u8 = 0x80;

impl Broker {
    /// Routes a packet that slot 0 received or a member handed over.
    pub(super) fn route(&mut self, arrival: Arrival) {
        let Arrival { meta, bytes } = arrival;
        match target(&bytes) {
            Target::Nobody(counter) => self.count(counter),
            Target::Member(place) => self.forward(place, &meta, &bytes),
            Target::Gsi(mad) => {
                let Some(key) = self.group_of(meta.local) else {
                    return self.count("drop_local_address");
                };
                if !self.groups.get_mut(key).is_some_and(|gsi| gsi.is_sound(&meta, &bytes)) {
                    self.count("icrc_errors");
                    return self.look_for_translation(&meta, &bytes, mad.as_slice());
                }
                self.route_mad(key, &meta, &bytes, mad.as_slice());
            }
        }
    }

    fn route_mad(&mut self, group: usize, meta: &Meta, bytes: &[u8], mad: &[u8]) {
        if mad.get(MAD_CLASS) != Some(&roce_cm::mad::CLASS) {
            return match transaction_owner(mad) {
                Some(place) => self.forward(place, meta, bytes),
                None => self.count("drop_bad_mad"),
            };
        }
        let Ok(parsed) = Mad::parse(mad) else {
            return self.count("drop_bad_mad");
        };
        let message = parsed.message;
        self.count("rx_mads");
        let remote = meta.remote.ip();
        if self.tracker.admit(now(), remote, &message).is_err() {
            return self.count("drop_requests");
        }
        if let Some(place) = self.owner(meta, &message).and_then(|p| self.member_at(p)) {
            self.tracker.forwarded(now(), place, remote, &message);
            return self.forward(place, meta, bytes);
        }
        if self.orphans.observe(remote, &message) {
            return;
        }
        let now = now();
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
    pub(super) fn owner(&self, meta: &Meta, message: &Message) -> Option<Place> {
        let by_id = |id: u32| Some(Place::of_comm_id(id)).filter(|p| p.is_valid());
        let by_service = |service: u64| {
            self.ports
                .listener(service, meta.local, |p| self.by_place.contains_key(&p))
        };
        match message {
            Message::Req(m) => {
                let known = self.tracker.owner(now(), meta.remote.ip(), message);
                known.or_else(|| by_service(m.service_id))
            }
            Message::SidrReq(m) => by_service(m.service_id),
            Message::SidrRep(m) => by_id(m.request_id),
            Message::Rej(m) => by_id(m.remote_comm_id).or_else(|| self.tracker.owner(now(), meta.remote.ip(), message)),
            Message::Mra(m) => by_id(m.remote_comm_id),
            Message::Rep(m) => by_id(m.remote_comm_id),
            Message::Rtu(m) => by_id(m.remote_comm_id),
            Message::Dreq(m) => by_id(m.remote_comm_id),
            Message::Drep(m) => by_id(m.remote_comm_id),
        }
    }

    /// Returns the place of the member that owns the numbers of `place`: that generation, or its whole slot.
    fn member_at(&self, place: Place) -> Option<Place> {
        let candidates = [place, Place::whole(place.slot)];
        candidates.into_iter().find(|p| self.by_place.contains_key(p))
    }

    /// Forwards a packet to the member at a place.
    pub(super) fn forward(&mut self, place: Place, meta: &Meta, bytes: &[u8]) {
        let key = self.member_at(place).and_then(|place| self.by_place.get(&place));
        let Some(client) = key.and_then(|key| self.clients.get(*key)) else {
            return self.count("drop_no_process");
        };
        let sent = client.try_send(&ToClient::Datagram(*meta), bytes);
        self.count(if sent { "forwarded" } else { "drop_process_busy" });
    }
}

/// Returns the place that a response of another management class is for, by its transaction ID. `None` for requests.
fn transaction_owner(mad: &[u8]) -> Option<Place> {
    let high: &[u8; 4] = mad.get(MAD_TRANSACTION..)?.first_chunk()?;
    let is_response = mad.get(MAD_METHOD)? & METHOD_RESPONSE != 0;
    let place = Place::of_comm_id(u32::from_be_bytes(*high));
    (is_response && place.is_valid()).then_some(place)
}
