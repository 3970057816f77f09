//! `ferroce rds info`: what the node has, in the columns of rds-info.

use std::{
    fmt::Write,
    io,
    net::{IpAddr, Ipv6Addr},
};

use clap::Args;
use rds_local::{
    Control,
    info::{self as raw, elements},
};
use serde::{Serialize, Serializer};

use crate::output::{self, Failure};

#[derive(Args)]
#[command(after_help = "\
Without options all tables are shown. Columns are those of rds-info, and Tos. Flags of a connection: s sending, c connecting, C connected. \
Programs under `ferroce run` can use rds-info itself.

With --json: one object with an array for each table that was asked for (`counters` is an object); null if no node runs.")]
pub(crate) struct InfoArgs {
    /// Counters
    #[arg(short, long)]
    counters: bool,
    /// Sockets
    #[arg(short = 'k', long)]
    sockets: bool,
    /// Connections
    #[arg(short = 'n', long)]
    connections: bool,
    /// Messages that were not read
    #[arg(short, long)]
    receive: bool,
    /// Messages that wait to be sent
    #[arg(short, long)]
    send: bool,
    /// Messages that were not acknowledged
    #[arg(short = 't', long)]
    retransmit: bool,
    /// Connections of the transport
    #[arg(short = 'I', long)]
    ib: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Socket {
    bound_addr: IpAddr,
    bound_port: u16,
    connected_addr: IpAddr,
    connected_port: u16,
    sndbuf: u32,
    rcvbuf: u32,
    inode: u64,
}

#[derive(Serialize)]
struct Connection {
    local_addr: IpAddr,
    remote_addr: IpAddr,
    tos: Option<u8>,
    next_tx: u64,
    next_rx: u64,
    flags: String,
}

#[derive(Serialize)]
struct Message {
    local_addr: IpAddr,
    local_port: u16,
    remote_addr: IpAddr,
    remote_port: u16,
    tos: u8,
    sequence: u64,
    bytes: u32,
}

#[derive(Serialize)]
struct IbConnection {
    local_addr: IpAddr,
    remote_addr: IpAddr,
    tos: u8,
    sl: u8,
    local_gid: Ipv6Addr,
    remote_gid: Ipv6Addr,
    send_wr: u32,
    recv_wr: u32,
}

/// Counters in their order: those of the kernel, then those of the node.
#[derive(Default)]
pub(crate) struct Counters(pub(crate) Vec<(String, u64)>);

impl Serialize for Counters {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

/// Tables that were asked for.
#[derive(Serialize, Default)]
struct Tables {
    #[serde(skip_serializing_if = "Option::is_none")]
    counters: Option<Counters>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sockets: Option<Vec<Socket>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    connections: Option<Vec<Connection>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    receive: Option<Vec<Message>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    send: Option<Vec<Message>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retransmit: Option<Vec<Message>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ib: Option<Vec<IbConnection>>,
}

/// Summary for `ferroce stat`.
#[derive(Serialize)]
pub(crate) struct Summary {
    pub(crate) sockets: usize,
    pub(crate) connections: usize,
    pub(crate) counters: Counters,
}

/// Returns the summary of the node that runs, if one does.
///
/// # Errors
/// When it does not answer.
pub(crate) fn summary() -> Result<Option<Summary>, Failure> {
    let Some(control) = find()? else { return Ok(None) };
    let get = || {
        Ok::<_, io::Error>(Summary {
            sockets: count(&control, raw::SOCKETS6)?,
            connections: count(&control, raw::CONNECTIONS6)?,
            counters: counters(&control)?,
        })
    };
    get().map(Some).map_err(unanswered)
}

fn unanswered(e: io::Error) -> Failure {
    Failure::failed(format!("the RDS node does not answer: {e}"))
}

fn find() -> Result<Option<Control>, Failure> {
    Control::find(&rds_local::directory()).map_err(Failure::of)
}

fn count(control: &Control, number: u32) -> io::Result<usize> {
    let (bytes, size) = control.info(number)?;
    Ok(bytes.len() / size.max(1))
}

fn addr(octets: [u8; 16]) -> IpAddr {
    IpAddr::V6(octets.into()).to_canonical()
}

fn counters(control: &Control) -> io::Result<Counters> {
    let mut all = Vec::new();
    for number in [raw::COUNTERS, raw::OWN_COUNTERS] {
        let (bytes, _) = control.info(number)?;
        all.extend(elements::<raw::Counter>(&bytes).map(|counter| {
            let name = String::from_utf8_lossy(&counter.name);
            (name.trim_end_matches('\0').to_owned(), counter.value)
        }));
    }
    Ok(Counters(all))
}

fn sockets(control: &Control) -> io::Result<Vec<Socket>> {
    let (bytes, _) = control.info(raw::SOCKETS6)?;
    let all = elements::<raw::Socket<16>>(&bytes).map(|socket| Socket {
        bound_addr: addr(socket.bound_addr),
        bound_port: u16::from_be_bytes(socket.bound_port),
        connected_addr: addr(socket.connected_addr),
        connected_port: u16::from_be_bytes(socket.connected_port),
        sndbuf: socket.sndbuf,
        rcvbuf: socket.rcvbuf,
        inode: socket.inum,
    });
    Ok(all.collect())
}

fn flags(bits: u8) -> String {
    let all = [(raw::SENDING, 's'), (raw::CONNECTING, 'c'), (raw::CONNECTED, 'C')];
    all.map(|(bit, letter)| if bits & bit != 0 { letter } else { '-' })
        .iter()
        .collect()
}

fn connections(control: &Control) -> io::Result<Vec<Connection>> {
    let (four, _) = control.info(raw::CONNECTIONS)?;
    let (six, _) = control.info(raw::CONNECTIONS6)?;
    let four = elements::<raw::Connection>(&four).map(|c| Connection {
        local_addr: c.laddr.into(),
        remote_addr: c.faddr.into(),
        tos: Some(c.tos),
        next_tx: c.next_tx_seq,
        next_rx: c.next_rx_seq,
        flags: flags(c.flags),
    });
    // The kernel's structure has no type of service there.
    let six = elements::<raw::Connection6>(&six).map(|c| Connection {
        local_addr: addr(c.laddr),
        remote_addr: addr(c.faddr),
        tos: None,
        next_tx: c.next_tx_seq,
        next_rx: c.next_rx_seq,
        flags: flags(c.flags),
    });
    Ok(four.chain(six.filter(|c| c.local_addr.is_ipv6())).collect())
}

fn messages(control: &Control, number: u32) -> io::Result<Vec<Message>> {
    let (bytes, _) = control.info(number)?;
    let all = elements::<raw::Message<16>>(&bytes).map(|m| Message {
        local_addr: addr(m.laddr),
        local_port: u16::from_be_bytes(m.lport),
        remote_addr: addr(m.faddr),
        remote_port: u16::from_be_bytes(m.fport),
        tos: m.tos,
        sequence: m.seq,
        bytes: m.len,
    });
    Ok(all.collect())
}

fn ib(control: &Control) -> io::Result<Vec<IbConnection>> {
    let (bytes, _) = control.info(raw::IB_CONNECTIONS6)?;
    let all = elements::<raw::IbConnection<16>>(&bytes).map(|c| IbConnection {
        local_addr: addr(c.src_addr),
        remote_addr: addr(c.dst_addr),
        tos: c.tos,
        sl: c.sl,
        local_gid: c.src_gid.into(),
        remote_gid: c.dst_gid.into(),
        send_wr: c.max_send_wr,
        recv_wr: c.max_recv_wr,
    });
    Ok(all.collect())
}

fn tables(control: &Control, args: &InfoArgs) -> io::Result<Tables> {
    let given = [
        args.counters,
        args.sockets,
        args.connections,
        args.receive,
        args.send,
        args.retransmit,
        args.ib,
    ];
    let is_all = !given.contains(&true);
    let wanted = |given: bool| (given || is_all).then_some(control);
    Ok(Tables {
        counters: wanted(args.counters).map(counters).transpose()?,
        sockets: wanted(args.sockets).map(sockets).transpose()?,
        connections: wanted(args.connections).map(connections).transpose()?,
        receive: wanted(args.receive)
            .map(|control| messages(control, raw::RECV_MESSAGES6))
            .transpose()?,
        send: wanted(args.send)
            .map(|control| messages(control, raw::SEND_MESSAGES6))
            .transpose()?,
        retransmit: wanted(args.retransmit)
            .map(|control| messages(control, raw::RETRANS_MESSAGES6))
            .transpose()?,
        ib: wanted(args.ib).map(ib).transpose()?,
    })
}

/// Shows the tables.
pub(super) fn run(args: &InfoArgs) -> Result<(), Failure> {
    let found = match find()? {
        Some(control) => Some(tables(&control, args).map_err(unanswered)?),
        None => None,
    };
    if args.json {
        return output::json(&found);
    }
    match found {
        Some(tables) => output::text(&text(&tables)),
        None => output::line("no RDS node runs: no program has an RDS socket"),
    }
}

/// Row of a table of rds-info.
trait Row {
    /// Columns: name and width.
    const COLUMNS: &[(&str, usize)];

    fn cells(&self) -> Vec<String>;
}

impl Row for (String, u64) {
    const COLUMNS: &[(&str, usize)] = &[("CounterName", 25), ("Value", 16)];

    fn cells(&self) -> Vec<String> {
        vec![self.0.clone(), self.1.to_string()]
    }
}

impl Row for Socket {
    const COLUMNS: &[(&str, usize)] = &[
        ("BoundAddr", 15),
        ("BPort", 5),
        ("ConnAddr", 15),
        ("CPort", 5),
        ("SndBuf", 10),
        ("RcvBuf", 10),
        ("Inode", 8),
    ];

    fn cells(&self) -> Vec<String> {
        // An address that is not set is that of the other's family.
        let addr = |of: IpAddr| match of == IpAddr::V6(Ipv6Addr::UNSPECIFIED) {
            true => "0.0.0.0".to_owned(),
            false => of.to_string(),
        };
        vec![
            addr(self.bound_addr),
            self.bound_port.to_string(),
            addr(self.connected_addr),
            self.connected_port.to_string(),
            self.sndbuf.to_string(),
            self.rcvbuf.to_string(),
            self.inode.to_string(),
        ]
    }
}

impl Row for Connection {
    const COLUMNS: &[(&str, usize)] = &[
        ("LocalAddr", 15),
        ("RemoteAddr", 15),
        ("Tos", 3),
        ("NextTX", 20),
        ("NextRX", 20),
        ("Flg", 3),
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.local_addr.to_string(),
            self.remote_addr.to_string(),
            self.tos.map_or_else(|| "-".to_owned(), |tos| tos.to_string()),
            self.next_tx.to_string(),
            self.next_rx.to_string(),
            self.flags.clone(),
        ]
    }
}

impl Row for Message {
    const COLUMNS: &[(&str, usize)] = &[
        ("LocalAddr", 15),
        ("LPort", 5),
        ("RemoteAddr", 15),
        ("RPort", 5),
        ("Tos", 3),
        ("Seq", 20),
        ("Bytes", 10),
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.local_addr.to_string(),
            self.local_port.to_string(),
            self.remote_addr.to_string(),
            self.remote_port.to_string(),
            self.tos.to_string(),
            self.sequence.to_string(),
            self.bytes.to_string(),
        ]
    }
}

impl Row for IbConnection {
    const COLUMNS: &[(&str, usize)] = &[
        ("LocalAddr", 15),
        ("RemoteAddr", 15),
        ("Tos", 3),
        ("SL", 2),
        ("LocalDev", 32),
        ("RemoteDev", 32),
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.local_addr.to_string(),
            self.remote_addr.to_string(),
            self.tos.to_string(),
            self.sl.to_string(),
            self.local_gid.to_string(),
            self.remote_gid.to_string(),
        ]
    }
}

/// Writes the tables as rds-info does.
fn text(tables: &Tables) -> String {
    let mut out = String::new();
    table(
        &mut out,
        "Counters",
        tables.counters.as_ref().map(|counters| &counters.0),
    );
    table(&mut out, "RDS Sockets", tables.sockets.as_ref());
    table(&mut out, "RDS Connections", tables.connections.as_ref());
    table(&mut out, "Receive Message Queue", tables.receive.as_ref());
    table(&mut out, "Send Message Queue", tables.send.as_ref());
    table(&mut out, "Retransmit Message Queue", tables.retransmit.as_ref());
    table(&mut out, "RDS IB Connections", tables.ib.as_ref());
    out
}

/// Writes a table, if it was asked for.
fn table<T: Row>(out: &mut String, title: &str, rows: Option<&Vec<T>>) {
    let Some(rows) = rows else { return };
    let _ = writeln!(out, "\n{title}:");
    let names = T::COLUMNS.iter().map(|(name, _)| (*name).to_owned()).collect();
    for cells in std::iter::once(names).chain(rows.iter().map(Row::cells)) {
        let columns = cells.iter().zip(T::COLUMNS);
        let cells: Vec<_> = columns.map(|(cell, (_, width))| format!("{cell:>width$}")).collect();
        let _ = writeln!(out, "{}", cells.join(" "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_the_columns_of_rds_info() {
        let tables = Tables {
            counters: Some(Counters(vec![
                ("send_queued".to_owned(), 7),
                ("conn_reset".to_owned(), 8),
            ])),
            sockets: Some(vec![Socket {
                bound_addr: [192, 0, 2, 1].into(),
                bound_port: 4000,
                connected_addr: Ipv6Addr::UNSPECIFIED.into(),
                connected_port: 0,
                sndbuf: 106_496,
                rcvbuf: 106_496,
                inode: 9,
            }]),
            connections: Some(vec![Connection {
                local_addr: [192, 0, 2, 1].into(),
                remote_addr: [192, 0, 2, 2].into(),
                tos: Some(8),
                next_tx: 5,
                next_rx: 6,
                flags: flags(raw::CONNECTED),
            }]),
            ..Tables::default()
        };
        let expected = "
Counters:
              CounterName            Value
              send_queued                7
               conn_reset                8

RDS Sockets:
      BoundAddr BPort        ConnAddr CPort     SndBuf     RcvBuf    Inode
      192.0.2.1  4000         0.0.0.0     0     106496     106496        9

RDS Connections:
      LocalAddr      RemoteAddr Tos               NextTX               NextRX Flg
      192.0.2.1       192.0.2.2   8                    5                    6 --C
";
        assert_eq!(text(&tables), expected);
    }
}
