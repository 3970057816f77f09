//! The hop that has the file.

use std::{
    fs::{File, OpenOptions},
    io::{self, ErrorKind},
    net::SocketAddr,
    os::unix::fs::FileExt,
    path::Path,
};

use mio::{Events, Interest, Poll, Token, net::UdpSocket};
use rnbd::nbd::proto::cmd;

use crate::{MAX_PAYLOAD, REPLY_LEN, REQUEST_LEN, Request, reply};

/// EIO, EINVAL, as NBD has them.
const IO: u32 = 5;
const INVALID: u32 = 22;

/// Answers until it is killed.
pub(crate) fn run(listen: SocketAddr, image: &Path) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(image)?;
    let (socket, _) = crate::socket(listen)?;
    socket.bind(&listen.into())?;
    let mut socket = UdpSocket::from_std(socket.into());
    let mut poll = Poll::new()?;
    let mut events = Events::with_capacity(4);
    poll.registry().register(&mut socket, Token(0), Interest::READABLE)?;
    println!("listening");
    let mut request = vec![0; REQUEST_LEN + MAX_PAYLOAD];
    let mut answer = vec![0; REPLY_LEN + MAX_PAYLOAD];
    loop {
        match socket.recv_from(&mut request) {
            Ok((len, from)) => {
                if let Ok(Some(header)) = Request::parse(&request[..len]) {
                    let len = serve(&file, header, &request[REQUEST_LEN..len], &mut answer);
                    socket.send_to(&answer[..len], from)?;
                }
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => poll.poll(&mut events, None)?,
            Err(e) if e.kind() == ErrorKind::Interrupted => (),
            Err(e) => return Err(e),
        }
    }
}

/// The length of the reply.
fn serve(file: &File, request: Request, payload: &[u8], answer: &mut [u8]) -> usize {
    let (head, data) = answer.split_at_mut(REPLY_LEN);
    let data = data.get_mut(..request.answer());
    let done = match (request.command, data) {
        (cmd::READ, Some(data)) => file.read_exact_at(data, request.offset).map_err(|_| IO),
        (cmd::WRITE, _) if payload.len() == request.payload() => {
            file.write_all_at(payload, request.offset).map_err(|_| IO)
        }
        (cmd::FLUSH, _) => file.sync_data().map_err(|_| IO),
        _ => Err(INVALID),
    };
    head.copy_from_slice(&reply(done.err().unwrap_or(0), request.cookie));
    REPLY_LEN + if done.is_ok() { request.answer() } else { 0 }
}
