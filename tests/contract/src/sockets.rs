//! Our engine on sockets: a device for each host on a loopback address of its own.

use std::{net::IpAddr, os::fd::BorrowedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use roce::{DeviceConfig, Flush, LocalDevice};
use roce_verbs::provider::Provider;

use crate::{Pair, Side};

/// How long a turn waits for packets, milliseconds.
const MOMENT: u16 = 2;

/// Waits a moment until one can be read.
pub(crate) fn moment(fds: &[BorrowedFd<'_>]) {
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
    let _ = poll(&mut fds, PollTimeout::from(MOMENT));
}

/// Two devices.
pub struct Sockets {
    hosts: [(IpAddr, LocalDevice); 2],
}

impl Sockets {
    /// On addresses that nobody else has.
    ///
    /// # Errors
    /// When they can't be had.
    pub fn new() -> Result<Self, String> {
        let host = || {
            let addr = IpAddr::from(ferroce_loopback::address());
            let device = LocalDevice::open(&[DeviceConfig::new(addr)]).map_err(|e| e.to_string())?;
            Ok::<_, String>((addr, device))
        };
        Ok(Self {
            hosts: [host()?, host()?],
        })
    }
}

impl Pair for Sockets {
    fn provider(&mut self, side: Side) -> &mut dyn Provider {
        self.hosts[side as usize].1.provider()
    }

    fn addr(&self, side: Side) -> IpAddr {
        self.hosts[side as usize].0
    }

    fn turn(&mut self) {
        let mut busy = false;
        for (_, device) in &mut self.hosts {
            let more = device.receive(roce::now(), 128);
            device.run_timers(roce::now(), more);
            busy |= more | (device.flush(roce::now()) != Flush::Done);
        }
        if !busy {
            let fds: Vec<_> = self
                .hosts
                .iter_mut()
                .flat_map(|(_, device)| device.descriptors())
                .collect();
            moment(&fds);
        }
    }
}
