//! Sockets of the script's end: raw IP ones, so that source ports, Identifications, wrong senders and damage are the script's.

use core::{net::IpAddr, time::Duration};
use std::{
    collections::{HashSet, VecDeque},
    io,
    time::Instant,
};

use roce_bth::{Header, Packet, Qpn, ROCE_UDP_PORT};
use roce_net::{AnySource, Datapath, DatapathKind, UdpConfig, open_shards, packets, wait_readable};

use crate::host::Datagram;

/// Packets taken from the socket at a time.
const BATCH: usize = 64;
/// Packets kept for a script, at most: a host that sends more has failed it anyway.
const MAX_WAITING: usize = 10_000;
/// Queue pair of management datagrams, which scripts are not about.
const MANAGEMENT: Qpn = Qpn::new(1);

/// Sockets towards a host.
pub(crate) struct Wire {
    sender: AnySource,
    receiver: Box<dyn Datapath>,
    host: IpAddr,
    /// Queue pair of the present script, and those of earlier ones.
    qpn: Option<Qpn>,
    old: HashSet<Qpn>,
    waiting: VecDeque<Datagram>,
    start: Instant,
}

impl Wire {
    /// Opens sockets at `script` for packets from `host`.
    pub(crate) fn open(script: IpAddr, host: IpAddr) -> Result<Self, roce_net::OpenError> {
        let sender = AnySource::open(script.is_ipv6())?;
        let config = UdpConfig {
            addr: script,
            send_sockets: 0,
            ..UdpConfig::default()
        };
        let receiver = open_shards(DatapathKind::Raw, &config, None)?.remove(0);
        Ok(Self {
            sender,
            receiver,
            host,
            qpn: None,
            old: HashSet::new(),
            waiting: VecDeque::new(),
            start: Instant::now(),
        })
    }

    /// Starts the time of a script.
    pub(crate) fn restart(&mut self) {
        self.start = Instant::now();
    }

    /// Expects packets to a queue pair of the script, which has a new number. Late ones to earlier queue pairs are dropped.
    pub(crate) fn expect(&mut self, qpn: Qpn) {
        self.take();
        self.waiting.clear();
        self.old.extend(self.qpn.replace(qpn));
    }

    /// Returns the script's queue pair.
    pub(crate) fn qpn(&self) -> Qpn {
        self.qpn.unwrap_or(Qpn::new(0))
    }

    /// Returns the time since the start.
    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Sends a packet.
    pub(crate) fn send(&self, datagram: &Datagram) -> io::Result<()> {
        let Datagram {
            src,
            dst,
            identification,
            ..
        } = *datagram;
        self.sender.send(src, dst, identification, &datagram.bytes)
    }

    /// Waits until `end`, or for a packet of the host.
    pub(crate) fn wait(&mut self, end: Duration) -> io::Result<Option<Datagram>> {
        loop {
            self.take();
            if self.waiting.front().is_some_and(|datagram| datagram.at <= end) {
                return Ok(self.waiting.pop_front());
            }
            let left = end.saturating_sub(self.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            self.readable(left)?;
        }
    }

    /// Waits until `end`, whatever comes.
    pub(crate) fn sleep(&mut self, end: Duration) -> io::Result<()> {
        loop {
            self.take();
            let left = end.saturating_sub(self.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            self.readable(left)?;
        }
    }

    fn readable(&self, time: Duration) -> io::Result<()> {
        let descriptors = self.receiver.descriptors();
        let first = descriptors.first().ok_or(io::ErrorKind::NotConnected)?;
        wait_readable(*first, Some(time)).map(drop)
    }

    /// Takes what has arrived.
    pub(crate) fn take(&mut self) {
        let at = self.elapsed();
        let Self {
            host,
            qpn: ours,
            old,
            waiting,
            receiver,
            ..
        } = self;
        let mut more = true;
        while more {
            let received = receiver.receive(BATCH, &mut |meta, bytes| {
                for (index, bytes) in packets(meta, bytes).enumerate() {
                    let to = Packet::parse(bytes)
                        .map(|packet| Header::from(packet.header).bth.dest_qp)
                        .ok();
                    let passed_over = to.is_some_and(|to| to == MANAGEMENT || old.contains(&to));
                    let is_new = meta.remote.ip() == *host && !passed_over || to.is_some() && to == *ours;
                    if is_new && waiting.len() < MAX_WAITING {
                        waiting.push_back(Datagram {
                            at,
                            src: meta.remote,
                            dst: (meta.local, ROCE_UDP_PORT).into(),
                            identification: meta.identification.unwrap_or(0).wrapping_add(index as u16),
                            bytes: bytes.to_vec(),
                        });
                    }
                }
            });
            more = received.more;
        }
    }
}

impl core::fmt::Debug for Wire {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Wire").field("host", &self.host).finish_non_exhaustive()
    }
}
