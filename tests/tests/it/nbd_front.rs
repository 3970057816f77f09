//! What NBD clients find in front of a mapping: TCP, TLS, sockets that the program was started with. With the clients of others, who
//! have to be there: those tests are ignored by default (Debian: `apt-get install qemu-utils libnbd-bin`).

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    os::{fd::AsFd, unix::net::UnixListener},
    path::{Path, PathBuf},
    process::Command,
};

use ferroce_rig::certificates::Authority;
use ferroce_tests::{
    device::{image, map_args_at, serve},
    fresh_address,
    nbd::Client,
    pattern,
    process::{Finished, Running, run},
};
use serde_json::Value;

const MIB: usize = 1 << 20;

/// A served image, `disk`, which a mapping may have.
struct Lab {
    dir: tempfile::TempDir,
    image: PathBuf,
    server: Ipv4Addr,
    _serve: Running,
}

impl Lab {
    fn new(len: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let image = image(dir.path(), "disk.img", &pattern(1, len));
        let server = fresh_address();
        let (serve, _) = serve(server, &[format!("disk={}", image.display())], &[]);
        Self {
            dir,
            image,
            server,
            _serve: serve,
        }
    }

    fn args(&self, more: &[&str]) -> Vec<String> {
        map_args_at(fresh_address(), &self.server.to_string(), more)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// A mapping that listens by TCP, too, with these options for TLS; and the URIs that it tells.
    fn map(&self, tls: &[&str]) -> (Running, Vec<String>) {
        let socket = self.text("nbd.sock");
        let ways = [
            "--nbd",
            &socket,
            "--nbd-listen",
            "127.0.0.1:0",
            "--nbd-listen",
            "[::1]:0",
        ];
        let mut map = Running::start(&self.args(&[&ways, tls].concat()));
        let mapped = map.event("mapped");
        let uris = mapped["uris"].as_array().expect("a list");
        assert_eq!(mapped["uri"], uris[0]);
        assert_eq!(mapped["nbd"], socket);
        (map, uris.iter().map(|uri| uri.as_str().unwrap().to_owned()).collect())
    }

    /// Folders of certificates: `server`, `client` (one of ours), `stranger` (a certificate of somebody else's, who knows us),
    /// `nobody` (no certificate, but knows us) and `deceived` (one of ours, who trusts somebody else).
    fn certificates(&self) {
        let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
        ours.server(&self.path("server"));
        ours.client(&self.path("client"), 7);
        theirs.client(&self.path("stranger"), 7);
        ours.client(&self.path("deceived"), 8);
        theirs.trust(&self.path("deceived"));
        for folder in ["server", "client", "stranger", "nobody"] {
            ours.trust(&self.path(folder));
        }
    }
}

fn tool(program: &str, args: &[&str]) -> Result<String, String> {
    let out = Command::new(program).args(args).output();
    let out = out.unwrap_or_else(|e| panic!("{program}: {e}"));
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    if out.status.success() { Ok(text) } else { Err(text) }
}

fn done(program: &str, args: &[&str]) -> String {
    tool(program, args).unwrap_or_else(|text| panic!("{program} {args:?}: {text}"))
}

/// A URI for a client with these certificates.
fn with(uri: &str, folder: &str) -> String {
    let sign = if uri.contains('?') { '&' } else { '?' };
    format!("{uri}{sign}tls-certificates={folder}")
}

/// Where a URI leads: a path, or a host and a port.
enum At<'a> {
    Path(&'a str),
    Port(&'a str, &'a str),
}

fn at(uri: &str) -> At<'_> {
    match uri.split_once("?socket=") {
        Some((_, path)) => At::Path(path),
        None => {
            let rest = uri.split_once("://").unwrap().1.trim_end_matches('/');
            let (host, port) = rest.rsplit_once(':').unwrap();
            At::Port(host.trim_matches(['[', ']']), port)
        }
    }
}

/// A client's credentials for QEMU.
fn credentials(folder: &str) -> [String; 2] {
    let object = format!("tls-creds-x509,id=tls0,dir={folder},endpoint=client,verify-peer=yes");
    ["--object".into(), object]
}

/// How qemu-nbd lists the exports there.
fn qemu_nbd(uri: &str, folder: &str) -> Vec<String> {
    let at = match at(uri) {
        At::Path(path) => vec!["-k", path],
        At::Port(host, port) => vec!["-b", host, "-p", port],
    };
    let usual = ["--list", "--tls-creds", "tls0", "--tls-hostname", "localhost"];
    let words = usual.into_iter().chain(at).map(str::to_owned);
    credentials(folder).into_iter().chain(words).collect()
}

/// QEMU's own way to name an export, and the credentials of the client.
fn qemu(uri: &str, folder: &str) -> [String; 4] {
    let at = match at(uri) {
        At::Path(path) => format!("path={path}"),
        At::Port(host, port) => format!("host={host},port={port}"),
    };
    let [object, credentials] = credentials(folder);
    [
        object,
        credentials,
        "--image-opts".into(),
        format!("driver=nbd,{at},export=disk,tls-creds=tls0,tls-hostname=localhost"),
    ]
}

fn strs(all: &[String]) -> Vec<&str> {
    all.iter().map(String::as_str).collect()
}

#[test]
fn a_socket_that_it_is_started_with_stays_with_who_has_made_it() {
    let lab = Lab::new(MIB);
    let file = lab.path("made");
    let (unix, tcp) = (
        UnixListener::bind(&file).unwrap(),
        TcpListener::bind("127.0.0.1:0").unwrap(),
    );
    let sockets = [unix.as_fd(), tcp.as_fd()];
    for names in [None, Some("nbd:more")] {
        let mut map = Running::activated(&sockets, names, &lab.args(&[]));
        let mapped = map.event("mapped");
        let uris = [
            format!("nbd+unix:///?socket={}", file.display()),
            format!("nbd://{}/", tcp.local_addr().unwrap()),
        ];
        assert_eq!(mapped["uris"], serde_json::json!(uris));
        let mut client = Client::connect(&file).unwrap();
        assert!(client.read(0, MIB).unwrap() == pattern(1, MIB));
        client.disconnect().unwrap();
        assert_eq!(map.stop().code, Some(0));
        // Who has made it may go on with it.
        assert!(file.exists());
    }
}

/// Ends with this status, and what it says names these.
fn refused(done: &Finished, code: i32, names: &[&str]) {
    assert_eq!(done.code, Some(code), "{}", done.stderr);
    for name in names {
        assert!(done.stderr.contains(name), "{name} is not named: {}", done.stderr);
    }
}

#[test]
fn what_makes_no_sense_is_said_before_anything_is_done() {
    let lab = Lab::new(MIB);
    lab.certificates();
    let (socket, server) = (lab.text("s"), lab.text("server"));
    let nbd = ["--nbd", &socket];
    let run = |more: &[&str]| run(&lab.args(more));
    refused(&run(&[]), 2, &["--nbd", "--nbd-listen"]);
    refused(
        &run(&["--nbd-listen", "nowhere.invalid"]),
        1,
        &["can't resolve nowhere.invalid"],
    );
    refused(
        &run(&[&nbd[..], &["--tls", "require"]].concat()),
        2,
        &["--tls-certificates"],
    );
    refused(
        &run(&[&nbd[..], &["--tls-verify-peer"]].concat()),
        2,
        &["--tls-certificates"],
    );
    refused(
        &run(&[&nbd[..], &["--tls-psk", "keys"]].concat()),
        2,
        &["--tls-psk", "rustls", "--tls-certificates"],
    );

    let tls = [
        &nbd[..],
        &["--tls", "on", "--tls-verify-peer", "--tls-certificates", &server],
    ]
    .concat();
    let at = |name: &str| Path::new(&server).join(name);
    for name in ["server-cert.pem", "server-key.pem", "ca-cert.pem"] {
        let (path, kept) = (at(name), fs::read(at(name)).unwrap());
        let path = path.to_str().unwrap();
        fs::write(path, "nothing").unwrap();
        refused(&run(&tls), 1, &[path]);
        fs::remove_file(path).unwrap();
        refused(&run(&tls), 1, &[path, "No such file"]);
        fs::write(path, kept).unwrap();
    }
    fs::write(at("ca-crl.pem"), "").unwrap();
    refused(&run(&tls), 1, &["ca-crl.pem"]);
    fs::remove_file(at("ca-crl.pem")).unwrap();
    // The key of another certificate.
    fs::copy(lab.path("client").join("client-key.pem"), at("server-key.pem")).unwrap();
    refused(&run(&tls), 1, &["server-key.pem", "server-cert.pem"]);
    assert!(!lab.path("s").exists());

    let made = UnixListener::bind(lab.path("made")).unwrap();
    refused(
        &Running::activated(&[made.as_fd()], None, &lab.args(&nbd)).end(),
        2,
        &["LISTEN_FDS", "--nbd"],
    );
    let none = fs::File::open(&lab.image).unwrap();
    let both = [made.as_fd(), none.as_fd()];
    refused(
        &Running::activated(&both, Some("a:b"), &lab.args(&[])).end(),
        1,
        &["descriptor 4", "(b)", "no socket"],
    );
}

/// What `ferroce ctl reload` says of a process with this control socket.
fn reload(control: &str) -> Finished {
    run(&["ctl", "--socket", control, "reload"])
}

#[test]
fn a_mapping_in_the_foreground_is_told_to_read_its_certificates_again() {
    let lab = Lab::new(MIB);
    lab.certificates();
    let (control, server) = (lab.text("control"), lab.text("server"));
    let (map, _) = lab.map(&["--control", &control, "--tls-certificates", &server]);
    let said = reload(&control);
    assert_eq!((said.code, &*said.stdout), (Some(0), "unchanged: certificates\n"));
    Authority::new("next").server(&lab.path("server"));
    let said = reload(&control);
    assert_eq!((said.code, &*said.stdout), (Some(0), "changed: certificates\n"));
    fs::remove_file(lab.path("server").join("server-key.pem")).unwrap();
    refused(&reload(&control), 1, &["server-key.pem", "stay in use"]);
    assert_eq!(map.stop().code, Some(0));

    let (map, _) = lab.map(&["--control", &control]);
    refused(&reload(&control), 1, &["no daemon", "no certificates"]);
    assert_eq!(map.stop().code, Some(0));
}

#[test]
#[ignore = "needs nbdinfo"]
fn clients_of_others_meet_renewed_certificates() {
    let lab = Lab::new(MIB);
    lab.certificates();
    let (control, server) = (lab.text("control"), lab.text("server"));
    let tls = ["--tls", "require", "--tls-verify-peer", "--tls-certificates", &server];
    let (map, uris) = lab.map(&[&tls[..], &["--control", &control]].concat());
    let size = |uri: &str, folder: &str| tool("nbdinfo", &["--size", &with(uri, &lab.text(folder))]);
    let next = Authority::new("next");
    next.client(&lab.path("next"), 7);
    for folder in ["next", "server"] {
        next.trust(&lab.path(folder));
    }
    next.server(&lab.path("server"));
    for uri in &uris {
        size(uri, "client").expect("the files are not read again by themselves");
        size(uri, "next").expect_err("the server does not know it yet");
    }
    assert_eq!(reload(&control).code, Some(0));
    for uri in &uris {
        assert_eq!(size(uri, "next").unwrap().trim(), MIB.to_string());
        size(uri, "client").expect_err("its certificate is nobody's now");
    }
    assert_eq!(map.stop().code, Some(0));
}

#[test]
#[ignore = "needs nbdinfo, nbdcopy, qemu-img, qemu-io"]
fn clients_of_others_come_by_tcp() {
    let lab = Lab::new(8 * MIB);
    let (map, uris) = lab.map(&[]);
    for (n, uri) in uris.iter().enumerate() {
        let info = done("nbdinfo", &[uri]);
        assert!(
            info.contains("without TLS") && info.contains("export-size: 8388608"),
            "{info}"
        );
        let copy = lab.text("copy");
        done("nbdcopy", &["--connections=4", uri, &copy]);
        assert!(fs::read(&copy).unwrap() == fs::read(&lab.image).unwrap());
        let write = format!("write -P {} {n}M 1M", n + 1);
        done("qemu-io", &["-f", "raw", uri, "-c", &write, "-c", "flush"]);
    }
    let now = fs::read(&lab.image).unwrap();
    assert!((0..uris.len()).all(|n| now[n * MIB..][..MIB].iter().all(|b| usize::from(*b) == n + 1)));
    assert_eq!(map.stop().code, Some(0));
}

#[test]
#[ignore = "needs nbdinfo, nbdcopy, qemu-img, qemu-io, qemu-nbd"]
fn clients_of_others_use_tls_if_their_certificates_are_right() {
    let lab = Lab::new(8 * MIB);
    lab.certificates();
    let server = lab.text("server");
    let tls = ["--tls", "require", "--tls-verify-peer", "--tls-certificates", &server];
    let (map, uris) = lab.map(&tls);
    for (n, uri) in uris.iter().enumerate() {
        assert!(uri.starts_with("nbds"), "{uri}");
        let right = with(uri, &lab.text("client"));
        let info = done("nbdinfo", &[&right]);
        assert!(
            info.contains("with TLS") && info.contains("export-size: 8388608"),
            "{info}"
        );
        assert!(info.contains("using structured packets"), "{info}");
        done("nbdinfo", &["--list", &right]);
        let copy = lab.text("copy");
        done("nbdcopy", &["--connections=4", &right, &copy]);
        assert!(fs::read(&copy).unwrap() == fs::read(&lab.image).unwrap());

        let export = qemu(uri, &lab.text("client"));
        let info = done("qemu-img", &[&["info"], &strs(&export)[..]].concat());
        assert!(info.contains("virtual size: 8 MiB"), "{info}");
        let list = done("qemu-nbd", &strs(&qemu_nbd(uri, &lab.text("client"))));
        assert!(
            list.contains("export: 'disk'") && list.contains("base:allocation"),
            "{list}"
        );
        let write = format!("write -P {} {n}M 1M", n + 1);
        let read = format!("read -P {} {n}M 1M", n + 1);
        done(
            "qemu-io",
            &[&strs(&export)[..], &["-c", &write, "-c", "flush", "-c", &read]].concat(),
        );

        for folder in ["stranger", "nobody", "deceived"] {
            // libnbd does not look who a server is that it has no host name of.
            if folder != "deceived" || !uri.contains("unix") {
                let wrong = with(uri, &lab.text(folder));
                let why = tool("nbdinfo", &[&wrong]).expect_err(folder);
                assert!(why.to_lowercase().contains("tls"), "{folder}: {why}");
            }
            let export = qemu(uri, &lab.text(folder));
            tool("qemu-img", &[&["info"], &strs(&export)[..]].concat()).expect_err(folder);
        }
        let clear = uri.replacen("nbds", "nbd", 1);
        let why = tool("nbdinfo", &[&clear]).expect_err("TLS is required");
        assert!(why.contains("TLS"), "{why}");
        tool("qemu-img", &["info", &clear]).expect_err("TLS is required");
    }
    let now = fs::read(&lab.image).unwrap();
    assert!((0..uris.len()).all(|n| now[n * MIB..][..MIB].iter().all(|b| usize::from(*b) == n + 1)));
    let ended = map.stop();
    assert_eq!(ended.code, Some(0));
    assert!(ended.stderr.contains("an NBD client is rejected"), "{}", ended.stderr);
}

#[test]
#[ignore = "needs nbdinfo, nbdcopy"]
fn where_tls_is_offered_clients_choose() {
    let lab = Lab::new(2 * MIB);
    lab.certificates();
    let server = lab.text("server");
    // Of a client no certificate is asked for.
    let (map, uris) = lab.map(&["--tls-certificates", &server]);
    for uri in &uris {
        let info = done("nbdinfo", &[&with(uri, &lab.text("nobody"))]);
        assert!(info.contains("with TLS"), "{info}");
        let info = done("nbdinfo", &[&uri.replacen("nbds", "nbd", 1)]);
        assert!(info.contains("without TLS"), "{info}");
    }
    for uri in &uris[1..] {
        let why = tool("nbdinfo", &[&with(uri, &lab.text("deceived"))]).expect_err("not its server");
        assert!(why.contains("ertificate"), "{why}");
    }
    let copy = lab.text("copy");
    let secured = with(&uris[1], &lab.text("nobody"));
    fs::write(&copy, pattern(2, 2 * MIB)).unwrap();
    done("nbdcopy", &["--flush", "--connections=4", &copy, &secured]);
    assert!(fs::read(&lab.image).unwrap() == pattern(2, 2 * MIB));
    assert_eq!(map.stop().code, Some(0));

    let (_map, uris) = lab.map(&["--tls", "off", "--tls-certificates", &server]);
    for uri in &uris {
        assert!(uri.starts_with("nbd:") || uri.starts_with("nbd+unix:"), "{uri}");
        let secured = with(&uri.replacen("nbd", "nbds", 1), &lab.text("nobody"));
        tool("nbdinfo", &[&secured]).expect_err("TLS is off");
    }
}

#[test]
#[ignore = "needs nbdinfo"]
fn libnbd_starts_it_with_a_socket() {
    let lab = Lab::new(2 * MIB);
    let map: Vec<String> = lab.args(&[]).into_iter().filter(|arg| arg != "--json").collect();
    let ferroce = ferroce_tests::ferroce().to_str().unwrap();
    let info = done(
        "nbdinfo",
        &[&["--json", "--", "[", ferroce], &strs(&map)[..], &["]"]].concat(),
    );
    // What the program says goes to the same output.
    let json = info
        .lines()
        .skip_while(|line| !line.starts_with('{'))
        .collect::<String>();
    let json: Value = serde_json::Deserializer::from_str(&json)
        .into_iter()
        .next()
        .unwrap()
        .unwrap();
    assert_eq!(json["exports"][0]["export-size"], 2 * MIB, "{info}");
}
