//! 12: roce-hw in a guest, over libibverbs, librdmacm and rdma_rxe: the provider contract, and `ferroce` on it, towards the
//! kernel's RNBD in another guest and towards our transport in software here.

mod contract;
mod ends;
mod paths;
mod restart;
mod speed;

pub(super) use contract::passed as contract_passed;
pub(super) use speed::median;

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use super::{Ctx, Scenario};
use crate::{
    Error,
    far::Ip,
    guest::{Guest, Kernel},
    lab::Places,
};

pub(super) fn list() -> Vec<Scenario> {
    let lists = [
        contract::list(),
        ends::list(),
        paths::list(),
        restart::list(),
        speed::list(),
    ];
    lists.into_iter().flatten().map(|s| s.lacks(not_built)).collect()
}

fn not_built(places: &Places, _: Kernel) -> Option<String> {
    let lacking = [&places.contract, &places.rdma].into_iter().find(|p| !p.exists())?;
    Some(format!("no {}: roce-hw was not built", lacking.display()))
}

/// Who is at the other end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Other {
    /// Ours in software, here.
    Ours,
    /// The kernel's, in another guest.
    Kernel,
}

impl Other {
    const fn guests(self) -> u8 {
        match self {
            Self::Ours => 1,
            Self::Kernel => 2,
        }
    }
}

/// A program in the lab's folder, which guests see.
pub(super) struct Shown(PathBuf);

impl Shown {
    pub(super) fn new(program: &Path, places: &Places) -> Result<Self, Error> {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        // Of this run alone, and not in the way of those that share the folder.
        let shown = Self(places.lab.join(format!("{name}-{}", std::process::id())));
        fs::copy(program, &shown.0)?;
        Ok(shown)
    }

    /// Its path there.
    pub(super) fn path(&self) -> String {
        let name = self.0.file_name().unwrap_or_default();
        format!("$LAB/{}", name.to_string_lossy())
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Shell functions. `begin NAME ARGUMENT…` starts our program, `told NAME TEXT SECONDS` waits until it has said that, `ended NAME
/// SECONDS` until it has ended, `ends NAME` orders it to and wants it to end well, `killed NAME` kills it.
pub(super) const FUNCTIONS: &str = "\
    set -e\n\
    begin() { n=$1; shift; rm -f /tmp/$n.*; ( r=0; (echo $BASHPID >/tmp/$n.pid; exec \"$F\" \"$@\") >/tmp/$n.out 2>/tmp/$n.err || r=$?; \
        echo $r >/tmp/$n.rc ) </dev/null >/dev/null 2>&1 & }\n\
    said() { tail -n 40 /tmp/$1.out /tmp/$1.err; }\n\
    told() { for i in $(seq $(($3*10))); do grep -q -- \"$2\" /tmp/$1.out && return; [ -e /tmp/$1.rc ] && break; sleep 0.1; done; \
        echo \"$1 does not say $2\"; said $1; return 1; }\n\
    ended() { for i in $(seq $(($2*10))); do [ -e /tmp/$1.rc ] && return; sleep 0.1; done; echo \"$1 does not end\"; said $1; return 1; }\n\
    ends() { kill -TERM $(cat /tmp/$1.pid); ended $1 60; [ \"$(cat /tmp/$1.rc)\" = 0 ] || { echo \"$1 ended badly\"; said $1; return 1; }; }\n\
    killed() { kill -KILL $(cat /tmp/$1.pid); ended $1 20; }\n";

/// `ferroce` with roce-hw, in a guest: in the second, if there are two.
struct Ours(Shown);

impl Ours {
    fn new(c: &Ctx<'_>) -> Result<Self, Error> {
        Shown::new(&c.places.rdma, c.places).map(Self)
    }

    fn guest<'a>(c: &'a Ctx<'_>) -> Result<&'a Guest, Error> {
        let guest = c.second.as_deref().or(c.guest.as_deref());
        guest.ok_or_else(|| "needs a guest of the lab".into())
    }

    /// Its address on a network.
    fn addr(c: &Ctx<'_>, net: u8) -> Result<IpAddr, Error> {
        Ok(Self::guest(c)?.addr(net, Ip::V4))
    }

    /// Runs a script with [`FUNCTIONS`] and the program as `$F` there.
    fn run(&self, c: &Ctx<'_>, script: &str, seconds: u32) -> Result<String, Error> {
        let guest = Self::guest(c)?;
        let text = format!("F={}; ulimit -l unlimited\n{FUNCTIONS}{script}\n", self.0.path());
        let result = guest.run(&text, seconds);
        result.map_err(|e| format!("{e}\ndmesg:\n{}", guest.dmesg()).into())
    }

    /// What `ferroce ctl` shows of the paths of the process with this control socket: device and keys of each.
    fn paths(&self, c: &Ctx<'_>, socket: &str) -> Result<String, Error> {
        self.run(c, &format!("$F ctl --socket {socket} --json list"), 60)
    }
}
