//! libibverbs and librdmacm: each host has its own contexts of the system's devices.

use std::net::IpAddr;

use roce::iface;
use roce_port::fabric::{Fabric, FabricConfig, Hardware as Backend, Several};
use roce_verbs::provider::Provider;

use crate::{Pair, Side, sockets::moment};

/// Two hosts on devices of this one.
pub struct Hardware {
    addrs: [IpAddr; 2],
    hosts: [Fabric<Several>; 2],
    spun: u32,
}

impl Hardware {
    /// Hosts at addresses that are those of devices; the same one twice is possible.
    ///
    /// # Errors
    /// When there are no devices, or none of them has an address.
    pub fn new(addrs: [IpAddr; 2]) -> Result<Self, String> {
        let open = |addr| {
            let devices = roce_hw::open(&[]).map_err(|e| e.to_string())?;
            devices
                .owner(addr)
                .ok_or_else(|| format!("no RDMA device has {addr}"))?;
            let mut fabric = Fabric::new(Several::new(Vec::new()), FabricConfig::default(), Vec::new());
            fabric.set_hardware(devices, iface::route_to);
            Ok::<_, String>(fabric)
        };
        let hosts = [open(addrs[0])?, open(addrs[1])?];
        Ok(Self { addrs, hosts, spun: 0 })
    }
}

impl Pair for Hardware {
    fn provider(&mut self, side: Side) -> &mut dyn Provider {
        &mut self.hosts[side as usize]
    }

    fn addr(&self, side: Side) -> IpAddr {
        self.addrs[side as usize]
    }

    fn turn(&mut self) {
        let polled = self.hosts.each_mut().map(|host| host.poll_hardware().expect("events"));
        self.spun = if polled.contains(&true) { 0 } else { self.spun + 1 };
        match self.spun {
            // What has completed meanwhile is found by the turn that follows.
            8 => self
                .hosts
                .iter_mut()
                .for_each(|host| host.arm_hardware().expect("armed")),
            10.. => {
                let fds: Vec<_> = self
                    .hosts
                    .iter()
                    .filter_map(Fabric::hardware)
                    .flat_map(Backend::descriptors)
                    .collect();
                moment(&fds);
                self.spun = 0;
            }
            _ => {}
        }
    }
}
