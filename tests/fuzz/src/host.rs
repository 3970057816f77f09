//! An RTRS server on the scripted provider: what there is to do is done at once, and time goes by when the input says so.

use std::{net::SocketAddr, time::Duration};

use roce_verbs::{
    Instant,
    provider::{CmKind, CmRef, Provider},
};
use rtrs::{
    Cx,
    server::{Server, ServerConfig, request::Output},
};

use crate::provider::{Keys, Scripted, Usage};

/// Far more turns than a state machine takes for any step. One that takes more hangs.
const TURNS: usize = 10_000;

/// Takes turns until two in a row had nothing to do: what the end of a turn posts may be done in the next.
pub(crate) fn settle(mut turn: impl FnMut() -> bool) {
    let mut idle = 0;
    for _ in 0..TURNS {
        idle = if turn() { 0 } else { idle + 1 };
        if idle == 2 {
            return;
        }
    }
    panic!("it does not come to rest");
}

/// The user of a server.
pub(crate) trait User {
    /// The server tells it something.
    fn told(&mut self, server: &mut Server, cx: &mut Cx<'_>, output: Output);

    /// It goes on with what it has to do; whether there was anything.
    fn work(&mut self, _: &mut Server, _: &mut Cx<'_>) -> bool {
        false
    }
}

pub(crate) struct Host<U> {
    pub(crate) provider: Scripted,
    pub(crate) server: Server,
    pub(crate) user: U,
    listener: CmRef,
    now: Instant,
}

fn no_random(_: &mut [u8]) {
    panic!("the server asks for no random bytes");
}

impl<U: User> Host<U> {
    pub(crate) fn new(config: ServerConfig, keys: Keys, user: U) -> Self {
        let mut provider = Scripted::new(&[keys]);
        let now = Instant::ZERO + Duration::from_secs(1);
        let mut cx = Cx {
            now,
            provider: &mut provider,
            random: &mut no_random,
        };
        let (server, _) = Server::listen(&mut cx, config).expect("a server");
        let listener = *provider.cms.keys().next().expect("a listener");
        Self {
            provider,
            server,
            user,
            listener,
            now,
        }
    }

    fn with<T>(&mut self, f: impl FnOnce(&mut Server, &mut Cx<'_>, &mut U) -> T) -> T {
        let mut cx = Cx {
            now: self.now,
            provider: &mut self.provider,
            random: &mut no_random,
        };
        f(&mut self.server, &mut cx, &mut self.user)
    }

    /// Calls the server, then lets it do all that there is to do.
    pub(crate) fn call<T>(&mut self, f: impl FnOnce(&mut Server, &mut Cx<'_>, &mut U) -> T) -> T {
        let out = self.with(f);
        self.quiet();
        out
    }

    /// Until the server has nothing left to do.
    pub(crate) fn quiet(&mut self) {
        settle(|| self.turn());
    }

    fn turn(&mut self) -> bool {
        let mut wcs = Vec::new();
        self.provider.poll_completions(&mut wcs, 64).expect("completions");
        let event = self.provider.poll_event();
        self.with(|server, cx, user| {
            for (qp, wc) in &wcs {
                server.completion(cx, *qp, wc);
            }
            if let Some(event) = &event {
                server.event(cx, event);
            }
            let mut moved = !wcs.is_empty() || event.is_some();
            while let Some(output) = server.poll_output() {
                moved = true;
                user.told(server, cx, output);
            }
            moved |= user.work(server, cx);
            server.end_batch(cx);
            moved
        })
    }

    /// Time goes by, with all its timers.
    pub(crate) fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(due) = self.server.next_timeout().filter(|due| *due <= end) {
            self.now = due.max(self.now);
            self.call(|server, cx, _| server.timeout(cx));
            let next = self.server.next_timeout();
            assert!(next.is_none_or(|next| next > self.now), "timers stand still");
        }
        self.now = end;
    }

    /// A client wants to connect.
    pub(crate) fn request(&mut self, local: SocketAddr, peer: SocketAddr, private_data: &[u8]) -> CmRef {
        self.provider.ask(self.listener, 0, local, peer, private_data.to_vec())
    }

    /// Something happens to a connection, if it is still there.
    pub(crate) fn event(&mut self, cm: CmRef, kind: CmKind) {
        if self.provider.cms.contains_key(&cm) {
            self.provider.tell(cm, kind);
        }
    }

    /// Ends the server, whose user has no request any more. Nothing is left.
    pub(crate) fn stop(mut self) -> U {
        self.provider.auto_complete = true;
        self.call(|server, cx, _| server.stop(cx));
        assert!(self.server.is_idle(), "a server that has ended is not idle");
        let left = self.provider.usage();
        assert_eq!(left, Usage::default(), "objects are left of a server that has ended");
        self.user
    }
}
