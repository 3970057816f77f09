//! Runs scenarios one after another, each with a capture that is checked.

use std::{
    fs,
    net::IpAddr,
    path::Path,
    process::Command,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use crate::{
    Cli, Error,
    far::Ip,
    guest::{Guest, Shape},
    lab::{self, HOST_V4, HOST_V6, Net, Places, Proc},
    peer_mode::Peer,
    report::{Outcome, Verdict},
    scenarios::{Ctx, Scenario},
};

/// The guests that run at the moment.
struct Guests<'a> {
    places: &'a Places,
    net: Net,
    up: [Option<Guest>; 2],
}

impl Guests<'_> {
    /// Brings up what a scenario needs; guests of another shape go.
    fn ready(&mut self, count: u8, shape: Shape) -> Result<(), Error> {
        for (n, slot) in self.up.iter_mut().enumerate() {
            let wanted = n < usize::from(count);
            if slot.as_ref().is_some_and(|g| g.shape != shape || !wanted) {
                *slot = None;
            }
        }
        self.net.set_mtu(shape.mtu)?;
        for (n, slot) in self.up.iter_mut().enumerate().take(usize::from(count)) {
            if slot.is_none() {
                *slot = Some(Guest::boot(n as u8 + 1, shape, self.places)?);
            }
        }
        Ok(())
    }
}

/// Runs the scenarios; those that come to an end, whichever, are in `outcomes`.
pub(crate) fn all(cli: &Cli, places: &Places, chosen: &[Scenario], outcomes: &mut Vec<Outcome>) -> Result<(), Error> {
    if let Some(peer) = Peer::find(cli, places)? {
        for s in chosen {
            lab::check_stop()?;
            outcomes.push(with_peer(s, &peer, places)?);
        }
        return Ok(());
    }
    let _ready = lab::prepare(&places.scripts, &places.lab)?;
    let mut guests = Guests {
        places,
        net: Net::up(2)?,
        up: [None, None],
    };
    for s in chosen {
        lab::check_stop()?;
        guests.ready(s.guests, s.shape)?;
        let outcome = with_guests(s, &mut guests)?;
        let failed = outcome.result == Verdict::Failed;
        outcomes.push(outcome);
        if failed {
            // A guest that has seen a failure may be in any state: the next scenario gets a fresh one.
            guests.up = [None, None];
        }
    }
    Ok(())
}

fn with_guests(s: &Scenario, guests: &mut Guests<'_>) -> Result<Outcome, Error> {
    let places = guests.places;
    let [Some(first), second] = &mut guests.up else {
        return Err("no guest".into());
    };
    let interface = first.tap();
    let mut ctx = Ctx {
        far: first.far.clone(),
        guest: Some(first),
        second: second.as_mut(),
        local: [HOST_V4, HOST_V6].map(|a| a.parse::<IpAddr>().ok()),
        mtu: s.shape.mtu,
        dir: places.logs.join(&s.name),
        places,
        lossy: s.netem.is_some(),
    };
    let outcome = one(s, &mut ctx, &interface)?;
    if outcome.result == Verdict::Failed
        && let Some(guest) = &ctx.guest
    {
        fs::write(ctx.dir.join("dmesg.log"), guest.dmesg())?;
        fs::write(ctx.dir.join("console.log"), guest.console())?;
    }
    Ok(outcome)
}

fn with_peer(s: &Scenario, peer: &Peer, places: &Places) -> Result<Outcome, Error> {
    let mut ctx = Ctx {
        far: peer.far.clone(),
        guest: None,
        second: None,
        local: peer.local,
        mtu: peer.mtu,
        dir: places.logs.join(&s.name),
        places,
        lossy: false,
    };
    let lacks = Ip::BOTH
        .into_iter()
        .find(|&ip| s.needs(ip) && ctx.far.addr(ip).is_err());
    let mut outcome = if let Some(ip) = lacks {
        let why = format!("the peer has no address of IP{}", ip.tag());
        let outcome = Outcome::new(s, Verdict::NotRun, 0.0, why);
        println!("{}", outcome.line());
        outcome
    } else {
        one(s, &mut ctx, &peer.interface)?
    };
    outcome.guest = format!("peer, path MTU {}", ctx.path_mtu());
    Ok(outcome)
}

/// Runs one scenario and prints its line. An error only if the user wants to stop.
fn one(s: &Scenario, ctx: &mut Ctx<'_>, interface: &str) -> Result<Outcome, Error> {
    let t0 = Instant::now();
    let (result, detail) = match captured(s, ctx, interface) {
        Ok(detail) => (Verdict::Passed, detail),
        Err(e) if lab::STOP.load(Ordering::Relaxed) => return Err(e),
        Err(e) => (Verdict::Failed, e.to_string()),
    };
    let outcome = Outcome::new(s, result, t0.elapsed().as_secs_f64(), detail);
    println!("{}", outcome.line());
    if result == Verdict::Failed {
        println!("    programs' output, capture and console are in {}", ctx.dir.display());
    }
    Ok(outcome)
}

fn captured(s: &Scenario, ctx: &mut Ctx<'_>, interface: &str) -> Result<String, Error> {
    let _ = fs::remove_dir_all(&ctx.dir);
    fs::create_dir_all(&ctx.dir)?;
    let pcap = ctx.dir.join("wire.pcap");
    let mut dump = Command::new("tcpdump");
    // As root: a process that changes its user no longer ends with its parent.
    dump.args([
        "-Z",
        "root",
        "-i",
        interface,
        "--immediate-mode",
        "-B",
        "32768",
        "-s",
        "0",
        "-U",
        "-w",
    ])
    .arg(&pcap)
    .args(["udp", "port", "4791"]);
    let mut dump = Proc::spawn("tcpdump", &mut dump, &ctx.dir)?;
    dump.wait_for("listening", Duration::from_secs(30))?;
    if let Some(guest) = &ctx.guest {
        guest.netem(s.netem.filter(|_| !s.netem_later))?;
    }
    let result = (s.run)(ctx);
    if let Some(guest) = &ctx.guest
        && (result.is_ok() || ctx.far.is_up())
    {
        guest.netem(None)?;
    }
    dump.interrupt();
    dump.finish(Duration::from_secs(30))?;
    let detail = result?;
    let frames = check(ctx, &pcap)?;
    if !ctx.places.keep {
        let _ = fs::remove_file(&pcap);
    }
    Ok(format!("{detail}; {frames} frames, ICRC of all correct"))
}

/// Every frame of the capture is well formed and has the right ICRC.
fn check(ctx: &Ctx<'_>, pcap: &Path) -> Result<u64, Error> {
    let mut check = Command::new(&ctx.places.ferroce);
    check.args(["pcap", "check", "--json"]).arg(pcap);
    let mut check = Proc::spawn("pcap-check", &mut check, &ctx.dir)?;
    let status = check.finish(Duration::from_secs(300));
    let text = check.text();
    let report: serde_json::Value = serde_json::from_str(text.lines().next().unwrap_or_default())?;
    let number = |name: &str| report[name].as_u64();
    let frames = number("roce_frames").unwrap_or(0);
    if status.is_err() || frames == 0 || number("icrc_bad") != Some(0) || number("bad_frames") != Some(0) {
        return Err(format!("pcap check of {}: {text}", pcap.display()).into());
    }
    Ok(frames)
}
