//! Notifications of the service manager: ready, alive, stopping (`sd_notify(3)`).

use std::time::{Duration, Instant};

use roce::{broker::server::Notify, environment};

/// The service manager that has started this process, if one has.
pub(super) struct Manager {
    notify: Notify,
    ready: bool,
    /// How often it wants to hear of us, and when it is time.
    watchdog: Option<(Duration, Instant)>,
}

impl Manager {
    /// The service manager that the environment names.
    pub(super) fn from_env() -> Self {
        let number = |name| environment::var(name).and_then(|text| text.parse::<u64>().ok());
        let ours = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        // Twice as often as it wants, as it says.
        let every = number("WATCHDOG_USEC").filter(|usec| ours && *usec > 0);
        let every = every.map(|usec| Duration::from_micros(usec / 2));
        Self {
            notify: Notify::from_env(),
            ready: false,
            watchdog: every.map(|every| (every, Instant::now())),
        }
    }

    fn say(&self, text: &str) {
        if let Err(e) = self.notify.say(text, &[]) {
            tracing::warn!("the service manager is not notified of {text:?}: {e}");
        }
    }

    /// Notifies it of what is due; `settled`: all tasks are up, or have failed.
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

    /// The daemon ends.
    pub(super) fn stopping(&self) {
        self.say("STOPPING=1");
    }
}
