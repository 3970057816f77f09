//! Clients of an RNBD server with image files, over RTRS: messages that are in order, out of order, or nothing. A model says
//! what is in the files: no request changes or tells a byte outside its device and its range, what is refused changes nothing, no
//! name leads out of the folder, and nobody writes beside another session's writer.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::unix::fs::{FileExt, symlink},
    path::Path,
    sync::Arc,
};

use rnbd::{
    proto::{
        self, AccessMode, ClientMsg, IoOp, MsgClose, MsgIo, MsgOpen, MsgSessInfo, Rw, SECTOR, parse_open_rsp,
        parse_sess_info_rsp, status,
    },
    server::{
        Limits, Server,
        action::{OpenRefused, Opened, Output},
        transport::Transport,
    },
};
use rnbd_disk::{Budget, Caching, Disk, DiskConfig, Exports, Way, Ways};
use roce_verbs::{Instant, mem::Pages};
use rtrs::{
    Cx,
    proto::ChunkLayout,
    server::{
        Server as Rtrs, ServerConfig,
        request::{Output as RtrsOutput, RequestKey, SessionKey},
    },
};
use zerocopy::IntoBytes;

use crate::{
    host::{Host, User},
    input::Input,
    peers::{Ask, Peers, Reply},
    provider::Keys,
};

const DEPTH: u32 = 4;
const CHUNK: u32 = 8192;
const STEPS: usize = 64;
/// Files by path below the temporary folder, and their sectors: an answer's size tells which was opened. The last is not
/// offered.
const FILES: [(&str, usize); 6] = [
    ("disk", 6),
    ("ro", 2),
    ("folder/a", 3),
    ("folder/sub/b", 4),
    ("folder/s1/c", 5),
    ("secret", 7),
];
const SECRET: usize = FILES.len() - 1;
const NAMES: [&str; 14] = [
    "disk",
    "/disk",
    "//disk",
    "./disk",
    "ro",
    "a",
    "/a",
    "sub/b",
    "sub//b",
    "c",
    "link",
    "sub/up",
    "../secret",
    "sub",
];

/// The files, and what must be in them.
struct Files {
    handles: Vec<File>,
    model: Vec<Vec<u8>>,
}

impl Files {
    fn new(dir: &Path) -> Self {
        for sub in ["folder/sub", "folder/s1"] {
            fs::create_dir_all(dir.join(sub)).expect("a folder");
        }
        symlink("../secret", dir.join("folder/link")).expect("a link");
        symlink("../../secret", dir.join("folder/sub/up")).expect("a link");
        let model: Vec<Vec<u8>> = FILES
            .iter()
            .enumerate()
            .map(|(i, (_, sectors))| {
                (0..sectors * 512)
                    .map(|at| (at / 512 + 37 * i) as u8 ^ at as u8)
                    .collect()
            })
            .collect();
        let make = |((path, _), bytes): (&(&str, usize), &Vec<u8>)| {
            let path = dir.join(path);
            fs::write(&path, bytes).expect("a file");
            File::open(path).expect("a file")
        };
        let handles = FILES.iter().zip(&model).map(make).collect();
        Self { handles, model }
    }

    fn check(&self) {
        for (i, (file, model)) in self.handles.iter().zip(&self.model).enumerate() {
            // One byte more: the file must not have grown.
            let mut bytes = vec![0; model.len() + 1];
            let n = file.read_at(&mut bytes, 0).expect("a file");
            assert_eq!(n, model.len(), "{} has another size", FILES[i].0);
            assert!(
                bytes[..n] == model[..],
                "{} has other content than was written",
                FILES[i].0
            );
        }
    }
}

/// A device that a session has open.
#[derive(Clone, Copy)]
struct Open {
    file: usize,
    mode: AccessMode,
}

/// RTRS below the server: requests have their session's memory, and answers are inside it.
struct Checked<'a, 'b> {
    rtrs: &'a mut Rtrs,
    cx: &'a mut Cx<'b>,
}

impl Transport for Checked<'_, '_> {
    fn now(&self) -> Instant {
        self.cx.now
    }

    fn memory(&self, session: SessionKey) -> Option<&Arc<Pages>> {
        Some(self.rtrs.memory(session).expect("the session's memory"))
    }

    fn write(&mut self, request: RequestKey, at: usize, bytes: &[u8]) -> bool {
        let memory = self.rtrs.memory(request.session).expect("the session's memory");
        memory.write(at, bytes).expect("inside the memory");
        true
    }

    fn answer(&mut self, request: RequestKey, errno: i32) {
        self.rtrs.answer(self.cx, request, errno);
    }
}

/// What a server does with its disks, at once.
struct Backend {
    rnbd: Server<Disk>,
    exports: Arc<Exports>,
}

impl Backend {
    fn new(exports: Arc<Exports>) -> Self {
        let config = DiskConfig {
            ways: Some(Ways::all(Way::InPlace)),
            ..DiskConfig::default()
        };
        let limits = Limits {
            max_devices: 4,
            ..Limits::default()
        };
        Self {
            rnbd: Server::new(limits, Disk::new(config).expect("a disk")),
            exports,
        }
    }

    fn open(&mut self, session: &str, name: &[u8], mode: AccessMode) -> Result<Opened, OpenRefused> {
        let found = self.exports.find(session, name)?;
        let identity = found.id().identity();
        let opened = self.exports.open_found(found, mode);
        let export = opened.map_err(|errno| OpenRefused {
            errno,
            identity: Some(identity.clone()),
        })?;
        Ok(Opened {
            geometry: export.image().geometry(),
            label: export.image().label().to_owned(),
            instance: export.instance(),
            identity,
            store: self.rnbd.disks_mut().add(export),
        })
    }

    fn output(&mut self, rtrs: &mut Rtrs, cx: &mut Cx<'_>, output: Output) {
        match output {
            Output::Rtrs(RtrsOutput::Allocate { ticket, bytes }) => rtrs.ready(cx, ticket, Pages::allocate(bytes)),
            Output::Rtrs(_) => {}
            Output::Open {
                ticket,
                session_name,
                name,
                mode,
            } => {
                let opened = self.open(&session_name, &name, mode);
                self.rnbd.opened(&mut Checked { rtrs, cx }, ticket, opened);
            }
            Output::Close { ticket, store } => {
                drop(self.rnbd.disks_mut().take(store).expect("a store that is not used"));
                self.rnbd.closed(&mut Checked { rtrs, cx }, ticket);
            }
        }
    }
}

impl User for Backend {
    fn told(&mut self, rtrs: &mut Rtrs, cx: &mut Cx<'_>, output: RtrsOutput) {
        self.rnbd.rtrs(&mut Checked { rtrs, cx }, output);
    }

    fn work(&mut self, rtrs: &mut Rtrs, cx: &mut Cx<'_>) -> bool {
        let mut worked = self.rnbd.disks_mut().pump(&mut Budget::default());
        worked |= self.rnbd.poll_disks(&mut Checked { rtrs, cx });
        while let Some(output) = self.rnbd.poll_output() {
            worked = true;
            self.output(rtrs, cx, output);
        }
        worked
    }
}

struct Run {
    peers: Peers<Backend>,
    files: Files,
    open: BTreeMap<(usize, u32), Open>,
}

/// See the module.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let bits = input.byte();
    let dir = tempfile::tempdir().expect("a folder");
    let files = Files::new(dir.path());
    let place = |file: &str| dir.path().join(file).display().to_string();
    let named = [format!("disk={}", place("disk")), format!("ro={},ro", place("ro"))];
    let named = named.map(|spec| spec.parse().expect("an export"));
    let folder = match bits >> 1 & 3 {
        0 => "folder,ro",
        1 => "folder/%SESSNAME%",
        _ => "folder",
    };
    let folder = place(folder).parse().expect("a folder");
    let exports = Exports::new(named, Some(&folder), Caching::PageCache).expect("exports");
    let config = ServerConfig {
        addr: [192, 0, 2, 1].into(),
        queue_depth: DEPTH,
        max_chunk_size: CHUNK,
        always_invalidate: bits & 1 == 0,
        ..ServerConfig::default()
    };
    let keys = if bits & 8 == 0 { Keys::INSTANT } else { Keys::QUEUED };
    let layout = ChunkLayout::new(DEPTH, CHUNK).expect("a layout");
    let mut run = Run {
        peers: Peers::new(Host::new(config, keys, Backend::new(exports)), layout),
        files,
        open: BTreeMap::new(),
    };
    for (session, name) in ["s1", "s2"].iter().enumerate() {
        let session = session as u8;
        assert!(
            run.peers.handshake(session, session, 2, session * 8, name),
            "a handshake"
        );
    }
    for _ in 0..STEPS {
        if input.0.is_empty() || !run.step(&mut input) {
            break;
        }
    }
    let backend = run.peers.host.stop();
    assert!(
        backend.rnbd.is_idle() && !backend.rnbd.disks().is_busy(),
        "something is open still"
    );
    assert_eq!(backend.rnbd.counters().open, 0);
    run.files.check();
}

impl Run {
    /// One request. False if the server has ended the path.
    fn step(&mut self, input: &mut Input<'_>) -> bool {
        let [kind, room] = [(); 2].map(|()| input.byte());
        let session = usize::from(kind & 1);
        let conn = 2 * session + usize::from(kind >> 1 & 1);
        let user = self.message(kind >> 2 & 7, session, input);
        let len = u32::from(room) * 16;
        let bytes: Vec<u8> = match input.byte() {
            0 => input.take(len as usize).to_vec(),
            fill => (0..len).map(|at| fill.wrapping_add((at / 16) as u8)).collect(),
        };
        let read = kind & 0x80 != 0;
        let ask = Ask {
            chunk: input.below(DEPTH as usize),
            data: if read { Err(len) } else { Ok(&bytes) },
            user: &user,
            invalidate: kind & 0x40 != 0,
        };
        if !self.peers.ask(conn, &ask) {
            return true;
        }
        let mut replies = self.peers.collect();
        let Some(reply) = replies.pop() else { return false };
        assert!(replies.is_empty(), "two answers to one request");
        assert_eq!((reply.conn, reply.reply.msg_id as usize), (conn, ask.chunk));
        self.peers.check_rest();
        self.judge(session, &ask, &reply);
        self.files.check();
        true
    }

    fn message(&self, kind: u8, session: usize, input: &mut Input<'_>) -> Vec<u8> {
        match kind {
            0 => input.short().to_vec(),
            1 => MsgSessInfo::request(input.byte()).as_bytes().to_vec(),
            2 | 3 => {
                let mode = [AccessMode::ReadOnly, AccessMode::ReadWrite, AccessMode::Migration][input.below(3)];
                let name = match input.byte() {
                    255 => input.short(),
                    n => NAMES[usize::from(n) % NAMES.len()].as_bytes(),
                };
                MsgOpen::new(name, mode).map_or(Vec::new(), |m| m.as_bytes().to_vec())
            }
            4 => MsgClose::new(self.device(session, input)).as_bytes().to_vec(),
            _ => {
                let device = self.device(session, input);
                let rw = match input.byte() {
                    // Which is refused anyway, at two more numbers.
                    10 | 34 => Rw::new(IoOp::BlockStatus).to_wire(),
                    n @ 0..=250 => Rw {
                        op: IoOp::ALL[usize::from(n) % 6],
                        sync: n & 64 != 0,
                        fua: n & 128 != 0,
                        preflush: n & 32 != 0,
                        no_unmap: n & 16 != 0,
                    }
                    .to_wire(),
                    _ => input.number_or_zeros(4) as u32,
                };
                let sector = match input.byte() {
                    255 => input.number_or_zeros(8),
                    n => u64::from(n % 8),
                };
                let bytes = match input.byte() {
                    255 => input.number_or_zeros(4) as u32,
                    n => u32::from(n % 9) * SECTOR as u32,
                };
                let mut m = MsgIo::new(device, Rw::new(IoOp::Read), sector, bytes);
                m.rw.set(rw);
                if Rw::from_wire(rw).is_some_and(|rw| rw.op == IoOp::BlockStatus) {
                    let [sectors, extents] = [(); 2].map(|()| input.byte());
                    m.status_extents.set(extents.into());
                    m.status_sectors.set(match sectors {
                        255 => input.number_or_zeros(4) as u32,
                        n => u32::from(n % 9),
                    });
                }
                m.as_bytes().to_vec()
            }
        }
    }

    /// The number of a device that the session has open, mostly.
    fn device(&self, session: usize, input: &mut Input<'_>) -> u32 {
        let n = input.byte();
        let mut own = self.open.keys().filter(|(s, _)| *s == session).map(|(_, id)| *id);
        let count = own.clone().count().max(1);
        match n {
            128.. => u32::from(n - 128),
            _ => own.nth(usize::from(n) % count).unwrap_or(0),
        }
    }

    /// Whether the answer is right, and what the files must be like after it.
    fn judge(&mut self, session: usize, ask: &Ask<'_>, reply: &Reply) {
        let done = reply.reply.errno == 0;
        let message = match ClientMsg::parse(ask.user) {
            Ok(message) => message,
            Err(_) => return assert!(!done, "what is no message is done"),
        };
        if let Err(room) = ask.data {
            assert_eq!(reply.data.len(), if done { room as usize } else { 0 });
        }
        match message {
            ClientMsg::SessInfo(_) if done => {
                let rsp = parse_sess_info_rsp(&reply.data).expect("a version");
                assert!(rsp.ver <= proto::VERSION_MAJOR);
            }
            ClientMsg::Open(m) if done => self.opened(session, &m, &reply.data),
            ClientMsg::Close(m) => {
                assert!(done, "closing fails");
                self.open.remove(&(session, m.device_id.get()));
            }
            ClientMsg::Io(m) if done => self.io(session, &m, ask, &reply.data),
            _ => {}
        }
    }

    fn opened(&mut self, session: usize, m: &MsgOpen, answer: &[u8]) {
        let rsp = parse_open_rsp(answer).expect("an answer to an open request");
        let file = FILES
            .iter()
            .position(|(_, n)| *n as u64 == rsp.nsectors.get())
            .expect("one of the files");
        assert_ne!(file, SECRET, "a name leads out of the folder: {m:?}");
        let mode = AccessMode::from_wire(m.access_mode).expect("an access mode");
        let key = (session, rsp.device_id.get());
        // What is open already stays as it is.
        if self.open.contains_key(&key) {
            return;
        }
        assert!(
            file != 1 || mode == AccessMode::ReadOnly,
            "a read-only export is open for writing"
        );
        let beside =
            |((s, _), o): (&(usize, u32), &Open)| *s != session && o.file == file && o.mode == AccessMode::ReadWrite;
        let taken = mode == AccessMode::ReadWrite && self.open.iter().any(beside);
        assert!(!taken, "two sessions write {}", FILES[file].0);
        self.open.insert(key, Open { file, mode });
    }

    fn io(&mut self, session: usize, m: &MsgIo, ask: &Ask<'_>, answer: &[u8]) {
        let device = self
            .open
            .get(&(session, m.device_id.get()))
            .expect("a device that is open");
        let rw = Rw::from_wire(m.rw.get()).expect("an operation");
        let len = m.bi_size.get() as usize;
        if rw.op == IoOp::Flush && len == 0 {
            return;
        }
        let start = m.sector.get().checked_mul(SECTOR).expect("a position") as usize;
        if rw.op == IoOp::BlockStatus {
            assert!(ask.data.is_err(), "an answer without room for it");
            let model = &self.files.model[device.file];
            return status_is_true(m, &model[start..], answer);
        }
        let model = &mut self.files.model[device.file];
        let range = start..start.checked_add(len).expect("an end");
        assert!(
            range.end <= model.len() && len.is_multiple_of(512),
            "outside the device is done: {m:?}"
        );
        let writable = device.mode.writable();
        match (rw.op, ask.data) {
            (IoOp::Read, Err(_)) => {
                assert_eq!(answer[..len], model[range], "data of a read");
                assert!(answer[len..].iter().all(|b| *b == 0), "more than was read");
            }
            (IoOp::Write | IoOp::Flush, Ok(bytes)) => {
                assert!(writable || len == 0, "written to what is open for reading");
                model[range].copy_from_slice(&bytes[..len]);
            }
            (IoOp::Discard, _) => {
                assert!(writable || len == 0, "discarded of what is open for reading");
                // Any content will do, but only there.
                let file = &self.files.handles[device.file];
                file.read_exact_at(&mut model[range], start as u64).expect("a file");
            }
            (IoOp::WriteZeroes, Ok(_)) => {
                assert!(writable || len == 0, "zeroed what is open for reading");
                model[range].fill(0);
            }
            other => panic!("{other:?} is done"),
        }
    }
}

/// What an answer tells of as zeroes is zeroes, nothing is told of what is not asked about, and nothing is behind the answer.
fn status_is_true(m: &MsgIo, mut model: &[u8], answer: &[u8]) {
    let (most, len) = (m.most_extents(), u64::from(m.status_sectors.get()) * SECTOR);
    assert!(len as usize <= model.len(), "outside the device is told: {m:?}");
    for extent in status::parse(answer, len, most, SECTOR).expect("an answer to a block status") {
        let (part, rest) = model.split_at(extent.len as usize);
        assert!(
            !extent.zero || part.iter().all(|b| *b == 0),
            "data is told of as zeroes"
        );
        model = rest;
    }
    assert!(
        answer[status::answer_len(most)..].iter().all(|b| *b == 0),
        "more than the answer"
    );
}
