//! Protection domains. Each session has its own, on each device that its paths lead through: what another session knows of
//! its keys opens nothing to it.

use std::collections::BTreeMap;

use roce_verbs::provider::{DeviceIx, PdId, VerbsError};

use crate::{Cx, proto::Uuid};

#[derive(Debug)]
struct Domain {
    pd: PdId,
    /// Paths in it, also those that are half-open.
    paths: usize,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Domains(BTreeMap<(Uuid, DeviceIx), Domain>);

impl Domains {
    /// The domain for a path of a session, made if there is none.
    ///
    /// # Errors
    /// What `make` says.
    pub(crate) fn enter(
        &mut self,
        session: Uuid,
        device: DeviceIx,
        make: impl FnOnce() -> Result<PdId, VerbsError>,
    ) -> Result<PdId, VerbsError> {
        if let Some(domain) = self.0.get_mut(&(session, device)) {
            domain.paths += 1;
            return Ok(domain.pd);
        }
        let pd = make()?;
        self.0.insert((session, device), Domain { pd, paths: 1 });
        Ok(pd)
    }

    /// A path has given back all that it had in its domain, which goes with the last one.
    pub(crate) fn leave(&mut self, cx: &mut Cx<'_>, session: Uuid, device: DeviceIx) {
        let key = (session, device);
        let Some(domain) = self.0.get_mut(&key) else { return };
        domain.paths -= 1;
        if domain.paths == 0 {
            cx.provider.free_pd(domain.pd);
            self.0.remove(&key);
        }
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
