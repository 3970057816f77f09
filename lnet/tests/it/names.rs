//! Names in messages that each side chooses: handles, cookies, keys and addresses.

use lnet::proto::{Body, Fragments, Handle, LnetHdr, Message, Operation};

/// Returns whether a message begins an operation of its sender.
pub(crate) fn begins(message: &Message<'_>) -> bool {
    let operation = message.body.hdr().and_then(|hdr| hdr.operation().ok());
    matches!(operation, Some(Operation::Put { .. } | Operation::Get { .. }))
}

/// Names in a message that its sender chose: the handle, and the cookie.
pub(crate) fn names(message: &Message<'_>) -> (Option<Handle>, Option<u64>) {
    let handle = match message.body.hdr().and_then(|hdr| hdr.operation().ok()) {
        Some(Operation::Put { ack_md, .. }) if ack_md != Handle::NONE => Some(ack_md),
        Some(Operation::Get { return_md, .. }) => Some(return_md),
        _ => None,
    };
    let cookie = match message.body {
        Body::PutReq { cookie, .. } | Body::GetReq { cookie, .. } => Some(cookie),
        Body::PutAck { dst_cookie, .. } => Some(dst_cookie),
        _ => None,
    };
    (handle, cookie)
}

/// A message with other names, of the sender and of what it answers.
pub(crate) fn renamed(
    message: &Message<'_>,
    handle: impl Fn(Handle) -> Handle,
    cookie: impl Fn(u64) -> u64,
    credits: Option<u8>,
    keeps_memory: bool,
) -> Vec<u8> {
    let hdr = message.body.hdr().map(|hdr| {
        let operation = match hdr.operation().unwrap() {
            Operation::Put {
                ack_md,
                match_bits,
                hdr_data,
                portal,
                offset,
            } => Operation::Put {
                ack_md: if ack_md == Handle::NONE { ack_md } else { handle(ack_md) },
                match_bits,
                hdr_data,
                portal,
                offset,
            },
            Operation::Get {
                return_md,
                match_bits,
                portal,
                src_offset,
                sink_length,
            } => Operation::Get {
                return_md: handle(return_md),
                match_bits,
                portal,
                src_offset,
                sink_length,
            },
            Operation::Reply { dst_md } => Operation::Reply { dst_md: handle(dst_md) },
            Operation::Ack {
                dst_md,
                match_bits,
                mlength,
            } => Operation::Ack {
                dst_md: handle(dst_md),
                match_bits,
                mlength,
            },
            other => other,
        };
        let mut again = LnetHdr::new(hdr.dst(), hdr.src(), hdr.payload_length.get(), &operation);
        (again.dst_pid, again.src_pid) = (hdr.dst_pid, hdr.src_pid);
        again
    });
    let mut renamed = *message;
    let mut frags = Vec::new();
    if let Body::PutAck { desc, .. } | Body::GetReq { desc, .. } = &message.body {
        frags = desc.frags.iter().collect();
    }
    if !keeps_memory {
        frags.iter_mut().for_each(|frag| frag.addr = 0);
    }
    match &mut renamed.body {
        Body::Immediate { hdr: of, .. } => *of = hdr.as_ref().unwrap(),
        Body::PutReq {
            hdr: of,
            cookie: number,
        } => {
            *of = hdr.as_ref().unwrap();
            *number = cookie(*number);
        }
        Body::GetReq {
            hdr: of,
            cookie: number,
            desc,
        } => {
            *of = hdr.as_ref().unwrap();
            *number = cookie(*number);
            desc.key = if keeps_memory { desc.key } else { 0 };
            desc.frags = Fragments::List(&frags);
        }
        Body::PutAck {
            src_cookie,
            dst_cookie,
            desc,
        } => {
            *src_cookie = cookie(*src_cookie);
            *dst_cookie = cookie(*dst_cookie);
            desc.key = if keeps_memory { desc.key } else { 0 };
            desc.frags = Fragments::List(&frags);
        }
        Body::PutNak(done) | Body::PutDone(done) | Body::GetDone(done) => done.cookie = cookie(done.cookie),
        Body::ConnReq(_) | Body::ConnAck(_) | Body::Noop => {}
    }
    if let Some(credits) = credits {
        renamed.credits = credits;
    }
    renamed.to_bytes()
}

/// Returns whether a message of the node is the kernel's, but for names and credits.
pub(crate) fn is_same(ours: &Message<'_>, theirs: &Message<'_>) -> bool {
    let blank = |message: &Message<'_>| {
        let own = names(message);
        // What the peer has named is the same; of our own names each side has its own.
        let handle = |handle| if Some(handle) == own.0 { Handle::NONE } else { handle };
        let cookie = |cookie| if Some(cookie) == own.1 { 0 } else { cookie };
        renamed(message, handle, cookie, Some(0), false)
    };
    blank(ours) == blank(theirs)
}
