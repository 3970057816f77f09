//! Lines of settings.

use roce_verbs::{AccessFlags, Mtu, QpState, QpType};

use crate::{
    error::ScriptError,
    script::{Ip, LOCAL, RegionSpec, Setup},
    value::{self, state},
    words::{Word, Words},
};

/// Settings of a `qp` line.
const SETTINGS: &str = "type, ip, mtu, psn, peer-psn, depth, timeout, retry, rnr-retry, rnr-timer, access, source-port, reorder, \
                        state, recv or region";
/// Largest number of regions, and of receive work requests.
const MAX_REGIONS: usize = 64;
const MAX_RECEIVES: usize = 1024;
/// Largest sum of the lengths of regions and receives, bytes.
const MAX_MEMORY: usize = 64 << 20;

/// Reads the settings of a `qp` line.
pub(crate) fn parse(setup: &mut Setup, words: &mut Words<'_>) -> Result<(), ScriptError> {
    for word in words.by_ref() {
        let Some((key, value)) = word.assignment() else {
            return Err(word.error(SETTINGS));
        };
        match key.text {
            "type" => setup.qp_type = qp_type(value)?,
            "ip" => {
                setup.ip = match value.text {
                    "4" => Some(Ip::V4),
                    "6" => Some(Ip::V6),
                    _ => return Err(value.error("4 or 6")),
                }
            }
            "mtu" => setup.mtu = mtu(value)?,
            "psn" => setup.psn = value::small(value, 24)?,
            "peer-psn" => setup.peer_psn = value::small(value, 24)?,
            "depth" => setup.depth = value::byte(value, 8)?,
            "timeout" => setup.timeout = value::byte(value, 5)?,
            "retry" => setup.retry = value::byte(value, 3)?,
            "rnr-retry" => setup.rnr_retry = value::byte(value, 3)?,
            "rnr-timer" => setup.rnr_timer = value::byte(value, 5)?,
            "access" => setup.access = access(value)?,
            "source-port" => {
                setup.source_port = match value.text {
                    "none" => None,
                    _ => Some(value::small(value, 16)? as u16),
                }
            }
            "reorder" => {
                setup.reorder = match value.text {
                    "on" => true,
                    "off" => false,
                    _ => return Err(value.error("on or off")),
                }
            }
            "state" => setup.state = initial_state(value)?,
            "recv" => receives(setup, value)?,
            "region" => region(setup, value)?,
            _ => return Err(key.error(SETTINGS)),
        }
    }
    Ok(())
}

fn qp_type(word: Word<'_>) -> Result<QpType, ScriptError> {
    match word.text {
        "rc" => Ok(QpType::Rc),
        "uc" => Ok(QpType::Uc),
        _ => Err(word.error("rc or uc")),
    }
}

fn mtu(word: Word<'_>) -> Result<Mtu, ScriptError> {
    let found = value::small(word, 32).ok().and_then(|n| Mtu::from_bytes(n as usize));
    found.ok_or_else(|| word.error("256, 512, 1024, 2048 or 4096"))
}

fn initial_state(word: Word<'_>) -> Result<QpState, ScriptError> {
    match state(word) {
        Ok(found @ (QpState::Reset | QpState::Init | QpState::Rtr | QpState::Rts)) => Ok(found),
        _ => Err(word.error("reset, init, rtr or rts")),
    }
}

/// Reads rights: letters of `rwafp`, or `-` for none.
fn access(word: Word<'_>) -> Result<AccessFlags, ScriptError> {
    let mut rights = AccessFlags::empty();
    for c in word.text.chars().filter(|_| word.text != "-") {
        rights |= match c {
            'r' => AccessFlags::REMOTE_READ,
            'w' => AccessFlags::REMOTE_WRITE,
            'a' => AccessFlags::REMOTE_ATOMIC,
            'f' => AccessFlags::FLUSH_GLOBAL,
            'p' => AccessFlags::FLUSH_PERSISTENT,
            _ => return Err(word.error("rights: letters of rwafp, or -")),
        };
    }
    match word.text {
        "" => Err(word.error("rights: letters of rwafp, or -")),
        _ => Ok(rights),
    }
}

/// Checks that memory of `more` bytes can be made.
fn room(setup: &Setup, word: Word<'_>, more: usize) -> Result<(), ScriptError> {
    let regions: usize = setup.regions.iter().map(|region| region.len).sum();
    let receives: usize = setup.receives.iter().sum();
    match regions + receives + more <= MAX_MEMORY {
        true => Ok(()),
        false => Err(word.error(format!("regions and receives of at most {MAX_MEMORY} bytes together"))),
    }
}

/// Reads `LEN` or `COUNTxLEN`.
fn receives(setup: &mut Setup, word: Word<'_>) -> Result<(), ScriptError> {
    let hexadecimal = word.text.starts_with("0x");
    let (count, len) = match word.split('x').filter(|_| !hexadecimal) {
        Some((count, len)) => (value::small(count, 16)? as usize, value::bytes(len)?),
        None => (1, value::bytes(word)?),
    };
    if setup.receives.len() + count > MAX_RECEIVES {
        return Err(word.error(format!("at most {MAX_RECEIVES} receives")));
    }
    room(setup, word, count * len)?;
    setup.receives.extend(core::iter::repeat_n(len, count));
    Ok(())
}

/// Reads `NAME:LEN:RIGHTS`.
fn region(setup: &mut Setup, word: Word<'_>) -> Result<(), ScriptError> {
    let form = || word.error("NAME:LEN:RIGHTS, such as r0:65536:rw");
    let (name, rest) = word.split(':').ok_or_else(form)?;
    let (len, rights) = rest.split(':').ok_or_else(form)?;
    let letters = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let is_psn = name.text.strip_prefix("psn").is_some_and(|rest| !rest.is_empty());
    if !name.text.starts_with(|c: char| c.is_ascii_lowercase()) || !name.text.chars().all(letters) || is_psn {
        return Err(name.error("a name of lower-case letters, digits and _, not psnN"));
    }
    let bytes = value::bytes(len)?;
    if bytes == 0 {
        return Err(len.error("a number of bytes above 0"));
    }
    let spec = RegionSpec {
        len: bytes,
        access: access(rights)? | AccessFlags::LOCAL_WRITE,
    };
    room(setup, word, bytes)?;
    if name.text == LOCAL {
        setup.regions[0] = spec;
        return Ok(());
    }
    if setup.names.iter().any(|known| known == name.text) || setup.names.len() == MAX_REGIONS {
        return Err(name.error(format!("a new name, and at most {MAX_REGIONS} regions")));
    }
    setup.names.push(name.text.to_owned());
    setup.regions.push(spec);
    Ok(())
}
