//! What is tried. Every case has a session of its own, named like the case.

use roce::SendOp;
use rtrs::proto::{Imm, InfoReq, IoReply, MsgFlags, RdmaRead, RdmaWrite, SgDesc};
use zerocopy::IntoBytes as _;

use super::{
    Way,
    client::{Client, Outcome},
};
use crate::Error;

/// What came of a case: the outcome of each step that matters.
type Seen = Result<String, Error>;

/// One thing that a client may do.
pub(super) struct Case {
    pub(super) name: &'static str,
    /// Linux does not survive it, or may not.
    pub(super) crashes_linux: bool,
    pub(super) run: fn(&[Way; 2], &str) -> Seen,
}

const fn case(name: &'static str, run: fn(&[Way; 2], &str) -> Seen) -> Case {
    Case {
        name,
        crashes_linux: false,
        run,
    }
}

/// All cases.
pub(super) const CASES: &[Case] = &[
    case("proper", |w, name| opened(w, name, |c| both(c.beat()?, c.ask(0)?))),
    case("wrong-magic", |w, _| first(w, |b| b[2] ^= 1)),
    case("other-major-version", |w, _| first(w, |b| b[5] = 3)),
    case("other-minor-version", |w, _| first(w, |b| b[4] = 9)),
    case("no-private-data", |w, _| first(w, Vec::clear)),
    case("private-data-cut-off-before-uuids", |w, _| first(w, |b| b.truncate(12))),
    case("cid-not-below-cid-num", |w, _| first(w, |b| b[6] = 2)),
    case("cid-num-0", |w, _| first(w, |b| b[8] = 0)),
    case("cid-num-1", |w, _| first(w, |b| b[8] = 1)),
    case("cid-num-4096", |w, _| first(w, |b| (b[8], b[9]) = (0, 16))),
    case("cid-num-4097", |w, _| first(w, |b| (b[8], b[9]) = (1, 16))),
    case("session-unknown-first-conn-0", |w, _| first(w, |b| b[44] = 0)),
    case("session-unknown-first-conn-1", |w, _| first(w, |_| {})),
    case("cid-1-before-0", |w, _| text(client(w)?.connect(1)?)),
    case("cid-twice", |w, _| {
        let mut c = client(w)?;
        accept(&mut c, 0)?;
        both(c.connect(0)?, c.connect(1)?)
    }),
    case("cid-num-changed", |w, _| {
        let mut c = client(w)?;
        accept(&mut c, 0)?;
        let request = c.request(1, 3);
        both(c.connect_with(1, request)?, c.connect(1)?)
    }),
    case("connection-of-a-connected-path", |w, name| {
        let mut c = client(w)?;
        let request = c.request(1, 3);
        accept_with(&mut c, 0, 3)?;
        accept_with(&mut c, 1, 3)?;
        accept_with(&mut c, 2, 3)?;
        expect(inform(&c, name)?, Outcome::Informed)?;
        both(c.connect_with(7, request)?, c.ask(0)?)
    }),
    case("connecting-path-anew-recon-cnt-equal", |w, _| {
        let mut c = client(w)?;
        accept(&mut c, 0)?;
        both(c.connect(0)?, c.connect(1)?)
    }),
    case("connecting-path-anew-recon-cnt-higher", |w, _| {
        let mut c = client(w)?;
        accept(&mut c, 0)?;
        c.recon_cnt += 1;
        both(c.connect(0)?, c.connect(1)?)
    }),
    case("later-connection-with-higher-recon-cnt", |w, name| {
        let mut c = client(w)?;
        accept(&mut c, 0)?;
        c.recon_cnt += 1;
        both(c.connect(1)?, inform(&c, name)?)
    }),
    case("connected-path-anew-recon-cnt-equal", |w, name| anew(w, name, 5)),
    case("connected-path-anew-recon-cnt-lower", |w, name| anew(w, name, 4)),
    case("connected-path-anew-recon-cnt-higher", |w, name| anew(w, name, 6)),
    case("path-anew-after-its-end", after_its_end),
    case("second-path-same-addresses", |w, name| {
        second(w, name, 0, false, |c, d| both(d.connect(0)?, c.ask(0)?))
    }),
    case("second-path-of-unfinished-session", |w, _| {
        let mut c = client(w)?;
        accept(&mut c, 0)?;
        let mut d = sibling(w, &c, 1, false)?;
        text(d.connect(0)?)
    }),
    case("second-path-first-conn-0", |w, name| {
        second(w, name, 1, false, |c, d| two_paths(c, d, name))
    }),
    case("second-path-first-conn-1", |w, name| {
        second(w, name, 1, true, |c, d| two_paths(c, d, name))
    }),
    case("second-path-other-name", |w, name| {
        second(w, name, 1, false, |c, d| two_paths(c, d, "another"))
    }),
    case("second-path-same-uuid", |w, name| {
        second(w, name, 1, false, |c, d| {
            d.path = c.path;
            both(d.connect(0)?, c.ask(0)?)
        })
    }),
    case("second-path-outlives-the-first", |w, name| {
        second(w, name, 1, false, |c, d| {
            two_paths(c, d, name)?;
            c.leave();
            both(d.beat()?, d.ask(2)?)
        })
    }),
    case("one-msg-id-on-two-paths", |w, name| {
        second(w, name, 1, false, |c, d| {
            d.open(name)?;
            c.write(3)?;
            d.write(3)?;
            both(c.answer()?, d.answer()?)
        })
    }),
    case("name-of-another-session", |w, name| {
        opened(w, name, |c| {
            let mut d = client(w)?;
            d.connected()?;
            both(inform(&d, name)?, c.ask(0)?)
        })
    }),
    case("information-short", |w, name| information(w, name, |b| b.truncate(100))),
    case("information-long", |w, name| information(w, name, |b| b.push(0))),
    case("information-of-another-type", |w, name| {
        information(w, name, |b| b[0] = 1)
    }),
    case("name-with-slash", |w, name| information(w, name, |b| b[3] = b'/')),
    case("name-with-dot", |w, name| information(w, name, |b| b[3] = b'.')),
    Case {
        crashes_linux: true,
        ..case("name-without-end", |w, name| {
            information(w, name, |b| b[2..257].fill(b'x'))
        })
    },
    case("name-not-utf-8", |w, name| information(w, name, |b| b[3] = 0xff)),
    case("name-with-control-character", |w, name| {
        information(w, name, |b| b[3] = b'\n')
    }),
    Case {
        crashes_linux: true,
        ..case("name-empty", |w, name| information(w, name, |b| b[2..257].fill(0)))
    },
    case("information-before-all-connections", |w, name| {
        let mut c = client(w)?;
        accept(&mut c, 0)?;
        text(inform(&c, name)?)
    }),
    case("heartbeat-before-information", |w, _| {
        let mut c = client(w)?;
        c.connected()?;
        text(c.beat()?)
    }),
    case("immediate-before-information", |w, name| {
        let mut c = client(w)?;
        c.connected()?;
        c.imm(1, UNKNOWN)?;
        text(inform(&c, name)?)
    }),
    case("second-information", |w, name| {
        opened(w, name, |c| {
            c.deliver(0, SendOp::Send, InfoReq::new(name)?.as_bytes())?;
            text(c.ask(0)?)
        })
    }),
    case("send-on-io-connection", |w, name| {
        opened(w, name, |c| {
            c.deliver(1, SendOp::Send, b"hello")?;
            text(c.ask(0)?)
        })
    }),
    case("immediate-of-unknown-type", |w, name| with_imm(w, name, UNKNOWN)),
    case("immediate-of-an-answer", |w, name| {
        with_imm(w, name, Imm::IoRsp(IoReply::new(0, 0, false)).encode())
    }),
    case("heartbeat-on-io-connection", |w, name| {
        with_imm(w, name, Imm::HbMsg.encode())
    }),
    case("heartbeat-answer-unasked", |w, name| {
        opened(w, name, |c| {
            c.imm(0, Imm::HbAck.encode())?;
            both(c.beat()?, c.ask(0)?)
        })
    }),
    case("msg-id-out-of-range", |w, name| {
        opened(w, name, |c| {
            let layout = c.layout()?;
            c.imm(1, Imm::IoReq(layout.pack(layout.queue_depth(), 0)).encode())?;
            text(c.ask(0)?)
        })
    }),
    case("offset-beyond-the-chunk", |w, name| {
        opened(w, name, |c| {
            let layout = c.layout()?;
            c.imm(1, Imm::IoReq(layout.pack(1, layout.chunk_size())).encode())?;
            text(c.ask(0)?)
        })
    }),
    case("request-of-unknown-type", |w, name| message(w, name, 0, &[9; 8])),
    case("write-header-before-the-chunk", |w, name| {
        message(w, name, 0, RdmaWrite::new(100).as_bytes())
    }),
    case("read-header-before-the-chunk", |w, name| {
        message(w, name, 0, &read(100, &[SgDesc::new(0, 1, 512)]))
    }),
    case("read-of-two-pieces", |w, name| {
        message(w, name, 1024, &read(32, &[SgDesc::new(0, 1, 512); 2]))
    }),
    case("read-of-no-piece", |w, name| answered(w, name, 1024, &read(32, &[]))),
    case("read-of-an-empty-piece", |w, name| {
        answered(w, name, 1024, &read(32, &[SgDesc::new(0, 1, 0)]))
    }),
    case("one-connection-disconnected", |w, name| {
        opened(w, name, |c| {
            c.disconnect(1)?;
            text(c.end(0)?)
        })
    }),
];

/// An immediate value of type 5, which there is not.
const UNKNOWN: u32 = 0x5000_0000;

fn text(outcome: Outcome) -> Seen {
    Ok(outcome.to_string())
}

fn both(one: Outcome, two: Outcome) -> Seen {
    Ok(format!("{one}, {two}"))
}

fn expect(got: Outcome, want: Outcome) -> Result<(), Error> {
    match got == want {
        true => Ok(()),
        false => Err(format!("{got} instead of {want}").into()),
    }
}

fn client(ways: &[Way; 2]) -> Result<Client, Error> {
    Client::new(&ways[0].dev, ways[0].to)
}

fn accept(c: &mut Client, cid: u16) -> Result<(), Error> {
    accept_with(c, cid, 2)
}

fn accept_with(c: &mut Client, cid: u16, cid_num: u16) -> Result<(), Error> {
    let request = c.request(cid, cid_num);
    expect(c.connect_with(cid, request)?, Outcome::Accepted)
}

fn inform(c: &Client, name: &str) -> Result<Outcome, Error> {
    c.inform(InfoReq::new(name)?.as_bytes())
}

/// The first connection request of a path, spoiled.
fn first(ways: &[Way; 2], spoil: fn(&mut Vec<u8>)) -> Seen {
    let mut c = client(ways)?;
    let mut request = c.request(0, 2);
    spoil(&mut request);
    text(c.connect_with(0, request)?)
}

/// What follows a proper handshake.
fn opened(ways: &[Way; 2], name: &str, act: impl FnOnce(&mut Client) -> Seen) -> Seen {
    let mut c = client(ways)?;
    c.open(name)?;
    act(&mut c)
}

/// An immediate value on the I/O connection, and a proper request after it.
fn with_imm(ways: &[Way; 2], name: &str, imm: u32) -> Seen {
    opened(ways, name, |c| {
        c.imm(1, imm)?;
        text(c.ask(0)?)
    })
}

/// A message in chunk 1, for which `before` bytes of data and header lie before it, and a proper request in chunk 0 after it.
fn message(ways: &[Way; 2], name: &str, before: u32, bytes: &[u8]) -> Seen {
    opened(ways, name, |c| {
        c.io(1, before, bytes, before)?;
        text(c.ask(0)?)
    })
}

/// A message in chunk 1 that is answered, and a proper request in chunk 0 after that.
fn answered(ways: &[Way; 2], name: &str, before: u32, bytes: &[u8]) -> Seen {
    opened(ways, name, |c| {
        // The user's header, of which the type is none that RNBD has.
        let header = [0xff; 32];
        let bytes = [&header, bytes].concat();
        c.io(1, before - 32, &bytes, before)?;
        match c.answer()? {
            Outcome::Closed => text(Outcome::Closed),
            other => both(other, c.ask(0)?),
        }
    })
}

/// A read request.
fn read(usr_len: u16, pieces: &[SgDesc]) -> Vec<u8> {
    let head = RdmaRead::new(usr_len, MsgFlags::empty(), pieces.len() as u16);
    [head.as_bytes(), pieces.as_bytes()].concat()
}

/// A path that stands, of the fifth attempt, is connected again; then the old one is looked at.
fn anew(ways: &[Way; 2], name: &str, recon_cnt: u16) -> Seen {
    let mut c = client(ways)?;
    c.recon_cnt = 5;
    c.open(name)?;
    let mut again = Client::new(&ways[0].dev, ways[0].to)?;
    (again.session, again.path, again.recon_cnt) = (c.session, c.path, recon_cnt);
    both(again.connect(0)?, c.beat()?)
}

/// The same UUIDs again after the client has taken its leave. Until the server is done with the old path it refuses, as it should.
fn after_its_end(ways: &[Way; 2], name: &str) -> Seen {
    let mut c = client(ways)?;
    c.open(name)?;
    c.leave();
    let mut again = client(ways)?;
    (again.session, again.path) = (c.session, c.path);
    for _ in 0..600 {
        again.recon_cnt += 1;
        match again.connect(0)? {
            Outcome::Refused(rtrs::errno::ECONNRESET) => std::thread::sleep(std::time::Duration::from_millis(100)),
            Outcome::Accepted => {
                accept(&mut again, 1)?;
                return text(inform(&again, name)?);
            }
            other => return text(other),
        }
    }
    Err("refused for a minute after its end".into())
}

/// Another path of a session.
fn sibling(ways: &[Way; 2], c: &Client, way: usize, first_conn: bool) -> Result<Client, Error> {
    let mut d = Client::new(&ways[way].dev, ways[way].to)?;
    (d.session, d.first_conn) = (c.session, first_conn);
    Ok(d)
}

/// A session that stands, and another path of it.
fn second(
    ways: &[Way; 2],
    name: &str,
    way: usize,
    first_conn: bool,
    act: impl FnOnce(&mut Client, &mut Client) -> Seen,
) -> Seen {
    opened(ways, name, |c| {
        let mut d = sibling(ways, c, way, first_conn)?;
        act(c, &mut d)
    })
}

/// The second path's handshake; a request on each, and how many chunks each has.
fn two_paths(c: &Client, d: &mut Client, name: &str) -> Seen {
    d.connected()?;
    let informed = inform(d, name)?;
    let chunks = (c.chunks(), d.chunks());
    Ok(format!("{informed}, chunks {chunks:?}, {}, {}", c.ask(0)?, d.ask(1)?))
}

/// A path that is connected, and an information request, spoiled.
fn information(ways: &[Way; 2], name: &str, spoil: fn(&mut Vec<u8>)) -> Seen {
    let mut c = client(ways)?;
    c.connected()?;
    let mut bytes = InfoReq::new(name)?.as_bytes().to_vec();
    spoil(&mut bytes);
    text(c.inform(&bytes)?)
}
