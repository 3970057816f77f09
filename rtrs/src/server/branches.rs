//! Agreement between a session's home and its other shares, on the side of these: each has a branch of the session, with the connections
//! that are its.

use roce_verbs::provider::CmRef;

use crate::{
    PathError,
    admission::{PathKey, Refusal},
    cx::Cx,
    server::{
        desk::Denied,
        half_open::{Arrival, Asked},
        letter::{Branch, Message, Part, Terms},
        path::Path,
        path_id::Ask,
        request::{Output, SessionKey, SessionOpened},
        server::{Owner, Server},
        session::{Named, Session},
        state::PathEvent,
    },
};

/// Connection requests that home is asked about at a time. What strangers can keep the connection manager busy with is bounded
/// there; this bounds letters.
const MAX_ASKED: usize = 1024;

impl Server {
    /// A connection request has come here, and home decides.
    pub(super) fn ask(&mut self, home: usize, cm: CmRef, arrival: &Arrival) -> Result<(), Denied> {
        if self.asked.len() >= MAX_ASKED {
            return Err(Refusal::Held.into());
        }
        let ask = Ask(self.next_ask);
        self.next_ask += 1;
        let Arrival {
            request, peer, device, ..
        } = *arrival;
        let asked = Asked {
            cm,
            device,
            cid: request.cid,
            home,
        };
        self.asked.insert(ask, asked);
        self.cms.insert(cm, Owner::Asked(ask));
        let message = Message::Asks {
            ask,
            request,
            peer,
            device,
        };
        self.effects.write(home, message);
        Ok(())
    }

    /// A client has given up a connection that home decides about.
    pub(super) fn asks_no_more(&mut self, cx: &mut Cx<'_>, ask: Ask) {
        let Some(asked) = self.asked.remove(&ask) else { return };
        self.effects.write(asked.home, Message::AsksNoMore(ask));
        self.cms.remove(&asked.cm);
        cx.provider.cm_destroy(asked.cm);
    }

    /// No connection is wanted any more.
    pub(super) fn ask_no_more(&mut self, cx: &mut Cx<'_>) {
        while let Some((ask, _)) = self.asked.first_key_value() {
            self.asks_no_more(cx, *ask);
        }
    }

    /// A letter from a session's home.
    pub(super) fn letter_from_home(&mut self, cx: &mut Cx<'_>, home: usize, message: Message) {
        match message {
            Message::Path(branch) => self.branch(cx, home, &branch),
            Message::Accept(ask, part) => self.accept(cx, home, ask, part),
            Message::Refuse { ask, errno } => {
                if let Some(asked) = self.asked.remove(&ask) {
                    self.reject(cx, asked.cm, errno);
                }
            }
            Message::Settle(part) => self.settle_for(home, part),
            Message::Spare(part, path) => {
                if let Some(session) = self.sessions.get_mut(&part.session) {
                    session.spare(part.path, path, &mut self.effects);
                }
            }
            Message::Ready(terms) => self.make_ready(cx, &terms),
            Message::Down(Part { session, path }, why) => self.effects.broken.push_back((session, path, why)),
            Message::Over(session, why) => self.over(session, why),
            other => tracing::debug!(home, ?other, "a letter that is for home"),
        }
    }

    /// There is a path, some of whose connections will come here.
    fn branch(&mut self, cx: &mut Cx<'_>, home: usize, branch: &Branch) {
        let (layout, share) = (self.layout, self.share);
        let session = self.sessions.entry(branch.session);
        let session = session.or_insert_with(|| Session::branch(branch, home, layout, share));
        let (key, id) = (branch.session, branch.id);
        let borrow = || cx.provider.borrow_pd(id.device, &branch.pd);
        let pd = self.borrowed.enter(key, id.device, borrow).map_err(PathError::from);
        let made = pd.and_then(|pd| {
            let path = Path::branch(cx, id, pd, &branch.keys, share, &self.config);
            path.inspect_err(|_| self.borrowed.leave(cx, key, id.device))
        });
        match made {
            Ok(path) => {
                session.paths.insert(id.key, path);
            }
            Err(why) => {
                self.effects.counters.no_resources += 1;
                tracing::error!(peer = %id.peer, error = %why, "no room for a path: it is closed");
                let part = Part {
                    session: key,
                    path: id.key,
                };
                self.effects.write(home, Message::Lost(part, why));
                self.effects.write(home, Message::Gone(part));
            }
        }
    }

    /// A connection may be made.
    fn accept(&mut self, cx: &mut Cx<'_>, home: usize, ask: Ask, part: Part) {
        let Some(asked) = self.asked.remove(&ask) else {
            // The client has given it up meanwhile: the path will never be complete.
            let why = PathError::Cm("a connection was given up while it was being made".into());
            return self.effects.write(home, Message::Lost(part, why));
        };
        if let Err(denied) = self.connect(cx, part, asked.cid, asked.device, asked.cm) {
            tracing::debug!(reason = %denied, "connection refused");
            self.reject(cx, asked.cm, denied.errno());
        }
    }

    /// Requests of a path may come soon.
    fn make_ready(&mut self, cx: &mut Cx<'_>, terms: &Terms) {
        let Some(session) = self.sessions.get_mut(&terms.session) else {
            return;
        };
        if !session.paths.get(&terms.path).is_some_and(Path::is_alive) {
            return;
        }
        session.named.get_or_insert_with(|| Named {
            name: terms.name.clone(),
            connections: terms.connections,
        });
        if session.memory().is_none() {
            session.set_memory(terms.memory.clone());
        }
        match session.borrow(cx, terms.path, &terms.chunks) {
            Ok(()) => self.advance(cx, terms.session, terms.path, PathEvent::Named),
            Err(why) => self.no_room(terms.session, terms.path, why),
        }
    }

    /// A path takes requests here.
    pub(super) fn report(&mut self, key: SessionKey, path: PathKey) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        if !core::mem::replace(&mut session.introduced, true) {
            let summary = session.summary();
            self.effects.outputs.push_back(Output::SessionOpened(SessionOpened {
                session: key,
                name: summary.name,
                peer: summary.peer,
                connections: summary.connections,
            }));
        }
        self.write_home(key, Message::IsReady(Part { session: key, path }));
    }

    /// A path can't go on here, or home has ended it.
    pub(super) fn tell_home(&mut self, key: SessionKey, path: PathKey) {
        let why = self.path(key, path).and_then(|path| path.why.clone());
        let why = why.unwrap_or(PathError::Closed);
        self.write_home(key, Message::Lost(Part { session: key, path }, why));
    }

    /// Nothing of a path is left here, and the user has none of its requests.
    pub(super) fn leave(&mut self, cx: &mut Cx<'_>, key: SessionKey, path: PathKey) {
        if let Some(session) = self.sessions.get_mut(&key)
            && let Some(gone) = session.remove_path(path)
        {
            session.deregister_unused(cx);
            self.borrowed.leave(cx, key, gone.id.device);
        }
        self.write_home(key, Message::Gone(Part { session: key, path }));
    }

    fn write_home(&mut self, session: SessionKey, message: Message) {
        if let Some(home) = self.sessions.get(&session).and_then(|session| session.home) {
            self.effects.write(home, message);
        }
    }

    /// A session is over.
    fn over(&mut self, key: SessionKey, why: PathError) {
        let Some(session) = self.sessions.remove(&key) else {
            return;
        };
        if session.introduced {
            self.effects
                .outputs
                .push_back(Output::SessionClosed { session: key, why });
        }
        self.effects.outputs.extend(session.into_memory().map(Output::Free));
    }
}
