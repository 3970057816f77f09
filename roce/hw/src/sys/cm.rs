//! librdmacm: connections and their events.

use std::{
    ffi::c_void,
    io, mem,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6},
    os::fd::{AsRawFd as _, BorrowedFd},
    ptr::{self, NonNull},
    sync::Arc,
};

use libc::{sockaddr_in, sockaddr_in6, sockaddr_storage};
use rdma_sys::{
    ibv_event_type, rdma_accept, rdma_ack_cm_event, rdma_bind_addr, rdma_cm_event, rdma_cm_id, rdma_conn_param,
    rdma_connect, rdma_create_event_channel, rdma_create_id, rdma_destroy_event_channel, rdma_destroy_id,
    rdma_disconnect, rdma_establish, rdma_event_channel, rdma_free_devices, rdma_get_cm_event, rdma_get_devices,
    rdma_init_qp_attr, rdma_listen, rdma_notify, rdma_port_space, rdma_reject, rdma_resolve_addr, rdma_resolve_route,
    rdma_set_option,
};

use super::{Attributes, State, context::name_of, done, ffi::OPTION_TOS, made, set_nonblocking, unless_empty};

/// How long the kernel looks for a way.
const RESOLVE_MS: i32 = 2000;
/// Bits that some kernels set in the mask of attributes without meaning them, which librdmacm takes out as well.
const STRAY_BITS: i32 = 0xe0_0000;

/// `enum rdma_cm_event_type`.
pub(crate) mod kind {
    pub(crate) use rdma_sys::rdma_cm_event_type::{
        RDMA_CM_EVENT_ADDR_CHANGE as ADDR_CHANGE, RDMA_CM_EVENT_ADDR_ERROR as ADDR_ERROR,
        RDMA_CM_EVENT_ADDR_RESOLVED as ADDR_RESOLVED, RDMA_CM_EVENT_CONNECT_ERROR as CONNECT_ERROR,
        RDMA_CM_EVENT_CONNECT_REQUEST as CONNECT_REQUEST, RDMA_CM_EVENT_CONNECT_RESPONSE as CONNECT_RESPONSE,
        RDMA_CM_EVENT_DEVICE_REMOVAL as DEVICE_REMOVAL, RDMA_CM_EVENT_DISCONNECTED as DISCONNECTED,
        RDMA_CM_EVENT_ESTABLISHED as ESTABLISHED, RDMA_CM_EVENT_REJECTED as REJECTED,
        RDMA_CM_EVENT_ROUTE_ERROR as ROUTE_ERROR, RDMA_CM_EVENT_ROUTE_RESOLVED as ROUTE_RESOLVED,
        RDMA_CM_EVENT_TIMEWAIT_EXIT as TIMEWAIT_EXIT, RDMA_CM_EVENT_UNREACHABLE as UNREACHABLE,
    };
}

/// Event channel of connections.
#[derive(Debug)]
pub(crate) struct EventChannel(NonNull<rdma_event_channel>);

// SAFETY: librdmacm lets any thread use a channel, and several at a time.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

/// Parameters of a connect or an accept (`struct rdma_conn_param`).
#[derive(Debug)]
pub(crate) struct Offer<'a> {
    pub(crate) private_data: &'a [u8],
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) qpn: u32,
}

impl Offer<'_> {
    fn raw(&self) -> rdma_conn_param {
        rdma_conn_param {
            private_data: self.private_data.as_ptr().cast(),
            // The caller has checked it.
            private_data_len: self.private_data.len() as u8,
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            flow_control: 1,
            retry_count: self.retry_count,
            rnr_retry_count: self.rnr_retry_count,
            srq: 0,
            qp_num: self.qpn,
        }
    }
}

/// Peer's part of an event.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    pub(crate) private_data: Vec<u8>,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
}

/// An event, which is acknowledged already.
#[derive(Debug)]
pub(crate) struct News {
    pub(crate) kind: u32,
    pub(crate) status: i32,
    /// Of the connection, or of the listener that a request is for.
    pub(crate) token: u64,
    /// The connection that a request makes.
    pub(crate) request: Option<CmId>,
    pub(crate) reply: Reply,
}

impl News {
    /// Returns whether it reports that a device is gone.
    pub(crate) fn is_removal(&self) -> bool {
        self.kind == kind::DEVICE_REMOVAL
    }
}

impl EventChannel {
    pub(crate) fn create() -> io::Result<Arc<Self>> {
        // SAFETY: no arguments.
        let channel = Self(made(unsafe { rdma_create_event_channel() })?);
        // SAFETY: the channel was just made.
        set_nonblocking(unsafe { (*channel.0.as_ptr()).fd })?;
        Ok(Arc::new(channel))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel has the descriptor as long as it lives.
        unsafe { BorrowedFd::borrow_raw((*self.0.as_ptr()).fd) }
    }

    /// The next event.
    pub(crate) fn event(self: &Arc<Self>) -> io::Result<Option<News>> {
        let mut event = ptr::null_mut();
        // SAFETY: room for a pointer.
        let got = done(unsafe { rdma_get_cm_event(self.0.as_ptr(), &raw mut event) });
        if unless_empty(got)?.is_none() {
            return Ok(None);
        }
        // SAFETY: an event that was just taken. It is not used any more once it is acknowledged.
        unsafe {
            let news = self.read(event);
            rdma_ack_cm_event(event);
            Ok(Some(news))
        }
    }

    /// Copies an event out.
    ///
    /// # Safety
    /// It was taken and is not acknowledged.
    unsafe fn read(self: &Arc<Self>, event: *mut rdma_cm_event) -> News {
        // SAFETY: the caller's promise: the event and its ids live until it is acknowledged, a request's longer: it is ours. Events
        // of connections have the parameters of connections, and datagrams we have none.
        unsafe {
            let (kind, status, id) = ((*event).event, (*event).status, (*event).id);
            let request = (kind == kind::CONNECT_REQUEST).then(|| NonNull::new(id)).flatten();
            let of = if request.is_some() { (*event).listen_id } else { id };
            let token = if of.is_null() { 0 } else { (*of).context as u64 };
            let says = matches!(
                kind,
                kind::CONNECT_REQUEST | kind::CONNECT_RESPONSE | kind::ESTABLISHED | kind::REJECTED
            );
            let mut reply = Reply::default();
            if says {
                let conn = &raw const (*event).param.conn;
                let (data, len) = ((*conn).private_data, usize::from((*conn).private_data_len));
                if !data.is_null() {
                    reply.private_data = std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec();
                }
                reply.responder_resources = (*conn).responder_resources;
                reply.initiator_depth = (*conn).initiator_depth;
            }
            let request = request.map(|raw| CmId {
                raw,
                _channel: self.clone(),
            });
            News {
                kind,
                status,
                token,
                request,
                reply,
            }
        }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: its connections keep it, so none is left.
        unsafe { rdma_destroy_event_channel(self.0.as_ptr()) };
    }
}

/// Has librdmacm look which of the devices that it keeps open are dead. False: there is no device at all, and it does not look.
fn look_for_dead_devices() -> bool {
    let mut count = 0;
    // SAFETY: the list is made by the call, and given back.
    unsafe {
        let list = rdma_get_devices(&raw mut count);
        if !list.is_null() {
            rdma_free_devices(list);
        }
        !list.is_null() && count > 0
    }
}

/// Has librdmacm close a device that is gone: of those that use it there this is the last.
///
/// The library keeps devices open, and closes the dead ones when it looks; but it does not look if there is no device at all. Then
/// the device's descriptors are exchanged for such as do nothing, which the library closes one day.
pub(crate) fn close_dead_device(last: CmId) {
    // SAFETY: the id lives, and with it the library's context of the device.
    let fds = unsafe {
        let context = (*last.as_ptr()).verbs;
        (!context.is_null()).then(|| [(*context).cmd_fd, (*context).async_fd])
    };
    if look_for_dead_devices() {
        drop(last);
        look_for_dead_devices();
        return;
    }
    let (Some(fds), Ok(nothing)) = (fds, std::fs::File::open("/dev/null")) else {
        return;
    };
    for fd in fds {
        // SAFETY: the library has these open as long as the id lives, and nobody uses what they were: there is nothing on it.
        unsafe { libc::dup3(nothing.as_raw_fd(), fd, libc::O_CLOEXEC) };
    }
}

/// A connection or a listener (`struct rdma_cm_id`).
#[derive(Debug)]
pub(crate) struct CmId {
    raw: NonNull<rdma_cm_id>,
    _channel: Arc<EventChannel>,
}

// SAFETY: librdmacm lets any thread use an id; whoever has it last destroys it.
unsafe impl Send for CmId {}

/// An address as the C library has it.
fn raw_addr(addr: SocketAddr) -> sockaddr_storage {
    // SAFETY: plain data; the structure has room for an address of either family, and is aligned for it.
    unsafe {
        let mut out: sockaddr_storage = mem::zeroed();
        match addr {
            SocketAddr::V4(v4) => {
                let to = (&raw mut out).cast::<sockaddr_in>();
                (*to).sin_family = libc::AF_INET as libc::sa_family_t;
                (*to).sin_port = v4.port().to_be();
                (*to).sin_addr.s_addr = u32::from(*v4.ip()).to_be();
            }
            SocketAddr::V6(v6) => {
                let to = (&raw mut out).cast::<sockaddr_in6>();
                (*to).sin6_family = libc::AF_INET6 as libc::sa_family_t;
                (*to).sin6_port = v6.port().to_be();
                (*to).sin6_addr.s6_addr = v6.ip().octets();
                (*to).sin6_scope_id = v6.scope_id();
            }
        }
        out
    }
}

/// An address of the C library; `None` of another family.
fn addr_of(raw: &sockaddr_storage) -> Option<SocketAddr> {
    // SAFETY: the family says which structure it is; both fit.
    unsafe {
        match i32::from(raw.ss_family) {
            libc::AF_INET => {
                let v4 = &*ptr::from_ref(raw).cast::<sockaddr_in>();
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Some(SocketAddr::new(IpAddr::V4(ip), u16::from_be(v4.sin_port)))
            }
            libc::AF_INET6 => {
                let v6 = &*ptr::from_ref(raw).cast::<sockaddr_in6>();
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                Some(SocketAddrV6::new(ip, u16::from_be(v6.sin6_port), 0, v6.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}

impl CmId {
    /// A new one of TCP's port space, whose events carry the token.
    pub(crate) fn create(channel: &Arc<EventChannel>, token: u64) -> io::Result<Self> {
        let mut id = ptr::null_mut();
        let tcp = rdma_port_space::RDMA_PS_TCP;
        // SAFETY: the channel lives, there is room for a pointer, and the token is a number.
        done(unsafe { rdma_create_id(channel.0.as_ptr(), &raw mut id, token as *mut c_void, tcp) })?;
        Ok(Self {
            raw: made(id)?,
            _channel: channel.clone(),
        })
    }

    fn as_ptr(&self) -> *mut rdma_cm_id {
        self.raw.as_ptr()
    }

    /// Its events carry another token from now on.
    pub(crate) fn set_token(&self, token: u64) {
        // SAFETY: the id lives; only the thread that takes events reads it.
        unsafe { (*self.as_ptr()).context = token as *mut c_void };
    }

    /// Binds it to an address, and so to a device.
    pub(crate) fn bind(&self, addr: SocketAddr) -> io::Result<()> {
        let mut addr = raw_addr(addr);
        // SAFETY: the id lives, and so does the address.
        done(unsafe { rdma_bind_addr(self.as_ptr(), (&raw mut addr).cast()) })
    }

    pub(crate) fn listen(&self, addr: SocketAddr, backlog: u32) -> io::Result<()> {
        let mut addr = raw_addr(addr);
        let backlog = i32::try_from(backlog).unwrap_or(i32::MAX);
        // SAFETY: the id lives, and so does the address.
        unsafe {
            done(rdma_bind_addr(self.as_ptr(), (&raw mut addr).cast()))?;
            done(rdma_listen(self.as_ptr(), backlog))
        }
    }

    /// Looks for the device that leads to a peer.
    pub(crate) fn resolve_addr(&self, src: Option<IpAddr>, dst: SocketAddr) -> io::Result<()> {
        let mut src = src.map(|ip| raw_addr(SocketAddr::new(ip, 0)));
        let mut dst = raw_addr(dst);
        let src = src.as_mut().map_or(ptr::null_mut(), |src| ptr::from_mut(src).cast());
        // SAFETY: the id lives, and so do the addresses.
        done(unsafe { rdma_resolve_addr(self.as_ptr(), src, (&raw mut dst).cast(), RESOLVE_MS) })
    }

    /// Type of service of the connection that will be asked for.
    pub(crate) fn set_tos(&self, mut tos: u8) -> io::Result<()> {
        let (level, option) = OPTION_TOS;
        // SAFETY: the id lives; the option is one byte.
        done(unsafe { rdma_set_option(self.as_ptr(), level, option, (&raw mut tos).cast(), 1) })
    }

    /// Looks for the path on that device.
    pub(crate) fn resolve_route(&self) -> io::Result<()> {
        // SAFETY: the id lives.
        done(unsafe { rdma_resolve_route(self.as_ptr(), RESOLVE_MS) })
    }

    pub(crate) fn connect(&self, offer: &Offer<'_>) -> io::Result<()> {
        let mut param = offer.raw();
        // SAFETY: the id lives, and so do the parameters.
        done(unsafe { rdma_connect(self.as_ptr(), &raw mut param) })
    }

    pub(crate) fn accept(&self, offer: &Offer<'_>) -> io::Result<()> {
        let mut param = offer.raw();
        // SAFETY: as above.
        done(unsafe { rdma_accept(self.as_ptr(), &raw mut param) })
    }

    /// Confirms the peer's accept.
    pub(crate) fn establish(&self) -> io::Result<()> {
        // SAFETY: the id lives.
        done(unsafe { rdma_establish(self.as_ptr()) })
    }

    /// Refuses a request, or an accept.
    pub(crate) fn reject(&self, private_data: &[u8]) -> io::Result<()> {
        let len = u8::try_from(private_data.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the id lives, and so does the data.
        done(unsafe { rdma_reject(self.as_ptr(), private_data.as_ptr().cast(), len) })
    }

    pub(crate) fn disconnect(&self) -> io::Result<()> {
        // SAFETY: the id lives.
        done(unsafe { rdma_disconnect(self.as_ptr()) })
    }

    /// A message has arrived before the peer's confirmation: it need not be waited for.
    pub(crate) fn peer_talks(&self) -> io::Result<()> {
        // SAFETY: the id lives.
        done(unsafe { rdma_notify(self.as_ptr(), ibv_event_type::IBV_EVENT_COMM_EST) })
    }

    /// Returns the attributes that the connection manager has for a queue pair.
    pub(crate) fn attributes(&self, state: State) -> io::Result<Attributes> {
        let mut out = Attributes::of(state);
        // SAFETY: the id lives, and there is room for attributes and mask.
        done(unsafe { rdma_init_qp_attr(self.as_ptr(), &raw mut out.raw, &raw mut out.mask) })?;
        // The structure that comes back is not that which went.
        out.raw.qp_state = state as u32;
        out.mask &= !STRAY_BITS;
        Ok(out)
    }

    /// The device that it is on, once it is on one.
    pub(crate) fn device(&self) -> Option<String> {
        // SAFETY: the id lives, and with it the context that librdmacm has of the device.
        unsafe {
            let verbs = (*self.as_ptr()).verbs;
            (!verbs.is_null()).then(|| name_of((*verbs).device))
        }
    }

    pub(crate) fn local_addr(&self) -> Option<SocketAddr> {
        // SAFETY: the id lives; the storage is as large as any address.
        addr_of(unsafe { &(*self.as_ptr()).route.addr.src_addr_union.src_storage })
    }

    pub(crate) fn peer_addr(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        addr_of(unsafe { &(*self.as_ptr()).route.addr.dst_addr_union.dst_storage })
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        // SAFETY: nobody else has it, and its events are acknowledged as they are taken, for which this waits.
        if let Err(e) = done(unsafe { rdma_destroy_id(self.as_ptr()) }) {
            tracing::warn!("destroying a connection failed: {e}");
        }
    }
}
