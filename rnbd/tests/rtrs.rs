//! Client and server over RTRS over RoCE on loopback.

mod common;

use std::{
    collections::HashSet,
    fs,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use common::{MIB, PATIENCE, sector};
use proptest::prelude::*;
use rnbd::{
    Errno,
    backend::{ExportSpec, Exports, FolderSpec},
    block::{BlockDevice, BlockRequest, IoBuffer},
    client::{Client, Device, MapError},
    nbd::{NbdConfig, NbdServer, proto::cmd},
    proto::{AccessMode, IoOp, MsgIo, MsgOpen, MsgOpenRsp, Rw},
    server::{Server, ServerOptions},
};
use roce::DeviceConfig;
use rtrs::{
    Direction, IoError,
    addr::PathAddr,
    client::{ConType, OpenArgs, Session},
    server::ServerConfig,
};
use zerocopy::{FromBytes, IntoBytes};

/// A server on its own loopback address with some images.
struct Lab {
    dir: tempfile::TempDir,
    addr: IpAddr,
    server: Server<roce::Device>,
}

fn device(addr: IpAddr) -> roce::Device {
    roce::Device::open(DeviceConfig::new(addr)).unwrap()
}

impl Lab {
    fn new() -> Self {
        Self::with(|_| {})
    }

    /// Exports: "disk" and "second" (8 MiB each, numbered sectors), which lets a second writer in, "ro", and the folder with
    /// all of them.
    fn with(change: impl FnOnce(&mut ServerConfig)) -> Self {
        Self::build(change, |_| {}, None)
    }

    /// With other limits.
    fn with_options(change: impl FnOnce(&mut ServerOptions)) -> Self {
        Self::build(|_| {}, change, None)
    }

    /// With an export "extra" besides.
    fn with_export(path: &Path) -> Self {
        Self::build(|_| {}, |_| {}, Some(path))
    }

    fn build(
        change: impl FnOnce(&mut ServerConfig),
        limit: impl FnOnce(&mut ServerOptions),
        extra: Option<&Path>,
    ) -> Self {
        let addr = ferroce_loopback::address().into();
        let dir = tempfile::tempdir().unwrap();
        let content: Vec<u8> = (0..8 * MIB / 512).flat_map(sector).collect();
        let mut specs = Vec::new();
        for name in ["disk", "second", "ro"] {
            let path = dir.path().join(format!("{name}.img"));
            fs::write(&path, &content).unwrap();
            specs.push(ExportSpec {
                name: name.into(),
                path,
                read_only: name == "ro",
                migrate: name == "second",
            });
        }
        specs.extend(extra.map(|p| ExportSpec {
            name: "extra".into(),
            path: p.into(),
            ..ExportSpec::default()
        }));
        let folder = FolderSpec {
            path: dir.path().into(),
            ..FolderSpec::default()
        };
        let exports = Exports::new(specs, Some(&folder)).unwrap();
        let mut config = ServerConfig {
            addr,
            queue_depth: 32,
            ..ServerConfig::default()
        };
        change(&mut config);
        let mut options = ServerOptions::new(exports);
        limit(&mut options);
        let server = Server::start(&device(addr), config, options).unwrap();
        Self { dir, addr, server }
    }

    /// A session from an address of its own.
    fn session(&self, name: &str) -> Session<roce::Device> {
        let src = ferroce_loopback::address().into();
        let path = PathAddr {
            src: Some(src),
            dst: SocketAddr::new(self.addr, 1234),
        };
        let args = OpenArgs {
            connect_timeout: PATIENCE,
            ..OpenArgs::new(name, path)
        };
        Session::open(&device(src), args).unwrap()
    }

    fn client(&self, name: &str) -> Client<roce::Device> {
        Client::new(self.session(name)).unwrap()
    }

    fn image(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.img"))
    }
}

fn wait<D: BlockDevice>(d: &D, r: BlockRequest<D::Buffer>) -> (Result<(), Errno>, Option<D::Buffer>) {
    let (tx, rx) = mpsc::channel();
    d.submit(r, Box::new(move |r, b| tx.send((r, b)).unwrap()));
    rx.recv_timeout(PATIENCE).expect("an answer")
}

fn write<D: BlockDevice>(d: &D, offset: u64, data: &[u8], fua: bool) -> Result<(), Errno> {
    for (i, part) in data.chunks(d.geometry().max_transfer as usize).enumerate() {
        let buffer = d.buffer(part.len())?;
        // SAFETY: the buffer is as long as the part.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), buffer.as_ptr(), part.len()) };
        let at = offset + i as u64 * u64::from(d.geometry().max_transfer);
        wait(
            d,
            BlockRequest::Write {
                offset: at,
                buffer,
                fua,
            },
        )
        .0?;
    }
    Ok(())
}

fn read<D: BlockDevice>(d: &D, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
    let mut out = vec![0; len];
    let step = d.geometry().max_transfer as usize;
    for (i, part) in out.chunks_mut(step).enumerate() {
        let buffer = d.buffer(part.len())?;
        let (r, b) = wait(
            d,
            BlockRequest::Read {
                offset: offset + (i * step) as u64,
                buffer,
            },
        );
        r?;
        // SAFETY: the buffer is as long as the part.
        unsafe { std::ptr::copy_nonoverlapping(b.unwrap().as_ptr(), part.as_mut_ptr(), part.len()) };
    }
    Ok(out)
}

fn refused(r: Result<Device<roce::Device>, MapError>) -> Errno {
    match r {
        Err(MapError::Refused { errno, .. }) => errno,
        other => panic!("{other:?}"),
    }
}

fn copy_and_change(lab: &Lab) {
    let client = lab.client("a");
    assert_eq!(client.version(), 2);
    let d = client.map("disk", AccessMode::ReadWrite).unwrap();
    let g = d.geometry();
    assert_eq!((g.size, g.logical_block_size, g.read_only), (8 * MIB, 512, false));
    assert!(g.write_cache && g.fua && g.max_discard > 0);
    assert_eq!(g.max_transfer, 124 << 10);
    let all = fs::read(lab.image("disk")).unwrap();
    assert!(read(&d, 0, all.len()).unwrap() == all);
    for (n, fua) in [(1u8, false), (2, true)] {
        let data: Vec<u8> = (0..3 * MIB as u32 + 512).map(|i| (i % 251) as u8 ^ n).collect();
        write(&d, 512 * u64::from(n), &data, fua).unwrap();
        assert!(read(&d, 512 * u64::from(n), data.len()).unwrap() == data);
        wait(&d, BlockRequest::Flush).0.unwrap();
        assert!(fs::read(lab.image("disk")).unwrap()[512 * usize::from(n)..][..data.len()] == data);
    }
    assert_eq!(d.counters().failed, 0);
    d.unmap().unwrap();
    d.unmap().unwrap();
    assert_eq!(wait(&d, BlockRequest::Flush).0, Err(Errno::ESHUTDOWN));
    drop(client.map("disk", AccessMode::ReadWrite).unwrap());
    client.map("/disk", AccessMode::ReadWrite).unwrap();
}

#[test]
fn a_device_is_mapped_read_and_written() {
    copy_and_change(&Lab::new());
}

#[test]
fn the_same_with_keys_that_stay_valid() {
    copy_and_change(&Lab::with(|c| c.always_invalidate = false));
}

#[test]
fn discard_and_zeroes() {
    let lab = Lab::new();
    let d = lab.client("a").map("disk", AccessMode::ReadWrite).unwrap();
    let (offset, len) = (MIB, MIB + 4096);
    wait(&d, BlockRequest::Discard { offset, len }).0.unwrap();
    assert!(read(&d, offset, len as usize).unwrap().iter().all(|b| *b == 0));
    let (offset, len) = (4 * MIB, 2 * MIB + 512);
    wait(
        &d,
        BlockRequest::WriteZeroes {
            offset,
            len,
            fua: true,
            may_unmap: false,
        },
    )
    .0
    .unwrap();
    assert!(read(&d, offset, len as usize).unwrap().iter().all(|b| *b == 0));
    for at in [MIB - 512, 2 * MIB + 4096, 4 * MIB - 512, 6 * MIB + 512] {
        assert_eq!(read(&d, at, 512).unwrap(), sector(at / 512));
    }
}

#[test]
fn what_a_device_can_not_do() {
    let lab = Lab::new();
    let client = lab.client("a");
    let d = client.map("disk", AccessMode::ReadWrite).unwrap();
    assert_eq!(read(&d, 8 * MIB, 512).unwrap_err(), Errno::EIO);
    assert_eq!(read(&d, 1, 512).unwrap_err(), Errno::EINVAL);
    assert_eq!(d.buffer((124 << 10) + 1).unwrap_err(), Errno::EINVAL);
    let ro = client.map("ro", AccessMode::ReadOnly).unwrap();
    assert!(ro.geometry().read_only);
    assert_eq!(write(&ro, 0, &[1; 512], false).unwrap_err(), Errno::EROFS);
    assert_eq!(read(&ro, 512, 512).unwrap(), sector(1));
    fs::File::options()
        .write(true)
        .open(lab.image("disk"))
        .unwrap()
        .set_len(MIB)
        .unwrap();
    assert_eq!(read(&d, 2 * MIB, 512).unwrap_err(), Errno::EIO);
    assert_eq!(write(&d, 2 * MIB, &[1; 512], true).unwrap_err(), Errno::EIO);
    assert_eq!(read(&d, 512, 512).unwrap(), sector(1));
}

#[test]
fn opens_are_refused_as_the_kernel_does() {
    let lab = Lab::new();
    let (a, b) = (lab.client("a"), lab.client("b"));
    assert_eq!(refused(a.map("none", AccessMode::ReadOnly)), Errno::ENOENT);
    assert_eq!(refused(a.map("../disk.img", AccessMode::ReadOnly)), Errno::EINVAL);
    assert_eq!(refused(a.map("ro", AccessMode::ReadWrite)), Errno::EACCES);
    assert!(matches!(
        a.map(&"x".repeat(255), AccessMode::ReadOnly),
        Err(MapError::Name(_))
    ));
    let d = a.map("disk", AccessMode::ReadWrite).unwrap();
    assert!(matches!(
        a.map("disk", AccessMode::ReadOnly),
        Err(MapError::AlreadyMapped(_))
    ));
    assert_eq!(refused(b.map("disk", AccessMode::ReadWrite)), Errno::EPERM);
    assert_eq!(refused(b.map("disk.img", AccessMode::ReadWrite)), Errno::EPERM);
    assert_eq!(refused(b.map("disk", AccessMode::Migration)), Errno::EPERM);
    assert_eq!(refused(b.map("disk.img", AccessMode::Migration)), Errno::EPERM);
    let ro = b.map("disk", AccessMode::ReadOnly).unwrap();
    write(&d, 0, &[9; 512], false).unwrap();
    assert_eq!(read(&ro, 0, 512).unwrap(), [9; 512]);
    drop(d);
    b.map("disk.img", AccessMode::ReadWrite).unwrap();
    let c = lab.server.counters();
    assert_eq!((c.opens, c.refused, c.malformed), (3, 7, 0));
}

#[test]
fn an_export_may_let_a_second_writer_in() {
    let lab = Lab::new();
    let (a, b, c) = (lab.client("a"), lab.client("b"), lab.client("c"));
    let d = a.map("second", AccessMode::ReadWrite).unwrap();
    assert_eq!(refused(b.map("second", AccessMode::ReadWrite)), Errno::EPERM);
    let m = b.map("second", AccessMode::Migration).unwrap();
    write(&m, 0, &[9; 512], false).unwrap();
    assert_eq!(read(&d, 0, 512).unwrap(), [9; 512]);
    assert_eq!(refused(c.map("second", AccessMode::Migration)), Errno::EPERM);
}

#[test]
fn one_export_is_open_once_however_it_is_spelled() {
    let lab = Lab::new();
    let client = lab.client("a");
    // Of the table, and of the folder.
    for first in ["disk", "disk.img"] {
        let d = client.map(first, AccessMode::ReadOnly).unwrap();
        for n in 1..=80 {
            for spelling in [
                format!("{}{first}", "/".repeat(n)),
                format!("{}{first}", "./".repeat(n)),
                format!("{first}{}", "/".repeat(n)),
            ] {
                assert_eq!(
                    refused(client.map(&spelling, AccessMode::ReadOnly)),
                    Errno::EEXIST,
                    "{spelling}"
                );
            }
        }
        assert_eq!(
            refused(client.map(&format!("sub/../{first}"), AccessMode::ReadOnly)),
            Errno::EINVAL
        );
        assert_eq!(lab.server.counters().open, 1);
        d.unmap().unwrap();
        assert_eq!(lab.server.counters().open, 0);
        client.map(&format!("//{first}"), AccessMode::ReadOnly).unwrap();
    }
}

#[test]
fn open_devices_are_bounded() {
    let lab = Lab::with_options(|o| {
        o.max_devices = 2;
        o.max_open = 3;
    });
    let (a, b) = (lab.client("a"), lab.client("b"));
    let open = |client: &Client<_>, name| client.map(name, AccessMode::ReadOnly);
    let first = open(&a, "disk").unwrap();
    let second = open(&a, "second").unwrap();
    assert_eq!(refused(open(&a, "ro")), Errno::EMFILE);
    let third = open(&b, "disk").unwrap();
    assert_eq!(refused(open(&b, "second")), Errno::ENFILE);
    let c = lab.server.counters();
    assert_eq!((c.opens, c.refused, c.refused_limit, c.open), (3, 2, 2, 3));
    first.unmap().unwrap();
    let fourth = open(&b, "second").unwrap();
    drop((second, third, fourth));
    a.session().close();
    b.session().close();
    let until = Instant::now() + PATIENCE;
    while lab.server.counters().open > 0 {
        assert!(Instant::now() < until, "{:?}", lab.server.counters());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_client_that_goes_without_a_word_leaves_its_devices() {
    let lab = Lab::new();
    let a = lab.client("a");
    let d = a.map("disk", AccessMode::ReadWrite).unwrap();
    write(&d, 0, &[5; 4096], false).unwrap();
    a.session().close();
    let b = lab.client("b");
    let until = Instant::now() + PATIENCE;
    loop {
        match b.map("disk", AccessMode::ReadWrite) {
            Ok(d) => return assert_eq!(read(&d, 0, 4096).unwrap(), [5; 4096]),
            Err(e) => assert!(Instant::now() < until, "{e}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Random requests of several threads on two devices of one session, each thread in its own part, against a model.
#[test]
fn many_requests_in_flight_do_what_they_should() {
    const PART: u64 = MIB;
    let lab = Lab::new();
    let client = lab.client("a");
    let devices: Vec<_> = ["disk", "second"]
        .map(|n| Arc::new(client.map(n, AccessMode::ReadWrite).unwrap()))
        .into_iter()
        .collect();
    std::thread::scope(|s| {
        for (t, d) in devices.iter().cycle().take(6).enumerate() {
            s.spawn(move || {
                let mut rng = proptest::test_runner::TestRng::from_seed(
                    proptest::test_runner::RngAlgorithm::ChaCha,
                    &[t as u8 + 1; 32],
                );
                let base = (t as u64 / 2) * PART;
                let mut model = fs_model(base, PART);
                for round in 0..60u32 {
                    let (tx, rx) = mpsc::channel();
                    let mut used = HashSet::new();
                    let mut submitted = 0;
                    for _ in 0..8 {
                        // Requests of one round don't overlap: there is no order between them.
                        let slot = rng.random_range(0..8u64);
                        if !used.insert(slot) {
                            continue;
                        }
                        let at = slot * PART / 8 + rng.random_range(0..8u64) * 512;
                        let len = rng.random_range(1..240usize) * 512;
                        let len = len.min(((slot + 1) * PART / 8 - at) as usize);
                        let buffer = d.buffer(len).unwrap();
                        let tx = tx.clone();
                        submitted += 1;
                        if rng.random_bool(0.5) {
                            let fill = round as u8 ^ slot as u8;
                            // SAFETY: the buffer's own bytes.
                            unsafe { std::ptr::write_bytes(buffer.as_ptr(), fill, len) };
                            model[at as usize..][..len].fill(fill);
                            d.submit(
                                BlockRequest::Write {
                                    offset: base + at,
                                    buffer,
                                    fua: round % 16 == 0,
                                },
                                Box::new(move |r, _| tx.send((r, 0, None)).unwrap()),
                            );
                        } else {
                            d.submit(
                                BlockRequest::Read {
                                    offset: base + at,
                                    buffer,
                                },
                                Box::new(move |r, b| tx.send((r, at as usize, b)).unwrap()),
                            );
                        }
                    }
                    for _ in 0..submitted {
                        let (r, at, b) = rx.recv_timeout(PATIENCE).expect("an answer");
                        r.unwrap();
                        let Some(b) = b else { continue };
                        let mut got = vec![0; b.len()];
                        // SAFETY: the buffer's own bytes.
                        unsafe { std::ptr::copy_nonoverlapping(b.as_ptr(), got.as_mut_ptr(), got.len()) };
                        assert!(got == model[at..][..got.len()], "thread {t} round {round} at {at}");
                    }
                }
                assert!(read(&**d, base, PART as usize).unwrap() == model, "thread {t}");
            });
        }
    });
    for d in &devices {
        assert_eq!(d.counters().failed, 0);
    }
}

fn fs_model(base: u64, len: u64) -> Vec<u8> {
    (base / 512..(base + len) / 512).flat_map(sector).collect()
}

fn raw(session: &Session<roce::Device>, direction: Direction, header: &[u8], len: usize) -> (i32, Vec<u8>) {
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
    let session = lab.session("raw");
    let open = MsgOpen::new(b"disk", AccessMode::ReadWrite).unwrap();
    assert_eq!(
        raw(&session, Read, open.as_bytes(), 55).0,
        libc::EINVAL,
        "no room for the answer"
    );
    assert_eq!(raw(&session, Write, open.as_bytes(), 56).0, libc::EINVAL);
    assert_eq!(lab.server.counters().opens, 0, "nothing stays open without an answer");
    let (e, rsp) = raw(&session, Read, open.as_bytes(), 56);
    assert_eq!(e, 0);
    let id = MsgOpenRsp::read_from_bytes(&rsp).unwrap().device_id.get();
    let again = raw(&session, Read, open.as_bytes(), 56);
    assert_eq!(again, (0, rsp), "the same device again");

    let io = |op, sector, bytes| MsgIo::new(id, Rw::new(op), sector, bytes);
    let cases: [(&str, Direction, MsgIo, usize, i32); 13] = [
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
        ("write same", Write, io(IoOp::WriteSame, 0, 512), 512, libc::EOPNOTSUPP),
        ("flush", Read, io(IoOp::Flush, 0, 0), 0, 0),
    ];
    for (what, direction, m, len, want) in cases {
        assert_eq!(raw(&session, direction, m.as_bytes(), len).0, want, "{what}");
    }
    let mut unknown = io(IoOp::Read, 0, 512);
    unknown.rw.set(1 << 20);
    assert_eq!(raw(&session, Read, unknown.as_bytes(), 512).0, libc::EINVAL);
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

#[test]
fn requests_end_when_the_server_does() {
    let lab = Lab::new();
    let client = lab.client("a");
    let d = Arc::new(client.map("disk", AccessMode::ReadWrite).unwrap());
    let threads: Vec<_> = (0..3u64)
        .map(|t| {
            let d = d.clone();
            std::thread::spawn(move || {
                loop {
                    let data = [t as u8; 8192];
                    if let Err(e) = write(&*d, t * MIB, &data, false).and_then(|()| read(&*d, t * MIB, 8192)) {
                        return e;
                    }
                }
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(100));
    lab.server.shutdown();
    for t in threads {
        assert_eq!(t.join().unwrap(), Errno::ECONNABORTED);
    }
    assert_eq!(d.buffer(512).unwrap_err(), Errno::ECONNABORTED);
    assert!(d.unmap().is_err());
    let e = client.map("second", AccessMode::ReadOnly).unwrap_err();
    assert!(matches!(e, MapError::Session(rtrs::Error::Down(_))), "{e}");
}

#[test]
fn who_waits_for_a_buffer_hears_of_the_end() {
    let lab = Lab::new();
    let d = Arc::new(lab.client("a").map("disk", AccessMode::ReadWrite).unwrap());
    let all: Vec<_> = std::iter::from_fn(|| d.try_buffer(512).unwrap()).collect();
    assert_eq!(all.len(), d.geometry().queue_depth as usize);
    let waiter = {
        let d = d.clone();
        std::thread::spawn(move || d.buffer(512).map(|_| ()))
    };
    std::thread::sleep(Duration::from_millis(100));
    lab.server.shutdown();
    assert_eq!(waiter.join().unwrap(), Err(Errno::ECONNABORTED));
}

#[test]
#[ignore = "needs the right to set up loop devices, and Linux 6.5"]
fn flush_and_fua_reach_the_servers_device() {
    let l = common::Loop::new(&[]);
    let lab = Lab::with_export(&l.path);
    let d = lab.client("a").map("extra", AccessMode::ReadWrite).unwrap();
    common::stays_in_memory(&l.path, || write(&d, 0, &[1; 65536], false));
    wait(&d, BlockRequest::Flush).0.unwrap();
    assert_eq!(common::dirty_pages(&l.path), 0, "flush");
    write(&d, MIB, &[2; 65536], true).unwrap();
    assert_eq!(common::dirty_pages(&l.path), 0, "FUA");
    wait(
        &d,
        BlockRequest::WriteZeroes {
            offset: 2 * MIB,
            len: MIB,
            fua: true,
            may_unmap: false,
        },
    )
    .0
    .unwrap();
    assert_eq!(common::dirty_pages(&l.path), 0, "zeroes with FUA");
    write(&d, 0, &[3; 65536], false).unwrap();
    d.unmap().unwrap();
    assert_eq!(common::dirty_pages(&l.path), 0, "unmap");
}

#[test]
fn nbd_over_it() {
    let lab = Lab::new();
    let d = Arc::new(lab.client("a").map("disk", AccessMode::ReadWrite).unwrap());
    let socket = lab.dir.path().join("nbd");
    let nbd = NbdServer::start(NbdConfig::new(&socket, d.clone()).named("disk")).unwrap();
    assert_eq!(common::Client::go(&socket, "").1, 8 * MIB);
    let (mut c, size, _) = common::Client::go(&socket, "disk");
    assert_eq!(size, 8 * MIB);
    let all = fs::read(lab.image("disk")).unwrap();
    assert!(
        c.read(0, 8 << 20).unwrap() == all,
        "more than the session can have in flight"
    );
    assert!(c.read(512, 200 << 10).unwrap() == all[512..][..200 << 10], "two parts");
    let data: Vec<u8> = (0..5 * MIB as u32).map(|i| (i % 249) as u8).collect();
    assert_eq!(c.write(MIB, &data, 0), 0);
    assert_eq!(c.call(cmd::WRITE_ZEROES, 0, 2 * MIB, MIB as u32, &[]), 0);
    assert_eq!(c.call(cmd::TRIM, 0, 3 * MIB, MIB as u32, &[]), 0);
    assert_eq!(c.call(cmd::FLUSH, 0, 0, 0, &[]), 0);
    let mut want = all;
    want[MIB as usize..][..data.len()].copy_from_slice(&data);
    want[2 * MIB as usize..4 * MIB as usize].fill(0);
    assert!(fs::read(lab.image("disk")).unwrap() == want);
    lab.server.shutdown();
    assert_eq!(c.read(0, 512), Err(5));
    assert_eq!(c.write(0, &[1; 4096], 0), 5);
    nbd.stop();
}
