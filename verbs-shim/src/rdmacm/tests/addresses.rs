//! Ports, addresses and next hops.

use super::*;

#[test]
fn ports_are_kept_from_other_processes() {
    let mut p = Program::new();
    let bind = |id: u32, addr: &str| Bytes::default().u64(0).raw(&sockaddr(addr).emit_in6()).u32(id);
    let id = p.create(1, PortSpace::Tcp);
    p.ucma.backend.fail.set(Some(Errno(libc::EADDRINUSE)));
    assert_eq!(
        p.run(Cmd::BindIp, bind(id, "10.0.0.1:7471")),
        Err(Errno(libc::EADDRINUSE))
    );
    p.run(Cmd::BindIp, bind(id, "10.0.0.1:7471"))
        .expect("it is free now, and was not kept by the first attempt");
    assert_eq!(p.log.take(), ["reserve Tcp 7471 Some(10.0.0.1) -> 1"]);
    p.destroy(id);
    assert_eq!(p.log.take(), ["end 1"]);
    let id = p.create(2, PortSpace::Udp);
    p.run(Cmd::BindIp, bind(id, "0.0.0.0:0")).unwrap();
    assert_eq!(p.log.take(), ["reserve Udp 0 Some(0.0.0.0) -> 2"]);
    assert_eq!(p.ucma.get(p.fd, id).unwrap().local.port(), 40_000);
    // An id that only connects needs no port of its own.
    p.routed(3, PortSpace::Tcp);
    assert_eq!(p.log.take(), [""; 0]);
}

#[test]
fn a_port_that_is_only_free_elsewhere_is_passed_over() {
    let mut p = Program::new();
    let bind = |id: u32, addr: &str| Bytes::default().u64(0).raw(&sockaddr(addr).emit_in6()).u32(id);
    for port in [40_000, 40_001] {
        // As an id that only connects has one: other processes don't know of it.
        let id = p.create(1, PortSpace::Tcp);
        p.ucma
            .bind(p.fd, id, sockaddr(&format!("10.0.0.1:{port}")), false)
            .unwrap();
    }
    let id = p.create(2, PortSpace::Tcp);
    p.run(Cmd::BindIp, bind(id, "10.0.0.1:0")).unwrap();
    assert_eq!(p.ucma.get(p.fd, id).unwrap().local.port(), 40_002);
    let mut log = p.log.take();
    log[3..].sort();
    assert_eq!(
        log[3..],
        ["end 1", "end 2"],
        "the two are given back when one was found"
    );
}

#[test]
fn a_loopback_address_without_a_device_stands_for_any() {
    let mut program = Program::new();
    let bind = |id: u32, to: &str| Bytes::default().u64(0).raw(&sockaddr(to).emit_in6()).u32(id);
    let id = program.create(1, PortSpace::Tcp);
    program.run(Cmd::BindIp, bind(id, "127.0.0.1:7471")).unwrap();
    let other = program.create(2, PortSpace::Tcp);
    let beside = program.run(Cmd::BindIp, bind(other, "10.0.0.1:7471"));
    assert_eq!(beside, Err(Errno(libc::EADDRNOTAVAIL)));
    program.log.take();
    program.simple(Cmd::Listen, id, 5).unwrap();
    assert!(program.log.take()[0].starts_with("listen Tcp 7471 Some(0.0.0.0)"));

    let client = program.create(3, PortSpace::Tcp);
    program.resolve(client, "127.0.0.1:7471").unwrap();
    assert_eq!(program.expect(EventType::AddrResolved).status, 0);
    program.simple(Cmd::ResolveRoute, client, 2000).unwrap();
    program.expect(EventType::RouteResolved);
    program.connect(client, b"").unwrap();
    let asked = program.log.take().join("\n");
    assert!(asked.contains("10.0.0.1:"), "{asked}");
    assert!(!asked.contains("127.0.0.1"), "{asked}");
}

/// Other processes' devices may have further addresses of the loopback network.
#[test]
fn a_loopback_address_is_another_host_to_a_device_that_has_one() {
    for (to, asked) in [("127.0.0.8:7471", "127.0.0.8:"), ("127.0.0.1:7471", "127.0.0.7:")] {
        let mut program = Program::new();
        program.ucma.backend.address = "127.0.0.7".parse().unwrap();
        let client = program.create(1, PortSpace::Tcp);
        program.resolve(client, to).unwrap();
        assert_eq!(program.expect(EventType::AddrResolved).status, 0);
        program.simple(Cmd::ResolveRoute, client, 2000).unwrap();
        program.expect(EventType::RouteResolved);
        program.log.take();
        program.connect(client, b"").unwrap();
        let said = program.log.take().join("\n");
        assert!(said.contains(asked), "{to}: {said}");
    }
}

#[test]
fn addresses_without_device_or_route() {
    let mut p = Program::new();
    let id = p.create(1, PortSpace::Tcp);
    assert_eq!(p.resolve(id, "10.9.9.9:1"), Err(Errno(libc::ENETUNREACH)));
    p.resolve(id, "10.0.1.2:1").unwrap();
    assert_eq!(p.expect(EventType::AddrError).status, -libc::ENODEV as u32);
    p.resolve(id, "0.0.0.0:7471").unwrap();
    p.expect(EventType::AddrResolved);
    let answer = p
        .run(
            Cmd::Query,
            Bytes::default().u64(1).u32(id).u32(abi::option::USER_CM_QUERY_ADDR),
        )
        .unwrap();
    let addrs = QueryAddrResp::read_from_bytes(&answer).unwrap();
    assert_eq!(
        Addr::parse(&addrs.dst_addr),
        Ok(sockaddr("10.0.0.1:7471")),
        "the host itself"
    );
    assert_eq!((addrs.src_size, addrs.node_guid, addrs.pkey), (16, [9; 8], 0xffff));
    let bind = |id: u32, addr: &str| Bytes::default().u64(0).raw(&sockaddr(addr).emit_in6()).u32(id);
    let id = p.create(2, PortSpace::Tcp);
    assert_eq!(
        p.run(Cmd::BindIp, bind(id, "10.0.0.2:5")),
        Err(Errno(libc::EADDRNOTAVAIL))
    );
    assert_eq!(
        p.run(Cmd::BindIp, bind(id, "[fe80::1]:5000")),
        Err(Errno::INVAL),
        "no scope"
    );
}

#[test]
fn a_peer_is_resolved_when_its_next_hop_is() {
    let mut p = Program::new();
    let id = p.create(7, PortSpace::Tcp);
    p.log.take();
    let neighbour = |p: &mut Program, ticket, resolved| p.ucma.on_report(Report::Neighbour { ticket, resolved });
    p.resolve(id, "10.0.0.77:7471").unwrap();
    assert_eq!(p.log.take(), ["resolve 1 Some(2s)".to_owned() + " -> 1"]);
    assert!(p.event().is_none());
    let again = p.resolve(id, "10.0.0.77:7471").unwrap_err();
    assert_eq!(again, Errno::INVAL, "it is being resolved");
    assert_eq!(p.simple(Cmd::ResolveRoute, id, 2000).unwrap_err(), Errno::INVAL);
    neighbour(&mut p, 5, true);
    assert!(p.event().is_none(), "another query's");
    neighbour(&mut p, 1, false);
    assert_eq!(p.log.take(), ["end 1"]);
    assert_eq!(p.expect(EventType::AddrError).status.cast_signed(), -libc::ETIMEDOUT);
    p.resolve(id, "10.0.0.77:7471").unwrap();
    neighbour(&mut p, 1, true);
    assert!(p.event().is_none(), "the former query's");
    neighbour(&mut p, 2, true);
    p.expect(EventType::AddrResolved);
    p.simple(Cmd::ResolveRoute, id, 2000).unwrap();
    let other = p.create(8, PortSpace::Tcp);
    p.resolve(other, "10.0.0.77:7471").unwrap();
    p.log.take();
    p.destroy(other);
    assert_eq!(p.log.take(), ["end 3"], "it is cancelled");
    neighbour(&mut p, 3, true);
    p.expect(EventType::RouteResolved);
    assert!(p.event().is_none());
}

#[test]
fn the_probe_for_infiniband_addresses_succeeds() {
    let mut p = Program::new();
    let id = p.create(1, PortSpace::Ib);
    let ib = Addr::Ib(crate::rdmacm::addr::IbAddr {
        sid: 0x0106_0000,
        sid_mask: 0xffff_ffff_ffff_0000,
        ..Default::default()
    });
    let body = Bytes::default().u32(id).u16(48).u16(0).raw(&ib.emit());
    p.run(Cmd::Bind, body).unwrap();
}
