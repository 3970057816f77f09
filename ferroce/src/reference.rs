//! Reference pages of the book that follow from the code: docs/reference/commands.md and configuration.md. Others are checked against it.
//!
//! `UPDATE_PAGES=1 cargo test -p ferroce --lib reference` writes them.

use std::{fmt::Write as _, fs, path::Path};

use clap::{Command, CommandFactory};

use crate::{Cli, daemon::tables};

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
    let mut text = "# Configuration\n\nThis page is generated from the command line's definition, as is ferroce.toml(5). `ferroce daemon --config FILE` reads a \
                    TOML file with a table for each server, `[serve.NAME]`, for each mapping, `[map.NAME]`, for each RDS node, `[rds.NAME]`, and for each LNet \
                    node, `[lnet.NAME]`. Their keys are options of [`ferroce serve`](commands.md#ferroce-serve), [`ferroce map`](commands.md#ferroce-map), \
                    [`ferroce rds node`](commands.md#ferroce-rds-node) and [`ferroce lnet serve`](commands.md#ferroce-lnet-serve). `[daemon]` has options of \
                    [`ferroce daemon`](commands.md#ferroce-daemon) itself, and `[control]` limits tasks that members of the control socket's \
                    group start ([the daemon](../block/daemon.md#who-may-control-it)).\n\nWhere an array is shown, a single value may stand without \
                    brackets. Numbers need no quotes. The session of `[map.NAME]` is called NAME unless there is the key `session`.\n"
        .to_owned();
    for (title, keys) in tables() {
        let _ = write!(text, "\n## {title}\n\n| key | value | |\n| --- | --- | --- |\n");
        for key in keys {
            // Paragraphs become sentences of one cell.
            let cell = |text: &str| {
                let paragraphs = text.split("\n\n").map(|p| p.trim().trim_end_matches('.'));
                let text = paragraphs.collect::<Vec<_>>().join(". ").replace('|', "\\|");
                text.split_whitespace().collect::<Vec<_>>().join(" ")
            };
            let value = cell(&format!("`{}`", key.value));
            let _ = writeln!(text, "| `{}` | {value} | {} |", key.name, cell(&key.help));
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
fn the_page_of_json_has_every_event() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/json.md");
    let page = fs::read_to_string(page).unwrap();
    for name in ["serve", "map"] {
        let command = Cli::command();
        let help = command
            .find_subcommand(name)
            .unwrap()
            .get_after_help()
            .unwrap()
            .to_string();
        let (_, events) = help.split_once("With --json").unwrap();
        let named = events.split('`').skip(1).step_by(2);
        let missing: Vec<_> = named.filter(|word| !page.contains(&format!("`{word}`"))).collect();
        assert!(missing.is_empty(), "json.md lacks {missing:?} of `ferroce {name}`");
    }
}

#[test]
fn limits_of_a_server_are_its_defaults() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/limits.md");
    let page = fs::read_to_string(page).unwrap();
    let (_, keys) = tables().swap_remove(0);
    let mut found = 0;
    for row in page.lines().filter(|line| line.starts_with('|')) {
        let cells: Vec<_> = row.split('|').collect();
        for option in row.split("`--").skip(1).filter_map(|rest| rest.split('`').next()) {
            let Some(key) = keys.iter().find(|key| key.name == option) else {
                continue;
            };
            let default = key.help.split("[default: ").nth(1).unwrap_or_default();
            let number: String = default.chars().take_while(char::is_ascii_digit).collect();
            assert!(
                !number.is_empty() && cells[2].contains(&number),
                "--{option} is {default} {row}"
            );
            found += 1;
        }
    }
    assert_eq!(found, 8);
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
