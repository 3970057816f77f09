//! NBD with TLS, by a client by hand: that of rustls around a socket.

use std::{
    fs,
    io::{self, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::common::{Client, Lab, MIB, Served, TIMEOUT, eventually, sector, serve_with};
use ferroce_rig::certificates::Authority;
use rnbd::{
    nbd::proto::{cmd, opt, rep},
    proto::AccessMode,
};
use rnbd_host::{
    listen::{Listen, NbdAddress},
    map::MapConfig,
    tls::Tls,
};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedProtocolVersion,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    version::{TLS12, TLS13},
};

/// Certificates of a client, in a folder.
struct Pki {
    dir: tempfile::TempDir,
    ours: Authority,
}

impl Pki {
    /// A server's folder, and `client`, whose certificate has number 7.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ours = Authority::new("ours");
        let server = dir.path().join("server");
        ours.server(&server);
        ours.trust(&server);
        ours.trust(&dir.path().join("client"));
        ours.client(&dir.path().join("client"), 7);
        Self { dir, ours }
    }

    fn server(&self, verify_peer: bool, required: bool) -> Option<Tls> {
        Some(Tls::load(&self.dir.path().join("server"), verify_peer, required).unwrap())
    }

    /// A client's configuration, with its certificate if it shows one.
    fn client(&self, folder: Option<&str>, version: &'static SupportedProtocolVersion) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        let authority = self.dir.path().join("server").join("ca-cert.pem");
        roots.add(CertificateDer::from_pem_file(authority).unwrap()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(roots);
        let Some(folder) = folder else {
            return Arc::new(builder.with_no_client_auth());
        };
        let folder = self.dir.path().join(folder);
        let chain = vec![CertificateDer::from_pem_file(folder.join("client-cert.pem")).unwrap()];
        let key = PrivateKeyDer::from_pem_file(folder.join("client-key.pem")).unwrap();
        Arc::new(builder.with_client_auth_cert(chain, key).unwrap())
    }
}

fn serve_tls(size: u64, tls: Option<Tls>) -> Served {
    serve_with(size, true, |config| config.tls = tls)
}

/// A client that has asked for TLS and been promised it.
fn promised<S: Read + Write>(stream: S) -> Client<S> {
    let mut c = Client::over(stream);
    c.greet();
    c.option(opt::STARTTLS, &[]);
    let reply = c.opt_reply();
    assert_eq!((reply.option, reply.kind), (opt::STARTTLS, rep::ACK));
    c
}

/// One with TLS.
fn secured<S: Read + Write>(stream: S, config: &Arc<ClientConfig>) -> Client<StreamOwned<ClientConnection, S>> {
    let raw = promised(stream).s;
    let connection = ClientConnection::new(config.clone(), "localhost".try_into().unwrap()).unwrap();
    Client::over(StreamOwned::new(connection, raw))
}

fn unix(path: &Path) -> UnixStream {
    Client::raw(path).s
}

/// Why the other end would not have a client. One that it has is told nothing until it asks for something.
fn refused<S: Read + Write>(mut c: Client<StreamOwned<ClientConnection, S>>) -> io::Error {
    match c.s.read(&mut [0; 1]) {
        Err(e) if !matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => e,
        other => panic!("it is not refused: {other:?}"),
    }
}

/// Reads and writes of all sizes, alone and many at once.
fn exercise<S: Read + Write>(c: &mut Client<S>, size: u64) {
    let numbered = |at: u64, len: u64| (at / 512..(at + len) / 512).flat_map(sector).collect::<Vec<_>>();
    for (at, len) in [(512, 512), (4096, 65_536), (MIB, MIB), (0, size / 2)] {
        assert!(
            c.read(at, len as u32).unwrap() == numbered(at, len),
            "{len} bytes at {at}"
        );
    }
    let half = size / 2;
    let data: Vec<u8> = (0..half).map(|i| ((i * 31) >> 3) as u8).collect();
    for (i, len) in [
        (0usize, 512),
        (512, 16 << 10),
        (17 << 10, 33 << 10),
        (64 << 10, 1 << 20),
        (2 << 20, 2 << 20),
    ] {
        assert_eq!(c.write(half + i as u64, &data[i..i + len], 0), 0, "{len} bytes");
        assert!(
            c.read(half + i as u64, len as u32).unwrap() == data[i..i + len],
            "{len} bytes"
        );
    }
    // Many at once, in one record and in many.
    let cookies: Vec<u64> = (0..32).map(|n| c.send(cmd::READ, 0, n * 4096, 4096, &[])).collect();
    for _ in &cookies {
        let (error, cookie) = c.reply();
        assert_eq!(error, 0);
        let n = cookies.iter().position(|asked| *asked == cookie).unwrap() as u64;
        assert_eq!(c.data(4096), numbered(n * 4096, 4096));
    }
    assert_eq!(c.call(cmd::FLUSH, 0, 0, 0, &[]), 0);
}

/// Takes leave, and is told that nothing follows.
fn leave<S: Read + Write>(mut c: Client<StreamOwned<ClientConnection, S>>) {
    c.send(cmd::DISC, 0, 0, 0, &[]);
    // Without the close_notify of TLS this would be an error: an end that somebody else may have made.
    assert_eq!(c.s.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn clients_of_tls_1_2_and_1_3_read_and_write() {
    let pki = Pki::new();
    for (version, required) in [(&TLS13, true), (&TLS12, true), (&TLS13, false)] {
        let s = serve_tls(16 * MIB, pki.server(false, required));
        let mut c = secured(unix(&s.socket), &pki.client(None, version));
        assert_eq!(c.choose("").0, 16 * MIB);
        exercise(&mut c, 16 * MIB);
        leave(c);
        s.map.end().unwrap();
    }
}

#[test]
fn tls_is_where_it_is_asked_for_and_required_where_it_is_said() {
    let pki = Pki::new();
    let s = serve_tls(MIB, pki.server(false, false));
    assert_eq!(Client::go(&s.socket, "").0.read(0, 512).unwrap(), sector(0));
    let s = serve_tls(MIB, pki.server(false, true));
    let mut c = Client::connect(&s.socket);
    for option in [opt::LIST, opt::GO, opt::STRUCTURED_REPLY] {
        c.option(option, &[]);
        assert_eq!(c.opt_reply().kind, rep::ERR_TLS_REQD);
    }
    let s = serve_tls(MIB, None);
    let mut c = Client::connect(&s.socket);
    c.option(opt::STARTTLS, &[]);
    assert_eq!(c.opt_reply().kind, rep::ERR_POLICY);
    assert_eq!(c.choose("").0, MIB, "it goes on without");
}

#[test]
fn clients_without_a_certificate_of_ours_are_not_let_in() {
    let pki = Pki::new();
    let dir = pki.dir.path();
    let theirs = Authority::new("theirs");
    theirs.client(&dir.join("stranger"), 7);
    pki.ours.client(&dir.join("revoked"), 8);
    pki.ours.revoke(&dir.join("server"), &[8], 4000);
    // A server's certificate is none for a client.
    pki.ours.server(&dir.join("server-as-client"));
    for end in ["cert", "key"] {
        let at = dir.join("server-as-client");
        fs::rename(
            at.join(format!("server-{end}.pem")),
            at.join(format!("client-{end}.pem")),
        )
        .unwrap();
    }
    let mut s = serve_tls(MIB, pki.server(true, true));
    for version in [&TLS13, &TLS12] {
        for folder in [None, Some("stranger"), Some("revoked"), Some("server-as-client")] {
            let c = secured(unix(&s.socket), &pki.client(folder, version));
            let why = refused(c).to_string();
            assert!(why.contains("alert") || why.contains("ertificate"), "{folder:?}: {why}");
        }
        let mut c = secured(unix(&s.socket), &pki.client(Some("client"), version));
        assert_eq!(c.choose("").0, MIB);
        assert_eq!(c.read(512, 512).unwrap(), sector(1));
    }
    eventually("the count", || s.map.mapping.stats().turned_away == 8);
}

#[test]
fn a_list_of_revocations_that_is_out_of_date_lets_nobody_in() {
    let pki = Pki::new();
    pki.ours.revoke(&pki.dir.path().join("server"), &[], 2002);
    let s = serve_tls(MIB, pki.server(true, true));
    refused(secured(unix(&s.socket), &pki.client(Some("client"), &TLS13)));
}

#[test]
fn what_was_sent_in_the_clear_is_never_taken_for_what_tls_has_brought() {
    let pki = Pki::new();
    let mut s = serve_tls(MIB, pki.server(false, false));
    let list = [&b"IHAVEOPT"[..], &opt::LIST.to_be_bytes(), &[0; 4]].concat();
    // Along with STARTTLS: it is not even promised.
    let mut c = Client::connect(&s.socket);
    c.s.write_all(&[&b"IHAVEOPT"[..], &opt::STARTTLS.to_be_bytes(), &[0; 4], &list].concat())
        .unwrap();
    assert!(c.closed());
    // Instead of the handshake, and before it.
    for hello in [false, true] {
        let mut c = promised(unix(&s.socket));
        let mut bytes = list.clone();
        if hello {
            let config = pki.client(None, &TLS13);
            let mut tls = ClientConnection::new(config, "localhost".try_into().unwrap()).unwrap();
            tls.write_tls(&mut bytes).unwrap();
        }
        c.s.write_all(&bytes).unwrap();
        let mut answer = Vec::new();
        let _ = c.s.read_to_end(&mut answer);
        // An alert, and no word of NBD.
        assert!(answer.is_empty() || answer[0] == 21, "{answer:?}");
    }
    eventually("their end", || s.map.mapping.stats().clients == 0);
}

#[test]
fn a_connection_whose_tls_is_tampered_with_ends_and_others_go_on() {
    let pki = Pki::new();
    let mut s = serve_tls(8 * MIB, pki.server(false, true));
    let config = pki.client(None, &TLS13);
    let mut good = secured(unix(&s.socket), &config);
    good.choose("");
    for junk in [
        &b"IHAVEOPT"[..],
        &[23, 3, 3, 0, 32],
        &[0; 4096],
        &[23, 3, 3, 0xff, 0xff],
    ] {
        let mut c = secured(unix(&s.socket), &config);
        c.choose("");
        // In the middle of a write, which has a buffer by then.
        c.s.write_all(&[&rnbd::nbd::proto::REQUEST_MAGIC.to_be_bytes()[..], &[0, 0, 0, 1]].concat())
            .unwrap();
        c.s.write_all(&[&[7; 8][..], &[0; 8], &(MIB as u32).to_be_bytes(), &[9; 70_000]].concat())
            .unwrap();
        c.s.flush().unwrap();
        c.s.sock.write_all(junk).unwrap();
        if junk.len() < 4096 {
            // A record that is cut short is one as soon as there is enough.
            let _ = c.s.sock.write_all(&[0; 64]);
        }
        let mut rest = Vec::new();
        let _ = c.s.sock.read_to_end(&mut rest);
    }
    eventually("their end", || s.map.mapping.stats().clients == 1);
    assert_eq!(
        good.read(0, 512).unwrap(),
        sector(0),
        "nothing of a write that was not whole"
    );
    exercise(&mut good, 8 * MIB);
}

#[test]
fn a_client_that_does_not_read_holds_up_nobody_and_gets_all_in_the_end() {
    let pki = Pki::new();
    let s = serve_tls(32 * MIB, pki.server(false, true));
    let config = pki.client(None, &TLS13);
    let mut slow = secured(unix(&s.socket), &config);
    slow.choose("");
    for n in 0..16 {
        slow.send(cmd::READ, 0, n * MIB, MIB as u32, &[]);
    }
    slow.s.flush().unwrap();
    let mut quick = secured(unix(&s.socket), &config);
    quick.choose("");
    exercise(&mut quick, 32 * MIB);
    let mut seen = [false; 16];
    for _ in 0..16 {
        assert_eq!(slow.reply().0, 0);
        let data = slow.data(MIB as usize);
        let first = u64::from_le_bytes(data[..8].try_into().unwrap());
        let n = (first * 512 / MIB) as usize;
        assert!(!core::mem::replace(&mut seen[n], true));
        assert!(
            (first..)
                .map(sector)
                .zip(data.chunks(512))
                .all(|(want, got)| want == got)
        );
    }
    leave(slow);
}

#[test]
fn an_end_in_the_middle_of_the_handshake_or_of_a_record_frees_the_place() {
    let pki = Pki::new();
    let mut s = serve_with(MIB, true, |config| {
        config.tls = pki.server(false, true);
        config.max_clients = 1;
    });
    let config = pki.client(None, &TLS13);
    for n in 0..20 {
        let mut c = promised(unix(&s.socket));
        let mut tls = ClientConnection::new(config.clone(), "localhost".try_into().unwrap()).unwrap();
        let mut hello = Vec::new();
        tls.write_tls(&mut hello).unwrap();
        c.s.write_all(&hello[..hello.len() * n / 19]).unwrap();
        drop(c);
        eventually("its end", || s.map.mapping.stats().clients == 0);
    }
    let mut c = secured(unix(&s.socket), &config);
    c.choose("");
    assert_eq!(c.read(0, 512).unwrap(), sector(0));
}

#[test]
fn requests_under_way_at_the_end_are_answered_over_tls() {
    let pki = Pki::new();
    let s = serve_tls(8 * MIB, pki.server(false, true));
    let mut c = secured(unix(&s.socket), &pki.client(None, &TLS13));
    c.choose("");
    for n in 0..8 {
        c.send(cmd::READ, 0, n * MIB, MIB as u32, &[]);
    }
    c.s.flush().unwrap();
    let end = thread::spawn(move || s.map.end());
    let mut answered = 0;
    // Those that it had read by then, all of each; and then an end that is told.
    while let Ok((error, _)) = c.try_reply() {
        if error == 0 {
            c.data(MIB as usize);
        }
        answered += 1;
    }
    assert_eq!(answered, 8);
    assert_eq!(c.s.read(&mut [0; 1]).unwrap(), 0, "close_notify");
    end.join().unwrap().unwrap();
}

/// A mapping of "disk" at TCP sockets of both kinds and a Unix socket.
fn at_tcp(lab: &Lab, change: impl FnOnce(&mut MapConfig)) -> crate::common::Mapped {
    let mut config = lab.config("tcp", "disk");
    for address in ["127.0.0.1:0", "[::1]:0"] {
        config.listen.push(Listen::Tcp(address.parse().unwrap()));
    }
    change(&mut config);
    lab.try_map(config).unwrap()
}

fn tcp(address: &NbdAddress) -> TcpStream {
    let NbdAddress::Tcp(at) = address else {
        panic!("{address:?}")
    };
    let stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

#[test]
fn clients_come_by_tcp_and_unix_sockets_alike() {
    let lab = Lab::new();
    let mut map = at_tcp(&lab, |_| {});
    let [unix, v4, v6] = &map.addresses[..] else {
        panic!("{:?}", map.addresses)
    };
    assert_eq!(*unix, NbdAddress::Unix(map.socket.clone()));
    let mut clients: Vec<Client<TcpStream>> = [v4, v6, v4, v6].map(|at| Client::over(tcp(at))).into_iter().collect();
    for c in &mut clients {
        c.greet();
        assert_eq!(c.choose("disk").0, 8 * MIB);
    }
    let mut local = map.client();
    // What one has written, another reads, wherever it has come in.
    for (n, c) in clients.iter_mut().enumerate() {
        assert_eq!(c.write(n as u64 * MIB, &vec![n as u8 + 1; MIB as usize], 0), 0);
        assert!(local.read(n as u64 * MIB, MIB as u32).unwrap() == vec![n as u8 + 1; MIB as usize]);
    }
    assert_eq!(map.mapping.stats().clients, 5);
    drop(clients);
    map.end().unwrap();
}

#[test]
fn tls_over_tcp_for_several_clients() {
    let lab = Lab::new();
    let pki = Pki::new();
    let map = at_tcp(&lab, |config| config.tls = pki.server(true, true));
    let config = pki.client(Some("client"), &TLS13);
    let threads: Vec<_> = map.addresses[1..]
        .iter()
        .cycle()
        .take(4)
        .cloned()
        .enumerate()
        .map(|(n, address)| {
            let config = config.clone();
            thread::spawn(move || {
                let mut c = secured(tcp(&address), &config);
                c.choose("disk");
                let at = n as u64 * 2 * MIB;
                for round in 0..8u8 {
                    let data = vec![round.wrapping_mul(31) ^ n as u8; 2 << 20];
                    assert_eq!(c.write(at, &data, 0), 0);
                    assert!(c.read(at, data.len() as u32).unwrap() == data);
                }
                leave(c);
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    map.end().unwrap();
}

#[test]
fn renewed_certificates_are_for_connections_to_come() {
    let (lab, pki) = (Lab::new(), Pki::new());
    let dir = pki.dir.path();
    let server = dir.join("server");
    let tls = pki.server(true, true).unwrap();
    let map = at_tcp(&lab, |config| config.tls = Some(tls.clone()));
    let addresses = [&map.addresses[1..], &map.addresses[1..]].concat();
    let known = pki.client(Some("client"), &TLS13);
    let mut there = secured(tcp(&addresses[0]), &known);
    there.choose("disk");
    assert!(!tls.renew().unwrap(), "the files are as they were");

    let next = Authority::new("next");
    next.server(&server);
    next.trust(&server);
    next.client(&dir.join("next"), 9);
    next.client(&dir.join("other"), 10);
    assert!(tls.renew().unwrap());
    let [renewed, other] = ["next", "other"].map(|folder| pki.client(Some(folder), &TLS13));
    for address in &addresses {
        let mut c = secured(tcp(address), &renewed);
        assert_eq!(c.choose("disk").0, 8 * MIB);
        leave(c);
        // It does not know who issues certificates now, and the server no longer knows who has issued its.
        refused(secured(tcp(address), &known));
    }
    assert_eq!(there.write(0, &[7; 4096], 0), 0);
    assert_eq!(there.read(0, 4096).unwrap(), [7; 4096]);

    next.revoke(&server, &[9], 4000);
    assert!(tls.renew().unwrap());
    fs::write(server.join("server-key.pem"), "no key").unwrap();
    let why = tls.renew().unwrap_err().to_string();
    assert!(why.contains("server-key.pem"), "{why}");
    for address in &addresses {
        refused(secured(tcp(address), &renewed));
        let mut c = secured(tcp(address), &other);
        assert_eq!(c.choose("disk").0, 8 * MIB, "what was read before holds on");
        leave(c);
    }
    leave(there);
    map.end().unwrap();
}

#[test]
fn a_tcp_port_that_is_taken_is_said() {
    let lab = Lab::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap();
    let mut config = lab.config("taken", "disk");
    config.listen.push(Listen::Tcp(at));
    let socket = config.listen.clone();
    let Err(rnbd_host::map::MapFailure::Socket(e)) = lab.try_map(config).map(drop) else {
        panic!("it is not taken")
    };
    assert!(e.to_string().contains(&at.to_string()), "{e}");
    let Listen::Unix(path) = &socket[0] else { panic!() };
    assert!(!path.exists(), "what was made before is gone");
}

/// Connections of clients without a certificate. Each is made again as soon as it is closed.
struct Strangers {
    stop: Arc<AtomicBool>,
    connected: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<()>>,
}

impl Strangers {
    fn start(
        count: usize,
        at: &NbdAddress,
        connection: impl Fn(TcpStream, &AtomicBool) + Send + Sync + 'static,
    ) -> Self {
        let NbdAddress::Tcp(at) = *at else { panic!("{at:?}") };
        let (stop, connected) = (Arc::default(), Arc::default());
        let connection = Arc::new(connection);
        let threads = (0..count).map(|_| {
            let (stop, connected, connection) = (Arc::clone(&stop), Arc::clone(&connected), Arc::clone(&connection));
            thread::spawn(move || {
                while !AtomicBool::load(&stop, Ordering::Relaxed) {
                    if let Ok(stream) = TcpStream::connect(at) {
                        stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
                        AtomicUsize::fetch_add(&connected, 1, Ordering::Relaxed);
                        connection(stream, &stop);
                    }
                }
            })
        });
        let threads = threads.collect();
        eventually("strangers", || {
            AtomicUsize::load(&connected, Ordering::Relaxed) >= count
        });
        Self {
            stop,
            connected,
            threads,
        }
    }

    /// How often they have connected.
    fn end(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
        self.connected.load(Ordering::Relaxed)
    }
}

/// Sends a byte now and then, which is no whole option, until the other end closes the connection.
fn dribble(mut stream: TcpStream, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        match stream.read(&mut [0; 64]) {
            Ok(0) => return,
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
        if stream.write_all(&[0]).is_err() {
            return;
        }
    }
}

/// Shakes hands, which is all that can be had without a certificate.
fn only_shake_hands(mut stream: TcpStream, config: &Arc<ClientConfig>, stop: &AtomicBool) {
    let option = [&[0, 0, 0, 3][..], b"IHAVEOPT", &opt::STARTTLS.to_be_bytes(), &[0; 4]].concat();
    if stream.write_all(&option).is_err() {
        return;
    }
    // Of the greeting and the answer.
    let wait = |stream: &mut TcpStream, mut bytes: &mut [u8]| {
        while !bytes.is_empty() && !stop.load(Ordering::Relaxed) {
            match stream.read(bytes) {
                Ok(0) => return false,
                Ok(n) => bytes = &mut core::mem::take(&mut bytes)[n..],
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return false,
            }
        }
        bytes.is_empty()
    };
    if !wait(&mut stream, &mut [0; 18 + 20]) {
        return;
    }
    let mut tls = ClientConnection::new(config.clone(), "localhost".try_into().unwrap()).unwrap();
    while !stop.load(Ordering::Relaxed) {
        match tls.complete_io(&mut stream) {
            Ok((0, 0)) => return,
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

/// How long it takes a client with a certificate until it has read. One that is evicted tries again, as clients do.
fn time_to_read<S: Read + Write>(connect: impl Fn() -> S, config: &Arc<ClientConfig>) -> Duration {
    let begun = Instant::now();
    let attempt = || {
        let mut c = secured(connect(), config);
        assert_eq!(c.choose("disk").0, 8 * MIB);
        c.read(0, 512).unwrap();
        leave(c);
    };
    while catch_unwind(AssertUnwindSafe(attempt)).is_err() {
        assert!(begun.elapsed() < TIMEOUT, "nobody gets in");
    }
    begun.elapsed()
}

/// Clients by turns at this address and at the Unix socket, which all get in; the longest time that one took.
fn get_in(map: &crate::common::Mapped, at: &NbdAddress, config: &Arc<ClientConfig>) -> Duration {
    let times = (0..10).map(|_| {
        let far = time_to_read(|| tcp(at), config);
        far.max(time_to_read(|| unix(&map.socket), config))
    });
    times.max().unwrap()
}

#[test]
fn strangers_who_hold_connections_keep_nobody_out() {
    let (pki, lab) = (Pki::new(), Lab::new());
    let config = pki.client(Some("client"), &TLS13);
    let mut map = at_tcp(&lab, |config| config.tls = pki.server(true, true));
    let at = map.addresses[1].clone();
    let strangers = Strangers::start(100, &at, dribble);
    println!("in within {:?}", get_in(&map, &at, &config));
    strangers.end();
    eventually("their end", || map.mapping.stats().clients == 0);
    assert!(map.mapping.stats().turned_away > 0);
    map.end().unwrap();
}

#[test]
fn strangers_who_shake_hands_keep_nobody_out_and_nobody_waiting() {
    let (pki, lab) = (Pki::new(), Lab::new());
    let (config, without) = (pki.client(Some("client"), &TLS13), pki.client(None, &TLS13));
    let map = at_tcp(&lab, |config| config.tls = pki.server(true, true));
    let at = map.addresses[1].clone();
    // Strangers take time of the machine, too, wherever they shake hands.
    let mut elsewhere = lab.config_for("elsewhere", "disk", AccessMode::ReadOnly);
    elsewhere.listen.push(Listen::Tcp("127.0.0.1:0".parse().unwrap()));
    elsewhere.tls = pki.server(true, true);
    let elsewhere = lab.try_map(elsewhere).unwrap();
    let mut good = secured(tcp(&at), &config);
    good.choose("disk");
    let mut reads = || {
        let (begun, mut count) = (Instant::now(), 0u64);
        while begun.elapsed() < Duration::from_millis(500) {
            good.read(count % 8 * 4096, 4096).unwrap();
            count += 1;
        }
        count
    };
    let strangers = |at: &NbdAddress| {
        let without = without.clone();
        Strangers::start(100, at, move |stream, stop| only_shake_hands(stream, &without, stop))
    };
    // By turns, and again if need be: what else the machine does changes, and a loop with both to do gets less of a processor that many
    // want. Without pauses after handshakes it is a quarter at best.
    let mut compare = || {
        let (mut unconcerned, mut beside) = (0, 0);
        for _ in 0..4 {
            for (at, count) in [(&elsewhere.addresses[1], &mut unconcerned), (&at, &mut beside)] {
                let there = strangers(at);
                *count += reads();
                there.end();
            }
        }
        println!("{unconcerned} reads with strangers elsewhere, {beside} here");
        // Half, with some room.
        beside * 3 > unconcerned
    };
    let served = (0..4).any(|_| compare());
    let here = strangers(&at);
    let longest = get_in(&map, &at, &config);
    let connected = here.end();
    println!("in within {longest:?} beside {connected}");
    assert!(served, "who is in waits for strangers' handshakes");
    drop(good);
    map.end().unwrap();
}
