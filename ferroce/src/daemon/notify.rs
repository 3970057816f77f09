//! What a service manager is told: that all is up, that the daemon lives, that it ends (`sd_notify(3)`).

use std::{
    os::linux::net::SocketAddrExt,
    os::unix::net::{SocketAddr, UnixDatagram},
    time::{Duration, Instant},
};

use roce::environment;

/// The service manager that has started this process, if one has.
pub(super) struct Manager {
    socket: Option<(UnixDatagram, SocketAddr)>,
    ready: bool,
    /// How often it wants to hear of us, and when it is time.
    watchdog: Option<(Duration, Instant)>,
}

fn address(text: &str) -> Option<SocketAddr> {
    match text.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name).ok(),
        None => SocketAddr::from_pathname(text).ok(),
    }
}

impl Manager {
    /// The one that the environment names.
    pub(super) fn from_env() -> Self {
        let number = |name| environment::var(name).and_then(|text| text.parse::<u64>().ok());
        let to = environment::var("NOTIFY_SOCKET").and_then(|text| address(&text));
        let ours = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        // Twice as often as it wants, as it says.
        let every = number("WATCHDOG_USEC").filter(|usec| ours && *usec > 0);
        let every = every.map(|usec| Duration::from_micros(usec / 2));
        Self {
            socket: to.and_then(|to| Some((UnixDatagram::unbound().ok()?, to))),
            ready: false,
            watchdog: every.map(|every| (every, Instant::now())),
        }
    }

    fn say(&self, text: &str) {
        if let Some((socket, to)) = &self.socket
            && let Err(e) = socket.send_to_addr(text.as_bytes(), to)
        {
            tracing::warn!("the service manager is not told {text:?}: {e}");
        }
    }

    /// Now and then; `settled`: all tasks are up, or have failed.
    pub(super) fn turn(&mut self, settled: bool) {
        if settled && !std::mem::replace(&mut self.ready, true) {
            self.say("READY=1");
        }
        let now = Instant::now();
        if let Some((every, next)) = &mut self.watchdog
            && now >= *next
        {
            *next = now + *every;
            self.say("WATCHDOG=1");
        }
    }

    /// It ends.
    pub(super) fn stopping(&self) {
        self.say("STOPPING=1");
    }
}
