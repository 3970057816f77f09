//! Order and accounting of what is posted.

use std::collections::BTreeSet;

use proptest::prelude::*;
use roce_verbs::{
    Instant, QpCaps,
    provider::{DeviceIx, KeyKind, PdId, Provider, QpSpec, Registration},
};

use super::*;
use crate::provider::{Keys, Posted, Scripted};

const CHUNKS: u32 = 8;
const SIZE: u32 = 8192;

struct Bed {
    provider: Scripted,
    pages: Arc<Pages>,
    chunks: MrInfo,
    info: InfoMemory,
    keys: Vec<KeyId>,
    renewal: Renewal,
    qp: QpId,
    out: Outgoing,
}

fn register(provider: &mut Scripted, pd: PdId, len: usize, access: AccessFlags) -> (Arc<Pages>, MrInfo) {
    let pages = Pages::allocate(len).unwrap();
    let what = Registration {
        memory: pages.clone(),
        offset: 0,
        len,
        iova: None,
        access,
    };
    let mr = provider.register(pd, &what).unwrap();
    (pages, mr)
}

impl Bed {
    fn new(device: Keys, slots: u32) -> Self {
        let mut provider = Scripted::new(&[device]);
        provider.auto_complete = false;
        let pd = provider.alloc_pd(DeviceIx(0)).unwrap();
        let access = CHUNK_ACCESS | AccessFlags::MW_BIND;
        let (pages, chunks) = register(&mut provider, pd, (CHUNKS * SIZE) as usize, access);
        let (info_pages, mr) = register(&mut provider, pd, 4096, AccessFlags::LOCAL_WRITE);
        let cq = provider.create_cq(DeviceIx(0), 100).unwrap();
        let spec = QpSpec {
            pd,
            cq,
            caps: QpCaps {
                max_send_wr: slots,
                ..QpCaps::default()
            },
            signal_all: false,
        };
        let qp = provider.create_qp(&spec).unwrap();
        let strategy = KeyStrategy::for_chunks(&provider.devices()[0], true);
        let renewal = Renewal::of(strategy, &provider.devices()[0]);
        let kind = match strategy {
            KeyStrategy::FastRegistration => Some(KeyKind::FastRegistration),
            KeyStrategy::Window1 => Some(KeyKind::Window1),
            _ => None,
        };
        let keys = kind.map_or(Vec::new(), |kind| {
            (0..CHUNKS).map(|_| provider.alloc_key(pd, kind).unwrap()).collect()
        });
        Self {
            provider,
            pages,
            chunks,
            info: InfoMemory { pages: info_pages, mr },
            keys,
            renewal,
            qp,
            out: Outgoing::new(slots),
        }
    }

    fn answer(&mut self, chunk: u16, errno: u16, read: Option<(u32, bool)>) {
        let dest = read.map(|(len, _)| SgDesc::new(0x1000 * u64::from(chunk), 0x100 + u32::from(chunk), len));
        let answer = Answer::new(chunk, errno.into(), dest, read.is_some_and(|(_, inval)| inval));
        self.out.queue.push(ServerWork::answer(answer, self.renewal)).unwrap();
    }

    fn post(&mut self) -> Done {
        let mut done = Done::default();
        let layout = ChunkLayout::new(CHUNKS, SIZE).unwrap();
        let mut cx = Cx {
            now: Instant::ZERO,
            provider: &mut self.provider,
            random: &mut |_| (),
        };
        let at = PostContext {
            qp: self.qp,
            chunks: &self.chunks,
            layout: &layout,
            keys: &self.keys,
            renewal: self.renewal,
            info: Some(&self.info),
        };
        self.out.post(&mut cx, &at, &mut done).unwrap();
        done
    }

    /// Completes the posted work requests. Returns chunks whose keys were taken back by work requests.
    fn complete(&mut self) -> Vec<u16> {
        self.provider.complete_sends(self.qp);
        let (mut wcs, mut chunks) = (Vec::new(), Vec::new());
        self.provider.poll_completions(&mut wcs, 1000).unwrap();
        for (_, wc) in wcs {
            let mark = Mark::decode(wc.wr_id).unwrap();
            let signals = match mark.kind {
                MarkKind::Revoke => {
                    let (chunk, signals) = revoked(mark.index);
                    chunks.push(chunk);
                    signals
                }
                _ => mark.index,
            };
            self.out.reclaim(signals);
        }
        chunks
    }
}

/// Kinds of what was posted, with a bar between calls.
fn kinds(log: Vec<(QpId, Posted)>) -> Vec<&'static str> {
    let (mut out, mut last) = (Vec::new(), 0);
    for (_, posted) in log {
        if let Posted::Send { call, .. } = posted
            && call != last
        {
            out.push("|");
            last = call;
        }
        out.push(match posted {
            Posted::Send { op, .. } => match op {
                SendOp::Write(_) => "write",
                SendOp::SendWithInv(_) => "inv",
                SendOp::SendWithImm(_) => "key",
                SendOp::WriteWithImm(..) => "imm",
                SendOp::Send => "info",
                other => panic!("{other:?}"),
            },
            Posted::Grant(..) => "grant",
            Posted::Revoke(_) => "revoke",
            Posted::Recvs(_) => "recvs",
        });
    }
    out
}

/// A read, a write with a heartbeat behind it, a read that failed, one whose key the client ends itself.
fn mixed(bed: &mut Bed) -> Vec<&'static str> {
    bed.answer(3, 0, Some((100, true)));
    bed.answer(1, 0, None);
    bed.out.queue.push(ServerWork::imm(Imm::HbAck)).unwrap();
    bed.answer(2, 5, Some((100, true)));
    bed.answer(0, 0, Some((200, false)));
    let done = bed.post();
    assert_eq!(done.sent[..], [3, 1, 2, 0]);
    kinds(bed.provider.take_log())
}

#[test]
fn a_turns_answers_leave_by_kind_in_one_call_when_keys_are_granted_at_once() {
    let mut bed = Bed::new(Keys::INSTANT, 64);
    let posted = mixed(&mut bed);
    let grants = ["grant"; 4];
    let sends = ["|", "write", "write", "inv", "inv", "key", "key", "imm", "key", "key"];
    assert_eq!(posted, [&grants[..], &sends].concat());
}

#[test]
fn keys_that_are_work_requests_come_between_the_data_and_the_answers() {
    for device in [Keys::QUEUED, Keys::WINDOWS] {
        let mut bed = Bed::new(device, 64);
        let data = ["|", "write", "write", "inv", "inv"];
        let answers = ["|", "key", "key", "imm", "key", "key"];
        let expected = [&data[..], &["grant"; 4], &answers].concat();
        assert_eq!(mixed(&mut bed), expected, "{device:?}");
    }
}

/// The client of Linux 6.1 takes a write that has failed for done, if it has the answer before the acknowledgement.
#[test]
fn without_keys_an_answer_is_an_empty_write() {
    let mut bed = Bed::new(Keys::STATIC, 64);
    let expected = ["|", "write", "write", "inv", "inv", "imm", "imm", "imm", "imm", "imm"];
    assert_eq!(mixed(&mut bed), expected);
}

#[test]
fn an_answer_brings_its_data_and_a_key_that_opens_its_chunk() {
    let mut bed = Bed::new(Keys::INSTANT, 64);
    bed.pages.write(2 * SIZE as usize, b"from the disk").unwrap();
    bed.answer(2, 0, Some((13, true)));
    bed.post();
    let sends = bed.provider.take_sends(bed.qp);
    let dest = RemoteAddr {
        addr: 0x2000,
        rkey: RKey(0x102),
    };
    assert_eq!(sends[0], (SendOp::Write(dest), b"from the disk".to_vec()));
    assert_eq!(sends[1], (SendOp::SendWithInv(RKey(0x102)), Vec::new()));
    let reply = IoReply {
        msg_id: 2,
        errno: 0,
        invalidated: true,
    };
    assert_eq!(sends[2].0, SendOp::SendWithImm(Imm::IoRsp(reply).encode()));
    let message = RkeyRsp::parse(&sends[2].1).unwrap();
    assert_eq!(message.buf_id.get(), 2);
    let (key, start) = (RKey(message.rkey.get()), bed.chunks.addr + 2 * u64::from(SIZE));
    bed.provider.peer_write(bed.qp, key, start, b"next").unwrap();
    let behind = start + u64::from(SIZE);
    assert!(bed.provider.peer_write(bed.qp, key, behind, b"next").is_err());
}

#[test]
fn the_information_names_each_chunk_or_all_at_once() {
    let layout = ChunkLayout::new(CHUNKS, SIZE).unwrap();
    for (device, pieces) in [
        (Keys::INSTANT, 8),
        (Keys::QUEUED, 8),
        (Keys::WINDOWS, 8),
        (Keys::STATIC, 1),
    ] {
        let mut bed = Bed::new(device, 64);
        bed.out.queue.push(ServerWork::info(CHUNKS, bed.renewal)).unwrap();
        bed.post();
        let sends = bed.provider.take_sends(bed.qp);
        let [(SendOp::Send, bytes)] = &sends[..] else {
            panic!("{sends:?}");
        };
        let rsp = InfoRsp::parse(bytes).unwrap();
        assert_eq!(rsp.descriptors().len(), pieces, "{device:?}");
        for (i, chunk) in rsp.chunks(&layout).unwrap().iter().enumerate() {
            assert_eq!(chunk.addr, bed.chunks.addr + i as u64 * u64::from(SIZE));
            let key = RKey(chunk.rkey);
            bed.provider.peer_write(bed.qp, key, chunk.addr, &[i as u8]).unwrap();
        }
    }
}

#[test]
fn keys_that_are_granted_and_ended_at_once_take_no_slots() {
    let mut bed = Bed::new(Keys::INSTANT, 64);
    bed.answer(0, 0, Some((10, true)));
    bed.answer(1, 0, None);
    bed.post();
    assert_eq!(bed.provider.slots(bed.qp), 4, "data, end of the key, two answers");
    let mut bed = Bed::new(Keys::QUEUED, 64);
    bed.answer(0, 0, Some((10, true)));
    bed.answer(1, 0, None);
    bed.post();
    assert_eq!(bed.provider.slots(bed.qp), 6, "and two grants");
}

#[derive(Clone, Debug)]
enum Step {
    Answer(u16, u16, Option<(u32, bool)>),
    Revoke(u16),
    Beat,
    Post,
    Complete,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let chunk = 0..CHUNKS as u16;
    let read = proptest::option::of((1u32..100, any::<bool>()));
    let step = prop_oneof![
        4 => (chunk.clone(), 0u16..2, read).prop_map(|(c, e, r)| Step::Answer(c, e, r)),
        4 => chunk.prop_map(Step::Revoke),
        1 => Just(Step::Beat),
        4 => Just(Step::Post),
        1 => Just(Step::Complete),
    ];
    proptest::collection::vec(step, 1..400)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// In the smallest queue: nothing is posted beyond it (the provider looks), nothing is stuck, each answer leaves once,
    /// behind its data and the end of its key.
    #[test]
    fn whatever_is_pushed_leaves_in_order(steps in steps(), queued in any::<bool>()) {
        let device = if queued { Keys::QUEUED } else { Keys::WINDOWS };
        let mut bed = Bed::new(device, crate::sendq::MIN_SEND_WR);
        bed.provider.auto_complete = false;
        // One kind of work at a time for a chunk, as its state allows.
        let (mut busy, mut posted) = (BTreeSet::new(), Vec::new());
        let (mut pushed, mut ended) = (0, 0);
        let finish = |bed: &mut Bed, busy: &mut BTreeSet<u16>, ended: &mut usize| {
            let done = bed.post();
            for chunk in done.sent.iter().chain(&done.revoked) {
                busy.remove(chunk);
                *ended += 1;
            }
        };
        for step in steps {
            match step {
                Step::Answer(chunk, errno, read) if busy.insert(chunk) => {
                    bed.answer(chunk, errno, read);
                    pushed += 1;
                }
                Step::Revoke(chunk) if busy.insert(chunk) => {
                    bed.out.queue.push(ServerWork::revoke(chunk)).unwrap();
                    pushed += 1;
                }
                Step::Answer(..) | Step::Revoke(_) => {}
                Step::Beat => bed.out.queue.push(ServerWork::imm(Imm::HbAck)).unwrap(),
                Step::Post => finish(&mut bed, &mut busy, &mut ended),
                Step::Complete => for chunk in bed.complete() {
                    busy.remove(&chunk);
                    ended += 1;
                },
            }
        }
        for _ in 0..1000 {
            finish(&mut bed, &mut busy, &mut ended);
            for chunk in bed.complete() {
                busy.remove(&chunk);
                ended += 1;
            }
        }
        prop_assert!(busy.is_empty() && !bed.out.queue.is_ready(), "stuck: {:?}", bed.out);
        prop_assert_eq!(pushed, ended);
        posted.extend(bed.provider.take_log());
        let mut before: BTreeSet<u32> = BTreeSet::new();
        for (_, posted) in posted {
            let Posted::Send { op, .. } = posted else { continue };
            match op {
                SendOp::SendWithInv(key) => { before.insert(key.0); }
                SendOp::SendWithImm(imm) => {
                    let Ok(Imm::IoRsp(reply)) = Imm::decode(imm) else { panic!("{imm:#x}") };
                    let ended = before.remove(&(0x100 + reply.msg_id));
                    prop_assert_eq!(ended, reply.invalidated, "chunk {}", reply.msg_id);
                }
                _ => {}
            }
        }
    }
}
