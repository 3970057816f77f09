//! Agreement between a session's home and its other shares, on home's side.

use std::sync::Arc;

use roce_verbs::provider::DeviceIx;

use crate::{
    PathError,
    admission::Refusal,
    cx::Cx,
    server::{
        desk::Denied,
        half_open::{Arrival, Guest},
        letter::{Branch, Message, Part},
        path::Path,
        path_id::Ask,
        server::Server,
    },
};

impl Server {
    /// A letter of a share to home.
    pub(super) fn letter_to_home(&mut self, cx: &mut Cx<'_>, from: usize, message: Message) {
        match message {
            Message::Asks {
                ask,
                request,
                peer,
                device,
            } => {
                let guest = Guest::There(from, ask);
                self.arrived(
                    cx,
                    Arrival {
                        guest,
                        request,
                        peer,
                        device,
                    },
                );
            }
            Message::AsksNoMore(ask) => {
                for half_open in self.half_open.values_mut() {
                    half_open.held.retain(|held| held.guest != Guest::There(from, ask));
                }
            }
            Message::IsReady(part) => {
                if let Some(path) = self.path_mut(part.session, part.path) {
                    path.others.ready(from);
                }
                self.name_waiting(cx, part.session);
            }
            Message::Settled(part) => self.share_settled(cx, from, part),
            Message::Lost(part, why) => self.lost(cx, part, why),
            Message::Gone(Part { session, path }) => {
                if let Some(entry) = self.path_mut(session, path) {
                    entry.others.gone(from);
                }
                self.look_after(cx, session, path);
                self.name_waiting(cx, session);
            }
            Message::Busy(session) => {
                if let Some(session) = self.sessions.get_mut(&session) {
                    session.note_request(cx.now, &mut self.effects);
                }
            }
            Message::Close(session) => {
                self.close_session(cx, session);
            }
            other => tracing::debug!(from, ?other, "a letter that is not for home"),
        }
    }

    /// A path can't go on at a share. That its client used a key that it had no right to may be known only there, and only after the
    /// client has left.
    fn lost(&mut self, cx: &Cx<'_>, part: Part, why: PathError) {
        let path = self.path_mut(part.session, part.path);
        let dying = path.filter(|path| !path.is_alive());
        let known = |path: &Path| matches!(path.why, Some(PathError::AccessError));
        match (dying, &why) {
            (Some(path), PathError::AccessError) if !known(path) => {
                let peer = path.id.peer.ip();
                path.why = Some(why.clone());
                self.effects.counters.ended(&why);
                self.admission.access_error(cx.now, peer);
            }
            _ => self.effects.broken.push_back((part.session, part.path, why)),
        }
    }

    /// A path has come to be: the shares that will have connections of it are told.
    ///
    /// # Errors
    /// When the provider can't share.
    pub(super) fn tell_branches(&mut self, cx: &mut Cx<'_>, part: Part) -> Result<(), PathError> {
        let Some(session) = self.sessions.get_mut(&part.session) else {
            return Ok(());
        };
        let (Some(cells), Some(path)) = (session.cells(), session.paths.get_mut(&part.path)) else {
            return Ok(());
        };
        let shares: Vec<usize> = path.others.shares().collect();
        if shares.is_empty() {
            return Ok(());
        }
        let lent = path.lend(cx);
        if lent.is_err() {
            shares.iter().for_each(|share| path.others.gone(*share));
        }
        let (pd, keys) = lent?;
        let (peer, id) = (session.peer, path.id);
        for share in shares {
            session.told.insert(share);
            let branch = Branch {
                session: part.session,
                peer,
                id,
                pd: pd.clone(),
                keys: keys.clone(),
                cells: Arc::clone(&cells),
            };
            self.effects.write(share, Message::Path(Box::new(branch)));
        }
        Ok(())
    }

    /// A further connection of a path, whose request came to another share.
    pub(super) fn refer(
        &mut self,
        part: Part,
        cid: u16,
        device: DeviceIx,
        share: usize,
        ask: Ask,
    ) -> Result<(), Denied> {
        let path = self.path_mut(part.session, part.path).filter(|path| path.is_alive());
        let path = path.ok_or(Refusal::Unexpected)?;
        if path.id.device != device {
            let why = PathError::Unexpected("a connection through another device");
            self.effects.broken.push_back((part.session, part.path, why.clone()));
            return Err(Denied::Failed(why));
        }
        if !path.others.make(share, cid) {
            return Err(Refusal::Unexpected.into());
        }
        self.effects.write(share, Message::Accept(ask, part));
        Ok(())
    }

    /// The client has asked for the chunks, and may have them: whether all shares take its requests. Those that do not know yet are
    /// told to.
    pub(super) fn prepare(&mut self, cx: &mut Cx<'_>, part: Part) -> bool {
        let Some(path) = self.path_mut(part.session, part.path) else {
            return false;
        };
        let to_tell = path.others.unprepared();
        let ready = path.others.are_ready();
        let session = self.sessions.get(&part.session);
        for share in to_tell {
            match session.map(|session| session.terms(cx, part.path)) {
                Some(Ok(terms)) => self.effects.write(share, Message::Ready(Box::new(terms))),
                Some(Err(why)) => self.effects.broken.push_back((part.session, part.path, why)),
                None => {}
            }
        }
        ready
    }
}
