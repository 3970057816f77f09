//! The examples do what they say.

use std::{
    net::IpAddr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

#[path = "../../examples/events.rs"]
mod events;
#[path = "../../examples/rc_server.rs"]
mod rc_server;

/// Longest time that anything takes.
const TIMEOUT: Duration = Duration::from_secs(60);

fn address() -> IpAddr {
    ferroce_loopback::address().into()
}

/// Sends messages by clients one after another. A server needs a moment until it listens.
fn echoed(server: IpAddr, ended: &AtomicBool) {
    for message in ["hello", "once more"] {
        let until = Instant::now() + TIMEOUT;
        loop {
            match crate::rc_client::run(address(), server, message.as_bytes()) {
                Ok(answer) => {
                    assert_eq!(String::from_utf8_lossy(&answer), message);
                    break;
                }
                Err(e) => assert!(Instant::now() < until && !ended.load(Ordering::Relaxed), "{e}"),
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// A server that serves two clients, and them.
fn try_with(run: impl FnOnce(IpAddr, Option<u64>) -> Result<(), Box<dyn std::error::Error>> + Send) {
    let (server, ended) = (address(), AtomicBool::new(false));
    thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let served = run(server, Some(2)).map_err(|e| e.to_string());
            ended.store(true, Ordering::Relaxed);
            served
        });
        echoed(server, &ended);
        assert_eq!(serving.join().unwrap(), Ok(()));
    });
}

#[test]
fn a_client_gets_its_message_back() {
    try_with(rc_server::run);
}

#[test]
fn a_server_that_sleeps_echoes_too() {
    try_with(events::run);
}
