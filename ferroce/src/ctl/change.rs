//! Commands that change something.

use rnbd::{
    Errno,
    client::{OnLoss, state::DeviceState},
    proto::AccessMode,
};
use rnbd_host::control::{
    ClientPath, ClientSession, MapListing, MapOrder, MapRequest, MappedPath, OpenDevice, ProcessRequest, Refused,
    Request, ServeRequest,
};
use roce_verbs::shown;
use rtrs::{
    addr::PathAddr,
    client::{PathCounters, Policy, state::PathState},
    proto::DEFAULT_PORT,
};
use serde_json::json;

use super::{
    args::{PathVerb, PathWords, SessionVerb, StatsVerb, Verb},
    client::Client,
    state::{All, client_path_name},
};
use crate::{
    names::{self, Resolver},
    output::{self, Failure},
};

/// Report of changes: a line each, or one JSON object.
struct Report {
    json: bool,
    done: Vec<String>,
}

impl Report {
    fn add(&mut self, text: String) -> Result<(), Failure> {
        if !self.json {
            output::line(&shown(&text).to_string())?;
        }
        self.done.push(text);
        Ok(())
    }

    fn end(self) -> Result<(), Failure> {
        match self.json {
            true => output::json(&json!({ "done": self.done })),
            false if self.done.is_empty() => output::line("nothing to do"),
            false => Ok(()),
        }
    }
}

/// Runs the command.
pub(super) fn run(client: &mut Client, verb: &Verb, json: bool) -> Result<(), Failure> {
    client.follow()?;
    let mut change = Change {
        report: Report { json, done: Vec::new() },
        client,
    };
    match verb {
        Verb::Map { device, words } => change.map(device, words),
        Verb::Unmap { device, force } => change.unmap(device, force.is_some()),
        Verb::Resize { device, size } => change.resize(device, *size),
        Verb::Remap { device, force } => change.remap(device, force.is_some()),
        Verb::Close { device, session } => change.close(device, session.as_deref()),
        Verb::Recover => change.recover_all(),
        Verb::Session(verb) => change.session(verb),
        Verb::Path(verb) => change.path(verb),
        Verb::Policy {
            policy: Some(policy),
            session,
        } => change.policy(*policy, session.as_deref()),
        Verb::Stats {
            verb: Some(StatsVerb::Reset { path, which }),
        } => change.reset(path.as_deref(), which.map_or(PathCounters::All, PathCounters::from)),
        Verb::Write { path, text, names } => change.write(path, text, names.strict),
        // Commands that only show are elsewhere.
        _ => Ok(()),
    }?;
    change.report.end()
}

/// A request about a path, by the path.
type OfPath = fn(PathAddr) -> MapRequest;

const ADD: OfPath = |path| MapRequest::AddPath { path };
const REMOVE: OfPath = |path| MapRequest::RemovePath { path };
const DISCONNECT: OfPath = |path| MapRequest::Disconnect { path };
const RECONNECT: OfPath = |path| MapRequest::Reconnect { path };

struct Change<'a> {
    client: &'a mut Client,
    report: Report,
}

impl Change<'_> {
    fn all(&mut self) -> Result<All, Failure> {
        All::of(self.client)
    }

    /// Sends a request, and reports its end.
    fn done(&mut self, request: impl Into<Request>, text: String) -> Result<(), Failure> {
        self.client.done(request)?;
        self.report.add(text)
    }

    fn of_mapping(&mut self, session: &str, request: MapRequest, text: String) -> Result<(), Failure> {
        self.done(Request::to_mapping(session, request), text)
    }

    fn map(&mut self, device: &str, words: &[String]) -> Result<(), Failure> {
        let order = MapWords::read(words)?;
        let session = match (order.session, order.paths.is_empty()) {
            (Some(session), _) => session,
            (None, true) => self.all()?.mapping(None)?.session.clone(),
            (None, false) => return Err(Failure::usage("`path` needs `from SESSION`")),
        };
        let paths = order.paths.iter().map(|path| resolved(path, DEFAULT_PORT));
        let paths = paths.collect::<Result<Vec<_>, _>>()?;
        let text = format!("mapped {device} from {session}");
        let order = MapOrder {
            session: Some(session),
            paths,
            device: device.to_owned(),
            mode: order.mode,
        };
        self.done(ProcessRequest::Map(order), text)
    }

    fn unmap(&mut self, device: &str, force: bool) -> Result<(), Failure> {
        let all = self.all()?;
        let (mapping, device) = all.one_mapped(device)?;
        self.unmap_one(&mapping.session, &device.name, force)
    }

    fn unmap_one(&mut self, session: &str, device: &str, force: bool) -> Result<(), Failure> {
        let text = format!("unmapped {device}");
        let device = device.to_owned();
        self.of_mapping(session, MapRequest::Unmap { device, force }, text)
    }

    fn resize(&mut self, device: &str, sectors: u64) -> Result<(), Failure> {
        let all = self.all()?;
        let (mapping, device) = all.one_mapped(device)?;
        let device = device.name.clone();
        let text = format!("{device} has {sectors} sectors");
        self.of_mapping(&mapping.session, MapRequest::Resize { device, sectors }, text)
    }

    fn remap(&mut self, device: &str, force: bool) -> Result<(), Failure> {
        let all = self.all()?;
        let (mapping, device) = all.one_mapped(device)?;
        let (session, name) = (&mapping.session, &device.name);
        if !force {
            return self.remap_one(session, name);
        }
        if mapping.devices.len() == 1 {
            let text = format!("{name} is the only device: its mapping would end with it");
            return Err(Failure::failed(text));
        }
        self.unmap_one(session, name, true)?;
        let order = MapOrder {
            session: Some(session.clone()),
            paths: Vec::new(),
            device: name.clone(),
            mode: device.mode,
        };
        self.done(ProcessRequest::Map(order), format!("mapped {name} from {session}"))
    }

    /// Opens a device again; one that is open stays so.
    fn remap_one(&mut self, session: &str, device: &str) -> Result<(), Failure> {
        let name = device.to_owned();
        match self.try_done(Request::to_mapping(session, MapRequest::Remap { device: name }))? {
            Ok(()) => self.report.add(format!("the server has opened {device} again")),
            Err(refused) if refused.errno == Errno::EALREADY => self.report.add(format!("{device} is open")),
            Err(refused) => Err(refused.into()),
        }
    }

    fn try_done(&mut self, request: Request) -> Result<Result<(), Refused>, Failure> {
        let answer = self.client.try_ask::<serde_json::Value>(request)?;
        Ok(answer.map(drop))
    }

    fn close(&mut self, device: &str, session: Option<&str>) -> Result<(), Failure> {
        let all = self.all()?;
        let is = |open: &&OpenDevice| open.name == device && session.is_none_or(|session| open.session_name == session);
        let found: Vec<_> = all.open.iter().filter(is).collect();
        if found.is_empty() {
            let text = match self.client.greeting.serves {
                true => format!("no client has {device:?} open"),
                false => "nothing is served by this process".to_owned(),
            };
            return Err(Failure::failed(text));
        }
        for open in found {
            let close = ServeRequest::ForceClose {
                session: open.session,
                device: open.device,
            };
            let text = format!("closed {device} for session {}", open.session_name);
            self.done(Request::to_server(open.server, close), text)?;
        }
        Ok(())
    }

    fn recover_all(&mut self) -> Result<(), Failure> {
        let all = self.all()?;
        if all.mappings.is_empty() {
            return Err(Failure::failed("nothing is mapped by this process"));
        }
        all.mappings.iter().try_for_each(|mapping| self.recover(mapping))
    }

    /// Reconnects paths that are down, then opens devices that are closed. Tries all, whatever fails.
    fn recover(&mut self, mapping: &MapListing) -> Result<(), Failure> {
        let mut failed = Vec::new();
        for path in mapping.paths.iter().filter(|p| p.state != PathState::Connected) {
            if let Err(refused) = self.reconnect(&mapping.session, path)? {
                failed.push(format!("path {}: {}", path.addr, shown(&refused.text)));
            }
        }
        // Devices come back with the session's first path.
        let all = self.all()?;
        let devices = all.mapping(Some(&mapping.session))?.devices.iter();
        for device in devices.filter(|d| d.state == DeviceState::MappedDisconnected) {
            if let Err(e) = self.remap_one(&mapping.session, &device.name) {
                let why = e.text().unwrap_or_default().to_owned();
                failed.push(format!("device {}: {why}", device.name));
            }
        }
        match failed.is_empty() {
            true => Ok(()),
            false => Err(Failure::failed(failed.join("\n"))),
        }
    }

    fn reconnect(&mut self, session: &str, path: &MappedPath) -> Result<Result<(), Refused>, Failure> {
        match self.try_done(Request::to_mapping(session, RECONNECT(path.addr)))? {
            Ok(()) => self.report.add(format!("path {} is up", path.addr)).map(Ok),
            Err(refused) => Ok(Err(refused)),
        }
    }

    fn session(&mut self, verb: &SessionVerb) -> Result<(), Failure> {
        let all = self.all()?;
        match verb {
            SessionVerb::List | SessionVerb::Show { .. } => Ok(()),
            SessionVerb::Disconnect(of) if !all.is_of_mapping(of.name()) => self.close_sessions(&all, of.name()),
            SessionVerb::Disconnect(of) => {
                let mapping = all.mapping(of.name())?;
                for path in mapping.paths.iter().filter(|p| p.state != PathState::Closed) {
                    let text = format!("path {} is down", path.addr);
                    self.of_mapping(&mapping.session, DISCONNECT(path.addr), text)?;
                }
                Ok(())
            }
            SessionVerb::Reconnect(of) => {
                let mapping = all.mapping(of.name())?;
                for path in &mapping.paths {
                    self.reconnect(&mapping.session, path)??;
                }
                Ok(())
            }
            SessionVerb::Remap(of) => {
                let mapping = all.mapping(of.name())?;
                let mut devices = mapping.devices.iter();
                devices.try_for_each(|device| self.remap_one(&mapping.session, &device.name))
            }
            SessionVerb::Recover(of) => self.recover(all.mapping(of.name())?),
            SessionVerb::Delete { of, force } => {
                let mapping = all.mapping(of.name())?;
                let mut devices = mapping.devices.iter();
                devices.try_for_each(|device| self.unmap_one(&mapping.session, &device.name, *force))
            }
            SessionVerb::Set {
                of,
                max_reconnects,
                reconnect_delay,
                on_loss,
            } => {
                let session = &all.mapping(of.name())?.session;
                let (attempts, delay) = (*max_reconnects, *reconnect_delay);
                let sets_reconnects = attempts.is_some() || delay.is_some();
                if !sets_reconnects && on_loss.is_none() {
                    return Err(Failure::usage(
                        "nothing to set: --max-reconnects, --reconnect-delay or --on-loss",
                    ));
                }
                if sets_reconnects {
                    let text = format!("session {session}: reconnect settings changed");
                    self.of_mapping(session, MapRequest::SetReconnects { attempts, delay }, text)?;
                }
                match *on_loss {
                    None => Ok(()),
                    Some(on_loss) => {
                        let word = if on_loss == OnLoss::Error { "error" } else { "queue" };
                        let text = format!("session {session}: requests without a path: {word}");
                        self.of_mapping(session, MapRequest::SetOnLoss { on_loss }, text)
                    }
                }
            }
        }
    }

    /// Disconnects sessions of a server.
    fn close_sessions(&mut self, all: &All, session: Option<&str>) -> Result<(), Failure> {
        let Some(name) = session else {
            return Err(Failure::usage("name one of the clients' sessions"));
        };
        let found: Vec<_> = all.sessions.iter().filter(|s| s.name == name).collect();
        if found.is_empty() {
            return Err(Failure::failed(format!("there is no session {name:?}")));
        }
        for ClientSession { server, session, .. } in found {
            let close = ServeRequest::CloseSession { session: *session };
            self.done(
                Request::to_server(*server, close),
                format!("disconnected session {name}"),
            )?;
        }
        Ok(())
    }

    fn path(&mut self, verb: &PathVerb) -> Result<(), Failure> {
        match verb {
            PathVerb::List | PathVerb::Show { .. } => Ok(()),
            PathVerb::Add(words) => {
                let (session, name) = words.parts();
                let all = self.all()?;
                let mapping = all.mapping(session)?;
                let path = resolved(name, mapping.port)?;
                self.of_mapping(&mapping.session, ADD(path), format!("path {name} is up"))
            }
            PathVerb::Delete(words) => self.path_request(words, &[(REMOVE, "deleted")]),
            PathVerb::Disconnect(words) => {
                let all = self.all()?;
                let (session, path) = words.parts();
                match all.paths(session, path).is_empty() && !all.sessions.is_empty() {
                    true => self.close_path(one(&all.client_paths(session, path), path)?),
                    false => self.path_request(words, &[(DISCONNECT, "down")]),
                }
            }
            PathVerb::Reconnect(words) => self.path_request(words, &[(RECONNECT, "up")]),
            PathVerb::Readd(words) => self.path_request(words, &[(REMOVE, "deleted"), (ADD, "up")]),
            PathVerb::Recover(words) => {
                let all = self.all()?;
                let (session, path) = words.parts();
                let (mapping, path) = one(&all.paths(session, path), path)?;
                match path.state {
                    PathState::Connected => Ok(()),
                    _ => Ok(self.reconnect(&mapping.session, path)??),
                }
            }
        }
    }

    /// Sends requests about a path, each with the path's state afterwards.
    fn path_request(&mut self, words: &PathWords, requests: &[(OfPath, &str)]) -> Result<(), Failure> {
        let all = self.all()?;
        let (session, path) = words.parts();
        // Reports a wrong session rather than a missing path.
        all.mapping(session.or(all.mappings.first().map(|m| m.session.as_str())))?;
        let (mapping, path) = one(&all.paths(session, path), path)?;
        for (request, state) in requests {
            let text = format!("path {} is {state}", path.addr);
            self.of_mapping(&mapping.session, request(path.addr), text)?;
        }
        Ok(())
    }

    fn close_path(&mut self, (session, path): (&ClientSession, &ClientPath)) -> Result<(), Failure> {
        let close = ServeRequest::ClosePath {
            session: session.session,
            path: path.path,
        };
        let text = format!(
            "disconnected path {} of session {}",
            client_path_name(path),
            session.name
        );
        self.done(Request::to_server(session.server, close), text)
    }

    fn policy(&mut self, policy: Policy, session: Option<&str>) -> Result<(), Failure> {
        let all = self.all()?;
        let session = &all.mapping(session)?.session;
        let text = format!("session {session}: {policy}");
        self.of_mapping(session, MapRequest::SetPolicy { policy }, text)
    }

    fn reset(&mut self, path: Option<&str>, which: PathCounters) -> Result<(), Failure> {
        let all = self.all()?;
        let mapped = path.map_or_else(|| all.all_paths(), |path| all.paths(None, path));
        let mut served = path.map_or_else(|| all.all_client_paths(), |path| all.client_paths(None, path));
        if let (Some(path), true, true) = (path, mapped.is_empty(), served.is_empty()) {
            return Err(Failure::failed(format!("there is no path {path:?}")));
        }
        if matches!(which, PathCounters::Reconnects | PathCounters::CpuMigration) {
            if mapped.is_empty() {
                return Err(Failure::usage("paths of a server have no such counters"));
            }
            served.clear();
        }
        for (mapping, path) in mapped {
            let request = MapRequest::ResetPathStats { path: path.addr, which };
            let text = format!("path {}: counters reset", path.addr);
            self.of_mapping(&mapping.session, request, text)?;
        }
        for (session, path) in served {
            let request = ServeRequest::ResetPathStats {
                session: session.session,
                path: path.path,
            };
            let text = format!("path {}: counters reset", client_path_name(path));
            self.done(Request::to_server(session.server, request), text)?;
        }
        Ok(())
    }

    fn write(&mut self, path: &str, text: &str, strict: bool) -> Result<(), Failure> {
        let write = ProcessRequest::Write {
            file: path.to_owned(),
            strict,
            text: format!("{text}\n"),
        };
        self.done(write, format!("written to {path}"))
    }
}

/// The only path that was found under a name.
fn one<A: Copy>(found: &[A], name: &str) -> Result<A, Failure> {
    match found {
        [one] => Ok(*one),
        [] => Err(Failure::failed(format!("there is no path {name:?}"))),
        _ => Err(Failure::usage(format!(
            "there are several paths {name:?}: name the session, both addresses, and the port"
        ))),
    }
}

/// A path with the addresses of its names, to this port if it names none.
fn resolved(text: &str, port: u16) -> Result<PathAddr, Failure> {
    let path: names::Path = text.parse().map_err(Failure::usage)?;
    Resolver::default().path(&path, port, &[])
}

/// Words of `map` after the device.
#[derive(Debug, PartialEq)]
struct MapWords<'a> {
    session: Option<String>,
    paths: Vec<&'a str>,
    mode: AccessMode,
}

impl<'a> MapWords<'a> {
    fn read(words: &'a [String]) -> Result<Self, Failure> {
        let mut read = Self {
            session: None,
            paths: Vec::new(),
            mode: AccessMode::ReadWrite,
        };
        let mut words = words.iter().map(String::as_str);
        while let Some(word) = words.next() {
            let mut next = |what: &str| {
                let next = words.next();
                next.ok_or_else(|| Failure::usage(format!("{word} is followed by {what}")))
            };
            match word {
                "from" => read.session = Some(next("a session's name")?.to_owned()),
                "path" => read.paths.push(next("a path")?),
                other => {
                    let unknown = |_| {
                        Failure::usage(format!(
                            "{other:?} is none of: from SESSION, path PATH, ro, rw, migration"
                        ))
                    };
                    read.mode = other.parse().map_err(|e: String| unknown(e))?;
                }
            }
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use rnbd_host::control::path_text;

    use super::*;

    #[test]
    fn devices_are_mapped_in_the_tools_words() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let all = words("from backup path 10.0.0.1,10.0.0.2 ro path 10.0.1.2");
        let read = MapWords::read(&all).unwrap();
        assert_eq!(read.session.as_deref(), Some("backup"));
        assert_eq!(
            (read.paths, read.mode),
            (vec!["10.0.0.1,10.0.0.2", "10.0.1.2"], AccessMode::ReadOnly)
        );
        assert_eq!(MapWords::read(&[]).unwrap().mode, AccessMode::ReadWrite);
        for wrong in ["from", "path", "wr", "to backup"] {
            assert!(MapWords::read(&words(wrong)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_path_is_added_at_the_sessions_port() {
        let text = |path| path_text(&resolved(path, 1300).unwrap());
        assert_eq!(text("10.0.0.1,10.0.0.2"), "10.0.0.1,10.0.0.2:1300");
        assert_eq!(text("ip:fe80::1@ip:fe80::2"), "fe80::1,[fe80::2]:1300");
        assert_eq!(text("10.0.0.2:99"), "10.0.0.2:99");
        assert!(resolved("no where", 1).is_err());
    }
}
