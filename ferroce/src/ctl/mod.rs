//! `ferroce ctl`: inspects and controls a running `serve`, `map` or `daemon`.

mod args;
mod change;
mod client;
pub(crate) mod lnet;
mod print;
mod state;
mod table;
mod tasks;
mod view;

use rnbd_host::control::{AttributePath, ProcessRequest};

use self::args::{PathVerb, SessionVerb, Verb, What};
pub(crate) use self::{args::CtlArgs, tasks::start};
use crate::output::Failure;

/// Runs the command.
pub(crate) fn run(args: &CtlArgs) -> Result<(), Failure> {
    let mut client = client::Client::connect(args.socket.as_deref())?;
    let as_json = args.json;
    match &args.verb {
        Verb::List { what } => view::list(&mut client, *what, as_json),
        Verb::Show { name } => view::show(&mut client, view::Of::Any, name, as_json),
        Verb::Session(SessionVerb::List) => view::list(&mut client, Some(What::Sessions), as_json),
        Verb::Session(SessionVerb::Show { session }) => view::show(&mut client, view::Of::Session, session, as_json),
        Verb::Path(PathVerb::List) => view::list(&mut client, Some(What::Paths), as_json),
        Verb::Path(PathVerb::Show { path }) => view::show(&mut client, view::Of::Path, path, as_json),
        Verb::Policy { policy: None, session } => print::policy(&mut client, session.as_deref(), as_json),
        Verb::Stats { verb: None } => view::stats(&mut client, as_json),
        Verb::Events => print::events(client, as_json),
        Verb::Tasks => tasks::list(&mut client, as_json),
        Verb::Reload => tasks::reload(&mut client, as_json),
        Verb::Stop { task } => tasks::stop(&mut client, task, as_json),
        Verb::Metrics => print::text_of(&mut client, ProcessRequest::Metrics {}, as_json),
        Verb::Ls { path, names } => print::ls(&mut client, attribute(path, names.strict), as_json),
        Verb::Cat { path, names } => {
            let request = ProcessRequest::Read(attribute(path, names.strict));
            print::text_of(&mut client, request, as_json)
        }
        verb => change::run(&mut client, verb, as_json),
    }
}

fn attribute(path: &str, strict: bool) -> AttributePath {
    let file = path.to_owned();
    AttributePath { file, strict }
}
