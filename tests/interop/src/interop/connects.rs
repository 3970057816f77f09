//! RTRS's connection requests in a capture.

use std::{net::IpAddr, path::Path};

use roce_bth::{Opcode, Packet};
use roce_pcap::{Capture, decode};
use roce_port::cm::{
    cma,
    mad::{Mad, Message},
};
use rtrs::proto::{Uuid, conn::ConnReq};

use crate::Error;

/// A connection request, as it was sent. The same may come several times.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Request {
    /// Who asks.
    pub(crate) from: IpAddr,
    /// Which connection of the path.
    pub(crate) cid: u16,
    /// Counts the path's attempts.
    pub(crate) recon_cnt: u16,
    /// The path.
    pub(crate) path: Uuid,
    /// The session.
    pub(crate) session: Uuid,
    /// The server may make the session.
    pub(crate) first_conn: bool,
}

/// All of them. The capture may still be being written.
pub(crate) fn requests(pcap: &Path) -> Result<Vec<Request>, Error> {
    let mut capture = Capture::open(pcap)?;
    let mut all = Vec::new();
    while let Some(Ok(frame)) = capture.next_frame() {
        let Ok(datagram) = decode(frame.link, frame.data) else {
            continue;
        };
        let Ok(packet) = Packet::parse(datagram.payload) else {
            continue;
        };
        let bth = &packet.header.bth;
        if bth.opcode == Opcode::UdSendOnly && bth.dest_qp.value() == 1 {
            all.extend(request(datagram.src.ip(), packet.payload));
        }
    }
    Ok(all)
}

fn request(from: IpAddr, mad: &[u8]) -> Option<Request> {
    let Message::Req(req) = Mad::parse(mad).ok()?.message else {
        return None;
    };
    let msg = ConnReq::parse(req.private_data.get(cma::HEADER_LEN..)?).ok()?;
    Some(Request {
        from,
        cid: msg.cid.get(),
        recon_cnt: msg.recon_cnt.get(),
        path: msg.path_uuid,
        session: msg.session_uuid,
        first_conn: msg.first_conn(),
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Request, requests};

    #[test]
    fn a_kernels_requests_are_read() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../pcap-fixtures");
        let all = requests(&root.join("rnbd.pcap")).expect("a capture");
        let told = |r: &Request| (r.cid, r.recon_cnt, r.first_conn);
        assert_eq!(all.iter().map(told).collect::<Vec<_>>(), [(0, 1, true), (1, 1, true)]);
        assert!(all[0].path == all[1].path && all[0].session == all[1].session && all[0].path != all[0].session);
        assert!(requests(&root.join("cm-reject.pcap")).expect("a capture").is_empty());
    }
}
