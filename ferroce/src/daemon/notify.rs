//! Notifications of the service manager: ready, alive, stopping (`sd_notify(3)`).

use std::time::{Duration, Instant};

use roce::{broker::server::Notify, environment};

/// The service manager that started this process, if any.
pub(super) struct Manager {
    notify: Notify,
    ready: bool,
    /// Interval of watchdog notifications, and the time of the next.
    watchdog: Option<(Duration, Instant)>,
}

impl Manager {
    /// The service manager that the environment names.
    pub(super) fn from_env() -> Self {
        let number = |name| environment::var(name).and_then(|text| text.parse::<u64>().ok());
        let ours = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        // Half of it, as sd_watchdog_enabled(3) recommends.
        let every = number("WATCHDOG_USEC").filter(|usec| ours && *usec > 0);
        let every = every.map(|usec| Duration::from_micros(usec / 2));
        Self {
            notify: Notify::from_env(),
            ready: false,
            watchdog: every.map(|every| (every, Instant::now())),
        }
    }

    fn notify(&self, text: &str) {
        if let Err(e) = self.notify.say(text, &[]) {
            tracing::warn!("can't notify the service manager of {text:?}: {e}");
        }
    }

    /// Sends the notifications that are due; `settled`: each task is up or has failed.
    pub(super) fn turn(&mut self, settled: bool) {
        if settled && !std::mem::replace(&mut self.ready, true) {
            self.notify("READY=1");
        }
        let now = Instant::now();
        if let Some((every, next)) = &mut self.watchdog
            && now >= *next
        {
            *next = now + *every;
            self.notify("WATCHDOG=1");
        }
    }

    /// Notifies it that the daemon stops.
    pub(super) fn stopping(&self) {
        self.notify("STOPPING=1");
    }
}
