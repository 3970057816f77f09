//! A disk with one store and a session's memory, over every way and on two file systems.

use std::{
    fs::File,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use rnbd::{
    Errno,
    block::{BlockOp, Extent, Geometry},
    proto::status,
    server::disk::{DiskOp, Disks, Op, StoreId},
};
use rnbd_disk::{Budget, Caching, Disk, DiskConfig, Image, OpenExport, Part, Way, Ways};
use roce_verbs::mem::Pages;
use rtrs::server::request::{RequestKey, SessionKey};

pub(crate) const MIB: u64 = 1 << 20;
/// Longest time that a step of a test may take.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of the session's memory: all that one operation of a test moves.
pub(crate) const ROOM: usize = 8 << 20;
pub(crate) const SESSION: SessionKey = SessionKey(1);

pub(crate) const WAYS: [Way; 4] = [Way::InPlace, Way::TryNow, Way::Ring, Way::Pool];

/// A request's number, and how it ended.
pub(crate) type Ended = (u32, Result<(), Errno>);

/// An operation for a request of a session.
pub(crate) fn operation(session: SessionKey, serial: u32, op: DiskOp, memory: &Arc<Pages>) -> Box<Op<Part>> {
    let id = RequestKey {
        session,
        chunk: serial as u16,
        serial,
    };
    Box::new(Op::new(id, op, Some(memory.clone())))
}

/// Takes the operations that have ended.
pub(crate) fn take(disk: &mut Disk) -> impl Iterator<Item = Ended> {
    std::iter::from_fn(|| disk.poll()).map(|op| (op.id.serial, op.result))
}

/// Every way, each on a file system in memory and on one that has a disk.
pub(crate) fn everywhere(test: impl Fn(&Case)) {
    for way in WAYS {
        for folder in ["/dev/shm", env!("CARGO_TARGET_TMPDIR")] {
            let case = Case {
                way,
                dir: tempfile::tempdir_in(folder).unwrap(),
                caching: Caching::PageCache,
            };
            println!("{way:?} in {folder}");
            test(&case);
        }
        println!("{way:?}, direct");
        test(&Case {
            way,
            dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
            caching: Caching::Direct,
        });
    }
}

pub(crate) struct Case {
    pub(crate) way: Way,
    pub(crate) dir: tempfile::TempDir,
    pub(crate) caching: Caching,
}

impl Case {
    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("i")
    }

    /// A new image file of so many bytes.
    pub(crate) fn image(&self, len: u64) -> Rig {
        File::create(self.path()).unwrap().set_len(len).unwrap();
        self.open(&self.path(), true)
    }

    pub(crate) fn open(&self, path: &Path, writable: bool) -> Rig {
        Rig::new(self.way, Image::open(path, writable, self.caching).unwrap())
    }
}

pub(crate) fn config(way: Way) -> DiskConfig {
    DiskConfig {
        ways: Some(Ways::all(way)),
        ..DiskConfig::default()
    }
}

/// A disk with one store, used by one session.
pub(crate) struct Rig {
    pub(crate) disk: Disk,
    pub(crate) store: StoreId,
    pub(crate) memory: Arc<Pages>,
    tickets: u32,
    /// Operations that have ended.
    pub(crate) done: Vec<Ended>,
}

impl Rig {
    /// Looks at the sizes of all images, as a server's job does.
    pub(crate) fn look_at_sizes(&mut self) {
        let images: Vec<_> = self.disk.images().filter_map(|(_, image)| image.upgrade()).collect();
        images.iter().for_each(|image| image.look_at_size());
        self.disk.note_sizes();
    }

    pub(crate) fn new(way: Way, image: Image) -> Self {
        Self::with(config(way), image)
    }

    pub(crate) fn with(config: DiskConfig, image: Image) -> Self {
        Self::of(config, image.into())
    }

    pub(crate) fn of(config: DiskConfig, export: OpenExport) -> Self {
        let mut disk = Disk::new(config).unwrap();
        Self {
            store: disk.add(export),
            disk,
            memory: Pages::allocate(ROOM).unwrap(),
            tickets: 0,
            done: Vec::new(),
        }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.disk.store(self.store).unwrap().image().geometry()
    }

    /// Asks for an operation, with its data at `data` in the memory.
    pub(crate) fn start(&mut self, op: BlockOp, offset: u64, len: u64, data: usize) -> u32 {
        self.tickets += 1;
        let op = DiskOp {
            store: self.store,
            op,
            offset,
            len,
            data,
        };
        self.disk.submit(operation(SESSION, self.tickets, op, &self.memory));
        self.tickets
    }

    /// A turn of the disk. Returns whether there is more to do at once.
    pub(crate) fn pump(&mut self, budget: &mut Budget) -> bool {
        let more = self.disk.pump(budget);
        self.done.extend(take(&mut self.disk));
        more
    }

    /// Turns the loop until nothing is under way.
    pub(crate) fn settle(&mut self) {
        let until = Instant::now() + TIMEOUT;
        while self.disk.is_busy() {
            assert!(Instant::now() < until, "{:?}", self.disk);
            if !self.pump(&mut Budget::default()) && self.disk.is_busy() {
                wait(&self.disk);
            }
        }
    }

    /// How an operation ended.
    pub(crate) fn result(&mut self, ticket: u32) -> Result<(), Errno> {
        self.settle();
        let mut ends = self.done.iter().filter(|(t, _)| *t == ticket);
        let (_, result) = *ends.next().expect("it ended");
        assert!(ends.next().is_none(), "{ticket:?} ended twice");
        result
    }

    pub(crate) fn run(&mut self, op: BlockOp, offset: u64, len: u64) -> Result<(), Errno> {
        let ticket = self.start(op, offset, len, 0);
        self.result(ticket)
    }

    pub(crate) fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        self.read_to(0, offset, len)
    }

    /// Reads through the memory from `at` on.
    pub(crate) fn read_to(&mut self, at: usize, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0xee; len];
        self.memory.write(at, &bytes).unwrap();
        let ticket = self.start(BlockOp::Read, offset, len as u64, at);
        self.result(ticket)?;
        self.memory.read(at, &mut bytes).unwrap();
        Ok(bytes)
    }

    pub(crate) fn write(&mut self, offset: u64, data: &[u8], fua: bool) -> Result<(), Errno> {
        self.write_from(0, offset, data, fua)
    }

    /// Writes through the memory from `at` on.
    pub(crate) fn write_from(&mut self, at: usize, offset: u64, data: &[u8], fua: bool) -> Result<(), Errno> {
        self.memory.write(at, data).unwrap();
        let ticket = self.start(BlockOp::Write { fua }, offset, data.len() as u64, at);
        self.result(ticket)
    }

    /// Returns the extents of a range, at most so many.
    pub(crate) fn extents(&mut self, offset: u64, len: u64, most: u32) -> Result<Vec<Extent>, Errno> {
        let mut bytes = vec![0xee; status::answer_len(most)];
        self.memory.write(0, &bytes).unwrap();
        let ticket = self.start(BlockOp::BlockStatus { most }, offset, len, 0);
        self.result(ticket)?;
        self.memory.read(0, &mut bytes).unwrap();
        Ok(status::parse(&bytes, len, most, 512).unwrap())
    }

    pub(crate) fn flush(&mut self) -> Result<(), Errno> {
        self.run(BlockOp::Flush, 0, 0)
    }

    pub(crate) fn discard(&mut self, offset: u64, len: u64) -> Result<(), Errno> {
        self.run(BlockOp::Discard, offset, len)
    }

    pub(crate) fn zero(&mut self, offset: u64, len: u64, fua: bool, may_unmap: bool) -> Result<(), Errno> {
        self.run(BlockOp::WriteZeroes { fua, may_unmap }, offset, len)
    }
}

/// Waits until the disk's descriptor is readable.
pub(crate) fn wait(disk: &Disk) {
    assert!(is_readable(disk, TIMEOUT), "nothing to wait for: {disk:?}");
}

/// Whether there is something to do.
pub(crate) fn is_ready(disk: &Disk) -> bool {
    is_readable(disk, Duration::ZERO)
}

fn is_readable(disk: &Disk, timeout: Duration) -> bool {
    let mut poll = libc::pollfd {
        fd: disk.descriptor().as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one descriptor to poll.
    let ready = unsafe { libc::poll(&raw mut poll, 1, timeout.as_millis() as i32) };
    let interrupted = std::io::Error::last_os_error().raw_os_error() == Some(libc::EINTR);
    ready == 1 || (ready < 0 && interrupted)
}
