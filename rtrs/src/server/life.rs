//! The life of a server's paths, by their table.

use roce_verbs::provider::QpId;

use crate::{
    Cx, PathError,
    admission::PathKey,
    server::{
        effects::Place,
        post::ServerWork,
        request::{Output, SessionKey, SessionOpened},
        server::Server,
        state::{PATH, PathAction, PathEvent, PathState, Phase},
    },
    table::step,
};

impl Server {
    pub(super) fn drained(&mut self, cx: &mut Cx<'_>, qp: QpId) -> bool {
        let Some(place) = self.qps.get(&qp).copied() else {
            return false;
        };
        let path = self.path_mut(place.session, place.path);
        if path.is_some_and(|path| path.drained(place.cid)) {
            self.advance(cx, place.session, place.path, PathEvent::Drained);
            self.look_after(cx, place.session, place.path);
        }
        true
    }

    /// A path that is going down may be over.
    pub(super) fn look_after(&mut self, cx: &mut Cx<'_>, session: SessionKey, path: PathKey) {
        let over = self
            .path(session, path)
            .is_some_and(|path| path.is_drained() && path.with_user == 0);
        if over {
            self.advance(cx, session, path, PathEvent::Idle);
        }
    }

    /// Takes down the paths that can't go on, answers those that waited, and notes when to look at the others.
    pub(super) fn settle(&mut self, cx: &mut Cx<'_>) {
        while self.effects.is_unsettled() {
            let wake = self.effects.wake.take();
            self.wake(wake);
            for session in core::mem::take(&mut self.effects.settled) {
                self.name_waiting(cx, session);
            }
            if let Some((session, path, why)) = self.effects.broken.pop_front() {
                self.fail(cx, session, path, why);
            }
        }
    }

    /// Takes a path down.
    fn fail(&mut self, cx: &mut Cx<'_>, key: SessionKey, path_key: PathKey, why: PathError) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        let name = session.named.as_ref().map_or("", |named| &named.name);
        let path = session.paths.get_mut(&path_key);
        let Some(path) = path.filter(|path| path.is_alive()) else {
            return;
        };
        let why = path.cause(cx, why);
        let peer = path.id.peer;
        self.effects.counters.ended(&why);
        match why {
            PathError::Closed | PathError::PeerDisconnected | PathError::GivenUp => {
                tracing::info!(session = name, %peer, reason = %why, "path closed");
            }
            _ => tracing::warn!(session = name, %peer, error = %why, "path closed"),
        }
        let Some((_, actions)) = step(PATH, path.phase.state(), PathEvent::Broken) else {
            return;
        };
        path.close(why);
        for action in actions {
            self.act(cx, key, path_key, *action);
        }
    }

    /// Advances a path that is not broken.
    pub(super) fn advance(&mut self, cx: &mut Cx<'_>, session: SessionKey, path: PathKey, event: PathEvent) {
        let heartbeat = self.config.heartbeat;
        let Some(entry) = self.path_mut(session, path) else {
            return;
        };
        let Some((next, actions)) = step(PATH, entry.phase.state(), event) else {
            return;
        };
        match next {
            PathState::Connected => entry.phase = Phase::connected(heartbeat, cx.now),
            PathState::Closed => entry.phase.finish(),
            PathState::Connecting | PathState::Closing => {}
        }
        for action in actions {
            self.act(cx, session, path, *action);
        }
    }

    fn act(&mut self, cx: &mut Cx<'_>, key: SessionKey, path_key: PathKey, action: PathAction) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        let Some(path) = session.paths.get_mut(&path_key) else {
            return;
        };
        match action {
            PathAction::StartHeartbeat => {
                let due = path.next_timeout();
                self.wake(due);
            }
            PathAction::Announce => self.announce(key, path_key),
            PathAction::PostInfo => {
                let work = ServerWork::info(self.config.queue_depth, path.renewal());
                let place = Place {
                    session: key,
                    path: path_key,
                    cid: 0,
                };
                if let Err(why) = path.push(place, work, &mut self.effects) {
                    self.effects.broken.push_back((key, path_key, why.into()));
                }
            }
            PathAction::DropParked => session.drop_parked(path_key, &mut self.effects),
            PathAction::DrainQps => path.drain(cx),
            PathAction::Disconnect => session.disconnect(cx, path_key),
            PathAction::TellAdmission => {
                let peer = path.id.peer.ip();
                let why = path.phase.ending().map(|ending| &ending.why);
                let access_error = matches!(why, Some(PathError::AccessError));
                self.accept.admission(|admission| {
                    admission.closing(path_key);
                    if access_error {
                        admission.access_error(cx.now, peer);
                    }
                });
            }
            PathAction::DropAnswers => session.drop_answers(path_key),
            PathAction::ReleaseParked => session.release_all(cx, &mut self.effects),
            PathAction::DestroyQps => {
                for conn in path.conns() {
                    self.cms.remove(&conn.cm);
                    self.qps.remove(&conn.qp);
                }
                path.destroy(cx);
            }
            PathAction::Withdraw => self.withdraw(cx, key, path_key),
        }
    }

    /// A path has finished its handshake.
    fn announce(&mut self, key: SessionKey, path_key: PathKey) {
        self.accept.admission(|admission| admission.up(path_key));
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        let Some(path) = session.paths.get_mut(&path_key) else {
            return;
        };
        session.up += 1;
        let (peer, local, connections) = (path.id.peer, path.id.local, path.id.connections);
        let summary = session.summary();
        tracing::info!(session = summary.name, %peer, connections, "path is up");
        if !core::mem::replace(&mut session.introduced, true) {
            self.effects.counters.sessions_opened += 1;
            self.effects.outputs.push_back(Output::SessionOpened(SessionOpened {
                session: key,
                name: summary.name,
                peer: summary.peer,
                connections: summary.connections,
            }));
        }
        self.effects.outputs.push_back(Output::PathUp {
            session: key,
            peer,
            local,
            connections,
        });
    }

    /// A path is over: its objects are gone, and the user has none of its requests.
    fn withdraw(&mut self, cx: &mut Cx<'_>, key: SessionKey, path_key: PathKey) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        let Some(path) = session.paths.remove(&path_key) else {
            return;
        };
        session.deregister_unused(cx);
        self.domains.leave(cx, session.uuid, path.id.device);
        let ending = path.phase.ending();
        let why = ending.map_or(PathError::Closed, |ending| ending.why.clone());
        if ending.is_some_and(|ending| ending.was_up) {
            session.up = session.up.saturating_sub(1);
            self.effects.outputs.push_back(Output::PathDown {
                session: key,
                peer: path.id.peer,
                local: path.id.local,
                why: why.clone(),
            });
        }
        self.accept.admission(|admission| admission.ended(path_key));
        if session.paths.is_empty() {
            self.remove_session(key, &why);
        }
    }

    /// A session has no path left.
    fn remove_session(&mut self, key: SessionKey, why: &PathError) {
        let Some(session) = self.sessions.remove(&key) else {
            return;
        };
        if session.introduced {
            self.effects.outputs.push_back(Output::SessionClosed {
                session: key,
                why: why.clone(),
            });
        }
        let outputs = &mut self.effects.outputs;
        if let Some(unwanted) = session.ticket {
            self.tickets.remove(&unwanted);
            outputs.retain(|output| !matches!(output, Output::Allocate { ticket, .. } if *ticket == unwanted));
        }
        outputs.extend(session.into_memory().map(Output::Free));
    }
}
