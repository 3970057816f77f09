//! While a thread waits for a broker that is being started, the rest of the process runs: other threads use RDMA_CM and
//! fork.

use std::{
    ffi::{c_int, c_void},
    fs,
    net::Ipv4Addr,
    os::unix::fs::PermissionsExt,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

// The library under test; its functions are reached by their C names.
use ferroce_verbs as _;

#[repr(C)]
struct Channel {
    fd: c_int,
}

unsafe extern "C" {
    fn ibv_get_device_list(count: *mut c_int) -> *mut *mut c_void;
    fn rdma_create_event_channel() -> *mut Channel;
    fn write(fd: c_int, buf: *const c_void, len: usize) -> isize;
}

const CREATE_ID: u32 = 0;
const BIND_IP: u32 = 2;
const PS_TCP: u16 = 0x0106;
const QPT_RC: u8 = 2;

/// Writes a command of the kernel's `rdma_user_cm.h`.
fn command(fd: c_int, number: u32, body: &[u8], out: u16) -> isize {
    let len = body.len() as u16;
    let bytes = [&number.to_ne_bytes()[..], &len.to_ne_bytes(), &out.to_ne_bytes(), body].concat();
    // SAFETY: the command's own bytes, and in it an address that is the caller's.
    unsafe { write(fd, bytes.as_ptr().cast(), bytes.len()) }
}

/// Binds an id to an address, which opens the transport.
fn bind(fd: c_int, addr: Ipv4Addr) -> isize {
    let mut id = 0u32;
    let response = (&raw mut id) as u64;
    let create = [
        &1u64.to_ne_bytes()[..],
        &response.to_ne_bytes(),
        &PS_TCP.to_ne_bytes(),
        &[QPT_RC, 0, 0, 0, 0, 0],
    ];
    assert!(command(fd, CREATE_ID, &create.concat(), 4) > 0);
    // `sockaddr_in` in the room of a `sockaddr_in6`.
    let mut body = [0; 32];
    body[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
    body[4..8].copy_from_slice(&addr.octets());
    body[28..].copy_from_slice(&id.to_ne_bytes());
    command(fd, BIND_IP, &body, 0)
}

#[test]
fn nobody_else_waits_for_a_broker_that_is_started() {
    let dir = tempfile::tempdir().unwrap();
    let (started, go) = (dir.path().join("started"), dir.path().join("go"));
    let program = dir.path().join("broker");
    let script = format!(
        "#!/bin/sh\n: > {}\nwhile ! test -e {}; do sleep 0.05; done\nexit 1\n",
        started.display(),
        go.display()
    );
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let addr = ferroce_loopback::address();
    // SAFETY: the only test of this process, which has no other threads that look at the environment.
    unsafe {
        std::env::set_var("FERROCE_ADDR", addr.to_string());
        std::env::set_var("FERROCE_BROKER", &program);
        std::env::set_var("FERROCE_BROKER_DIR", dir.path().join("run"));
    }
    // SAFETY: no arguments.
    let fd = unsafe { (*rdma_create_event_channel()).fd };
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let opener = scope.spawn(|| {
            let bound = bind(fd, addr);
            done.store(true, Ordering::SeqCst);
            bound
        });
        let deadline = Instant::now() + Duration::from_secs(120);
        while !started.exists() {
            assert!(!done.load(Ordering::SeqCst), "nothing was started");
            assert!(Instant::now() < deadline, "nothing is started");
            thread::sleep(Duration::from_millis(10));
        }
        // SAFETY: no arguments.
        let another = unsafe { rdma_create_event_channel() };
        assert!(!another.is_null());
        // SAFETY: the child calls what the library promises to work there, and ends.
        let child = unsafe {
            let child = libc::fork();
            if child == 0 {
                let mut count = 0;
                let list = ibv_get_device_list(&raw mut count);
                let channel = rdma_create_event_channel();
                libc::_exit(c_int::from(list.is_null() || count == 0 || channel.is_null()));
            }
            child
        };
        let mut status = -1;
        // SAFETY: our child, and room for its status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child has devices and channels of its own");
        assert!(!done.load(Ordering::SeqCst), "somebody has waited for the broker");
        fs::write(&go, "").unwrap();
        assert_eq!(opener.join().unwrap(), -1, "this broker never comes");
    });
}
