//! Servers.

use core::{fmt, net::SocketAddr};
use std::sync::{Arc, mpsc::channel};

use roce_verbs::mem::Pages;
use roce_verbs::provider::RangeError;
use rtrs::{
    Direction, Error,
    proto::errno,
    server::{
        Server as Machine, ServerConfig, ServerCounters,
        request::{self, Output, RequestKey, SessionOpened, SessionSummary},
    },
};

use crate::host::{Host, Shop};

/// A session, as its user has it.
pub type SessionHandle = SessionOpened;

/// What the user of a server does. Called on the loop: nothing here may wait for it.
pub trait ServerOps: Send + Sync + 'static {
    /// A session's first path is up.
    fn session_opened(&self, session: &SessionHandle);
    /// A client wants something done; to be answered at once or later, from any thread.
    fn rdma_request(&self, request: Request);
    /// Its last path is gone, and all its requests are answered.
    fn session_closed(&self, session: &SessionHandle);
}

/// A server's user, and the sessions that it knows.
struct Ops {
    user: Arc<dyn ServerOps>,
    open: Vec<SessionHandle>,
}

/// A request. Dropped without an answer it ends with EIO.
pub struct Request {
    host: Host,
    shop: usize,
    request: request::Request,
    pages: Option<Arc<Pages>>,
    answered: bool,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Request").field(&self.request).finish()
    }
}

impl Request {
    /// Read or write, seen from the client.
    pub fn direction(&self) -> Direction {
        self.request.direction
    }

    /// The user's header.
    pub fn user_header(&self) -> &[u8] {
        &self.request.header
    }

    /// Bytes of data.
    pub fn data_len(&self) -> usize {
        self.request.data_len as usize
    }

    fn place(&self, offset: usize, len: usize) -> Result<(&Pages, usize), RangeError> {
        let outside = RangeError {
            offset,
            len,
            size: self.data_len(),
        };
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.data_len());
        let pages = self.pages.as_deref().filter(|_| inside).ok_or(outside)?;
        Ok((pages, self.request.data_offset + offset))
    }

    /// Copies data out of the chunk.
    ///
    /// # Errors
    /// When the range is outside the request's data.
    pub fn read_data(&self, offset: usize, out: &mut [u8]) -> Result<(), RangeError> {
        let (pages, at) = self.place(offset, out.len())?;
        pages.read(at, out)
    }

    /// Copies data into the chunk.
    ///
    /// # Errors
    /// When the range is outside the request's data.
    pub fn write_data(&self, offset: usize, data: &[u8]) -> Result<(), RangeError> {
        let (pages, at) = self.place(offset, data.len())?;
        pages.write(at, data)
    }

    /// Answers: 0, or an error number of either sign.
    pub fn complete(mut self, errno: i32) {
        self.answer(errno);
    }

    fn answer(&mut self, errno: i32) {
        if core::mem::replace(&mut self.answered, true) {
            return;
        }
        let (key, shop): (RequestKey, usize) = (self.request.key, self.shop);
        self.host.run(move |m, turn| {
            m.with(turn, |_, shops, cx| {
                if let Some(Some(shop)) = shops.get_mut(shop) {
                    shop.machine.answer(cx, key, errno);
                }
            });
        });
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.answer(errno::EIO);
    }
}

impl Ops {
    /// Passes a server's report on to its user.
    fn report(&mut self, host: &Host, shop: usize, machine: &Machine, output: Output) {
        match output {
            Output::SessionOpened(opened) => {
                self.user.session_opened(&opened);
                self.open.push(opened);
            }
            Output::SessionClosed { session, .. } => {
                if let Some(at) = self.open.iter().position(|s| s.session == session) {
                    let closed = self.open.swap_remove(at);
                    self.user.session_closed(&closed);
                }
            }
            Output::Request(request) => {
                let pages = machine.memory(request.key.session).cloned();
                self.user.rdma_request(Request {
                    host: host.weak(),
                    shop,
                    request,
                    pages,
                    answered: false,
                });
            }
            Output::PathUp { .. } | Output::PathDown { .. } | Output::Allocate { .. } | Output::Free(_) => {}
        }
    }
}

/// A server. Dropping it ends its sessions and waits for that.
pub struct Server {
    host: Host,
    shop: usize,
    local: SocketAddr,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("local", &self.local)
            .finish_non_exhaustive()
    }
}

impl Server {
    /// Listens.
    ///
    /// # Errors
    /// When it can't.
    pub fn listen(host: &Host, config: ServerConfig, user: Arc<dyn ServerOps>) -> Result<Self, Error> {
        let listens = host.ask(move |m, turn| {
            let (machine, local) = m.with(turn, |_, _, cx| Machine::listen(cx, config))?;
            let mut ops = Ops { user, open: Vec::new() };
            let reports = move |host: &Host, shop, machine: &Machine, output| ops.report(host, shop, machine, output);
            m.shops.push(Some(Shop {
                machine,
                reports: Box::new(reports),
                stopping: Vec::new(),
            }));
            Ok::<_, Error>((m.shops.len() - 1, local))
        });
        let (shop, local) = listens?;
        Ok(Self {
            host: host.clone(),
            shop,
            local,
        })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn look<T: Send + 'static>(&self, f: impl FnOnce(&Machine) -> T + Send + 'static) -> Option<T> {
        let shop = self.shop;
        self.host
            .ask(move |m, _| m.shops.get(shop).and_then(Option::as_ref).map(|s| f(&s.machine)))
    }

    /// Events so far.
    pub fn counters(&self) -> ServerCounters {
        self.look(Machine::counters).unwrap_or_default()
    }

    /// Sessions that exist, also those still being opened.
    pub fn sessions(&self) -> Vec<SessionSummary> {
        self.look(Machine::sessions).unwrap_or_default()
    }

    /// Stops listening, disconnects all sessions and waits until their requests are answered.
    pub fn shutdown(&self) {
        let (shop, (tell, stopped)) = (self.shop, channel());
        self.host.run(move |m, turn| {
            m.with(turn, |_, shops, cx| {
                if let Some(Some(shop)) = shops.get_mut(shop) {
                    shop.stopping.push(Box::new(move || {
                        let _ = tell.send(());
                    }));
                    shop.machine.stop(cx);
                }
            });
        });
        // Nothing comes of one that has stopped.
        let _ = stopped.recv();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A test that has failed does not wait for answers that it holds.
        if !std::thread::panicking() && self.host.is_strong() {
            self.shutdown();
        }
    }
}
