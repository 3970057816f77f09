//! Memory of headers and buffers, registered with each device that has a path.

use std::sync::Arc;

use roce_verbs::{
    AccessFlags,
    mem::Pages,
    provider::{DeviceIx, MrInfo, PdId, Registration, VerbsError},
};
use smallvec::SmallVec;

use crate::Cx;

/// Memory, registered with devices.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) pages: Arc<Pages>,
    /// One registration for each device that has a path.
    mrs: SmallVec<[(DeviceIx, MrInfo); 1]>,
}

impl Memory {
    /// Memory that is not registered.
    pub(super) fn new(pages: Arc<Pages>) -> Self {
        let mrs = SmallVec::new();
        Self { pages, mrs }
    }

    /// Registers it with a device.
    ///
    /// # Errors
    /// The device refuses.
    pub(super) fn register(
        &mut self,
        cx: &mut Cx<'_>,
        device: DeviceIx,
        pd: PdId,
        access: AccessFlags,
    ) -> Result<(), VerbsError> {
        let what = Registration {
            memory: self.pages.clone(),
            offset: 0,
            len: self.pages.len(),
            iova: None,
            access,
        };
        self.mrs.push((device, cx.provider.register(pd, &what)?));
        Ok(())
    }

    /// Returns its registration with a device.
    pub(super) fn on(&self, device: DeviceIx) -> Option<&MrInfo> {
        self.mrs.iter().find_map(|(of, mr)| (*of == device).then_some(mr))
    }

    /// Ends its registration with a device, or all.
    pub(super) fn deregister(&mut self, cx: &mut Cx<'_>, device: Option<DeviceIx>) {
        self.mrs.retain(|(of, mr)| {
            let stays = device.is_some_and(|device| *of != device);
            if !stays {
                cx.provider.deregister(mr.id);
            }
            stays
        });
    }
}
