//! Our own `verbs-agent`: the line protocol of `lab/verbs-agent.c` on our transport.

use std::{
    io::{BufRead as _, BufReader, Write},
    net::{IpAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use roce::{Device, Grant, Mr, Revocable};
use roce_verbs::{
    AccessFlags, Completion, Flush, LKey, Mtu, Payload, Placement, Psn, QpAttr, QpCaps, QpState, Qpn, RKey, RecvWr,
    RemoteAddr, Selectivity, SendFlags, SendOp, SendWr, Sge, WcFlags,
};

use crate::{
    Error,
    agent::{ATOMIC_WRITE, CMP_SWAP, FETCH_ADD, READ, SEND, SEND_IMM, SEND_INV, WRITE, WRITE_IMM, pattern},
    link::{Far, Link, Wire, addr_gid, gid_addr},
};

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// TCP port.
    #[arg(long, default_value_t = 18601)]
    port: u16,
}

/// The words of a command.
struct Words<'a>(std::str::SplitAsciiWhitespace<'a>);

impl Words<'_> {
    fn get<T: std::str::FromStr>(&mut self) -> Result<T, Error> {
        self.opt()?.ok_or_else(|| "too few words".into())
    }

    fn opt<T: std::str::FromStr>(&mut self) -> Result<Option<T>, Error> {
        let Some(word) = self.0.next() else { return Ok(None) };
        word.parse()
            .map(Some)
            .map_err(|_| format!("{word:?} is not what belongs there").into())
    }
}

struct Server<'a> {
    provider: &'a Device,
    local: IpAddr,
    link: Option<Link>,
    mems: Vec<Mr>,
    windows: Vec<Revocable>,
    /// Learned with `rtr`, used with `rts`.
    far: Option<(Far, Mtu, u8)>,
}

/// Serves clients one after another until a `quit`.
pub(crate) fn run(provider: &Device, local: IpAddr, args: &Args) -> Result<(), Error> {
    let listener = TcpListener::bind((local, args.port))?;
    println!("agent ready");
    for stream in listener.incoming() {
        let mut server = Server {
            provider,
            local,
            link: None,
            mems: Vec::new(),
            windows: Vec::new(),
            far: None,
        };
        if server.serve(stream?)? {
            break;
        }
    }
    Ok(())
}

impl Server<'_> {
    /// Returns whether the client wants the program to end.
    fn serve(&mut self, stream: TcpStream) -> Result<bool, Error> {
        stream.set_nodelay(true)?;
        let mut out = stream.try_clone()?;
        let mut lines = BufReader::new(stream);
        let mut line = String::new();
        while lines.read_line(&mut line)? > 0 {
            let mut words = Words(line.split_ascii_whitespace());
            let command = words.0.next().unwrap_or_default().to_owned();
            let answer = match command.as_str() {
                "quit" => {
                    out.write_all(b"ok\n")?;
                    return Ok(true);
                }
                "poll" => self.poll(&mut words),
                _ => self.command(&command, &mut words).map(|text| format!("ok {text}\n")),
            };
            out.write_all(answer.unwrap_or_else(|e| format!("err {e}\n")).as_bytes())?;
            line.clear();
        }
        Ok(false)
    }

    fn command(&mut self, command: &str, w: &mut Words<'_>) -> Result<String, Error> {
        match command {
            "create" => self.create(w),
            "device" => Ok("ferroce 0 4096 1".to_owned()),
            "caps" => Ok("atomics=1 windows1=1 windows2=1 reads=128".to_owned()),
            "mem" => self.mem(w),
            "mw" => self.window(w),
            "rtr" => self.rtr(w),
            "rts" => self.rts(w),
            "recv" => self.recv(w),
            "post" => self.post(w),
            "flush" => self.flush(w),
            "fill" => self.fill(w, false),
            "check" => self.fill(w, true),
            "word" => self.word(w),
            "state" => Ok((self.link()?.qp.query()?.state.unwrap_or_default() as u32).to_string()),
            "destroy" => {
                self.link = None;
                Ok(String::new())
            }
            "modify" => {
                let to: u32 = w.get()?;
                if to != QpState::Err as u32 {
                    return Err("only ERR (6)".into());
                }
                self.link()?.qp.modify(&QpAttr {
                    state: Some(QpState::Err),
                    ..QpAttr::default()
                })?;
                Ok(String::new())
            }
            other => Err(format!("unknown command {other}").into()),
        }
    }

    fn link(&self) -> Result<&Link, Error> {
        self.link.as_ref().ok_or_else(|| "no qp".into())
    }

    /// The region with this number, if it has that range.
    fn region(&self, id: usize, off: usize, len: usize) -> Result<&Mr, Error> {
        let region = self.mems.get(id).ok_or("no such memory")?;
        if off > region.len() || len > region.len() - off {
            return Err("outside the memory".into());
        }
        Ok(region)
    }

    fn sges(&self, id: usize, off: usize, len: usize, spoil: u32) -> Result<Vec<Sge>, Error> {
        let region = self.region(id, off, len)?;
        if len == 0 {
            return Ok(Vec::new());
        }
        Ok(vec![Sge {
            addr: region.addr() + off as u64,
            length: u32::try_from(len)?,
            lkey: LKey(region.lkey().0.wrapping_add(spoil)),
        }])
    }

    fn create(&mut self, w: &mut Words<'_>) -> Result<String, Error> {
        let (max_send_wr, max_recv_wr, sges, max_inline_data) = (w.get()?, w.get()?, w.get()?, w.get()?);
        let usual = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC;
        let flushes = AccessFlags::FLUSH_GLOBAL | AccessFlags::FLUSH_PERSISTENT;
        let access = w.opt()?.map_or(usual, AccessFlags::from_bits_truncate) & (usual | flushes);
        self.link = None;
        self.windows.clear();
        self.mems.clear();
        let caps = QpCaps {
            max_send_wr,
            max_recv_wr,
            max_send_sge: sges,
            max_recv_sge: sges,
            max_inline_data,
        };
        let link = Link::with_access(self.provider, caps, access)?;
        let text = format!("{} {}", link.qp.qpn().value(), addr_gid(self.local));
        self.link = Some(link);
        Ok(text)
    }

    fn mem(&mut self, w: &mut Words<'_>) -> Result<String, Error> {
        let (len, access) = (w.get()?, AccessFlags::from_bits_truncate(w.get()?));
        let region = self.provider.alloc_mr(&self.link()?.pd, len, access)?;
        let text = format!("{} {} {}", self.mems.len(), region.addr(), region.rkey().0);
        self.mems.push(region);
        Ok(text)
    }

    fn window(&mut self, w: &mut Words<'_>) -> Result<String, Error> {
        let (id, offset, len) = (w.get()?, w.get()?, w.get()?);
        let access = AccessFlags::from_bits_truncate(w.get()?);
        let link = self.link()?;
        let revocable = self.provider.alloc_revocable(&link.pd)?;
        let grant = Grant {
            region: self.region(id, offset, len)?,
            offset,
            len,
            access,
        };
        let key = link.qp.post_grant(&revocable, &grant, u64::MAX, SendFlags::SIGNALED)?;
        Link::expect_ok(&link.send_cq, "grant")?;
        self.windows.push(revocable);
        Ok(key.0.to_string())
    }

    fn rtr(&mut self, w: &mut Words<'_>) -> Result<String, Error> {
        let (qpn, gid, psn, mtu): (u32, std::net::Ipv6Addr, u32, u8) = (w.get()?, w.get()?, w.get()?, w.get()?);
        let (_rnr, rd): (u8, u8) = (w.get()?, w.get()?);
        let mtu = Mtu::from_code(mtu).ok_or("no such MTU")?;
        let far = Far {
            qpn: Qpn::new(qpn),
            psn: Psn::new(psn),
            addr: gid_addr(gid),
        };
        self.link()?.to_rtr(self.local, far, mtu, rd)?;
        self.far = Some((far, mtu, rd));
        Ok(String::new())
    }

    fn rts(&mut self, w: &mut Words<'_>) -> Result<String, Error> {
        let psn = Psn::new(w.get()?);
        let (timeout, retry_cnt, rnr_retry, rd_atomic) = (w.get()?, w.get()?, w.get()?, w.get()?);
        let (_, mtu, _) = self.far.ok_or("rtr first")?;
        let wire = Wire {
            mtu,
            timeout,
            retry_cnt,
            rnr_retry,
            rd_atomic,
        };
        self.link()?.to_rts(psn, wire)?;
        Ok(String::new())
    }

    fn recv(&self, w: &mut Words<'_>) -> Result<String, Error> {
        let (wr_id, id, off, len): (u64, usize, usize, usize) = (w.get()?, w.get()?, w.get()?, w.get()?);
        let sges = self.sges(id, off, len, w.opt()?.unwrap_or(0))?;
        let wr = RecvWr { wr_id, sges: &sges };
        self.link()?.qp.post_recv(&[wr]).map_err(|(_, e)| e)?;
        Ok(String::new())
    }

    fn post(&self, w: &mut Words<'_>) -> Result<String, Error> {
        let (wr_id, op, flags): (u64, u32, u32) = (w.get()?, w.get()?, w.get()?);
        let (id, off, len): (usize, usize, usize) = (w.get()?, w.get()?, w.get()?);
        let (addr, key): (u64, u32) = (w.get()?, w.get()?);
        let (imm, compare, swap): (u32, u64, u64) = (w.get()?, w.get()?, w.get()?);
        let sges = self.sges(id, off, len, w.opt()?.unwrap_or(0))?;
        let remote = RemoteAddr { addr, rkey: RKey(key) };
        let op = match op {
            WRITE => SendOp::Write(remote),
            WRITE_IMM => SendOp::WriteWithImm(remote, imm),
            SEND => SendOp::Send,
            SEND_IMM => SendOp::SendWithImm(imm),
            READ => SendOp::Read(remote),
            CMP_SWAP => SendOp::CompareSwap { remote, compare, swap },
            FETCH_ADD => SendOp::FetchAdd { remote, add: swap },
            SEND_INV => SendOp::SendWithInv(RKey(key)),
            ATOMIC_WRITE => SendOp::AtomicWrite(remote),
            other => return Err(format!("no opcode {other}").into()),
        };
        let wr = SendWr {
            wr_id,
            op,
            flags: SendFlags::from_bits_truncate(flags),
            payload: Payload::Sges(&sges),
        };
        self.link()?.qp.post_send(&[wr]).map_err(|(_, e)| e)?;
        Ok(String::new())
    }

    fn flush(&self, w: &mut Words<'_>) -> Result<String, Error> {
        let (wr_id, placement, selectivity): (u64, u8, u8) = (w.get()?, w.get()?, w.get()?);
        let (addr, length, key): (u64, u32, u32) = (w.get()?, w.get()?, w.get()?);
        let wr = SendWr {
            wr_id,
            op: SendOp::Flush(Flush {
                remote: RemoteAddr { addr, rkey: RKey(key) },
                length,
                placement: Placement::from_bits_retain(placement & 0xf),
                selectivity: Selectivity::from_bits(selectivity),
            }),
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&[]),
        };
        self.link()?.qp.post_send(&[wr]).map_err(|(_, e)| e)?;
        Ok(String::new())
    }

    fn poll(&self, w: &mut Words<'_>) -> Result<String, Error> {
        let (which, count, ms): (char, usize, u64) = (w.get()?, w.get()?, w.get()?);
        let link = self.link()?;
        let cq = if which == 's' { &link.send_cq } else { &link.recv_cq };
        let until = Instant::now() + Duration::from_millis(ms);
        let mut all: Vec<Completion> = Vec::new();
        while all.len() < count && Instant::now() < until {
            let left = count - all.len();
            if cq.poll(&mut all, left)? == 0 {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        let mut text = String::new();
        for wc in all {
            let imm = if wc.flags.contains(WcFlags::WITH_IMM) {
                wc.imm
            } else {
                0
            };
            let (id, status, op, len) = (wc.wr_id, wc.status as u32, wc.opcode as u32, wc.byte_len);
            let (flags, key) = (wc.flags.bits(), wc.invalidated.0);
            text += &format!("wc {id} {status} {op} {len} {imm} {flags} {key}\n");
        }
        Ok(text + "end\n")
    }

    fn fill(&self, w: &mut Words<'_>, check: bool) -> Result<String, Error> {
        let (id, off, len, seed): (usize, usize, usize, u64) = (w.get()?, w.get()?, w.get()?, w.get()?);
        let region = self.region(id, off, len)?;
        let want = pattern(seed, len);
        if !check {
            region.write(off, &want)?;
            return Ok(String::new());
        }
        let mut got = vec![0; len];
        region.read(off, &mut got)?;
        match want.iter().zip(&got).position(|(a, b)| a != b) {
            None => Ok(String::new()),
            Some(at) => Err(format!("byte {at} is {:02x}, not {:02x}", got[at], want[at]).into()),
        }
    }

    fn word(&self, w: &mut Words<'_>) -> Result<String, Error> {
        let (id, off): (usize, usize) = (w.get()?, w.get()?);
        let region = self.region(id, off, 8)?;
        let mut word = [0; 8];
        if let Some(value) = w.opt::<u64>()? {
            region.write(off, &value.to_ne_bytes())?;
        }
        region.read(off, &mut word)?;
        Ok(u64::from_ne_bytes(word).to_string())
    }
}
