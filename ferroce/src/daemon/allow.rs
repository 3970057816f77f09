//! Limits of tasks that members of the control socket's group start. They are other users than the daemon's: of its rights they get only
//! those that the `[control]` table of the configuration file allows.

use std::path::{Component, Path, PathBuf};

use rnbd::Errno;
use rnbd_disk::FolderSpec;
use rnbd_host::control::Refused;

use super::task::{Job, Kind, Task};
use crate::{map::MapArgs, output::Failure, serve::ServeArgs};

/// Options that touch no file, and open nothing but RTRS sessions.
const FREE: &str = "access-mode addr allow always-invalidate connect-any connect-timeout connections device direct fragments heartbeat \
    max-buffers max-chunk-size max-connections max-devices max-devices-per-session max-paths max-reconnects max-sessions \
    max-sessions-per-client max-sockets mtu nid no-gro no-gso no-selftest on-loss path peer-credits policy queue-depth rdma reconnect-delay ro session \
    socket-buffer spin stats-interval json threads tls tls-verify-peer";
/// Options whose values are checked.
const CHECKED: [&str; 7] = [
    EXPORT,
    "export-dir",
    NBD,
    NBD_LISTEN,
    PCAP,
    TLS_CERTIFICATES,
    VHOST_USER,
];
pub(super) const EXPORT: &str = "export";
pub(super) const NBD_LISTEN: &str = "nbd-listen";
pub(super) const PCAP: &str = "pcap";
pub(super) const TLS_CERTIFICATES: &str = "tls-certificates";
const NBD: &str = "nbd";
const VHOST_USER: &str = "vhost-user";

/// Key of the table `[control]`: a limit of what members start.
#[derive(Clone, Copy)]
pub(crate) enum Limit {
    Export,
    Pcap,
    TlsCertificates,
    NbdListen,
}

/// Keys of the table `[control]`, as the file's reader, its manual page and the reference page have them: name, form of the value, help.
pub(crate) const KEYS: [(Limit, &str, &str, &str); 4] = [
    (
        Limit::Export,
        EXPORT,
        "[\"PATH[,ro]\", …]",
        "Exports are one of these files, folders and devices, or below it; with `,ro` for reading only",
    ),
    (
        Limit::Pcap,
        PCAP,
        "[\"DIR\", …]",
        "Captures are files in one of these folders. They overwrite what is there",
    ),
    (
        Limit::TlsCertificates,
        TLS_CERTIFICATES,
        "[\"DIR\", …]",
        "These folders of certificates may be used",
    ),
    (
        Limit::NbdListen,
        NBD_LISTEN,
        "true or false",
        "NBD clients may connect by TCP [default: false]",
    ),
];

/// The table `[control]`; by default it allows nothing.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Allowed {
    /// Files and folders: an export must be one of them, or lie below one.
    pub(super) export: Vec<FolderSpec>,
    /// Folders of captures.
    pub(super) pcap: Vec<PathBuf>,
    /// Folders of certificates.
    pub(super) tls_certificates: Vec<PathBuf>,
    /// NBD clients may connect by TCP.
    pub(super) nbd_listen: bool,
}

/// Refuses an option, and names the key that would allow it.
fn denied(option: &str, what: &str, key: &str) -> Refused {
    let text = format!(
        "--{option}: {what}. Members of the control socket's group start only what the daemon's configuration file allows: add \
         `{key}` to its table [control] and reload, or start it as root or as the daemon's user"
    );
    Refused::new(Errno::EACCES, text)
}

fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.display())
}

impl Allowed {
    /// Returns the task with these arguments, if a member may start it. The sockets of its clients are in `sockets`.
    pub(super) fn task(&self, kind: &Kind, mut words: Vec<String>, sockets: &Path) -> Result<Task, Refused> {
        self.check_options(kind, &words)?;
        let task = Task { words: words.clone() };
        let invalid = |e: Failure| Refused::new(Errno::EINVAL, e.text().unwrap_or_default());
        match task.job(kind).map_err(invalid)? {
            Job::Serve(args) => {
                self.check_server(&args)?;
                // Checked again when files are opened: links may change until then.
                words.extend(self.export.iter().map(root_option));
            }
            Job::Map(args) => {
                let files = args.socket_files().map_err(invalid)?;
                self.check_mapping(&args, &files, sockets)?;
            }
            // For programs of the daemon's user, whom it gives nothing that they could not have.
            Job::Rds(_) => {}
            // Members can run such a node themselves. Files of `--source` and memory of `--sink` are not free.
            Job::Lnet(_) => {}
        }
        Ok(Task { words })
    }

    fn check_options(&self, kind: &Kind, words: &[String]) -> Result<(), Refused> {
        let given = kind.given(words);
        let given = given.map_err(|e| Refused::new(Errno::EINVAL, e.text().unwrap_or_default()))?;
        let is_known = |option: &&String| FREE.split(' ').chain(CHECKED).any(|known| known == *option);
        match given.iter().find(|option| !is_known(option)) {
            None => Ok(()),
            Some(option) => {
                let text = format!("--{option} is not for tasks that members of the control socket's group start");
                Err(Refused::new(Errno::EACCES, text))
            }
        }
    }

    fn check_server(&self, args: &ServeArgs) -> Result<(), Refused> {
        let exports = args.named_paths();
        let exports = exports.map(|path| (EXPORT, path));
        for (option, path) in exports.chain(args.folder_path().map(|path| ("export-dir", path))) {
            if !self.export.iter().any(|root| is_below(path, &root.path)) {
                let what = format!("{} is not below what may be exported", path.display());
                let folder = path.parent().unwrap_or(path);
                return Err(denied(option, &what, &format!("{EXPORT} = [{}]", quoted(folder))));
            }
        }
        self.check_capture(args.capture())
    }

    fn check_mapping(&self, args: &MapArgs, files: &[PathBuf], sockets: &Path) -> Result<(), Refused> {
        if let Some(file) = files.iter().find(|file| !is_child(file, sockets)) {
            let text = format!(
                "socket {}: members of the control socket's group have sockets in {} only (--nbd-dir of the daemon)",
                file.display(),
                sockets.display()
            );
            return Err(Refused::new(Errno::EACCES, text));
        }
        let nbd = args.nbd();
        if nbd.has_tcp() && !self.nbd_listen {
            let what = "NBD clients of the network could use the devices";
            return Err(denied(NBD_LISTEN, what, &format!("{NBD_LISTEN} = true")));
        }
        if let Some(folder) = nbd.certificates()
            && !self.tls_certificates.iter().any(|allowed| allowed == folder)
        {
            let what = format!("{} is no folder of certificates that may be used", folder.display());
            let key = format!("{TLS_CERTIFICATES} = [{}]", quoted(folder));
            return Err(denied(TLS_CERTIFICATES, &what, &key));
        }
        self.check_capture(args.capture())
    }

    fn check_capture(&self, file: Option<&Path>) -> Result<(), Refused> {
        let Some(file) = file else { return Ok(()) };
        if self.pcap.iter().any(|folder| is_child(file, folder)) {
            return Ok(());
        }
        let what = format!("{} is in no folder of captures", file.display());
        let folder = file.parent().unwrap_or(file);
        Err(denied(PCAP, &what, &format!("{PCAP} = [{}]", quoted(folder))))
    }
}

/// Returns the option that keeps exports below a root.
fn root_option(root: &FolderSpec) -> String {
    let path = root.path.display().to_string().replace(',', ",,");
    let access = if root.read_only { ",ro" } else { "" };
    format!("--export-within={path}{access}")
}

fn is_plain(path: &Path) -> bool {
    path.is_absolute() && !path.components().any(|part| part == Component::ParentDir)
}

fn is_below(path: &Path, root: &Path) -> bool {
    is_plain(path) && path.starts_with(root)
}

/// Whether a path is in the folder itself, where only its owner can create links.
fn is_child(path: &Path, folder: &Path) -> bool {
    is_plain(path) && path.file_name().is_some() && path.parent() == Some(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOCKETS: &str = "/run/ferroce-daemon";

    fn allowed() -> Allowed {
        Allowed {
            export: ["/images", "/dev/sdb,ro"].map(|root| root.parse().unwrap()).into(),
            pcap: vec!["/captures".into()],
            tls_certificates: vec!["/pki".into()],
            nbd_listen: true,
        }
    }

    fn try_task(allowed: &Allowed, kind: &Kind, words: &[&str]) -> Result<Task, Refused> {
        let usual: &[&str] = match kind {
            Kind::Rds => &[],
            Kind::Lnet => &["--nid=192.0.2.1"],
            Kind::Serve => &["--addr=192.0.2.1"],
            Kind::Map => &["--session=s", "--path=192.0.2.7", "--device=d"],
        };
        let words = usual.iter().chain(words).map(|word| (*word).to_owned()).collect();
        allowed.task(kind, words, Path::new(SOCKETS))
    }

    /// Nothing of this is allowed by itself.
    const NEEDING: [(Kind, &[&str], &str); 9] = [
        (Kind::Serve, &["--export=a=/images/a"], "`export = [\"/images\"]`"),
        (Kind::Serve, &["--export", "a=/dev/sdb"], "`export = [\"/dev\"]`"),
        (
            Kind::Serve,
            &["--export-dir=/images/%SESSNAME%"],
            "`export = [\"/images\"]`",
        ),
        (
            Kind::Serve,
            &["--export-dir=/images", "--pcap=/captures/x"],
            "`export = [\"/\"]`",
        ),
        (
            Kind::Map,
            &["--nbd=/run/ferroce-daemon/s", "--pcap=/captures/x"],
            "`pcap = [\"/captures\"]`",
        ),
        (Kind::Map, &["--nbd-listen=192.0.2.1"], "`nbd-listen = true`"),
        (
            Kind::Map,
            &["--nbd=/run/ferroce-daemon/s", "--tls-certificates=/pki"],
            "`tls-certificates = [\"/pki\"]`",
        ),
        (
            Kind::Map,
            &["--nbd=/run/ferroce-daemon/s", "--pcap", "/captures/x"],
            "[control]",
        ),
        (Kind::Map, &["--nbd-listen", "192.0.2.1:7"], "[control]"),
    ];

    #[test]
    fn what_needs_the_file_is_refused_without_and_the_remedy_is_named() {
        for (kind, words, remedy) in NEEDING {
            let refused = try_task(&Allowed::default(), &kind, words).unwrap_err();
            assert_eq!(refused.errno, Errno::EACCES, "{words:?}");
            assert!(refused.text.contains(remedy), "{words:?}: {}", refused.text);
            try_task(&allowed(), &kind, words).unwrap();
        }
        for words in [
            &["--nbd=/run/ferroce-daemon/s"][..],
            &["--vhost-user=d=/run/ferroce-daemon/v"],
        ] {
            try_task(&Allowed::default(), &Kind::Map, words).unwrap();
        }
    }

    #[test]
    fn nothing_leads_out_of_what_is_allowed() {
        let serve = [
            "--export=a=/etc/shadow",
            "--export=a=/imagesx",
            "--export=a=/images/../etc/shadow",
            "--export=a=images/a",
            "--export-dir=/",
            "--export-dir=/images/..",
        ];
        for word in serve {
            let refused = try_task(&allowed(), &Kind::Serve, &[word]).unwrap_err();
            assert_eq!(refused.errno, Errno::EACCES, "{word}");
        }
        let map = [
            "--pcap=/etc/shadow",
            "--pcap=/captures",
            "--pcap=/captures/x/y",
            "--pcap=/captures/../etc/shadow",
            "--tls-certificates=/pki/x",
            "--nbd=/etc/x",
            "--nbd=/run/ferroce-daemon/x/y",
            "--nbd=/run/ferroce-daemon/../x",
            "--vhost-user=/etc/x",
            "--vhost-user=d=/etc/x",
            "--vhost-user=d=/etc/x=/run/ferroce-daemon/x",
        ];
        for word in map {
            let more: &[&str] = if word.starts_with("--nbd=") {
                &[]
            } else {
                &["--nbd=/run/ferroce-daemon/s"]
            };
            let words = [&[word], more].concat();
            let refused = try_task(&allowed(), &Kind::Map, &words).unwrap_err();
            assert_eq!(refused.errno, Errno::EACCES, "{word}");
        }
    }

    #[test]
    fn an_lnet_node_has_no_files_and_memory_of_the_daemon() {
        let task = |word| try_task(&allowed(), &Kind::Lnet, &[word]);
        task("--no-selftest").unwrap();
        for word in ["--source=60:/etc/shadow", "--sink=60:1G"] {
            assert_eq!(task(word).unwrap_err().errno, Errno::EACCES, "{word}");
        }
    }

    #[test]
    fn exports_stay_below_the_roots_when_they_are_opened() {
        let task = try_task(
            &allowed(),
            &Kind::Serve,
            &["--export=a=/images/a", "--export=b=/dev/sdb"],
        )
        .unwrap();
        assert!(
            task.words
                .ends_with(&["--export-within=/images".into(), "--export-within=/dev/sdb,ro".into()])
        );
        let Ok(Job::Serve(args)) = task.job(&Kind::Serve) else {
            panic!("no server")
        };
        let exports = args.exports().unwrap();
        let found: Vec<_> = exports
            .iter()
            .map(|e| (e.within.clone().unwrap(), e.read_only))
            .collect();
        assert_eq!(found, [("/images".into(), false), ("/dev/sdb".into(), true)]);
        let own = try_task(&allowed(), &Kind::Serve, &["--export=a=/images/a", "--export-within=/"]);
        assert_eq!(own.unwrap_err().errno, Errno::EACCES);
    }

    #[test]
    fn each_option_of_the_commands_has_been_thought_of() {
        const OF_THE_DAEMON: &[&str] = &[
            "announce",
            // With root's rights, in the kernel.
            "attach",
            "control",
            "control-group",
            "daemon",
            "detach",
            // Files of the daemon's user.
            "dir",
            // Raw and packet sockets go past the firewall, by the daemon's rights.
            "datapath",
            "export-within",
            "fault",
            "help",
            "linger",
            "metrics",
            // Memory of the daemon, and files that are not theirs.
            "pcap-on",
            "pcap-ring",
            "sink",
            "source",
            "stay",
            "sysfs",
            "sysfs-strict",
            "tls-psk",
        ];
        for kind in Kind::ALL {
            for arg in kind.command().get_arguments() {
                let long = arg.get_long().expect("a long option");
                let known: Vec<_> = FREE
                    .split(' ')
                    .chain(CHECKED)
                    .chain(OF_THE_DAEMON.iter().copied())
                    .collect();
                assert!(known.contains(&long), "--{long}: may members start a task with it?");
            }
        }
    }
}
