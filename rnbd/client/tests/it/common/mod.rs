//! A server of an image, in a thread.

use std::{
    fs,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rnbd_client::{DiskOptions, PathAddr};
use rnbd_disk::{Caching, DiskConfig, ExportSpec, Exports};
use rnbd_host::serve::{ServeConfig, ServeEvent, ServeStats, Serving};
use roce::{DeviceConfig, LocalDevice};
use rtrs::server::ServerConfig;

/// Longest time that a step of a test may take.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of the image.
pub(crate) const SIZE: u64 = 8 << 20;

/// Serves the exports `disk`, and `ro` read-only, until it is dropped.
pub(crate) struct Server {
    dir: tempfile::TempDir,
    addr: std::net::IpAddr,
    stop: Arc<AtomicBool>,
    stats: Arc<Mutex<ServeStats>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        fs::write(&image, pattern(SIZE as usize)).unwrap();
        let spec = |name: &str| ExportSpec {
            name: name.into(),
            path: image.clone(),
            read_only: name == "ro",
            ..ExportSpec::default()
        };
        let addr = ferroce_loopback::address().into();
        let config = ServeConfig {
            rtrs: ServerConfig {
                addr,
                queue_depth: 16,
                ..ServerConfig::default()
            },
            limits: Default::default(),
            exports: Exports::new([spec("disk"), spec("ro")], None, Caching::PageCache).unwrap(),
            disk: DiskConfig::default(),
            reactor: Default::default(),
            grace: Duration::from_secs(5),
        };
        let device = LocalDevice::open(&[DeviceConfig::new(addr)]).unwrap();
        let mut server = Serving::start(device, config).unwrap();
        let (stop, stats) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let (asked, counted) = (stop.clone(), Arc::<Mutex<ServeStats>>::clone(&stats));
        let thread = thread::spawn(move || {
            while !asked.load(Ordering::Relaxed) {
                if let Some(ServeEvent::Stopped(why)) = server.next(Duration::from_millis(5)) {
                    panic!("the server has stopped: {why:?}");
                }
                *counted.lock().unwrap() = server.stats().unwrap_or_default();
            }
            server.stop();
        });
        Self {
            dir,
            addr,
            stop,
            stats,
            thread: Some(thread),
        }
    }

    /// A path from an address that nobody else has.
    pub(crate) fn path(&self) -> PathAddr {
        format!("{},{}", ferroce_loopback::address(), self.addr)
            .parse()
            .unwrap()
    }

    pub(crate) fn options(&self, session: &str, device: &str) -> DiskOptions {
        DiskOptions::new(self.path(), session, device).connect_timeout(TIMEOUT)
    }

    pub(crate) fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    /// Waits until it has so many sessions.
    pub(crate) fn has_sessions(&self, sessions: usize) {
        let until = Instant::now() + TIMEOUT;
        while self.stats.lock().unwrap().sessions.iter().sum::<usize>() != sessions {
            assert!(Instant::now() < until, "{:?}", self.stats.lock().unwrap().sessions);
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends it, with all sessions.
    pub(crate) fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // What went wrong there has been printed.
            let _ = thread.join();
        }
    }
}

/// Bytes that differ from place to place.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u32).wrapping_mul(0x9e37_79b9).to_be_bytes()[0])
        .collect()
}
