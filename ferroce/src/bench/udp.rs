//! The bare UDP ping-pong that latencies are compared with.

use std::{
    io::ErrorKind,
    net::{IpAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use super::{
    Amount, Emit,
    latency::over,
    report::{Measurement, Work},
};
use crate::output::Failure;

/// After this a datagram counts as lost, and the next is sent.
const LOST: Duration = Duration::from_millis(100);

/// Two threads that spin on their sockets.
pub(crate) fn run(
    from: IpAddr,
    to: IpAddr,
    bytes: u32,
    amount: Amount,
    stopped: &dyn Fn() -> bool,
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
    let done = AtomicBool::new(false);
    let mut samples = vec![];
    let mut work = Work::default();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = vec![0; 65_536];
            while !done.load(Ordering::Relaxed) {
                if let Ok(n) = far.recv(&mut buffer) {
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
                match near.recv(&mut buffer) {
                    Ok(_) => {
                        samples.push(start.elapsed().as_nanos() as u64);
                        work.messages += 1;
                        break;
                    }
                    Err(e) if e.kind() == ErrorKind::WouldBlock && start.elapsed() < LOST => {}
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(e) => result = Err(e),
                }
            }
        }
        work.time = began.elapsed();
        done.store(true, Ordering::Relaxed);
        result
    })
    .map_err(io)?;
    emit(&Measurement::new("udp_lat", bytes, 0, work, &mut samples))
}
