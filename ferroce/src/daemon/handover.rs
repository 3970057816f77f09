//! `ferroce serve --daemon`, `ferroce map --daemon`, `ferroce rds node --daemon` and `ferroce lnet serve --daemon`: start a task of a running daemon.

use std::path::Path;

use clap::{ArgAction, ArgMatches, Command, parser::ValueSource};

use super::task::Kind;
use crate::{ctl, lnet, output::Failure};

/// Options of this process, which are not handed over.
const OWN: [&str; 3] = ["daemon", "verbose", "quiet"];

/// Starts the command line as a task of the daemon, with this name.
pub(crate) fn hand_over(kind: &Kind, name: &str, command: &Command, matches: &ArgMatches) -> Result<(), Failure> {
    let mut names = kind.subcommands().iter();
    let of_kind = names.try_fold((command, matches), |(command, matches), name| {
        command.find_subcommand(name).zip(matches.subcommand_matches(name))
    });
    let words = of_kind.map_or(Ok(Vec::new()), |(command, matches)| words(command, matches))?;
    ctl::start(&format!("{}.{name}", kind.name()), &words)
}

/// The given options, each in one word, with absolute paths: the daemon has another working folder.
pub(super) fn words(command: &Command, matches: &ArgMatches) -> Result<Vec<String>, Failure> {
    let mut words = Vec::new();
    for arg in command.get_arguments() {
        let id = arg.get_id().as_str();
        // What has only a place is an option of the task.
        let long = arg.get_long().unwrap_or(id);
        let given = matches.try_contains_id(id).is_ok() && matches.value_source(id) == Some(ValueSource::CommandLine);
        if !given || OWN.contains(&long) {
            continue;
        }
        if matches!(arg.get_action(), ArgAction::SetTrue) {
            words.push(format!("--{long}"));
            continue;
        }
        for value in matches.get_raw(id).into_iter().flatten() {
            let text = value
                .to_str()
                .ok_or_else(|| Failure::usage(format!("--{long} is not valid UTF-8")))?;
            words.push(format!("--{long}={}", from_root(long, text)?));
        }
    }
    Ok(words)
}

/// Makes paths in a value absolute.
fn from_root(long: &str, value: &str) -> Result<String, Failure> {
    let absolute = |path: &str| {
        let path = std::path::absolute(Path::new(path));
        let path = path.map_err(|e| Failure::failed(format!("working folder: {e}")))?;
        path.into_os_string()
            .into_string()
            .map_err(|path| Failure::usage(format!("{} is not valid UTF-8", path.display())))
    };
    match (long, value.split_once('=')) {
        ("dir" | "nbd" | "pcap" | "export-dir" | "export-within" | "tls-certificates", _) => absolute(value),
        ("pcap-ring", _) => match value.split_once(',') {
            Some((size, file)) => Ok(format!("{size},{}", absolute(file)?)),
            None => Ok(value.to_owned()),
        },
        ("vhost-user", None) => absolute(value),
        ("source", _) => match lnet::source_file(value) {
            Some((portal, file)) => Ok(format!("{portal}:{}", absolute(file)?)),
            None => Ok(value.to_owned()),
        },
        ("export" | "vhost-user", Some((name, path))) => Ok(format!("{name}={}", absolute(path)?)),
        _ => Ok(value.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Args;

    use super::*;
    use crate::serve::ServeArgs;

    #[test]
    fn what_was_given_is_handed_over_with_paths_from_the_root() {
        let command = ServeArgs::augment_args(Command::new("serve"));
        let given = [
            "serve",
            "--addr",
            "192.0.2.1",
            "--export=a=b,ro",
            "--export",
            "c=/d",
            "--direct",
            "--daemon",
        ];
        let matches = command.clone().try_get_matches_from(given).unwrap();
        let here = std::env::current_dir().unwrap();
        let mut words = words(&command, &matches).unwrap();
        words.sort();
        let first = format!("--export=a={}/b,ro", here.display());
        assert_eq!(words, ["--addr=192.0.2.1", "--direct", &first, "--export=c=/d"]);
    }
}
