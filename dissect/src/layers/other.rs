//! Messages of services without a dissector.

use crate::{
    cx::{Cx, Found},
    field::{Base, Field, Layer},
    flow::{Bytes, Message},
    service::Service,
};

/// Returns the base of a message's layers.
pub(crate) const fn base(message: &Message<'_>) -> Base {
    match message.bytes {
        Bytes::Packet(..) => Base::Packet,
        Bytes::Several(_) => Base::Message,
    }
}

/// Names the service of a message and its length.
pub(crate) fn message(cx: &Cx<'_>, message: &Message<'_>) -> Found {
    if cx.conn.service == Service::Other {
        return Found::default();
    }
    let mut layer = Layer::new(cx.conn.service.name(), base(message));
    layer.summary = format!("{} message of {} bytes", cx.conn.service, message.len());
    layer
        .fields
        .push(Field::bytes("data", message.head(), message.origin()));
    Found::layer(layer, None)
}

/// Returns the layer of a packet whose message is not complete, or not known.
pub(crate) fn part(text: String) -> Layer {
    let mut layer = Layer::new("message", Base::Packet);
    layer.summary = text;
    layer
}
