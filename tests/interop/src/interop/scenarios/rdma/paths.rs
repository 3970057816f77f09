//! Sessions with two paths, ours over roce-hw at one end. One path goes under load and comes back: its network is cut, or the
//! device that it leads through is deleted.

use std::{net::IpAddr, time::Duration};

use super::{
    super::{
        Ctx, Direction, Scenario,
        paths::{
            Cut,
            kernel_client::{BACK, BY_TURNS, CLIENT_UP, START, client_down, head_to},
            longest_of,
            our_client::{self, Fio, Load},
        },
        rnbd::{INSMOD_CLIENT, Mapping, Orders, Server, image},
    },
    Other, Ours,
};
use crate::{
    Error,
    far::Ip,
    guest::Guest,
    lab::{HOST_V4, check_stop},
};

/// The longest that a request may take: until retries are used up, or heartbeats tell, and what emulated processors add.
const TIMEOUT: Duration = Duration::from_secs(40);
/// Until a path is back: the kernel's server refuses one that it does not know to be lost for up to 35 s, and its client waits 30 s
/// before it connects again.
const RETURN: Duration = Duration::from_secs(150);

/// Which end is over roce-hw.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    Server,
    Client,
}

/// How a path goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Loss {
    Cut(Cut),
    /// `rdma link delete`, under our end.
    Device,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    role: Role,
    other: Other,
    loss: Loss,
}

pub(super) fn list() -> Vec<Scenario> {
    let mut all = Vec::new();
    for (role, of_us) in [(Role::Server, "rdma-server"), (Role::Client, "rdma-client")] {
        for (other, of_them) in [(Other::Ours, "our"), (Other::Kernel, "kernel")] {
            for (loss, how) in [
                (Loss::Cut(Cut::Carrier), "carrier-lost"),
                (Loss::Cut(Cut::Port), "port-down"),
                (Loss::Device, "device-deleted"),
            ] {
                let (theirs, direction) = match (role, other) {
                    (Role::Server, Other::Ours) => ("client", Direction::OursToKernel),
                    (Role::Client, Other::Ours) => ("server", Direction::KernelToOurs),
                    (Role::Server, Other::Kernel) => ("client", Direction::KernelToKernel),
                    (Role::Client, Other::Kernel) => ("server", Direction::KernelToKernel),
                };
                let name = format!("{of_us}-{of_them}-{theirs}-{how}");
                let case = Case { role, other, loss };
                let s = Scenario::new(12, name, direction, move |c| one_goes(c, case));
                all.push(s.nets(2).guests(other.guests()));
            }
        }
    }
    all
}

impl Loss {
    fn set(self, c: &mut Ctx<'_>, ours: &Ours, there: bool) -> Result<(), Error> {
        match (self, there) {
            (Self::Cut(cut), _) => cut.set(c, there),
            (Self::Device, true) => ours.run(c, "rdma link add rxe1 type rxe netdev eth1", 60).map(drop),
            (Self::Device, false) => ours.run(c, "rdma link delete rxe1", 60).map(drop),
        }
    }
}

/// Both addresses of the server.
fn server_addrs(c: &Ctx<'_>, case: Case) -> Result<[IpAddr; 2], Error> {
    let of = |guest: &Guest| [guest.addr(0, Ip::V4), guest.addr(1, Ip::V4)];
    Ok(match (case.role, case.other) {
        (Role::Server, _) => of(Ours::guest(c)?),
        (Role::Client, Other::Kernel) => of(c.guest.as_deref().ok_or("needs a guest of the lab")?),
        (Role::Client, Other::Ours) => [HOST_V4[0].parse()?, HOST_V4[1].parse()?],
    })
}

fn one_goes(c: &mut Ctx<'_>, case: Case) -> Result<String, Error> {
    let ours = Ours::new(c)?;
    ours.run(c, "rdma link add rxe1 type rxe netdev eth1", 60)?;
    let result = with_server(c, &ours, case);
    // Also for the next scenario.
    let _ = case.loss.set(c, &ours, true);
    ours.run(c, "rdma link delete rxe1 || true", 60)?;
    result
}

/// Has the server that the case wants while the session lasts.
fn with_server(c: &mut Ctx<'_>, ours: &Ours, case: Case) -> Result<String, Error> {
    let to = server_addrs(c, case)?;
    match (case.role, case.other) {
        (Role::Server, _) => {
            let begin = format!(
                "rm -f /tmp/disk.img; truncate -s 64M /tmp/disk.img\n\
                 begin serve serve --json --rdma rxe0 --rdma rxe1 --addr {} --addr {} --export disk=/tmp/disk.img \
                 --control /tmp/serve.sock\ntold serve '\"listening\"' 60",
                to[0], to[1]
            );
            ours.run(c, &begin, 120)?;
            let result = session(c, ours, case, to);
            let ended = ours.run(c, "ends serve; ! grep panicked /tmp/serve.err", 120);
            ended.and(result)
        }
        (Role::Client, Other::Ours) => {
            image(c, "disk", 64)?;
            let server = Server::start_as(c, Orders::new("0.0.0.0", &["disk"], "on"))?;
            let result = session(c, ours, case, to)?;
            server.end().map(|_| result)
        }
        (Role::Client, Other::Kernel) => {
            our_client::server_up(c)?;
            let result = session(c, ours, case, to);
            our_client::server_down(c)?;
            result
        }
    }
}

/// A path goes and comes back under load.
fn session(c: &mut Ctx<'_>, ours: &Ours, case: Case, to: [IpAddr; 2]) -> Result<String, Error> {
    let mut client = Client::begin(c, ours, case, to)?;
    let worked = (|| {
        case.loss.set(c, ours, false)?;
        client.goes_on_by_the_other(c, ours)?;
        case.loss.set(c, ours, true)?;
        client.has_both(c, ours)
    })();
    let ended = client.end(c, ours);
    worked?;
    let longest = ended?;
    if longest > TIMEOUT {
        return Err(format!("a request took {:.1} s", longest.as_secs_f64()).into());
    }
    Ok(format!(
        "no error, all blocks right, the longest request took {:.1} s; the path came back by itself: passed",
        longest.as_secs_f64()
    ))
}

/// A client with two paths and a load.
enum Client {
    /// Ours, in software, here.
    Host(Box<(Mapping, Fio)>),
    /// The kernel's, in the first guest, with what its scripts begin with.
    Kernel(String),
    /// Ours, over roce-hw.
    Guest,
}

/// The load of a guest's client of ours; `ups` counts its paths that are connected.
pub(super) const LOAD: &str = "\
    U='nbd+unix:///?socket=/tmp/nbd.sock'\n\
    load() { rm -f /tmp/fio.json; fio --thread --name=job --ioengine=nbd --uri=$U --size=16M --rw=randwrite --bsrange=4k-64k --iodepth=4 \
        --rate=200k,200k --verify=crc32c --verify_interval=4096 --verify_fatal=1 --verify_backlog=32 --time_based --runtime=1800 \
        --output=/tmp/fio.json --output-format=json >/tmp/fio.log 2>&1 </dev/null & }\n\
    ups() { $F ctl --socket /tmp/map.sock --json list | grep -o '\"state\":\"connected\"' | grep -c . || true; }\n\
    up() { for i in $(seq 0 $2); do [ $(ups) = $1 ] && return; sleep 0.5; done; echo \"not $1 paths are connected\"; said map; return 1; }\n\
    runs() { pidof fio >/dev/null || { echo 'fio has ended'; cat /tmp/fio.log /tmp/fio.json; return 1; }; }\n\
    unload() { kill -INT $(pidof fio); for i in $(seq 1200); do pidof fio >/dev/null || break; sleep 0.1; done; cat /tmp/fio.log /tmp/fio.json; }\n";

impl Client {
    fn begin(c: &mut Ctx<'_>, ours: &Ours, case: Case, to: [IpAddr; 2]) -> Result<Self, Error> {
        match (case.role, case.other) {
            (Role::Server, Other::Ours) => {
                let paths = [0, 1].map(|n| format!("{},{}", HOST_V4[n], to[n]));
                let more = ["--json", "--policy", "round-robin", "--reconnect-delay", "1"];
                let mut mapping = Mapping::of_ours(c, &paths, "disk", &more)?;
                mapping.wait_more("mapped", 0, Duration::from_secs(90))?;
                Fio::fill(c, &mapping)?;
                let fio = Fio::start(c, &mapping, Load::Both)?;
                Ok(Self::Host(Box::new((mapping, fio))))
            }
            (Role::Server, Other::Kernel) => {
                let head = head_to(c, Ip::V4, to)?;
                let script = format!("{INSMOD_CLIENT}{head}{CLIENT_UP}{START}");
                c.guest()?.run(&script, 120)?;
                Ok(Self::Kernel(head))
            }
            (Role::Client, other) => {
                let device = if other == Other::Ours {
                    "disk"
                } else {
                    "newroot/dev/ram0"
                };
                let me = [Ours::addr(c, 0)?, Ours::addr(c, 1)?];
                let begin = format!(
                    "begin map map --json --rdma rxe0 --rdma rxe1 --session ours --path {},{} --path {},{} --device {device} \
                     --nbd /tmp/nbd.sock --control /tmp/map.sock --policy round-robin --reconnect-delay 1\n\
                     told map '\"mapped\"' 90\n{LOAD}up 2 60; load; sleep 3; runs",
                    me[0], to[0], me[1], to[1]
                );
                ours.run(c, &begin, 180)?;
                Ok(Self::Guest)
            }
        }
    }

    /// Waits until a path is known to be lost; the load goes on.
    fn goes_on_by_the_other(&mut self, c: &mut Ctx<'_>, ours: &Ours) -> Result<(), Error> {
        match self {
            Self::Host(host) => {
                let (mapping, fio) = &mut **host;
                mapping.wait_more("path_down", 0, TIMEOUT * 2)?;
                std::thread::sleep(Duration::from_secs(2));
                fio.still_runs()
            }
            Self::Kernel(head) => {
                let script = format!(
                    "{head}for i in $(seq 900); do [ $(connected) = 1 ] && break; sleep 0.1; done; paths; [ $(connected) = 1 ]\n\
                     sleep 2; pidof fio >/dev/null\n"
                );
                c.guest()?.run(&script, 150).map(drop)
            }
            Self::Guest => ours.run(c, &format!("{LOAD}up 1 120; sleep 2; runs"), 150).map(drop),
        }
    }

    /// Waits until both paths are connected, and the load goes on.
    fn has_both(&mut self, c: &mut Ctx<'_>, ours: &Ours) -> Result<(), Error> {
        check_stop()?;
        match self {
            Self::Host(host) => {
                let (mapping, fio) = &mut **host;
                // The first time is part of the beginning, and not told.
                mapping.wait_more("path_up", 0, RETURN)?;
                std::thread::sleep(Duration::from_secs(2));
                fio.still_runs()
            }
            // It waits for that at its end.
            Self::Kernel(_) => Ok(()),
            Self::Guest => {
                let script = format!("{LOAD}up 2 {}; sleep 2; runs", RETURN.as_secs() * 2);
                ours.run(c, &script, 200).map(drop)
            }
        }
    }

    /// Ends load and session. The longest that a request took; an error unless all went well.
    fn end(self, c: &mut Ctx<'_>, ours: &Ours) -> Result<Duration, Error> {
        match self {
            Self::Host(host) => {
                let (mapping, fio) = *host;
                let longest = fio.stop().map_err(|e| format!("{e}\n{}", mapping.process.text()))?;
                Fio::verify(c, &mapping)?;
                mapping.stop()?;
                Ok(longest)
            }
            Self::Kernel(head) => {
                let ended = c.guest()?.run(&format!("{head}unload\n"), 240);
                let back =
                    ended.and_then(|report| Ok((report, c.guest()?.run(&format!("{head}{BY_TURNS}{BACK}"), 400)?)));
                let down = client_down(c);
                let (report, _) = back?;
                down?;
                longest_of(&report, &["read", "write"])
            }
            Self::Guest => {
                let report = ours.run(c, &format!("{LOAD}unload"), 240);
                let ended = ours.run(c, "ends map; ! grep panicked /tmp/map.err; cat /tmp/map.out", 120)?;
                for lost in ["session_lost", "remapped"] {
                    if ended.contains(lost) {
                        return Err(format!("the session was lost: {ended}").into());
                    }
                }
                longest_of(&report?, &["read", "write"])
            }
        }
    }
}
