//! Operations under way.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use lnet::{
    Buffer, Failure, JobId,
    proto::{Features, NiStatus, PingInfo},
};
use roce_host::Hosted;

use crate::{
    error::Error,
    machine::{Key, LnetMachine},
};

/// Operation under way: a future of its end, to which [`wait`](Self::wait) blocks. It ends with the number of bytes: of a GET those that have
/// come, of a PUT those that have left, or of which the peer says that it took them. If it is dropped the operation goes on.
#[derive(Debug)]
#[must_use = "the operation is done once this says so"]
pub struct Pending {
    node: Arc<Hosted<LnetMachine>>,
    job: JobId,
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.node.forget(Key::Job(self.job));
        // The node may have ended.
        let _ = self.node.call(|machine| machine.forget_job(self.job));
    }
}

impl Pending {
    pub(crate) fn new(node: Arc<Hosted<LnetMachine>>, job: JobId) -> Self {
        Self { node, job }
    }

    /// Waits until the operation is done, or has failed: at the latest some time after [`Config::timeout`](lnet::Config::timeout).
    ///
    /// # Errors
    /// Why it has failed. Data may have moved nevertheless.
    pub fn wait(self) -> Result<u32, Error> {
        let end = self.node.wait(None, |machine| match machine.take_end(self.job) {
            Some(end) => Poll::Ready(end),
            None => Poll::Pending,
        })?;
        Ok(end?)
    }
}

impl Future for Pending {
    type Output = Result<u32, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<u32, Error>> {
        // First, so that no end between is missed.
        self.node.wake(Key::Job(self.job), cx.waker());
        match self.node.call(|machine| machine.take_end(self.job)) {
            Ok(None) => Poll::Pending,
            Ok(Some(end)) => Poll::Ready(end.map_err(Error::from)),
            Err(e) => Poll::Ready(Err(e.into())),
        }
    }
}

/// Answer to a ping.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PingReply {
    /// Features of the peer.
    pub features: Features,
    /// Its process ID: 12345 of a kernel.
    pub pid: u32,
    /// Its interfaces, with the loopback, whose status is a sequence number, as the first.
    pub interfaces: Vec<NiStatus>,
    /// Interfaces that it has; the reply may be cut.
    pub count: u32,
}

/// Ping under way: a future of the answer, for which [`wait`](Self::wait) blocks.
#[derive(Debug)]
#[must_use = "the answer comes by this"]
pub struct PendingPing {
    pending: Pending,
    sink: Buffer,
}

impl PendingPing {
    pub(crate) fn new(pending: Pending, sink: Buffer) -> Self {
        Self { pending, sink }
    }

    /// Waits for the answer.
    ///
    /// # Errors
    /// Why there is none, and when it can't be understood.
    pub fn wait(self) -> Result<PingReply, Error> {
        let len = self.pending.wait()?;
        reply(&self.sink, len)
    }
}

impl Future for PendingPing {
    type Output = Result<PingReply, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<PingReply, Error>> {
        let len = std::task::ready!(Pin::new(&mut self.pending).poll(cx));
        Poll::Ready(len.and_then(|len| reply(&self.sink, len)))
    }
}

fn reply(sink: &Buffer, len: u32) -> Result<PingReply, Error> {
    let bytes = sink.to_vec();
    let info = PingInfo::parse(bytes.get(..len as usize).unwrap_or(&bytes)).map_err(Failure::from)?;
    Ok(PingReply {
        features: info.features,
        pid: info.pid,
        interfaces: info.interfaces().collect(),
        count: info.count,
    })
}
