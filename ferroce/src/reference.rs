//! Reference pages of the book that follow from the command line: docs/reference/commands.md and configuration.md.
//!
//! `UPDATE_PAGES=1 cargo test -p ferroce --lib reference` writes them.

use std::{fmt::Write as _, fs, path::Path};

use clap::{ArgAction, Command, CommandFactory};

use crate::{Cli, daemon::keys};

const COLUMNS: usize = 100;

/// Sections of a command and of its subcommands.
fn sections(command: &mut Command, name: &str, text: &mut String) {
    let help = command.render_long_help().to_string();
    let lines: Vec<_> = help.lines().map(str::trim_end).collect();
    let _ = write!(text, "\n## {name}\n\n```text\n{}\n```\n", lines.join("\n").trim());
    for subcommand in command
        .get_subcommands_mut()
        .filter(|c| !c.is_hide_set() && c.get_name() != "help")
    {
        let name = format!("{name} {}", subcommand.get_name());
        sections(subcommand, &name, text);
    }
}

fn commands() -> String {
    let mut text = "# Commands\n\nThis page is generated from the command line's definition. Manual pages have the same text; `cargo xtask man` writes \
                    them.\n"
        .to_owned();
    let mut command = Cli::command().term_width(COLUMNS).version("");
    command.build();
    sections(&mut command, "ferroce", &mut text);
    text
}

fn configuration() -> String {
    let mut text = "# Configuration\n\nThis page is generated from the command line's definition. `ferroce daemon --config FILE` reads a TOML file with a table for \
                    each server, `[serve.NAME]`, and for each mapping, `[map.NAME]`. Their keys are the options of `ferroce serve` and \
                    `ferroce map`, which [commands](commands.md) explains. The table `[control]` limits tasks that members of the control socket's \
                    group start ([the daemon](../block/daemon.md#the-daemon)).\n"
        .to_owned();
    for (title, keys) in keys().into_iter().filter(|(title, _)| title.ends_with(".NAME]")) {
        let _ = write!(text, "\n## {title}\n\n| key | value | |\n| --- | --- | --- |\n");
        for arg in keys {
            let names = arg.get_value_names().unwrap_or_default();
            let names = names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(" ");
            let value = match arg.get_action() {
                ArgAction::SetTrue => "true or false".to_owned(),
                ArgAction::Append => format!("[\"{names}\", …]"),
                _ if names == "on|off" => "true or false".to_owned(),
                _ => format!("\"{names}\""),
            };
            let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
            let cell = |text: &str| text.replace('|', "\\|").replace('\n', " ");
            let long = arg.get_long().unwrap_or_default();
            let _ = writeln!(text, "| `{long}` | {} | {} |", cell(&format!("`{value}`")), cell(&help));
        }
    }
    text
}

/// Compares a page with its file, or writes it.
fn current(page: &str, text: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../docs/reference")
        .join(page);
    if std::env::var_os("UPDATE_PAGES").is_some() {
        fs::write(&file, text).unwrap();
    }
    let found = fs::read_to_string(&file).unwrap_or_default();
    let differs = text.lines().zip(found.lines()).position(|(a, b)| a != b);
    assert!(
        found == text,
        "{page} differs from the command line, first in line {:?}: `UPDATE_PAGES=1 cargo test -p ferroce --lib reference` writes it",
        differs.map(|n| n + 1)
    );
}

#[test]
fn reference_pages_follow_the_command_line() {
    current("commands.md", &commands());
    current("configuration.md", &configuration());
}

#[test]
fn the_page_of_the_environment_has_every_variable() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = fs::read_to_string(root.join("docs/reference/environment.md")).unwrap();
    let mut folders = ["ferroce/src", "roce", "rnbd", "verbs-shim/src"]
        .map(|folder| root.join(folder))
        .to_vec();
    let mut found = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap_or_default();
            if path.is_dir() && name != "tests" {
                folders.push(path);
                continue;
            }
            if path.extension().is_none_or(|e| e != "rs") {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            for rest in text.split("\"FERROCE_").skip(1) {
                let end = rest.find(|c: char| !c.is_ascii_uppercase() && c != '_').unwrap_or(0);
                let variable = format!("FERROCE_{}", &rest[..end]);
                if end > 0 && rest[end..].starts_with('"') && !variable.starts_with("FERROCE_TEST_") {
                    assert!(
                        page.contains(&format!("| `{variable}` |")),
                        "environment.md lacks {variable} of {}",
                        path.display()
                    );
                    found += 1;
                }
            }
        }
    }
    assert!(found > 10, "{found} variables found");
}
