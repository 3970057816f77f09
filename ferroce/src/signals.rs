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
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
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

    /// Whether to end.
    pub(crate) fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
