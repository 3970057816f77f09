//! RDMA devices beside software ones.

use std::{io, net::IpAddr};

use roce::{LocalDevice, Mtu, Usage, verbs::provider::Provider};
use roce_hw::HwDevice;

use crate::joint::{Half, Joint};

pub(crate) type Both = Joint<LocalDevice, HwDevice>;

impl Half for HwDevice {
    fn provider(&self) -> &dyn Provider {
        self
    }

    fn provider_mut(&mut self) -> &mut dyn Provider {
        self
    }
}

pub(crate) fn mtu(hardware: &HwDevice, addr: IpAddr) -> io::Result<Mtu> {
    hardware.mtu(addr)
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
