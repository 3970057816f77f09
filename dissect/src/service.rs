//! Service IDs in words.

pub(crate) use roce_pcap::Service;
use roce_port::cm::cma::{PortSpace, ServiceId};

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
    fn ports_are_those_of_the_protocols() {
        for port in [rds::proto::PORT_V4, rds::proto::PORT_V6] {
            assert_eq!(Service::of(ServiceId::new(PortSpace::Tcp, port)), Service::Rds);
        }
        let lnet = ServiceId::new(PortSpace::Tcp, lnet::proto::PORT);
        assert_eq!(Service::of(lnet), Service::Lnet);
    }

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
