//! How a loop drives the devices.

use std::{io, net::IpAddr, os::fd::BorrowedFd};

use roce_devices::{DeviceName, Half, Rdma, roce};
use roce_verbs::{
    Mtu,
    provider::{DeviceIx, Provider, VerbsError},
};

use crate::device::{HwConfig, HwDevice};

impl Half for HwDevice {
    fn provider(&self) -> &dyn Provider {
        self
    }

    fn provider_mut(&mut self) -> &mut dyn Provider {
        self
    }
}

impl Rdma for HwDevice {
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Self::descriptors(self)
    }

    fn poll(&mut self) -> Result<bool, VerbsError> {
        Self::poll(self)
    }

    fn arm(&mut self) -> Result<(), VerbsError> {
        Self::arm(self)
    }

    fn owner(&self, addr: IpAddr) -> Option<DeviceIx> {
        Self::owner(self, addr)
    }

    fn addrs(&self) -> Vec<IpAddr> {
        Self::addrs(self).collect()
    }

    fn mtu(&self, addr: IpAddr) -> io::Result<Mtu> {
        Self::mtu(self, addr)
    }

    fn usage(&self) -> roce::Usage {
        let all = Self::usage(self);
        roce::Usage {
            pds: all.pds,
            mrs: all.mrs,
            keys: all.keys,
            cqs: all.cqs,
            qps: all.qps,
            cms: all.cms,
        }
    }
}

/// Opens devices for a loop; all that there are if none is named.
///
/// # Errors
/// As [`HwDevice::open`].
pub fn open(devices: &[DeviceName]) -> Result<Box<dyn Rdma>, VerbsError> {
    let config = HwConfig {
        devices: devices.to_vec(),
    };
    Ok(Box::new(HwDevice::open(&config)?))
}
