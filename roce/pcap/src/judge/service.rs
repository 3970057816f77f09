//! Names of services, by service ID and private data.

use roce_port::cm::cma::{HEADER_LEN, PortSpace, ServiceId};

/// Magic number of RTRS's connection requests, little-endian (`RTRS_MAGIC` of rtrs-pri.h).
const RTRS_MAGIC: [u8; 2] = 0x1bbd_u16.to_le_bytes();
/// Its offset: behind RDMA_CM's header, and two bytes that belong to that with addresses of InfiniBand.
const RTRS_MAGIC_AT: usize = HEADER_LEN + 2;

/// RDMA_CM ports of well-known services: RDS's and LNet's from their sources, the others from IANA.
const PORTS: [(u16, &str); 8] = [
    (987, "LNet"),
    (2049, "NFS"),
    (3260, "iSER"),
    (4420, "NVMe/RDMA"),
    (5445, "SMB Direct"),
    (18_634, "RDS"),
    (18_635, "RDS"),
    (20_049, "NFS"),
];

/// Returns the name of a service that a REQ asks for.
pub(super) fn name(service_id: u64, private_data: &[u8]) -> String {
    let id = ServiceId(service_id);
    let Some(port) = id.port(PortSpace::Tcp) else {
        return match id.space() {
            Some(space) => format!("{space:?} port {}", service_id as u16),
            None => format!("service ID {service_id:#x}"),
        };
    };
    if private_data.get(RTRS_MAGIC_AT..RTRS_MAGIC_AT + 2) == Some(&RTRS_MAGIC) {
        return "RTRS".to_owned();
    }
    match PORTS.iter().find(|(known, _)| *known == port) {
        Some((_, name)) => (*name).to_owned(),
        None => format!("port {port}"),
    }
}
