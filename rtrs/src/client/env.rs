//! Environment of the parts of a client: the caller's context, and the owners of queue pairs and connections.

use std::collections::{BTreeMap, VecDeque};

use roce_verbs::provider::{CmRef, QpId};

use crate::{
    Cx,
    client::request::{Output, SessionId},
};

/// A connection of a path of a session.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct ConnKey {
    pub(super) session: SessionId,
    /// Index of the path.
    pub(super) path: u16,
    /// Its number in the path; 0 is the service connection.
    pub(super) cid: u16,
}

/// Owners of queue pairs and connections.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// By slot: looked at for each completion.
    qps: Vec<Option<(QpId, ConnKey)>>,
    cms: BTreeMap<CmRef, ConnKey>,
}

impl Names {
    pub(super) fn add_qp(&mut self, qp: QpId, key: ConnKey) {
        let slot = qp.slot() as usize;
        if self.qps.len() <= slot {
            self.qps.resize(slot + 1, None);
        }
        self.qps[slot] = Some((qp, key));
    }

    pub(super) fn remove_qp(&mut self, qp: QpId) {
        if self.qp(qp).is_some() {
            self.qps[qp.slot() as usize] = None;
        }
    }

    pub(super) fn qp(&self, qp: QpId) -> Option<ConnKey> {
        let (id, key) = (*self.qps.get(qp.slot() as usize)?)?;
        (id == qp).then_some(key)
    }

    pub(super) fn add_cm(&mut self, cm: CmRef, key: ConnKey) {
        self.cms.insert(cm, key);
    }

    pub(super) fn remove_cm(&mut self, cm: CmRef) {
        self.cms.remove(&cm);
    }

    pub(super) fn cm(&self, cm: CmRef) -> Option<ConnKey> {
        self.cms.get(&cm).copied()
    }
}

/// A call into a client.
pub(super) struct Env<'a, 'b, U> {
    pub(super) cx: &'a mut Cx<'b>,
    pub(super) names: &'a mut Names,
    pub(super) out: &'a mut VecDeque<Output<U>>,
    /// Connections that have something to post.
    pub(super) dirty: &'a mut Vec<ConnKey>,
    /// The processor that the loop runs on.
    pub(super) cpu: u16,
}
