//! Thread that a node and its sockets keep alive.

use std::{net::IpAddr, sync::Arc, thread::JoinHandle};

use crate::shared::Shared;

/// Thread of a node, which ends with it.
pub(crate) struct Thread {
    pub(crate) shared: Arc<Shared>,
    addr: IpAddr,
    thread: Option<JoinHandle<()>>,
}

impl Thread {
    /// Returns the thread of a node at an address.
    pub(crate) fn new(shared: Arc<Shared>, addr: IpAddr, thread: JoinHandle<()>) -> Self {
        Self {
            shared,
            addr,
            thread: Some(thread),
        }
    }

    /// Address of the node.
    pub(crate) fn addr(&self) -> IpAddr {
        self.addr
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.shared.stop();
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed.
            let _ = thread.join();
        }
    }
}
