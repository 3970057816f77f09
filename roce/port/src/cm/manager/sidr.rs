//! Service ID resolution (SIDR, IBA 12.11): asks which queue pair serves a service ID by datagrams. One request, one answer.
//!
//! A resolution is a [`Conn`] with states of its own. Unlike the kernel's, an answer is kept for a while and repeated for duplicates of
//! its request, so that a lost SIDR_REP does not make the consumer decide again; and a peer is known by its address besides its
//! request ID.

use core::net::SocketAddr;

use roce_verbs::{Instant, PKey, provider::VerbsError};

use super::{
    Manager, build,
    conn::Conn,
    receive::{Outcome, Way},
    state::{Input, State},
};
use crate::cm::{
    cma::{CmaHeader, HEADER_LEN, ServiceId},
    mad::{SidrRep, SidrReq, sidr_status},
    types::{ConnId, Event, ResolveArgs, SidrAnswer},
};

impl Manager {
    /// Requests the queue pair that serves a port. [`Event::Resolved`] or [`Event::Unreachable`] follows.
    ///
    /// # Errors
    /// An argument is invalid, or a limit is reached.
    pub fn resolve(&mut self, now: Instant, args: &ResolveArgs) -> Result<ConnId, VerbsError> {
        let (local, remote) = self.check_request(args.local, args.remote)?;
        let private_data = build::private_data(&CmaHeader::new(local, remote).emit(), &args.private_data)?;
        let request_id = self.new_comm_id();
        let req = SidrReq {
            request_id,
            pkey: PKey::DEFAULT,
            service_id: ServiceId::new(args.space, remote.port()).0,
            private_data,
        };
        let peer = build::datagram_peer(local, remote);
        let c = Conn {
            local_id: request_id,
            transaction_id: self.transaction(request_id),
            service_id: req.service_id,
            max_pause: build::code_time(build::RESPONSE_TIMEOUT),
            max_retries: build::MAX_RETRIES,
            ..Conn::new(now, State::SidrSent, (local, remote), peer)
        };
        Ok(self.begin(now, c, req, self.config.give_up))
    }

    /// Answers an [`Event::SidrRequest`]. The resolution has ended; destroy it.
    ///
    /// # Errors
    /// It does not wait for an answer, or there are more than 136 bytes of private data.
    pub fn answer(&mut self, now: Instant, id: ConnId, answer: &SidrAnswer) -> Result<(), VerbsError> {
        let rep = SidrRep {
            status: answer.status,
            qpn: answer.qpn,
            qkey: answer.qkey,
            private_data: build::private_data(&[], &answer.private_data)?,
            ..SidrRep::default()
        };
        self.call(now, id, Input::Answer(&rep))
    }

    /// Processes a new SIDR_REQ (`cm_sidr_req_handler`, `cma_ib_req_handler`).
    pub(super) fn on_sidr_req(&mut self, now: Instant, way: Way, req: &SidrReq) -> Outcome {
        let found = self.listener_for(way.local, ServiceId(req.service_id));
        let Some((listener, args)) = found.filter(|(_, args)| args.takes_datagrams()) else {
            return self.refuse_sidr(way, req, sidr_status::UNSUPPORTED);
        };
        let header = CmaHeader::parse(&req.private_data);
        let Some(header) = header.filter(|h| h.names(way.remote, way.local)) else {
            return self.refuse_sidr(way, req, sidr_status::REJECT);
        };
        self.make_room(now, State::SidrReceived, way, (listener, args))?;
        let local = SocketAddr::new(way.local, args.port);
        let remote = SocketAddr::new(way.remote, header.port);
        let peer = build::datagram_peer(local, remote);
        let c = self.table.register(Conn {
            listener: Some(listener),
            remote_id: Some(req.request_id),
            transaction_id: way.transaction_id,
            service_id: req.service_id,
            ..Conn::new(now, State::SidrReceived, (local, remote), peer)
        });
        let event = Event::SidrRequest {
            listener,
            conn: c.id,
            local,
            remote,
            space: args.space,
            private_data: req.private_data[HEADER_LEN..].to_vec(),
        };
        self.request(now, c, event);
        Ok(())
    }

    fn refuse_sidr(&mut self, way: Way, req: &SidrReq, status: u8) -> Outcome {
        let rep = SidrRep {
            request_id: req.request_id,
            status,
            service_id: req.service_id,
            ..SidrRep::default()
        };
        self.respond(way, rep);
        Ok(())
    }
}
