//! Clean ends: SIGINT, SIGTERM and SIGHUP.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};

use crate::output::Failure;

/// Set by the first signal. The second ends the process at once, with status 130.
#[derive(Clone)]
pub(crate) struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Takes over the signals.
    pub(crate) fn on_signals() -> Result<Self, Failure> {
        Self::on(&[SIGINT, SIGTERM, SIGHUP])
    }

    /// The same, but that SIGHUP asks for something else.
    pub(crate) fn on_signals_but_hangup() -> Result<(Self, Hangup), Failure> {
        let hangup = Hangup(Arc::new(AtomicBool::new(false)));
        signal_hook::flag::register(SIGHUP, Arc::clone(&hangup.0))
            .map_err(|e| Failure::failed(format!("can't handle signal {SIGHUP}: {e}")))?;
        Ok((Self::on(&[SIGINT, SIGTERM])?, hangup))
    }

    /// One that only [`request`](Self::request) sets.
    pub(crate) fn by_request() -> Self {
        Self(Arc::default())
    }

    fn on(signals: &[i32]) -> Result<Self, Failure> {
        let flag = Arc::new(AtomicBool::new(false));
        for &signal in signals {
            // In this order: the flag is looked at before it is set.
            signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&flag))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&flag)))
                .map_err(|e| Failure::failed(format!("can't handle signal {signal}: {e}")))?;
        }
        // A file at its size limit is an error of the write, not the end of the server.
        signal_hook::flag::register(SIGXFSZ, Arc::default())
            .map_err(|e| Failure::failed(format!("can't handle signal {SIGXFSZ}: {e}")))?;
        Ok(Self(flag))
    }

    /// Asks for the end.
    pub(crate) fn request(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether to end.
    pub(crate) fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Set by SIGHUP.
pub(crate) struct Hangup(Arc<AtomicBool>);

impl Hangup {
    /// Whether it has come since this was asked last.
    pub(crate) fn taken(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}
