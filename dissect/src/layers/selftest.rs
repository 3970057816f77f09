//! Messages of lnet_selftest.

use ::lnet::selftest::proto::{Body, Message, Parameters, Service};

use crate::field::Field;

const fn service_name(service: Service) -> &'static str {
    match service {
        Service::Debug => "debug",
        Service::MakeSession => "make session",
        Service::RemoveSession => "remove session",
        Service::Batch => "batch",
        Service::Test => "test",
        Service::Stat => "statistics",
        Service::Bulk => "bulk",
        Service::Ping => "ping",
    }
}

const fn direction(operation: u32) -> &'static str {
    match operation {
        Body::READ => "read",
        Body::WRITE => "write",
        _ => "unknown operation of",
    }
}

/// Returns what a request asks for, beyond its service.
fn asked(message: &Message) -> Option<String> {
    Some(match message.body {
        Body::MakeSession { name, force, .. } => {
            let force = if force == 0 { "" } else { ", by force" };
            format!("{name}{force}")
        }
        Body::Batch {
            batch, operation, test, ..
        } => match operation {
            Body::RUN => format!("run {batch}"),
            Body::STOP => format!("stop {batch}"),
            Body::QUERY => format!("show test {test} of {batch}"),
            other => format!("operation {other} on {batch}"),
        },
        Body::Test {
            is_client,
            nodes,
            concurrency,
            ..
        } => {
            let what = match message.test() {
                Ok(Parameters::Ping { .. }) => "ping".to_owned(),
                Ok(Parameters::Bulk { operation, len, .. }) => format!("{} {len} bytes", direction(operation)),
                Err(why) => why.to_string(),
            };
            match is_client {
                0 => format!("{what}, as server"),
                _ => format!("{what}, as client of {nodes} nodes, {concurrency} at a time"),
            }
        }
        Body::Bulk { operation, len, .. } => format!("{} {len} bytes", direction(operation)),
        Body::Ping { number, .. } => format!("number {number}"),
        _ => return None,
    })
}

/// Returns what a reply says, beyond its status.
fn told(body: &Body) -> Option<String> {
    Some(match body {
        Body::SessionMade { timeout, .. } => format!("ends after {timeout} s"),
        Body::BatchReply { active, .. } => format!("{active} active"),
        Body::StatReply { rpc, framework, .. } => format!(
            "{} requests sent, {} received, {} errors of bulk tests, {} of pings",
            rpc.sent, rpc.received, framework.bulk_errors, framework.ping_errors
        ),
        Body::PingReply { number, .. } => format!("number {number}"),
        _ => return None,
    })
}

/// Returns the field of a message.
pub(super) fn field(message: &Message, data: &[u8], at: usize) -> Field {
    let body = &message.body;
    let name = body.service().or(body.replier()).map_or("unknown", service_name);
    let (text, first, detail) = match body.status() {
        None => {
            let bits = Field::bytes("match bits for the reply", &data[24..32], at + 24);
            (format!("{name} request"), bits, asked(message))
        }
        Some(status) => {
            let value = match status {
                0 => "0".to_owned(),
                errno => format!("error {errno}"),
            };
            let text = format!("{name} reply, status {value}");
            (text, Field::new("status", value, at + 24, 4), told(body))
        }
    };
    let text = match detail {
        Some(detail) => format!("{text}: {detail}"),
        None => text,
    };
    Field::new("selftest message", text, at, data.len()).with(vec![
        Field::new("version", message.version, at + 4, 4),
        Field::new("type", body.number(), at + 8, 4),
        Field::new("features", format!("{:#x}", message.features.bits()), at + 20, 4),
        first,
    ])
}
