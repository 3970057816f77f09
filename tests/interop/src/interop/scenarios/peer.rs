//! `--peer`, with a guest as the host: the other half is brought there by ssh, as a user would do it.

mod kit;

use std::{
    fs::{self, File},
    io::{PipeWriter, Write as _},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use super::{Ctx, Direction, Scenario};
use crate::{Error, far::Ip, lab::Proc};

pub(super) fn list() -> Vec<Scenario> {
    vec![
        Scenario::new(1, "peer-script-by-hand", Direction::Both, by_hand).waits(),
        Scenario::new(6, "peer-script-by-ssh", Direction::Both, by_ssh).waits(),
        Scenario::new(1, "hardware-peer", Direction::Both, |_| Err(NO_PEER.into())).elsewhere(NO_PEER),
        Scenario::new(6, "peer-script-interrupted", Direction::OursToKernel, interrupted),
        kit::scenario(),
    ]
}

/// Why the scenarios have not run against a device.
const NO_PEER: &str = "no --peer HOST";

/// The lab itself has 7001.
const PORT: &str = "7002";

/// An ssh server in the guest that takes our key. The host's keys and files are not touched: the guest writes into an
/// overlay.
const SSHD: &str = "\
    set -e; mkdir -p /root/.ssh; chmod 700 /root /root/.ssh; cat > /root/.ssh/authorized_keys\n\
    [ -e /tmp/hostkey ] || dropbearkey -t ed25519 -f /tmp/hostkey >/dev/null\n\
    pidof dropbear >/dev/null || dropbear -s -r /tmp/hostkey -P /tmp/dropbear.pid\n";

/// Whether anything of the other half is still there.
const LEFT: &str = "\
    for i in $(seq 50); do [ -z \"$(ls -d /tmp/ferroce-peer.* 2>/dev/null; pgrep -af '(copied|peer)[.]sh'; ss -Hltn | grep -E ':(7002|18600) ')\" ] \
        && exit 0; sleep 0.2; done; ls -d /tmp/ferroce-peer.*; pgrep -af '(copied|peer)[.]sh'; ss -ltnp; exit 1";

/// Makes a key, starts the ssh server in the guest, and returns the ssh command that reaches it.
fn ssh(c: &mut Ctx<'_>) -> Result<String, Error> {
    // ssh refuses a key that others may read, and there are no spaces to be in its path.
    let key = c.places.run.join("key");
    if !key.exists() {
        let path = key.display().to_string();
        c.tool(
            "ssh-keygen",
            "ssh-keygen",
            &["-q", "-t", "ed25519", "-N", "", "-f", &path],
            60,
        )?;
    }
    let public = fs::read_to_string(key.with_extension("pub"))?;
    let script = SSHD.replace("cat >", &format!("echo '{}' >", public.trim()));
    c.guest()?.run(&script, 60)?;
    Ok(format!(
        "ssh -F none -i {} -o IdentitiesOnly=yes -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no -o BatchMode=yes \
         -o LogLevel=ERROR",
        key.display()
    ))
}

/// This program once more, in the namespace of the lab, as a user would start it.
fn interop(c: &Ctx<'_>, log: &str, args: &[&str]) -> Result<Proc, Error> {
    let mut command = Command::new(std::env::current_exe()?);
    let logs = c.path(&format!("{log}-logs"));
    command.arg("--lab").arg(&c.places.lab).args(["--logs", &logs]);
    command
        .arg("--ferroce")
        .arg(&c.places.ferroce)
        .args(["--peer-port", PORT])
        .args(args);
    Proc::spawn(log, &mut command, &c.dir)
}

/// Starts a command at the end of an ssh connection; what is written into the pipe is typed there.
fn typed(ssh: &str, args: &[&str], name: &str, dir: &Path) -> Result<(Proc, PipeWriter), Error> {
    let (input, keyboard) = std::io::pipe()?;
    let mut words = ssh.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or("ssh"));
    command.args(words).args(args);
    Ok((Proc::spawn_with_input(name, &mut command, dir, input.into())?, keyboard))
}

/// The last line of a run with `--peer`, when all passed but what takes a kit.
fn summary(run: &mut Proc) -> Result<String, Error> {
    // Its status is no success then.
    run.wait_gone(Duration::from_secs(900))?;
    judged(&run.text())
}

fn judged(text: &str) -> Result<String, Error> {
    let last = text.lines().last().unwrap_or_default();
    let of_a_kit = |line: &str| line.starts_with("device-") || line.starts_with("kernel-rnbd-");
    let missing = |line: &&str| line.contains(" not run ") && !line.starts_with("interop: ") && !of_a_kit(line);
    let well = last.starts_with("interop: ") && last.contains(" passed, 0 failed, ") && !last.contains(" 0 passed");
    match text.lines().find(missing) {
        None if well => Ok(last.to_owned()),
        None => Err(format!("the run ended with {last:?}:\n{text}").into()),
        Some(line) => Err(format!("not run: {line}").into()),
    }
}

/// The script is copied to the host and run there at a terminal; a run with `--peer` does the rest; ctrl-C ends the script.
fn by_hand(c: &mut Ctx<'_>) -> Result<String, Error> {
    let ssh = ssh(c)?;
    let addr = c.far.addr(Ip::V4)?.to_string();
    let v6 = c.far.addr(Ip::V6)?.to_string();
    let target = format!("root@{addr}");
    let file = PathBuf::from(c.path("ferroce-peer.sh"));
    let text = interop(c, "print-script", &["--peer-script"])?.finish(Duration::from_secs(30))?;
    fs::write(&file, text)?;
    let mut words = ssh.split_whitespace();
    let mut copy = Command::new(words.next().unwrap_or("ssh"));
    copy.args(words).args([&target, "cat > /tmp/copied.sh"]);
    Proc::spawn_with_input("copy", &mut copy, &c.dir, File::open(&file)?.into())?.finish(Duration::from_secs(60))?;

    let run = format!("bash /tmp/copied.sh {addr} {PORT}");
    let (mut script, mut keyboard) = typed(&ssh, &["-tt", &target, &run], "script", &c.dir)?;
    script.wait_for("cargo xtask interop --peer", Duration::from_secs(120))?;
    let result = interop(c, "interop-peer", &["--peer", &addr, "--peer-v6", &v6]).and_then(|mut run| summary(&mut run));
    keyboard.write_all(b"\x03")?;
    let ended = script.wait_gone(Duration::from_secs(20));
    let left = c.guest()?.run(LEFT, 60);
    let text = result.map_err(|e| format!("{e}\nthe script said: {}", script.text()))?;
    ended.and(left)?;
    Ok(format!("{text}; nothing left there"))
}

/// A run that starts the script by ssh.
fn with_ssh(c: &mut Ctx<'_>, log: &str, only: &[&str]) -> Result<Proc, Error> {
    let rsh = ssh(c)?;
    let target = format!("root@{}", c.far.addr(Ip::V4)?);
    let v6 = c.far.addr(Ip::V6)?.to_string();
    let mut args = vec!["--peer", &v6, "--ssh", &target, "--rsh", &rsh];
    only.iter().for_each(|name| args.extend(["--only", name]));
    interop(c, log, &args)
}

/// `--ssh` starts the script and ends it.
fn by_ssh(c: &mut Ctx<'_>) -> Result<String, Error> {
    let mut run = with_ssh(c, "interop-ssh", &["rping-our-client-v6", "pingpong-our-server-v6"])?;
    let text = summary(&mut run)?;
    c.guest()?.run(LEFT, 60)?;
    Ok(format!("{text}; nothing left there"))
}

/// The same, and ctrl-C in the middle.
fn interrupted(c: &mut Ctx<'_>) -> Result<String, Error> {
    let mut run = with_ssh(c, "interop-stopped", &["ops-v6"])?;
    let wire = PathBuf::from(c.path("interop-stopped-logs/ops-v6/wire.pcap"));
    let under_way = || fs::metadata(&wire).is_ok_and(|m| m.len() > 100_000);
    run.wait_until(Duration::from_secs(180), under_way)?;
    run.interrupt();
    run.wait_gone(Duration::from_secs(30))?;
    c.guest()?.run(LEFT, 60)?;
    Ok("nothing left there".to_owned())
}

#[cfg(test)]
mod tests {
    use super::judged;

    #[test]
    fn a_run_without_a_kit_passes_without_what_takes_one() {
        let kit = "ops-v4     passed      1.0 s  x\ndevice-contract     not run     0.0 s  no rdma-end there\n";
        assert!(judged(&format!("{kit}interop: 1 passed, 0 failed, 1 not run\n")).is_ok());
        assert!(
            judged(&format!(
                "{kit}rping-v4   not run     0.0 s  x\ninterop: 1 passed, 0 failed, 2 not run\n"
            ))
            .is_err()
        );
        assert!(judged(&format!("{kit}interop: 1 passed, 1 failed, 1 not run\n")).is_err());
        assert!(judged("interop: 0 passed, 0 failed, 0 not run\n").is_err());
        assert!(judged("").is_err());
    }
}
