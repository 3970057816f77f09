//! Machines of the hosts, and what they work with in a turn.

use roce_verbs::{
    Completion, Instant,
    provider::{Event, QpId},
};
use rtrs::Cx;

use roce_sim::{Check, lan::Machines};

use crate::{
    client::{ClientEnv, ClientSide},
    raw::RawSide,
    server::{Job, ServerEnv, ServerSide},
};

/// Calls that go to the host's RTRS as they are, and when that, or the program above it (`app`), wants to go on.
macro_rules! rtrs {
    ($self:ident, $rtrs_mut:expr, $rtrs:expr, $app:expr) => {
        fn completion(&mut $self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) {
            $rtrs_mut.completion(cx, qp, wc);
        }

        fn event(&mut $self, cx: &mut Cx<'_>, event: &Event) {
            $rtrs_mut.event(cx, event);
        }

        fn timeout(&mut $self, cx: &mut Cx<'_>) {
            $rtrs_mut.timeout(cx);
        }

        fn end_batch(&mut $self, cx: &mut Cx<'_>) {
            $rtrs_mut.end_batch(cx);
        }

        fn next_timeout(&$self) -> Option<Instant> {
            [$rtrs.next_timeout(), $app].into_iter().flatten().min()
        }
    };
}

/// The server's host.
pub(crate) struct ServerTurn<'a> {
    pub(crate) server: &'a mut ServerSide,
    /// Job that has ended.
    pub(crate) job: Option<Job>,
    pub(crate) env: ServerEnv<'a>,
}

impl Machines for ServerTurn<'_> {
    rtrs!(self, self.server.rtrs, self.server.rtrs, None);

    fn begin(&mut self, cx: &mut Cx<'_>) -> Check {
        match self.job.take() {
            Some(job) => self.server.finish(cx, job, &mut self.env),
            None => Ok(()),
        }
    }

    fn work(&mut self, cx: &mut Cx<'_>) -> Check {
        self.server.work(cx, &mut self.env)
    }
}

/// A client's host.
pub(crate) struct ClientTurn<'a> {
    pub(crate) client: &'a mut ClientSide,
    pub(crate) env: ClientEnv<'a>,
}

impl Machines for ClientTurn<'_> {
    rtrs!(
        self,
        self.client.rnbd.rtrs_mut(),
        self.client.rnbd.rtrs(),
        self.client.wakes_at()
    );

    fn work(&mut self, cx: &mut Cx<'_>) -> Check {
        self.client.work(cx, &mut self.env)
    }
}

/// One of the hosts of the client by hand.
pub(crate) struct RawTurn<'a> {
    pub(crate) raw: &'a mut RawSide,
    /// Which of them.
    pub(crate) path: usize,
    /// The other host is to have a turn soon.
    pub(crate) wakes: bool,
    pub(crate) env: ClientEnv<'a>,
}

impl Machines for RawTurn<'_> {
    rtrs!(
        self,
        self.raw.rtrs_mut(self.path),
        self.raw.rtrs(self.path),
        self.raw.app_at(self.path)
    );

    fn work(&mut self, cx: &mut Cx<'_>) -> Check {
        self.wakes = self.raw.work(cx, self.path, &mut self.env)?;
        Ok(())
    }
}
