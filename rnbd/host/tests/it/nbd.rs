//! The NBD server as clients see it, byte by byte.

use std::{
    fs,
    io::{Read, Write},
    net::Shutdown,
    os::unix::{
        fs::{FileTypeExt, PermissionsExt},
        net::UnixListener,
    },
    time::Duration,
};

use crate::common::{Client, MIB, Mapped, Served, eventually, sector, serve, serve_sparse, serve_thin, serve_with};
use rnbd::nbd::proto::{self, cmd, cmd_flag, opt, rep, tx};
use rnbd_host::{listen::Listen, map::MapFailure};

#[test]
fn flags_say_what_the_device_can_do() {
    let s = serve(MIB, true);
    let (_, size, flags) = Client::go(&s.socket, "");
    assert_eq!(size, MIB);
    let always = tx::HAS_FLAGS | tx::SEND_FLUSH | tx::CAN_MULTI_CONN | tx::SEND_CACHE;
    let zeroes = tx::SEND_WRITE_ZEROES | tx::SEND_FAST_ZERO;
    assert_eq!(flags, always | tx::SEND_FUA | tx::SEND_TRIM | zeroes);
    let s = serve(MIB, false);
    assert_eq!(Client::go(&s.socket, "").2, always | tx::READ_ONLY);
}

#[test]
fn reads_and_writes_of_every_size() {
    let s = serve(80 * MIB, true);
    let (mut c, ..) = Client::go(&s.socket, "");
    // One part, several parts, more parts than the device lends at once.
    for len in [512u32, 4096, 1 << 20, (1 << 20) + 512, 5 << 20, 32 << 20] {
        let data: Vec<u8> = (0..len).map(|i| (i % 253) as u8 ^ (len >> 12) as u8).collect();
        assert_eq!(c.write(512, &data, 0), 0, "{len}");
        assert!(c.read(512, len).unwrap() == data, "{len}");
        assert_eq!(c.read(0, 512).unwrap(), sector(0));
    }
    assert_eq!(c.read(40 * MIB, 512).unwrap(), sector(40 * MIB / 512));
    assert_eq!(c.call(cmd::FLUSH, 0, 0, 0, &[]), 0);
    drop(c);
    s.map.end().unwrap();
    assert_eq!(fs::metadata(&s.image).unwrap().len(), 80 * MIB);
}

/// From the file system of the server's image to the client of the mapping.
#[test]
fn holes_of_the_servers_image_are_told() {
    for writable in [true, false] {
        let s = serve_sparse(writable);
        let mut c = Client::connect(&s.socket);
        c.option(opt::STRUCTURED_REPLY, &[]);
        assert_eq!(c.opt_reply().kind, rep::ACK);
        let name = proto::BASE_ALLOCATION;
        let query = [&[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, name.len() as u8], name.as_bytes()].concat();
        c.option(opt::SET_META_CONTEXT, &query);
        assert_eq!([c.opt_reply().kind, c.opt_reply().kind], [rep::META_CONTEXT, rep::ACK]);
        c.choose("");
        let mib = MIB as u32;
        for (flags, extents) in [
            (0, &[8 * mib, 3, mib, 0, 54 * mib, 3, mib, 0][..]),
            (cmd_flag::REQ_ONE, &[8 * mib, 3]),
        ] {
            let cookie = c.send(cmd::BLOCK_STATUS, flags, 0, 64 * mib, &[]);
            let head = c.data(20);
            assert_eq!(head[..4], proto::STRUCTURED_REPLY_MAGIC.to_be_bytes());
            assert_eq!(head[4..8], [0, 1, 0, 5]);
            assert_eq!(head[8..16], cookie.to_be_bytes());
            let body: Vec<u8> = [1].iter().chain(extents).flat_map(|n: &u32| n.to_be_bytes()).collect();
            assert_eq!(head[16..], (body.len() as u32).to_be_bytes());
            assert_eq!(c.data(body.len()), body);
        }
    }
}

#[test]
fn trim_and_write_zeroes_read_zero() {
    let s = serve(4 * MIB, true);
    let (mut c, ..) = Client::go(&s.socket, "");
    for (n, (command, flags)) in [
        (cmd::TRIM, 0),
        (cmd::TRIM, cmd_flag::FUA),
        (cmd::WRITE_ZEROES, 0),
        (cmd::WRITE_ZEROES, cmd_flag::NO_HOLE),
        (cmd::WRITE_ZEROES, cmd_flag::FUA | cmd_flag::NO_HOLE),
    ]
    .into_iter()
    .enumerate()
    {
        let at = n as u64 * (512 << 10);
        assert_eq!(c.call(command, flags, at + 4096, 65536, &[]), 0);
        assert_eq!(c.read(at + 4096, 65536).unwrap(), vec![0; 65536]);
        assert_eq!(
            c.read(at + 4096 + 65536, 512).unwrap(),
            sector((at + 4096 + 65536) / 512)
        );
    }
}

#[test]
fn garbage_ends_only_its_own_connection() {
    let s = serve(MIB, true);
    let (mut good, ..) = Client::go(&s.socket, "");
    let mut c = Client::raw(&s.socket);
    c.data(18);
    c.s.write_all(&[0xff; 64]).unwrap();
    assert!(c.closed(), "unknown client flags");
    let mut c = Client::connect(&s.socket);
    c.s.write_all(&[0; 64]).unwrap();
    assert!(c.closed(), "option without magic");
    let mut c = Client::connect(&s.socket);
    c.s.write_all(
        &[
            &proto::OPT_MAGIC.to_be_bytes()[..],
            &[0, 0, 0, 7, 0xff, 0xff, 0xff, 0xff],
        ]
        .concat(),
    )
    .unwrap();
    assert!(c.closed(), "absurd option");
    let (mut c, ..) = Client::go(&s.socket, "");
    c.s.write_all(&[0x55; 280]).unwrap();
    assert!(c.closed(), "request without magic");
    let (mut c, ..) = Client::go(&s.socket, "");
    c.send(cmd::WRITE, 0, 0, u32::MAX, &[]);
    assert!(c.closed(), "write of 4 GiB");
    let (mut c, ..) = Client::go(&s.socket, "");
    c.send(cmd::WRITE, 0, 0, 8192, &[7; 4096]);
    c.s.shutdown(Shutdown::Write).unwrap();
    let mut rest = Vec::new();
    c.s.read_to_end(&mut rest).expect("an end");
    assert_eq!(good.read(0, 512).unwrap(), sector(0));
    assert_eq!(good.read(4096, 512).unwrap(), sector(8), "half a write is no write");
}

#[test]
fn a_client_that_stops_in_a_write_or_reads_nothing_does_not_stop_others() {
    let s = serve(64 * MIB, true);
    let mut stuck = Vec::new();
    for _ in 0..6 {
        let (mut c, ..) = Client::go(&s.socket, "");
        c.send(cmd::WRITE, 0, 0, 1 << 20, &[7; 1000]);
        stuck.push(c);
        // Many more bytes than the socket holds, and than the device lends.
        let (mut c, ..) = Client::go(&s.socket, "");
        for n in 0..64 {
            c.send(cmd::READ, 0, n << 20, 1 << 20, &[]);
        }
        stuck.push(c);
    }
    let (mut c, ..) = Client::go(&s.socket, "");
    for n in 0..32 {
        assert_eq!(c.read(n << 20, 2 << 20).unwrap()[..512], sector(n << 11));
    }
    // The slow ones get what they asked for when they go on.
    for (n, mut c) in stuck.into_iter().enumerate() {
        if n % 2 == 0 {
            c.s.write_all(&vec![7; (1 << 20) - 1000]).unwrap();
            assert_eq!(c.reply().0, 0);
        } else {
            for _ in 0..64 {
                let (e, cookie) = c.reply();
                assert_eq!(e, 0);
                let d = c.data(1 << 20);
                if cookie > 1 {
                    assert_eq!(d[..512], sector((cookie - 1) << 11));
                }
            }
        }
    }
}

#[test]
fn clients_that_stop_in_a_write_give_the_devices_buffers_back() {
    let s = serve_thin(8 * MIB, 1 << 20);
    let mut stuck: Vec<Client> = (0..5u64)
        .map(|n| {
            let (mut c, ..) = Client::go(&s.socket, "");
            c.send(cmd::WRITE, 0, n << 20, 1 << 20, &[n as u8 | 0x80; 70_000]);
            c
        })
        .collect();
    let (mut c, ..) = Client::go(&s.socket, "");
    assert_eq!(c.read(6 * MIB, 2 << 20).unwrap()[..512], sector(6 * MIB / 512));
    for (n, c) in stuck.iter_mut().enumerate() {
        c.s.write_all(&vec![n as u8 | 0x80; (1 << 20) - 70_000]).unwrap();
        assert_eq!(c.reply().0, 0);
    }
    for n in 0..5u64 {
        assert_eq!(c.read(n << 20, 1 << 20).unwrap(), vec![n as u8 | 0x80; 1 << 20]);
    }
}

#[test]
fn too_many_clients_are_turned_away() {
    let mut s = serve_with(MIB, true, |c| c.max_clients = 2);
    let a = Client::go(&s.socket, "");
    let _b = Client::go(&s.socket, "");
    for _ in 0..20 {
        assert!(Client::raw(&s.socket).closed());
    }
    assert_eq!(s.map.mapping.stats().turned_away, 20);
    drop(a);
    eventually("the end of one", || s.map.mapping.stats().clients == 1);
    Client::go(&s.socket, "");
}

#[test]
fn the_socket_is_private_and_goes_with_the_mapping() {
    let s = serve(MIB, true);
    let meta = fs::metadata(&s.socket).unwrap();
    assert!(meta.file_type().is_socket());
    assert_eq!(meta.permissions().mode() & 0o777, 0o600);
    s.map.end().unwrap();
    assert!(!s.socket.exists());
}

/// Another mapping of the same server, with this socket.
fn another(s: &Served, session: &str, socket: &std::path::Path) -> Result<Mapped, MapFailure> {
    let mut config = s.lab.config(session, "image");
    config.devices[0].mode = rnbd::proto::AccessMode::ReadOnly;
    config.listen = vec![Listen::Unix(socket.into())];
    s.lab.try_map(config)
}

fn refused(mapped: Result<Mapped, MapFailure>) -> std::io::Error {
    match mapped.map(|_| ()) {
        Err(MapFailure::Socket(e)) => e,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_dead_servers_socket_is_taken_over_a_live_ones_is_not() {
    let s = serve(MIB, true);
    let e = refused(another(&s, "a", &s.socket));
    assert_eq!(e.kind(), std::io::ErrorKind::AddrInUse, "{e}");
    Client::go(&s.socket, "");

    let dir = tempfile::tempdir().unwrap();
    let stale = dir.path().join("stale");
    drop(UnixListener::bind(&stale).unwrap());
    let map = another(&s, "b", &stale).unwrap();
    Client::go(&stale, "");
    map.end().unwrap();
    assert!(!stale.exists());

    let file = dir.path().join("file");
    fs::write(&file, "precious").unwrap();
    let e = refused(another(&s, "c", &file));
    assert_eq!(e.kind(), std::io::ErrorKind::AlreadyExists, "{e}");
    assert_eq!(fs::read(&file).unwrap(), b"precious");
    let long = dir.path().join("x".repeat(120));
    assert!(refused(another(&s, "d", &long)).to_string().contains("longer"));
}

#[test]
fn stopping_answers_what_has_arrived() {
    let s = serve(16 * MIB, true);
    let (mut c, ..) = Client::go(&s.socket, "");
    for n in 0..32 {
        c.send(cmd::WRITE, 0, n * 4096, 4096, &[n as u8 ^ 0x80; 4096]);
    }
    s.map.mapping.stop();
    let mut answered = 0;
    let mut h = [0; 16];
    while c.s.read_exact(&mut h).is_ok() {
        assert_eq!(h[4..8], [0; 4]);
        answered += 1;
    }
    s.map.end().unwrap();
    assert_eq!(answered, 32);
    assert!(!s.socket.exists());
    let all = fs::read(&s.image).unwrap();
    for n in 0..32 {
        assert_eq!(all[n * 4096..][..4096], [n as u8 ^ 0x80; 4096]);
    }
}

#[test]
fn stopping_does_not_wait_for_ever_for_a_client_that_reads_nothing() {
    let s = serve_with(64 * MIB, true, |c| c.grace = Duration::from_millis(300));
    let (mut c, ..) = Client::go(&s.socket, "");
    for n in 0..64 {
        c.send(cmd::READ, 0, n << 20, 1 << 20, &[]);
    }
    s.map.end().unwrap();
    assert!(!s.socket.exists());
}
