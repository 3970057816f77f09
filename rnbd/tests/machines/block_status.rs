//! Block status: what the client asks of which server, what it believes, and what the server takes.

use rnbd::{
    Errno,
    block::{BlockOp, Extent},
    client::{OnLoss, output::Output},
    proto::{AccessMode, F_PREFLUSH, IoOp, MsgIo, MsgOpenRsp, status},
    server::Limits,
};
use rtrs::{
    Direction::{Read, Write},
    IoError,
    client::{
        buffers::{Buffer, Buffers},
        config::ConType,
    },
};
use zerocopy::IntoBytes;

use crate::served::Action;
use crate::{
    bench::{MIB, Submission, geometry, with_cx},
    client_bench::{Bench, S, io, open_rsp},
    server::{self, A, data_offset, disk_op, response, with_flags},
};

const ALL: BlockOp = BlockOp::BlockStatus { most: 510 };
const TIB: u64 = 1 << 40;

/// Answer of a server of ours to an open request.
fn ours(id: u32) -> MsgOpenRsp {
    let mut rsp = open_rsp(id);
    rsp.offer_block_status();
    rsp
}

impl Bench {
    /// How the only block status that has ended did so.
    fn status(&mut self, user: u64) -> Result<Vec<Extent>, Errno> {
        match self.output() {
            Output::Done {
                user: u, completion, ..
            } if u == user => completion.result.map(|()| completion.extents),
            other => panic!("{other:?}"),
        }
    }

    /// The same, among news of the device.
    fn status_among(&mut self, user: u64) -> Result<Vec<Extent>, Errno> {
        let mut ends = self.outputs().into_iter().filter_map(|output| match output {
            Output::Done {
                user: u, completion, ..
            } if u == user => Some(completion.result.map(|()| completion.extents)),
            Output::State(..) | Output::Geometry(..) => None,
            other => panic!("{other:?}"),
        });
        let result = ends.next().expect("its end");
        assert!(ends.next().is_none());
        result
    }
}

fn range(s: &Submission) -> (u32, u64, u64) {
    let m = io(s);
    let sectors = u64::from(m.status_sectors.get());
    (m.device_id.get(), m.sector.get() * 512, sectors * 512)
}

#[test]
fn a_server_that_offers_it_is_asked() {
    let mut bench = Bench::up();
    let device = bench.map("disk", &ours(7));
    for most in [510, 1] {
        let user = bench.submit(device, BlockOp::BlockStatus { most }, 4096, MIB);
        let s = bench.sent_one();
        assert_eq!(&s.header[..], status::request(7, 4096, MIB, 4096, most).as_bytes());
        assert_eq!((s.con, s.direction), (ConType::Io(5), Read));
        assert_eq!(s.data.as_ref().map(Buffer::len), Some(4096));
        let found = [Extent::hole(4096), Extent::data(8192), Extent::hole(512)];
        bench.answer_with(s, &status::answer(&found, most));
        assert_eq!(bench.status(user).unwrap(), found[..found.len().min(most as usize)]);
    }
    let c = bench.client.counters(device).unwrap();
    assert_eq!((c.completed, c.failed, c.reads, c.read_bytes), (2, 0, 0, 0));
    assert_eq!(bench.lent(), 0);
}

#[test]
fn a_long_range_is_asked_about_from_its_beginning() {
    let mut bench = Bench::up();
    let mut rsp = ours(7);
    rsp.nsectors.set(8 * TIB / 512);
    rsp.logical_block_size.set(4096);
    let device = bench.map("disk", &rsp);
    let user = bench.submit(device, ALL, TIB, 7 * TIB);
    let s = bench.sent_one();
    let most = 2 * TIB - 4096;
    assert_eq!(range(&s), (7, TIB, most));
    bench.answer_with(s, &status::answer(&[Extent::hole(most)], 510));
    assert_eq!(bench.status(user).unwrap(), [Extent::hole(most)]);
}

#[test]
fn where_it_is_not_offered_all_is_data() {
    let (mut bench, device) = Bench::mapped();
    let user = bench.submit(device, ALL, 4096, 8 * MIB - 4096);
    assert!(bench.sent().is_empty());
    assert_eq!(bench.status(user).unwrap(), [Extent::data(8 * MIB - 4096)]);
    assert_eq!(bench.lent(), 0);
}

#[test]
fn what_makes_no_sense_is_not_asked_for() {
    let mut bench = Bench::up();
    let device = bench.map("disk", &ours(7));
    for (offset, len, error) in [
        (0, 0, Errno::EINVAL),
        (256, 512, Errno::EINVAL),
        (0, 8 * MIB + 512, Errno::EIO),
        (u64::MAX - 511, 512, Errno::EIO),
    ] {
        let user = bench.submit(device, ALL, offset, len);
        assert!(bench.sent().is_empty());
        assert_eq!(bench.status(user), Err(error), "{offset}, {len}");
    }
    // Data is nothing of its, and comes back.
    let buffer = bench.buffer(512);
    let user = bench.submit_with(device, ALL, 0, 512, Some(buffer));
    assert_eq!(bench.done(user), Err(Errno::EINVAL));
    assert_eq!(bench.lent(), 0);
    // To read is right enough.
    let ro = bench.client.map(S, "ro", AccessMode::ReadOnly);
    let open = bench.sent_one();
    bench.answer_with(open, ours(8).as_bytes());
    bench.outputs();
    bench.submit(ro, ALL, 0, 512);
    assert_eq!(range(&bench.sent_one()), (8, 0, 512));
}

/// A kernel's server whose answer to the open request had the magic in it by accident may refuse the request, or read. Others may
/// say anything.
#[test]
fn a_server_that_can_not_after_all_is_asked_once() {
    let data = |len| Extent::data(len);
    let hostile = |count: u32, extents: &[Extent]| {
        let mut bytes = status::answer(extents, 510);
        bytes[8..12].copy_from_slice(&count.to_le_bytes());
        bytes
    };
    let answers = [
        Err(IoError::Remote(Errno::EINVAL.raw())),
        Err(IoError::Remote(Errno::EIO.raw())),
        Ok(vec![0; 4096]),
        Ok(vec![0x5a; 4096]),
        Ok(hostile(0, &[data(512)])),
        Ok(hostile(511, &[data(512); 510])),
        Ok(hostile(u32::MAX, &[data(512)])),
        Ok(hostile(2, &[data(512)])),
        Ok(hostile(1, &[data(8192 + 512)])),
        Ok(hostile(2, &[data(4096), data(u64::MAX)])),
    ];
    for (n, answer) in answers.into_iter().enumerate() {
        let mut bench = Bench::up();
        let device = bench.map("disk", &ours(7));
        let user = bench.submit(device, ALL, 4096, 8192);
        let s = bench.sent_one();
        match answer {
            Ok(bytes) => bench.answer_with(s, &bytes),
            Err(e) => bench.answer(s, Err(e)),
        }
        assert_eq!(bench.status(user).unwrap(), [data(8192)], "answer {n}");
        let user = bench.submit(device, ALL, 0, MIB);
        assert!(bench.sent().is_empty(), "it is asked again after answer {n}");
        assert_eq!(bench.status(user).unwrap(), [data(MIB)]);
        assert_eq!(bench.lent(), 0);

        // Another may be there when it has opened the device again.
        bench.lose();
        bench.opened_again(9);
        bench.outputs();
        bench.submit(device, ALL, 0, 512);
        assert!(bench.sent().is_empty(), "it does not offer it now");
        bench.outputs();
        bench.lose();
        let open = bench.come_back();
        bench.answer_with(open, ours(10).as_bytes());
        bench.outputs();
        bench.submit(device, ALL, 0, 512);
        assert_eq!(range(&bench.sent_one()), (10, 0, 512));
    }
}

#[test]
fn it_outlives_its_session_as_a_read_does() {
    for again in [true, false] {
        let mut bench = Bench::up();
        let device = bench.map("disk", &ours(7));
        bench.client.set_on_loss(device, OnLoss::Queue(None)).unwrap();
        let asked = bench.submit(device, ALL, 0, 8192);
        let in_flight = bench.sent();
        assert_eq!(in_flight.len(), 1);
        bench.lose_all(in_flight);
        let open = bench.come_back();
        let rsp = if again { ours(8) } else { open_rsp(8) };
        bench.answer_with(open, rsp.as_bytes());
        let sent = bench.sent();
        assert_eq!(sent.len(), usize::from(again));
        for s in sent {
            assert_eq!(range(&s), (8, 0, 8192));
            bench.answer_with(s, &status::answer(&[Extent::hole(8192)], 510));
        }
        let want = if again { Extent::hole(8192) } else { Extent::data(8192) };
        assert_eq!(bench.status_among(asked).unwrap(), [want]);
    }
    let mut bench = Bench::up();
    let device = bench.map("disk", &ours(7));
    let user = bench.submit(device, ALL, 0, 8192);
    let in_flight = bench.sent();
    bench.lose_all(in_flight);
    assert_eq!(bench.status_among(user), Err(Errno::ECONNABORTED));
    let user = bench.submit(device, ALL, 0, 8192);
    assert_eq!(bench.status(user), Err(Errno::ECONNABORTED));
    assert_eq!(bench.lent(), 0);
}

/// An answer that is late says nothing of the server that has the device open now.
#[test]
fn what_a_former_server_refuses_is_no_word_of_the_next() {
    let mut bench = Bench::up();
    let device = bench.map("disk", &ours(7));
    bench.client.set_on_loss(device, OnLoss::Queue(None)).unwrap();
    let first = bench.submit(device, ALL, 0, 8192);
    let mut sent = bench.sent();
    bench.lose();
    let open = bench.come_back();
    bench.answer_with(open, ours(8).as_bytes());
    bench.answer(sent.remove(0), Err(IoError::Remote(Errno::EINVAL.raw())));
    assert_eq!(bench.status_among(first).unwrap(), [Extent::data(8192)]);
    bench.submit(device, ALL, 0, 512);
    assert_eq!(range(&bench.sent_one()), (8, 0, 512));
}

#[test]
fn a_session_that_moves_less_has_less_room_for_the_answer() {
    let mut bench = Bench::up();
    let device = bench.map("disk", &ours(7));
    let user = bench.submit(device, ALL, 0, MIB);
    let s = bench.sent_one();
    let too_long = IoError::TooLong {
        what: "data",
        len: 4096,
        max: 2048,
    };
    bench.answer(s, Err(too_long));
    let s = bench.sent_one();
    assert_eq!(
        (io(&s).bi_size.get(), s.data.as_ref().map(Buffer::len)),
        (2048, Some(2048))
    );
    bench.answer_with(s, &status::answer(&[Extent::hole(MIB)], 254));
    let ended = bench.outputs().into_iter().find_map(|output| match output {
        Output::Done {
            user: u, completion, ..
        } if u == user => Some(completion.result.map(|()| completion.extents)),
        _ => None,
    });
    assert_eq!(ended, Some(Ok(vec![Extent::hole(MIB)])));
    assert_eq!(bench.client.counters(device).unwrap().repeated, 1);
}

#[test]
fn without_a_buffer_it_waits_for_one() {
    let mut bench = Bench::with_limit(256 << 10);
    bench.agree();
    let device = bench.map("disk", &ours(7));
    let mut all = Vec::new();
    while let Ok(buffer) = with_cx(|cx| bench.client.rtrs_mut().pools.get_mut(&S).unwrap().take(cx, 4096)) {
        all.push(buffer);
    }
    let user = bench.submit(device, ALL, 0, 8192);
    assert!(bench.sent().is_empty() && bench.outputs().is_empty());
    bench.give(all.pop());
    let s = bench.sent_one();
    bench.answer_with(s, &status::answer(&[Extent::data(512)], 510));
    assert_eq!(bench.status(user).unwrap(), [Extent::data(512)]);
    for buffer in all {
        bench.give(Some(buffer));
    }
    assert_eq!(bench.client.rtrs().pools.get(&S).map_or(1, Buffers::lent), 0);
}

fn ask(device: u32, offset: u64, len: u64, room: u32, most: u32) -> MsgIo {
    status::request(device, offset, len, room, most)
}

#[test]
fn the_server_offers_it_and_asks_the_disk() {
    let mut bench = server::Bench::new(Limits::default());
    let key = bench.ask_open(A, "disk", AccessMode::ReadOnly);
    let store = match bench.action() {
        Action::Open { ticket, .. } => {
            let mut read_only = geometry(8 * MIB);
            read_only.read_only = true;
            bench.opened(ticket, read_only, "disk")
        }
        other => panic!("{other:?}"),
    };
    let rsp = response(&bench.action(), key);
    assert!(rsp.offers_block_status());
    let id = rsp.device_id.get();
    for (room, data_len, wanted, most) in [
        (4096, 4096, 0, 510),
        (4096, 8192, 510, 510),
        (512, 512, 0, 62),
        (4096, 4096, 1, 1),
    ] {
        // A range that only the disk can judge is no matter of the server's.
        let key = bench.ask(A, Read, ask(id, MIB, 1 << 40, room, wanted).as_bytes(), data_len);
        let (ticket, op) = disk_op(&bench.action());
        assert_eq!((op.store, op.op), (store, BlockOp::BlockStatus { most }));
        assert_eq!((op.offset, op.len, op.data), (MIB, 1 << 40, data_offset(key)));
        let len = status::answer_len(most);
        assert_eq!(op.data_len(), Some(len as u64));
        bench.server.io_done(ticket, Ok(()));
        let mut actions = bench.actions();
        assert_eq!(actions.pop(), Some(Action::Answer(key, 0)));
        // Nothing of earlier requests is shown.
        let zero = Action::Zero {
            request: key,
            from: data_offset(key) + len,
            len: data_len as usize - len,
        };
        let zeroed = if data_len as usize > len { vec![zero] } else { vec![] };
        assert_eq!(actions, zeroed);
    }
    let key = bench.ask(A, Read, ask(id, 0, 512, 4096, 1).as_bytes(), 4096);
    let (ticket, _) = disk_op(&bench.action());
    bench.server.io_done(ticket, Err(Errno::EIO));
    assert_eq!(bench.action(), Action::Answer(key, Errno::EIO.raw()));
    let c = bench.counters();
    assert_eq!((c.requests, c.failed, c.malformed, c.read_bytes), (5, 1, 0, 0));
}

#[test]
fn what_makes_no_sense_is_refused_without_the_disk() {
    let mut bench = server::Bench::new(Limits::default());
    let (id, _) = bench.open(A, "disk", geometry(8 * MIB));
    let whole = ask(id, 0, 512, 4096, 0);
    for (what, direction, m, room, error) in [
        ("as a write", Write, whole, 4096, Errno::EINVAL),
        ("more than the room", Read, whole, 4095, Errno::EINVAL),
        ("no room", Read, ask(id, 0, 512, 0, 0), 4096, Errno::EINVAL),
        (
            "half a sector of room",
            Read,
            ask(id, 0, 512, 256, 0),
            4096,
            Errno::EINVAL,
        ),
        ("no range", Read, ask(id, 0, 0, 4096, 0), 4096, Errno::EINVAL),
        ("overflow", Read, ask(id, u64::MAX, 512, 4096, 0), 4096, Errno::EIO),
        ("not open", Read, ask(id + 1, 0, 512, 4096, 0), 4096, Errno::ENOTCONN),
    ] {
        let mut m = m;
        if what == "overflow" {
            m.sector.set(u64::MAX);
        }
        assert_eq!(bench.errno(A, direction, m.as_bytes(), room), error.raw(), "{what}");
    }
    // One byte less, and the range is gone.
    assert_eq!(bench.errno(A, Read, &whole.as_bytes()[..31], 4096), Errno::EINVAL.raw());
    // A flush first is nothing new.
    bench.ask(A, Read, with_flags(whole, F_PREFLUSH).as_bytes(), 4096);
    let (ticket, op) = disk_op(&bench.action());
    assert_eq!(op.op, BlockOp::Flush);
    bench.server.io_done(ticket, Ok(()));
    assert_eq!(disk_op(&bench.action()).1.op, ALL);
    assert_eq!(whole.rw.get() & 0xff, IoOp::BlockStatus as u32);
}
