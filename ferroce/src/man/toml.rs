//! ferroce.toml(5): the tables of the daemon's file, with the options that are their keys.

use clap_mangen::roff::{Roff, bold, italic, roman};

use super::{MANUAL, references};
use crate::daemon::{self, Documented};

const EXAMPLE: &str = r#"[daemon]
metrics = 9100

[serve.images]
addr = ["192.0.2.7", "198.51.100.7"]
export = "disk=/images/disk.img"
threads = 2

[map.db]
path = ["192.0.2.1,192.0.2.8", "198.51.100.1,198.51.100.8"]
device = ["data", "log"]
nbd = "/run/ferroce-daemon/db.sock"
on-loss = "queue""#;

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
        "The configuration file of ferroce-daemon(1) is TOML. It has one table for each server, [serve.NAME], for each \
         mapping, [map.NAME], for each RDS node, [rds.NAME], and for each LNet node, [lnet.NAME]; their keys are the options of ferroce-serve(1), ferroce-map(1), \
         ferroce-rds-node(1) and ferroce-lnet-serve(1) without the dashes. The table [daemon] has options of \
         ferroce-daemon(1) itself. The table [control] limits tasks that members of the control socket's group start: without a key, what it \
         allows is refused.",
        "An option without a value is true or false, and so is one whose values are on and off. An option that may be given several \
         times takes an array, or a single value. Sizes and times are written as on the command line: \"1M\", 0.5. The session of \
         [map.NAME] is called NAME unless there is the key session.",
        "SIGHUP, or ferroce ctl reload, makes the daemon read the file again. A file with a mistake changes nothing; the message \
         names file and line. Tasks that have not changed go on.",
    ] {
        roff.control("PP", []);
        roff.text([roman(paragraph)]);
    }
    for (title, keys) in daemon::tables() {
        roff.control("SH", [title.as_str()]);
        keys.iter().for_each(|it| key(&mut roff, it));
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

/// A key, what its value looks like, and its help.
fn key(roff: &mut Roff, key: &Documented) {
    roff.control("TP", []);
    roff.text([bold(&key.name), roman(" = "), italic(&key.value)]);
    for (i, paragraph) in key.help.split("\n\n").enumerate() {
        if i > 0 {
            roff.control("IP", []);
        }
        roff.text([roman(paragraph)]);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_example_is_a_file_that_the_daemon_reads() {
        daemon::Config::parse(Path::new("ferroce.toml"), EXAMPLE).unwrap();
    }

    #[test]
    fn keys_are_the_options_of_the_commands() {
        let page = page("1").to_roff();
        for key in [
            "addr",
            "export\\-dir",
            "on\\-loss",
            "tls\\-verify\\-peer",
            "metrics",
            "nbd\\-dir",
            "pcap",
        ] {
            assert!(page.contains(&format!("\\fB{key}\\fR = ")), "{key}: {page}");
        }
        for table in [
            "[serve.NAME]",
            "[map.NAME]",
            "[rds.NAME]",
            "[lnet.NAME]",
            "[daemon]",
            "[control]",
        ] {
            assert!(page.contains(&format!(".SH {table}")), "{table}: {page}");
        }
        assert!(!page.contains("\\fBconfig\\fR"), "an option of the command line alone");
    }
}
