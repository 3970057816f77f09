//! Client and server over the software device on loopback.

mod support;

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    process::{Command, Stdio},
    sync::{Arc, atomic::Ordering, mpsc},
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use rand::{Rng, SeedableRng, rngs::StdRng};
use roce::{Device, RejectReason};
use rtrs::{
    Direction, Error, IoError, PathError,
    addr::PathAddr,
    admission::AccessList,
    client::{ConType, OpenArgs, Outcome, Permit, Session},
    errno,
    server::{Server, ServerConfig},
};
use support::*;

/// Writes and reads of random sizes on separate stripes, as many in flight as the queue allows, against a copy.
fn stress(session: &Session<Device>, rounds: usize, seed: u64) {
    const STRIPE: usize = 60 << 10;
    let mut rng = StdRng::seed_from_u64(seed);
    let max = (session.info().max_io_size as usize).min(STRIPE);
    let mut model: Vec<Vec<u8>> = vec![vec![0; STRIPE]; 16];
    let (tx, rx) = mpsc::channel();
    let mut busy: HashMap<usize, Option<Vec<u8>>> = HashMap::new();
    let settle = |busy: &mut HashMap<usize, Option<Vec<u8>>>| {
        let (stripe, outcome): (usize, Outcome<Device>) = rx.recv_timeout(PATIENCE).expect("every request ends");
        outcome.result.unwrap();
        if let Some(expected) = busy.remove(&stripe).unwrap() {
            let data = outcome.data.map_or(Vec::new(), |b| contents(&b));
            assert!(
                data == expected,
                "stripe {stripe}: {} bytes read differ from what was written",
                data.len()
            );
        }
    };
    for round in 0..rounds {
        let stripe = rng.random_range(0..model.len());
        while busy.contains_key(&stripe) {
            settle(&mut busy);
        }
        let len = match rng.random_range(0..4) {
            0 => rng.random_range(0..64),
            1 => (4096 * rng.random_range(1..8)).min(max),
            _ => rng.random_range(0..=max),
        };
        let at = rng.random_range(0..=STRIPE - len);
        let header = Ask::Transfer((stripe * STRIPE + at) as u64).header(rng.random_range(0..100));
        let permit = session.permit().unwrap();
        let tx = tx.clone();
        let done = move |outcome| tx.send((stripe, outcome)).unwrap();
        let con = if round % 50 == 0 {
            ConType::Admin
        } else {
            ConType::Io(rng.random_range(0..1000))
        };
        if rng.random() {
            let mut bytes = vec![0; len];
            rng.fill(&mut bytes[..]);
            model[stripe][at..at + len].copy_from_slice(&bytes);
            busy.insert(stripe, None);
            session.request(
                permit,
                con,
                Direction::Write,
                &header,
                Some(buffer(session, &bytes)),
                done,
            );
        } else {
            busy.insert(stripe, Some(model[stripe][at..at + len].to_vec()));
            let data = session.alloc_buffer(len).unwrap();
            session.request(permit, con, Direction::Read, &header, Some(data), done);
        }
    }
    while !busy.is_empty() {
        settle(&mut busy);
    }
    for (i, stripe) in model.iter().enumerate() {
        for (j, part) in stripe.chunks(max).enumerate() {
            assert!(
                read(session, (i * STRIPE + j * max) as u64, part.len()) == part,
                "stripe {i} at the end"
            );
        }
    }
}

fn stress_with(always_invalidate: bool, invalidate_reads: bool, connections: u16, rounds: usize) {
    let bed = Bed::new(ServerConfig {
        always_invalidate,
        ..config()
    });
    let args = OpenArgs {
        invalidate_reads,
        ..bed.args("stress", connections)
    };
    let session = Session::open(&bed.client_dev, args).unwrap();
    assert_eq!(session.info().new_rkeys, always_invalidate);
    stress(&session, rounds, 7);
    assert!(session.state().is_ok());
    session.close();
    eventually("the session's end", || bed.disk.closed.lock().len() == 1);
    let counters = bed.server.counters();
    assert_eq!(
        (
            counters.protocol_errors,
            counters.transfer_errors,
            counters.heartbeats_lost
        ),
        (0, 0, 0)
    );
}

#[test]
fn data_is_right_with_new_keys_over_one_connection() {
    stress_with(true, true, 1, 1500);
}

#[test]
fn data_is_right_with_new_keys_over_four_connections() {
    stress_with(true, true, 4, 1500);
}

#[test]
fn data_is_right_with_fixed_keys_over_one_connection() {
    stress_with(false, true, 1, 1500);
}

#[test]
fn data_is_right_with_fixed_keys_on_both_sides_over_four_connections() {
    stress_with(false, false, 4, 1500);
}

#[test]
fn data_is_right_when_only_the_client_keeps_its_keys() {
    stress_with(true, false, 2, 500);
}

#[test]
fn one_chunk_is_enough() {
    let bed = Bed::new(ServerConfig {
        queue_depth: 1,
        max_chunk_size: 8192,
        ..config()
    });
    let session = bed.open("one", 2);
    assert_eq!((session.info().queue_depth, session.info().max_io_size), (1, 4096));
    stress(&session, 200, 3);
}

#[test]
fn many_more_requests_than_the_send_queue_holds() {
    // 600 chunks make up to 1200 client and 2400 server work requests: more than both queues' 1024.
    let bed = Bed::new(ServerConfig {
        queue_depth: 600,
        max_chunk_size: 8192,
        ..config()
    });
    let session = bed.open("deep", 1);
    let (tx, rx) = mpsc::channel();
    let n = 3000;
    for i in 0..n {
        read_later(&session, session.permit().unwrap(), Ask::Transfer(i % 1000 * 64), &tx);
    }
    all_well(&rx, n as usize);
}

/// A deep queue over one connection, each of whose chunks and read buffers has had a key before: to renew it takes two
/// slots of a send queue.
fn deep() -> (Bed, Session<Device>) {
    let bed = Bed::new(ServerConfig {
        queue_depth: 600,
        max_chunk_size: 8192,
        ..config()
    });
    let session = bed.open("deep", 1);
    let (tx, rx) = mpsc::channel();
    let permits: Vec<_> = (0..600).map(|_| session.permit().unwrap()).collect();
    for permit in permits {
        read_later(&session, permit, Ask::Count, &tx);
    }
    all_well(&rx, 600);
    (bed, session)
}

fn read_later(session: &Session<Device>, permit: Permit, ask: Ask, tx: &Results) {
    let data = session.alloc_buffer(64).unwrap();
    begin_with(session, permit, ConType::Io(0), Direction::Read, ask, Some(data), tx);
}

#[test]
fn a_client_that_finds_no_time_for_completions_does_not_overfill_its_send_queue() {
    let (_bed, session) = deep();
    let permits: Vec<_> = (0..599).map(|_| session.permit().unwrap()).collect();
    // The callback holds the thread that takes completions, so that no slot gets free.
    let (inside, is_inside) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let (permit, data) = (session.permit().unwrap(), session.alloc_buffer(64).unwrap());
    let header = Ask::Count.header(0);
    session.request(permit, ConType::Io(0), Direction::Read, &header, Some(data), move |o| {
        inside.send(o.result).unwrap();
        let _ = may_go_on.recv();
    });
    is_inside.recv_timeout(PATIENCE).unwrap().unwrap();
    let (tx, rx) = mpsc::channel();
    for permit in permits {
        read_later(&session, permit, Ask::Count, &tx);
    }
    drop(go_on);
    all_well(&rx, 599);
}

#[test]
fn a_server_that_finds_no_time_for_completions_does_not_overfill_its_send_queue() {
    let (bed, session) = deep();
    let (tx, rx) = mpsc::channel();
    for _ in 0..599 {
        read_later(&session, session.permit().unwrap(), Ask::Hold, &tx);
    }
    eventually("the requests", || bed.disk.held.lock().len() == 599);
    // The server's own thread, which takes completions, waits for the disk.
    let disk = bed.disk.bytes.lock();
    let before = bed.disk.requests.load(Ordering::Relaxed);
    let data = Some(buffer(&session, &[7]));
    begin(&session, ConType::Io(0), Direction::Write, Ask::Transfer(0), data, &tx);
    eventually("the last request", || {
        bed.disk.requests.load(Ordering::Relaxed) > before
    });
    bed.disk.held.lock().drain(..).for_each(|request| request.complete(0));
    drop(disk);
    all_well(&rx, 600);
}

#[test]
fn the_user_learns_of_sessions_and_the_server_of_errors() {
    let bed = Bed::new(config());
    let session = bed.open("s1", 2);
    let opened = bed.disk.opened.lock().clone();
    assert_eq!(opened.len(), 1);
    assert_eq!((opened[0].name(), opened[0].peer().ip()), ("s1", bed.path.src.unwrap()));
    assert_eq!((opened[0].queue_depth(), opened[0].max_io_size()), (32, 60 << 10));
    assert_eq!(bed.server.sessions(), opened);

    let ask = |ask: Ask, dir| session.call(ConType::Admin, dir, &ask.header(0), None).result;
    assert!(matches!(ask(Ask::Fail(30), Direction::Write), Err(IoError::Remote(30))));
    assert!(matches!(ask(Ask::Fail(-28), Direction::Read), Err(IoError::Remote(28))));
    assert!(matches!(
        ask(Ask::Forget, Direction::Write),
        Err(IoError::Remote(errno::EIO))
    ));
    // A failed read gives its buffer's key back all the same.
    for con in [ConType::Admin, ConType::Io(0)] {
        let data = session.alloc_buffer(512).unwrap();
        let outcome = session.call(con, Direction::Read, &Ask::Fail(5).header(0), Some(data));
        assert!(matches!(outcome.result, Err(IoError::Remote(5))));
        assert_eq!(outcome.data.unwrap().len(), 512);
    }
    // A message of the user over the service connection: a small read.
    let data = session.alloc_buffer(8).unwrap();
    let outcome = session.call(ConType::Admin, Direction::Read, &Ask::Count.header(0), Some(data));
    outcome.result.unwrap();
    assert_eq!(contents(&outcome.data.unwrap()), 5u64.to_le_bytes());
    assert_eq!(bed.disk.requests.load(Ordering::Relaxed), 6);
}

#[test]
fn a_callback_that_panics_ends_its_session_only() {
    let bed = Bed::new(config());
    let (bad, good) = (bed.open("bad", 1), bed.open("good", 1));
    // An odd length is answered by the server's own thread.
    let data = buffer(&bad, &[0]);
    let outcome = bad.call(ConType::Io(0), Direction::Write, &Ask::Panic.header(0), Some(data));
    // The request ends as it is dropped, or with the session.
    assert!(matches!(
        outcome.result,
        Err(IoError::Remote(errno::EIO) | IoError::Path(PathError::PeerDisconnected))
    ));
    eventually("the end of the bad session", || bad.state().is_err());
    assert!(matches!(bad.state(), Err(PathError::PeerDisconnected)));
    eventually("its end at the server", || bed.server.sessions().len() == 1);
    write(&good, 10, b"all is well").result.unwrap();
    assert_eq!(read(&good, 10, 11), b"all is well");
    let again = bed.open("bad", 1);
    write(&again, 10, b"all is well").result.unwrap();
}

#[test]
fn what_is_too_long_is_not_sent() {
    let bed = Bed::new(config());
    let session = bed.open("s1", 1);
    let info = session.info();
    let long = vec![0; info.max_user_header as usize + 1];
    let result = session.call(ConType::Io(0), Direction::Write, &long, None).result;
    assert!(matches!(
        result,
        Err(IoError::TooLong {
            what: "user header",
            ..
        })
    ));
    let data = session.alloc_buffer(info.max_io_size as usize + 1).unwrap();
    let outcome = session.call(ConType::Io(0), Direction::Write, &[1], Some(data));
    assert!(matches!(outcome.result, Err(IoError::TooLong { what: "data", .. })));
    assert!(outcome.data.is_some());
    assert_eq!(outcome.result.unwrap_err().errno(), errno::EMSGSIZE);
    // The longest of both is fine.
    let header = Ask::Transfer(0).header(info.max_user_header as usize - 9);
    let data = session.alloc_buffer(info.max_io_size as usize).unwrap();
    session
        .call(ConType::Io(0), Direction::Write, &header, Some(data))
        .result
        .unwrap();
}

#[test]
fn permits_are_as_many_as_the_queue_is_deep() {
    let bed = Bed::new(config());
    let session = bed.open("s1", 1);
    let (tx, rx) = mpsc::channel();
    for _ in 0..32 {
        let permit = session.try_permit().unwrap().expect("a permit");
        begin_with(&session, permit, ConType::Io(0), Direction::Write, Ask::Hold, None, &tx);
    }
    assert!(session.try_permit().unwrap().is_none());
    eventually("32 requests at the server", || bed.disk.held.lock().len() == 32);
    bed.disk.held.lock().drain(..).for_each(|request| request.complete(0));
    all_well(&rx, 32);
    assert!(session.try_permit().unwrap().is_some());
}

#[test]
fn a_session_closed_by_the_server_ends_every_request() {
    let bed = Bed::new(config());
    let session = bed.open("s1", 2);
    let (tx, rx) = mpsc::channel();
    for i in 0..10 {
        let data = session.alloc_buffer(4096).unwrap();
        let direction = if i % 2 == 0 { Direction::Read } else { Direction::Write };
        let (permit, tx, header) = (session.permit().unwrap(), tx.clone(), Ask::Hold.header(0));
        let done = move |o: Outcome<Device>| tx.send((o.result, o.data.is_some())).unwrap();
        session.request(permit, ConType::Io(i), direction, &header, Some(data), done);
    }
    let (down_tx, down_rx) = mpsc::channel();
    session.on_down(move |why| down_tx.send(why.to_string()).unwrap());
    eventually("10 requests at the server", || bed.disk.held.lock().len() == 10);
    assert!(bed.server.close_session(bed.disk.opened.lock()[0].id()));
    for _ in 0..10 {
        let (result, with_data) = ended(&rx);
        assert!(matches!(result, Err(IoError::Path(_))) && with_data, "{result:?}");
    }
    down_rx.recv_timeout(PATIENCE).unwrap();
    assert!(session.state().is_err() && session.permit().is_err());
    assert!(matches!(write(&session, 0, &[1]).result, Err(IoError::Path(_))));
    // The user still has the requests; the session is only closed when it has answered them all.
    assert!(bed.disk.closed.lock().is_empty());
    bed.disk.held.lock().drain(..).for_each(|r| r.complete(0));
    eventually("the session's end", || {
        bed.disk.closed.lock().len() == 1 && bed.server.sessions().is_empty()
    });
    // The name is free again.
    let again = bed.open("s1", 1);
    write(&again, 0, &[1]).result.unwrap();
}

#[test]
fn a_session_closed_by_the_client_ends_at_the_server() {
    let bed = Bed::new(config());
    let session = bed.open("s1", 2);
    let (tx, rx) = mpsc::channel();
    begin(&session, ConType::Io(0), Direction::Write, Ask::Hold, None, &tx);
    eventually("a request at the server", || bed.disk.held.lock().len() == 1);
    session.close();
    let result = rx.try_recv().expect("it ended with the session");
    assert!(matches!(result, Err(IoError::Path(PathError::Closed))));
    // Completing it now does nothing, and the last one lets the session end.
    bed.disk.held.lock().drain(..).for_each(|r| r.complete(0));
    eventually("the session's end", || bed.disk.closed.lock().len() == 1);
    assert_eq!(bed.server.counters().heartbeats_lost, 0);
}

#[test]
fn dropping_the_last_handle_in_a_callback_is_fine() {
    let bed = Bed::new(config());
    let session = bed.open("s1", 1);
    let permit = session.permit().unwrap();
    let slot = Arc::new(Mutex::new(None));
    let (theirs, (tx, rx)) = (slot.clone(), mpsc::channel());
    let data = session.alloc_buffer(10).unwrap();
    *slot.lock() = Some(session.clone());
    session.request(
        permit,
        ConType::Io(0),
        Direction::Read,
        &Ask::Transfer(0).header(0),
        Some(data),
        move |o| {
            o.result.unwrap();
            let session: Option<Session<Device>> = theirs.lock().take();
            drop(session);
            tx.send(()).unwrap();
        },
    );
    drop(session);
    rx.recv_timeout(PATIENCE).unwrap();
    eventually("the session's end", || bed.disk.closed.lock().len() == 1);
}

#[test]
fn heartbeats_keep_an_idle_session_and_one_whose_user_is_busy() {
    let bed = Bed::new(ServerConfig {
        heartbeat: IMPATIENT,
        ..config()
    });
    let open = |name| {
        let args = OpenArgs {
            heartbeat: IMPATIENT,
            ..bed.args(name, 1)
        };
        Session::open(&bed.client_dev, args).unwrap()
    };
    let (idle, busy) = (open("idle"), open("busy"));
    // A callback that takes longer than the patience of both sides.
    let permit = busy.permit().unwrap();
    let (tx, rx) = mpsc::channel();
    let header = Ask::Transfer(0).header(0);
    busy.request(permit, ConType::Io(0), Direction::Write, &header, None, move |o| {
        thread::sleep(2 * IMPATIENT.patience());
        tx.send(o.result).unwrap();
    });
    all_well(&rx, 1);
    for session in [idle, busy] {
        session.state().unwrap();
        write(&session, 0, &[1, 2, 3]).result.unwrap();
    }
    assert_eq!(bed.server.counters().heartbeats_lost, 0);
}

const CHILD_SERVER: &str = "RTRS_TEST_CHILD_SERVER";

/// Not a test: the server that `a_server_that_is_killed` kills, in a process of its own.
#[test]
fn child_server() {
    let Ok(addr) = std::env::var(CHILD_SERVER) else { return };
    let addr: IpAddr = addr.parse().unwrap();
    let config = ServerConfig { addr, ..config() };
    let _server = Server::listen(&device(addr), config, Disk::new(1 << 20)).unwrap();
    println!("ready");
    thread::sleep(Duration::from_secs(120));
}

#[test]
fn a_server_that_is_killed_is_missed() {
    let (server_ip, client_ip) = addresses();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_server", "--nocapture"])
        .env(CHILD_SERVER, server_ip.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("ready") {
        line.clear();
        assert!(
            std::io::BufRead::read_line(&mut out, &mut line).unwrap() > 0,
            "the server did not start"
        );
    }
    let path = PathAddr {
        src: Some(client_ip),
        dst: SocketAddr::new(server_ip, PORT),
    };
    let args = OpenArgs {
        heartbeat: IMPATIENT,
        connections: 2,
        connect_timeout: PATIENCE,
        ..OpenArgs::new("s1", path)
    };
    let dev = device(client_ip);
    let session = Session::open(&dev, args).unwrap();
    write(&session, 0, &[7; 1000]).result.unwrap();
    let (tx, rx) = mpsc::channel();
    begin(&session, ConType::Io(0), Direction::Write, Ask::Hold, None, &tx);
    let permit = session.permit().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    begin_with(&session, permit, ConType::Io(1), Direction::Write, Ask::Hold, None, &tx);
    for _ in 0..2 {
        let result = ended(&rx);
        assert!(matches!(result, Err(IoError::Path(_))), "{result:?}");
    }
    assert!(session.state().is_err());
}

const CHILD_CLIENT: &str = "RTRS_TEST_CHILD_CLIENT";

/// Not a test: the client that `a_client_that_is_killed_is_missed` kills, in a process of its own.
#[test]
fn child_client() {
    let Ok(path) = std::env::var(CHILD_CLIENT) else { return };
    let path = PathAddr::parse(&path, PORT).unwrap();
    let args = OpenArgs {
        connect_timeout: PATIENCE,
        ..OpenArgs::new("child", path)
    };
    let session = Session::open(&device(path.src.unwrap()), args).unwrap();
    session
        .call(ConType::Io(0), Direction::Write, &Ask::Hold.header(0), None)
        .result
        .unwrap();
}

#[test]
fn a_client_that_is_killed_is_missed() {
    let bed = Bed::new(ServerConfig {
        heartbeat: IMPATIENT,
        ..config()
    });
    let path = PathAddr {
        src: Some(addresses().1),
        ..bed.path
    };
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_client"])
        .env(CHILD_CLIENT, path.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    eventually("a request at the server", || bed.disk.held.lock().len() == 1);
    child.kill().unwrap();
    child.wait().unwrap();
    let lost = || bed.server.counters().heartbeats_lost + bed.server.counters().transfer_errors;
    eventually("the loss", || lost() == 1);
    // The session lasts as long as the user has one of its requests.
    assert_eq!((bed.server.sessions().len(), bed.disk.closed.lock().len()), (1, 0));
    bed.disk.held.lock().drain(..).for_each(|r| r.complete(0));
    eventually("the session's end", || {
        bed.disk.closed.lock().len() == 1 && bed.server.sessions().is_empty()
    });
}

#[test]
fn refusals_say_why() {
    let bed = Bed::new(ServerConfig {
        allow: AccessList::new(["127.0.0.0/8".parse().unwrap()]),
        max_sessions: 2,
        max_connections: 3,
        ..config()
    });
    let open = |name: &str, connections| Session::open(&bed.client_dev, bed.args(name, connections)).map(|_| ());
    let refused = |e: Result<(), Error>, want: i32| match e {
        Err(Error::Rejected {
            errno: Some(errno),
            reason,
            ..
        }) => assert_eq!((errno, reason), (want, RejectReason::CONSUMER)),
        other => panic!("{other:?}"),
    };
    refused(open("wide", 3), errno::ECONNRESET);
    let first = bed.open("first", 1);
    // Another session of the same name: the server closes it.
    assert!(matches!(open("first", 1), Err(Error::Path(_))));
    eventually("the namesake's end", || bed.server.sessions().len() == 1);
    let _second = bed.open("second", 2);
    refused(open("third", 1), errno::EUSERS);
    write(&first, 0, &[1]).result.unwrap();
    assert_eq!(bed.server.counters().connections_refused, 2);
    assert_eq!(bed.server.counters().sessions_opened, 2);
}

#[test]
fn strangers_are_refused() {
    let bed = Bed::new(ServerConfig {
        allow: AccessList::new(["10.0.0.0/8".parse().unwrap()]),
        ..config()
    });
    let e = Session::open(&bed.client_dev, bed.args("s1", 1)).unwrap_err();
    assert!(
        matches!(
            e,
            Error::Rejected {
                errno: Some(errno::EACCES),
                ..
            }
        ),
        "{e}"
    );
    assert!(e.to_string().contains("does not allow this address"), "{e}");
}

#[test]
fn nobody_there_and_nobody_listening() {
    let (a, b) = addresses();
    let (client, other) = (device(a), device(b));
    let to = |ip, connect_timeout| OpenArgs {
        connect_timeout,
        ..OpenArgs::new(
            "s1",
            PathAddr {
                src: Some(a),
                dst: SocketAddr::new(ip, PORT),
            },
        )
    };
    let e = Session::open(&client, to(b, PATIENCE)).unwrap_err();
    assert!(
        matches!(
            e,
            Error::Rejected {
                reason: RejectReason::INVALID_SERVICE_ID,
                errno: None,
                ..
            }
        ),
        "{e}"
    );
    drop(other);
    let e = Session::open(&client, to(addresses().0, Duration::from_secs(3))).unwrap_err();
    assert!(matches!(e, Error::Unreachable | Error::Timeout(..)), "{e}");
}

#[test]
fn arguments_are_checked() {
    let bed = Bed::new(config());
    let bad = |change: &dyn Fn(&mut OpenArgs)| {
        let mut args = bed.args("s1", 1);
        change(&mut args);
        assert!(matches!(Session::open(&bed.client_dev, args), Err(Error::Config(_))));
    };
    bad(&|a| a.name = "a/b".into());
    bad(&|a| a.name = String::new());
    bad(&|a| a.connections = 0);
    bad(&|a| a.paths.clear());
    bad(&|a| a.progress_threads = 0);
    let bad = |change: &dyn Fn(&mut ServerConfig)| {
        let mut config = ServerConfig {
            addr: bed.path.dst.ip(),
            port: PORT + 1,
            ..config()
        };
        change(&mut config);
        let server = Server::listen(&bed.server_dev, config, bed.disk.clone());
        assert!(matches!(server, Err(Error::Config(_))));
    };
    bad(&|c| c.queue_depth = 0);
    bad(&|c| c.max_chunk_size = 4096);
    bad(&|c| c.max_chunk_size = 10_000);
    bad(&|c| (c.queue_depth, c.max_chunk_size) = (512, 1 << 20));
    bad(&|c| c.queue_depth = 60_000);
    bad(&|c| c.max_sessions = 0);
    bad(&|c| c.max_paths = 0);
    bad(&|c| c.max_connections = 1);
}

#[test]
fn buffers_are_reused_and_bounded() {
    let bed = Bed::new(config());
    let args = OpenArgs {
        buffer_bytes: Some(512 << 10),
        ..bed.args("s1", 1)
    };
    let session = Session::open(&bed.client_dev, args).unwrap();
    let held: Vec<_> = (0..8).map(|_| session.alloc_buffer(60 << 10).unwrap()).collect();
    assert_eq!(held[0].capacity(), 64 << 10);
    assert!(matches!(session.alloc_buffer(60 << 10), Err(Error::NoBuffer { .. })));
    assert!(matches!(session.alloc_buffer(100), Err(Error::NoBuffer { .. })));
    assert!(matches!(session.alloc_buffer(1 << 30), Err(Error::NoBuffer { .. })));
    drop(held);
    let mut one = session.alloc_buffer(40 << 10).unwrap();
    one.set_len(1 << 20);
    assert_eq!(one.len(), 64 << 10);
    assert!(one.write(65_000, &[0; 1000]).is_err());
    assert!(one.read(usize::MAX, &mut [0; 2]).is_err());
    // A buffer outlives its session.
    drop(session);
    one.write(0, b"still here").unwrap();
    let mut back = [0; 10];
    one.read(0, &mut back).unwrap();
    assert_eq!(&back, b"still here");
}
