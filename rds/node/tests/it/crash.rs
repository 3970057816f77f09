//! A node process that is killed loses no order and doubles nothing.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use rds_local::{Control, Socket};
use rds_node::{NodeEvent, StateFile, run};
use rustix::net::{RecvFlags, SendFlags};

use crate::support::{Host, LONG, config, receive, until};

const DIR: &str = "RDS_NODE_TEST_DIR";

/// The process that the test below starts; a test by itself it is not.
#[test]
fn node_process() {
    if let Some(dir) = std::env::var_os(DIR) {
        run(config(Path::new(&dir)), None, || false, drop).unwrap();
    }
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // SIGKILL.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn spawn(dir: &Path) -> Process {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["crash::node_process", "--exact", "--nocapture"])
        .env(DIR, dir)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let process = Process(child);
    until("the process listens", || Control::find(dir).unwrap().is_some());
    process
}

fn bind<'a>(control: &'a Control, at: SocketAddr) -> Socket<'a> {
    let socket = control.socket().unwrap();
    socket.bind(at).unwrap();
    socket
}

/// Sends numbers, as many as fit now.
fn pour(socket: &Socket<'_>, to: SocketAddr, next: &mut u64) {
    while socket
        .send_to(&next.to_le_bytes(), Some(to), SendFlags::DONTWAIT)
        .is_ok()
    {
        *next += 1;
        if next.is_multiple_of(64) {
            break;
        }
    }
}

/// Takes numbers that have come. Returns whether the node is there.
fn take(socket: &Socket<'_>, last: &mut Option<u64>, count: &mut usize) -> bool {
    loop {
        match socket.recv(RecvFlags::DONTWAIT) {
            Ok(received) => {
                let number = u64::from_le_bytes(received.data.try_into().unwrap());
                assert!(last.is_none_or(|last| number > last), "{number} comes after {last:?}");
                *last = Some(number);
                *count += 1;
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return true,
            Err(_) => return false,
        }
    }
}

#[test]
fn a_killed_node_loses_no_order_and_doubles_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let addr: IpAddr = ferroce_loopback::address().into();
    let host = Host::new(|_| {});
    let stays = host.program();
    let (at_far, at_near): (SocketAddr, SocketAddr) = ((host.addr, 5000).into(), (addr, 4000).into());
    let far = bind(&stays, at_far);
    // Numbers that each side sends, and the last that the other has got.
    let (mut of_near, mut of_far) = (0, 0);
    let (mut at_near_last, mut at_far_last) = (None, None);
    for round in 0..4 {
        let process = spawn(dir.path());
        let control = Control::find(dir.path()).unwrap().unwrap();
        let near = bind(&control, at_near);
        let (mut near_count, mut far_count) = (0, 0);
        let end = Instant::now() + LONG;
        while near_count < 300 || far_count < 300 {
            assert!(
                Instant::now() < end,
                "round {round}: {near_count} and {far_count} have come"
            );
            pour(&near, at_far, &mut of_near);
            pour(&far, at_near, &mut of_far);
            assert!(take(&near, &mut at_near_last, &mut near_count));
            assert!(take(&far, &mut at_far_last, &mut far_count));
            thread::yield_now();
        }
        // In mid-stream.
        pour(&near, at_far, &mut of_near);
        drop(process);
        // What is in the program's socket is its own.
        while take(&near, &mut at_near_last, &mut near_count) {}
        // The other side goes on, and keeps for the next one what fits.
        pour(&far, at_near, &mut of_far);
        take(&far, &mut at_far_last, &mut far_count);
        thread::sleep(Duration::from_millis(50 * round));
    }
    assert!(StateFile::path(dir.path(), addr, None).exists());
}

#[test]
fn a_spoilt_state_file_is_set_aside_and_the_address_serves() {
    let host = Host::new(|_| {});
    let path = StateFile::path(host.dir.path(), host.addr, None);
    std::fs::write(&path, b"not a state file").unwrap();
    let program = host.program();
    let socket = bind(&program, (host.addr, 4000).into());
    socket
        .send_to(b"x", Some((host.addr, 4000).into()), SendFlags::empty())
        .unwrap();
    receive(&socket);
    assert_eq!(
        std::fs::read(path.with_extension("state.corrupt")).unwrap(),
        b"not a state file"
    );
    let event = host.event(|event| matches!(event, NodeEvent::StateFile { .. }));
    let NodeEvent::StateFile { addr, why } = event else {
        unreachable!()
    };
    assert!(addr == host.addr && why.contains("renamed"), "{why}");
}
