//! A network that comes and goes, time and again.

use std::time::Duration;

use ferroce_tests::usage::Usage;

use super::{
    super::{
        Ctx, Direction, Scenario,
        faults::same_on_image,
        rnbd::{self, Server, image},
    },
    Cut, connected_anew,
    kernel_client::{BY_TURNS, CLIENT_UP, client_down, head},
    longest, script,
};
use crate::{Error, far::Ip};

pub(super) fn list() -> Vec<Scenario> {
    let s = Scenario::new(10, "paths-20-flaps-kernel-client", Direction::KernelToOurs, flaps);
    vec![s.nets(2).waits()]
}

const FLAPS: usize = 20;

/// What is there after as many flaps is what a server needs: its pools have been filled.
const WARM: usize = 4;

/// fio runs until it is told to end. The paths take turns: see [`BY_TURNS`].
const START: &str = "map_by path=$P0 path=$P1; up 2 100; load 4M 1800 100; carried $P0; carried $P1\n";

const GONE: &str = "up 1 100; pidof fio >/dev/null\n";

/// The client waits 30 s before it connects by itself.
const BY_ITSELF: &str = "up 2 900\n";

/// By order it connects at once; the first orders may come before the carrier.
const BY_ORDER: &str = "\
    neighbours; for i in $(seq 100); do echo 1 2>/tmp/err > $S/$P1/reconnect && break; sleep 0.3; done; up 2 1\n";

/// The path carries load again.
const LOADED: &str = "echo 1 > $S/$P1/stats/rdma; carried $P1; pidof fio >/dev/null\n";

const END: &str = "paths; for p in $P0 $P1; do echo reconnects $(cat $S/$p/stats/reconnects); done; unload\n";
const CHECKED: &str = "\
    set -- $(cut -d' ' -f1 $S/$P0/stats/reconnects $S/$P1/stats/reconnects); [ \"$*\" = \"0 $FLAPS\" ]\n\
    sum 64; echo normal > $B/unmap_device\n";

/// A path loses its network and gets it back twenty times under load: by itself the first and the last time, by order in
/// between. The server has as much of everything afterwards as it had after the first few times.
fn flaps(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let server = Server::start_at(c, "0.0.0.0", &["disk"], "on")?;
    let mut usage = Vec::new();
    let result = under_load(c, &server, &mut usage);
    Cut::Carrier.set(c, true)?;
    client_down(c)?;
    let (report, out) = result?;
    let (opened, summary) = (server.count("session_opened"), server.summary()?);
    same_on_image(c, &out, 4 << 20)?;
    let flat = flat(&usage)?;
    let none = [
        "failed_requests",
        "protocol_errors",
        "access_errors",
        "no_resources",
        "malformed_messages",
    ];
    let replies = summary["counters"]["cm_sent_rep"].as_u64().unwrap_or_default();
    let wrong = none.iter().find(|name| summary[**name] != 0);
    // Two connections for each of two paths, and one of them so many times more; an answer may be repeated.
    if opened != 1 || wrong.is_some() || replies < 2 * (2 + FLAPS as u64) {
        return Err(format!("{opened} sessions were opened; the server counted {summary}").into());
    }
    let attempts = connected_anew(c)?;
    Ok(format!(
        "{FLAPS} times gone and back (attempt {attempts} of the same path), no error, all blocks right, the longest request \
         took {:.1} s, one session; the server: {flat}: passed",
        longest(&report)?.as_secs_f64()
    ))
}

/// fio's report, and what was printed after that.
fn under_load(c: &mut Ctx<'_>, server: &Server, usage: &mut Vec<Usage>) -> Result<(String, String), Error> {
    let head = format!("FLAPS={FLAPS}\n{}", head(c, Ip::V4)?);
    script(
        c,
        &format!("{}{head}{CLIENT_UP}{START}{BY_TURNS}", rnbd::INSMOD_CLIENT),
        120,
    )?;
    for n in 1..=FLAPS {
        Cut::Carrier.set(c, false)?;
        script(c, &format!("{head}{GONE}"), 60)?;
        std::thread::sleep(Duration::from_secs(1));
        Cut::Carrier.set(c, true)?;
        let back = if n == 1 || n == FLAPS { BY_ITSELF } else { BY_ORDER };
        script(c, &format!("{head}{back}{LOADED}"), 240)?;
        usage.push(Usage::of(server.process.id())?);
    }
    let report = script(c, &format!("{head}{END}"), 240)?;
    Ok((report, script(c, &format!("{head}{CHECKED}"), 120)?))
}

/// What the last has more than the one after [`WARM`] flaps, in words; an error unless that is nothing.
pub(super) fn flat(usage: &[Usage]) -> Result<String, Error> {
    /// Chunks that were not used before take memory when they are; a connection with its queues takes more.
    const SLACK: u64 = 1 << 20;
    let (Some(warm), Some(last)) = (usage.get(WARM - 1), usage.last()) else {
        return Err("too few samples".into());
    };
    let grown = last.resident.saturating_sub(warm.resident);
    if last.threads != warm.threads || last.descriptors != warm.descriptors || grown > SLACK {
        return Err(format!("it has grown: {usage:?}").into());
    }
    Ok(format!(
        "it has {} threads, {} descriptors, {} MiB ({} KiB more than after {WARM} times)",
        last.threads,
        last.descriptors,
        last.resident >> 20,
        grown >> 10
    ))
}

#[cfg(test)]
mod tests {
    use super::{Usage, flat};

    #[test]
    fn a_server_that_grows_is_found() {
        let usage = |threads, descriptors, kib: u64| Usage {
            threads,
            descriptors,
            resident: kib << 10,
            ..Usage::default()
        };
        let mut all = vec![
            usage(2, 9, 5000),
            usage(3, 10, 8000),
            usage(3, 10, 8100),
            usage(3, 10, 8100),
        ];
        assert!(flat(&all[..3]).is_err());
        assert!(flat(&all).unwrap().contains("(0 KiB more"));
        for grown in [usage(4, 10, 8100), usage(3, 11, 8100), usage(3, 10, 9200)] {
            all.push(grown);
            assert!(flat(&all).is_err(), "{grown:?}");
            all.pop();
        }
    }
}
