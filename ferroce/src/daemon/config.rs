//! The daemon's configuration file: servers, mappings and nodes of RDS and LNet, with the options of their commands as keys.

use std::{
    collections::BTreeMap,
    fmt,
    ops::Range,
    path::{Path, PathBuf},
};

use clap::{Arg, ArgAction, Command, error::ContextKind};
use rnbd_disk::FolderSpec;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    allow::{self, Allowed, Limit},
    args::DaemonArgs,
    task::{Kind, Task, TaskName, described},
};
use crate::serve;

/// Options of a task's command that are no keys: of processes of their own, and then those that the daemon sets for all tasks.
const OF_DAEMON: [&str; 13] = [
    "help",
    "daemon",
    "detach",
    "announce",
    "stay",
    "linger",
    "json",
    "stats-interval",
    "control",
    "control-group",
    "metrics",
    "sysfs",
    "sysfs-strict",
];
/// How many of them the daemon does not have either.
const NO_KEYS: usize = 6;
/// Options of the daemon that choose and check the file.
const OF_FILE: [&str; 3] = ["help", "config", "check"];

/// Name of the table that limits the tasks of the control socket's group.
const CONTROL: &str = "control";
/// Name of the table with the daemon's own options.
const DAEMON: &str = "daemon";
/// Form of the value of a flag.
const BOOLEAN: &str = "true or false";
/// Similarity from which a name is suggested for another (0 to 1).
const SIMILAR: f64 = 0.8;

/// Error in a file, with its line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ConfigError {
    file: PathBuf,
    line: usize,
    text: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.text)
    }
}

/// Content of a file.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Config {
    pub(crate) tasks: BTreeMap<TaskName, Task>,
    /// Options of the daemon, as arguments of its command.
    pub(crate) daemon: Vec<String>,
    /// Tasks that members of the control socket's group may start.
    pub(crate) allowed: Allowed,
}

/// A file while it is read.
struct Source<'a> {
    file: &'a Path,
    text: &'a str,
}

/// A key of a table and where it is.
struct Key {
    name: String,
    at: usize,
}

/// A table whose keys are options of a command.
struct Section<'a> {
    /// Name in messages.
    title: String,
    at: usize,
    command: &'a Command,
    /// Options that are not keys.
    without: &'a [&'static str],
    /// Command that documents all keys.
    help: String,
}

/// Finds the name that was probably meant.
fn similar<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let likely = known
        .into_iter()
        .map(|known| (strsim::jaro_winkler(name, known), known));
    let best = likely.max_by(|a, b| a.0.total_cmp(&b.0));
    best.filter(|(likeness, _)| *likeness >= SIMILAR)
        .map(|(_, known)| known)
}

/// Hint for an unknown name: the one that was probably meant, or a reference to the list of all.
fn hint<'a>(name: &str, known: impl IntoIterator<Item = &'a str>, all: &str) -> String {
    match similar(name, known) {
        Some(known) => format!("did you mean `{known}`?"),
        None => all.to_owned(),
    }
}

impl Source<'_> {
    fn error(&self, at: usize, text: impl Into<String>) -> ConfigError {
        let before = self.text.get(..at).unwrap_or(self.text);
        ConfigError {
            file: self.file.to_owned(),
            line: before.bytes().filter(|b| *b == b'\n').count() + 1,
            text: text.into(),
        }
    }

    fn config(&self, root: &DeTable<'_>) -> Result<Config, ConfigError> {
        let mut config = Config::default();
        for (name, value) in root {
            match &**name.as_ref() {
                CONTROL => {
                    config.allowed = self.allowed(value)?;
                    continue;
                }
                DAEMON => {
                    config.daemon = self.daemon(name.span().start, value)?;
                    continue;
                }
                _ => {}
            }
            let Some(kind) = Kind::named(name.as_ref()) else {
                let kinds = Kind::ALL.iter().map(Kind::name);
                let all =
                    format!("there are [serve.NAME], [map.NAME], [rds.NAME], [lnet.NAME], [{DAEMON}] and [{CONTROL}]");
                let hint = hint(name.as_ref(), kinds.chain([DAEMON, CONTROL]), &all);
                let text = format!("unknown table `{}`: {hint}", name.as_ref());
                return Err(self.error(name.span().start, text));
            };
            let title = format!("[{}.NAME]", kind.name());
            let tables = self.table(&title, value)?;
            for (name, value) in tables {
                let at = name.span().start;
                let task = TaskName {
                    kind: kind.clone(),
                    name: name.as_ref().to_string(),
                };
                let table = self.table(&title, value)?;
                let words = self.task(&task, at, table)?;
                config.tasks.insert(task, Task { words });
            }
        }
        Ok(config)
    }

    /// The table `[daemon]`, as arguments of its command.
    fn daemon(&self, at: usize, value: &Spanned<DeValue<'_>>) -> Result<Vec<String>, ConfigError> {
        let section = Section {
            title: format!("[{DAEMON}]"),
            at,
            command: &DaemonArgs::command(),
            without: &OF_FILE,
            help: "ferroce daemon --help".to_owned(),
        };
        let (words, keys) = self.options(&section, self.table(&format!("[{DAEMON}]"), value)?)?;
        let parsed = section.command.clone().try_get_matches_from(&words).map(drop);
        self.check(&section, &keys, parsed)?;
        Ok(words)
    }

    /// The table `[control]`.
    fn allowed(&self, value: &Spanned<DeValue<'_>>) -> Result<Allowed, ConfigError> {
        let table = self.table(&format!("[{CONTROL}]"), value)?;
        let keys = allow::KEYS.map(|(_, name, ..)| name);
        let mut allowed = Allowed::default();
        for (name, value) in table {
            let given = &**name.as_ref();
            let Some((key, ..)) = allow::KEYS.iter().find(|(_, name, ..)| *name == given) else {
                let hint = hint(given, keys, &format!("there are {}", keys.join(", ")));
                let text = format!("unknown key `{given}` of [{CONTROL}]: {hint}");
                return Err(self.error(name.span().start, text));
            };
            match key {
                Limit::Export => allowed.export = self.each(value, root)?,
                Limit::Pcap => allowed.pcap = self.each(value, folder)?,
                Limit::TlsCertificates => allowed.tls_certificates = self.each(value, folder)?,
                Limit::NbdListen => match value.as_ref() {
                    DeValue::Boolean(on) => allowed.nbd_listen = *on,
                    _ => return Err(self.error(value.span().start, format!("`{given}` is {BOOLEAN}"))),
                },
            }
        }
        Ok(allowed)
    }

    /// One or several strings.
    fn each<T>(
        &self,
        value: &Spanned<DeValue<'_>>,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Vec<T>, ConfigError> {
        let one = |value: &Spanned<DeValue<'_>>| match value.as_ref() {
            DeValue::String(text) => read(text).map_err(|e| self.error(value.span().start, e)),
            _ => Err(self.error(value.span().start, "a path is wanted")),
        };
        match value.as_ref() {
            DeValue::Array(values) => values.iter().map(one).collect(),
            _ => one(value).map(|one| vec![one]),
        }
    }

    fn table<'t, 'i>(&self, title: &str, value: &'t Spanned<DeValue<'i>>) -> Result<&'t DeTable<'i>, ConfigError> {
        match value.as_ref() {
            DeValue::Table(table) => Ok(table),
            _ => Err(self.error(value.span().start, format!("a table is wanted: {title}"))),
        }
    }

    /// The arguments that a task's table stands for.
    fn task(&self, task: &TaskName, at: usize, table: &DeTable<'_>) -> Result<Vec<String>, ConfigError> {
        let section = Section {
            title: task.to_string(),
            at,
            command: &task.kind.command(),
            without: &OF_DAEMON,
            help: format!("ferroce {} --help", task.kind.subcommands().join(" ")),
        };
        let (mut words, keys) = self.options(&section, table)?;
        // A session is called as its task is, unless the file says otherwise.
        if task.kind == Kind::Map && !keys.iter().any(|key| key.name == "session") {
            words.push(format!("--session={}", task.name));
        }
        let parsed = task.kind.parse(section.command.clone(), &words).map(drop);
        self.check(&section, &keys, parsed)?;
        Ok(words)
    }

    /// The arguments that a table stands for, and its keys.
    fn options(&self, section: &Section<'_>, table: &DeTable<'_>) -> Result<(Vec<String>, Vec<Key>), ConfigError> {
        let (mut words, mut keys) = (Vec::new(), Vec::new());
        for (name, value) in table {
            let key = Key {
                name: name.as_ref().to_string(),
                at: name.span().start,
            };
            self.option(section, &key, value, &mut words)?;
            keys.push(key);
        }
        // The file's order is that of its keys, and some of these may have been called otherwise.
        words.sort_by(|a: &String, b: &String| a.split('=').next().cmp(&b.split('=').next()));
        Ok((words, keys))
    }

    fn option(
        &self,
        section: &Section<'_>,
        key: &Key,
        value: &Spanned<DeValue<'_>>,
        words: &mut Vec<String>,
    ) -> Result<(), ConfigError> {
        let known = section.command.get_arguments().find(|arg| is_called(arg, &key.name));
        // By its present name, so that a file with former names stands for the same task.
        let known = known.and_then(|arg| Some((arg, arg.get_long()?)));
        let Some((arg, name)) = known.filter(|(_, name)| !section.without.contains(name)) else {
            return Err(self.error(key.at, section.unknown(&key.name)));
        };
        let flag = matches!(arg.get_action(), ArgAction::SetTrue);
        let several = matches!(arg.get_action(), ArgAction::Append);
        match value.as_ref() {
            DeValue::Boolean(true) if flag => words.push(format!("--{name}")),
            DeValue::Boolean(false) if flag => {}
            _ if flag => return Err(self.error(value.span().start, format!("`{}` is true or false", key.name))),
            DeValue::Array(values) if several => {
                for value in values {
                    words.push(format!("--{name}={}", self.scalar(key, value)?));
                }
            }
            _ => words.push(format!("--{name}={}", self.scalar(key, value)?)),
        }
        Ok(())
    }

    /// A value, as it is written on a command line.
    fn scalar(&self, key: &Key, value: &Spanned<DeValue<'_>>) -> Result<String, ConfigError> {
        match value.as_ref() {
            DeValue::String(text) => Ok(text.to_string()),
            DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().replace('_', "")),
            DeValue::Float(number) => Ok(number.as_str().replace('_', "")),
            DeValue::Boolean(on) => Ok(if *on { "on" } else { "off" }.to_owned()),
            DeValue::Array(_) => Err(self.error(value.span().start, format!("`{}` has one value", key.name))),
            _ => Err(self.error(value.span().start, format!("`{}` can't have such a value", key.name))),
        }
    }

    /// Places the error of a table's arguments, if there is one, where the key is that it is about.
    fn check(&self, section: &Section<'_>, keys: &[Key], parsed: Result<(), clap::Error>) -> Result<(), ConfigError> {
        let Err(e) = parsed else { return Ok(()) };
        let about = e
            .get(ContextKind::InvalidArg)
            .map(ToString::to_string)
            .unwrap_or_default();
        let key = keys.iter().find(|key| {
            let known = section.command.get_arguments().find(|arg| is_called(arg, &key.name));
            let name = known.and_then(Arg::get_long).unwrap_or(&key.name);
            let rest = about.strip_prefix("--").and_then(|about| about.strip_prefix(name));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
        });
        let said = described(&e).replace("--", "");
        Err(self.error(
            key.map_or(section.at, |key| key.at),
            format!("{}: {said}", section.title),
        ))
    }
}

impl Section<'_> {
    /// Error text for an unknown key.
    fn unknown(&self, key: &str) -> String {
        if OF_DAEMON[NO_KEYS..].contains(&key) && self.title != format!("[{DAEMON}]") {
            return format!(
                "unknown key `{key}` of {}: it is an option of the daemon, for [{DAEMON}]",
                self.title
            );
        }
        if key == "threads" && self.command.get_name() == "map" {
            return format!(
                "unknown key `{key}` of {}: a mapping has one thread; spread its devices over several tables [map.NAME], \
                 each of which has a thread of its own",
                self.title
            );
        }
        let keys = self
            .command
            .get_arguments()
            .filter(|arg| !arg.is_hide_set())
            .filter_map(Arg::get_long);
        let keys = keys.filter(|name| !self.without.contains(name));
        let hint = hint(key, keys, &format!("`{}` has them all", self.help));
        format!("unknown key `{key}` of {}: {hint}", self.title)
    }
}

/// Whether an option has this name, or had it formerly.
fn is_called(arg: &Arg, name: &str) -> bool {
    let former = arg.get_all_aliases().unwrap_or_default();
    arg.get_long() == Some(name) || former.contains(&name)
}

/// A folder of the table `[control]`.
fn folder(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.is_absolute() {
        true => Ok(path),
        false => Err(format!("{text:?} is no absolute path")),
    }
}

/// Allowed exports, in the table `[control]`.
fn root(text: &str) -> Result<FolderSpec, String> {
    let root = serve::root(text)?;
    folder(&root.path.to_string_lossy()).map(|_| root)
}

/// A key for people: its name, the form of its value, and its help.
pub(crate) struct Documented {
    pub(crate) name: String,
    pub(crate) value: String,
    pub(crate) help: String,
}

/// All tables of the file by their titles, and their keys.
pub(crate) fn tables() -> Vec<(String, Vec<Documented>)> {
    let keys = |command: &Command, without: &[&str]| {
        let is_key = |arg: &&Arg| arg.get_long().is_some_and(|name| !without.contains(&name)) && !arg.is_hide_set();
        command
            .get_arguments()
            .filter(is_key)
            .map(documented)
            .collect::<Vec<_>>()
    };
    let tasks = Kind::ALL.iter();
    let tasks = tasks.map(|kind| (format!("[{}.NAME]", kind.name()), keys(&kind.command(), &OF_DAEMON)));
    let daemon = keys(&DaemonArgs::command(), &OF_FILE);
    let control = allow::KEYS.map(|(_, name, value, help)| Documented {
        name: name.to_owned(),
        value: value.to_owned(),
        help: help.to_owned(),
    });
    tasks
        .chain([
            (format!("[{DAEMON}]"), daemon),
            (format!("[{CONTROL}]"), control.into()),
        ])
        .collect()
}

/// An option as a key of the file.
fn documented(arg: &Arg) -> Documented {
    let names = arg.get_value_names().unwrap_or_default();
    let names = names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(" ");
    let value = match arg.get_action() {
        ArgAction::SetTrue => BOOLEAN.to_owned(),
        ArgAction::Append => format!("[\"{names}\", …]"),
        _ if names == "on|off" => BOOLEAN.to_owned(),
        _ if names == "N" => "N".to_owned(),
        _ => format!("\"{names}\""),
    };
    let help = arg.get_long_help().or_else(|| arg.get_help());
    let mut help = help.map(ToString::to_string).unwrap_or_default().replace("--", "");
    let default = arg.get_default_values().first().map(|value| value.to_string_lossy());
    if let Some(default) = default.filter(|_| arg.get_action().takes_values()) {
        let default = match &*default {
            "on" if value == BOOLEAN => "true",
            "off" if value == BOOLEAN => "false",
            other => other,
        };
        help += &format!(" [default: {default}]");
    }
    Documented {
        name: arg.get_long().unwrap_or_default().to_owned(),
        value,
        help,
    }
}

impl Config {
    /// Reads what a file says.
    ///
    /// # Errors
    /// When something in it is wrong: where, and what.
    pub(crate) fn parse(file: &Path, text: &str) -> Result<Self, ConfigError> {
        let source = Source { file, text };
        let at = |span: Option<Range<usize>>| span.map_or(0, |span| span.start);
        let root = DeTable::parse(text).map_err(|e| source.error(at(e.span()), e.message()))?;
        source.config(root.get_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(Path::new("f.toml"), text).map_err(|e| e.to_string())
    }

    #[test]
    fn tasks_are_the_arguments_of_their_commands() {
        let config = parse(
            r#"
            [serve.images]
            addr = ["192.0.2.1", "198.51.100.1:1235"]
            export-dir = "/images,ro"
            always-invalidate = false
            max-chunk-size = "1M"
            queue-depth = 1_024
            direct = true

            [map.db]
            path = "192.0.2.1,192.0.2.7"
            device = ["disk", "system,ro"]
            nbd = "/run/db.sock"
            heartbeat = 0.5
            connect-any = false

            [rds.node]
            addr = "192.0.2.1"
            max-buffers = "1G"

            [lnet.fs]
            nid = "192.0.2.1@o2ib"
            sink = ["60:4M", "61"]
            "#,
        );
        let config = config.unwrap();
        let words: Vec<(String, String)> = config
            .tasks
            .iter()
            .map(|(name, task)| (name.to_string(), task.words.join(" ")))
            .collect();
        assert_eq!(words.len(), 4);
        let serve = "--addr=192.0.2.1 --addr=198.51.100.1:1235 --always-invalidate=off --direct --export-dir=/images,ro \
                     --max-chunk-size=1M --queue-depth=1024";
        assert_eq!(words[0], ("serve.images".to_owned(), serve.to_owned()));
        let map = "--device=disk --device=system,ro --heartbeat=0.5 --nbd=/run/db.sock --path=192.0.2.1,192.0.2.7 \
                   --session=db";
        assert_eq!(words[1], ("map.db".to_owned(), map.to_owned()));
        assert_eq!(
            words[2],
            ("rds.node".to_owned(), "--addr=192.0.2.1 --max-buffers=1G".to_owned())
        );
        let lnet = "--nid=192.0.2.1@o2ib --sink=60:4M --sink=61";
        assert_eq!(words[3], ("lnet.fs".to_owned(), lnet.to_owned()));
        assert!(parse("").unwrap().tasks.is_empty());
    }

    #[test]
    fn former_names_stand_for_the_same_task() {
        let [now, formerly] = ["addr", "listen"].map(|key| {
            let text = format!("[serve.a]\n{key} = '192.0.2.1'\nexport = 'a=/b'\n");
            parse(&text).unwrap()
        });
        assert_eq!(now, formerly);
    }

    #[test]
    fn what_may_be_started_is_a_table_of_its_own() {
        assert_eq!(parse("").unwrap().allowed, Allowed::default());
        let text = "[control]\nexport = ['/images', '/dev/sdb,ro']\npcap = '/captures'\nnbd-listen = true\n";
        let allowed = parse(text).unwrap().allowed;
        let roots: Vec<_> = allowed
            .export
            .iter()
            .map(|root| (&*root.path, root.read_only))
            .collect();
        assert_eq!(roots, [(Path::new("/images"), false), (Path::new("/dev/sdb"), true)]);
        assert_eq!((allowed.pcap, allowed.nbd_listen), (vec!["/captures".into()], true));
    }

    #[test]
    fn keys_are_read_as_they_are_documented() {
        let tables = tables();
        let titles: Vec<_> = tables.iter().map(|(title, _)| &**title).collect();
        assert_eq!(
            titles,
            [
                "[serve.NAME]",
                "[map.NAME]",
                "[rds.NAME]",
                "[lnet.NAME]",
                "[daemon]",
                "[control]"
            ]
        );
        let (_, keys) = tables.last().unwrap();
        let keys: String = keys
            .iter()
            .map(|key| format!("{} = {}\n", key.name, key.value))
            .collect();
        let keys = keys.replace("PATH[,ro]", "/images").replace("DIR", "/folder");
        let keys = keys.replace(", …", "").replace(BOOLEAN, "true");
        let allowed = parse(&format!("[control]\n{keys}")).unwrap().allowed;
        assert!(allowed.nbd_listen && allowed.export.len() + allowed.pcap.len() + allowed.tls_certificates.len() == 3);
    }

    #[test]
    fn the_daemon_has_options_of_its_own() {
        let text =
            "[daemon]\ncontrol = ['/a', '/b']\nmetrics = 9100\nsysfs = '/s'\nsysfs-strict = true\njson = false\n";
        let words = [
            "--control=/a",
            "--control=/b",
            "--metrics=9100",
            "--sysfs=/s",
            "--sysfs-strict",
        ];
        assert_eq!(parse(text).unwrap().daemon, words);
        assert!(parse("").unwrap().daemon.is_empty());
    }

    #[test]
    fn what_was_probably_meant_is_suggested() {
        let map = "[map.a]\npath = '192.0.2.7'\nnbd = '/s'\ndevice = 'd'\n";
        for (text, suggestion) in [
            ("[serv.a]".to_owned(), "did you mean `serve`?"),
            ("[deamon]".to_owned(), "did you mean `daemon`?"),
            ("[serve.a]\nexports = 'a=b'".to_owned(), "did you mean `export`?"),
            (format!("{map}on_loss = 'queue'"), "did you mean `on-loss`?"),
            (format!("{map}polcy = 'rr'"), "did you mean `policy`?"),
            (format!("{map}policy = 'min-latncy'"), "min-latency"),
            (format!("{map}metrics = 1"), "for [daemon]"),
            ("[daemon]\nmetric = 1".to_owned(), "did you mean `metrics`?"),
            ("[control]\nnbd_listen = true".to_owned(), "did you mean `nbd-listen`?"),
            // Nothing is like it.
            (format!("{map}colour = 1"), "`ferroce map --help` has them all"),
            (
                "[x]".to_owned(),
                "there are [serve.NAME], [map.NAME], [rds.NAME], [lnet.NAME], [daemon] and [control]",
            ),
            ("[rds.a]\nmax-socket = 1".to_owned(), "did you mean `max-sockets`?"),
            ("[rds.a]\nstay = true".to_owned(), "unknown key `stay` of rds.a"),
            ("[rds.a]\njson = true".to_owned(), "for [daemon]"),
            ("[lnet.a]\nnid = '192.0.2.1@tcp'".to_owned(), "not of o2iblnd"),
            ("[lnet.a]\nsink = 60".to_owned(), "nid <NID>"),
            ("[daemon]\nconfig = 'x'".to_owned(), "unknown key `config` of [daemon]"),
        ] {
            let e = parse(&text).expect_err(&text);
            assert!(e.contains(suggestion), "{e}");
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let map = "[map.a]\npath = '192.0.2.7'\nnbd = '/s'\n";
        for (text, line, word) in [
            ("[serve.a]\naddr = ".to_owned(), 2, ""),
            ("x = 1".to_owned(), 1, "unknown table `x`"),
            ("\nserve = 1".to_owned(), 2, "a table is wanted"),
            ("[serve]\nlisten = '192.0.2.1'".to_owned(), 2, "a table is wanted"),
            (
                "[serve.a]\naddr = '192.0.2.1'\nexports = 'a=b'".to_owned(),
                3,
                "unknown key `exports`",
            ),
            ("[serve.a]\naddr = 'not here'\nexport = 'a=b'".to_owned(), 2, "not here"),
            ("\n[serve.a]\nexport = 'a=b'".to_owned(), 2, "addr"),
            (format!("{map}device = 'd'\njson = true"), 5, "unknown key `json`"),
            (format!("{map}device = 'd'\nro = 1"), 5, "true or false"),
            (
                format!("{map}device = 'd'\nthreads = 2"),
                5,
                "several tables [map.NAME]",
            ),
            (format!("{map}device = 'd'\nconnections = [1, 2]"), 5, "one value"),
            (format!("{map}device = 'd'\nconnections = 65536"), 5, "65536"),
            (format!("{map}device = 'd'\nconnections = 0x10"), 5, "such a value"),
            (format!("{map}device = {{ name = 'd' }}"), 4, "such a value"),
            (format!("{map}device = 'd'\npolicy = 'none'"), 5, "none"),
            (map.to_owned(), 1, "device"),
            (format!("{map}device = 'd'\nnbd = '/t'"), 5, ""),
            ("daemon = 1".to_owned(), 1, "a table is wanted: [daemon]"),
            ("[daemon]\njson = 1".to_owned(), 2, "true or false"),
            ("\n[daemon]\nmetrics = 'here'".to_owned(), 3, "here"),
            ("[daemon]\nsysfs-strict = true".to_owned(), 1, "sysfs"),
            ("control = 1".to_owned(), 1, "[control]"),
            ("[control]\nexports = '/a'".to_owned(), 2, "unknown key `exports`"),
            ("[control]\nexport = ['/a', 'b']".to_owned(), 2, "no absolute path"),
            ("[control]\nexport = '/a,migrate'".to_owned(), 2, "migrate"),
            ("[control]\npcap = true".to_owned(), 2, "a path"),
            ("[control]\nnbd-listen = 'x'".to_owned(), 2, "true or false"),
        ] {
            let e = parse(&text).expect_err(&text);
            assert!(e.starts_with(&format!("f.toml:{line}: ")), "{e}\n{text}");
            assert!(e.contains(word), "{e}");
        }
    }
}
