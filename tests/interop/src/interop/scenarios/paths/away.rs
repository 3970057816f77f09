//! A network that is away for less than the time after which either end gives its path up.

use std::time::{Duration, Instant};

use super::{
    super::{
        Ctx, Direction, Scenario,
        faults::same_on_image,
        rnbd::{self, Server, image},
    },
    Cut,
    kernel_client::{self, BY_TURNS, CLIENT_UP, client_down, head},
    longest_of,
    our_client::{self, Fio, Load, both_carry, map, same_in_guest, server_down, server_up},
    script,
};
use crate::{Error, far::Ip};

pub(super) fn list() -> Vec<Scenario> {
    let ours = Scenario::new(10, "paths-away-3s-our-client", Direction::OursToKernel, our_client);
    let kernels = Scenario::new(
        10,
        "paths-away-3s-kernel-client",
        Direction::KernelToOurs,
        kernel_client,
    );
    vec![ours.nets(2).waits(), kernels.nets(2).waits()]
}

const AWAY: Duration = Duration::from_secs(3);

/// Until both paths carry load again: the kernel's server refuses one that it does not know to be lost for up to 35 s, and its client
/// waits 30 s before it connects again.
const BACK: Duration = Duration::from_secs(120);

fn away(c: &mut Ctx<'_>) -> Result<(), Error> {
    Cut::Port.set(c, false)?;
    std::thread::sleep(AWAY);
    Cut::Port.set(c, true)
}

fn our_client(c: &mut Ctx<'_>) -> Result<String, Error> {
    server_up(c)?;
    let result = ours_under_load(c);
    // Also for the next scenario.
    Cut::Port.set(c, true)?;
    server_down(c)?;
    result
}

fn ours_under_load(c: &mut Ctx<'_>) -> Result<String, Error> {
    let mapping = map(c, Ip::V4, &["--policy", "round-robin", "--reconnect-delay", "1"])?;
    Fio::fill(c, &mapping)?;
    let mut fio = Fio::start(c, &mapping, Load::Both)?;
    both_carry(c, 20)?;
    away(c)?;
    let start = Instant::now();
    while let Err(e) = both_carry(c, 20) {
        if start.elapsed() > BACK {
            return Err(format!("{e}\n{}", mapping.process.text()).into());
        }
    }
    fio.still_runs()?;
    let longest = fio.stop()?;
    same_in_guest(c, &mapping)?;
    let [down, lost] = ["path_down", "session_lost"].map(|event| mapping.count(event));
    if lost > 0 || longest > our_client::TIMEOUT {
        return Err(format!("a request took {longest:?}:\n{}", mapping.process.text()).into());
    }
    mapping.stop()?;
    Ok(format!(
        "no error, all blocks right, the longest request took {:.1} s; the path went down {down} times; both carry load: passed",
        longest.as_secs_f64()
    ))
}

/// Each block is written once. No reads: for these the client registers memory, which rdma_rxe may repeat (`specs/kernel.md`), and then
/// the queue pair never sends again.
const WRITES: &str = "\
    map_by path=$P0 path=$P1; up 2 100\n\
    fio --name=job --filename=/dev/rnbd0 --size=16M --bs=4k --rw=randwrite --direct=1 --ioengine=libaio --iodepth=8 \
        --rate_iops=200 --verify=crc32c --do_verify=0 --output=/tmp/fio.json --output-format=json >/tmp/fio.log 2>&1 &\n";

/// Both paths carry load again, by turns.
const AGAIN: &str = "\
    pidof fio >/dev/null; report >/tmp/report; paths; neighbours; up 2 900\n\
    for p in $S/*; do echo 1 > $p/stats/rdma; done; for p in $P0 $P1; do echo reconnects $(cat $S/$p/stats/reconnects); done\n\
    fio --name=job --filename=/dev/rnbd0 --size=16M --bs=4k --rw=read --direct=1 --ioengine=libaio --iodepth=8 \
        --verify=crc32c --verify_fatal=1 >/tmp/verify.log || { cat /tmp/verify.log; exit 1; }\n\
    paths; [ $(cat $S/*/stats/rdma | cut -d' ' -f1 | grep -c '^[1-9]') = 2 ]; sum 256; cat /tmp/report\n\
    echo normal > $B/unmap_device\n";

fn kernel_client(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let server = Server::start_at(c, "0.0.0.0", &["disk"], "on")?;
    let result = kernels_under_load(c);
    Cut::Port.set(c, true)?;
    client_down(c)?;
    let out = result?;
    let (opened, summary) = (server.count("session_opened"), server.summary()?);
    same_on_image(c, &out, 16 << 20)?;
    if opened != 1 || summary["failed_requests"] != 0 || summary["access_errors"] != 0 {
        return Err(format!("{opened} sessions were opened; the server counted {summary}").into());
    }
    let longest = longest_of(&out, &["write"])?;
    if longest > kernel_client::TIMEOUT {
        return Err(format!("a request took {longest:?}").into());
    }
    let back: Vec<&str> = out.lines().filter(|l| l.starts_with("reconnects ")).collect();
    Ok(format!(
        "no error, all blocks right, the longest request took {:.1} s; both carry load ({}): passed",
        longest.as_secs_f64(),
        back.join(", ")
    ))
}

/// What was printed at the end, with fio's report.
fn kernels_under_load(c: &mut Ctx<'_>) -> Result<String, Error> {
    let head = head(c, Ip::V4)?;
    script(
        c,
        &format!(
            "{}{head}{CLIENT_UP}{WRITES}{BY_TURNS}carried $P0; carried $P1\n",
            rnbd::INSMOD_CLIENT
        ),
        120,
    )?;
    away(c)?;
    script(c, &format!("{head}{AGAIN}"), 300)
}
