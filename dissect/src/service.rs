//! Services of connections.

use std::fmt;

use roce_port::cm::cma::{PortSpace, ServiceId};
use serde::Serialize;

/// Service of a connection, by its service ID or private data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Service {
    /// RTRS, by the magic number in the private data: servers choose the port.
    Rtrs,
    /// RDS.
    Rds,
    /// LNet over o2iblnd.
    Lnet,
    /// NVMe over RDMA.
    Nvme,
    /// iSCSI extensions for RDMA.
    Iser,
    /// NFS over RDMA.
    NfsRdma,
    /// SMB Direct.
    SmbDirect,
    /// Another service.
    Other,
}

/// Ports of TCP's port space.
const PORTS: [(u16, Service); 8] = [
    (rds::proto::PORT_V4, Service::Rds),
    (rds::proto::PORT_V6, Service::Rds),
    (lnet::proto::PORT, Service::Lnet),
    (4420, Service::Nvme),
    (3260, Service::Iser),
    (20049, Service::NfsRdma),
    (5445, Service::SmbDirect),
    (445, Service::SmbDirect),
];

impl Service {
    /// Returns the service of a port in TCP's port space.
    pub(crate) fn of(id: ServiceId) -> Self {
        let port = id.port(PortSpace::Tcp);
        let known = PORTS.iter().find(|(number, _)| Some(*number) == port);
        known.map_or(Self::Other, |(_, service)| *service)
    }

    /// Name of the protocol.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rtrs => "RTRS",
            Self::Rds => "RDS",
            Self::Lnet => "LNet",
            Self::Nvme => "NVMe/RDMA",
            Self::Iser => "iSER",
            Self::NfsRdma => "NFS/RDMA",
            Self::SmbDirect => "SMB Direct",
            Self::Other => "other",
        }
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Returns a service ID in words.
pub(crate) fn describe(id: ServiceId) -> String {
    let named = PortSpace::ALL
        .into_iter()
        .find_map(|space| Some((space, id.port(space)?)));
    let service = match Service::of(id) {
        Service::Other => String::new(),
        service => format!(", {service}"),
    };
    match named {
        Some((PortSpace::Tcp, port)) => format!("{:#x} (TCP port {port}{service})", id.0),
        Some((space, port)) => format!("{:#x} ({space:?} port {port})", id.0),
        None => format!("{:#x}", id.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_have_their_ports() {
        for (space, port, service, text) in [
            (PortSpace::Tcp, 18634, Service::Rds, "0x10648ca (TCP port 18634, RDS)"),
            (PortSpace::Tcp, 16385, Service::Rds, "0x1064001 (TCP port 16385, RDS)"),
            (PortSpace::Tcp, 987, Service::Lnet, "0x10603db (TCP port 987, LNet)"),
            (
                PortSpace::Tcp,
                4420,
                Service::Nvme,
                "0x1061144 (TCP port 4420, NVMe/RDMA)",
            ),
            (PortSpace::Tcp, 3260, Service::Iser, "0x1060cbc (TCP port 3260, iSER)"),
            (
                PortSpace::Tcp,
                20049,
                Service::NfsRdma,
                "0x1064e51 (TCP port 20049, NFS/RDMA)",
            ),
            (
                PortSpace::Tcp,
                5445,
                Service::SmbDirect,
                "0x1061545 (TCP port 5445, SMB Direct)",
            ),
            (PortSpace::Tcp, 7, Service::Other, "0x1060007 (TCP port 7)"),
            (PortSpace::Udp, 4420, Service::Other, "0x1111144 (Udp port 4420)"),
        ] {
            let id = ServiceId::new(space, port);
            assert_eq!((Service::of(id), describe(id).as_str()), (service, text));
        }
        assert_eq!(describe(ServiceId(0x1000_0000_0000)), "0x100000000000");
    }
}
