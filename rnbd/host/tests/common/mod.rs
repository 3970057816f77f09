//! A served image, mapped and behind an NBD socket, and an NBD client by hand.
#![allow(dead_code)]

use std::{
    fs::File,
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr},
    os::unix::{fs::FileExt, net::UnixStream},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rnbd::{
    nbd::proto::{self, Request, opt},
    proto::AccessMode,
    server::Limits,
};
use rnbd_disk::{Caching, DiskConfig, ExportSpec, Exports, FolderSpec};
use rnbd_host::{
    admission::ServerAdmission,
    listen::{Listen, NbdAddress},
    map::{MapConfig, MapEvent, MapFailure, Mapping},
    serve::{ServeConfig, ServeEvent, ServeStats, Serving},
};
use roce::reactor::ReactorConfig;
use roce::{DeviceConfig, LocalDevice};
use rtrs::{addr::PathAddr, client::SessionConfig, server::ServerConfig};

pub(crate) const MIB: u64 = 1 << 20;
/// Longest time that a step of a test may take.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

fn device_config(addr: IpAddr) -> DeviceConfig {
    DeviceConfig::new(addr)
}

pub(crate) fn device(addr: IpAddr) -> LocalDevice {
    LocalDevice::open(&[device_config(addr)]).expect("a device on a loopback address")
}

/// Waits for something that must come.
pub(crate) fn eventually(what: &str, mut cond: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !cond() {
        assert!(Instant::now() < deadline, "{what}: did not come");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A server on its own loopback address, with a thread that opens and closes files for it.
pub(crate) struct Lab {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) addr: IpAddr,
    /// Admission of several loops.
    pub(crate) admission: Option<Arc<ServerAdmission>>,
    stop: Arc<AtomicBool>,
    stats: Arc<Mutex<ServeStats>>,
    thread: Option<JoinHandle<()>>,
}

/// An image whose every 512-byte sector starts with its number.
pub(crate) fn image(path: &Path, size: u64) {
    let mut f = io::BufWriter::new(File::create(path).unwrap());
    for n in 0..size / 512 {
        f.write_all(&sector(n)).unwrap();
    }
    f.into_inner().unwrap();
}

impl Lab {
    /// Exports: "disk" and "second" (8 MiB each, numbered sectors), which lets a second writer in, "ro", and the folder with all
    /// of them.
    pub(crate) fn new() -> Self {
        Self::with(|_| {}, None)
    }

    /// With other settings, and perhaps an export "extra".
    pub(crate) fn with(change: impl FnOnce(&mut ServeConfig), extra: Option<&Path>) -> Self {
        Self::usual(1, change, extra)
    }

    /// On so many loops.
    pub(crate) fn on_loops(loops: usize, change: impl FnOnce(&mut ServeConfig)) -> Self {
        Self::usual(loops, change, None)
    }

    fn usual(loops: usize, change: impl FnOnce(&mut ServeConfig), extra: Option<&Path>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut specs = Vec::new();
        for name in ["disk", "second", "ro"] {
            let path = dir.path().join(format!("{name}.img"));
            image(&path, 8 * MIB);
            specs.push(ExportSpec {
                name: name.into(),
                path,
                read_only: name == "ro",
                migrate: name == "second",
                within: None,
            });
        }
        specs.extend(extra.map(|path| ExportSpec {
            name: "extra".into(),
            path: path.into(),
            ..ExportSpec::default()
        }));
        let folder = FolderSpec {
            path: dir.path().into(),
            ..FolderSpec::default()
        };
        Self::on(loops, dir, specs, Some(&folder), change)
    }

    /// A server of these.
    pub(crate) fn of(
        dir: tempfile::TempDir,
        specs: Vec<ExportSpec>,
        folder: Option<&FolderSpec>,
        change: impl FnOnce(&mut ServeConfig),
    ) -> Self {
        Self::on(1, dir, specs, folder, change)
    }

    fn on(
        loops: usize,
        dir: tempfile::TempDir,
        specs: Vec<ExportSpec>,
        folder: Option<&FolderSpec>,
        change: impl FnOnce(&mut ServeConfig),
    ) -> Self {
        let addr = ferroce_loopback::address().into();
        let mut config = ServeConfig {
            rtrs: ServerConfig {
                addr,
                queue_depth: 32,
                ..ServerConfig::default()
            },
            limits: Limits::default(),
            exports: Exports::new(specs, folder, Caching::PageCache).unwrap(),
            disk: DiskConfig::default(),
            reactor: ReactorConfig::default(),
            grace: Duration::from_secs(10),
        };
        change(&mut config);
        let admission = (loops > 1).then(|| ServerAdmission::new(&config.rtrs, loops));
        let mut server = match &admission {
            None => Serving::start(device(addr), config).unwrap(),
            Some(admission) => {
                let opened = LocalDevice::open_shards(&[device_config(addr)], loops, admission.clone());
                Serving::start_shards(opened.unwrap(), config, admission).unwrap()
            }
        };
        let stop = Arc::new(AtomicBool::new(false));
        let stats = Arc::new(Mutex::new(ServeStats::default()));
        let (asked, counted) = (stop.clone(), stats.clone());
        let thread = thread::spawn(move || {
            while !asked.load(Ordering::Relaxed) {
                if let Some(ServeEvent::Stopped(why)) = server.next(Duration::from_millis(10)) {
                    panic!("the server has stopped: {why:?}");
                }
                *counted.lock().unwrap() = server.stats().unwrap_or_default();
            }
            server.stop();
        });
        Self {
            dir,
            addr,
            admission,
            stop,
            stats,
            thread: Some(thread),
        }
    }

    pub(crate) fn path(&self) -> PathAddr {
        PathAddr {
            src: Some(ferroce_loopback::address().into()),
            dst: SocketAddr::new(self.addr, 1234),
        }
    }

    pub(crate) fn image(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.img"))
    }

    /// Configuration of a client on an address of its own.
    pub(crate) fn config(&self, session: &str, name: &str) -> MapConfig {
        let session_config = SessionConfig {
            connect_timeout: TIMEOUT,
            ..SessionConfig::new(session, self.path())
        };
        let socket = self
            .dir
            .path()
            .join(format!("{session}-{}.sock", name.replace('/', "-")));
        MapConfig::new(session_config, name, vec![Listen::Unix(socket)])
    }

    pub(crate) fn config_for(&self, session: &str, name: &str, mode: AccessMode) -> MapConfig {
        let mut config = self.config(session, name);
        config.devices[0].mode = mode;
        config
    }

    pub(crate) fn try_map(&self, config: MapConfig) -> Result<Mapped, MapFailure> {
        let mut map = self.begin(config);
        let deadline = Instant::now() + TIMEOUT;
        loop {
            assert!(Instant::now() < deadline, "no device");
            match map.mapping.next(Duration::from_millis(100)) {
                Some(MapEvent::Mapped { .. }) => return Ok(map),
                Some(MapEvent::Ended(result)) => return Err(result.expect_err("it was not asked to end")),
                Some(MapEvent::Listening(at)) => map.addresses = at,
                Some(MapEvent::News(_)) | None => {}
            }
        }
    }

    /// One that is not open yet.
    pub(crate) fn begin(&self, config: MapConfig) -> Mapped {
        let from = config.session.paths[0].src.unwrap();
        let socket = config.listen.iter().find_map(|listen| match listen {
            Listen::Unix(path) => Some(path.clone()),
            _ => None,
        });
        let device = LocalDevice::open(&[device_config(from)]).unwrap();
        let mapping = Mapping::start(device, config).unwrap();
        Mapped {
            mapping,
            socket: socket.unwrap_or_default(),
            addresses: Vec::new(),
        }
    }

    pub(crate) fn map(&self, session: &str, name: &str) -> Mapped {
        self.try_map(self.config(session, name)).unwrap()
    }

    pub(crate) fn map_read_only(&self, session: &str, name: &str) -> Mapped {
        self.try_map(self.config_for(session, name, AccessMode::ReadOnly))
            .unwrap()
    }

    /// Recent statistics of the server.
    pub(crate) fn stats(&self) -> ServeStats {
        self.stats.lock().unwrap().clone()
    }

    pub(crate) fn ask_to_end(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends the server.
    pub(crate) fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // What went wrong there has been told.
            let _ = thread.join();
        }
    }
}

/// A mapped device.
pub(crate) struct Mapped {
    pub(crate) mapping: Mapping,
    /// Its Unix socket, if it makes one.
    pub(crate) socket: PathBuf,
    /// Addresses at which it listens, once it does.
    pub(crate) addresses: Vec<NbdAddress>,
}

impl Mapped {
    /// An NBD client that has chosen the device.
    pub(crate) fn client(&self) -> Client {
        Client::go(&self.socket, "").0
    }

    /// Ends it; how that went.
    pub(crate) fn end(mut self) -> Result<(), MapFailure> {
        self.mapping.stop();
        self.until_ended()
    }

    pub(crate) fn until_ended(&mut self) -> Result<(), MapFailure> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            assert!(Instant::now() < deadline, "it does not end");
            if let Some(MapEvent::Ended(result)) = self.mapping.next(Duration::from_millis(100)) {
                return result;
            }
        }
    }
}

/// One image, served and mapped.
pub(crate) struct Served {
    pub(crate) map: Mapped,
    pub(crate) lab: Lab,
    pub(crate) image: PathBuf,
    pub(crate) socket: PathBuf,
}

/// An image of `size` bytes, whose every 512-byte sector starts with its number, behind an NBD socket.
pub(crate) fn serve(size: u64, writable: bool) -> Served {
    serve_with(size, writable, |_| {})
}

/// A device that lends few buffers.
pub(crate) fn serve_thin(size: u64, bytes: usize) -> Served {
    serve_with(size, true, |config| config.session.buffer_bytes = Some(bytes))
}

pub(crate) fn serve_with(size: u64, writable: bool, change: impl FnOnce(&mut MapConfig)) -> Served {
    serve_image(|path| image(path, size), writable, change)
}

/// An image of 64 MiB that has data at 8 MiB and at its end, 1 MiB each, and holes.
pub(crate) fn serve_sparse(writable: bool) -> Served {
    let make = |path: &Path| {
        let file = File::create(path).unwrap();
        file.set_len(64 * MIB).unwrap();
        for at in [8 * MIB, 63 * MIB] {
            file.write_all_at(&[7; MIB as usize], at).unwrap();
        }
    };
    serve_image(make, writable, |_| {})
}

fn serve_image(make: impl FnOnce(&Path), writable: bool, change: impl FnOnce(&mut MapConfig)) -> Served {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("image");
    make(&file);
    let spec = ExportSpec {
        name: "image".into(),
        path: file.clone(),
        read_only: !writable,
        ..ExportSpec::default()
    };
    let lab = Lab::of(dir, vec![spec], None, |_| {});
    let mut config = lab.config("nbd", "image");
    config.devices[0].mode = match writable {
        true => AccessMode::ReadWrite,
        false => AccessMode::ReadOnly,
    };
    change(&mut config);
    let map = lab.try_map(config).unwrap();
    Served {
        socket: map.socket.clone(),
        map,
        lab,
        image: file,
    }
}

pub(crate) fn sector(n: u64) -> [u8; 512] {
    let mut s = [n as u8; 512];
    s[..8].copy_from_slice(&n.to_le_bytes());
    s
}

/// A client by hand, by a Unix socket or otherwise.
pub(crate) struct Client<S = UnixStream> {
    pub(crate) s: S,
    cookie: u64,
}

pub(crate) struct OptReply {
    pub(crate) option: u32,
    pub(crate) kind: u32,
    pub(crate) data: Vec<u8>,
}

impl Client {
    /// Connects and exchanges flags.
    pub(crate) fn connect(path: &Path) -> Self {
        let mut c = Self::raw(path);
        c.greet();
        c
    }

    pub(crate) fn raw(path: &Path) -> Self {
        let s = UnixStream::connect(path).unwrap();
        s.set_read_timeout(Some(TIMEOUT)).unwrap();
        Self::over(s)
    }

    /// Connects and goes to transmission; size and flags.
    pub(crate) fn go(path: &Path, name: &str) -> (Self, u64, u16) {
        let mut c = Self::connect(path);
        let (size, flags) = c.choose(name);
        (c, size, flags)
    }
}

impl<S: Read + Write> Client<S> {
    pub(crate) fn over(s: S) -> Self {
        Self { s, cookie: 0 }
    }

    /// Exchanges flags.
    pub(crate) fn greet(&mut self) {
        let mut hello = [0; 18];
        self.s.read_exact(&mut hello).unwrap();
        assert_eq!(hello[..16], *b"NBDMAGICIHAVEOPT");
        assert_eq!(hello[16..], [0, 3]);
        self.s.write_all(&3u32.to_be_bytes()).unwrap();
    }

    /// Goes to transmission; size and flags.
    pub(crate) fn choose(&mut self, name: &str) -> (u64, u16) {
        self.option(opt::GO, &info_request(name, &[]));
        let (mut size, mut flags) = (0, 0);
        loop {
            let r = self.opt_reply();
            match r.kind {
                1 => return (size, flags),
                3 if r.data[..2] == [0, 0] => {
                    size = u64::from_be_bytes(r.data[2..10].try_into().unwrap());
                    flags = u16::from_be_bytes(r.data[10..12].try_into().unwrap());
                }
                3 => {}
                k => panic!("reply {k:#x}"),
            }
        }
    }

    pub(crate) fn option(&mut self, option: u32, data: &[u8]) {
        let mut b = proto::OPT_MAGIC.to_be_bytes().to_vec();
        b.extend(option.to_be_bytes());
        b.extend((data.len() as u32).to_be_bytes());
        b.extend(data);
        self.s.write_all(&b).unwrap();
    }

    pub(crate) fn opt_reply(&mut self) -> OptReply {
        let mut h = [0; 20];
        self.s.read_exact(&mut h).unwrap();
        assert_eq!(h[..8], proto::OPT_REPLY_MAGIC.to_be_bytes());
        let n = |r: std::ops::Range<usize>| u32::from_be_bytes(h[r].try_into().unwrap());
        let mut data = vec![0; n(16..20) as usize];
        self.s.read_exact(&mut data).unwrap();
        OptReply {
            option: n(8..12),
            kind: n(12..16),
            data,
        }
    }

    pub(crate) fn try_send(&mut self, command: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> io::Result<u64> {
        self.cookie += 1;
        let q = Request {
            flags,
            command,
            cookie: self.cookie,
            offset,
            len: len.into(),
        };
        let mut b = q.to_bytes().to_vec();
        b.extend(data);
        self.s.write_all(&b)?;
        Ok(self.cookie)
    }

    pub(crate) fn send(&mut self, command: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> u64 {
        self.try_send(command, flags, offset, len, data).unwrap()
    }

    /// Error and cookie of the next reply, without data.
    pub(crate) fn try_reply(&mut self) -> io::Result<(u32, u64)> {
        let mut h = [0; 16];
        self.s.read_exact(&mut h)?;
        assert_eq!(h[..4], proto::SIMPLE_REPLY_MAGIC.to_be_bytes());
        Ok((
            u32::from_be_bytes(h[4..8].try_into().unwrap()),
            u64::from_be_bytes(h[8..].try_into().unwrap()),
        ))
    }

    pub(crate) fn reply(&mut self) -> (u32, u64) {
        self.try_reply().unwrap()
    }

    /// The error of a request, or that the connection is over.
    pub(crate) fn try_call(&mut self, command: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> io::Result<u32> {
        let cookie = self.try_send(command, flags, offset, len, data)?;
        let (e, c) = self.try_reply()?;
        assert_eq!(c, cookie);
        Ok(e)
    }

    pub(crate) fn call(&mut self, command: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> u32 {
        self.try_call(command, flags, offset, len, data).unwrap()
    }

    pub(crate) fn read(&mut self, offset: u64, len: u32) -> Result<Vec<u8>, u32> {
        match self.call(proto::cmd::READ, 0, offset, len, &[]) {
            0 => Ok(self.data(len as usize)),
            e => Err(e),
        }
    }

    pub(crate) fn data(&mut self, len: usize) -> Vec<u8> {
        let mut v = vec![0; len];
        self.s.read_exact(&mut v).unwrap();
        v
    }

    pub(crate) fn write(&mut self, offset: u64, data: &[u8], flags: u16) -> u32 {
        self.call(proto::cmd::WRITE, flags, offset, data.len() as u32, data)
    }

    /// Whether the server has closed the connection.
    pub(crate) fn closed(&mut self) -> bool {
        match self.s.read(&mut [0; 64]) {
            Ok(n) => n == 0,
            Err(e) => e.kind() == io::ErrorKind::ConnectionReset,
        }
    }
}

pub(crate) fn info_request(name: &str, infos: &[u16]) -> Vec<u8> {
    let mut d = (name.len() as u32).to_be_bytes().to_vec();
    d.extend(name.as_bytes());
    d.extend((infos.len() as u16).to_be_bytes());
    for i in infos {
        d.extend(i.to_be_bytes());
    }
    d
}
