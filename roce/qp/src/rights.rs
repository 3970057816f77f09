//! Access rights that requests need.

use roce_bth::{Class, Packet, Placement, Selectivity};
use roce_verbs::AccessFlags;

/// Rights to memory that a request needs.
pub(crate) fn needed_rights(packet: &Packet<'_>) -> AccessFlags {
    match packet.header.bth.opcode.info().class {
        Class::Write | Class::AtomicWrite => AccessFlags::REMOTE_WRITE,
        Class::ReadRequest => AccessFlags::REMOTE_READ,
        Class::Atomic => AccessFlags::REMOTE_ATOMIC,
        Class::Flush => flush_rights(packet).unwrap_or_default(),
        _ => AccessFlags::empty(),
    }
}

/// Returns the access flags that a FLUSH needs. `None`: its placement is empty or a field has a reserved value.
pub(crate) fn flush_rights(packet: &Packet<'_>) -> Option<AccessFlags> {
    let feth = packet.header.feth()?;
    let known = Placement::GLOBAL_VISIBILITY.union(Placement::PERSISTENT);
    if feth.placement == Placement::default() || !known.contains(feth.placement) {
        return None;
    }
    let mut need = AccessFlags::empty();
    need.set(
        AccessFlags::FLUSH_GLOBAL,
        feth.placement.contains(Placement::GLOBAL_VISIBILITY),
    );
    need.set(
        AccessFlags::FLUSH_PERSISTENT,
        feth.placement.contains(Placement::PERSISTENT),
    );
    (!matches!(feth.selectivity, Selectivity::Reserved(_))).then_some(need)
}
