//! UDP ping-pong, the baseline of latencies.

use std::{
    io::{self, ErrorKind},
    net::{IpAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::{
    Amount, Emit,
    active::{Stopped, over},
    report::{Measurement, Work},
};
use crate::output::Failure;

/// Time after which a datagram counts as lost, and the next is sent.
const LOST: Duration = Duration::from_millis(100);

/// Waits for datagrams.
struct Waiter<'a> {
    socket: &'a UdpSocket,
    /// None: the thread polls the socket.
    epoll: Option<Epoll>,
}

impl<'a> Waiter<'a> {
    fn new(socket: &'a UdpSocket, sleeps: bool) -> io::Result<Self> {
        let epoll = match sleeps {
            false => None,
            true => {
                let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
                epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
                Some(epoll)
            }
        };
        Ok(Self { socket, epoll })
    }

    /// Receives a datagram. Returns its length; `None`: there is none, or none in [`LOST`].
    fn next(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        if let Some(epoll) = &self.epoll {
            let timeout = EpollTimeout::try_from(LOST).unwrap_or(EpollTimeout::ZERO);
            epoll.wait(&mut [EpollEvent::empty()], timeout)?;
        }
        match self.socket.recv(buffer) {
            Ok(n) => Ok(Some(n)),
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// Largest payload of a datagram over IPv4.
pub(crate) const LONGEST: u32 = 65_507;

/// Measures with two threads that poll their sockets, or sleep in epoll.
pub(crate) fn run(
    from: IpAddr,
    to: IpAddr,
    bytes: u32,
    (sleeps, amount): (bool, Amount),
    stopped: Stopped<'_>,
    emit: Emit<'_>,
) -> Result<(), Failure> {
    let io = |e| Failure::failed(format!("the UDP ping-pong failed: {e}"));
    let (near, far) = (
        UdpSocket::bind((from, 0)).map_err(io)?,
        UdpSocket::bind((to, 0)).map_err(io)?,
    );
    near.connect(far.local_addr().map_err(io)?).map_err(io)?;
    far.connect(near.local_addr().map_err(io)?).map_err(io)?;
    near.set_nonblocking(true).map_err(io)?;
    far.set_nonblocking(true).map_err(io)?;
    let waiter = |socket| Waiter::new(socket, sleeps).map_err(io);
    let (near_waits, far_waits) = (waiter(&near)?, waiter(&far)?);
    let done = AtomicBool::new(false);
    let mut samples = vec![];
    let mut work = Work::default();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = vec![0; 65_536];
            while !done.load(Ordering::Relaxed) {
                if let Ok(Some(n)) = far_waits.next(&mut buffer) {
                    let _ = far.send(&buffer[..n]);
                }
            }
        });
        let message = vec![1; bytes as usize];
        let mut buffer = vec![0; 65_536];
        let began = Instant::now();
        let mut result = Ok(());
        while result.is_ok() && !stopped() && !over(amount, began, work.messages) {
            let start = Instant::now();
            result = near.send(&message).map(drop);
            while result.is_ok() {
                match near_waits.next(&mut buffer) {
                    Ok(Some(_)) => {
                        samples.push(start.elapsed().as_nanos() as u64);
                        work.messages += 1;
                        break;
                    }
                    Ok(None) if start.elapsed() < LOST => {}
                    Ok(None) => break,
                    Err(e) => result = Err(e),
                }
            }
        }
        work.time = began.elapsed();
        done.store(true, Ordering::Relaxed);
        result
    })
    .map_err(io)?;
    let op = if sleeps { "udp_event_lat" } else { "udp_lat" };
    emit(&Measurement::new(op, bytes, 0, work, &mut samples))
}
