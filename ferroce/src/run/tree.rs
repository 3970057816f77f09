//! Mount points of attributes.

use std::{
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use rnbd_host::control::VERSION;
use serde_json::{Value, json};

use crate::control::address::{SYSTEM, connect, own_folder, usual_place};

/// The name that is suggested for --sysfs, in the folder of the system's daemon and in the user's own.
const NAME: &str = "sys";
/// A process that does not answer within this time is ignored.
const TIME: Duration = Duration::from_secs(2);
/// Bytes of its answer at most.
const MAX_ANSWER: u64 = 64 << 10;

/// The tree of the process at the control socket, or one in a usual place.
pub(super) fn find() -> Option<PathBuf> {
    reported(&usual_place()).or_else(|| {
        let folders = [Some(SYSTEM.into()), own_folder()].into_iter().flatten();
        folders.map(|dir| dir.join(NAME)).find(|dir| is_mounted(dir))
    })
}

/// The tree that the process there has mounted.
fn reported(socket: &Path) -> Option<PathBuf> {
    let mut stream = match connect(socket) {
        Ok(stream) => stream,
        Err(e) => {
            // Mostly there is none, or it is not for this user.
            if e.kind() == io::ErrorKind::Other {
                tracing::warn!("control socket {}: {e}", socket.display());
            }
            return None;
        }
    };
    stream.set_read_timeout(Some(TIME)).ok()?;
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
    fn a_process_reports_where_its_tree_is() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("ctl");
        assert_eq!(reported(&socket), None, "no listener");
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
        assert_eq!(reported(&socket), Some("/run/x".into()));
        assert_eq!((reported(&socket), reported(&socket)), (None, None));
        process.join().unwrap();
        assert!(!is_mounted(dir.path()));
    }
}
