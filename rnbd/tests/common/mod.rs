//! A hand-written NBD client, a served image, loop devices.
#![allow(dead_code)]

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use rnbd::{
    Errno,
    backend::{Image, LocalDevice, Pool},
    nbd::{
        NbdConfig, NbdServer,
        proto::{self, Request, opt},
    },
};

pub(crate) const MIB: u64 = 1 << 20;
/// What must have happened by then, or it will not.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn read(i: &Image, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
    let mut v = vec![0xee; len];
    // SAFETY: the vector's own memory.
    unsafe { i.read(offset, v.as_mut_ptr(), len) }.map(|()| v)
}

pub(crate) fn write(i: &Image, offset: u64, data: &[u8], fua: bool) -> Result<(), Errno> {
    // SAFETY: the slice's own memory.
    unsafe { i.write(offset, data.as_ptr(), data.len(), fua) }
}

pub(crate) struct Served {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) image: PathBuf,
    pub(crate) socket: PathBuf,
    pub(crate) server: NbdServer,
}

/// An image of `size` bytes, whose every 512-byte sector starts with its number, behind an NBD server.
pub(crate) fn serve(size: u64, writable: bool) -> Served {
    serve_with(size, writable, |_| {})
}

/// A device that lends few buffers.
pub(crate) fn serve_thin(size: u64, depth: u32) -> Served {
    serve_with(size, true, |c| {
        let image = c.socket.with_file_name("image");
        let pool = Arc::new(Pool::new(2).unwrap());
        let device = LocalDevice::with_queue_depth(Image::open(&image, true).unwrap(), pool, depth);
        c.exports[0].device = Arc::new(device);
    })
}

pub(crate) fn serve_with(size: u64, writable: bool, change: impl FnOnce(&mut NbdConfig<LocalDevice>)) -> Served {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let mut f = io::BufWriter::new(File::create(&image).unwrap());
    for sector in 0..size / 512 {
        let mut s = [sector as u8; 512];
        s[..8].copy_from_slice(&sector.to_le_bytes());
        f.write_all(&s).unwrap();
    }
    f.into_inner().unwrap();
    let device = LocalDevice::new(Image::open(&image, writable).unwrap(), Arc::new(Pool::new(4).unwrap()));
    let socket = dir.path().join("nbd.sock");
    let mut config = NbdConfig::new(&socket, Arc::new(device));
    change(&mut config);
    Served {
        server: NbdServer::start(config).unwrap(),
        dir,
        image,
        socket,
    }
}

pub(crate) fn sector(n: u64) -> [u8; 512] {
    let mut s = [n as u8; 512];
    s[..8].copy_from_slice(&n.to_le_bytes());
    s
}

pub(crate) struct Client {
    pub(crate) s: UnixStream,
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
        let mut hello = [0; 18];
        c.s.read_exact(&mut hello).unwrap();
        assert_eq!(hello[..16], *b"NBDMAGICIHAVEOPT");
        assert_eq!(hello[16..], [0, 3]);
        c.s.write_all(&3u32.to_be_bytes()).unwrap();
        c
    }

    pub(crate) fn raw(path: &Path) -> Self {
        let s = UnixStream::connect(path).unwrap();
        s.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { s, cookie: 0 }
    }

    /// Connects and goes to transmission; size and flags.
    pub(crate) fn go(path: &Path, name: &str) -> (Self, u64, u16) {
        let mut c = Self::connect(path);
        c.option(opt::GO, &info_request(name, &[]));
        let (mut size, mut flags) = (0, 0);
        loop {
            let r = c.opt_reply();
            match r.kind {
                1 => return (c, size, flags),
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

    pub(crate) fn send(&mut self, command: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> u64 {
        self.cookie += 1;
        let q = Request {
            flags,
            command,
            cookie: self.cookie,
            offset,
            len,
        };
        let mut b = q.to_bytes().to_vec();
        b.extend(data);
        self.s.write_all(&b).unwrap();
        self.cookie
    }

    /// Error and cookie of the next reply, without data.
    pub(crate) fn reply(&mut self) -> (u32, u64) {
        let mut h = [0; 16];
        self.s.read_exact(&mut h).unwrap();
        assert_eq!(h[..4], proto::SIMPLE_REPLY_MAGIC.to_be_bytes());
        (
            u32::from_be_bytes(h[4..8].try_into().unwrap()),
            u64::from_be_bytes(h[8..].try_into().unwrap()),
        )
    }

    pub(crate) fn call(&mut self, command: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> u32 {
        let cookie = self.send(command, flags, offset, len, data);
        let (e, c) = self.reply();
        assert_eq!(c, cookie);
        e
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

/// Setting a loop device up is not atomic: one test at a time.
static ONE: Mutex<()> = Mutex::new(());

pub(crate) struct Loop {
    pub(crate) path: PathBuf,
    _dir: tempfile::TempDir,
    _one: MutexGuard<'static, ()>,
}

impl Loop {
    pub(crate) fn new(options: &[&str]) -> Self {
        let one = ONE.lock().unwrap_or_else(|e| e.into_inner());
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("i");
        fs::write(&image, vec![7; 8 * MIB as usize]).unwrap();
        let out = Command::new("losetup")
            .args(["--find", "--show"])
            .args(options)
            .arg(&image)
            .output()
            .unwrap();
        assert!(
            out.status.success(),
            "losetup: {}",
            String::from_utf8_lossy(&out.stderr)
        );
        let path = String::from_utf8(out.stdout).unwrap().trim().into();
        Self {
            path,
            _dir: dir,
            _one: one,
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.path).status();
    }
}

/// Pages of a file that are not on its device yet (`cachestat`, Linux 6.5).
pub(crate) fn dirty_pages(path: &Path) -> u64 {
    const CACHESTAT: libc::c_long = 451;
    let file = File::open(path).unwrap();
    let (range, mut stat) = ([0u64, 0], [0u64; 5]);
    // SAFETY: the call reads two numbers and writes five.
    let r = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), stat.as_mut_ptr(), 0) };
    assert_eq!(r, 0, "cachestat: {}", std::io::Error::last_os_error());
    stat[1] + stat[2]
}

/// Writes until some of it is seen in memory only: the system may write pages back at any moment.
pub(crate) fn stays_in_memory(path: &Path, write: impl Fn() -> Result<(), Errno>) {
    let seen = (0..10).any(|_| {
        write().unwrap();
        dirty_pages(path) > 0
    });
    assert!(seen, "a plain write does not stay in memory");
}
