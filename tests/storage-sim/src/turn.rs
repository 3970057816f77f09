//! A turn of a host's loop: what RTRS is handed, in the order in which loops do it.

use roce_verbs::{
    Completion, Instant,
    provider::{Event, QpId},
};
use rtrs::{Cx, client, server};

use roce_sim::Check;

use crate::{
    client::{ClientEnv, ClientSide},
    lan::Node,
    raw::RawSide,
    server::{Job, ServerEnv, ServerSide},
};

/// Rounds of a turn.
const ROUNDS: u32 = 10_000;
/// Completions of a round.
const COMPLETIONS: usize = 64;

/// RTRS of either side.
pub(crate) trait Rtrs {
    fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion);
    fn event(&mut self, cx: &mut Cx<'_>, event: &Event);
    fn timeout(&mut self, cx: &mut Cx<'_>);
    fn end_batch(&mut self, cx: &mut Cx<'_>);
    fn next_timeout(&self) -> Option<Instant>;
}

macro_rules! rtrs {
    ($side:ty) => {
        impl Rtrs for $side {
            fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) {
                self.completion(cx, qp, wc);
            }

            fn event(&mut self, cx: &mut Cx<'_>, event: &Event) {
                self.event(cx, event);
            }

            fn timeout(&mut self, cx: &mut Cx<'_>) {
                self.timeout(cx);
            }

            fn end_batch(&mut self, cx: &mut Cx<'_>) {
                self.end_batch(cx);
            }

            fn next_timeout(&self) -> Option<Instant> {
                self.next_timeout()
            }
        }
    };
}

rtrs!(client::Client);
rtrs!(client::Client<rnbd::client::Request<u64>>);
rtrs!(server::Server);

/// A host's machines, and what they work with.
pub(crate) trait Machines {
    type Rtrs: Rtrs;

    fn rtrs(&mut self) -> &mut Self::Rtrs;

    /// Before anything else.
    fn begin(&mut self, _: &mut Cx<'_>) -> Check {
        Ok(())
    }

    /// Passes on what the machines have for each other, and does what they want.
    fn work(&mut self, cx: &mut Cx<'_>) -> Check;

    /// When their program wants to go on.
    fn app_at(&self) -> Option<Instant> {
        None
    }
}

/// A turn of a host's machines. Returns when the next is due.
pub(crate) fn of_host(
    node: &mut Node,
    now: Instant,
    random: &mut dyn FnMut(&mut [u8]),
    machines: &mut impl Machines,
) -> Result<Option<Instant>, String> {
    let mut provider = node.provider(now);
    let mut cx = Cx {
        now,
        provider: &mut provider,
        random,
    };
    take(&mut cx, machines)
}

/// Hands completions and events over, until there are no more. Returns when the next turn is due.
fn take<M: Machines>(cx: &mut Cx<'_>, machines: &mut M) -> Result<Option<Instant>, String> {
    machines.begin(cx)?;
    let (mut wcs, mut ended) = (Vec::new(), false);
    for _ in 0..ROUNDS {
        let polled = cx.provider.poll_completions(&mut wcs, COMPLETIONS);
        polled.map_err(|e| e.to_string())?;
        let event = if wcs.is_empty() { cx.provider.poll_event() } else { None };
        let idle = wcs.is_empty() && event.is_none();
        if ended && idle {
            return Ok([machines.app_at(), machines.rtrs().next_timeout()]
                .into_iter()
                .flatten()
                .min());
        }
        for (qp, wc) in wcs.drain(..) {
            machines.rtrs().completion(cx, qp, &wc);
        }
        if let Some(event) = event {
            machines.rtrs().event(cx, &event);
        }
        machines.rtrs().timeout(cx);
        machines.work(cx)?;
        if idle {
            machines.rtrs().end_batch(cx);
            machines.work(cx)?;
        }
        ended = idle;
    }
    Err("a turn without end".into())
}

/// The server's host.
pub(crate) struct ServerTurn<'a> {
    pub(crate) server: &'a mut ServerSide,
    /// Job that has ended.
    pub(crate) job: Option<Job>,
    pub(crate) env: ServerEnv<'a>,
}

impl Machines for ServerTurn<'_> {
    type Rtrs = server::Server;

    fn rtrs(&mut self) -> &mut Self::Rtrs {
        &mut self.server.rtrs
    }

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
    type Rtrs = client::Client<rnbd::client::Request<u64>>;

    fn rtrs(&mut self) -> &mut Self::Rtrs {
        self.client.rnbd.rtrs_mut()
    }

    fn work(&mut self, cx: &mut Cx<'_>) -> Check {
        self.client.work(cx, &mut self.env)
    }

    fn app_at(&self) -> Option<Instant> {
        self.client.wakes_at()
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
    type Rtrs = client::Client;

    fn rtrs(&mut self) -> &mut Self::Rtrs {
        self.raw.rtrs(self.path)
    }

    fn work(&mut self, cx: &mut Cx<'_>) -> Check {
        self.wakes = self.raw.work(cx, self.path, &mut self.env)?;
        Ok(())
    }

    fn app_at(&self) -> Option<Instant> {
        self.raw.app_at(self.path)
    }
}
