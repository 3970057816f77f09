//! The wire: namespaces, networks and the thread.

use std::{
    io::{self, Read as _, Write as _},
    net::Ipv4Addr,
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, ppoll},
    sys::time::TimeSpec,
};

use crate::{
    direction::{Conditions, Counters, Direction},
    namespace::Namespace,
    tap::Tap,
};

/// Frames that are taken from a TAP device before the other ones have their turn.
const BATCH: usize = 128;
/// Longer than every frame.
const LONGEST: usize = 1 << 16;
/// Frames that may wait for the thread. A program may send a window of 8 MiB at a time.
const TX_QUEUE: u32 = 10_000;

/// One of the two ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The first namespace.
    A,
    /// The second one.
    B,
}

impl End {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::A, Self::B];

    const fn index(self) -> usize {
        match self {
            Self::A => 0,
            Self::B => 1,
        }
    }
}

/// What is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WireConfig {
    /// Networks, each with an interface at each end.
    pub networks: u8,
    /// The MTU of the interfaces, bytes.
    pub mtu: u32,
    /// Decides the fates of frames.
    pub seed: u64,
}

impl Default for WireConfig {
    fn default() -> Self {
        Self {
            networks: 1,
            mtu: 1500,
            seed: 1,
        }
    }
}

/// The two directions of each network, by the end that frames come from.
type Directions = Mutex<Vec<[Direction; 2]>>;

/// A running wire. All ends with it.
pub struct Wire {
    namespaces: [Namespace; 2],
    directions: Arc<Directions>,
    /// Wakes the thread; closed, it ends.
    waker: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Wire {
    /// Makes two namespaces and the networks between them. The interfaces are `wire0`, `wire1` … and have the addresses of
    /// [`address`](Self::address).
    ///
    /// # Errors
    /// When that is not allowed (it needs root), or the kernel has no TAP devices.
    pub fn start(config: &WireConfig) -> io::Result<Self> {
        let namespaces = [Namespace::new()?, Namespace::new()?];
        let mut taps = Vec::new();
        let mut directions = Vec::new();
        for network in 0..config.networks {
            taps.push([
                interface(&namespaces[0], network, End::A, config.mtu)?,
                interface(&namespaces[1], network, End::B, config.mtu)?,
            ]);
            let seed = config.seed.wrapping_add(u64::from(network) << 1);
            directions.push([Direction::new(seed), Direction::new(seed.wrapping_add(1 << 32))]);
        }
        let directions = Arc::new(Mutex::new(directions));
        let (waker, wakened) = UnixStream::pair()?;
        wakened.set_nonblocking(true)?;
        waker.set_nonblocking(true)?;
        let carrier = Carrier {
            taps,
            directions: directions.clone(),
            wakened,
            begun: Instant::now(),
        };
        let thread = thread::Builder::new()
            .name("wire".into())
            .spawn(move || carrier.run())?;
        Ok(Self {
            namespaces,
            directions,
            waker: Some(waker),
            thread: Some(thread),
        })
    }

    /// The namespace of an end.
    pub fn namespace(&self, end: End) -> &Namespace {
        &self.namespaces[end.index()]
    }

    /// The address of an end on a network, of a /24.
    pub const fn address(network: u8, end: End) -> Ipv4Addr {
        Ipv4Addr::new(10, 81, network, 1 + end.index() as u8)
    }

    /// How many networks there are.
    pub fn networks(&self) -> u8 {
        self.directions().len() as u8
    }

    /// Changes what frames from this end meet on a network.
    ///
    /// # Panics
    /// When there is no such network.
    pub fn set(&self, network: u8, from: End, conditions: Conditions) {
        self.directions()[usize::from(network)][from.index()].set(conditions);
    }

    /// What frames from this end meet on a network.
    ///
    /// # Panics
    /// When there is no such network.
    pub fn conditions(&self, network: u8, from: End) -> Conditions {
        self.directions()[usize::from(network)][from.index()].conditions()
    }

    /// What became of frames from this end on a network, and how many are under way.
    ///
    /// # Panics
    /// When there is no such network.
    pub fn counters(&self, network: u8, from: End) -> (Counters, usize) {
        let directions = self.directions();
        let direction = &directions[usize::from(network)][from.index()];
        (direction.counters(), direction.under_way())
    }

    /// Whether the thread runs, as it does unless the kernel refused to go on.
    pub fn works(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    fn directions(&self) -> MutexGuard<'_, Vec<[Direction; 2]>> {
        self.directions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        if let Some(mut waker) = self.waker.take() {
            let _ = waker.write(&[0]);
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn interface(namespace: &Namespace, network: u8, end: End, mtu: u32) -> io::Result<Tap> {
    let name = format!("wire{network}");
    let tap = Tap::new(namespace, &name)?;
    // What the kernel would say of its own accord about IPv6.
    namespace.ip(&format!("link set {name} addrgenmode none"))?;
    namespace.ip(&format!("addr add {}/24 dev {name}", Wire::address(network, end)))?;
    namespace.ip(&format!("link set {name} mtu {mtu} txqueuelen {TX_QUEUE} up"))?;
    Ok(tap)
}

/// What the thread has.
struct Carrier {
    taps: Vec<[Tap; 2]>,
    directions: Arc<Directions>,
    wakened: UnixStream,
    begun: Instant,
}

impl Carrier {
    fn run(self) {
        let mut buffer = vec![0; LONGEST];
        loop {
            let due = self.lock().iter().flatten().filter_map(Direction::next_due).min();
            let Ok(readable) = self.wait(due) else {
                break;
            };
            // Something to read, or the other end is closed: the wire is to end.
            if readable[0]
                && !matches!((&self.wakened).read(&mut buffer), Err(e) if e.kind() == io::ErrorKind::WouldBlock)
            {
                break;
            }
            let mut directions = self.lock();
            for (n, _) in readable[1..].iter().enumerate().filter(|(_, readable)| **readable) {
                self.take(&mut directions, n, &mut buffer);
            }
            self.deliver(&mut directions);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<[Direction; 2]>> {
        self.directions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is a frame, one is due, or the wire is to end: what can be read, the waker first and then each network's ends.
    fn wait(&self, due: Option<Duration>) -> io::Result<Vec<bool>> {
        let fds = self.taps.iter().flatten().map(AsFd::as_fd);
        let fds = [self.wakened.as_fd()].into_iter().chain(fds);
        let mut polled: Vec<_> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        let timeout = due.map(|due| TimeSpec::from_duration(due.saturating_sub(self.begun.elapsed())));
        match ppoll(&mut polled, timeout, None) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
        Ok(polled.iter().map(|fd| fd.any().unwrap_or(false)).collect())
    }

    /// Takes frames from the n-th interface.
    fn take(&self, directions: &mut [[Direction; 2]], n: usize, buffer: &mut [u8]) {
        let (network, end) = (n / 2, n % 2);
        for _ in 0..BATCH {
            // An interface that is down has nothing either.
            let Ok(len) = self.taps[network][end].read(buffer) else {
                break;
            };
            directions[network][end].push(self.begun.elapsed(), buffer[..len].to_vec());
        }
    }

    /// Brings what is due to the other ends.
    fn deliver(&self, directions: &mut [[Direction; 2]]) {
        let now = self.begun.elapsed();
        for (taps, directions) in self.taps.iter().zip(directions) {
            for (end, direction) in directions.iter_mut().enumerate() {
                while let Some(frame) = direction.pop(now) {
                    direction.came_out(taps[1 - end].write(&frame).is_ok());
                }
            }
        }
    }
}
