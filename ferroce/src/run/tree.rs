//! Where attributes are mounted.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::{fs::MetadataExt, net::UnixStream},
    path::{Path, PathBuf},
    time::Duration,
};

use roce::environment;
use serde_json::{Value, json};

use crate::control::{VERSION, address::usual_place};

/// Places that `--sysfs` is suggested for: root's, and in the user's own folder.
const SYSTEM: &str = "/run/ferroce/sys";
const OWN: &str = "ferroce/sys";
/// A process that does not say hello in that time is not waited for.
const PATIENCE: Duration = Duration::from_secs(2);
/// Bytes of its answer at most.
const MAX_ANSWER: u64 = 64 << 10;

/// The tree of the process at the control socket, or one in a usual place.
pub(super) fn find() -> Option<PathBuf> {
    let own = || environment::var_os("XDG_RUNTIME_DIR").map(|dir| Path::new(&dir).join(OWN));
    told(&usual_place()).or_else(|| {
        [Some(SYSTEM.into()), own()]
            .into_iter()
            .flatten()
            .find(|dir| is_mounted(dir))
    })
}

/// What the process there says.
fn told(socket: &Path) -> Option<PathBuf> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let hello = json!({ "id": 1, "do": "hello", "version": VERSION });
    stream.write_all(format!("{hello}\n").as_bytes()).ok()?;
    let mut line = String::new();
    BufReader::new(stream.take(MAX_ANSWER)).read_line(&mut line).ok()?;
    let answer: Value = serde_json::from_str(&line).ok()?;
    answer["sysfs"].as_str().map(PathBuf::from)
}

fn is_mounted(dir: &Path) -> bool {
    let device = |path: &Path| fs::metadata(path).map(|meta| meta.dev()).ok();
    let (own, parent) = (device(dir), dir.parent().and_then(device));
    own.is_some() && own != parent && dir.join("class/rtrs-client").is_dir()
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, thread};

    use super::*;

    #[test]
    fn a_process_tells_where_its_tree_is() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("ctl");
        assert_eq!(told(&socket), None, "nobody there");
        let listener = UnixListener::bind(&socket).unwrap();
        let process = thread::spawn(move || {
            for answer in [
                r#"{"ok": true, "sysfs": "/run/x"}"#,
                r#"{"ok": true, "sysfs": null}"#,
                "nonsense",
            ] {
                let (stream, _) = listener.accept().unwrap();
                let mut asked = String::new();
                BufReader::new(&stream).read_line(&mut asked).unwrap();
                assert!(asked.contains("hello"), "{asked}");
                (&stream).write_all(format!("{answer}\n").as_bytes()).unwrap();
            }
        });
        assert_eq!(told(&socket), Some("/run/x".into()));
        assert_eq!((told(&socket), told(&socket)), (None, None));
        process.join().unwrap();
        assert!(!is_mounted(dir.path()));
    }
}
