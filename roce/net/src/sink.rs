//! Receiver of a port's events.

use roce_port::{CmEventKind, Forwarded, FromShard, Port, PortChange, QpCommand, Recipient, RxMeta};
use roce_verbs::{AsyncEvent, PathMtus};

use crate::{datapath::DatapathCounters, links::LinkChange};

/// Receives a port's events under the port's lock. An implementation must not call a driver, except [`Driver::stop`], and acquires leaf
/// locks only.
///
/// [`Driver::stop`]: crate::Driver::stop
pub trait EventSink: Send + Sync {
    /// Takes a connection event. False: it has no receiver; a connect request is then rejected.
    fn cm_event(&self, event: CmEventKind) -> bool;
    /// Takes an asynchronous event.
    fn async_event(&self, event: AsyncEvent);
    /// Wakes all waiting threads: the device has stopped.
    fn closed(&self);
    /// Reports a change that other processes at the address have to know, if the port is configured so. Comes before the event of it.
    fn port_change(&self, _change: PortChange) {}
    /// Forwards a packet that is not for the port which received it.
    fn forward(&self, _to: Recipient, _meta: &RxMeta, _bytes: &[u8]) -> Forwarded {
        Forwarded::Process
    }
    /// Takes a command for the engine that has a queue pair.
    fn command(&self, _command: QpCommand) {}
    /// Takes a report for the engine that has the connections.
    fn report(&self, _report: FromShard) {}
    /// Publishes counters to other processes, if the driver is configured so.
    fn publish(&self, _port: &Port, _path: &DatapathCounters) {}
    /// Reports changes of interfaces, without the port's lock. Returns the path MTUs that they carry now, if known.
    fn links(&self, _changes: Vec<(String, LinkChange)>) -> Option<PathMtus> {
        None
    }
}
