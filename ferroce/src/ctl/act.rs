//! Commands that change something.

use rnbd::client::OnLoss;
use rtrs::proto::DEFAULT_PORT;
use serde_json::{Value, json};

use super::{
    PathVerb, PathWords, SessionVerb, StatsVerb, Verb,
    client::Client,
    model::{All, Mapping, ServedPath, Session},
};
use crate::{
    names::{self, Resolver},
    output::{self, Failure},
};

/// Changes that were made, a line each, or an object with them.
struct Report {
    json: bool,
    done: Vec<String>,
}

impl Report {
    fn say(&mut self, text: String) -> Result<(), Failure> {
        if !self.json {
            output::line(&roce_verbs::shown(&text).to_string())?;
        }
        self.done.push(text);
        Ok(())
    }

    fn end(self) -> Result<(), Failure> {
        match self.json {
            true => output::json(&json!({ "done": self.done })),
            false if self.done.is_empty() => output::line("nothing was to be done"),
            false => Ok(()),
        }
    }
}

/// Does it.
pub(super) fn run(client: &mut Client, verb: &Verb, json: bool) -> Result<(), Failure> {
    client.follow()?;
    let mut act = Act {
        report: Report { json, done: Vec::new() },
        client,
    };
    match verb {
        Verb::Map { device, words } => act.map(device, words),
        Verb::Unmap { device, force } => act.unmap(device, force.is_some()),
        Verb::Resize { device, size } => act.resize(device, *size),
        Verb::Remap { device, force } => act.remap(device, force.is_some()),
        Verb::Close { device, session } => act.close(device, session.as_deref()),
        Verb::Recover => act.recover_all(),
        Verb::Session(verb) => act.session(verb),
        Verb::Path(verb) => act.path(verb),
        Verb::Policy { policy, session } => {
            let policy = policy.map(|policy| policy.name()).unwrap_or_default();
            act.policy(policy, session.as_deref())
        }
        Verb::Stats {
            verb: Some(StatsVerb::Reset { path, which }),
        } => act.reset(path.as_deref(), which.map(super::Which::name)),
        Verb::Write { path, text, names } => act.write(path, text, names.strict),
        // All that only shows something is elsewhere.
        _ => Ok(()),
    }?;
    act.report.end()
}

struct Act<'a> {
    client: &'a mut Client,
    report: Report,
}

impl Act<'_> {
    fn all(&mut self) -> Result<All, Failure> {
        All::of(self.client)
    }

    /// Asks for something, and says that it is done.
    fn done(&mut self, request: Value, text: String) -> Result<(), Failure> {
        self.client.ask(request)?;
        self.report.say(text)
    }

    fn map(&mut self, device: &str, words: &[String]) -> Result<(), Failure> {
        let order = MapWords::read(words)?;
        let session = match (order.session, order.paths.is_empty()) {
            (Some(session), _) => session,
            (None, true) => self.all()?.mapping(None)?.session.clone(),
            (None, false) => return Err(Failure::usage("say for which session the paths are: from SESSION")),
        };
        let paths = order.paths.iter().map(|path| resolved(path, DEFAULT_PORT));
        let paths = paths.collect::<Result<Vec<_>, _>>()?;
        let request = json!({
            "do": "map", "device": device, "session": session, "paths": paths, "mode": order.mode.unwrap_or("rw"),
        });
        self.done(request, format!("mapped {device} from {session}"))
    }

    fn unmap(&mut self, device: &str, force: bool) -> Result<(), Failure> {
        let all = self.all()?;
        let (mapping, device) = all.one_mapped(device)?;
        let request = json!({ "do": "unmap", "device": device.name, "session": mapping.session, "force": force });
        self.done(request, format!("unmapped {}", device.name))
    }

    fn resize(&mut self, device: &str, sectors: u64) -> Result<(), Failure> {
        let all = self.all()?;
        let (mapping, device) = all.one_mapped(device)?;
        let request = json!({ "do": "resize", "device": device.name, "session": mapping.session, "sectors": sectors });
        self.done(request, format!("{} has {sectors} sectors", device.name))
    }

    fn remap(&mut self, device: &str, force: bool) -> Result<(), Failure> {
        let all = self.all()?;
        let (mapping, device) = all.one_mapped(device)?;
        if !force {
            return self.remap_one(&mapping.session, &device.name);
        }
        if mapping.devices.len() == 1 {
            let text = format!("{} is the only device: its mapping would end with it", device.name);
            return Err(Failure::failed(text));
        }
        let request = json!({ "do": "unmap", "device": device.name, "session": mapping.session, "force": true });
        self.done(request, format!("unmapped {}", device.name))?;
        let request = json!({ "do": "map", "device": device.name, "session": mapping.session, "mode": device.mode });
        self.done(request, format!("mapped {} from {}", device.name, mapping.session))
    }

    /// One that is open stays so.
    fn remap_one(&mut self, session: &str, device: &str) -> Result<(), Failure> {
        const EALREADY: i64 = 114;
        let request = json!({ "do": "remap", "device": device, "session": session });
        match self.client.try_ask(request)? {
            Ok(_) => self.report.say(format!("the server has opened {device} again")),
            Err(refused) if refused.errno == EALREADY => self.report.say(format!("{device} is open")),
            Err(refused) => Err(refused.into()),
        }
    }

    fn close(&mut self, device: &str, session: Option<&str>) -> Result<(), Failure> {
        let all = self.all()?;
        let is = |open: &&super::model::OpenDevice| {
            open.name == device && session.is_none_or(|session| open.session_name == session)
        };
        let found: Vec<_> = all.open.iter().filter(is).collect();
        if found.is_empty() {
            let text = match self.client.hello.serves {
                true => format!("no client has {device:?} open"),
                false => "nothing is served by this process".to_owned(),
            };
            return Err(Failure::failed(text));
        }
        for open in found {
            let request =
                json!({ "do": "force_close", "server": open.server, "session": open.session, "device": open.device });
            self.done(request, format!("closed {device} for session {}", open.session_name))?;
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

    /// Paths that are down, then devices that are closed. Whatever fails, the rest is tried.
    fn recover(&mut self, mapping: &Mapping) -> Result<(), Failure> {
        let mut failed = Vec::new();
        for path in mapping.paths.iter().filter(|p| p.state != "connected") {
            if let Err(refused) = self.reconnect(&mapping.session, &path.whole(), &path.path)? {
                failed.push(format!("path {}: {}", path.path, refused.text));
            }
        }
        // Devices come back with the session's first path.
        let all = self.all()?;
        let devices = all.mapping(Some(&mapping.session))?.devices.iter();
        for device in devices.filter(|d| d.state == "closed") {
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

    fn reconnect(
        &mut self,
        session: &str,
        whole: &str,
        name: &str,
    ) -> Result<Result<(), super::client::NotDone>, Failure> {
        let request = json!({ "do": "reconnect", "session": session, "path": whole });
        match self.client.try_ask(request)? {
            Ok(_) => self.report.say(format!("path {name} is up")).map(Ok),
            Err(refused) => Ok(Err(refused)),
        }
    }

    fn session(&mut self, verb: &SessionVerb) -> Result<(), Failure> {
        let all = self.all()?;
        match verb {
            SessionVerb::List | SessionVerb::Show { .. } => Ok(()),
            SessionVerb::Disconnect { session } if !all.is_of_mapping(session.as_deref()) => {
                self.close_sessions(&all, session.as_deref())
            }
            SessionVerb::Disconnect { session } => {
                let mapping = all.mapping(session.as_deref())?;
                for path in mapping.paths.iter().filter(|p| p.state != "closed") {
                    let request = json!({ "do": "disconnect", "session": mapping.session, "path": path.whole() });
                    self.done(request, format!("path {} is down", path.path))?;
                }
                Ok(())
            }
            SessionVerb::Reconnect { session } => {
                let mapping = all.mapping(session.as_deref())?;
                for path in &mapping.paths {
                    self.reconnect(&mapping.session, &path.whole(), &path.path)??;
                }
                Ok(())
            }
            SessionVerb::Remap { session } => {
                let mapping = all.mapping(session.as_deref())?;
                let mut devices = mapping.devices.iter();
                devices.try_for_each(|device| self.remap_one(&mapping.session, &device.name))
            }
            SessionVerb::Recover { session } => self.recover(all.mapping(session.as_deref())?),
            SessionVerb::Delete { session, force } => {
                let mapping = all.mapping(session.as_deref())?;
                for device in &mapping.devices {
                    let name = &device.name;
                    let request = json!({ "do": "unmap", "device": name, "session": mapping.session, "force": force });
                    self.done(request, format!("unmapped {name}"))?;
                }
                Ok(())
            }
            SessionVerb::Set {
                session,
                max_reconnects,
                reconnect_delay,
                on_loss,
            } => {
                let session = all.mapping(session.as_deref())?.session.clone();
                if max_reconnects.is_none() && reconnect_delay.is_none() && on_loss.is_none() {
                    return Err(Failure::usage(
                        "nothing to set: --max-reconnects, --reconnect-delay or --on-loss",
                    ));
                }
                self.set_reconnects(&session, *max_reconnects, *reconnect_delay)?;
                on_loss.map_or(Ok(()), |on_loss| self.set_on_loss(&session, on_loss))
            }
        }
    }

    fn set_reconnects(
        &mut self,
        session: &str,
        attempts: Option<i64>,
        delay: Option<std::time::Duration>,
    ) -> Result<(), Failure> {
        if attempts.is_none() && delay.is_none() {
            return Ok(());
        }
        let mut request = json!({ "do": "reconnects", "session": session, "attempts": attempts });
        request["delay"] = delay.map(|delay| delay.as_secs_f64()).into();
        self.done(request, format!("session {session} reconnects so from now on"))
    }

    fn set_on_loss(&mut self, session: &str, on_loss: OnLoss) -> Result<(), Failure> {
        let (word, seconds) = match on_loss {
            OnLoss::Error => ("error", None),
            OnLoss::Queue(time) => ("queue", time.map(|time| time.as_secs_f64())),
        };
        let request = json!({ "do": "on_loss", "session": session, "on_loss": word, "seconds": seconds });
        self.done(request, format!("requests without a path: {word}"))
    }

    /// A server's sessions are closed.
    fn close_sessions(&mut self, all: &All, session: Option<&str>) -> Result<(), Failure> {
        let Some(name) = session else {
            return Err(Failure::usage("say which of the clients' sessions"));
        };
        let found: Vec<_> = all.sessions.iter().filter(|s| s.name == name).collect();
        if found.is_empty() {
            return Err(Failure::failed(format!("there is no session {name:?}")));
        }
        for session in found {
            let request = json!({ "do": "close_session", "server": session.server, "session": session.session });
            self.done(request, format!("disconnected session {name}"))?;
        }
        Ok(())
    }

    fn path(&mut self, verb: &PathVerb) -> Result<(), Failure> {
        match verb {
            PathVerb::List | PathVerb::Show { .. } => Ok(()),
            PathVerb::Add(words) => {
                let (session, path) = words.parts();
                let all = self.all()?;
                let mapping = all.mapping(session)?;
                let path = resolved(path, mapping.port)?;
                let request = json!({ "do": "add_path", "session": mapping.session, "path": path });
                self.done(request, format!("path {} is up", words.parts().1))
            }
            PathVerb::Delete(words) => self.path_request(words, "remove_path", "deleted"),
            PathVerb::Disconnect(words) => {
                let all = self.all()?;
                let (session, path) = words.parts();
                match all.paths(session, path).is_empty() && !all.sessions.is_empty() {
                    true => self.close_path(one(&all.served_paths(session, path), path)?),
                    false => self.path_request(words, "disconnect", "down"),
                }
            }
            PathVerb::Reconnect(words) => self.path_request(words, "reconnect", "up"),
            PathVerb::Readd(words) => {
                let all = self.all()?;
                let (session, path) = words.parts();
                let (mapping, path) = one(&all.paths(session, path), path)?;
                for (what, how) in [("remove_path", "deleted"), ("add_path", "up")] {
                    let request = json!({ "do": what, "session": mapping.session, "path": path.whole() });
                    self.done(request, format!("path {} is {how}", path.path))?;
                }
                Ok(())
            }
            PathVerb::Recover(words) => {
                let all = self.all()?;
                let (session, path) = words.parts();
                let (mapping, path) = one(&all.paths(session, path), path)?;
                match path.state.as_str() {
                    "connected" => Ok(()),
                    _ => Ok(self.reconnect(&mapping.session, &path.whole(), &path.path)??),
                }
            }
        }
    }

    fn path_request(&mut self, words: &PathWords, what: &str, how: &str) -> Result<(), Failure> {
        let all = self.all()?;
        let (session, path) = words.parts();
        // So that a wrong name is what is told.
        all.mapping(session.or(all.mappings.first().map(|m| m.session.as_str())))?;
        let (mapping, path) = one(&all.paths(session, path), path)?;
        let request = json!({ "do": what, "session": mapping.session, "path": path.whole() });
        self.done(request, format!("path {} is {how}", path.path))
    }

    fn close_path(&mut self, (session, path): (&Session, &ServedPath)) -> Result<(), Failure> {
        let request =
            json!({ "do": "close_path", "server": session.server, "session": session.session, "path": path.path });
        self.done(
            request,
            format!("disconnected path {} of session {}", path.name(), session.name),
        )
    }

    fn policy(&mut self, policy: &str, session: Option<&str>) -> Result<(), Failure> {
        let all = self.all()?;
        let session = &all.mapping(session)?.session;
        let request = json!({ "do": "policy", "session": session, "policy": policy });
        self.done(request, format!("session {session}: {policy}"))
    }

    fn reset(&mut self, path: Option<&str>, which: Option<&str>) -> Result<(), Failure> {
        let all = self.all()?;
        let ours: Vec<_> = match path {
            Some(path) => all.paths(None, path),
            None => all
                .mappings
                .iter()
                .flat_map(|m| m.paths.iter().map(move |p| (m, p)))
                .collect(),
        };
        let served: Vec<_> = match path {
            Some(path) => all.served_paths(None, path),
            None => all
                .sessions
                .iter()
                .flat_map(|s| s.paths.iter().map(move |p| (s, p)))
                .collect(),
        };
        if let (Some(path), true, true) = (path, ours.is_empty(), served.is_empty()) {
            return Err(Failure::failed(format!("there is no path {path:?}")));
        }
        let of_mappings_alone = matches!(which, Some("reconnects" | "cpu_migration"));
        if let (Some(which), true, true) = (which, of_mappings_alone, ours.is_empty()) {
            return Err(Failure::usage(format!("paths of a server's clients have no {which}")));
        }
        for (mapping, path) in ours {
            let session = &mapping.session;
            let request = json!({ "do": "reset_path_stats", "session": session, "path": path.whole(), "which": which });
            self.done(request, format!("path {} counts from zero", path.path))?;
        }
        for (session, path) in served.into_iter().filter(|_| !of_mappings_alone) {
            let request = json!({ "do": "reset_path_stats", "of": "server", "server": session.server, "session": session.session, "path": path.path });
            self.done(request, format!("path {} counts from zero", path.name()))?;
        }
        Ok(())
    }

    fn write(&mut self, path: &str, text: &str, strict: bool) -> Result<(), Failure> {
        let request = json!({ "do": "write", "file": path, "text": format!("{text}\n"), "strict": strict });
        self.done(request, format!("written to {path}"))
    }
}

/// The only one of what was found under a name.
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
fn resolved(text: &str, port: u16) -> Result<String, Failure> {
    let path: names::Path = text.parse().map_err(Failure::usage)?;
    let path = Resolver::default().path(&path, port, &[])?;
    Ok(match path.src {
        Some(src) => format!("{src},{}", path.dst),
        None => path.dst.to_string(),
    })
}

/// Description of a device to be mapped.
#[derive(Debug, Default, PartialEq)]
struct MapWords<'a> {
    session: Option<String>,
    paths: Vec<&'a str>,
    mode: Option<&'a str>,
}

impl<'a> MapWords<'a> {
    fn read(words: &'a [String]) -> Result<Self, Failure> {
        let mut read = Self::default();
        let mut words = words.iter().map(String::as_str);
        while let Some(word) = words.next() {
            let mut next = |what: &str| {
                let next = words.next();
                next.ok_or_else(|| Failure::usage(format!("{word} is followed by {what}")))
            };
            match word {
                "from" => read.session = Some(next("a session's name")?.to_owned()),
                "path" => read.paths.push(next("a path")?),
                "ro" | "rw" | "migration" => read.mode = Some(word),
                other => {
                    let text = format!("{other:?} is none of: from SESSION, path PATH, ro, rw, migration");
                    return Err(Failure::usage(text));
                }
            }
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_mapped_in_the_tools_words() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let all = words("from backup path 10.0.0.1,10.0.0.2 ro path 10.0.1.2");
        let read = MapWords::read(&all).unwrap();
        assert_eq!(read.session.as_deref(), Some("backup"));
        assert_eq!(
            (read.paths, read.mode),
            (vec!["10.0.0.1,10.0.0.2", "10.0.1.2"], Some("ro"))
        );
        assert_eq!(MapWords::read(&[]).unwrap(), MapWords::default());
        for wrong in ["from", "path", "wr", "to backup"] {
            assert!(MapWords::read(&words(wrong)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_path_is_added_at_the_sessions_port() {
        assert_eq!(resolved("10.0.0.1,10.0.0.2", 1300).unwrap(), "10.0.0.1,10.0.0.2:1300");
        assert_eq!(
            resolved("ip:fe80::1@ip:fe80::2", 1300).unwrap(),
            "fe80::1,[fe80::2]:1300"
        );
        assert_eq!(resolved("10.0.0.2:99", 1300).unwrap(), "10.0.0.2:99");
        assert!(resolved("no where", 1).is_err());
    }
}
