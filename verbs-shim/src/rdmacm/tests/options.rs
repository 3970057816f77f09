//! Options, listeners of both IP versions, and commands that are refused.

use super::*;

#[test]
fn options() {
    let mut p = Program::new();
    let id = p.create(1, PortSpace::Tcp);
    let option =
        |level: u32, name: u32, value: u64, len: u32| Bytes::default().u64(value).u32(id).u32(level).u32(name).u32(len);
    p.run(Cmd::SetOption, option(0, abi::option::OPTION_ID_TOS, 0x20, 1))
        .unwrap();
    p.run(Cmd::SetOption, option(0, abi::option::OPTION_ID_ACK_TIMEOUT, 21, 1))
        .unwrap();
    assert_eq!(
        p.run(Cmd::SetOption, option(0, abi::option::OPTION_ID_ACK_TIMEOUT, 40, 1)),
        Err(Errno::INVAL)
    );
    assert_eq!(
        p.run(Cmd::SetOption, option(0, abi::option::OPTION_ID_TOS, 1, 4)),
        Err(Errno::INVAL)
    );
    assert_eq!(p.run(Cmd::SetOption, option(0, 99, 1, 4)), Err(Errno::NOSYS));
    p.resolve(id, "10.0.0.9:7471").unwrap();
    p.simple(Cmd::ResolveRoute, id, 0).unwrap();
    p.connect(id, b"").unwrap();
    p.report(1, reply(b""));
    assert_eq!(p.qp_attr(id, QpState::Rts).unwrap().timeout, 21);
}

/// `rdma_set_reuseaddr`, `rdma_set_afonly` and `rdma_set_ack_timeout` of the kernel.
#[test]
fn when_options_may_be_set() {
    let mut p = Program::new();
    let option =
        |id: u32, name: u32, value: u64, len: u32| Bytes::default().u64(value).u32(id).u32(0).u32(name).u32(len);
    let bind = |id: u32| {
        Bytes::default()
            .u64(0)
            .raw(&sockaddr("10.0.0.1:7471").emit_in6())
            .u32(id)
    };
    let (afonly, reuse) = (abi::option::OPTION_ID_AFONLY, abi::option::OPTION_ID_REUSEADDR);
    let id = p.create(1, PortSpace::Tcp);
    p.run(Cmd::BindIp, bind(id)).unwrap();
    // A bound id may still be restricted to its family; sharing of its port may be turned on, but not off.
    p.run(Cmd::SetOption, option(id, afonly, 1, 4)).unwrap();
    assert_eq!(p.run(Cmd::SetOption, option(id, reuse, 0, 4)), Err(Errno::INVAL));
    p.run(Cmd::SetOption, option(id, reuse, 1, 4)).unwrap();
    p.simple(Cmd::Listen, id, 0).unwrap();
    assert_eq!(p.run(Cmd::SetOption, option(id, afonly, 1, 4)), Err(Errno::INVAL));
    assert_eq!(p.run(Cmd::SetOption, option(id, reuse, 1, 4)), Err(Errno::INVAL));
    let other = p.create(2, PortSpace::Tcp);
    p.run(Cmd::SetOption, option(other, reuse, 1, 4)).unwrap();
    assert_eq!(
        p.run(Cmd::BindIp, bind(other)),
        Err(Errno(libc::EADDRINUSE)),
        "a listener's port is its own"
    );
    // Unacknowledged services have no timeout.
    let timeout = |id: u32| option(id, abi::option::OPTION_ID_ACK_TIMEOUT, 14, 1);
    let datagrams = p.create(3, PortSpace::Udp);
    assert_eq!(p.run(Cmd::SetOption, timeout(datagrams)), Err(Errno::INVAL));
    let unreliable = Bytes::default()
        .u64(4)
        .u64(1)
        .u16(PortSpace::Ib as u16)
        .raw(&[3, 0, 0, 0, 0, 0]);
    let unreliable = p.number(Cmd::CreateId, unreliable);
    assert_eq!(p.run(Cmd::SetOption, timeout(unreliable)), Err(Errno::INVAL));
}

/// Servers that take requests of both IP versions with a listener for each.
#[test]
fn each_ip_version_has_its_listener() {
    let mut p = Program::new();
    let listen = |p: &mut Program, uid: u64, addr: &str| {
        let id = p.create(uid, PortSpace::Tcp);
        let option = Bytes::default()
            .u64(1)
            .u32(id)
            .u32(0)
            .u32(abi::option::OPTION_ID_AFONLY)
            .u32(4);
        p.run(Cmd::SetOption, option).unwrap();
        let bind = Bytes::default().u64(0).raw(&sockaddr(addr).emit_in6()).u32(id);
        p.run(Cmd::BindIp, bind)?;
        p.simple(Cmd::Listen, id, 1)
    };
    listen(&mut p, 1, "0.0.0.0:7471").unwrap();
    listen(&mut p, 2, "[::]:7471").unwrap();
    assert!(listen(&mut p, 3, "10.0.0.1:7471").is_err());
    let kept = p.log.take();
    for version in ["0.0.0.0", "::"] {
        for what in ["reserve", "listen"] {
            let wanted = format!("{what} Tcp 7471 Some({version})");
            assert!(kept.iter().any(|l| l.starts_with(&wanted)), "{wanted}: {kept:?}");
        }
    }
}

/// Random commands are refused or executed without a panic.
#[test]
fn broken_commands_are_refused() {
    let mut p = Program::new();
    let mut seed = 1u32;
    for code in 0..24u32 {
        for len in (0..320usize).step_by(4) {
            let mut written = Bytes::default().u32(code).u16(len as u16).u16((len * 3) as u16).0;
            for _ in 0..len {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // Small numbers hit ids, families and lengths more often.
                written.push(if seed >> 31 == 0 { 0 } else { (seed >> 24) as u8 & 0x1f });
            }
            match Command::parse(p.fd, &written) {
                Ok(c) if c.cmd != Cmd::GetEvent => {
                    let _ = p.ucma.execute(&c, &|_, len| Ok(vec![0; len]));
                }
                _ => {}
            }
            assert!(Command::parse(p.fd, &written[..written.len().min(len)]).is_err() || len < 8);
        }
    }
    assert_eq!(Command::parse(p.fd, &[0; 7]).map(|c| c.room), Err(Errno::INVAL));
}
