//! Programs with AF_RDS sockets: the same one in the guest, on the kernel's RDS, and here under `ferroce run`.

use std::{thread, time::Duration};

use super::{Ctx, LENS, LOAD, PORT, SECONDS, START, TIMEOUT};
use crate::{Error, far::Ip, lab::Proc};

/// End of a conversation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Side {
    Ours,
    Kernel,
}

impl Side {
    const BOTH: [Self; 2] = [Self::Ours, Self::Kernel];

    const fn other(self) -> Self {
        match self {
            Self::Ours => Self::Kernel,
            Self::Kernel => Self::Ours,
        }
    }
}

/// Both ends with their addresses.
struct Ends<'c, 'a> {
    c: &'c mut Ctx<'a>,
    ip: Ip,
    /// Programs so far: each has a log of its own.
    started: u32,
}

impl<'c, 'a> Ends<'c, 'a> {
    fn new(c: &'c mut Ctx<'a>, ip: Ip) -> Result<Self, Error> {
        c.guest()?.run(LOAD, 60)?;
        Ok(Self { c, ip, started: 0 })
    }

    /// Starts `rds-peer`: the first word is its command, `@` the other end's address.
    fn start(&mut self, side: Side, words: &str) -> Result<Proc, Error> {
        let (command, words) = words.split_once(' ').unwrap_or((words, ""));
        self.program(side, &["rds-peer", command], words)
    }

    /// Starts `rds-rdma`, which answers at a port, or calls one at the other end (`@`).
    fn rdma(&mut self, side: Side, words: &str) -> Result<Proc, Error> {
        self.program(side, &["rds-rdma"], words)
    }

    /// Starts a program of the lab: its name and the words before its own address, then those behind it.
    fn program(&mut self, side: Side, before: &[&str], behind: &str) -> Result<Proc, Error> {
        let (host, far) = (self.c.host(self.ip)?.to_string(), self.c.far.addr(self.ip)?.to_string());
        let (own, other) = if side == Side::Ours { (host, far) } else { (far, host) };
        let behind = behind.split_whitespace();
        let behind = behind.map(|word| if word == "@" { &*other } else { word });
        let words: Vec<&str> = before.iter().copied().chain([&*own]).chain(behind).collect();
        self.started += 1;
        let name = format!("{}-{side:?}", self.started).to_lowercase();
        match side {
            Side::Ours => {
                let mut words: Vec<String> = words.into_iter().map(str::to_owned).collect();
                words[0] = self.c.places.lab.join(&words[0]).display().to_string();
                self.c.under_run(&name, &words, self.ip)
            }
            Side::Kernel => self.c.theirs(&name, &words, SECONDS),
        }
    }

    /// Starts it, and waits until it has a socket.
    fn ready(&mut self, side: Side, words: &str) -> Result<Proc, Error> {
        let mut program = self.start(side, words)?;
        program.wait_for("waiting", START)?;
        Ok(program)
    }

    /// Runs it to its end. Returns the last line that it printed.
    fn run(&mut self, side: Side, words: &str) -> Result<String, Error> {
        ended(side, &mut self.start(side, words)?)
    }

    /// Checks how many connections to the other end there are, all up. The kernel has some of other scenarios that are not.
    fn connections(&mut self, count: u32) -> Result<(), Error> {
        for side in Side::BOTH {
            let said = self.run(side, "connections @")?;
            let wanted = match side {
                Side::Ours => format!("{count} connections, {count} up"),
                Side::Kernel => format!(", {count} up"),
            };
            if !said.ends_with(&wanted) {
                return Err(format!("{side:?}: {said}; expected {wanted}").into());
            }
        }
        Ok(())
    }
}

fn ended(side: Side, program: &mut Proc) -> Result<String, Error> {
    let said = program.finish(TIMEOUT).map_err(|e| format!("{side:?}: {e}"))?;
    Ok(said.lines().last().unwrap_or_default().to_owned())
}

/// Messages, pings, cancelling and congestion both ways, and as many connections as there are types of service.
pub(super) fn everything(c: &mut Ctx<'_>, ip: Ip) -> Result<String, Error> {
    let mut ends = Ends::new(c, ip)?;
    let mut said = Vec::new();
    let mut serving = Vec::new();
    for side in Side::BOTH {
        serving.push(ends.ready(side, &format!("serve {PORT}"))?);
    }
    let lens = LENS.replace(',', " ");
    for (side, cold) in Side::BOTH.into_iter().zip([9, 10]) {
        said.push(ends.run(side, "ping @ 20")?);
        for tos in [0, 8] {
            said.push(ends.run(side, &format!("call @ {PORT} {tos} {lens}"))?);
        }
        said.push(ends.run(side, &format!("cancel @ {PORT} {cold}"))?);
        let mut slow = ends.ready(side.other(), "slow 4010")?;
        said.push(ends.run(side, "fill @ 4010")?);
        said.push(ended(side.other(), &mut slow)?);
    }
    let call = format!("call @ {PORT} 0 {}", "1 5000 ".repeat(20));
    let together: Result<Vec<Proc>, Error> = (0..4).map(|_| ends.start(Side::Ours, &call)).collect();
    together?
        .iter_mut()
        .try_for_each(|call| ended(Side::Ours, call).map(drop))?;
    // Of types of service 0, 8, 9 and 10.
    ends.connections(4)?;
    Ok(format!(
        "{}; 4 processes of ours share a connection: passed",
        said.join("; ")
    ))
}

/// A program reads and writes memory that the other one offers, and the other way round: ours calls, then the kernel's.
pub(super) fn rdma(c: &mut Ctx<'_>, ip: Ip) -> Result<String, Error> {
    let mut ends = Ends::new(c, ip)?;
    let mut steps = 0;
    for (side, port) in Side::BOTH.into_iter().zip(["4030", "4031"]) {
        let mut answers = ends.rdma(side.other(), port)?;
        answers.wait_for("waiting", START)?;
        let call = ends.rdma(side, &format!("@ {port}"))?.finish(TIMEOUT);
        let answer = answers.finish(TIMEOUT);
        let said = match (call, answer) {
            (Ok(call), Ok(answer)) => call + &answer,
            (call, answer) => return Err(format!("{side:?} calls: {call:?}\n{answer:?}").into()),
        };
        steps += said.lines().filter(|line| line.ends_with(": 60000 bytes")).count();
    }
    match steps {
        10 => Ok("60000 bytes read and written by each side as caller and as callee: passed".to_owned()),
        _ => Err(format!("{steps} steps of 10").into()),
    }
}

/// A stream each way, at the same time, of so many messages up to so many bytes long, so many us apart. `meanwhile` is run when both
/// are under way.
fn both_ways(
    ends: &mut Ends<'_, '_>,
    shape: &str,
    meanwhile: impl FnOnce(&mut Ctx<'_>) -> Result<(), Error>,
) -> Result<String, Error> {
    let count = shape.split_whitespace().next().unwrap_or_default();
    let mut programs = Vec::new();
    for side in Side::BOTH {
        programs.push((side, ends.ready(side, &format!("take 4020 {count}"))?));
    }
    for side in Side::BOTH {
        programs.push((side, ends.start(side, &format!("send @ 4020 {shape}"))?));
    }
    for (_, sends) in &mut programs[2..] {
        sends.wait_for("under way", TIMEOUT)?;
    }
    meanwhile(ends.c)?;
    let said: Result<Vec<String>, Error> = programs
        .iter_mut()
        .map(|(side, program)| ended(*side, program))
        .collect();
    Ok(format!("{}, each way: passed", said?[0]))
}

/// Messages while packets are lost.
pub(super) fn streams(c: &mut Ctx<'_>) -> Result<String, Error> {
    let mut ends = Ends::new(c, Ip::V4)?;
    both_ways(&mut ends, "300 9000 0", |_| Ok(()))
}

/// The guest's port of the bridge goes for less time than the kernel needs to see it, then for longer: the connection breaks.
pub(super) fn unplugged(c: &mut Ctx<'_>) -> Result<String, Error> {
    let mut ends = Ends::new(c, Ip::V4)?;
    both_ways(&mut ends, "700 4000 20000", |c| {
        for seconds in [1, 9] {
            c.guest()?.set_port(false)?;
            thread::sleep(Duration::from_secs(seconds));
            c.guest()?.set_port(true)?;
            thread::sleep(Duration::from_secs(1));
        }
        Ok(())
    })
}

/// The plug is pulled under the kernel, which boots again. Our socket stays.
pub(super) fn guest_restarts(c: &mut Ctx<'_>) -> Result<String, Error> {
    const LIVES: u32 = 2;
    let mut ends = Ends::new(c, Ip::V4)?;
    let mut serves = ends.ready(Side::Ours, &format!("serve {PORT}"))?;
    for life in 0..LIVES {
        if life > 0 {
            ends.c.guest()?.reboot()?;
            ends.c.guest()?.run(LOAD, 60)?;
        }
        let _serves = ends.ready(Side::Kernel, &format!("serve {PORT}"))?;
        // More than the acknowledgements of the life before count.
        let call = format!("call @ {PORT} 0 {}", "1 5000 ".repeat(life as usize + 1));
        for side in [Side::Kernel, Side::Ours] {
            ends.run(side, &call)?;
        }
    }
    serves.still_runs()?;
    Ok(format!("messages both ways in {LIVES} lives of the kernel: passed"))
}

/// Both sides send the first message of each of 200 connections at the same time, a connection each 40 ms.
pub(super) fn connects_at_once(c: &mut Ctx<'_>) -> Result<String, Error> {
    let mut ends = Ends::new(c, Ip::V4)?;
    // 200 connections with the usual rings would take 800 MB of the guest's memory.
    ends.c
        .guest()?
        .run("sysctl -w net.rds.ib.max_recv_wr=32 net.rds.ib.max_send_wr=32", 20)?;
    let mut kernel = ends.start(Side::Kernel, "cross @ 1 200 0")?;
    let _node = ends.ready(Side::Ours, &format!("serve {PORT}"))?;
    let ours = ends.run(Side::Ours, "cross @ 1 200 10000");
    let kernel = ended(Side::Kernel, &mut kernel);
    let said = match (ours, kernel) {
        (Ok(ours), Ok(kernel)) => format!("{ours}; kernel: {kernel}"),
        (ours, kernel) => return Err(format!("{ours:?}\n{kernel:?}").into()),
    };
    let raced = ends.c.guest()?.run("$LAB/rds-peer counter ib_connect_raced", 20)?;
    ends.connections(201)?;
    // Its kernel would ask for all of them again for as long as it runs.
    ends.c.guest()?.reboot()?;
    match raced.trim().parse::<u64>()? {
        0 => Err(format!("{said}; none were at the same time").into()),
        raced => Ok(format!("{said}; {raced} races seen by the kernel: passed")),
    }
}
