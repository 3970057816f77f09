//! The node of this user: the process that has the addresses and connections.

use std::{os::fd::OwnedFd, sync::Once};

use roce::JoinConfig;

use crate::{
    config,
    ret::{Errno, Result},
};

/// Error of all calls on a socket whose node has gone.
pub(crate) fn gone() -> Errno {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        config::complain(format_args!(
            "the RDS node has ended: sockets of before fail with ENETDOWN, new ones have a new node"
        ));
    });
    Errno(libc::ENETDOWN).because("the RDS node has ended")
}

/// Connects to the node, which is started if there is none.
///
/// # Errors
/// When it can't be started, which is said on standard error once.
pub(crate) fn connect() -> Result<OwnedFd> {
    let program = JoinConfig::from_env().and_then(|config| config.program);
    let found = rds_local::connect_or_start(&rds_local::directory(), program.as_deref());
    found.map_err(|e| {
        static SAID: Once = Once::new();
        SAID.call_once(|| config::complain(format_args!("AF_RDS: {e}")));
        Errno(libc::ENETDOWN).because(e)
    })
}
