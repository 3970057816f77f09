//! A client and what it is told, for its tests.

use std::{collections::BTreeMap, time::Duration};

use rnbd::{
    Errno,
    block::{BlockOp, BlockRequest},
    client::{
        Client, Opener, Unmap,
        error::MapError,
        output::{DeviceKey, Output},
    },
    proto::{
        AccessMode, CACHE_FUA, CACHE_WRITEBACK, ClientMsg, F_FUA, F_NO_UNMAP, F_SYNC, MsgIo, MsgOpenRsp, MsgSessInfo,
        instance::Instance,
    },
};
use roce_verbs::Instant;
use rtrs::{
    IoError, PathError,
    client::{
        buffers::{Buffer, Buffers},
        request::SessionId,
    },
};
use zerocopy::IntoBytes;

use crate::bench::{MIB, RtrsOutput, Script, Submission, session_info, with_cx_at};

pub(crate) const S: SessionId = SessionId(3);
pub(crate) const RW: AccessMode = AccessMode::ReadWrite;
pub(crate) const FLAGS: u32 = F_SYNC | F_FUA | F_NO_UNMAP;

/// A client with one session.
pub(crate) struct Bench {
    pub(crate) client: Client<u64, Script>,
    pub(crate) user: u64,
    openers: BTreeMap<DeviceKey, Opener>,
    pub(crate) now: Instant,
}

impl Bench {
    /// A client, and memory for its session.
    pub(crate) fn before_the_session(bytes: usize) -> Self {
        let mut script = Script::default();
        script.pools.insert(S, Buffers::new(bytes));
        Self {
            client: Client::over(script),
            user: 0,
            openers: BTreeMap::new(),
            now: Instant::ZERO,
        }
    }

    /// A session that is up, before anything has been agreed on.
    pub(crate) fn with_limit(bytes: usize) -> Self {
        let mut bench = Self::before_the_session(bytes);
        bench.tell(RtrsOutput::Opened(S, session_info()));
        bench
    }

    /// A session whose protocol version is agreed on.
    pub(crate) fn up() -> Self {
        let mut bench = Self::with_limit(64 << 20);
        bench.agree();
        bench
    }

    /// One with a device.
    pub(crate) fn mapped() -> (Self, DeviceKey) {
        let mut bench = Self::up();
        let device = bench.map("disk", &open_rsp(7));
        (bench, device)
    }

    pub(crate) fn tell(&mut self, output: RtrsOutput) {
        self.client.rtrs_mut().told.push_back(output);
        self.turn();
    }

    fn turn(&mut self) {
        with_cx_at(self.now, |cx| while self.client.turn(cx) {});
    }

    pub(crate) fn lose(&mut self) {
        self.tell(RtrsOutput::Down(S, PathError::PeerDisconnected));
    }

    /// Time goes by, with all that is due.
    pub(crate) fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(due) = self.client.next_timeout().filter(|due| *due <= end) {
            self.now = due.max(self.now);
            self.client.timeout(self.now);
            let next = self.client.next_timeout();
            assert!(next.is_none_or(|next| next > self.now), "timers stand still");
        }
        self.now = end;
    }

    pub(crate) fn next(&mut self) -> Option<Submission> {
        self.turn();
        let (session, submission) = self.client.rtrs_mut().sent.pop_front()?;
        assert_eq!(session, S);
        Some(submission)
    }

    pub(crate) fn sent(&mut self) -> Vec<Submission> {
        std::iter::from_fn(|| self.next()).collect()
    }

    pub(crate) fn sent_one(&mut self) -> Submission {
        let mut sent = self.sent();
        assert_eq!(sent.len(), 1, "{sent:?}");
        sent.remove(0)
    }

    pub(crate) fn answer(&mut self, submission: Submission, result: Result<(), IoError>) {
        self.tell(RtrsOutput::Done {
            session: S,
            tag: submission.tag,
            result,
            data: submission.data,
        });
    }

    pub(crate) fn answer_with(&mut self, submission: Submission, message: &[u8]) {
        let buffer = submission.data.as_ref().unwrap();
        self.client.rtrs().pools[&S].write(buffer, 0, message).unwrap();
        self.answer(submission, Ok(()));
    }

    pub(crate) fn agree(&mut self) {
        let ask = self.sent_one();
        assert!(matches!(message(&ask), ClientMsg::SessInfo(m) if m.ver == 2));
        self.answer_with(ask, MsgSessInfo::response(2).as_bytes());
    }

    pub(crate) fn map(&mut self, name: &str, rsp: &MsgOpenRsp) -> DeviceKey {
        let device = self.client.map(S, name, RW);
        let open = self.sent_one();
        self.answer_with(open, rsp.as_bytes());
        match self.output() {
            Output::Mapped(key, geometry) if key == device => {
                assert_eq!(self.client.geometry(device), Some(geometry));
            }
            other => panic!("{other:?}"),
        }
        device
    }

    /// Unmaps a device that nobody has in use, or is told why not.
    pub(crate) fn unmap(&mut self, device: DeviceKey) -> Option<Errno> {
        self.client.unmap(device, Unmap::Normal { in_use: false }).err()
    }

    pub(crate) fn remap(&mut self, device: DeviceKey) -> Option<Errno> {
        self.client.remap(device).err()
    }

    pub(crate) fn outputs(&mut self) -> Vec<Output> {
        let outputs = std::iter::from_fn(|| self.client.poll_output());
        // The test has told of the session itself.
        outputs.filter(|output| !matches!(output, Output::Rtrs(_))).collect()
    }

    pub(crate) fn output(&mut self) -> Output {
        let mut outputs = self.outputs();
        assert_eq!(outputs.len(), 1, "{outputs:?}");
        outputs.remove(0)
    }

    pub(crate) fn map_error(&mut self) -> MapError {
        match self.output() {
            Output::MapFailed(_, e) => e,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn buffer(&mut self, len: usize) -> Buffer {
        let pools = &mut self.client.rtrs_mut().pools;
        with_cx_at(self.now, |cx| pools.get_mut(&S).unwrap().take(cx, len)).unwrap()
    }

    pub(crate) fn give(&mut self, buffer: Option<Buffer>) {
        if let Some(buffer) = buffer {
            self.client.rtrs_mut().pools.get_mut(&S).unwrap().give(buffer);
        }
    }

    pub(crate) fn lent(&self) -> usize {
        self.client.rtrs().pools[&S].lent()
    }

    /// Starts an operation, with the buffer that it needs. Returns its name.
    pub(crate) fn submit(&mut self, device: DeviceKey, op: BlockOp, offset: u64, len: u64) -> u64 {
        let data = matches!(op, BlockOp::Read | BlockOp::Write { .. }).then(|| self.buffer(len as usize));
        self.submit_with(device, op, offset, len, data)
    }

    pub(crate) fn submit_with(
        &mut self,
        device: DeviceKey,
        op: BlockOp,
        offset: u64,
        len: u64,
        data: Option<Buffer>,
    ) -> u64 {
        let opener = self.opener(device);
        self.submit_by(&opener, op, offset, len, data)
    }

    /// The user whose operations those are that name no other.
    fn opener(&mut self, device: DeviceKey) -> Opener {
        let client = &self.client;
        let opener = self.openers.entry(device).or_insert_with(|| client.opener(device));
        opener.clone()
    }

    pub(crate) fn submit_by(
        &mut self,
        opener: &Opener,
        op: BlockOp,
        offset: u64,
        len: u64,
        data: Option<Buffer>,
    ) -> u64 {
        self.user += 1;
        let request = BlockRequest {
            hint: 5,
            ..BlockRequest::new(self.user, op, offset, len).with_data(data)
        };
        self.client.submit(opener, request);
        self.user
    }

    /// How the only operation that has ended did so.
    pub(crate) fn done(&mut self, user: u64) -> Result<(), Errno> {
        match self.output() {
            Output::Done {
                user: u, completion, ..
            } if u == user => {
                self.give(completion.data);
                completion.result
            }
            other => panic!("{other:?}"),
        }
    }

    /// Submits an operation that is refused at once, and returns the error.
    pub(crate) fn refused(&mut self, device: DeviceKey, op: BlockOp, offset: u64, len: u64) -> Errno {
        let user = self.submit(device, op, offset, len);
        assert!(self.sent().is_empty());
        self.done(user).unwrap_err()
    }
}

pub(crate) fn message(s: &Submission) -> ClientMsg {
    ClientMsg::parse(&s.header).unwrap()
}

pub(crate) fn io(s: &Submission) -> MsgIo {
    match message(s) {
        ClientMsg::Io(m) => m,
        other => panic!("{other:?}"),
    }
}

/// 8 MiB with everything that RNBD 2.2 can do.
pub(crate) fn open_rsp(id: u32) -> MsgOpenRsp {
    let mut rsp = MsgOpenRsp::new();
    rsp.device_id.set(id);
    rsp.nsectors.set(8 * MIB / 512);
    rsp.logical_block_size.set(512);
    rsp.physical_block_size.set(4096);
    rsp.max_discard_sectors.set(2048);
    rsp.max_write_zeroes_sectors.set(1024);
    rsp.discard_granularity.set(4096);
    rsp.cache_policy = CACHE_FUA | CACHE_WRITEBACK;
    rsp
}

/// The same of a server of ours, on a machine that has been booted this time.
pub(crate) fn open_rsp_of(id: u32, boot: &str) -> MsgOpenRsp {
    let mut rsp = open_rsp(id);
    rsp.offer_block_status();
    rsp.set_instance(Some(Instance::of([boot.as_bytes()])));
    rsp
}

pub(crate) fn zeroes(fua: bool) -> BlockOp {
    BlockOp::WriteZeroes { fua, may_unmap: false }
}

pub(crate) fn lost() -> IoError {
    IoError::Path(PathError::PeerDisconnected)
}
