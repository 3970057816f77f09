//! ICMP errors about packets of a datapath: heard of management datagrams while that is asked for, and of nothing else.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use roce_bth::ROCE_UDP_PORT;
use roce_net::{DEFAULT_HOP_LIMIT, Datapath, Train, UdpConfig, UdpDatapath, wait_readable};
use roce_verbs::provider::NoAnswer;

const TIMEOUT: Duration = Duration::from_secs(20);

struct Bench {
    path: UdpDatapath,
    addr: IpAddr,
    /// An address where nobody receives.
    nobody: IpAddr,
}

impl Bench {
    fn new() -> Self {
        let [addr, nobody] = [(); 2].map(|()| ferroce_loopback::address().into());
        let config = UdpConfig {
            addr,
            ..UdpConfig::default()
        };
        let path = UdpDatapath::open(&config).unwrap();
        Self { path, addr, nobody }
    }

    fn send(&mut self, src_port: u16, bytes: &[u8]) {
        let train = Train {
            local: self.addr,
            remote: SocketAddr::new(self.nobody, ROCE_UDP_PORT),
            src_port,
            tos: 0,
            ttl: DEFAULT_HOP_LIMIT,
            segment_len: bytes.len(),
            bytes,
        };
        let sent = self.path.send(&mut std::iter::once(train));
        assert_eq!((sent.trains, sent.blocked), (1, false));
    }

    fn is_ready(&self, time: Duration) -> bool {
        let descriptors = self.path.descriptors();
        let each = time / descriptors.len() as u32;
        descriptors.into_iter().any(|fd| wait_readable(fd, Some(each)).unwrap())
    }

    fn heard(&mut self) -> Vec<(IpAddr, NoAnswer, Vec<u8>)> {
        let mut heard = vec![];
        self.path
            .undeliverable(&mut |e| heard.push((e.remote, e.why, e.quoted.to_vec())));
        heard
    }
}

#[test]
fn an_error_of_a_management_datagram_makes_a_descriptor_ready_and_quotes_it() {
    let mut bench = Bench::new();
    let port = bench.path.capabilities().mad_port.unwrap();
    bench.path.hear_undeliverable(true);
    let packet: Vec<u8> = (0..280).map(|n| n as u8).collect();
    bench.send(port, &packet);
    assert!(bench.is_ready(TIMEOUT));
    let nobody = bench.nobody;
    assert_eq!(bench.heard(), [(nobody, NoAnswer::PortUnreachable, packet.clone())]);
    // An error that is pending keeps no further packet from being sent.
    for _ in 0..10 {
        bench.send(port, &packet);
    }
    assert_eq!(
        bench.path.counters().tx_errors + bench.path.counters().tx_unreachable,
        0
    );
    bench.path.hear_undeliverable(false);
    assert!(
        !bench.is_ready(Duration::from_millis(50)),
        "nothing is left when nobody asks"
    );
    assert!(bench.heard().is_empty());
}

#[test]
fn errors_of_data_are_not_heard() {
    let mut bench = Bench::new();
    let capabilities = bench.path.capabilities();
    let mad_port = capabilities.mad_port.unwrap();
    assert!(
        !capabilities.src_ports.contains(&mad_port),
        "no queue pair sends from it"
    );
    bench.path.hear_undeliverable(true);
    for port in capabilities.src_ports {
        for _ in 0..10 {
            bench.send(port, &[7; 64]);
        }
    }
    // Loopback has delivered the errors by now. That of a management datagram comes behind them.
    bench.send(mad_port, &[8; 64]);
    assert!(bench.is_ready(TIMEOUT));
    assert_eq!(
        bench
            .heard()
            .into_iter()
            .map(|(.., quoted)| quoted[0])
            .collect::<Vec<_>>(),
        [8]
    );
    assert_eq!(bench.path.counters().tx_errors, 0);
}
