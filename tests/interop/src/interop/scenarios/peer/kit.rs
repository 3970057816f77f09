//! The conformance kit, with a guest as the host that has the device: a root with nothing in it but rdma-core, a shell and its tools.

use std::{fs, path::PathBuf, process::Command, time::Duration};

use serde_json::Value;

use super::{
    super::{
        Ctx, Direction, Scenario,
        rnbd::{server_down, server_up},
    },
    PORT,
};
use crate::{Error, far::Ip, lab::Proc};

pub(super) fn scenario() -> Scenario {
    let s = Scenario::new(1, "hardware-kit", Direction::Both, kit);
    s.lacks(|places, _| match &places.kit {
        Some(_) => None,
        None => Some("no --kit FILE".to_owned()),
    })
}

/// Makes `/tmp/bare`: libraries that the kit may load with what they load, and programs that its scripts call. `$K`: the kit.
const BARE: &str = "\
    set -e; B=/tmp/bare; rm -rf $B; mkdir -p $B/kit $B/tmp $B/proc $B/sys $B/dev $B/usr/bin $B/usr/sbin $B/usr/lib $B/usr/lib64\n\
    cp $K/* $B/kit/; for d in bin sbin lib lib64; do [ ! -L /$d ] || ln -s usr/$d $B/$d; done\n\
    as() { mkdir -p $B$(dirname $1); [ -e $B$1 ] || cp -L $1 $B$1; }\n\
    needs() { ldd $1 2>/dev/null | grep -o '/[^ ]*' || true; }\n\
    for p in bash stdbuf mktemp rm cp sleep chmod cat readlink dirname basename head tail tr grep seq sed truncate uname; do\n\
        p=$(command -v $p); as $p; for l in $(needs $p); do as $l; done; done\n\
    for l in /usr/libexec/coreutils/libstdbuf.so /usr/lib/*/libibverbs/librxe-rdmav*.so /etc/libibverbs.d/rxe.driver \
        $(needs $K/ferroce-rdma) $(needs $K/cm-agent); do as $l; for m in $(needs $l); do as $m; done; done\n\
    mount -t proc p $B/proc; mount -t sysfs s $B/sys; mount --rbind /dev $B/dev\n";

const BEGIN: &str = "\
    ulimit -l unlimited; echo $BASHPID > /tmp/kit.pid; exec chroot /tmp/bare bash /kit/ferroce-peer.sh --device rxe0 $ADDRESS $PORT > /tmp/kit.out 2>&1 \
    </dev/null";

const ENDS: &str = "\
    kill -TERM $(cat /tmp/kit.pid); for i in $(seq 100); do kill -0 $(cat /tmp/kit.pid) 2>/dev/null || break; sleep 0.1; done\n\
    ls /tmp/bare/tmp > /tmp/left; umount -l /tmp/bare/dev /tmp/bare/sys /tmp/bare/proc; rm -rf /tmp/bare; cat /tmp/left /tmp/kit.out\n\
    [ ! -s /tmp/left ]";

/// What the guest lacks, and why that is no fault.
const NOT_RUN: [(&str, &str); 6] = [
    ("pingpong-", "no ibv_rc_pingpong there"),
    ("rping-", "no rping there"),
    ("ucmatose-", "no ucmatose there"),
    ("device-server-device-client", "no RDMA device here"),
    ("device-client-device-server", "no RDMA device here"),
    ("-device-client", "no RDMA device here"),
];

/// The kit in the lab's folder, where the guest finds it.
struct Unpacked(PathBuf);

impl Unpacked {
    fn new(c: &Ctx<'_>) -> Result<Self, Error> {
        let dir = Self(c.places.lab.join(format!("kit-{}", std::process::id())));
        let _ = fs::remove_dir_all(&dir.0);
        fs::create_dir_all(&dir.0)?;
        let kit = c.places.kit.as_ref().ok_or("no --kit FILE")?.display().to_string();
        let to = dir.0.display().to_string();
        c.tool("tar", "tar", &["-xf", &kit, "-C", &to, "--strip-components=1"], 120)?;
        Ok(dir)
    }
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Its programs on both hosts, as its instructions say.
fn kit(c: &mut Ctx<'_>) -> Result<String, Error> {
    let kit = Unpacked::new(c)?;
    let name = kit.0.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (v4, v6) = (c.far.addr(Ip::V4)?.to_string(), c.far.addr(Ip::V6)?.to_string());
    server_up(c, true)?;
    c.guest()?.run(&format!("K=$LAB/{name}\n{BARE}"), 180)?;
    let begin = format!(
        "ADDRESS={v4} PORT={PORT}; ({BEGIN}) & for i in $(seq 300); do grep -q ferroce-interop /tmp/kit.out && exit; sleep 0.1; done; \
                         cat /tmp/kit.out; exit 1"
    );
    c.guest()?.run(&begin, 60)?;
    let report = c.dir.join("report");
    let mut run = Command::new(kit.0.join("ferroce-interop"));
    run.current_dir(&c.dir)
        .arg("--logs")
        .arg(&report)
        .args(["--peer", &v4, "--peer-v6", &v6, "--peer-port", PORT]);
    run.args(["--device", "rxe0", "--rnbd", "newroot/dev/ram0"]);
    let ended = Proc::spawn("kit-run", &mut run, &c.dir)?.wait_gone(Duration::from_secs(1500));
    let left = c.guest()?.run(ENDS, 60);
    server_down(c)?;
    // It was no success: some of it can't be run with this guest.
    let report: Value = serde_json::from_str(
        &fs::read_to_string(report.join("report.json")).map_err(|e| format!("no report: {e}, {ended:?}"))?,
    )?;
    let text = judged(&report)?;
    left?;
    Ok(text)
}

/// All passed but what could not run for a reason that is known.
fn judged(report: &Value) -> Result<String, Error> {
    let all = report["scenarios"].as_array().ok_or("no scenarios in the report")?;
    let (mut passed, mut away) = (0, 0);
    for scenario in all {
        let text = |key: &str| scenario[key].as_str().unwrap_or_default();
        let (name, result, detail) = (text("name"), text("result"), text("detail"));
        let known = || {
            NOT_RUN
                .iter()
                .any(|(part, why)| name.contains(part) && detail.starts_with(why))
        };
        match result {
            "passed" => passed += 1,
            "not run" if known() => away += 1,
            _ => return Err(format!("{name}: {result}: {detail}").into()),
        }
    }
    let device = report["hosts"]["there"]["device"].as_str();
    if device != Some("rxe0")
        || !all
            .iter()
            .any(|s| s["name"] == "device-contract" && s["result"] == "passed")
    {
        return Err(format!("the report is about {device:?}, or the contract was not run").into());
    }
    Ok(format!(
        "{passed} scenarios of the kit passed, {away} not run for want of what the guest has not: passed"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::judged;

    #[test]
    fn what_fails_or_is_not_run_for_another_reason_is_told() {
        let report = |rping: (&str, &str)| {
            json!({ "hosts": { "there": { "device": "rxe0" } }, "scenarios": [
                { "name": "device-contract", "result": "passed", "detail": "" },
                { "name": "rping-our-client-v4", "result": rping.0, "detail": rping.1 },
            ]})
        };
        let of = |result, detail| judged(&report((result, detail)));
        assert!(of("passed", "").is_ok_and(|text| text.starts_with("2 scenarios")));
        assert!(of("not run", "no rping there").is_ok_and(|text| text.starts_with("1 scenario")));
        assert!(of("not run", "another reason").is_err());
        assert!(of("failed", "no rping there").is_err());
        assert!(judged(&json!({})).is_err());
    }
}
