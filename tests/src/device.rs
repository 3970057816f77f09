//! A served image and its mapping, each in a process of its own.

use std::{
    fs::{self, File},
    io::Write,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    time::Instant,
};

use serde_json::Value;
use tempfile::TempDir;

use crate::{
    fresh_address,
    nbd::Client,
    process::{Running, TIMEOUT},
};

/// Makes an image file with these bytes.
///
/// # Panics
/// When the file can't be written.
pub fn image(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.join(name);
    File::create(&path)
        .and_then(|mut f| f.write_all(bytes))
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    path
}

/// The arguments of a `ferroce serve`.
pub fn serve_args(addr: Ipv4Addr, exports: &[String], more: &[&str]) -> Vec<String> {
    let mut args = vec![
        "serve".to_owned(),
        "--json".to_owned(),
        "--addr".to_owned(),
        addr.to_string(),
    ];
    for export in exports {
        args.extend(["--export".to_owned(), export.clone()]);
    }
    args.extend(more.iter().map(|m| (*m).to_owned()));
    args
}

/// Starts `ferroce serve` and waits until it listens; the event as well.
///
/// # Panics
/// When it does not come so far.
pub fn serve(addr: Ipv4Addr, exports: &[String], more: &[&str]) -> (Running, Value) {
    let mut running = Running::start(&serve_args(addr, exports, more));
    let event = running.event("listening");
    (running, event)
}

/// The arguments of a `ferroce map` from `src` at `dst`, of the device `disk` in the session `test` unless `more` says
/// otherwise, at this Unix socket.
pub fn map_args(src: Ipv4Addr, dst: &str, socket: &Path, more: &[&str]) -> Vec<String> {
    let socket = socket.display().to_string();
    map_args_at(src, dst, &[&["--nbd", &socket], more].concat())
}

/// The same with sockets as `more` says.
pub fn map_args_at(src: Ipv4Addr, dst: &str, more: &[&str]) -> Vec<String> {
    let mut args = vec!["map".to_owned(), "--json".to_owned()];
    for (option, usual) in [("--session", "test"), ("--device", "disk")] {
        if !more.contains(&option) {
            args.extend([option.to_owned(), usual.to_owned()]);
        }
    }
    args.extend(["--path".to_owned(), format!("{src},{dst}")]);
    args.extend(more.iter().map(|m| (*m).to_owned()));
    args
}

/// Starts `ferroce map` and waits until the device is there; the event as well.
///
/// # Panics
/// When it does not come so far.
pub fn map(src: Ipv4Addr, dst: &str, socket: &Path, more: &[&str]) -> (Running, Value) {
    let mut running = Running::start(&map_args(src, dst, socket, more));
    let event = running.event("mapped");
    (running, event)
}

/// Starts `ferroce map` and retries until the server has released the devices of an earlier client. Returns the event, too.
///
/// # Panics
/// When it does not come so far, or fails for another reason.
pub fn map_when_free(src: Ipv4Addr, dst: &str, socket: &Path, more: &[&str]) -> (Running, Value) {
    let end = Instant::now() + TIMEOUT;
    loop {
        let _ = fs::remove_file(socket);
        let mut running = Running::start(&map_args(src, dst, socket, more));
        let event = running.next_event();
        if event["event"] == "mapped" {
            return (running, event);
        }
        let done = running.end();
        let is_taken = ["open for writing", "session has this name"]
            .iter()
            .any(|why| done.stderr.contains(why));
        assert!(is_taken && Instant::now() < end, "{}", done.stderr);
    }
}

/// An image file, served and mapped.
pub struct Pair {
    /// Temporary files.
    pub dir: TempDir,
    /// The image file.
    pub image: PathBuf,
    /// Its server.
    pub server: Ipv4Addr,
    /// The mapping's own address.
    pub client: Ipv4Addr,
    /// `ferroce serve`.
    pub serve: Running,
    /// `ferroce map`.
    pub map: Running,
    /// The `mapped` event.
    pub mapped: Value,
    /// The NBD socket.
    pub socket: PathBuf,
}

impl Pair {
    /// Serves these bytes as `disk` and maps it.
    ///
    /// # Panics
    /// When that does not work.
    pub fn start(bytes: &[u8], options: &str, serve_more: &[&str], map_more: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let image = image(dir.path(), "disk.img", bytes);
        Self::of(dir, image, options, serve_more, map_more)
    }

    /// Serves a hole of this many bytes as `disk` and maps it.
    ///
    /// # Panics
    /// When that does not work.
    pub fn start_sparse(len: usize) -> Self {
        Self::sparse(len, &[])
    }

    /// The same, mapped with these arguments.
    ///
    /// # Panics
    /// When that does not work.
    pub fn sparse(len: usize, map_more: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let image = image(dir.path(), "disk.img", &[]);
        let file = File::options().write(true).open(&image).expect("it was just made");
        file.set_len(len as u64).expect("a file system with sparse files");
        Self::of(dir, image, "", &[], map_more)
    }

    fn of(dir: TempDir, image: PathBuf, options: &str, serve_more: &[&str], map_more: &[&str]) -> Self {
        let server = fresh_address();
        let (serve, _) = serve(server, &[format!("disk={}{options}", image.display())], serve_more);
        let socket = dir.path().join("nbd.sock");
        let client = fresh_address();
        let (map, mapped) = map(client, &server.to_string(), &socket, map_more);
        Self {
            dir,
            image,
            server,
            client,
            serve,
            map,
            mapped,
            socket,
        }
    }

    /// A client of the mapped device.
    ///
    /// # Panics
    /// When it can't connect.
    pub fn client(&self) -> Client {
        Client::connect(&self.socket).unwrap_or_else(|e| panic!("{e}\n{}\n{}", self.map.stderr(), self.serve.stderr()))
    }
}
