//! Faults of verbs on demand.

use roce_fault::Faults;
use roce_net::Driver;
use roce_verbs::{AsyncEvent, Completion, QpAttr, QpState, Qpn, provider::VerbsError};

use crate::{device::DeviceInner, engines::Engines, error::io_error};

impl DeviceInner {
    /// Returns the rules, if there are any about verbs.
    #[inline]
    pub(crate) fn verb_faults(&self) -> Option<&Faults> {
        self.config.faults.as_ref().filter(|faults| faults.concern_verbs())
    }

    /// Decides about the registration of memory.
    ///
    /// # Errors
    /// The one that a rule chooses.
    pub(crate) fn may_register(&self) -> Result<(), VerbsError> {
        match self.verb_faults().and_then(Faults::registering) {
            None => Ok(()),
            Some(errno) => Err(io_error("registering memory (refused by a fault rule)")(
                std::io::Error::from_raw_os_error(errno),
            )),
        }
    }
}

/// Moves a queue pair to the error state, as a device does that has failed: with an event if `fatal`.
pub(crate) fn fail(driver: &Driver, qpn: Qpn, fatal: bool) {
    let attr = QpAttr {
        state: Some(QpState::Err),
        ..QpAttr::default()
    };
    // On a closed device there is nothing to fail, and in some states nothing changes.
    let _ = driver.with(|port, now| {
        if port.modify_qp(now, qpn, &attr).is_ok() && fatal {
            port.push_event(AsyncEvent::QpFatal(qpn));
        }
    });
}

/// Replaces the statuses of completions as rules demand. The queue pair of such a completion moves to the error state.
pub(crate) fn replace_statuses(faults: &Faults, engines: &Engines, completions: &mut [Completion]) {
    for completion in completions {
        let qpn = completion.qpn;
        let serial = |driver: &Driver| driver.with_quiet(|port, _| port.qp_serial(qpn)).ok().flatten();
        let found = engines.all().iter().find_map(|driver| Some((driver, serial(driver)?)));
        let Some((driver, serial)) = found else { continue };
        if faults.complete(serial, completion) {
            fail(driver, qpn, false);
        }
    }
}
