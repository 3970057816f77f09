//! Measurements on RDMA devices of the host, and the same in software beside them.

use std::net::{IpAddr, SocketAddr};

use serde_json::json;

use super::{
    BenchArgs, Emit, Operation, PORT,
    driven::{Active, Passive},
    local,
    report::Measurement,
    with_passive,
};
use crate::{
    output::{self, Failure},
    signals::Stop,
};

/// Is the passive side, until it is stopped.
pub(super) fn listen(args: &BenchArgs, addr: SocketAddr, stop: &Stop) -> Result<(), Failure> {
    let server = Passive::new(args.devices(addr.ip())?, addr)?;
    match args.json {
        true => output::json(&json!({ "event": "listening", "address": addr.to_string() }))?,
        false => output::line(&format!("listening on {addr}, an RDMA device's; ctrl-C ends it"))?,
    }
    server.run(&|| stop.requested())
}

/// Measures against a passive side elsewhere.
pub(super) fn measure(
    args: &BenchArgs,
    operation: Operation,
    (from, peer): (IpAddr, SocketAddr),
    stop: &Stop,
    emit: Emit<'_>,
) -> Result<(), Failure> {
    if args.events || args.idle_qps > 0 || args.shards > 1 || args.threads > 1 {
        return Err(Failure::usage(
            "--events, --idle-qps, --shards and --threads are measured in software: leave --rdma away",
        ));
    }
    let mut active = Active::new(args.devices(from)?, from, peer)?;
    let stopped = || stop.requested();
    match operation {
        Operation::Latency => args
            .sizes(64)
            .iter()
            .try_for_each(|&bytes| active.latency(bytes, args.amount(), &stopped, emit)),
        _ => args.sizes(1 << 20).iter().try_for_each(|&bytes| {
            let shape = (args.depth, args.qps);
            emit(&active.bandwidth(operation, bytes, shape, args.amount(), &stopped)?)
        }),
    }
}

/// Measures between two ends on one device, and then in software, with the ratio.
pub(super) fn both(
    args: &BenchArgs,
    operation: Operation,
    addr: IpAddr,
    stop: &Stop,
    emit: Emit<'_>,
) -> Result<(), Failure> {
    if operation == Operation::Ceiling {
        return Err(Failure::usage("the ceiling is that of software: leave --rdma away"));
    }
    if !args.rdma.owns(addr)? {
        return Err(Failure::failed(format!("no RDMA device has {addr}")));
    }
    let peer = SocketAddr::new(addr, PORT);
    let server = Passive::new(args.devices(addr)?, peer)?;
    let mut on_device = Vec::new();
    with_passive(
        move |stopped| server.run(stopped),
        || {
            measure(args, operation, (addr, peer), stop, &mut |m| {
                on_device.push(m.clone());
                Ok(())
            })
        },
    )?;
    let mut soft = Vec::new();
    let software = args.in_software();
    if let Err(e) = local(&software, operation, Some(args.beside.into()), stop, &mut |m| {
        soft.push(m.clone());
        Ok(())
    }) {
        // A kernel with rdma_rxe has the port at all addresses.
        tracing::warn!("not measured in software: {}", e.text().unwrap_or_default());
    }
    for mut m in on_device {
        let beside = soft.iter().find(|s| (s.op, s.bytes) == (m.op, m.bytes));
        m.ratio_to_software = beside.and_then(|s| ratio(operation, &m, s));
        emit(&m)?;
    }
    soft.iter().try_for_each(emit)
}

/// Of bandwidths, or of round trips.
fn ratio(operation: Operation, device: &Measurement, soft: &Measurement) -> Option<f64> {
    let of = |m: &Measurement| match operation {
        Operation::Latency => m.latency_us.p50,
        _ => m.gbytes_per_s,
    };
    (of(soft) > 0.0).then(|| of(device) / of(soft))
}
