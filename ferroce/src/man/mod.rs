//! Manual pages: one for each command, from the command line's definition, ferroce.toml(5) and ferroce(7).

mod toml;

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use clap::{Args, Command};
use clap_mangen::{
    Man,
    roff::{Inline, Roff, bold, roman},
};

use crate::output::{self, Failure};

/// The page of concepts, with the version to be filled in.
const OVERVIEW: &str = include_str!("ferroce.7");
/// Title of the manual, in each page's header.
const MANUAL: &str = "ferroce manual";
/// Commands that read the configuration file or start what it may name.
const OF_THE_FILE: [&str; 5] = [
    "ferroce",
    "ferroce-ctl",
    "ferroce-daemon",
    "ferroce-map",
    "ferroce-serve",
];
/// Options that are the same for every command: ferroce(1) has them.
const GLOBAL: [&str; 3] = ["verbose", "quiet", "help"];

#[derive(Args)]
pub(crate) struct ManArgs {
    /// Folder for the pages; made if missing
    dir: PathBuf,
}

/// Writes one page per command, and those of the file and of the concepts.
pub(crate) fn run(args: &ManArgs, command: Command) -> Result<(), Failure> {
    let fail = |e: io::Error| Failure::failed(format!("{}: {e}", args.dir.display()));
    fs::create_dir_all(&args.dir).map_err(fail)?;
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let version = command.get_version().unwrap_or_default().to_owned();
    pages(&command, None, &version, &args.dir).map_err(fail)?;
    fs::write(args.dir.join("ferroce.toml.5"), toml::page(&version).to_roff()).map_err(fail)?;
    fs::write(args.dir.join("ferroce.7"), OVERVIEW.replace("@VERSION@", &version)).map_err(fail)?;
    output::line(&format!("manual pages written to {}", args.dir.display()))
}

/// Writes the pages of a command and of those below it.
fn pages(command: &Command, parent: Option<&str>, version: &str, dir: &Path) -> io::Result<()> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        pages(below, Some(name), version, dir)?;
    }
    let mut file = fs::File::create(dir.join(format!("{name}.1")))?;
    file.write_all(&page(command, name, parent, version)?)?;
    file.flush()
}

fn page(command: &Command, name: &str, parent: Option<&str>, version: &str) -> io::Result<Vec<u8>> {
    let shown = command.clone().mut_args(|arg| {
        // Without a value of its own each page would repeat them.
        let hidden = parent.is_some() && GLOBAL.contains(&arg.get_id().as_str());
        arg.hide(hidden)
    });
    let mut out = Vec::new();
    // Where a macro's argument ends is for the quotes to say.
    let source = format!("ferroce {version}");
    let man = Man::new(shown.clone()).source(source).manual(MANUAL);
    man.render_title(&mut out)?;
    man.render_name_section(&mut out)?;
    synopsis(command).to_writer(&mut out)?;
    man.render_description_section(&mut out)?;
    if shown.get_arguments().any(|arg| !arg.is_hide_set()) {
        man.render_options_section(&mut out)?;
    }
    if shown.get_subcommands().any(|below| !below.is_hide_set()) {
        man.render_subcommands_section(&mut out)?;
    }
    let after = command.get_after_long_help().or_else(|| command.get_after_help());
    if let Some(after) = after {
        sections(&after.to_string()).to_writer(&mut out)?;
    }
    see_also(command, name, parent).to_writer(&mut out)?;
    Ok(out)
}

/// The usage, as `--help` has it: options with their values, and only those that must be given.
fn synopsis(command: &Command) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["SYNOPSIS"]);
    let usage = command.clone().render_usage().to_string();
    for (i, line) in usage.lines().enumerate() {
        if i > 0 {
            roff.control("br", []);
        }
        let line = line.trim().trim_start_matches("Usage:").trim_start();
        let (words, rest) = name_of(command, line);
        roff.text([bold(words), roman(rest)]);
    }
    roff
}

/// Splits a usage line after the command's words.
fn name_of<'a>(command: &Command, line: &'a str) -> (&'a str, &'a str) {
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name());
    match line.starts_with(name) {
        true => line.split_at(name.len()),
        false => ("", line),
    }
}

/// The text after the options: its headings are sections, what is indented stays as it is, and the rest are notes.
fn sections(text: &str) -> Roff {
    let mut roff = Roff::new();
    let mut headed = false;
    for paragraph in text.split("\n\n").filter(|p| !p.trim().is_empty()) {
        let mut lines = paragraph.lines().peekable();
        let first = lines.peek().copied().and_then(heading);
        match first {
            Some((title, rest)) => {
                roff.control("SH", [title.to_uppercase().as_str()]);
                lines.next();
                body(
                    &mut roff,
                    Some(rest).filter(|rest| !rest.is_empty()).into_iter().chain(lines),
                );
            }
            None => {
                match headed {
                    true => roff.control("PP", []),
                    false => roff.control("SH", ["NOTES"]),
                };
                body(&mut roff, lines);
            }
        }
        headed = true;
    }
    roff
}

/// The heading that a line begins with, and what follows its colon on the line.
fn heading(line: &str) -> Option<(&'static str, &str)> {
    const HEADINGS: [&str; 3] = ["Examples", "Exit status", "Environment"];
    let known = HEADINGS.into_iter().find(|known| line.starts_with(known))?;
    let (_, rest) = line.split_once(':')?;
    Some((known, rest.trim_start()))
}

/// Running text, and lines that are indented.
fn body<'a>(roff: &mut Roff, lines: impl Iterator<Item = &'a str>) {
    let mut literal = false;
    for line in lines {
        let indented = line.starts_with("  ");
        if indented != literal {
            roff.control(if indented { "RS" } else { "fi" }, []);
            roff.control(if indented { "nf" } else { "RE" }, []);
            literal = indented;
        }
        roff.text([roman(line.strip_prefix("  ").unwrap_or(line))]);
    }
    if literal {
        roff.control("fi", []);
        roff.control("RE", []);
    }
}

/// The command above, those below, and the pages of the file and of the concepts.
fn see_also(command: &Command, name: &str, parent: Option<&str>) -> Roff {
    let mut names: Vec<(String, &str)> = Vec::new();
    names.extend(parent.map(|parent| (parent.to_owned(), "1")));
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        let name = below.get_display_name().unwrap_or_else(|| below.get_name());
        names.push((name.to_owned(), "1"));
    }
    let related: &[&str] = match name {
        "ferroce-serve" => &["ferroce-map", "ferroce-ctl", "ferroce-daemon"],
        "ferroce-map" => &["ferroce-serve", "ferroce-ctl", "ferroce-daemon", "nbd-client"],
        "ferroce-daemon" => &["ferroce-serve", "ferroce-map", "ferroce-ctl", "systemd"],
        "ferroce-run" => &["ferroce-link", "ferroce-stat", "ferroce-broker", "ld.so"],
        "ferroce-link" | "ferroce-stat" => &["ferroce-run", "ferroce-broker", "rdma"],
        "ferroce-broker" => &["ferroce-run", "ferroce-stat"],
        _ => &[],
    };
    let section = |name: &str| match name {
        "nbd-client" | "ld.so" | "rdma" => "8",
        _ => "1",
    };
    names.extend(related.iter().map(|name| ((*name).to_owned(), section(name))));
    if OF_THE_FILE.contains(&name) {
        names.push(("ferroce.toml".to_owned(), "5"));
    }
    names.push(("ferroce".to_owned(), "7"));
    references(&names)
}

/// The section SEE ALSO.
fn references(names: &[(String, &str)]) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["SEE ALSO"]);
    let last = names.len().saturating_sub(1);
    let words = names
        .iter()
        .enumerate()
        .flat_map(|(i, (name, section))| -> [Inline; 2] {
            let comma = if i < last { ", " } else { "" };
            [bold(name.as_str()), roman(format!("({section}){comma}"))]
        });
    roff.text(words.collect::<Vec<_>>());
    roff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_after_the_options_becomes_sections() {
        let text =
            "Examples:\n  ferroce run -- x\n\nA note.\n\nExit status: its own\n\nEnvironment, also for y:\n  A  b";
        let roff = sections(text).to_roff();
        let titles: Vec<_> = roff.lines().filter(|line| line.starts_with(".SH")).collect();
        assert_eq!(titles, [".SH EXAMPLES", ".SH \"EXIT STATUS\"", ".SH ENVIRONMENT"]);
        assert!(roff.contains(".nf\nferroce run \\-\\- x\n.fi"), "{roff}");
        assert!(roff.contains("STATUS\"\nits own"), "{roff}");
        assert!(sections("Some words.").to_roff().starts_with(".SH NOTES"));
    }
}
