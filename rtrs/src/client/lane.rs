//! State of a session that belongs to no path: permits, requests in flight, headers, buffers, and the keys
//! of reads.

use core::time::Duration;
use std::{collections::VecDeque, sync::Arc};

use roce_verbs::{
    AccessFlags, Instant,
    provider::{DeviceIx, KeyId, KeyKind, KeyStrategy, PdId, VerbsError},
};
use smallvec::SmallVec;

use crate::{
    Direction, IoError, PACKET_LIFETIME, PathError,
    client::{
        buffers::{Buffer, Buffers},
        flight::{Again, Flight, Orphan, Waits},
        headers::Headers,
        permits::{Permits, Rest},
        request::{Output, SessionId, Submission},
    },
    cx::Cx,
};

/// How long something may still come to a server's chunk, or be done there, by a path that is lost; then the permits of requests
/// that it did not answer are given out again.
const REST: Duration = Duration::from_secs(2);
/// The same for requests that were not answered by another path either: a kernel's server lets another path in while its disk is at
/// work on them (which Linux gives up after 30 s, by default).
const LONG_REST: Duration = Duration::from_secs(30);

/// A request with a permit, of which what was sent first may still be under way by a path that is down.
#[derive(Debug)]
struct Held<U> {
    permit: u16,
    request: Submission<U>,
    rest: Rest<u16>,
    then: Then,
}

/// End of a request that is held, when no packet of it can come any more.
#[derive(Debug)]
enum Then {
    /// It was done when it was sent again, by another path, and its user hears of it: earlier, the same blocks could be written anew,
    /// and the old data would come after the new.
    Tell(Result<(), IoError>),
    /// It goes by another path. A read's message is not the same there: it names another key. If what was sent first came after it,
    /// the server would find the key of a path that is no more, and this one would end as well.
    SendAgain,
}

/// How long a request is held.
fn held_until(rest: &Rest<u16>) -> Instant {
    rest.since + PACKET_LIFETIME
}

impl<U> Held<U> {
    fn again(self) -> Again<U> {
        Again {
            permit: self.permit,
            request: self.request,
            rest: Some(self.rest),
        }
    }
}

/// A device that a session has paths on.
#[derive(Debug)]
pub(super) struct Domain {
    pub(super) device: DeviceIx,
    /// As the system calls it.
    pub(super) name: Option<Arc<str>>,
    pub(super) pd: PdId,
    /// Strategy of the keys that open the buffers of reads.
    pub(super) strategy: KeyStrategy,
    /// Key of each permit, unless the keys are static.
    pub(super) keys: Vec<KeyId>,
    /// The server is asked to take them back (SEND_WITH_INV).
    pub(super) peer_invalidates: bool,
    /// Keys are granted and taken back without a work request.
    pub(super) instant: bool,
}

impl Domain {
    fn free(self, cx: &mut Cx<'_>) {
        for key in self.keys {
            cx.provider.free_key(key);
        }
        cx.provider.free_pd(self.pd);
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Lane<U> {
    session: SessionId,
    pub(super) permits: Permits<u16>,
    /// By permit.
    pub(super) flights: Vec<Option<Flight<U>>>,
    /// Requests in flight, by path.
    pub(super) loads: Vec<u32>,
    pub(super) headers: Option<Headers>,
    pub(super) buffers: Buffers,
    pub(super) domains: SmallVec<[Domain; 1]>,
    /// Requests that wait for a permit.
    pub(super) waiting: VecDeque<Submission<U>>,
    /// Requests of which something may still be under way.
    held: Vec<Held<U>>,
}

impl<U> Lane<U> {
    pub(super) fn new(session: SessionId) -> Self {
        Self {
            session,
            permits: Permits::new(0),
            flights: Vec::new(),
            loads: Vec::new(),
            headers: None,
            buffers: Buffers::new(0),
            domains: SmallVec::new(),
            waiting: VecDeque::new(),
            held: Vec::new(),
        }
    }

    pub(super) fn domain(&self, device: DeviceIx) -> Option<&Domain> {
        self.domains.iter().find(|d| d.device == device)
    }

    /// The session's protection domain on a device.
    pub(super) fn enter(&mut self, cx: &mut Cx<'_>, device: DeviceIx, revoked: bool) -> Result<PdId, VerbsError> {
        if let Some(domain) = self.domain(device) {
            return Ok(domain.pd);
        }
        let caps = cx.provider.devices().get(usize::from(device.0));
        let caps = caps.ok_or_else(|| VerbsError::Invalid("no such device".into()))?;
        let (strategy, instant) = (KeyStrategy::for_reads(caps, revoked), caps.instant_keys);
        let peer_invalidates = strategy.peer_can_invalidate() && caps.tells_invalidated;
        let name = caps.name.clone();
        if revoked && strategy == KeyStrategy::Static {
            tracing::warn!(
                device = device.0,
                "the device can't take keys back: the buffers of reads stay open"
            );
        }
        let pd = cx.provider.alloc_pd(device)?;
        self.domains.push(Domain {
            device,
            name,
            pd,
            strategy,
            keys: Vec::new(),
            peer_invalidates,
            instant,
        });
        Ok(pd)
    }

    /// Gives up what the session has on devices that none of its paths leads through any more. Queue pairs there are gone.
    pub(super) fn leave_all_but(&mut self, cx: &mut Cx<'_>, used: &[DeviceIx]) {
        for domain in core::mem::take(&mut self.domains) {
            if used.contains(&domain.device) {
                self.domains.push(domain);
                continue;
            }
            if let Some(headers) = &mut self.headers {
                headers.remove_device(cx, domain.device);
            }
            self.buffers.remove_device(cx, domain.device);
            domain.free(cx);
        }
    }

    /// A path leads through the device, and the session has `depth` permits: there are headers, keys and buffers for them.
    pub(super) fn furnish(
        &mut self,
        cx: &mut Cx<'_>,
        device: DeviceIx,
        depth: u32,
        max_user_header: u32,
    ) -> Result<(), VerbsError> {
        let depth = depth.min(u16::MAX.into());
        let held = self.held.iter().any(|held| u32::from(held.permit) >= depth);
        if held || self.flights.iter().skip(depth as usize).any(Option::is_some) {
            return Err(VerbsError::State(
                "the server's queue is another than that of what is in flight".into(),
            ));
        }
        if self.headers.as_ref().is_none_or(|h| !h.fits(depth, max_user_header)) {
            let mut headers = Headers::new(depth, max_user_header)?;
            for domain in &self.domains {
                headers.add_device(cx, domain.device, domain.pd)?;
            }
            if let Some(mut old) = self.headers.replace(headers) {
                old.close(cx);
            }
        }
        self.permits.set_depth(depth as u16);
        self.flights.resize_with(depth as usize, || None);
        let Some(at) = self.domains.iter().position(|d| d.device == device) else {
            return Err(VerbsError::Invalid("no such device".into()));
        };
        let domain = &mut self.domains[at];
        let (kind, access) = match domain.strategy {
            KeyStrategy::Static => (None, AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE),
            KeyStrategy::FastRegistration => (Some(KeyKind::FastRegistration), BOUND),
            KeyStrategy::Window1 => (Some(KeyKind::Window1), BOUND),
            KeyStrategy::Window2 => (Some(KeyKind::Window2), BOUND),
        };
        while let Some(kind) = kind.filter(|_| domain.keys.len() < depth as usize) {
            domain.keys.push(cx.provider.alloc_key(domain.pd, kind)?);
        }
        let pd = domain.pd;
        if let Some(headers) = &mut self.headers {
            headers.add_device(cx, device, pd)?;
        }
        self.buffers.add_device(cx, device, pd, access)
    }

    /// A request that has a permit goes by its path.
    pub(super) fn launch(&mut self, permit: u16, flight: Flight<U>) {
        let path = usize::from(flight.path);
        if self.loads.len() <= path {
            self.loads.resize(path + 1, 0);
        }
        self.loads[path] += 1;
        self.flights[usize::from(permit)] = Some(flight);
    }

    fn landed(&mut self, path: u16) {
        if let Some(load) = self.loads.get_mut(usize::from(path)) {
            *load = load.saturating_sub(1);
        }
    }

    /// Ends a request that has a permit.
    pub(super) fn finish(
        &mut self,
        now: Instant,
        permit: u16,
        result: Result<(), IoError>,
        out: &mut VecDeque<Output<U>>,
    ) {
        let flight = self.flights.get_mut(usize::from(permit)).and_then(Option::take);
        let Some(flight) = flight else { return };
        self.landed(flight.path);
        let request = flight.request;
        // What is read twice changes nothing.
        let early = |rest: &Rest<u16>| request.direction == Direction::Write && now < held_until(rest);
        if let Some(rest) = flight.rest.clone().filter(early) {
            let then = Then::Tell(result);
            return self.held.push(Held {
                permit,
                request,
                rest,
                then,
            });
        }
        self.release(permit, flight.rest);
        self.told(request, result, out);
    }

    /// Holds the reads that have been sent, until what was sent can't come any more. Returns the other requests.
    pub(super) fn hold(&mut self, requests: Vec<Again<U>>) -> Vec<Again<U>> {
        let mut others = Vec::new();
        for again in requests {
            let is_read = again.request.direction == Direction::Read;
            match again {
                Again {
                    permit,
                    request,
                    rest: Some(rest),
                } if is_read => self.held.push(Held {
                    permit,
                    request,
                    rest,
                    then: Then::SendAgain,
                }),
                other => others.push(other),
            }
        }
        others
    }

    /// Tells of requests that have been held for long enough. Returns those that are to be sent again.
    pub(super) fn let_go(&mut self, now: Instant, out: &mut VecDeque<Output<U>>) -> Vec<Again<U>> {
        let due = |held: &mut Held<U>| held_until(&held.rest) <= now;
        let mut again = Vec::new();
        for held in self.held.extract_if(.., due).collect::<Vec<_>>() {
            match held.then {
                Then::Tell(result) => {
                    self.release(held.permit, Some(held.rest));
                    self.told(held.request, result, out);
                }
                Then::SendAgain => again.push(held.again()),
            }
        }
        again
    }

    /// No path is left by which a request could be sent again.
    pub(super) fn unsent(&mut self) -> Vec<Again<U>> {
        let unsent = |held: &mut Held<U>| matches!(held.then, Then::SendAgain);
        self.held.extract_if(.., unsent).map(Held::again).collect()
    }

    /// The session ends while something of what is held may still come to the server: nobody knows what is left of it.
    pub(super) fn let_all_go(&mut self, out: &mut VecDeque<Output<U>>) {
        for held in core::mem::take(&mut self.held) {
            self.release(held.permit, Some(held.rest));
            self.told(held.request, Err(IoError::Path(PathError::Closed)), out);
        }
    }

    /// When the next request has been held for long enough.
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.held.iter().map(|held| held_until(&held.rest)).min()
    }

    /// A permit comes back.
    pub(super) fn release(&mut self, permit: u16, rest: Option<Rest<u16>>) {
        match rest.filter(|rest| !rest.is_over()) {
            None => self.permits.give(permit),
            Some(rest) => self.permits.give_later(permit, rest),
        }
    }

    /// A permit comes back whose request has ended without an answer.
    pub(super) fn release_unanswered(&mut self, now: Instant, permit: u16, rest: Option<Rest<u16>>) {
        let longer = rest.map(|mut rest| {
            rest.until = rest.until.max(now + LONG_REST);
            rest
        });
        self.release(permit, longer);
    }

    /// The server is done with all that has come by this path.
    pub(super) fn path_gone(&mut self, path: u16) {
        self.permits.path_gone(path);
        for rest in self.rests() {
            rest.path_gone(path);
        }
    }

    /// There is no such path any more; another may come to its place.
    pub(super) fn path_forgotten(&mut self, path: u16) {
        self.permits.path_forgotten(path);
        for rest in self.rests() {
            rest.path_forgotten(&path);
        }
    }

    /// Quarantines of requests in flight, and of those that are held.
    fn rests(&mut self) -> impl Iterator<Item = &mut Rest<u16>> {
        let flights = self.flights.iter_mut().flatten().filter_map(|f| f.rest.as_mut());
        flights.chain(self.held.iter_mut().map(|held| &mut held.rest))
    }

    /// Tells the user that a request has ended.
    pub(super) fn told(&self, request: Submission<U>, result: Result<(), IoError>, out: &mut VecDeque<Output<U>>) {
        out.push_back(Output::Done {
            session: self.session,
            tag: request.tag,
            result,
            data: request.data,
        });
    }

    /// A path is down and drained: nothing of it touches a buffer any more. Takes its requests out, in the order of their permits,
    /// which they keep.
    pub(super) fn orphans(&mut self, cx: &mut Cx<'_>, path: u16, device: Option<DeviceIx>) -> Vec<Orphan<U>> {
        let mut orphans = Vec::new();
        for permit in 0..self.flights.len() {
            let Some(mut flight) = self.flights[permit].take_if(|f| f.path == path) else {
                continue;
            };
            self.landed(path);
            if flight.key.is_some()
                && let Some(key) = device
                    .and_then(|d| self.domain(d))
                    .and_then(|d| d.keys.get(permit))
                    .copied()
            {
                cx.provider.close_key(key);
            }
            if flight.waits == Waits::Answer {
                let rest = Rest::new(path, cx.now, cx.now + REST);
                flight.rest = Some(match flight.rest.take() {
                    Some(before) => before.and(rest),
                    None => rest,
                });
            }
            orphans.push(Orphan {
                permit: permit as u16,
                flight,
            });
        }
        orphans
    }

    /// All that the session has on its devices goes. Its paths are gone already.
    pub(super) fn close(&mut self, cx: &mut Cx<'_>) {
        if let Some(mut headers) = self.headers.take() {
            headers.close(cx);
        }
        self.buffers.close(cx);
        for domain in self.domains.drain(..) {
            domain.free(cx);
        }
    }

    /// A buffer that comes back.
    pub(super) fn give(&mut self, buffer: Buffer) {
        self.buffers.give(buffer);
    }
}

/// Rights of memory that keys of their own open.
const BOUND: AccessFlags = AccessFlags::LOCAL_WRITE.union(AccessFlags::MW_BIND);
