//! JOIN_MCAST and LEAVE_MCAST.

use std::os::fd::RawFd;

use super::{
    Errno, Result,
    abi::{AhAttr, EventType},
    addr::{self, Addr},
    backend::Backend,
    context::Member,
    event::{Event, Param},
    query::PORT,
    state::Op,
    ucma::Ucma,
};

/// The queue pair that messages to a group name.
const MULTICAST_QPN: u32 = 0x00ff_ffff;
/// `IPV6_DEFAULT_HOPLIMIT`, which the kernel takes for both IP versions.
const HOP_LIMIT: u8 = 64;
/// `RDMA_MC_JOIN_FLAG_*`.
const FULL_MEMBER: u16 = 0;
const SEND_ONLY: u16 = 1;

impl<B: Backend> Ucma<B> {
    /// Joins a group (`rdma_join_multicast`). Returns the membership's number; MULTICAST_JOIN follows.
    ///
    /// # Errors
    /// EINVAL for connected ids, before the local address is known, or when the address is not a group's.
    pub(crate) fn join(&mut self, fd: RawFd, id: u32, uid: u64, group: Addr, flags: u16) -> Result<u32> {
        let send_only = match flags {
            FULL_MEMBER => false,
            SEND_ONLY => true,
            _ => return Err(Errno::INVAL),
        };
        let (ctx, backend) = self.get_with(fd, id)?;
        let cma_dev = ctx.cma_dev()?;
        ctx.check(Op::Join)?;
        let (Some(local), Some(group)) = (ctx.local.ip(), group.ip()) else {
            return Err(Errno::INVAL);
        };
        let group = group.ip();
        if !ctx.service.is_datagram() || !group.is_multicast() || local.is_ipv4() != group.is_ipv4() {
            return Err(Errno::INVAL);
        }
        let membership = backend.join(local.ip(), group, send_only)?;
        let param = Param::Ud {
            qpn: MULTICAST_QPN,
            qkey: *ctx.qkey.insert(ctx.qkey()),
            ah: AhAttr {
                dgid: addr::gid(group),
                sgid_index: cma_dev.gid_index,
                hop_limit: HOP_LIMIT,
                traffic_class: ctx.tos,
                is_global: 1,
                port_num: PORT,
                ..AhAttr::default()
            },
        };
        let member = self.add_member(Member {
            id,
            uid,
            reported: 0,
            _membership: membership,
        });
        self.report_member(member, &Event::new(EventType::MulticastJoin).with(param));
        Ok(member)
    }

    /// Leaves a group and returns how many of the membership's events were taken.
    ///
    /// # Errors
    /// ENOENT when there is no such membership, EINVAL when it is another channel's.
    pub(crate) fn leave(&mut self, fd: RawFd, member: u32) -> Result<u32> {
        let id = self.member(member)?.id;
        self.get(fd, id)?;
        self.retract(fd, |e| e.member == Some(member));
        Ok(self.remove_member(member).reported)
    }
}
