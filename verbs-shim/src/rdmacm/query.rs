//! Answers to QUERY and QUERY_ROUTE, and addresses and paths in events.

use roce::Mtu;
use roce_port::cm::cma::{self, ServiceId};

use super::{
    Errno, Result,
    abi::{
        AhAttr, PATH_FLAGS, PackedPath, PathRecData, QueryAddrResp, QueryPathResp, QueryRouteResp, UserPathRec, zeroed,
    },
    addr::{Addr, IbAddr},
    backend::Backend,
    context::Context,
};

/// The one port of a device.
pub(crate) const PORT: u8 = 1;
/// The default partition, in either byte order.
const PKEY: u16 = 0xffff;
/// Hop limit of paths: what the kernel's interfaces have.
const HOP_LIMIT: u8 = 64;
/// `CMA_IBOE_PACKET_LIFETIME`.
const PACKET_LIFE_TIME: u8 = 18;
/// Selector "exactly" (`IB_SA_EQ`).
const EXACTLY: u8 = 2;

/// The path of an id, as `cma_resolve_iboe_route` makes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Path {
    sgid: [u8; 16],
    dgid: [u8; 16],
    flow_label: u32,
    traffic_class: u8,
    hop_limit: u8,
    mtu: Mtu,
    packet_life_time: u8,
    service_id: u64,
    sgid_index: u8,
}

impl Path {
    /// The path between the id's addresses.
    ///
    /// # Errors
    /// EINVAL before they are known.
    pub(crate) fn of<B: Backend>(ctx: &Context<B>) -> Result<Self> {
        let (local, remote) = ctx.ips()?;
        let cma_dev = ctx.cma_dev()?;
        let life_time = ctx.ack_timeout.filter(|t| *t > 0).map_or(PACKET_LIFE_TIME, |t| t - 1);
        Ok(Self {
            sgid: ctx.local.gid(),
            dgid: ctx.remote.gid(),
            flow_label: cma::flow_label(local.port(), remote.port()),
            traffic_class: ctx.path.map_or(ctx.tos, |p| p.av.traffic_class),
            hop_limit: ctx.path.map_or(HOP_LIMIT, |p| p.av.hop_limit),
            mtu: ctx.path.map_or(cma_dev.mtu, |p| p.mtu),
            packet_life_time: life_time,
            service_id: ServiceId::new(ctx.space, remote.port()).0,
            sgid_index: cma_dev.gid_index,
        })
    }

    /// As an address handle's attributes.
    pub(crate) fn ah(&self) -> AhAttr {
        AhAttr {
            dgid: self.dgid,
            flow_label: self.flow_label,
            sgid_index: self.sgid_index,
            hop_limit: self.hop_limit,
            traffic_class: self.traffic_class,
            is_global: 1,
            port_num: PORT,
            ..AhAttr::default()
        }
    }

    fn user_record(&self) -> UserPathRec {
        UserPathRec {
            dgid: self.dgid,
            sgid: self.sgid,
            flow_label: self.flow_label.to_be_bytes(),
            reversible: 1,
            mtu: self.mtu as u32,
            pkey: PKEY,
            hop_limit: self.hop_limit,
            traffic_class: self.traffic_class,
            numb_path: 1,
            mtu_selector: EXACTLY,
            rate_selector: EXACTLY,
            packet_life_time_selector: EXACTLY,
            packet_life_time: self.packet_life_time,
            ..zeroed()
        }
    }

    fn packed_record(&self) -> PackedPath {
        PackedPath {
            service_id: self.service_id.to_be_bytes(),
            dgid: self.dgid,
            sgid: self.sgid,
            flow_label_hop_limit: (self.flow_label << 8 | u32::from(self.hop_limit)).to_be_bytes(),
            tclass: self.traffic_class,
            reversible_numpath: 1 << 7 | 1,
            pkey: PKEY,
            mtu: EXACTLY << 6 | self.mtu as u8,
            rate: EXACTLY << 6,
            packet_life_time: EXACTLY << 6 | self.packet_life_time,
            ..zeroed()
        }
    }
}

/// QUERY_ROUTE.
pub(crate) fn route<B: Backend>(ctx: &Context<B>) -> QueryRouteResp {
    let mut resp: QueryRouteResp = zeroed();
    resp.src_addr = ctx.local.emit_in6();
    resp.dst_addr = ctx.remote.emit_in6();
    let Some(cma_dev) = ctx.cma_dev else { return resp };
    resp.node_guid = cma_dev.guid;
    resp.ibdev_index = cma_dev.index;
    resp.port_num = PORT;
    match Path::of(ctx) {
        Ok(path) if ctx.is_routed() => {
            resp.num_paths = 1;
            resp.ib_route[0] = path.user_record();
        }
        _ => {
            resp.ib_route[0].dgid = ctx.remote.gid();
            resp.ib_route[0].sgid = ctx.local.gid();
            resp.ib_route[0].pkey = PKEY;
        }
    }
    resp
}

fn device<B: Backend>(ctx: &Context<B>) -> QueryAddrResp {
    let mut resp: QueryAddrResp = zeroed();
    if let Some(cma_dev) = ctx.cma_dev {
        resp.node_guid = cma_dev.guid;
        resp.ibdev_index = cma_dev.index;
        resp.port_num = PORT;
        resp.pkey = PKEY;
    }
    resp
}

fn put(resp: &mut QueryAddrResp, local: &Addr, remote: &Addr) {
    resp.src_size = local.size() as u16;
    resp.src_addr = local.emit();
    resp.dst_size = remote.size() as u16;
    resp.dst_addr = remote.emit();
}

/// QUERY for addresses.
pub(crate) fn addresses<B: Backend>(ctx: &Context<B>) -> QueryAddrResp {
    let mut resp = device(ctx);
    put(&mut resp, &ctx.local, &ctx.remote);
    resp
}

/// QUERY for GIDs: both addresses as InfiniBand has them.
pub(crate) fn gids<B: Backend>(ctx: &Context<B>) -> QueryAddrResp {
    let mut resp = device(ctx);
    let ib = |addr: &Addr| match addr {
        Addr::Ib(_) => *addr,
        Addr::Ip(ip) => Addr::Ib(IbAddr {
            pkey: resp.pkey,
            gid: if ctx.cma_dev.is_some() { addr.gid() } else { [0; 16] },
            sid: ServiceId::new(ctx.space, ip.port()).0,
            sid_mask: 0,
        }),
    };
    let (local, remote) = (ib(&ctx.local), ib(&ctx.remote));
    put(&mut resp, &local, &remote);
    resp
}

/// QUERY for paths: the head and what fits of the paths.
pub(crate) fn paths<B: Backend>(ctx: &Context<B>, room: usize) -> Result<(QueryPathResp, Option<PathRecData>)> {
    if room < size_of::<QueryPathResp>() {
        return Err(Errno(libc::ENOSPC));
    }
    let mut head: QueryPathResp = zeroed();
    let path = Path::of(ctx).ok().filter(|_| ctx.is_routed());
    head.num_paths = path.is_some().into();
    let fits = room >= size_of::<QueryPathResp>() + size_of::<PathRecData>();
    let data = path.filter(|_| fits).map(|p| PathRecData {
        flags: PATH_FLAGS,
        reserved: 0,
        path: p.packed_record(),
    });
    Ok((head, data))
}
