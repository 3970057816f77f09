//! Tests of other nodes, as of lnet_selftest.

use std::{
    fmt,
    sync::Arc,
    task::Poll,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lnet::{
    Failure, Node,
    selftest::{Run, RunCounts, RunEvent, RunPlan},
};
use roce_host::Hosted;
use roce_verbs::Instant;

use crate::{error::Error, machine::LnetMachine, node::LnetNode};

/// Test of other nodes, which this node runs as their console and client. When it is dropped the test is canceled, and the nodes leave the
/// session.
pub struct SelfTest(Arc<Hosted<LnetMachine>>);

impl fmt::Debug for SelfTest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SelfTest").finish_non_exhaustive()
    }
}

impl Drop for SelfTest {
    fn drop(&mut self) {
        // The node may have ended.
        let _ = self.stop(true);
    }
}

impl SelfTest {
    /// Waits for the next report, so long at most; `None`: until there is one. The last one is [`RunEvent::Ended`].
    ///
    /// # Errors
    /// Why the node has ended, and `TimedOut`.
    pub fn next(&self, timeout: Option<Duration>) -> Result<RunEvent, Error> {
        let next = |machine: &mut LnetMachine| machine.reports.pop_front().map_or(Poll::Pending, Poll::Ready);
        Ok(self.0.wait(timeout, next)?)
    }

    /// Returns the numbers of requests until now.
    ///
    /// # Errors
    /// Why the node has ended.
    pub fn counts(&self) -> Result<RunCounts, Error> {
        Ok(self
            .0
            .call(|machine| machine.run.as_ref().map(Run::counts).unwrap_or_default())?)
    }

    /// Asks the nodes for their counters, which come as [`RunEvent::Counters`].
    ///
    /// # Errors
    /// Why the node has ended.
    pub fn ask(&self) -> Result<(), Error> {
        self.with(Run::ask)
    }

    /// Ends the test after the requests that are under way, or with `force` cancels these.
    ///
    /// # Errors
    /// Why the node has ended.
    pub fn stop(&self, force: bool) -> Result<(), Error> {
        self.with(|run, node, now| run.stop(node, now, force))
    }

    fn with(&self, f: impl FnOnce(&mut Run, &mut Node, Instant)) -> Result<(), Error> {
        Ok(self.0.call(|machine| {
            if let Some(run) = &mut machine.run {
                f(run, &mut machine.node, roce::now());
            }
        })?)
    }
}

impl LnetNode {
    /// Begins to test other nodes. One test runs at a time.
    ///
    /// # Errors
    /// When the plan is not possible, or another test has not ended.
    pub fn selftest(&self, plan: RunPlan) -> Result<SelfTest, Error> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let stamp = since.as_micros() as u64;
        self.hosted().call(|machine| {
            if machine.run.as_ref().is_some_and(|run| !run.is_ended()) {
                return Err(Failure::Local("another test runs".into()));
            }
            machine.reports.clear();
            let run = Run::start(&mut machine.node, roce::now(), plan, stamp);
            machine.run = Some(run.map_err(|why| Failure::Local(why.into()))?);
            Ok(())
        })??;
        Ok(SelfTest(self.hosted().clone()))
    }
}
