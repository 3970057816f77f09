//! A network that comes and goes, time and again, under our client.

use std::time::Duration;

use ferroce_tests::usage::Usage;

use super::{
    super::{Ctx, Direction, Scenario},
    Cut, connected_anew,
    flaps::flat,
    our_client::{Fio, Load, TIMEOUT, both_carry, map, same_in_guest, server_down, server_up},
    script,
};
use crate::{Error, far::Ip};

pub(super) fn list() -> Vec<Scenario> {
    let s = Scenario::new(10, "paths-20-flaps-our-client", Direction::OursToKernel, flaps);
    vec![s.nets(2).waits()]
}

const FLAPS: usize = 20;

/// What the guest's devices have: the lines of `rdma resource`, without those of what is no longer there.
const RESOURCES: &str = "rdma resource show | sed 's/^[0-9]*: //' | grep '^rxe'\n";

/// A path loses its network and gets it back twenty times under load. Our process and the guest's devices have as much of
/// everything afterwards as before.
fn flaps(c: &mut Ctx<'_>) -> Result<String, Error> {
    server_up(c)?;
    let result = under_load(c);
    // Also for the next scenario.
    Cut::Carrier.set(c, true)?;
    server_down(c)?;
    result
}

fn under_load(c: &mut Ctx<'_>) -> Result<String, Error> {
    let mut mapping = map(c, Ip::V4, &["--policy", "round-robin", "--reconnect-delay", "1"])?;
    Fio::fill(c, &mapping)?;
    let mut fio = Fio::start(c, &mapping, Load::Both)?;
    both_carry(c, 20)?;
    let first = script(c, RESOURCES, 30)?;
    let mut usage = Vec::new();
    for _ in 0..FLAPS {
        let [down, up] = ["path_down", "path_up"].map(|event| mapping.count(event));
        Cut::Carrier.set(c, false)?;
        mapping.wait_more("path_down", down, TIMEOUT * 2)?;
        Cut::Carrier.set(c, true)?;
        mapping.wait_more("path_up", up, Duration::from_secs(120))?;
        both_carry(c, 5)?;
        fio.still_runs()?;
        usage.push(Usage::of(mapping.process.id())?);
    }
    let last = settled(c, &first)?;
    let longest = fio.stop()?;
    let flat = flat(&usage)?;
    same_in_guest(c, &mapping)?;
    if mapping.count("session_lost") > 0 {
        return Err(format!("the session was lost:\n{}", mapping.process.text()).into());
    }
    mapping.stop()?;
    let attempts = connected_anew(c)?;
    if longest > TIMEOUT {
        return Err(format!("a request took {longest:?}").into());
    }
    Ok(format!(
        "{FLAPS} times gone and back (attempt {attempts} of the same path), no error, all blocks right, the longest request took {:.1} s; {flat}; the guest's devices \
         as at first: {}: passed",
        longest.as_secs_f64(),
        last.trim().replace('\n', "; ")
    ))
}

/// What the guest's devices have once that is `first` again, for which the kernel may take the time that it waits for the
/// end of connections.
fn settled(c: &mut Ctx<'_>, first: &str) -> Result<String, Error> {
    let mut last = String::new();
    for _ in 0..60 {
        last = script(c, RESOURCES, 30)?;
        if last == first {
            return Ok(last);
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    Err(format!("the guest's devices had {first}, then {last}").into())
}
