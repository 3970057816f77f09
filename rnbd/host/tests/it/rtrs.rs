//! Client and server over RTRS over RoCE on loopback.

use std::{fs, thread, time::Duration};

use crate::common::{Client, Lab, MIB, Mapped, PATIENCE, eventually, sector};
use ferroce_rig::{
    Host, Session,
    block::{Loop, dirty_pages, stays_in_memory},
};
use proptest::prelude::*;
use rnbd::{
    Errno,
    client::error::MapError,
    nbd::proto::{cmd, cmd_flag},
    proto::{AccessMode, F_FUA, F_PREFLUSH, IoOp, MsgClose, MsgIo, MsgOpen, MsgOpenRsp, Rw},
};
use rnbd_host::map::MapFailure;
use rtrs::{
    Direction, IoError,
    client::{ConType, SessionConfig},
};
use zerocopy::{FromBytes, IntoBytes};

/// A session from an address of its own, for messages by hand.
fn session(lab: &Lab, name: &str) -> Session {
    let path = lab.path();
    let config = SessionConfig {
        connect_timeout: PATIENCE,
        ..SessionConfig::new(name, path)
    };
    Session::open(&Host::open(path.src.unwrap()), config).unwrap()
}

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

fn copy_and_change(always_invalidate: bool) {
    let lab = Lab::with(|c| c.rtrs.always_invalidate = always_invalidate, None);
    let mut d = lab.map("a", "disk");
    let mut c = d.client();
    let all = fs::read(lab.image("disk")).unwrap();
    assert!(c.read(0, all.len() as u32).unwrap() == all);
    for (n, flags) in [(1u8, 0), (2, cmd_flag::FUA)] {
        let data: Vec<u8> = (0..3 * MIB as u32 + 512).map(|i| (i % 251) as u8 ^ n).collect();
        assert_eq!(c.write(512 * u64::from(n), &data, flags), 0);
        assert!(c.read(512 * u64::from(n), data.len() as u32).unwrap() == data);
        assert_eq!(c.call(cmd::FLUSH, 0, 0, 0, &[]), 0);
        assert!(fs::read(lab.image("disk")).unwrap()[512 * usize::from(n)..][..data.len()] == data);
    }
    assert_eq!(d.mapping.stats().device.failed, 0);
    drop(c);
    d.end().unwrap();
    // Under another spelling, and again.
    lab.map("b", "/disk").end().unwrap();
    lab.map("c", "disk").end().unwrap();
}

#[test]
fn a_device_is_mapped_read_and_written() {
    copy_and_change(true);
}

#[test]
fn the_same_with_keys_that_stay_valid() {
    copy_and_change(false);
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

#[test]
fn an_export_may_let_a_second_writer_in() {
    let lab = Lab::new();
    let d = try_map(&lab, "a", "second", AccessMode::ReadWrite).unwrap();
    assert_eq!(
        refused(try_map(&lab, "b", "second", AccessMode::ReadWrite)),
        Errno::EPERM
    );
    let m = try_map(&lab, "c", "second", AccessMode::Migration).unwrap();
    assert_eq!(m.client().write(0, &[9; 512], 0), 0);
    assert_eq!(d.client().read(0, 512).unwrap(), [9; 512]);
    assert_eq!(
        refused(try_map(&lab, "d", "second", AccessMode::Migration)),
        Errno::EPERM
    );
}

fn open(session: &Session, name: &str) -> Result<u32, i32> {
    let message = MsgOpen::new(name.as_bytes(), AccessMode::ReadOnly).unwrap();
    match raw(session, Direction::Read, message.as_bytes(), size_of::<MsgOpenRsp>()) {
        (0, rsp) => Ok(MsgOpenRsp::read_from_bytes(&rsp).unwrap().device_id.get()),
        (e, _) => Err(e),
    }
}

fn close(session: &Session, id: u32) {
    assert_eq!(raw(session, Direction::Write, MsgClose::new(id).as_bytes(), 0).0, 0);
}

#[test]
fn one_export_is_open_once_however_it_is_spelled() {
    let lab = Lab::new();
    let session = session(&lab, "a");
    // Of the table, and of the folder.
    for first in ["disk", "disk.img"] {
        let d = open(&session, first).unwrap();
        for n in 1..=80 {
            for spelling in [
                format!("{}{first}", "/".repeat(n)),
                format!("{}{first}", "./".repeat(n)),
                format!("{first}{}", "/".repeat(n)),
            ] {
                assert_eq!(open(&session, &spelling), Err(libc::EEXIST), "{spelling}");
            }
        }
        assert_eq!(open(&session, &format!("sub/../{first}")), Err(libc::EINVAL));
        eventually("one open device", || lab.stats().rnbd.open == 1);
        close(&session, d);
        eventually("none", || lab.stats().rnbd.open == 0);
        let other = open(&session, &format!("//{first}")).unwrap();
        close(&session, other);
    }
}

#[test]
fn open_devices_are_bounded() {
    let lab = Lab::with(
        |c| {
            c.limits.max_devices = 2;
            c.limits.max_open = 3;
        },
        None,
    );
    let (a, b) = (session(&lab, "a"), session(&lab, "b"));
    let first = open(&a, "disk").unwrap();
    open(&a, "second").unwrap();
    assert_eq!(open(&a, "ro"), Err(libc::EMFILE));
    open(&b, "disk").unwrap();
    assert_eq!(open(&b, "second"), Err(libc::ENFILE));
    eventually("the numbers", || {
        let c = lab.stats().rnbd;
        (c.opens, c.refused, c.refused_limit, c.open) == (3, 2, 2, 3)
    });
    close(&a, first);
    open(&b, "second").unwrap();
    a.close();
    b.close();
    eventually("all closed", || lab.stats().rnbd.open == 0);
}

#[test]
fn a_client_that_goes_without_a_word_leaves_its_devices() {
    let lab = Lab::new();
    let a = session(&lab, "a");
    let message = MsgOpen::new(b"disk", AccessMode::ReadWrite).unwrap();
    assert_eq!(raw(&a, Direction::Read, message.as_bytes(), 56).0, 0);
    assert_eq!(refused(try_map(&lab, "b", "disk", AccessMode::ReadWrite)), Errno::EPERM);
    a.close();
    let mut n = 0;
    eventually("the writer's place", || {
        n += 1;
        try_map(&lab, &format!("c{n}"), "disk", AccessMode::ReadWrite).is_ok()
    });
}

fn model(base: u64, len: u64) -> Vec<u8> {
    (base / 512..(base + len) / 512).flat_map(sector).collect()
}

/// Random requests of several connections to two devices, each in its own part, against a model.
#[test]
fn many_requests_in_flight_do_what_they_should() {
    const PART: u64 = MIB;
    let lab = Lab::new();
    let mut devices = [lab.map("a", "disk"), lab.map("b", "second")];
    thread::scope(|s| {
        for (t, d) in devices.iter().cycle().take(6).enumerate() {
            let mut c = d.client();
            s.spawn(move || {
                let mut rng = proptest::test_runner::TestRng::from_seed(
                    proptest::test_runner::RngAlgorithm::ChaCha,
                    &[t as u8 + 1; 32],
                );
                let base = (t as u64 / 2) * PART;
                let mut model = model(base, PART);
                for round in 0..60u32 {
                    let mut sent = std::collections::HashMap::new();
                    let mut used = std::collections::HashSet::new();
                    for _ in 0..8 {
                        // Requests of one round don't overlap: there is no order between them.
                        let slot = rng.random_range(0..8u64);
                        if !used.insert(slot) {
                            continue;
                        }
                        let at = slot * PART / 8 + rng.random_range(0..8u64) * 512;
                        let len = rng.random_range(1..240usize) * 512;
                        let len = len.min(((slot + 1) * PART / 8 - at) as usize);
                        if rng.random_bool(0.5) {
                            let fill = round as u8 ^ slot as u8;
                            model[at as usize..][..len].fill(fill);
                            let flags = if round % 16 == 0 { cmd_flag::FUA } else { 0 };
                            let cookie = c.send(cmd::WRITE, flags, base + at, len as u32, &vec![fill; len]);
                            sent.insert(cookie, None);
                        } else {
                            let cookie = c.send(cmd::READ, 0, base + at, len as u32, &[]);
                            sent.insert(cookie, Some((at as usize, len)));
                        }
                    }
                    for _ in 0..sent.len() {
                        let (e, cookie) = c.reply();
                        assert_eq!(e, 0);
                        let Some((at, len)) = sent.remove(&cookie).expect("each cookie once") else {
                            continue;
                        };
                        let got = c.data(len);
                        assert!(got == model[at..][..len], "thread {t} round {round} at {at}");
                    }
                }
                assert!(c.read(base, PART as u32).unwrap() == model, "thread {t}");
            });
        }
    });
    for d in &mut devices {
        assert_eq!(d.mapping.stats().device.failed, 0);
    }
}

fn raw(session: &Session, direction: Direction, header: &[u8], len: usize) -> (i32, Vec<u8>) {
    let buffer = (len > 0).then(|| session.alloc_buffer(len).unwrap());
    let outcome = session.call(ConType::Io(0), direction, header, buffer);
    let errno = match outcome.result {
        Ok(()) => 0,
        Err(IoError::Remote(e)) => e,
        Err(e) => panic!("{e}"),
    };
    let mut data = vec![0; len];
    if let Some(b) = outcome.data {
        b.read(0, &mut data).unwrap();
    }
    (errno, data)
}

#[test]
fn malformed_messages_are_refused_and_the_session_goes_on() {
    use Direction::{Read, Write};
    let lab = Lab::new();
    let session = session(&lab, "raw");
    let open = MsgOpen::new(b"disk", AccessMode::ReadWrite).unwrap();
    assert_eq!(
        raw(&session, Read, open.as_bytes(), 55).0,
        libc::EINVAL,
        "no room for the answer"
    );
    assert_eq!(raw(&session, Write, open.as_bytes(), 56).0, libc::EINVAL);
    let (e, rsp) = raw(&session, Read, open.as_bytes(), 56);
    assert_eq!(e, 0);
    let id = MsgOpenRsp::read_from_bytes(&rsp).unwrap().device_id.get();
    let again = raw(&session, Read, open.as_bytes(), 56);
    assert_eq!(again, (0, rsp), "the same device again");

    let io = |op, sector, bytes| MsgIo::new(id, Rw::new(op), sector, bytes);
    let cases: [(&str, Direction, MsgIo, usize, i32); 16] = [
        (
            "other device",
            Read,
            MsgIo::new(id + 1, Rw::new(IoOp::Read), 0, 512),
            512,
            libc::ENOTCONN,
        ),
        ("more than the data", Write, io(IoOp::Write, 0, 1024), 512, libc::EINVAL),
        (
            "more than the room",
            Read,
            io(IoOp::Read, 0, 1 << 31),
            512,
            libc::EINVAL,
        ),
        ("no sectors", Read, io(IoOp::Read, 0, 100), 512, libc::EINVAL),
        ("read as a write", Write, io(IoOp::Read, 0, 512), 512, libc::EINVAL),
        ("write as a read", Read, io(IoOp::Write, 0, 512), 512, libc::EINVAL),
        (
            "beyond the end",
            Read,
            io(IoOp::Read, 8 * MIB / 512, 512),
            512,
            libc::EIO,
        ),
        ("overflow", Write, io(IoOp::Write, u64::MAX, 512), 512, libc::EIO),
        (
            "overflow by one",
            Write,
            io(IoOp::Write, u64::MAX / 512, 512),
            512,
            libc::EIO,
        ),
        (
            "discard beyond the end",
            Write,
            io(IoOp::Discard, 8 * MIB / 512 - 1, 1024),
            0,
            libc::EIO,
        ),
        (
            "secure erase",
            Write,
            io(IoOp::SecureErase, 0, 512),
            0,
            libc::EOPNOTSUPP,
        ),
        (
            "write same",
            Write,
            io(IoOp::WriteZeroes, 0, 512),
            512,
            libc::EOPNOTSUPP,
        ),
        (
            "zeroes as a read",
            Read,
            io(IoOp::WriteZeroes, 0, 512),
            512,
            libc::EINVAL,
        ),
        (
            "more zeroes than offered",
            Write,
            io(IoOp::WriteZeroes, 0, (1 << 30) + 512),
            0,
            libc::EOPNOTSUPP,
        ),
        (
            "zeroes beyond the end",
            Write,
            io(IoOp::WriteZeroes, 8 * MIB / 512 - 1, 1024),
            0,
            libc::EIO,
        ),
        ("flush", Read, io(IoOp::Flush, 0, 0), 0, 0),
    ];
    for (what, direction, m, len, want) in cases {
        assert_eq!(raw(&session, direction, m.as_bytes(), len).0, want, "{what}");
    }
    let mut unknown = io(IoOp::Read, 0, 512);
    unknown.rw.set(6);
    assert_eq!(raw(&session, Read, unknown.as_bytes(), 512).0, libc::EINVAL);
    // Newer clients set flags that are not known yet.
    unknown.rw.set(1 << 20);
    assert_eq!(raw(&session, Read, unknown.as_bytes(), 512).0, 0);
    let mut flush = io(IoOp::Flush, u64::MAX, 0);
    flush.rw.set(flush.rw.get() | F_FUA | F_PREFLUSH);
    assert_eq!(raw(&session, Read, flush.as_bytes(), 0).0, 0);
    let mut read_after = io(IoOp::Read, 0, 512);
    read_after.rw.set(F_PREFLUSH);
    assert_eq!(raw(&session, Read, read_after.as_bytes(), 512).0, 0);
    for header in [&[][..], &[1, 0, 0, 0], &[9; 40], &[2, 0, 0, 0, 1, 0], &[2, 0, 0, 0, 7]] {
        assert_eq!(raw(&session, Read, header, 512).0, libc::EINVAL, "{header:?}");
    }
    let mut bad_mode = open;
    bad_mode.access_mode = 3;
    assert_eq!(raw(&session, Read, bad_mode.as_bytes(), 56).0, libc::EINVAL);

    // A read of less than the client has room for: the rest is zero, not what was in the chunk.
    let (e, data) = raw(&session, Read, io(IoOp::Read, 3, 512).as_bytes(), 4096);
    assert_eq!(e, 0);
    assert_eq!(data[..512], sector(3));
    assert!(data[512..].iter().all(|b| *b == 0));
    assert!(
        fs::read(lab.image("disk")).unwrap() == fs::read(lab.image("second")).unwrap(),
        "nothing was changed"
    );
}

/// As a client does that has lost its connection.
#[test]
fn who_opens_a_device_again_is_told_that_it_has_grown() {
    let lab = Lab::new();
    let session = session(&lab, "a");
    let open = MsgOpen::new(b"disk", AccessMode::ReadWrite).unwrap();
    let size = || {
        let (e, rsp) = raw(&session, Direction::Read, open.as_bytes(), 56);
        assert_eq!(e, 0);
        let rsp = MsgOpenRsp::read_from_bytes(&rsp).unwrap();
        (rsp.device_id.get(), rsp.nsectors.get() * 512)
    };
    let (id, before) = size();
    assert_eq!(before, 8 * MIB);
    let image = fs::File::options().write(true).open(lab.image("disk")).unwrap();
    image.set_len(9 * MIB).unwrap();
    let beyond = MsgIo::new(id, Rw::new(IoOp::Read), 9 * MIB / 512 - 1, 512);
    assert_eq!(
        raw(&session, Direction::Read, beyond.as_bytes(), 512),
        (0, vec![0; 512])
    );
    assert_eq!(size(), (id, 9 * MIB));
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

/// Data that a client writes at an offset.
fn stamp(client: usize, at: u64, len: usize) -> Vec<u8> {
    let word = ((client as u64) << 56) | at;
    (0..len as u64 / 8).flat_map(|n| (word + n).to_le_bytes()).collect()
}

/// Several NBD clients write parts of a device, and each reads what all have written.
fn clients_share_a_device(connections: u16, at_the_server: usize) {
    const CLIENTS: usize = 4;
    const BLOCK: usize = 0x10000;
    const PART: u64 = 8 * MIB / CLIENTS as u64;
    let lab = Lab::on_loops(at_the_server, |_| {});
    let mut config = lab.config("several", "disk");
    config.session.connections = connections;
    let mut map = lab.try_map(config).unwrap();
    let mut nbd: Vec<_> = (0..CLIENTS).map(|_| map.client()).collect();
    thread::scope(|scope| {
        for (n, client) in nbd.iter_mut().enumerate() {
            scope.spawn(move || {
                let first = n as u64 * PART;
                for at in (first..first + PART).step_by(BLOCK) {
                    assert_eq!(client.write(at, &stamp(n, at, BLOCK), 0), 0);
                }
                // Many small ones at a time.
                for k in 0..16 {
                    client.send(cmd::WRITE, 0, first + k * 4096, 4096, &stamp(n + 100, k, 4096));
                }
                assert!((0..16).all(|_| client.reply().0 == 0));
            });
        }
    });
    assert_eq!(nbd[0].call(cmd::FLUSH, 0, 0, 0, &[]), 0);
    let image = fs::read(lab.image("disk")).unwrap();
    for n in 0..CLIENTS {
        let first = n as u64 * PART;
        for at in (first..first + PART).step_by(BLOCK) {
            let expected: Vec<u8> = match at == first {
                true => (0..16).flat_map(|k| stamp(n + 100, k, 4096)).collect(),
                false => stamp(n, at, BLOCK),
            };
            let reader = (n + 1 + at as usize / BLOCK) % CLIENTS;
            assert!(
                nbd[reader].read(at, BLOCK as u32).unwrap() == expected,
                "{reader} at {at}"
            );
            assert!(image[at as usize..][..BLOCK] == expected, "{at}");
        }
    }
    let stats = map.mapping.stats();
    assert_eq!(stats.device.written_bytes, CLIENTS as u64 * (PART + 16 * 4096));
    assert_eq!(stats.device.read_bytes, 8 * MIB);
    assert_eq!((stats.device.failed, stats.turned_away), (0, 0));
    let port = stats.turns.device().port;
    assert_eq!((port.icrc_errors, port.drop_handed_over), (0, 0));
    drop(nbd);
    eventually("they are gone", || map.mapping.stats().clients == 0);
    map.mapping.stop();
    map.until_ended().unwrap();
    // Also counted at the end.
    assert_eq!(map.mapping.stats().device.read_bytes, 8 * MIB);
    assert!(!map.socket.exists());
}

#[test]
fn several_clients_share_a_device_over_any_number_of_connections() {
    for (connections, at_the_server) in [(1, 1), (3, 1), (2, 2), (7, 3)] {
        clients_share_a_device(connections, at_the_server);
    }
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
