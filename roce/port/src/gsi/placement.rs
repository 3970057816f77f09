//! Placement of connections on the shards of an address, behind the checks of ICRC and per-host limit.

use core::{fmt, net::IpAddr, time::Duration};
use std::sync::Arc;

use crate::cm::{
    cma::{HEADER_LEN, ServiceId},
    datagram,
    mad::{Mad, Message, Req},
    requests::{RequestLimits, Requests},
};
use roce_bth::Packet;
use roce_icrc::IdSolver;
use roce_verbs::Instant;

use crate::{meta::RxMeta, steering::Numbers};

/// Time for which the shard of a connect request is remembered: RDMA_CM repeats requests for a minute.
const REMEMBERED: Duration = Duration::from_secs(90);

/// Connect request with a sound ICRC. Nothing else of it is verified: anybody may send one, with any source address.
#[derive(Clone, Copy, Debug)]
pub struct Arrival<'a> {
    /// Our address.
    pub local: IpAddr,
    /// Source address.
    pub remote: IpAddr,
    /// Requested service.
    pub service: ServiceId,
    /// Private data of the peer's program: 56 bytes, zero-padded.
    pub private_data: &'a [u8],
}

/// Chooses the shard of each connection.
pub trait Placement: Send + Sync {
    /// Returns the shard that a connect request is for; a number out of range means the first. Called in the first shard's
    /// thread, once for a request and its repetitions, after ICRC and per-host limit. It must not block.
    fn place(&self, arrival: &Arrival<'_>) -> usize;
}

/// Shard that a connect request was placed on.
struct Placed {
    /// GUID of the sender's channel adapter.
    guid: u64,
    shard: usize,
}

/// Routes management datagrams to the shards of an address, each of which has a connection manager for a range of communication IDs.
pub struct GsiRouter {
    numbers: Numbers,
    placement: Arc<dyn Placement>,
    placed: Requests<Placed>,
    solver: IdSolver,
}

impl GsiRouter {
    /// Creates a router that has placed nothing.
    pub fn new(numbers: Numbers, placement: Arc<dyn Placement>) -> Self {
        Self {
            numbers,
            placement,
            placed: Requests::new(RequestLimits::new(REMEMBERED)),
            solver: IdSolver::default(),
        }
    }

    /// Returns the shard that a management datagram is for; `None` refuses a request of a host that is at its limit.
    ///
    /// Datagrams that the port is going to drop go to the first shard, which counts them. Nothing of them is placed or remembered.
    pub fn route(&mut self, now: Instant, meta: &RxMeta, bytes: &[u8]) -> Option<usize> {
        let mad = Packet::parse(bytes)
            .ok()
            .and_then(|packet| datagram::check(&packet).ok()?);
        let Some(mad) = mad.and_then(|mad| Mad::parse(mad).ok()) else {
            return Some(0);
        };
        match &mad.message {
            Message::Req(_) if !meta.is_sound(&mut self.solver, bytes) => Some(0),
            Message::Req(m) => self.place(now, meta, m),
            // The peer may withdraw a request before we answer it.
            Message::Rej(m) if m.remote_comm_id == 0 => {
                let key = (meta.remote.ip().to_canonical(), m.local_comm_id);
                Some(self.placed.get(now, key).map_or(0, |placed| placed.shard))
            }
            message => Some(message.receiver_id().map_or(0, |id| self.numbers.of_comm_id(id))),
        }
    }

    /// Returns the shard of a connect request: the same one for each repetition. `None`: its host is at its limit.
    fn place(&mut self, now: Instant, meta: &RxMeta, req: &Req) -> Option<usize> {
        let remote = meta.remote.ip().to_canonical();
        let (key, guid) = ((remote, req.local_comm_id), req.local_ca_guid);
        if let Some(placed) = self.placed.get(now, key).filter(|placed| placed.guid == guid) {
            return Some(placed.shard);
        }
        // Another adapter's request with the same key takes the place of the first.
        self.placed.remove(key);
        self.placed.admit(now, remote).ok()?;
        let arrival = Arrival {
            local: meta.local.to_canonical(),
            remote,
            service: ServiceId(req.service_id),
            private_data: &req.private_data[HEADER_LEN..],
        };
        let shard = self.placement.place(&arrival);
        let shard = if shard < self.numbers.shards() { shard } else { 0 };
        self.placed.insert(now, key, Placed { guid, shard }).ok()?;
        Some(shard)
    }
}

impl fmt::Debug for GsiRouter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GsiRouter")
            .field("numbers", &self.numbers)
            .field("placed", &self.placed.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::SocketAddr,
        sync::atomic::{AtomicUsize, Ordering::Relaxed},
    };

    use roce_bth::{Bth, Deth, Header, Opcode, Psn, QKey, Qpn, ROCE_UDP_PORT};
    use roce_icrc::Flow;

    use super::*;
    use crate::steering::Steering;

    /// Counts the requests that it is asked to place.
    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl Placement for Counting {
        fn place(&self, _: &Arrival<'_>) -> usize {
            self.0.fetch_add(1, Relaxed);
            1
        }
    }

    /// Flaw of a REQ.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Flaw {
        None,
        Icrc,
        QKey,
    }

    /// Routes a REQ from an address and returns its shard.
    fn request(router: &mut GsiRouter, now: Instant, remote: IpAddr, id: u32, flaw: Flaw) -> Option<usize> {
        let req = Req {
            local_comm_id: id,
            ..Req::default()
        };
        let mad = Mad::new(1, Message::from(req));
        let mut header = Header::new(Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(1)));
        header.deth = Some(Deth {
            qkey: if flaw == Flaw::QKey { QKey(17) } else { QKey::GSI },
            reserved: 0,
            src_qp: Qpn::GSI,
        });
        let mut bytes = vec![0; roce_bth::MAX_HEADER_LEN];
        let at = header.emit(&mut bytes);
        bytes.truncate(at);
        bytes.extend(mad.emit());
        bytes.extend([0; roce_bth::ICRC_LEN]);
        let local = match remote {
            IpAddr::V4(_) => IpAddr::from([192, 0, 2, 1]),
            IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        };
        let meta = RxMeta::new(local, SocketAddr::new(remote, 50_000));
        let flow = Flow::try_from((meta.remote, SocketAddr::new(local, ROCE_UDP_PORT))).unwrap();
        flow.seal(0, &mut bytes);
        if flaw == Flaw::Icrc {
            // The length of the packet decides which Identifications may explain a difference: two bits can't.
            let last = bytes.len() - 1;
            bytes[last] ^= 0x81;
        }
        router.route(now, &meta, &bytes)
    }

    fn router() -> (GsiRouter, Arc<Counting>) {
        let counting = Arc::<Counting>::default();
        let numbers = Numbers::All(Steering::new(2).unwrap());
        (GsiRouter::new(numbers, counting.clone()), counting)
    }

    #[test]
    fn requests_that_the_port_drops_are_neither_placed_nor_remembered() {
        let (mut router, counting) = router();
        let peer = IpAddr::from([192, 0, 2, 2]);
        for id in 0..100 {
            for flaw in [Flaw::Icrc, Flaw::QKey] {
                assert_eq!(request(&mut router, Instant::ZERO, peer, id, flaw), Some(0), "{flaw:?}");
            }
        }
        assert_eq!((counting.0.load(Relaxed), router.placed.len()), (0, 0));
        assert_eq!(request(&mut router, Instant::ZERO, peer, 1, Flaw::None), Some(1));
        assert_eq!(
            request(&mut router, Instant::ZERO, peer, 1, Flaw::None),
            Some(1),
            "again"
        );
        assert_eq!((counting.0.load(Relaxed), router.placed.len()), (1, 1));
    }

    #[test]
    fn one_host_does_not_push_out_the_requests_of_another() {
        let networks = [0x2001_0db8_0000_0001_u128, 0x2001_0db8_0000_0002].map(|n| n << 64);
        let v6 = |network: u128, low: u32| IpAddr::from(std::net::Ipv6Addr::from_bits(network | u128::from(low)));
        let v4 = |low: u32| IpAddr::from(std::net::Ipv4Addr::from_bits(0xc000_0200 | low));
        for (peer, flooding) in [
            (v4(2), vec![v4(3)]),
            (v6(networks[0], 2), (3..100).map(|n| v6(networks[1], n)).collect()),
        ] {
            let (mut router, counting) = router();
            assert_eq!(request(&mut router, Instant::ZERO, peer, 1, Flaw::None), Some(1));
            let mut refused = 0;
            for id in 0..20_000 {
                let from = flooding[id as usize % flooding.len()];
                refused += u32::from(request(&mut router, Instant::ZERO, from, id, Flaw::None).is_none());
            }
            let placed = counting.0.load(Relaxed);
            assert_eq!((placed, refused), (1025, 20_000 - 1024), "refused ones are not placed");
            assert_eq!(request(&mut router, Instant::ZERO, peer, 1, Flaw::None), Some(1));
            assert_eq!(counting.0.load(Relaxed), placed, "the peer's request is still known");
        }
    }
}
