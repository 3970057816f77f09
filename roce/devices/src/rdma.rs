//! RDMA devices beside software ones.

use roce::{
    LocalDevice, Usage,
    verbs::provider::{Provider, VerbsError},
};
use roce_hw::HwDevice;

use crate::{
    joint::{Half, Joint},
    opener::Hardware,
};

/// RDMA devices beside software ones.
#[derive(Debug)]
pub(crate) struct Both {
    pub(crate) joint: Joint<LocalDevice, HwDevice>,
    /// The addresses of the RDMA devices.
    pub(crate) known: Hardware,
}

impl Both {
    pub(crate) fn new(soft: LocalDevice, hardware: HwDevice) -> Self {
        let this = Self {
            joint: Joint::new(soft, hardware, roce::iface::route_to),
            known: Hardware::default(),
        };
        this.known.tell(this.joint.b().addrs());
        this
    }

    /// Takes what the RDMA devices have to tell. True: there was something.
    pub(crate) fn take_news(&mut self) -> Result<bool, VerbsError> {
        let any = self.joint.b_mut().poll()?;
        if any {
            self.joint.refresh();
            self.known.tell(self.joint.b().addrs());
        }
        Ok(any)
    }
}

impl Half for HwDevice {
    fn provider(&self) -> &dyn Provider {
        self
    }

    fn provider_mut(&mut self) -> &mut dyn Provider {
        self
    }
}

pub(crate) fn usage(soft: Usage, hardware: &HwDevice) -> Usage {
    let all = hardware.usage();
    Usage {
        pds: soft.pds + all.pds,
        mrs: soft.mrs + all.mrs,
        keys: soft.keys + all.keys,
        cqs: soft.cqs + all.cqs,
        qps: soft.qps + all.qps,
        cms: soft.cms + all.cms,
    }
}
