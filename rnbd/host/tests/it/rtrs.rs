//! Client and server over RTRS over RoCE on loopback.

use std::{thread, time::Duration};

use crate::common::{Client, Lab, MIB, Mapped, eventually, sector};
use ferroce_rig::block::{Loop, dirty_pages, stays_in_memory};
use rnbd::{
    Errno,
    client::error::MapError,
    nbd::proto::{cmd, cmd_flag},
    proto::AccessMode,
};
use rnbd_host::{
    control::{MapAnswer, MapRequest, Refused, map::MapControl},
    map::MapFailure,
};
use rtrs::addr::PathAddr;

fn refused(r: Result<Mapped, MapFailure>) -> Errno {
    match r.map(|_| ()) {
        Err(MapFailure::Map {
            error: MapError::Refused { errno, .. },
            ..
        }) => errno,
        other => panic!("{other:?}"),
    }
}

fn try_map(lab: &Lab, session: &str, name: &str, mode: AccessMode) -> Result<Mapped, MapFailure> {
    lab.try_map(lab.config_for(session, name, mode))
}

#[test]
fn zeroes_need_not_be_sent() {
    let lab = Lab::new();
    let mut d = lab.map("a", "disk");
    let mut c = d.client();
    let (offset, len) = (4 * MIB, 2 * MIB as u32 + 512);
    for flags in [cmd_flag::FUA | cmd_flag::NO_HOLE, 0] {
        assert_eq!(c.write(offset, &[1; 4096], 0), 0);
        let before = d.mapping.stats().device;
        assert_eq!(c.call(cmd::WRITE_ZEROES, flags, offset, len, &[]), 0);
        assert_eq!(d.mapping.stats().device.completed - before.completed, 1);
        assert!(c.read(offset, len).unwrap().iter().all(|b| *b == 0));
    }
    for at in [4 * MIB - 512, 6 * MIB + 512] {
        assert_eq!(c.read(at, 512).unwrap(), sector(at / 512));
    }
}

#[test]
fn opens_are_refused_as_the_kernel_does() {
    use AccessMode::{Migration, ReadOnly, ReadWrite};
    let lab = Lab::new();
    let map = |session, name, mode| try_map(&lab, session, name, mode);
    assert_eq!(refused(map("a1", "none", ReadOnly)), Errno::ENOENT);
    assert_eq!(refused(map("a2", "../disk.img", ReadOnly)), Errno::EINVAL);
    assert_eq!(refused(map("a3", "ro", ReadWrite)), Errno::EACCES);
    let name = "x".repeat(255);
    let long = map("a4", &name, ReadOnly).map(|_| ());
    let name = matches!(
        &long,
        Err(MapFailure::Map {
            error: MapError::Name(_),
            ..
        })
    );
    assert!(name, "{long:?}");
    let d = map("a", "disk", ReadWrite).unwrap();
    assert_eq!(refused(map("b1", "disk", ReadWrite)), Errno::EPERM);
    assert_eq!(refused(map("b2", "disk.img", ReadWrite)), Errno::EPERM);
    assert_eq!(refused(map("b3", "disk", Migration)), Errno::EPERM);
    assert_eq!(refused(map("b4", "disk.img", Migration)), Errno::EPERM);
    let ro = map("b", "disk", ReadOnly).unwrap();
    assert_eq!(d.client().write(0, &[9; 512], 0), 0);
    assert_eq!(ro.client().read(0, 512).unwrap(), [9; 512]);
    d.end().unwrap();
    map("c", "disk.img", ReadWrite).unwrap().end().unwrap();
    eventually("the numbers", || {
        let c = lab.stats().rnbd;
        (c.opens, c.refused, c.malformed) == (3, 7, 0)
    });
}

/// Returns the errors that clients get who write without end, when the server ends.
fn errors_at_the_servers_end() -> Vec<u32> {
    let mut lab = Lab::new();
    let mut d = lab.map("a", "disk");
    let threads: Vec<_> = (0..3u64)
        .map(|t| {
            let mut c: Client = d.client();
            thread::spawn(move || {
                let mut errors = Vec::new();
                // One that has no request in flight only sees that the connection is over.
                while let Ok(cookie) = c.try_send(cmd::WRITE, 0, t * MIB, 8192, &[t as u8; 8192]) {
                    let (e, answered) = c.try_reply().expect("what could be sent is answered");
                    assert_eq!(answered, cookie);
                    errors.extend((e != 0).then_some(e));
                }
                errors
            })
        })
        .collect();
    thread::sleep(Duration::from_millis(100));
    lab.end();
    let errors: Vec<u32> = threads.into_iter().flat_map(|t| t.join().unwrap()).collect();
    assert!(matches!(d.until_ended(), Err(MapFailure::Lost(_))));
    errors
}

#[test]
fn requests_end_when_the_server_does() {
    // On a busy machine there may be none in flight at that moment.
    let mut attempts = (0..20).map(|_| errors_at_the_servers_end());
    let errors = attempts.find(|errors| !errors.is_empty());
    let errors = errors.expect("requests that were in flight are answered");
    assert!(errors.len() <= 3, "{errors:?}");
    assert!(errors.iter().all(|e| *e == 5), "NBD knows no better error: {errors:?}");
}

#[test]
#[ignore = "needs the right to set up loop devices, and Linux 6.5"]
fn flush_and_fua_reach_the_servers_device() {
    let l = Loop::new(&[]);
    let lab = Lab::with(|_| {}, Some(l.path()));
    let d = lab.map("a", "extra");
    let mut c = d.client();
    stays_in_memory(l.path(), || assert_eq!(c.write(0, &[1; 65536], 0), 0));
    assert_eq!(c.call(cmd::FLUSH, 0, 0, 0, &[]), 0);
    assert_eq!(dirty_pages(l.path()), 0, "flush");
    assert_eq!(c.write(MIB, &[2; 65536], cmd_flag::FUA), 0);
    assert_eq!(dirty_pages(l.path()), 0, "FUA");
    let flags = cmd_flag::FUA | cmd_flag::NO_HOLE;
    assert_eq!(c.call(cmd::WRITE_ZEROES, flags, 2 * MIB, MIB as u32, &[]), 0);
    assert_eq!(dirty_pages(l.path()), 0, "zeroes with FUA");
    assert_eq!(c.write(0, &[3; 65536], 0), 0);
    drop(c);
    d.end().unwrap();
    assert_eq!(dirty_pages(l.path()), 0, "unmap");
}

/// NBD's promise of multi-conn: a flush on one connection covers all writes that were answered, on any.
#[test]
#[ignore = "needs the right to set up loop devices, and Linux 6.5"]
fn a_flush_of_one_client_covers_the_writes_of_another() {
    let l = Loop::new(&[]);
    let lab = Lab::with(|_| {}, Some(l.path()));
    let d = lab.map("a", "extra");
    let mut clients = [d.client(), d.client()];
    for (writes, flushes) in [(0, 1), (1, 0)] {
        stays_in_memory(l.path(), || assert_eq!(clients[writes].write(0, &[1; 65536], 0), 0));
        assert_eq!(clients[flushes].call(cmd::FLUSH, 0, 0, 0, &[]), 0);
        assert_eq!(dirty_pages(l.path()), 0, "flush");
    }
    // And so does the one at the end.
    assert_eq!(clients[1].write(0, &[2; 65536], 0), 0);
    drop(clients);
    d.end().unwrap();
    assert_eq!(dirty_pages(l.path()), 0, "unmap");
}

#[test]
fn a_mapping_that_is_not_open_yet_can_be_stopped() {
    let lab = Lab::new();
    let mut config = lab.config("s", "disk");
    // Nobody is there.
    config.session.paths[0].dst = (std::net::IpAddr::from(ferroce_loopback::address()), 1234).into();
    let mut map = lab.begin(config);
    thread::sleep(Duration::from_millis(50));
    map.mapping.stop();
    let ended = map.until_ended();
    assert!(!matches!(ended, Err(MapFailure::Loop(_))), "{ended:?}");
}

fn ask(control: &MapControl, path: PathAddr) -> Result<(), Refused> {
    let answer = control.ask(MapRequest::AddPath { path })?;
    assert!(matches!(answer, MapAnswer::Done));
    Ok(())
}

#[test]
fn who_asks_for_an_address_that_is_being_opened_waits_for_it() {
    let lab = Lab::new();
    let map = lab.try_map(lab.config("s", "disk")).unwrap();
    let control = map.mapping.control();
    // To one port of the server, and to others where nobody listens.
    let path = lab.path();
    let ports = [1234, 9, 10, 11];
    let asked = ports.map(|port| {
        let (control, mut path) = (control.clone(), path);
        path.dst.set_port(port);
        thread::spawn(move || ask(&control, path))
    });
    let [done, refused @ ..] = asked.map(|asked| asked.join().unwrap());
    done.unwrap();
    for refused in refused {
        assert_eq!(refused.unwrap_err().errno, Errno::ECONNRESET);
    }
    assert_eq!(control.list().unwrap().paths.len(), 2);
    map.end().unwrap();
    assert_eq!(ask(&control, path).unwrap_err().errno, Errno::ENODEV);
}
