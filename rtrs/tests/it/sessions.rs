//! Client and server over the software device on loopback.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    process::{Command, Stdio},
    sync::{atomic::Ordering, mpsc},
    thread,
    time::Duration,
};

use crate::support::*;
use ferroce_rig::{Outcome, Server, Session};
use rand::{Rng, SeedableRng, rngs::StdRng};
use roce::RejectReason;
use rtrs::{
    Direction, Error, IoError, PathError,
    addr::PathAddr,
    admission::AccessList,
    client::{ConType, SessionConfig},
    errno,
    server::ServerConfig,
};

/// Writes and reads of random sizes on separate stripes, as many in flight as the queue allows, against a copy.
fn stress(session: &Session, rounds: usize, seed: u64) {
    const STRIPE: usize = 60 << 10;
    let mut rng = StdRng::seed_from_u64(seed);
    let max = (session.info().max_io_size as usize).min(STRIPE);
    let mut model: Vec<Vec<u8>> = vec![vec![0; STRIPE]; 16];
    let (tx, rx) = mpsc::channel();
    let mut busy: HashMap<usize, Option<Vec<u8>>> = HashMap::new();
    let settle = |busy: &mut HashMap<usize, Option<Vec<u8>>>| {
        let (stripe, outcome): (usize, Outcome) = rx.recv_timeout(PATIENCE).expect("every request ends");
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
            session.request(con, Direction::Write, &header, Some(buffer(session, &bytes)), done);
        } else {
            busy.insert(stripe, Some(model[stripe][at..at + len].to_vec()));
            let data = session.alloc_buffer(len).unwrap();
            session.request(con, Direction::Read, &header, Some(data), done);
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
    let args = SessionConfig {
        invalidate_reads,
        ..bed.args("stress", connections)
    };
    let session = Session::open(bed.client(), args).unwrap();
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
    // There is a buffer for each chunk, and a few more.
    let at_once = 600;
    for i in 0..3000 {
        if i >= at_once {
            all_well(&rx, 1);
        }
        read_later(&session, Ask::Transfer(i % 1000 * 64), &tx);
    }
    all_well(&rx, at_once as usize);
}

fn read_later(session: &Session, ask: Ask, tx: &Results) {
    let data = session.alloc_buffer(64).unwrap();
    begin(session, ConType::Io(0), Direction::Read, ask, Some(data), tx);
}

/// Every chunk and read buffer of a deep queue has had a key before, and all of its requests are answered in one turn.
#[test]
fn a_server_that_answers_everything_at_once_does_not_overfill_its_send_queue() {
    let bed = Bed::new(ServerConfig {
        queue_depth: 600,
        max_chunk_size: 8192,
        ..config()
    });
    let session = bed.open("deep", 1);
    let (tx, rx) = mpsc::channel();
    for _ in 0..2 {
        for _ in 0..600 {
            read_later(&session, Ask::Hold, &tx);
        }
        eventually("the requests", || bed.disk.held.lock().len() == 600);
        let held = std::mem::take(&mut *bed.disk.held.lock());
        held.into_iter().for_each(|request| request.complete(0));
        all_well(&rx, 600);
    }
}

#[test]
fn the_user_learns_of_sessions_and_the_server_of_errors() {
    let bed = Bed::new(config());
    let session = bed.open("s1", 2);
    let opened = bed.disk.opened.lock().clone();
    assert_eq!(opened.len(), 1);
    assert_eq!(
        (opened[0].name.as_str(), opened[0].peer.ip(), opened[0].connections),
        ("s1", bed.path.src.unwrap(), 3)
    );
    let sessions = bed.server.sessions();
    assert_eq!((sessions.len(), sessions[0].session), (1, opened[0].session));

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
fn requests_are_with_the_server_as_many_as_the_queue_is_deep() {
    let bed = Bed::new(config());
    let session = bed.open("s1", 1);
    let (tx, rx) = mpsc::channel();
    for _ in 0..40 {
        begin(&session, ConType::Io(0), Direction::Write, Ask::Hold, None, &tx);
    }
    eventually("32 requests at the server", || bed.disk.held.lock().len() == 32);
    bed.disk.held.lock().drain(..).for_each(|request| request.complete(0));
    all_well(&rx, 32);
    eventually("the others", || bed.disk.held.lock().len() == 8);
    bed.disk.held.lock().drain(..).for_each(|request| request.complete(0));
    all_well(&rx, 8);
}

#[test]
fn a_session_closed_by_the_server_ends_every_request() {
    let bed = Bed::new(config());
    let session = bed.open("s1", 2);
    let (tx, rx) = mpsc::channel();
    for i in 0..10 {
        let data = session.alloc_buffer(4096).unwrap();
        let direction = if i % 2 == 0 { Direction::Read } else { Direction::Write };
        let (tx, header) = (tx.clone(), Ask::Hold.header(0));
        let done = move |o: Outcome| tx.send((o.result, o.data.is_some())).unwrap();
        session.request(ConType::Io(i), direction, &header, Some(data), done);
    }
    let (down_tx, down_rx) = mpsc::channel();
    session.on_down(move |why| down_tx.send(why.to_string()).unwrap());
    eventually("10 requests at the server", || bed.disk.held.lock().len() == 10);
    assert!(bed.server.close_session(bed.disk.opened.lock()[0].session));
    for _ in 0..10 {
        let (result, with_data) = ended(&rx);
        assert!(matches!(result, Err(IoError::Path(_))) && with_data, "{result:?}");
    }
    down_rx.recv_timeout(PATIENCE).unwrap();
    assert!(session.state().is_err());
    assert!(
        session.alloc_buffer(1).is_ok(),
        "a request can be made ready for the time when a path is up"
    );
    let (tx, rx) = mpsc::channel();
    begin(&session, ConType::Io(0), Direction::Write, Ask::Hold, None, &tx);
    assert!(matches!(ended(&rx), Err(IoError::Path(_))));
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
fn heartbeats_keep_an_idle_session() {
    let bed = Bed::new(ServerConfig {
        heartbeat: IMPATIENT,
        ..config()
    });
    let args = SessionConfig {
        heartbeat: IMPATIENT,
        ..bed.args("idle", 1)
    };
    let session = Session::open(bed.client(), args).unwrap();
    thread::sleep(2 * IMPATIENT.patience());
    session.state().unwrap();
    write(&session, 0, &[1, 2, 3]).result.unwrap();
    assert_eq!(bed.server.counters().heartbeats_lost, 0);
}

const CHILD_SERVER: &str = "RTRS_TEST_CHILD_SERVER";

/// Not a test: the server that `a_server_that_is_killed` kills, in a process of its own.
#[test]
fn child_server() {
    let Ok(addr) = std::env::var(CHILD_SERVER) else { return };
    let addr: IpAddr = addr.parse().unwrap();
    let config = ServerConfig { addr, ..config() };
    let _server = Server::listen(&host(addr), config, Disk::new(1 << 20)).unwrap();
    println!("ready");
    thread::sleep(Duration::from_secs(120));
}

#[test]
fn a_server_that_is_killed_is_missed() {
    let (server_ip, client_ip) = addresses();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sessions::child_server", "--nocapture"])
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
    let args = SessionConfig {
        heartbeat: IMPATIENT,
        connections: 2,
        connect_timeout: PATIENCE,
        ..SessionConfig::new("s1", path)
    };
    let client = host(client_ip);
    let session = Session::open(&client, args).unwrap();
    write(&session, 0, &[7; 1000]).result.unwrap();
    let (tx, rx) = mpsc::channel();
    begin(&session, ConType::Io(0), Direction::Write, Ask::Hold, None, &tx);
    child.kill().unwrap();
    child.wait().unwrap();
    begin(&session, ConType::Io(1), Direction::Write, Ask::Hold, None, &tx);
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
    let path = PathAddr::parse(&path, PORT, &|_| None).unwrap();
    let args = SessionConfig {
        connect_timeout: PATIENCE,
        ..SessionConfig::new("child", path)
    };
    let session = Session::open(&host(path.src.unwrap()), args).unwrap();
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
        .args(["--exact", "sessions::child_client"])
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
    let open = |name: &str, connections| Session::open(bed.client(), bed.args(name, connections)).map(|_| ());
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
    let e = Session::open(bed.client(), bed.args("s1", 1)).unwrap_err();
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
    let (client, other) = (host(a), host(b));
    let to = |ip, connect_timeout| SessionConfig {
        connect_timeout,
        ..SessionConfig::new(
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
    assert!(matches!(e, Error::Unreachable(_) | Error::Timeout(..)), "{e}");
}

#[test]
fn arguments_are_checked() {
    let bed = Bed::new(config());
    let bad = |change: &dyn Fn(&mut SessionConfig)| {
        let mut args = bed.args("s1", 1);
        change(&mut args);
        assert!(matches!(Session::open(bed.client(), args), Err(Error::Config(_))));
    };
    bad(&|a| a.name = "a/b".into());
    bad(&|a| a.name = String::new());
    bad(&|a| a.connections = 0);
    let bad = |change: &dyn Fn(&mut ServerConfig)| {
        let mut config = ServerConfig {
            addr: bed.path.dst.ip(),
            port: PORT + 1,
            ..config()
        };
        change(&mut config);
        let server = Server::listen(&bed.server_host, config, bed.disk.clone());
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
    let args = SessionConfig {
        buffer_bytes: Some(512 << 10),
        ..bed.args("s1", 1)
    };
    let session = Session::open(bed.client(), args).unwrap();
    let held: Vec<_> = (0..8).map(|_| session.alloc_buffer(60 << 10).unwrap()).collect();
    assert!(matches!(session.alloc_buffer(60 << 10), Err(Error::NoBuffer { .. })));
    assert!(matches!(session.alloc_buffer(100), Err(Error::NoBuffer { .. })));
    assert!(matches!(session.alloc_buffer(1 << 30), Err(Error::NoBuffer { .. })));
    drop(held);
    // What was given back is cut for others.
    let mut one = session.alloc_buffer(40 << 10).unwrap();
    assert!(one.write(40_000, &[0; 1000]).is_err());
    assert!(one.read(usize::MAX, &mut [0; 2]).is_err());
    // A buffer outlives its session.
    session.close();
    one.write(0, b"still here").unwrap();
    let mut back = [0; 10];
    one.read(0, &mut back).unwrap();
    assert_eq!(&back, b"still here");
}
