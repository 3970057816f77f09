//! Policies, events, attributes and texts.

use rnbd_host::control::{AttributePath, Entries, Kind, ProcessRequest, Text};
use roce_verbs::shown;
use serde_json::json;

use super::{client::Client, state::All};
use crate::output::{self, Failure};

/// Shows the path policy of a session.
pub(super) fn policy(client: &mut Client, session: Option<&str>, json: bool) -> Result<(), Failure> {
    let all = All::of(client)?;
    let mapping = all.mapping(session)?;
    match json {
        true => output::json(&json!({ "session": mapping.session, "policy": mapping.policy.name() })),
        false => output::line(mapping.policy.name()),
    }
}

/// Prints events until the process exits.
pub(super) fn events(mut client: Client, json: bool) -> Result<(), Failure> {
    client.done(ProcessRequest::Subscribe {})?;
    let mut ended = false;
    while let Some(mut event) = client.event()? {
        ended = event["event"] == "summary";
        if json {
            if let Some(fields) = event.as_object_mut() {
                fields.remove("text");
            }
            output::json(&event)?;
        } else {
            let text = event["text"].as_str().unwrap_or_default();
            for line in text.lines() {
                output::line(&shown(line).to_string())?;
            }
        }
    }
    match ended {
        true => Ok(()),
        false => Err(Failure::failed("the process is gone")),
    }
}

/// Lists a directory of the tree.
pub(super) fn ls(client: &mut Client, at: AttributePath, json: bool) -> Result<(), Failure> {
    let Entries { entries } = client.ask(ProcessRequest::Ls(at))?;
    if json {
        return output::json(&entries);
    }
    for entry in entries {
        let end = match entry.stat.kind {
            Kind::Dir => "/".to_owned(),
            Kind::Link(target) => format!(" -> {target}"),
            Kind::File => String::new(),
        };
        let line = format!("{:04o} {}{end}", entry.stat.mode, entry.name);
        output::line(&shown(&line).to_string())?;
    }
    Ok(())
}

/// Prints the text of an answer.
pub(super) fn text_of(client: &mut Client, request: ProcessRequest, json: bool) -> Result<(), Failure> {
    let answer: Text = client.ask(request)?;
    match json {
        true => output::json(&answer),
        false => output::text(&answer.text),
    }
}
