//! Several processes at one address.

use std::{
    net::Ipv4Addr,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use ferroce_tests::{
    checked::Checked,
    device::{image, map_when_free, serve},
    ferroce, fresh_address,
    process::{Running, kill_broker, run},
};
use nix::sys::signal::Signal;

/// The tests of a program have one broker, and one of them kills it: they take turns.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

const MIB: usize = 1 << 20;

/// A mapped device that is written and read.
struct Device {
    process: Running,
    disk: Checked,
}

impl Device {
    fn works(&mut self) {
        self.disk.works();
    }
}

fn mapped(from: Ipv4Addr, to: &str, dir: &Path, name: &str, more: &[&str]) -> Device {
    let socket = dir.join(format!("{name}.sock"));
    let mut args = vec!["--session", name, "--device", name];
    args.extend(more);
    let (process, _) = map_when_free(from, to, &socket, &args);
    // The first device is that without a name.
    let disk = Checked::new(&socket, "", &dir.join(name));
    Device { process, disk }
}

#[test]
fn mappings_and_servers_share_an_address_and_go_on_when_one_of_them_or_the_broker_is_killed() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let (here, far) = (fresh_address(), fresh_address());
    let export = |name: &str| format!("{name}={}", image(dir.path(), name, &vec![0; 2 * MIB]).display());
    let exports = ["a", "b", "c"].map(export);
    let (_far, _) = serve(far, &exports, &["--threads", "2"]);
    let mut a = mapped(here, &far.to_string(), dir.path(), "a", &["--connections", "2"]);
    let mut b = mapped(here, &far.to_string(), dir.path(), "b", &[]);
    // A server after mappings, at their address, and one of its devices mapped at the other server's.
    let (own, _) = serve(here, &[export("d")], &["--threads", "2"]);
    let mut d = mapped(far, &here.to_string(), dir.path(), "d", &[]);
    [&mut a, &mut b, &mut d].into_iter().for_each(Device::works);

    a.process.signal(Signal::SIGKILL);
    a.process.wait();
    [&mut b, &mut d].into_iter().for_each(Device::works);
    // Its session is over, as the broker has told the server: the name and the device are free.
    let mut a = mapped(here, &far.to_string(), dir.path(), "a", &[]);
    [&mut a, &mut b, &mut d].into_iter().for_each(Device::works);

    kill_broker();
    [&mut a, &mut b, &mut d].into_iter().for_each(Device::works);
    let mut c = mapped(here, &far.to_string(), dir.path(), "c", &["--connections", "2"]);
    [&mut a, &mut b, &mut c, &mut d].into_iter().for_each(Device::works);

    own.stop();
    [&mut a, &mut b, &mut c].into_iter().for_each(Device::works);
    drop(c.disk);
    assert_eq!(c.process.stop().code, Some(0));
    [&mut a, &mut b].into_iter().for_each(Device::works);
}

#[test]
fn a_port_of_an_address_is_one_servers() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let addr = fresh_address();
    let export = format!("disk={}", image(dir.path(), "disk", &vec![0; MIB]).display());
    let exports = std::slice::from_ref(&export);
    let (first, _) = serve(addr, exports, &[]);
    let second = run(&["serve", "--addr", &addr.to_string(), "--export", &export]);
    assert_eq!(second.code, Some(1));
    let taken = format!("port 1234 of {addr} (service ID ");
    let owner = format!("is taken by ferroce (process {})", first.id());
    assert!(
        second.stderr.contains(&taken) && second.stderr.contains(&owner),
        "{}",
        second.stderr
    );
    assert_eq!(second.stderr.matches(&addr.to_string()).count(), 1, "{}", second.stderr);
    let other = format!("{addr}:1235");
    let listening = Running::start(&["serve", "--json", "--addr", &other, "--export", &export]).event("listening");
    assert_eq!(listening["event"], "listening");
    drop(first);
    // The port is free again when its owner is gone.
    let (third, _) = serve(addr, exports, &[]);
    drop(third);
}

#[test]
fn an_address_can_be_had_alone() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let addr = fresh_address();
    let export = format!("disk={}", image(dir.path(), "disk", &vec![0; MIB]).display());
    let mut command = std::process::Command::new("env");
    command.args(["FERROCE_BROKER=off"]).arg(ferroce());
    command.args(["serve", "--json", "--addr", &addr.to_string(), "--export", &export]);
    let mut alone = Running::start_command(command, "serve without a broker".to_owned());
    alone.event("listening");
    // Other tests may have a broker.
    let member = format!("process {} ", alone.id());
    assert!(!run(&["stat"]).stdout.contains(&member));
    let second = run(&["serve", "--addr", &format!("{addr}:1235"), "--export", &export]);
    assert_eq!(second.code, Some(1));
    assert!(
        second.stderr.contains("4791") && second.stderr.contains(&alone.id().to_string()),
        "{}",
        second.stderr
    );
}
