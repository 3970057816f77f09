//! ferroce.toml(5): the tables of the daemon's file, with the options that are their keys.

use clap::{Arg, ArgAction};
use clap_mangen::roff::{Roff, bold, italic, roman};

use super::{MANUAL, references, value};
use crate::daemon;

const EXAMPLE: &str = r#"[serve.images]
addr = ["192.0.2.7", "198.51.100.7"]
export = "disk=/images/disk.img"
threads = 2

[map.db]
path = ["192.0.2.1,192.0.2.8", "198.51.100.1,198.51.100.8"]
device = ["data", "log"]
nbd = "/run/ferroce-daemon/db.sock"
on-loss = "queue""#;

/// Keys of the table `[control]`, their values, and what they allow.
const CONTROL: [(&str, &str, &str); 4] = [
    (
        "export",
        "[\"PATH\", \"PATH,ro\"]",
        "Exports are one of these files, folders and devices, or below it; with ,ro for reading only.",
    ),
    ("pcap", "\"DIR\"", "Captures are files in this folder."),
    (
        "tls-certificates",
        "\"DIR\"",
        "This folder of certificates may be used.",
    ),
    ("nbd-listen", "true", "NBD clients may connect by TCP."),
];

/// The page.
pub(super) fn page(version: &str) -> Roff {
    let mut roff = Roff::new();
    let source = format!("ferroce {version}");
    roff.control("TH", ["ferroce.toml", "5", "", &source, MANUAL]);
    roff.control("SH", ["NAME"]);
    roff.text([roman("ferroce.toml - what ferroce daemon serves and maps")]);
    roff.control("SH", ["SYNOPSIS"]);
    roff.text([bold("/etc/ferroce.toml")]);
    roff.control("SH", ["DESCRIPTION"]);
    for paragraph in [
        "The configuration file of ferroce-daemon(1) is TOML. It has one table for each server, [serve.NAME], and one for each \
         mapping, [map.NAME]; their keys are the options of ferroce-serve(1) and ferroce-map(1) without the dashes. The table [daemon] has options of ferroce-daemon(1) \
         itself. What \
         members of the control socket's group may start beyond the file is in the table [control].",
        "An option without a value is true or false, and so is one whose values are on and off. An option that may be given several \
         times takes an array. Sizes and times are written as on the command line: \"1M\", 0.5.",
        "SIGHUP, or ferroce ctl reload, makes the daemon read the file again. A file with a mistake changes nothing; the message \
         names file and line. Tasks that have not changed go on.",
    ] {
        roff.control("PP", []);
        roff.text([roman(paragraph)]);
    }
    for (title, keys) in daemon::keys() {
        roff.control("SH", [title.as_str()]);
        keys.iter().for_each(|arg| key(&mut roff, arg));
    }
    roff.control("SH", ["[control]"]);
    roff.text([roman(
        "Limits tasks that members of the control socket's group start. Without a key, what it allows is refused.",
    )]);
    for (name, value, text) in CONTROL {
        roff.control("TP", []);
        roff.text([bold(name), roman(" = "), italic(value)]);
        roff.text([roman(text)]);
    }
    roff.control("SH", ["EXAMPLES"]);
    roff.control("nf", []);
    EXAMPLE.lines().for_each(|line| {
        roff.text([roman(line)]);
    });
    roff.control("fi", []);
    roff.extend([references(&[
        ("ferroce-daemon".to_owned(), "1"),
        ("ferroce-serve".to_owned(), "1"),
        ("ferroce-map".to_owned(), "1"),
        ("ferroce-ctl".to_owned(), "1"),
        ("ferroce".to_owned(), "7"),
    ])]);
    roff
}

/// A key, what its value looks like, and the option's help.
fn key(roff: &mut Roff, arg: &Arg) {
    roff.control("TP", []);
    let name = bold(arg.get_long().unwrap_or_default());
    let value = match arg.get_action() {
        ArgAction::SetTrue => italic("true"),
        ArgAction::Append => italic(format!("[\"{}\", ...]", names(arg))),
        _ => value(arg).unwrap_or_else(|| italic("VALUE")),
    };
    roff.text([name, roman(" = "), value]);
    let help = arg.get_long_help().or_else(|| arg.get_help());
    let help = help.map(ToString::to_string).unwrap_or_default();
    for (i, paragraph) in help.split("\n\n").enumerate() {
        if i > 0 {
            roff.control("IP", []);
        }
        roff.text([roman(paragraph.replace("--", ""))]);
    }
}

fn names(arg: &Arg) -> String {
    let names = arg.get_value_names().unwrap_or_default();
    names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_example_is_a_file_that_the_daemon_reads() {
        daemon::Config::parse(Path::new("ferroce.toml"), EXAMPLE).unwrap();
        let keys: String = CONTROL
            .iter()
            .map(|(name, value, _)| format!("{name} = {value}\n"))
            .collect();
        let absolute = keys.replace("PATH", "/images").replace("DIR", "/folder");
        daemon::Config::parse(Path::new("ferroce.toml"), &format!("[control]\n{absolute}")).unwrap();
    }

    #[test]
    fn keys_are_the_options_of_both_commands() {
        let page = page("1").to_roff();
        for key in ["addr", "export\\-dir", "on\\-loss", "tls\\-verify\\-peer"] {
            assert!(page.contains(&format!("\\fB{key}\\fR = ")), "{key}: {page}");
        }
        assert!(!page.contains("\\fBconfig\\fR"), "an option of the command line alone");
    }
}
