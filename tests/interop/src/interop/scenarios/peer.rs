//! `--peer`, with a guest as the host.

use std::{process::Command, time::Duration};

use super::{Ctx, Direction, Scenario};
use crate::{Error, lab::Proc, peer_mode};

pub(super) fn list() -> Vec<Scenario> {
    vec![Scenario::new(1, "peer-script", Direction::Both, peer_script)]
}

const PORT: &str = "7002";

/// The other half's script is brought to the guest and run there by hand; then a run with `--peer` does the rest.
fn peer_script(c: &mut Ctx<'_>) -> Result<String, Error> {
    let addr = c.far.addr(crate::far::Ip::V4)?.to_string();
    let v6 = c.far.addr(crate::far::Ip::V6)?.to_string();
    let install = format!(
        "cat > /tmp/ferroce-peer.sh <<'END_OF_PEER_SCRIPT'\n{}END_OF_PEER_SCRIPT\n",
        peer_mode::script()
    );
    c.guest()?.run(&install, 60)?;
    c.guest()?.run(
        &format!("setsid bash /tmp/ferroce-peer.sh {addr} {PORT} >/tmp/peer.log 2>&1 &"),
        60,
    )?;
    let seen = c.path("peer.json");
    let logs = c.path("peer");
    let lab = c.places.lab.display().to_string();
    let ferroce = c.places.ferroce.display().to_string();
    let mut command = Command::new(std::env::current_exe()?);
    command.args([
        "--peer",
        &addr,
        "--peer-v6",
        &v6,
        "--peer-port",
        PORT,
        "--peer-wait",
        "180",
        "--json",
        &seen,
    ]);
    command.args(["--lab", &lab, "--logs", &logs, "--ferroce", &ferroce, "--set", "ci"]);
    let result = Proc::spawn("interop-peer", &mut command, &c.dir)?.finish(Duration::from_secs(900));
    let theirs = c
        .guest()?
        .try_run(
            "cat /tmp/peer.log; pkill -INT -f ferroce-peer.sh; sleep 1; ls -d /tmp/tmp.* 2>/dev/null",
            60,
        )?
        .1;
    let text = result.map_err(|e| format!("{e}\nthe script said: {theirs}"))?;
    if theirs.contains("/tmp/tmp.") {
        return Err(format!("the script left something behind: {theirs}").into());
    }
    Ok(text.lines().last().unwrap_or_default().to_owned())
}
