//! Transport of a server's requests.

use std::sync::Arc;

use roce_verbs::{Instant, mem::Pages};
use rtrs::{
    Cx,
    server::{
        Server as Rtrs,
        request::{RequestKey, SessionKey},
    },
};

/// Transport below a server: holds its requests until they are answered.
pub trait Transport {
    /// Current time.
    fn now(&self) -> Instant;

    /// Memory of a session, if it still exists.
    fn memory(&self, session: SessionKey) -> Option<&Arc<Pages>>;

    /// Writes the data of an answer into the memory of the request's session. False: it does not fit, or the session is gone.
    fn write(&mut self, request: RequestKey, at: usize, bytes: &[u8]) -> bool {
        let memory = self.memory(request.session);
        memory.is_some_and(|memory| memory.write(at, bytes).is_ok())
    }

    /// Answers a request: 0, or an error number.
    fn answer(&mut self, request: RequestKey, errno: i32);
}

/// RTRS, in a call.
#[derive(Debug)]
pub struct OverRtrs<'a, 'b> {
    /// Server that has the requests.
    pub rtrs: &'a mut Rtrs,
    /// Context of the call.
    pub cx: &'a mut Cx<'b>,
}

impl Transport for OverRtrs<'_, '_> {
    fn now(&self) -> Instant {
        self.cx.now
    }

    fn memory(&self, session: SessionKey) -> Option<&Arc<Pages>> {
        self.rtrs.memory(session)
    }

    fn answer(&mut self, request: RequestKey, errno: i32) {
        self.rtrs.answer(self.cx, request, errno);
    }
}
