//! Names of packets, states, statuses and events in scripts.

use roce_bth::{Class, NakCode, Opcode, Service};
use roce_verbs::{QpState, WcStatus};

/// Names of the codes of NAKs.
pub(crate) const NAKS: [(&str, NakCode); 5] = [
    ("sequence", NakCode::PsnSequenceError),
    ("invalid-request", NakCode::InvalidRequest),
    ("remote-access", NakCode::RemoteAccessError),
    ("remote-operational", NakCode::RemoteOperationalError),
    ("invalid-rd-request", NakCode::InvalidRdRequest),
];

/// Names of the states of queue pairs.
pub(crate) const STATES: [(&str, QpState); 7] = [
    ("reset", QpState::Reset),
    ("init", QpState::Init),
    ("rtr", QpState::Rtr),
    ("rts", QpState::Rts),
    ("sqd", QpState::Sqd),
    ("sqe", QpState::Sqe),
    ("err", QpState::Err),
];

/// Names of the events of queue pairs, those of `ibv_event_type` behind `IBV_EVENT_`, and their numbers.
pub(crate) const EVENTS: [(&str, u32); 6] = [
    ("CQ_ERR", 0),
    ("QP_FATAL", 1),
    ("QP_REQ_ERR", 2),
    ("QP_ACCESS_ERR", 3),
    ("COMM_EST", 4),
    ("SQ_DRAINED", 5),
];

const fn service_prefix(service: Service) -> &'static str {
    match service {
        Service::Rc => "rc-",
        Service::Uc => "uc-",
        Service::Ud => "ud-",
        Service::Xrc => "xrc-",
        Service::Cnp | Service::Manufacturer => "",
    }
}

/// Returns an opcode's name without that of its service: `write-last-imm`.
fn plain(opcode: Opcode) -> String {
    let name = opcode.info().name.to_ascii_lowercase();
    let name = name.strip_suffix(" (ferroce)").unwrap_or(&name);
    let service = service_prefix(opcode.info().service).trim_end_matches('-');
    let name = name.strip_prefix(service).unwrap_or(name).trim_start();
    let name = name.strip_prefix("rdma ").unwrap_or(name);
    let name = name
        .replace(" with immediate", "-imm")
        .replace(" with invalidate", "-inv");
    let name = name.replace("acknowledge", "ack").replace(" and ", "-");
    name.replace(' ', "-")
}

/// Returns an opcode's name in a script about a queue pair of `service`.
pub(crate) fn of_opcode(opcode: Opcode, service: Service) -> String {
    let own = opcode.info().service;
    let prefix = match own == service {
        true => "",
        false => service_prefix(own),
    };
    format!("{prefix}{}", plain(opcode))
}

/// Finds an opcode by its name.
pub(crate) fn opcode(name: &str, service: Service) -> Option<Opcode> {
    let mut named = Opcode::ALL.iter().copied();
    named.find(|opcode| {
        let full = || format!("{}{}", service_prefix(opcode.info().service), plain(*opcode));
        of_opcode(*opcode, service) == name || full() == name
    })
}

/// Lists the names of packets of `service`.
pub(crate) fn packets(service: Service) -> String {
    let named = Opcode::ALL.iter().filter(|opcode| opcode.info().is_of(service));
    let names: Vec<String> = named
        .filter(|opcode| opcode.info().class != Class::Acknowledge)
        .map(|opcode| of_opcode(*opcode, service))
        .collect();
    let answers = if service == Service::Rc { "ack, nak, rnr, " } else { "" };
    format!("{answers}{}", names.join(", "))
}

/// Finds a status by its name in `ibv_wc_status`.
pub(crate) fn status(name: &str) -> Option<WcStatus> {
    lookup(WcStatus::NAMED, name)
}

/// Returns a status's name.
pub(crate) fn of_status(status: WcStatus) -> &'static str {
    name_of(WcStatus::NAMED, status)
}

/// Finds the value of a name in a table.
pub(crate) fn lookup<T: Copy>(table: &[(&str, T)], name: &str) -> Option<T> {
    table.iter().find(|(n, _)| *n == name).map(|(_, value)| *value)
}

/// Returns the name of a value in a table.
pub(crate) fn name_of<T: Copy + PartialEq>(table: &[(&'static str, T)], value: T) -> &'static str {
    table.iter().find(|(_, v)| *v == value).map_or("?", |(name, _)| name)
}

/// Lists the names of a table.
pub(crate) fn list<T>(table: &[(&str, T)]) -> String {
    let names: Vec<&str> = table.iter().map(|(name, _)| *name).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_opcode_has_one_name_by_which_it_is_found() {
        for service in [Service::Rc, Service::Uc, Service::Ud] {
            for code in Opcode::ALL {
                let name = of_opcode(*code, service);
                assert_eq!(opcode(&name, service), Some(*code), "{name}");
            }
        }
        let name = |code| of_opcode(code, Service::Rc);
        assert_eq!(name(Opcode::RcWriteLastImm), "write-last-imm");
        assert_eq!(name(Opcode::RcReadRequest), "read-request");
        assert_eq!(name(Opcode::RcAtomicAcknowledge), "atomic-ack");
        assert_eq!(name(Opcode::RcCompareSwap), "compare-swap");
        assert_eq!(name(Opcode::UdSendOnly), "ud-send-only");
        assert_eq!(name(Opcode::SelectiveAck), "selective-ack");
        assert_eq!(of_opcode(Opcode::UcSendOnly, Service::Uc), "send-only");
    }
}
