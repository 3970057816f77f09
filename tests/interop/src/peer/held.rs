//! An RNBD server with one disk, which holds a request until it is told to go on. Like a real disk it looks at a request's memory
//! when it works on it.
//!
//! A line on standard input is an order: `release` lets go what is held, `end` ends the server.

use std::{
    fs::File,
    io::{self, BufRead as _},
    net::IpAddr,
    os::unix::fs::FileExt as _,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use clap::ValueEnum;
use ferroce_rig::{Host, Request, Server, ServerOps, SessionHandle};
use rnbd::{
    Errno,
    proto::{ClientMsg, IoOp, MsgIo, MsgOpenRsp, MsgSessInfo, Rw, SECTOR, VERSION_MAJOR},
};
use rtrs::server::ServerConfig;
use zerocopy::IntoBytes as _;

use crate::Error;

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// What is on the disk.
    #[arg(long)]
    image: PathBuf,
    /// Which request is held: the first of this kind …
    #[arg(long, value_enum)]
    hold: Hold,
    /// … that begins here, bytes.
    #[arg(long)]
    at: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
enum Hold {
    Read,
    Write,
}

/// The only one.
const DEVICE: u32 = 0;

struct Disk {
    image: File,
    size: u64,
    /// What is still to be held when it comes.
    hold: Option<(IoOp, u64)>,
    held: Option<(Request, MsgIo)>,
}

impl Disk {
    fn take(&mut self, request: Request) {
        let done = match ClientMsg::parse(request.user_header()) {
            Ok(ClientMsg::SessInfo(_)) => answer(&request, MsgSessInfo::response(VERSION_MAJOR).as_bytes()),
            Ok(ClientMsg::Open(_)) => answer(&request, self.opened().as_bytes()),
            Ok(ClientMsg::Close(_)) => Ok(()),
            Ok(ClientMsg::Io(io)) => {
                let what = (io.rw.get() & 0xff, io.sector.get() * SECTOR);
                println!("held: operation {} at {}", what.0, what.1);
                if self.hold.take_if(|(op, at)| (*op as u32, *at) == what).is_some() {
                    println!("held: it is held");
                    self.held = Some((request, io));
                    return;
                }
                self.work(&request, io)
            }
            Err(_) => Err(Errno::EINVAL),
        };
        request.complete(done.map_or_else(Errno::raw, |()| 0));
    }

    fn opened(&self) -> MsgOpenRsp {
        let mut rsp = MsgOpenRsp::new();
        rsp.device_id.set(DEVICE);
        rsp.nsectors.set(self.size / SECTOR);
        rsp.logical_block_size.set(512);
        rsp.physical_block_size.set(4096);
        rsp.max_hw_sectors.set(128);
        rsp.max_segments.set(128);
        rsp
    }

    fn work(&self, request: &Request, io: MsgIo) -> Result<(), Errno> {
        let (at, len) = (io.sector.get() * SECTOR, io.bi_size.get() as usize);
        let inside = at.checked_add(len as u64).is_some_and(|end| end <= self.size);
        if io.device_id.get() != DEVICE || !inside || len > request.data_len() {
            return Err(Errno::EINVAL);
        }
        let mut data = vec![0; len];
        let failed = |e: io::Error| {
            eprintln!("held: the image: {e}");
            Errno::EIO
        };
        match Rw::from_wire(io.rw.get()).ok_or(Errno::EINVAL)?.op {
            IoOp::Read => {
                self.image.read_exact_at(&mut data, at).map_err(failed)?;
                request.write_data(0, &data).map_err(|_| Errno::EINVAL)
            }
            IoOp::Write => {
                request.read_data(0, &mut data).map_err(|_| Errno::EINVAL)?;
                self.image.write_all_at(&data, at).map_err(failed)
            }
            IoOp::Flush => Ok(()),
            _ => Err(Errno::EOPNOTSUPP),
        }
    }
}

fn answer(request: &Request, message: &[u8]) -> Result<(), Errno> {
    request.write_data(0, message).map_err(|_| Errno::EINVAL)
}

struct Backend(Mutex<Disk>);

impl ServerOps for Backend {
    fn session_opened(&self, _: &SessionHandle) {
        println!("held: a session is open");
    }

    fn rdma_request(&self, request: Request) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take(request);
    }

    fn session_closed(&self, _: &SessionHandle) {
        println!("held: a session is closed");
    }
}

/// Serves until it is told to end.
pub(crate) fn run(addr: IpAddr, args: &Args) -> Result<(), Error> {
    let image = File::options().read(true).write(true).open(&args.image)?;
    let op = match args.hold {
        Hold::Read => IoOp::Read,
        Hold::Write => IoOp::Write,
    };
    let disk = Disk {
        size: image.metadata()?.len(),
        image,
        hold: Some((op, args.at)),
        held: None,
    };
    let backend = Arc::new(Backend(Mutex::new(disk)));
    let config = ServerConfig {
        addr,
        ..ServerConfig::default()
    };
    let server = Server::listen(&Host::open(addr), config, backend.clone())?;
    println!("held: listening");
    for line in io::stdin().lock().lines() {
        match line?.as_str() {
            "release" => {
                let mut disk = backend.0.lock().unwrap_or_else(PoisonError::into_inner);
                let (request, io) = disk.held.take().ok_or("nothing is held")?;
                println!("held: it is released");
                let done = disk.work(&request, io);
                request.complete(done.map_or_else(Errno::raw, |()| 0));
            }
            "end" => break,
            other => return Err(format!("no order: {other}").into()),
        }
    }
    drop(server);
    println!("held: ended");
    Ok(())
}
