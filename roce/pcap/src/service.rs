//! Services of connections, by service ID and private data.

use std::fmt;

use roce_port::cm::cma::{HEADER_LEN, PortSpace, ServiceId};
use serde::Serialize;

/// Magic number of RTRS's connection requests, little-endian (`RTRS_MAGIC` of rtrs-pri.h).
const RTRS_MAGIC: [u8; 2] = 0x1bbd_u16.to_le_bytes();
/// Its offset: behind RDMA_CM's header, and two bytes that belong to that with addresses of InfiniBand.
const RTRS_MAGIC_AT: usize = HEADER_LEN + 2;

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

/// Ports of TCP's port space: RDS's and LNet's from their sources, the others from IANA.
const PORTS: [(u16, Service); 9] = [
    (18_634, Service::Rds),
    (16_385, Service::Rds),
    (987, Service::Lnet),
    (4420, Service::Nvme),
    (3260, Service::Iser),
    (2049, Service::NfsRdma),
    (20_049, Service::NfsRdma),
    (5445, Service::SmbDirect),
    (445, Service::SmbDirect),
];

impl Service {
    /// Returns the service of a port in TCP's port space.
    pub fn of(id: ServiceId) -> Self {
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

/// Returns the name of the service that a REQ asks for: its own, or its port.
pub(crate) fn name(service_id: u64, private_data: &[u8]) -> String {
    let id = ServiceId(service_id);
    let Some(port) = id.port(PortSpace::Tcp) else {
        return match id.space() {
            Some(space) => format!("{space:?} port {}", service_id as u16),
            None => format!("service ID {service_id:#x}"),
        };
    };
    if private_data.get(RTRS_MAGIC_AT..RTRS_MAGIC_AT + 2) == Some(&RTRS_MAGIC) {
        return Service::Rtrs.to_string();
    }
    match Service::of(id) {
        Service::Other => format!("port {port}"),
        service => service.to_string(),
    }
}
