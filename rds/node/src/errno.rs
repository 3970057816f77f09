//! Error numbers of answers, as the kernel's RDS has them.

use std::io;

use roce_verbs::provider::VerbsError;
use rustix::io::Errno;

/// Returns the number for an address that can't be opened.
pub(crate) fn of_open(e: &VerbsError) -> Errno {
    match e {
        VerbsError::Io { source, .. } if source.kind() == io::ErrorKind::AddrInUse => Errno::ADDRINUSE,
        VerbsError::Address(_) => Errno::ADDRINUSE,
        _ => Errno::ADDRNOTAVAIL,
    }
}

/// Returns the number of an error of the state machine.
pub(crate) fn of_call(e: rds::Error) -> Errno {
    Errno::from_raw_os_error(e.errno())
}
