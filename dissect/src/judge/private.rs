//! Private data of connection managers' messages: what RDS and LNet put there.

use std::net::IpAddr;

use ::lnet::proto::{Body, Message as Kib, ProtoError};
use ::rds::proto::{ConnCommon, Private, Reject, Version};
use roce_pcap::{Finding, Rule, judge::ConnectionMessage};
use roce_port::cm::{
    cma::{HEADER_LEN, PortSpace, ServiceId},
    mad::{Message, Req},
};

use crate::service::Service;

/// Reason of a REJ that the consumer sent.
const CONSUMER: u16 = 28;

/// Findings about one message.
struct Report<'a> {
    frame: u64,
    peers: (IpAddr, IpAddr),
    conversation: Option<usize>,
    findings: &'a mut Vec<Finding>,
}

impl Report<'_> {
    fn find(&mut self, rule: Rule, text: String) {
        let finding = Finding::new(self.frame, rule, self.peers, text);
        self.findings.push(match self.conversation {
            Some(conversation) => finding.of(conversation),
            None => finding,
        });
    }
}

/// Returns the service of a REQ and its private data. Without any, as in anonymized captures, the service is not known.
pub(super) fn service(req: &Req) -> (Service, &[u8]) {
    let data = &req.private_data[HEADER_LEN..];
    match Service::of(ServiceId(req.service_id)) {
        service @ (Service::Rds | Service::Lnet) if data.iter().any(|byte| *byte != 0) => (service, data),
        _ => (Service::Other, data),
    }
}

/// Returns the private data of RDS in a REQ.
pub(super) fn rds(req: &Req) -> Option<Private<'_>> {
    let port = ServiceId(req.service_id).port(PortSpace::Tcp)?;
    Private::parse(port, service(req).1).ok()
}

/// Returns the CONNREQ in a REQ, if it is of version 2.
pub(super) fn conn_req(req: &Req) -> Option<Kib<'_>> {
    let kib = Kib::parse(service(req).1).ok()?;
    matches!(kib.body, Body::ConnReq(_)).then_some(kib)
}

/// Judges the private data of a message.
pub(super) fn judge(message: &ConnectionMessage<'_>, findings: &mut Vec<Finding>) {
    let Some(req) = message.request else { return };
    let meta = &message.packet.meta;
    let mut report = Report {
        frame: meta.frame,
        peers: (meta.src.ip(), meta.dst),
        conversation: message.conversation,
        findings,
    };
    let is_new = !message.repeated;
    match (service(req).0, message.message) {
        (Service::Rds, Message::Req(_)) if is_new => rds_request(req, &mut report),
        (Service::Rds, Message::Rep(rep)) => rds_reply(req, &rep.private_data, &mut report),
        (Service::Rds, Message::Rej(rej)) if rej.reason == CONSUMER => rds_reject(&rej.private_data, &mut report),
        (Service::Lnet, Message::Req(_)) if is_new => lnet_request(req, &mut report),
        (Service::Lnet, Message::Rep(rep)) => lnet_reply(req, &rep.private_data, &mut report),
        _ => {}
    }
}

fn rds_request(req: &Req, report: &mut Report<'_>) {
    let Some(private) = rds(req) else { return };
    let common = private.common();
    if common.version().answer(common.minors.get()).is_none() {
        let text = format!(
            "a request of version {} with minor versions {:#06x}, which is rejected",
            common.version(),
            common.minors
        );
        report.find(Rule::RdsVersion, text);
    }
    let (src, dst) = private.addresses();
    if (src, dst) != report.peers {
        let text = format!(
            "the request is from {src} to {dst}, its packet from {} to {}",
            report.peers.0, report.peers.1
        );
        report.find(Rule::RdsPrivate, text);
    }
}

fn rds_reply(req: &Req, data: &[u8], report: &mut Report<'_>) {
    let Some(request) = rds(req) else { return };
    let asked = request.common();
    if data.iter().all(|byte| *byte == 0) {
        return;
    }
    let port = ServiceId(req.service_id).port(PortSpace::Tcp).unwrap_or(0);
    let Ok(private) = Private::parse(port, data) else {
        return;
    };
    let answer: &ConnCommon = private.common();
    let expected = asked.version().answer(asked.minors.get());
    if Some(answer.version()) != expected {
        let expected = expected.map_or_else(|| "a reject".to_owned(), |version: Version| version.to_string());
        let text = format!(
            "a request of version {} is answered with {}, expected {expected}",
            asked.version(),
            answer.version()
        );
        report.find(Rule::RdsVersion, text);
    }
    let (from, to) = request.addresses();
    if private.addresses() != (to, from) {
        let (src, dst) = private.addresses();
        let text = format!("the answer is from {src} to {dst}, the request from {from} to {to}");
        report.find(Rule::RdsPrivate, text);
    }
    if answer.tos != asked.tos {
        let text = format!(
            "a request with type of service {} is answered with {}",
            asked.tos, answer.tos
        );
        report.find(Rule::RdsPrivate, text);
    }
}

fn rds_reject(data: &[u8], report: &mut Report<'_>) {
    if let Ok(reject) = Reject::parse(data)
        && !reject.retries()
    {
        report.find(Rule::RdsReject, format!("a reject with the number {}", reject.0));
    }
}

fn lnet_request(req: &Req, report: &mut Report<'_>) {
    match Kib::parse(service(req).1) {
        Ok(kib) => {
            match kib.body {
                Body::ConnReq(params) if params.queue_depth == 0 || params.max_frags == 0 => {
                    let text = format!(
                        "a request with queue depth {} and {} fragments",
                        params.queue_depth, params.max_frags
                    );
                    report.find(Rule::LnetParameters, text);
                }
                Body::ConnReq(_) => {}
                _ => report.find(
                    Rule::LnetFormat,
                    format!("{} in a request to connect", kib.body.kind().name()),
                ),
            }
            check_sum(&kib, report);
        }
        // Other versions are rejected in words of their own.
        Err(ProtoError::Version1 | ProtoError::Version(_)) => {}
        Err(why) => report.find(Rule::LnetFormat, why.to_string()),
    }
}

fn lnet_reply(req: &Req, data: &[u8], report: &mut Report<'_>) {
    let Some(asked) = conn_req(req) else { return };
    if data.iter().all(|byte| *byte == 0) {
        return;
    }
    let answer = match Kib::parse(data) {
        Ok(answer) => answer,
        Err(why @ (ProtoError::Version1 | ProtoError::Version(_))) => {
            report.find(Rule::LnetParameters, format!("an answer of another version: {why}"));
            return;
        }
        Err(why) => {
            report.find(Rule::LnetFormat, why.to_string());
            return;
        }
    };
    check_sum(&answer, report);
    let (Body::ConnReq(most), Body::ConnAck(params)) = (asked.body, answer.body) else {
        let text = format!("{} in an answer to a request to connect", answer.body.kind().name());
        report.find(Rule::LnetFormat, text);
        return;
    };
    // 0 of a request for 0 is the requester's.
    let allowed = |value, most| value == most || (1..most).contains(&value);
    if !allowed(params.queue_depth, most.queue_depth) || !allowed(params.max_frags, most.max_frags) {
        let text = format!(
            "queue depth {} and {} fragments, the request has {} and {}",
            params.queue_depth, params.max_frags, most.queue_depth, most.max_frags
        );
        report.find(Rule::LnetParameters, text);
    }
    if (answer.src, answer.dst) != (asked.dst, asked.src) {
        let text = format!(
            "an answer from {} to {}, the request is from {} to {}",
            answer.src, answer.dst, asked.src, asked.dst
        );
        report.find(Rule::LnetNid, text);
    }
    if answer.dst_stamp != asked.src_stamp {
        let text = format!(
            "an answer to incarnation {:#x}, the request is of {:#x}",
            answer.dst_stamp, asked.src_stamp
        );
        report.find(Rule::LnetStamp, text);
    }
}

fn check_sum(kib: &Kib<'_>, report: &mut Report<'_>) {
    if let Some(text) = super::lnet::wrong_checksum(kib) {
        report.find(Rule::LnetChecksum, text);
    }
}
