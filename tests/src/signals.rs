//! Clean ends of test programs: SIGINT and SIGTERM.

use std::sync::{Arc, atomic::AtomicBool};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

/// Takes over the signals: the first one sets the flag, the second ends the process at once, with status 130. What can't be taken over
/// is told on standard error.
pub fn stop_flag() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the flag is looked at before it is set.
        let second = flag::register_conditional_shutdown(signal, 130, stop.clone());
        if let Err(e) = second.and_then(|_| flag::register(signal, stop.clone())) {
            eprintln!("warning: ctrl-C will not clean up: {e}");
        }
    }
    stop
}
