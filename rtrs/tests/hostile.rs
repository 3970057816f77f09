//! Peers that break the protocol: the path ends, is counted, and nobody else notices.

mod support;

use std::{
    sync::{atomic::Ordering, mpsc},
    thread,
};

use ferroce_rig::{Host, Session};
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use roce::{RKey, RemoteAddr, SendOp};
use rtrs::{
    Direction, Error, IoError, PathError,
    client::{ConType, SessionConfig},
    errno,
    proto::{ConnRsp, Imm, InfoReq, InfoRsp, IoReply, MsgFlags, RdmaRead, RdmaWrite, RkeyRsp, SgDesc},
    server::ServerConfig,
};
use support::{
    raw::{Client, Script, Server},
    *,
};
use zerocopy::IntoBytes;

fn client(bed: &Bed) -> Client {
    Client::new(bed.stranger(), bed.path.src.unwrap(), bed.path.dst)
}

fn still_serves(bed: &Bed) {
    eventually("the end of the bad session", || bed.server.sessions().is_empty());
    let session = bed.open_elsewhere("good");
    write(&session, 100, b"all is well").result.unwrap();
    assert_eq!(read(&session, 100, 11), b"all is well");
    session.close();
    eventually("the end of the good session", || bed.server.sessions().is_empty());
}

/// A read request with its descriptors.
fn read_message(usr_len: u16, desc: &[SgDesc]) -> Vec<u8> {
    [
        RdmaRead::new(usr_len, MsgFlags::NEED_INVAL, desc.len() as u16).as_bytes(),
        desc.as_bytes(),
    ]
    .concat()
}

type Case = (&'static str, fn(&Client));

/// What a client with an open session can do wrong.
const AFTER_HANDSHAKE: &[Case] = &[
    ("unknown immediate type", |c| c.end.imm(&c.cons[1].qp, 0x5000_0000)),
    ("an answer from the client", |c| {
        c.end.imm(&c.cons[1].qp, Imm::IoRsp(IoReply::new(0, 0, false)).encode());
    }),
    ("a heartbeat on an I/O connection", |c| {
        c.end.imm(&c.cons[1].qp, Imm::HbMsg.encode())
    }),
    ("an offset behind the chunk", |c| {
        c.end.imm(&c.cons[1].qp, Imm::IoReq(70 << 10).encode())
    }),
    ("an unknown message", |c| c.io(1, 0, 0, &9u16.to_le_bytes(), 0)),
    ("a key response", |c| c.io(1, 0, 0, RkeyRsp::new(0, 1).as_bytes(), 0)),
    ("a message cut off by the chunk's end", |c| {
        c.io(1, 0, (64 << 10) - 1, &[2], (64 << 10) - 1)
    }),
    ("a read cut off by the chunk's end", |c| {
        c.io(
            1,
            0,
            (64 << 10) - 8,
            &read_message(0, &[SgDesc::new(1, 2, 3)])[..8],
            (64 << 10) - 8,
        );
    }),
    ("a header longer than what lies before", |c| {
        c.io(1, 3, 0, RdmaWrite::new(100).as_bytes(), 0)
    }),
    ("a header longer than any", |c| {
        c.io(1, 3, 40_000, RdmaWrite::new(5000).as_bytes(), 40_000)
    }),
    ("two descriptors", |c| {
        let desc = [SgDesc::new(1, 2, 512); 2];
        c.io(1, 1, 1024, &read_message(0, &desc), 1024);
    }),
    ("a read of nothing", |c| {
        c.io(1, 1, 512, &read_message(0, &[SgDesc::new(1, 2, 0)]), 512)
    }),
    ("a read of more than was set aside", |c| {
        c.io(1, 1, 512, &read_message(0, &[SgDesc::new(1, 2, 513)]), 512);
    }),
    ("two requests in one chunk", |c| {
        let header = Ask::Hold.header(0);
        let bytes = [&header[..], RdmaWrite::new(header.len() as u16).as_bytes()].concat();
        c.io(1, 2, 0, &bytes, header.len() as u32);
        let layout = c.layout.unwrap();
        c.end
            .imm(&c.cons[1].qp, Imm::IoReq(layout.pack(2, header.len() as u32)).encode());
    }),
    ("a SEND on an I/O connection", |c| {
        c.end.send(&c.cons[1].qp, SendOp::Send, b"hello")
    }),
    ("a second information request", |c| {
        c.end
            .send(&c.cons[0].qp, SendOp::Send, InfoReq::new("other").unwrap().as_bytes());
    }),
];

fn cases(always_invalidate: bool) {
    let bed = Bed::new(ServerConfig {
        always_invalidate,
        ..config()
    });
    for (i, (what, bad)) in AFTER_HANDSHAKE.iter().enumerate() {
        let mut c = client(&bed);
        c.open("bad");
        bad(&c);
        c.closed(1);
        eventually(what, || {
            // A request that the user holds keeps the session until it is answered; the disk's threads may take it late.
            bed.disk.held.lock().drain(..).for_each(|r| r.complete(0));
            bed.server.sessions().is_empty()
        });
        let counters = bed.server.counters();
        let broken = counters.protocol_errors + counters.transfer_errors;
        assert_eq!(broken, i as u64 + 1, "{what}: {counters:?}");
    }
    assert_eq!(bed.server.counters().sessions_opened, AFTER_HANDSHAKE.len() as u64);
    still_serves(&bed);
}

#[test]
fn a_client_that_breaks_the_protocol_with_new_keys() {
    cases(true);
}

#[test]
fn a_client_that_breaks_the_protocol_with_fixed_keys() {
    cases(false);
}

#[test]
fn a_chunk_that_is_worked_on_is_out_of_reach() {
    let bed = Bed::new(config());
    let mut c = client(&bed);
    c.open("bad");
    let header = Ask::Hold.header(0);
    let bytes = [&header[..], RdmaWrite::new(header.len() as u16).as_bytes()].concat();
    c.io(1, 2, 0, &bytes, header.len() as u32);
    eventually("a request", || bed.disk.held.lock().len() == 1);
    // The server has taken the key back: the write is refused, and the path ends.
    let remote = RemoteAddr {
        addr: c.chunks[2].addr,
        rkey: RKey(c.chunks[2].rkey),
    };
    c.end.send(&c.cons[1].qp, SendOp::Write(remote), &[0xff; 64]);
    c.closed(1);
    let held = bed.disk.held.lock().pop().unwrap();
    assert_eq!(held.user_header(), header);
    held.complete(0);
    still_serves(&bed);
}

/// A request in chunk 0: its data, and where its message starts.
fn request(data: &[u8]) -> (Vec<u8>, u32) {
    let header = Ask::Transfer(0).header(0);
    let message = RdmaWrite::new(header.len() as u16);
    let bytes = [data, &header, message.as_bytes()].concat();
    (bytes, (data.len() + header.len()) as u32)
}

/// Who knows a key of another session's chunk can do nothing with it.
#[test]
fn keys_open_nothing_to_other_sessions() {
    let bed = Bed::new(config());
    let (mut mine, mut other) = (client(&bed), client(&bed));
    mine.open("mine");
    other.open("other");
    let remote = |offset: u64| RemoteAddr {
        addr: mine.chunks[0].addr + offset,
        rkey: RKey(mine.chunks[0].rkey),
    };
    let (bytes, offset) = request(b"mine");
    mine.end.deliver(&mine.cons[1].qp, SendOp::Write(remote(0)), &bytes);
    let imm = Imm::IoReq(mine.layout.unwrap().pack(1, offset)).encode();
    other
        .end
        .send(&other.cons[1].qp, SendOp::WriteWithImm(remote(0), imm), b"evil");
    other.closed(1);
    let imm = Imm::IoReq(mine.layout.unwrap().pack(0, offset)).encode();
    mine.end.imm(&mine.cons[1].qp, imm);
    let answer = mine.end.next(&mine.cons[1].qp).expect("an answer");
    assert!(matches!(Imm::decode(answer.imm), Ok(Imm::IoRsp(r)) if r.errno == 0));
    assert_eq!(&bed.disk.bytes.lock()[..4], b"mine");
    assert_eq!(bed.disk.requests.load(Ordering::Relaxed), 1);
    drop(other);
    eventually("the end of the bad session", || bed.server.sessions().len() == 1);
    assert_eq!(bed.server.counters().access_errors, 1);
    drop(mine);
    still_serves(&bed);
}

#[test]
fn whoever_tries_keys_again_and_again_has_to_wait() {
    let bed = Bed::new(config());
    let mut refused = 0;
    for _ in 0..12 {
        let mut c = client(&bed);
        match c.connect(c.request(0, 2)) {
            Err(errno) => {
                assert_eq!(errno, errno::EBUSY);
                refused += 1;
                continue;
            }
            Ok(()) => c.connect(c.request(1, 2)).unwrap(),
        }
        assert!(c.information(InfoReq::new("bad").unwrap().as_bytes()));
        let remote = RemoteAddr {
            addr: c.chunks[0].addr,
            rkey: RKey(c.chunks[0].rkey ^ 0xff),
        };
        c.end.send(&c.cons[1].qp, SendOp::Write(remote), b"evil");
        c.closed(1);
        drop(c);
        eventually("its end", || bed.server.sessions().is_empty());
    }
    assert!(refused > 0, "nothing slows it down");
    let counters = bed.server.counters();
    assert_eq!(
        (counters.access_errors, counters.refused_slowed_down),
        (12 - refused, refused)
    );
    // Others don't have to.
    let (ip, _) = addresses();
    let dev = device(ip);
    let mut other = Client::new(&dev, ip, bed.path.dst);
    other.open("other");
}

#[test]
fn connection_requests_that_can_not_be() {
    let bed = Bed::new(ServerConfig {
        max_connections: 5,
        ..config()
    });
    let refused = |spoil: &dyn Fn(&mut Vec<u8>)| {
        let mut c = client(&bed);
        let mut bytes = c.request(0, 2);
        spoil(&mut bytes);
        c.connect(bytes).unwrap_err()
    };
    assert_eq!(refused(&|b| b[2] = 0), errno::ECONNRESET, "magic");
    assert_eq!(refused(&|b| b[5] = 9), errno::ECONNRESET, "version");
    assert_eq!(refused(&|b| b[6] = 2), errno::ECONNRESET, "number above the count");
    assert_eq!(refused(&|b| b[8] = 6), errno::ECONNRESET, "too many");
    assert_eq!(refused(&|b| b[8] = 1), errno::ECONNRESET, "no I/O connection");
    assert_eq!(refused(&|b| b[44] = 0), errno::ENXIO, "not the first, but no session");
    assert_eq!(refused(&Vec::clear), errno::ECONNRESET, "nothing");
    eventually("no session", || bed.server.sessions().is_empty());

    let mut c = client(&bed);
    c.connect(c.request(0, 3)).unwrap();
    assert_eq!(
        c.connect(c.request(0, 3)),
        Err(errno::ECONNRESET),
        "the same connection again"
    );
    assert_eq!(c.connect(c.request(1, 4)), Err(errno::ECONNRESET), "another count");
    let mut other = client(&bed);
    other.session = c.session;
    assert_eq!(
        other.connect(other.request(0, 3)),
        Err(errno::EEXIST),
        "a second path between the same addresses"
    );
    c.connect(c.request(2, 3)).unwrap();
    c.connect(c.request(1, 3)).unwrap();
    assert!(c.information(InfoReq::new("s1").unwrap().as_bytes()), "in any order");
    assert_eq!(
        c.connect(c.request(1, 3)),
        Err(errno::ECONNRESET),
        "after the handshake"
    );
}

#[test]
fn a_path_takes_no_connection_from_elsewhere() {
    let bed = Bed::new(config());
    let mut c = client(&bed);
    c.connect(c.request(0, 2)).unwrap();
    let (other_ip, _) = addresses();
    let other_dev = device(other_ip);
    let mut thief = Client::new(&other_dev, other_ip, bed.path.dst);
    (thief.session, thief.path) = (c.session, c.path);
    assert_eq!(thief.connect(thief.request(1, 2)), Err(errno::ECONNRESET));
    c.connect(c.request(1, 2)).unwrap();
    assert!(c.information(InfoReq::new("s1").unwrap().as_bytes()));
}

#[test]
fn a_client_with_many_processors_and_a_deep_queue_gets_in() {
    let bed = Bed::new(ServerConfig {
        queue_depth: 4096,
        max_chunk_size: 8192,
        ..config()
    });
    let mut c = client(&bed);
    assert_eq!(c.connect(c.request(0, 257)), Ok(()));
}

#[test]
fn handshakes_that_go_wrong() {
    let bed = Bed::new(config());
    let good = InfoReq::new("s1").unwrap().as_bytes().to_vec();
    let spoilt = |at: usize, value: u8| {
        let mut b = good.clone();
        b[at] = value;
        b
    };
    let mut endless = good.clone();
    endless[2..257].fill(b'x');
    for (what, bytes) in [
        ("too short", good[..100].to_vec()),
        ("another type", spoilt(0, 1)),
        ("a slash in the name", spoilt(3, b'/')),
        ("no name", spoilt(2, 0)),
        ("a name without end", endless),
    ] {
        let mut c = client(&bed);
        for cid in 0..2 {
            c.connect(c.request(cid, 2)).unwrap();
        }
        assert!(!c.information(&bytes), "{what}");
    }
    let mut c = client(&bed);
    c.connect(c.request(0, 2)).unwrap();
    assert!(!c.information(&good), "before all connections are there");
    let mut c = client(&bed);
    for cid in 0..2 {
        c.connect(c.request(cid, 2)).unwrap();
    }
    c.end.imm(&c.cons[1].qp, Imm::IoReq(0).encode());
    c.closed(1);
    assert_eq!(bed.server.counters().sessions_opened, 0);
    assert_eq!(bed.server.counters().protocol_errors, 7);
    still_serves(&bed);
}

#[test]
fn a_handshake_that_is_not_finished_ends() {
    let bed = Bed::new(ServerConfig {
        handshake_timeout: std::time::Duration::from_secs(3),
        ..config()
    });
    let mut c = client(&bed);
    c.connect(c.request(0, 2)).unwrap();
    eventually("its session", || bed.server.sessions().len() == 1);
    c.closed(0);
    eventually("its end", || bed.server.sessions().is_empty());
    assert_eq!(bed.server.counters().handshakes_lost, 1);
}

/// Random messages in chunks: each is answered or ends the path, and the server lives on.
#[test]
fn random_messages_in_a_chunk() {
    let bed = Bed::new(ServerConfig {
        always_invalidate: false,
        ..config()
    });
    let mut runner = TestRunner::new(Config {
        cases: 200,
        failure_persistence: None,
        ..Config::default()
    });
    let message = (
        0u16..5,
        any::<u16>(),
        0u16..3,
        0u16..3,
        any::<u64>(),
        any::<u32>(),
        any::<u32>(),
    );
    let strategy = (
        message,
        0u32..32,
        0u32..1 << 16,
        proptest::option::weighted(0.2, any::<u32>()),
        0usize..40,
    );
    let outcome = runner.run(
        &strategy,
        |((kind, usr, flags, sg, addr, key, len), msg_id, offset, imm, cut)| {
            let mut c = client(&bed);
            c.open("fuzz");
            let usr = if usr % 2 == 0 { usr % 64 } else { usr };
            let mut bytes = [kind, usr, flags, sg].as_bytes().to_vec();
            bytes.extend(SgDesc::new(addr, key, len % 70_000).as_bytes());
            bytes.truncate(cut.max(1));
            let start = offset.min((64 << 10) - bytes.len() as u32);
            c.io(1, msg_id, start, &bytes, offset);
            if let Some(imm) = imm {
                c.end.imm(&c.cons[1].qp, imm);
            }
            // An answer, or the end.
            if let Some(wc) = c.end.next(&c.cons[1].qp) {
                prop_assert!(matches!(Imm::decode(wc.imm), Ok(Imm::IoRsp(_))));
            }
            drop(c);
            bed.disk.held.lock().drain(..).for_each(|r| r.complete(0));
            eventually("its end", || bed.server.sessions().is_empty());
            Ok(())
        },
    );
    outcome.unwrap();
    still_serves(&bed);
}

/// The other end of a session; it is there as long as this lives.
struct Far {
    _host: Host,
    _stay: mpsc::Sender<()>,
}

/// A client of ours and a server by hand that talks to it.
fn against(script: Script, act: impl FnOnce(&Server) + Send + 'static) -> (Result<Session, Error>, Far) {
    let (server_ip, client_ip) = addresses();
    let (server_dev, client) = (device(server_ip), host(client_ip));
    let path = rtrs::addr::PathAddr {
        src: Some(client_ip),
        dst: std::net::SocketAddr::new(server_ip, PORT),
    };
    let mut server = Server::new(&server_dev, path.dst);
    let (stay, gone) = mpsc::channel::<()>();
    thread::spawn(move || {
        server.serve(&script);
        act(&server);
        // Its end disconnects: the client shall judge for itself first.
        let _ = gone.recv();
    });
    let args = SessionConfig {
        connect_timeout: PATIENCE,
        ..SessionConfig::new("s1", path)
    };
    let session = Session::open(&client, args);
    let far = Far {
        _host: client,
        _stay: stay,
    };
    (session, far)
}

#[test]
fn servers_that_offer_what_can_not_be() {
    let conn = |rsp: ConnRsp| Script {
        conn_rsp: rsp.as_bytes().to_vec(),
        ..Script::proper()
    };
    let none = MsgFlags::empty();
    for script in [
        conn(ConnRsp::accept(0, 12 << 10, 4096, none)),
        conn(ConnRsp::accept(4, 0, 4096, none)),
        conn(ConnRsp::accept(4, u32::MAX, 4096, none)),
        conn(ConnRsp::accept(65535, 1 << 20, 4096, none)),
        conn(ConnRsp::reject(5)),
        Script {
            conn_rsp: vec![1; 56],
            ..Script::proper()
        },
    ] {
        let (session, _far) = against(script, |_| ());
        let error = session.unwrap_err();
        assert!(
            matches!(
                error,
                Error::Protocol {
                    what: "connection response",
                    ..
                }
            ),
            "{error}"
        );
    }
    let info = |spoil: fn(InfoRsp) -> Vec<u8>| Script {
        info_rsp: Some(Box::new(spoil)),
        ..Script::proper()
    };
    for script in [
        info(|_| InfoRsp::new(Vec::new()).to_bytes()),
        info(|r| InfoRsp::new([r.descriptors(), r.descriptors()].concat()).to_bytes()),
        info(|r| r.to_bytes()[..12].to_vec()),
        info(|_| vec![0; 24]),
    ] {
        let (session, _far) = against(script, |_| ());
        let error = session.unwrap_err();
        assert!(
            matches!(
                error,
                Error::Protocol {
                    what: "session information",
                    ..
                }
            ),
            "{error}"
        );
    }
}

#[test]
fn servers_that_say_what_nobody_asked() {
    let acts: [fn(&Server); 5] = [
        |s| s.end.imm(&s.cons[1].qp, Imm::IoRsp(IoReply::new(0, 0, false)).encode()),
        |s| s.end.imm(&s.cons[1].qp, Imm::IoRsp(IoReply::new(4, 0, false)).encode()),
        |s| s.end.imm(&s.cons[1].qp, Imm::IoReq(0).encode()),
        |s| s.end.imm(&s.cons[1].qp, 0x7000_0000),
        |s| {
            s.end.send(
                &s.cons[1].qp,
                SendOp::SendWithImm(Imm::IoRsp(IoReply::new(0, 0, false)).encode()),
                &[],
            )
        },
    ];
    for act in acts {
        let (session, _far) = against(Script::proper(), act);
        let session = session.unwrap();
        eventually("the end of the path", || session.state().is_err());
        let why = session.state().unwrap_err();
        assert!(why.is_protocol(), "{why}");
    }
}

/// The server says that it revoked the buffer's key, but did not: the client does, before it ends the request.
#[test]
fn a_server_that_lies_about_a_revoked_key() {
    let (tx, rx) = mpsc::channel();
    let (done_tx, done_rx) = mpsc::channel();
    let (session, _far) = against(Script::proper(), move |s| {
        let (msg_id, message) = s.request();
        let addr = u64::from_le_bytes(message[8..16].try_into().unwrap());
        let key = RKey(u32::from_le_bytes(message[16..20].try_into().unwrap()));
        let remote = RemoteAddr { addr, rkey: key };
        s.end.send(&s.cons[1].qp, SendOp::Write(remote), b"before");
        s.end
            .imm(&s.cons[1].qp, Imm::IoRsp(IoReply::new(msg_id, 0, true)).encode());
        done_rx.recv().unwrap();
        s.end.send(&s.cons[1].qp, SendOp::Write(remote), b"after!");
        tx.send(s.end.next(&s.cons[1].qp).is_none()).unwrap();
    });
    let session = session.unwrap();
    let data = session.alloc_buffer(6).unwrap();
    let outcome = session.call(ConType::Io(0), Direction::Read, b"x", Some(data));
    outcome.result.unwrap();
    let data = outcome.data.unwrap();
    assert_eq!(contents(&data), b"before");
    done_tx.send(()).unwrap();
    assert!(rx.recv().unwrap(), "the second write is refused");
    assert_eq!(contents(&data), b"before");
}

/// An answer that comes over another connection than the request is not for it.
#[test]
fn an_answer_over_the_wrong_connection() {
    let (session, _far) = against(Script::proper(), |s| {
        let (msg_id, _) = s.request();
        s.end
            .imm(&s.cons[0].qp, Imm::IoRsp(IoReply::new(msg_id, 0, false)).encode());
    });
    let session = session.unwrap();
    let result = session.call(ConType::Io(0), Direction::Write, b"x", None).result;
    assert!(
        matches!(result, Err(IoError::Path(PathError::Unexpected(_)))),
        "{result:?}"
    );
}
