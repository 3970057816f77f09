//! 2: the connection manager, with `rping`, `ucmatose` and our cm-agent.

use std::time::{Duration, Instant};

use super::{Ctx, Direction, JUMBO, Scenario, frame_time, ops, verdict};
use crate::{Error, facts::Want, far::Ip, guest::Kernel, lab::Proc};

pub(super) fn list() -> Vec<Scenario> {
    use Direction::{KernelToOurs, OursToKernel};
    let mut all = Vec::new();
    for ip in Ip::BOTH {
        let (number, v4) = (if ip == Ip::V4 { 2 } else { 6 }, ip == Ip::V4);
        let tag = ip.tag();
        let mut add = |name: &str, direction, ci, run: fn(&mut Ctx<'_>, Ip) -> Result<String, Error>| {
            let s = Scenario::new(number, format!("{name}-{tag}"), direction, move |c| run(c, ip));
            let wants = if name.starts_with("rping") { &RPING } else { &UCMATOSE };
            all.push(s.peer().wants(wants).ci_if(ci));
        };
        add("rping-our-server", KernelToOurs, v4, rping_server);
        add("rping-our-client", OursToKernel, false, rping_client);
        add("ucmatose-our-server", KernelToOurs, false, ucmatose_server);
        add("ucmatose-our-client", OursToKernel, v4, ucmatose_client);
    }
    let jumbo = [
        (
            "rping-our-server-mtu9000",
            KernelToOurs,
            rping_server as fn(&mut Ctx<'_>, Ip) -> Result<String, Error>,
        ),
        ("rping-our-client-mtu9000", OursToKernel, rping_client),
        ("ucmatose-our-server-mtu9000", KernelToOurs, ucmatose_server),
        ("ucmatose-our-client-mtu9000", OursToKernel, ucmatose_client),
    ];
    for (name, direction, run) in jumbo {
        all.push(Scenario::new(2, name, direction, move |c| run(c, Ip::V4)).shape(JUMBO));
    }
    for (n, case) in CASES.iter().enumerate() {
        for (side, direction, our_client) in [("server", KernelToOurs, false), ("client", OursToKernel, true)] {
            let name = format!("cm-{}-our-{side}", case.name);
            if case.over_v6 {
                let run = move |c: &mut Ctx<'_>| cm_case(c, case, Ip::V6, our_client);
                all.push(Scenario::new(6, format!("{name}-v6"), direction, run).peer());
            }
            let run = move |c: &mut Ctx<'_>| cm_case(c, case, Ip::V4, our_client);
            // Each case in one direction.
            let ci = our_client == n.is_multiple_of(2);
            all.push(Scenario::new(2, name, direction, run).peer().ci_if(ci));
        }
    }
    all.push(Scenario::new(2, "cm-unreachable", KernelToOurs, unreachable).waits());
    all.push(Scenario::new(
        2,
        "cm-unreachable-our-client",
        OursToKernel,
        our_side_gives_up,
    ));
    all
}

const RPING: [Want; 2] = [Want::Software, Want::Program("rping")];
const UCMATOSE: [Want; 2] = [Want::Software, Want::Program("ucmatose")];

pub(super) fn rping_server(c: &mut Ctx<'_>, ip: Ip) -> Result<String, Error> {
    let lost: &[&str] = if c.lossy { &["--last-round", "20"] } else { &[] };
    let mut ours = c.ours(ip, "rping", &[&["rping", "--size", "5000"], lost].concat())?;
    ours.wait_for("waiting", Duration::from_secs(30))?;
    let host = c.host(ip)?.to_string();
    let program = ["rping", "-c", "-V", "-v", "-C", "20", "-S", "5000", "-a", &host];
    let theirs = c
        .theirs("their-rping", &program, 240)?
        .finish(Duration::from_secs(260))?;
    pings(&theirs)?;
    let ours = ours.finish(Duration::from_secs(60))?;
    if !ours.contains("20 rounds") {
        return Err(format!("not 20 rounds:\n{ours}").into());
    }
    Ok(format!("{}; kernel: 20 pings validated", verdict(&ours)?))
}

/// Its server READs. Where packets are late that may fail by a fault of the kernel's, which its log tells: see `read-late-ack`.
pub(super) fn rping_client(c: &mut Ctx<'_>, ip: Ip) -> Result<String, Error> {
    if !c.lossy {
        return rping_client_once(c, ip);
    }
    for n in 0..ops::MAX_EARLY {
        ops::forget_warnings(c)?;
        match rping_client_once(c, ip) {
            Err(_) if ops::read_ended_early_in_log(c)? => {}
            Ok(said) if n > 0 => return Ok(format!("{said}; not at the first try: the kernel ended a READ early")),
            done => return done,
        }
    }
    Err(format!("the kernel ended a READ early in each of {} tries", ops::MAX_EARLY).into())
}

fn rping_client_once(c: &Ctx<'_>, ip: Ip) -> Result<String, Error> {
    let far = c.far.addr(ip)?.to_string();
    let program = ["rping", "-s", "-V", "-v", "-C", "20", "-S", "5000", "-a", &far];
    let mut theirs = c.theirs("their-rping", &program, 240)?;
    let args = ["rping", "--connect", &far, "--size", "5000", "--iters", "20"];
    let ours = c.ours(ip, "rping", &args)?.finish(Duration::from_secs(260))?;
    // rping's server does not end well when its client is faster with the disconnect: its output counts.
    let _ = theirs.finish(Duration::from_secs(60));
    pings(&theirs.text())?;
    Ok(format!("{}; kernel: 20 pings seen", verdict(&ours)?))
}

fn pings(text: &str) -> Result<(), Error> {
    if text.lines().filter(|l| l.contains("ping data")).count() == 20 {
        return Ok(());
    }
    let short: Vec<String> = text.lines().map(|l| l.chars().take(60).collect()).collect();
    Err(format!("rping printed:\n{}", short.join("\n")).into())
}

/// Arguments of ucmatose; ours are the same in long form.
const MANY: [&str; 6] = ["-c", "5", "-C", "12", "-S", "3000"];
const OUR_MANY: [&str; 6] = ["--connections", "5", "--messages", "12", "--size", "3000"];

pub(super) fn ucmatose_server(c: &mut Ctx<'_>, ip: Ip) -> Result<String, Error> {
    let mut ours = c.ours(ip, "ucmatose", &[&["ucmatose"][..], &OUR_MANY].concat())?;
    ours.wait_for("waiting", Duration::from_secs(30))?;
    let host = c.host(ip)?.to_string();
    let program = [&["ucmatose", "-s", &host][..], &MANY].concat();
    let theirs = c
        .theirs("their-ucmatose", &program, 240)?
        .finish(Duration::from_secs(260))?;
    if !theirs.contains("return status 0") {
        return Err(format!("ucmatose -s printed:\n{theirs}").into());
    }
    verdict(&ours.finish(Duration::from_secs(60))?)
}

pub(super) fn ucmatose_client(c: &mut Ctx<'_>, ip: Ip) -> Result<String, Error> {
    let far = c.far.addr(ip)?.to_string();
    let program = [&["ucmatose", "-b", &far][..], &MANY].concat();
    let mut theirs = c.theirs("their-ucmatose", &program, 240)?;
    theirs.wait_for("starting server", Duration::from_secs(30))?;
    let args = [&["ucmatose", "--connect", &far][..], &OUR_MANY].concat();
    let ours = c.ours(ip, "ucmatose", &args)?.finish(Duration::from_secs(260))?;
    let theirs = theirs.finish(Duration::from_secs(60))?;
    if !theirs.contains("return status 0") {
        return Err(format!("ucmatose printed:\n{theirs}").into());
    }
    verdict(&ours)
}

/// A connection, as both ends shall see it. Private data is in hexadecimal, without trailing zeros; before it stands its
/// length with them.
struct Case {
    name: &'static str,
    /// IPv6 has it, too: what events and private data look like there.
    over_v6: bool,
    /// `accept`, `reject`, or nothing at all listens.
    server: Option<&'static str>,
    server_data: &'static str,
    /// After how many milliseconds each side disconnects.
    server_hold: Option<&'static str>,
    client_hold: Option<&'static str>,
    server_sees: &'static [&'static str],
    client_sees: &'static [&'static str],
}

/// 56 bytes, the most that fits beside the RDMA_CM header.
const CLIENT_DATA: &str =
    "c0ffee00112233445566778899aabbccddeeff0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0102030405";
const REQUEST: &str = "RDMA_CM_EVENT_CONNECT_REQUEST status 0 depth 5 3 data 56 c0ffee00112233445566778899aabbccddeeff0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0102030405";
const UP: &str = "RDMA_CM_EVENT_ESTABLISHED status 0 data 0 ";
const UP_DATA: &str = "RDMA_CM_EVENT_ESTABLISHED status 0 data 196 5e4f2a";
const DOWN: &str = "RDMA_CM_EVENT_DISCONNECTED status 0 data 0 ";

const CASES: &[Case] = &[
    Case {
        name: "client-disconnects",
        over_v6: true,
        server: Some("accept"),
        server_data: "5e4f2a",
        server_hold: None,
        client_hold: Some("300"),
        server_sees: &[REQUEST, UP, DOWN],
        client_sees: &[UP_DATA, DOWN],
    },
    Case {
        name: "server-disconnects",
        over_v6: false,
        server: Some("accept"),
        server_data: "5e4f2a",
        server_hold: Some("300"),
        client_hold: None,
        server_sees: &[REQUEST, UP, DOWN],
        client_sees: &[UP_DATA, DOWN],
    },
    Case {
        name: "both-disconnect",
        over_v6: false,
        server: Some("accept"),
        server_data: "5e4f2a",
        server_hold: Some("300"),
        client_hold: Some("300"),
        server_sees: &[REQUEST, UP, DOWN],
        client_sees: &[UP_DATA, DOWN],
    },
    Case {
        name: "reject",
        over_v6: true,
        server: Some("reject"),
        server_data: "0bad5e",
        server_hold: None,
        client_hold: None,
        server_sees: &[REQUEST],
        client_sees: &["RDMA_CM_EVENT_REJECTED status 28 data 148 0bad5e"],
    },
    Case {
        name: "nobody-listens",
        over_v6: true,
        server: None,
        server_data: "",
        server_hold: None,
        client_hold: None,
        server_sees: &[],
        client_sees: &["RDMA_CM_EVENT_REJECTED status 8 data 148 "],
    },
];

const PORT: &str = "7200";

/// One side of a connection, ours or the peer's.
fn side(c: &Ctx<'_>, ip: Ip, ours: bool, role: &str, data: &str, hold: Option<&str>) -> Result<Proc, Error> {
    let (host, far) = (c.host(ip)?.to_string(), c.far.addr(ip)?.to_string());
    if ours {
        let mut args = vec!["cm", role, "--port", PORT, "--data", data];
        if role == "connect" {
            args.extend(["--to", &far]);
        }
        if let Some(ms) = hold {
            args.extend(["--hold", ms]);
        }
        return c.ours(ip, "our-cm", &args);
    }
    let data = if data.is_empty() { "-" } else { data };
    let hold = hold.unwrap_or("-1");
    if role == "connect" {
        c.theirs("cm-agent", &["cm-agent", "connect", &host, PORT, "-", data, hold], 120)
    } else {
        c.theirs("cm-agent", &["cm-agent", "listen", &far, PORT, role, data, hold], 120)
    }
}

fn events(text: &str) -> Vec<&str> {
    text.lines().filter(|l| l.starts_with("RDMA_CM_EVENT")).collect()
}

fn cm_case(c: &mut Ctx<'_>, case: &'static Case, ip: Ip, our_client: bool) -> Result<String, Error> {
    let mut server = None;
    // Our half is needed even if it does not listen: somebody must refuse.
    let mut idle = None;
    match case.server {
        Some(role) => {
            let mut s = side(c, ip, !our_client, role, case.server_data, case.server_hold)?;
            s.wait_for("listening", Duration::from_secs(60))?;
            server = Some(s);
        }
        None if !our_client => {
            let mut device = c.ours(ip, "our-device", &["cm", "accept", "--port", "7999"])?;
            device.wait_for("listening", Duration::from_secs(60))?;
            idle = Some(device);
        }
        None => {}
    }
    let client = side(c, ip, our_client, "connect", CLIENT_DATA, case.client_hold)?.finish(Duration::from_secs(150))?;
    let server = server
        .map(|mut s| s.finish(Duration::from_secs(150)))
        .transpose()?
        .unwrap_or_default();
    drop(idle);
    for (who, seen, expected) in [
        ("client", &client, case.client_sees),
        ("server", &server, case.server_sees),
    ] {
        if events(seen) != expected {
            return Err(format!(
                "the {who} saw\n{}\nnot\n{}",
                events(seen).join("\n"),
                expected.join("\n")
            )
            .into());
        }
    }
    Ok("events, reasons and private data as between two kernels: passed".to_owned())
}

/// Nothing of ours runs: the kernel's requests go unanswered.
fn unreachable(c: &mut Ctx<'_>) -> Result<String, Error> {
    let host = c.host(Ip::V4)?.to_string();
    let program = ["cm-agent", "connect", &host, PORT, "-", "-", "-1"];
    let text = c.theirs("cm-agent", &program, 300)?.finish(Duration::from_secs(320))?;
    let ["RDMA_CM_EVENT_UNREACHABLE status -110 data 0 "] = events(&text)[..] else {
        return Err(format!("the client saw\n{text}").into());
    };
    let times = requests(c)?;
    // Twice the packet lifetime that it takes for its own, and 4.1 s for the other end's answer.
    let every = match c.kernel()? {
        Kernel::V6_1 => 5.5..8.0,
        Kernel::V6_12 | Kernel::V7_3 => 4.2..6.3,
    };
    let gaps = times.windows(2).all(|w| every.contains(&(w[1] - w[0])));
    if times.len() != 16 || !gaps {
        return Err(format!("requests at {times:?}").into());
    }
    Ok("unreachable after 16 requests: passed".to_owned())
}

/// When requests were captured, s.
fn requests(c: &Ctx<'_>) -> Result<Vec<f64>, Error> {
    let lines = c.frames()?;
    let requests = lines.lines().filter(|l| l.contains("(CM REQ)"));
    Ok(requests.filter_map(frame_time).collect())
}

/// The guest drops what comes for RoCE: all else of it answers. The filter's modules have to be named here.
const DEAF: &str = "\
    set -e; modprobe cls_u32; modprobe act_gact; tc qdisc add dev eth0 handle ffff: ingress\n\
    tc filter add dev eth0 parent ffff: protocol ip u32 match ip protocol 17 0xff match ip dport 4791 0xffff action drop";
const NOT_DEAF: &str = "tc qdisc del dev eth0 ingress";
/// After which time our side gives up (`CmConfig::give_up`), and when that would not be it any more: the kernel takes 103 s.
const GIVE_UP: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(40)];

/// The kernel never answers our requests, although somebody listens there.
fn our_side_gives_up(c: &mut Ctx<'_>) -> Result<String, Error> {
    let mut server = side(c, Ip::V4, false, "accept", "", None)?;
    server.wait_for("listening", Duration::from_secs(60))?;
    c.guest()?.run(DEAF, 60)?;
    let t0 = Instant::now();
    let text = side(c, Ip::V4, true, "connect", CLIENT_DATA, None)
        .and_then(|mut client| client.finish(Duration::from_secs(150)));
    let took = t0.elapsed();
    c.guest()?.run(NOT_DEAF, 60)?;
    let text = text?;
    let ["RDMA_CM_EVENT_UNREACHABLE status -110 data 0 "] = events(&text)[..] else {
        return Err(format!("the client saw\n{text}").into());
    };
    if !events(&server.text()).is_empty() {
        return Err(format!("the server saw\n{}", server.text()).into());
    }
    // After 0.25 s, and then each time twice as long: six requests, if this machine has the time.
    let times = requests(c)?;
    let gaps: Vec<f64> = times.windows(2).map(|w| w[1] - w[0]).collect();
    let longer = gaps.windows(2).all(|w| w[1] > 1.3 * w[0]);
    if !(4..=6).contains(&times.len()) || !longer || !(GIVE_UP[0]..GIVE_UP[1]).contains(&took) {
        return Err(format!("requests at {times:?}, given up after less than {took:?}").into());
    }
    Ok(format!("unreachable after {} requests: passed", times.len()))
}
