//! 13: sessions of RTRS with another host's RDMA device, and with the kernel's RNBD server there. Only with `--peer`.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use super::{Ctx, Direction, Scenario, verdict};
use crate::{Error, facts::Want, far::Ip, lab::Proc};

/// Where an end of the session is, and on what.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    /// There, on the RDMA device.
    There,
    /// Here, in software.
    Software,
    /// Here, on an RDMA device.
    Here,
}

const THERE: [Want; 3] = [
    Want::Program("rdma-end"),
    Want::Program("ferroce-rdma"),
    Want::Program("ferroce-lab"),
];
const SOFTWARE: [Want; 4] = [Want::Software, THERE[0], THERE[1], THERE[2]];
const DEVICES: [Want; 4] = [Want::DeviceHere, THERE[0], THERE[1], THERE[2]];

pub(super) fn list() -> Vec<Scenario> {
    use Direction::{KernelToKernel, KernelToOurs, OursToKernel};
    let contract = Scenario::new(13, "device-contract", KernelToKernel, contract);
    let mut all = vec![contract.wants(&[THERE[0], Want::Program("provider-contract")])];
    for inv in ["on", "off"] {
        let mut add = |name: &str, direction, server, client| {
            let s = Scenario::new(13, format!("{name}-inv-{inv}"), direction, move |c| {
                session(c, server, client, inv)
            });
            let soft = server == End::Software || client == End::Software;
            // What an RDMA device sends doesn't pass the kernel, where packets are captured.
            all.push(match soft {
                true => s.wants(&SOFTWARE),
                false => s.wants(&DEVICES).nets(0),
            });
        };
        add("device-server-our-client", OursToKernel, End::There, End::Software);
        add("device-client-our-server", KernelToOurs, End::Software, End::There);
        add("device-server-device-client", KernelToKernel, End::There, End::Here);
        add("device-client-device-server", KernelToKernel, End::Here, End::There);
    }
    let kernels = |name: &str, end| Scenario::new(13, name, OursToKernel, move |c| kernels_server(c, end));
    all.push(kernels("kernel-rnbd-server-our-client", End::Software).wants(&[Want::Rnbd, Want::Software]));
    let devices = kernels("kernel-rnbd-server-device-client", End::Here);
    all.push(devices.wants(&[Want::Rnbd, Want::DeviceHere]).nets(0));
    all.into_iter().map(Scenario::peer_only).collect()
}

/// RDMA_CM port at which `rdma-end` serves.
const PORT: u16 = 12340;
/// Time for the work of one session.
const TIMEOUT: Duration = Duration::from_secs(600);

impl End {
    /// Begins `rdma-end`, with its device and address behind the first of its arguments.
    fn start(self, c: &Ctx<'_>, name: &str, what: &str, rest: &[&str]) -> Result<Proc, Error> {
        let (device, addr) = (self.device(c)?, self.addr(c)?.to_string());
        let args = [&[what, &device, &addr], rest].concat();
        match self {
            Self::There => c.theirs(name, &[&["rdma-end"], &args[..]].concat(), TIMEOUT.as_secs() as u32),
            Self::Software | Self::Here => {
                let mut command = c.sharing(&c.places.end_script());
                if let Some(programs) = c.places.ferroce.parent() {
                    command.env("FERROCE_BIN", programs);
                }
                Proc::spawn(name, command.args(&args), &c.dir)
            }
        }
    }

    fn device(self, c: &Ctx<'_>) -> Result<String, Error> {
        let hosts = c.hosts.ok_or("only with --peer")?;
        let of = |facts: &crate::facts::Facts| {
            let name = facts.get("device").ok_or("no RDMA device")?;
            Ok(match facts.get("port") {
                Some(port) => format!("{name}:{port}"),
                None => name.to_owned(),
            })
        };
        match self {
            Self::There => of(&hosts.there),
            Self::Here => of(&hosts.here),
            Self::Software => Ok("soft".to_owned()),
        }
    }

    fn addr(self, c: &Ctx<'_>) -> Result<IpAddr, Error> {
        let ip = if c.far.v4.is_some() { Ip::V4 } else { Ip::V6 };
        match self {
            Self::There => c.far.addr(ip),
            Self::Software | Self::Here => c.host(ip),
        }
    }
}

/// What is written and left behind: another thing each time.
fn seed() -> String {
    (std::process::id() % 1_000_000).to_string()
}

/// A client works on a server's image, which the server compares when it has gone.
fn session(c: &mut Ctx<'_>, server: End, client: End, invalidate: &str) -> Result<String, Error> {
    let seed = seed();
    let mut serving = server.start(c, "server", "serve", &[&seed, invalidate])?;
    serving.wait_for("serving", Duration::from_secs(60))?;
    let at = SocketAddr::new(server.addr(c)?, PORT).to_string();
    let mapped = client
        .start(c, "client", "map", &[&at, &seed])?
        .finish(TIMEOUT)
        .map_err(|e| format!("{e}\nthe server said: {}", serving.text()))?;
    let served = serving.finish(Duration::from_secs(120))?;
    let [mapped, served] = [mapped, served].map(|said| (verdict(&said), keys(&said)));
    Ok(format!(
        "client: {}{}; server: {}{}",
        mapped.0?, mapped.1, served.0?, served.1
    ))
}

/// By what its peer gets at memory, as far as an end says it.
fn keys(said: &str) -> String {
    let key = said.split("\"keys\":\"").nth(1).and_then(|rest| rest.split('"').next());
    key.map(|key| format!(" ({key})")).unwrap_or_default()
}

fn contract(c: &mut Ctx<'_>) -> Result<String, Error> {
    let addr = End::There.addr(c)?.to_string();
    let mut run = c.theirs("contract", &["rdma-end", "contract", &addr], 1200)?;
    let ended = run.wait_gone(Duration::from_secs(1260));
    let said = run.text();
    let count = |word: &str| said.lines().filter(|line| line.starts_with(word)).count();
    let (passed, failed) = (count("ok "), count("FAILED"));
    let kernels = c.hosts.is_some_and(|hosts| {
        let device = hosts.there.get("hca_type").or(hosts.there.get("driver"));
        device.is_some_and(|name| name.starts_with("rdma_rxe"))
    });
    if kernels {
        let cases = super::rdma::contract_passed(if failed > 0 { 1 } else { 0 }, &said.replace("error: ", ""))?;
        return Ok(format!("passed: {cases} cases, what fails is known of rdma_rxe"));
    }
    match (ended, passed, failed) {
        (Ok(()), 1.., 0) => Ok(format!("passed: {passed} cases")),
        _ => Err(format!("{passed} cases passed, {failed} failed:\n{said}").into()),
    }
}

/// A client of ours on the device that `--rnbd` names.
fn kernels_server(c: &mut Ctx<'_>, client: End) -> Result<String, Error> {
    let at = End::There.addr(c)?.to_string();
    let device = c.hosts.and_then(|hosts| hosts.rnbd.clone()).ok_or("no --rnbd DEVICE")?;
    let said = client
        .start(c, "client", "map", &[&at, &seed(), &device])?
        .finish(TIMEOUT)?;
    Ok(format!("{}{}", verdict(&said)?, keys(&said)))
}
