//! Runs scenarios one after another (those that wait: beside the others), each with a capture that is checked.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use crate::{
    Cli, Error,
    beside::Beside,
    far::Ip,
    guest::{Guest, Shape},
    lab::{self, HOST_V4, HOST_V6, Net, Places, Proc},
    peer_mode::Peer,
    peer_report,
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

    /// Why one of them has stopped, if one has: its kernel, or the emulator, is at fault. Now and then a network card does no more.
    fn stopped(&self) -> Option<String> {
        let stopped = self.up.iter().flatten().find(|guest| !guest.answers())?;
        Some(stopped.complaint().unwrap_or_else(|| "without a word".into()))
    }
}

/// Runs the scenarios, and those that wait beside them; those that come to an end, whichever, are in `outcomes`.
pub(crate) fn all(
    cli: &Cli,
    places: &Places,
    chosen: &[Scenario],
    waiting: &[Scenario],
    outcomes: &mut Vec<Outcome>,
) -> Result<(), Error> {
    if let Some(peer) = Peer::find(cli, places)? {
        return with_peer_all(&peer, places, chosen, outcomes);
    }
    let _ready = lab::prepare(places, &cli.kernels())?;
    let mut beside = match waiting {
        [] => None,
        _ => Some(Beside::start(cli, places)?),
    };
    let here = in_turn(places, chosen, beside.as_mut(), outcomes);
    if let Some(beside) = beside {
        outcomes.extend(beside.finish(waiting)?);
    }
    here
}

fn in_turn(
    places: &Places,
    chosen: &[Scenario],
    mut beside: Option<&mut Beside>,
    outcomes: &mut Vec<Outcome>,
) -> Result<(), Error> {
    let mut guests = Guests {
        places,
        net: Net::up(2)?,
        up: [None, None],
    };
    for s in chosen {
        lab::check_stop()?;
        let outcome = match places
            .missing(s.shape.kernel)
            .or_else(|| (s.lacks)(places, s.shape.kernel))
        {
            Some(why) => Outcome::not_run(s, why),
            None => {
                guests.ready(s.guests, s.shape)?;
                let outcome = with_guests(s, &mut guests)?;
                let failed = outcome.result == Verdict::Failed;
                match failed.then(|| guests.stopped()).flatten() {
                    Some(why) => once_more(s, &mut guests, &why)?,
                    None => outcome,
                }
            }
        };
        if let Some(beside) = &mut beside {
            beside.tell();
        }
        let failed = outcome.result == Verdict::Failed;
        outcomes.push(outcome);
        if failed {
            // A guest that has seen a failure may be in any state: the next scenario gets a fresh one.
            guests.up = [None, None];
        }
    }
    Ok(())
}

/// Runs a scenario again whose guest has stopped, with new ones, and says so. Its logs of before are kept.
fn once_more(s: &Scenario, guests: &mut Guests<'_>, why: &str) -> Result<Outcome, Error> {
    let logs = &guests.places.logs;
    let kept = logs.join(format!("{}-stopped", s.name));
    let _ = fs::remove_dir_all(&kept);
    fs::rename(logs.join(&s.name), &kept)?;
    println!(
        "    a guest has stopped: {why} ({}); once more, with new ones",
        kept.display()
    );
    guests.up = [None, None];
    guests.ready(s.guests, s.shape)?;
    let mut outcome = with_guests(s, guests)?;
    outcome
        .detail
        .push_str("; second try, a guest had stopped in the first");
    Ok(outcome)
}

fn with_guests(s: &Scenario, guests: &mut Guests<'_>) -> Result<Outcome, Error> {
    let places = guests.places;
    let [Some(first), second] = &mut guests.up else {
        return Err("no guest".into());
    };
    let interfaces: Vec<String> = (0..s.nets).map(|net| first.tap(net)).collect();
    let dir = places.logs.join(&s.name);
    first.logs = Some(dir.clone());
    if let Some(second) = second.as_mut() {
        second.logs = Some(dir.clone());
    }
    let mut ctx = Ctx {
        far: first.far.clone(),
        guest: Some(first),
        second: second.as_mut(),
        local: [HOST_V4[0], HOST_V6[0]].map(|a| a.parse::<IpAddr>().ok()),
        mtu: s.shape.mtu,
        dir,
        places,
        datapath: s.datapath.unwrap_or(places.datapath),
        lossy: s.netem.is_some(),
        hosts: None,
        uncaptured: None,
    };
    let outcome = one(s, &mut ctx, &interfaces)?;
    if outcome.result == Verdict::Failed {
        let guests = [ctx.guest.as_deref(), ctx.second.as_deref()].into_iter().flatten();
        for (n, guest) in guests.enumerate() {
            let file = |what: &str| ctx.dir.join(format!("{what}{}.log", if n == 0 { "" } else { "-2" }));
            fs::write(file("dmesg"), guest.dmesg())?;
            fs::write(file("console"), guest.console())?;
        }
    }
    Ok(outcome)
}

/// Runs the scenarios against another host; what it lacks is told. There is a report, whatever comes.
fn with_peer_all(peer: &Peer, places: &Places, chosen: &[Scenario], outcomes: &mut Vec<Outcome>) -> Result<(), Error> {
    let mut ended = Ok(());
    for s in chosen {
        match lab::check_stop().and_then(|()| with_peer(s, peer, places)) {
            Ok(outcome) => outcomes.push(outcome),
            Err(e) => {
                ended = Err(e);
                break;
            }
        }
    }
    peer_report::write(peer, places, outcomes)?;
    ended
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
        datapath: s.datapath.unwrap_or(places.datapath),
        lossy: false,
        hosts: Some(&peer.hosts),
        uncaptured: peer.uncaptured.as_deref(),
    };
    let no_address = Ip::BOTH
        .into_iter()
        .find(|&ip| !s.peer_only && s.needs(ip) && ctx.far.addr(ip).is_err())
        .map(|ip| format!("the peer has no address of IP{}", ip.tag()));
    let mut outcome = match no_address.or_else(|| peer.hosts.lack(s.wants)) {
        Some(why) => Outcome::not_run(s, why),
        None => one(s, &mut ctx, std::slice::from_ref(&peer.interface))?,
    };
    outcome.guest = format!("peer, path MTU {}", ctx.path_mtu());
    Ok(outcome)
}

/// Runs one scenario and prints its line. An error only if the user wants to stop.
fn one(s: &Scenario, ctx: &mut Ctx<'_>, interfaces: &[String]) -> Result<Outcome, Error> {
    let t0 = Instant::now();
    let seen = captured(s, ctx, interfaces).and_then(|detail| ctx.all_left().map(|()| detail));
    let (result, detail) = match seen {
        Ok(detail) => (Verdict::Passed, detail),
        Err(e) if lab::STOP.load(Ordering::Relaxed) => return Err(e),
        Err(e) => (Verdict::Failed, e.to_string()),
    };
    let outcome = Outcome::new(s, result, t0.elapsed().as_secs_f64(), detail);
    println!("{}", outcome.line());
    if result == Verdict::Failed {
        // The terminal gets the start only.
        fs::write(ctx.dir.join("detail.log"), format!("{}\n", outcome.detail))?;
        println!(
            "    all of that (detail.log), scripts and programs' output, capture and console are in {}",
            ctx.dir.display()
        );
    }
    Ok(outcome)
}

/// A scenario under way is captured on each of its networks.
fn captured(s: &Scenario, ctx: &mut Ctx<'_>, interfaces: &[String]) -> Result<String, Error> {
    let _ = fs::remove_dir_all(&ctx.dir);
    fs::create_dir_all(&ctx.dir)?;
    if !s.on_the_wire() {
        return (s.run)(ctx);
    }
    if let Some(why) = ctx.uncaptured {
        return Ok(format!("{}; not captured: {why}", (s.run)(ctx)?));
    }
    let mut dumps = Vec::new();
    for (n, interface) in interfaces.iter().enumerate() {
        dumps.push(Dump::start(ctx, n, interface)?);
    }
    if let Some(guest) = &ctx.guest {
        guest.netem(s.netem.filter(|_| !s.netem_later))?;
    }
    let result = (s.run)(ctx);
    // A user who wants to stop does not wait for more.
    lab::check_stop()?;
    let calm = match &ctx.guest {
        Some(guest) if result.is_ok() || ctx.far.is_up() => guest.netem(None),
        _ => Ok(()),
    };
    let pcaps: Vec<_> = dumps.iter().map(|d| d.pcap.clone()).collect();
    let seen = dumps.into_iter().map(|dump| dump.end(ctx, s.wrong_icrc)).sum();
    let but = s
        .wrong_icrc
        .map(|packet| format!(" but of {packet}"))
        .unwrap_or_default();
    let detail = joined(result.and_then(|detail| calm.map(|()| detail)), seen, &but)?;
    if ctx.hosts.is_some() {
        pcaps.iter().try_for_each(|pcap| peer_report::shorten(pcap))?;
    } else if !ctx.places.keep {
        pcaps.iter().for_each(|pcap| drop(fs::remove_file(pcap)));
    }
    Ok(detail)
}

/// A capture that is being made.
struct Dump {
    process: Proc,
    pcap: PathBuf,
}

impl Dump {
    fn start(ctx: &Ctx<'_>, net: usize, interface: &str) -> Result<Self, Error> {
        let tail = if net == 0 {
            String::new()
        } else {
            format!("-{}", net + 1)
        };
        let pcap = ctx.dir.join(format!("wire{tail}.pcap"));
        let mut dump = Command::new("tcpdump");
        // As root: a process that changes its user no longer ends with its parent.
        dump.args(["-Z", "root", "-i", interface, "--immediate-mode", "-B", "32768"])
            .args(["-s", "0", "-U", "-w"])
            .arg(&pcap)
            .args(["udp", "port", "4791"]);
        let mut process = Proc::spawn(&format!("tcpdump{tail}"), &mut dump, &ctx.dir)?;
        process.wait_for("listening", Duration::from_secs(30))?;
        Ok(Self { process, pcap })
    }

    /// How many frames there are; an error unless all are right.
    fn end(mut self, ctx: &Ctx<'_>, wrong_icrc: Option<&str>) -> Result<u64, Error> {
        self.process.interrupt();
        self.process.finish(Duration::from_secs(30))?;
        check(ctx, &self.pcap, wrong_icrc)
    }
}

/// The verdict on a scenario and that on its capture, as one. `but` says of which frames the ICRC is known to be wrong.
fn joined(result: Result<String, Error>, seen: Result<u64, Error>, but: &str) -> Result<String, Error> {
    match (result, seen) {
        (Ok(detail), Ok(frames)) => Ok(format!("{detail}; {frames} frames, ICRC of all{but} correct")),
        (Ok(detail), Err(e)) => Err(format!("{e}\n(the scenario itself went well: {detail})").into()),
        (Err(e), Ok(frames)) => Err(format!("{e}\n(its capture: {frames} frames, ICRC of all{but} correct)").into()),
        (Err(e), Err(capture)) => Err(format!("{e}\nAND ITS CAPTURE: {capture}").into()),
    }
}

/// Every frame of the capture is well formed and has the right ICRC, but for the packets of which it is known to be wrong: of
/// them there are some.
fn check(ctx: &Ctx<'_>, pcap: &Path, wrong_icrc: Option<&str>) -> Result<u64, Error> {
    let mut check = Command::new(&ctx.places.ferroce);
    check.args(["pcap", "check", "--json"]).arg(pcap);
    let mut check = Proc::spawn("pcap-check", &mut check, &ctx.dir)?;
    // The verdict is in the report.
    check.wait_gone(Duration::from_secs(300))?;
    let text = check.text();
    let report: serde_json::Value = serde_json::from_str(text.lines().next().unwrap_or_default())
        .map_err(|e| format!("pcap check of {} printed no result: {e}: {text}", pcap.display()))?;
    let number = |name: &str| report[name].as_u64();
    let frames = number("roce_frames").unwrap_or(0);
    if frames == 0 {
        return Err(format!("no frame of RoCEv2 in {}", pcap.display()).into());
    }
    let known = match wrong_icrc {
        None => 0,
        Some(packet) => {
            let is = |line: &&str| line.contains(packet) && line.contains("[ICRC BAD]");
            match ctx.frames()?.lines().filter(is).count() as u64 {
                0 => return Err(format!("no {packet} has a wrong ICRC: {text}").into()),
                n => n,
            }
        }
    };
    let as_known = [number("icrc_bad"), number("bad_frames")] == [Some(known); 2];
    let broken = broken_rules(&report);
    if frames == 0 || !as_known || !broken.is_empty() {
        return Err(format!("pcap check of {}: {broken}{text}", pcap.display()).into());
    }
    Ok(frames)
}

/// Findings of severity "error" about conversations, a line each: neither side may break a rule.
fn broken_rules(report: &serde_json::Value) -> String {
    let findings = report["findings"].as_array().into_iter().flatten();
    let errors = findings.filter(|finding| finding["severity"] == "error" && finding["rule"] != "frame-icrc");
    errors.map(|finding| format!("{finding}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::joined;

    #[test]
    fn a_capture_counts_whether_its_scenario_passed_or_failed() {
        let text = |result: Result<&str, &str>, seen: Result<u64, &str>| {
            let result = result.map(str::to_owned).map_err(Into::into);
            joined(result, seen.map_err(Into::into), "").map_err(|e| e.to_string())
        };
        assert_eq!(
            text(Ok("20 pings"), Ok(7)),
            Ok("20 pings; 7 frames, ICRC of all correct".to_owned())
        );
        for (result, seen, parts) in [
            (Ok("20 pings"), Err("1 bad ICRC"), ["1 bad ICRC", "20 pings"]),
            (Err("no event"), Ok(7), ["no event", "7 frames"]),
            (Err("no event"), Err("1 bad ICRC"), ["no event", "1 bad ICRC"]),
        ] {
            let said = text(result, seen).expect_err("a failure");
            assert!(parts.iter().all(|part| said.contains(part)), "{said}");
        }
    }
}
