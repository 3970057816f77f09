//! librdmacm: connections and their events.

use std::{
    ffi::c_void,
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd as _, BorrowedFd},
    ptr,
    sync::Arc,
};

use libc::{sockaddr_storage, socklen_t};
use rdma_sys::{
    ibv_event_type, rdma_accept, rdma_ack_cm_event, rdma_bind_addr, rdma_cm_event, rdma_cm_event_type as kind,
    rdma_cm_id, rdma_conn_param, rdma_connect, rdma_create_event_channel, rdma_create_id, rdma_disconnect,
    rdma_establish, rdma_event_channel, rdma_free_devices, rdma_get_cm_event, rdma_get_devices, rdma_init_qp_attr,
    rdma_listen, rdma_notify, rdma_port_space, rdma_reject, rdma_resolve_addr, rdma_resolve_route, rdma_set_option,
};
use roce_verbs::{QpState, Qpn, provider::ConnParams};
use socket2::SockAddr;

use super::{
    attr::{Attributes, Reads},
    context::name_of,
    ffi::OPTION_TOS,
    object::{Owned, done, found},
};

/// Time limit of the kernel to resolve an address or a route, milliseconds.
const RESOLVE_MS: i32 = 2000;
/// Bits that some kernels set in the mask of attributes without meaning them, which librdmacm takes out as well.
const STRAY_BITS: i32 = 0xe0_0000;

/// Returns the parameters of a connect or an accept. The caller has checked the length of the private data.
fn conn_param(params: &ConnParams, reads: Reads, qpn: Qpn) -> rdma_conn_param {
    rdma_conn_param {
        private_data: params.private_data.as_ptr().cast(),
        private_data_len: params.private_data.len() as u8,
        responder_resources: reads.answered,
        initiator_depth: reads.sent,
        flow_control: 1,
        retry_count: params.retry_count,
        rnr_retry_count: params.rnr_retry_count,
        srq: 0,
        qp_num: qpn.value(),
    }
}

/// Event channel of connections.
pub(crate) struct EventChannel(Owned<rdma_event_channel>);

/// Event, which is acknowledged already.
pub(crate) struct News {
    pub(crate) kind: u32,
    pub(crate) status: i32,
    /// Token of the connection, or of the listener that a request is for.
    pub(crate) token: u64,
    /// The connection that a request makes.
    pub(crate) request: Option<CmId>,
    /// Private data of the peer, and what it sends and answers.
    pub(crate) private_data: Vec<u8>,
    pub(crate) reads: Reads,
}

impl EventChannel {
    pub(crate) fn create() -> io::Result<Arc<Self>> {
        // SAFETY: no arguments.
        let channel = Self(unsafe { Owned::new(rdma_create_event_channel()) }?);
        rustix::io::ioctl_fionbio(channel.fd(), true)?;
        Ok(Arc::new(channel))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel has the descriptor as long as it lives.
        unsafe { BorrowedFd::borrow_raw((*self.0.as_ptr()).fd) }
    }

    /// Returns the next event.
    pub(crate) fn event(self: &Arc<Self>) -> io::Result<Option<News>> {
        let mut event = ptr::null_mut();
        // SAFETY: room for a pointer.
        if !found(unsafe { rdma_get_cm_event(self.0.as_ptr(), &raw mut event) })? {
            return Ok(None);
        }
        // SAFETY: an event that was just taken. It is not used any more once it is acknowledged.
        unsafe {
            let news = self.read(event);
            rdma_ack_cm_event(event);
            news.map(Some)
        }
    }

    /// Copies an event out.
    ///
    /// # Safety
    /// It was taken and is not acknowledged.
    unsafe fn read(self: &Arc<Self>, event: *mut rdma_cm_event) -> io::Result<News> {
        // SAFETY: the caller's promise: the event and its ids live until it is acknowledged, a request's longer: it is ours. Events
        // of connections have the parameters of connections, and datagrams we have none.
        unsafe {
            let (kind, status, id) = ((*event).event, (*event).status, (*event).id);
            let is_request = kind == kind::RDMA_CM_EVENT_CONNECT_REQUEST && !id.is_null();
            let of = if is_request { (*event).listen_id } else { id };
            let mut news = News {
                kind,
                status,
                token: if of.is_null() { 0 } else { (*of).context as u64 },
                request: None,
                private_data: Vec::new(),
                reads: Reads::default(),
            };
            if is_request {
                news.request = Some(CmId {
                    raw: Owned::new(id)?,
                    _channel: self.clone(),
                });
            }
            if matches!(
                kind,
                kind::RDMA_CM_EVENT_CONNECT_REQUEST
                    | kind::RDMA_CM_EVENT_CONNECT_RESPONSE
                    | kind::RDMA_CM_EVENT_ESTABLISHED
                    | kind::RDMA_CM_EVENT_REJECTED
            ) {
                let conn = &raw const (*event).param.conn;
                let (data, len) = ((*conn).private_data, usize::from((*conn).private_data_len));
                if !data.is_null() {
                    news.private_data = std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec();
                }
                news.reads = Reads {
                    answered: (*conn).responder_resources,
                    sent: (*conn).initiator_depth,
                };
            }
            Ok(news)
        }
    }
}

/// Has librdmacm look which of the devices that it keeps open are dead. Returns `false` if there is no device at all: then it does not look.
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
/// the device's descriptors are replaced by those of /dev/null, which the library closes later.
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
        // SAFETY: the library has these open as long as the id lives, and no object on the device uses them any more.
        unsafe { libc::dup3(nothing.as_raw_fd(), fd, libc::O_CLOEXEC) };
    }
}

/// Connection or listener (`struct rdma_cm_id`).
pub(crate) struct CmId {
    raw: Owned<rdma_cm_id>,
    _channel: Arc<EventChannel>,
}

/// Returns an address of the C library; `None` of another family.
fn addr_of(raw: &sockaddr_storage) -> Option<SocketAddr> {
    // SAFETY: room for any address, which the storage of both is.
    let copied = unsafe {
        SockAddr::try_init(|storage, len| {
            storage.cast::<sockaddr_storage>().write(*raw);
            *len = size_of::<sockaddr_storage>() as socklen_t;
            Ok(())
        })
    };
    copied.ok()?.1.as_socket()
}

impl CmId {
    /// Creates one of TCP's port space, whose events carry the token.
    pub(crate) fn create(channel: &Arc<EventChannel>, token: u64) -> io::Result<Self> {
        let mut id = ptr::null_mut();
        let tcp = rdma_port_space::RDMA_PS_TCP;
        // SAFETY: the channel lives, there is room for a pointer, and the token is a number.
        done(unsafe { rdma_create_id(channel.0.as_ptr(), &raw mut id, token as *mut c_void, tcp) })?;
        Ok(Self {
            // SAFETY: the id is new.
            raw: unsafe { Owned::new(id) }?,
            _channel: channel.clone(),
        })
    }

    fn as_ptr(&self) -> *mut rdma_cm_id {
        self.raw.as_ptr()
    }

    /// Makes its events carry another token.
    pub(crate) fn set_token(&mut self, token: u64) {
        // SAFETY: the id lives, and is borrowed mutably; only the thread that takes events reads the context.
        unsafe { (*self.as_ptr()).context = token as *mut c_void };
    }

    /// Binds it to an address, and so to a device.
    pub(crate) fn bind(&self, addr: SocketAddr) -> io::Result<()> {
        let addr = SockAddr::from(addr);
        // SAFETY: the id lives, and so does the address, which is only read.
        done(unsafe { rdma_bind_addr(self.as_ptr(), addr.as_ptr().cast_mut().cast()) })
    }

    /// Listens at an address.
    pub(crate) fn listen(&self, addr: SocketAddr, backlog: u32) -> io::Result<()> {
        self.bind(addr)?;
        // SAFETY: the id lives.
        done(unsafe { rdma_listen(self.as_ptr(), i32::try_from(backlog).unwrap_or(i32::MAX)) })
    }

    /// Starts to resolve the device that leads to a peer.
    pub(crate) fn resolve_addr(&self, src: IpAddr, dst: SocketAddr) -> io::Result<()> {
        let [src, dst] = [SocketAddr::new(src, 0), dst].map(SockAddr::from);
        let [from, to] = [&src, &dst].map(|addr| addr.as_ptr().cast_mut());
        // SAFETY: the id lives, and so do the addresses, which are only read.
        done(unsafe { rdma_resolve_addr(self.as_ptr(), from.cast(), to.cast(), RESOLVE_MS) })
    }

    /// Sets the type of service of the connection that will be requested.
    pub(crate) fn set_tos(&self, mut tos: u8) -> io::Result<()> {
        let (level, option) = OPTION_TOS;
        // SAFETY: the id lives; the option is one byte.
        done(unsafe { rdma_set_option(self.as_ptr(), level, option, (&raw mut tos).cast(), 1) })
    }

    /// Starts to resolve the path on that device.
    pub(crate) fn resolve_route(&self) -> io::Result<()> {
        // SAFETY: the id lives.
        done(unsafe { rdma_resolve_route(self.as_ptr(), RESOLVE_MS) })
    }

    pub(crate) fn connect(&self, params: &ConnParams, reads: Reads, qpn: Qpn) -> io::Result<()> {
        let mut param = conn_param(params, reads, qpn);
        // SAFETY: the id lives, and so do the parameters.
        done(unsafe { rdma_connect(self.as_ptr(), &raw mut param) })
    }

    pub(crate) fn accept(&self, params: &ConnParams, reads: Reads, qpn: Qpn) -> io::Result<()> {
        let mut param = conn_param(params, reads, qpn);
        // SAFETY: as above.
        done(unsafe { rdma_accept(self.as_ptr(), &raw mut param) })
    }

    /// Confirms the peer's accept.
    pub(crate) fn establish(&self) -> io::Result<()> {
        // SAFETY: the id lives.
        done(unsafe { rdma_establish(self.as_ptr()) })
    }

    /// Rejects a request, or an accept.
    pub(crate) fn reject(&self, private_data: &[u8]) -> io::Result<()> {
        let len = u8::try_from(private_data.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the id lives, and so does the data.
        done(unsafe { rdma_reject(self.as_ptr(), private_data.as_ptr().cast(), len) })
    }

    pub(crate) fn disconnect(&self) -> io::Result<()> {
        // SAFETY: the id lives.
        done(unsafe { rdma_disconnect(self.as_ptr()) })
    }

    /// Reports that a message has arrived before the peer's confirmation: it need not be waited for.
    pub(crate) fn notify_established(&self) -> io::Result<()> {
        // SAFETY: the id lives.
        done(unsafe { rdma_notify(self.as_ptr(), ibv_event_type::IBV_EVENT_COMM_EST) })
    }

    /// Returns the attributes that the connection manager has for a queue pair.
    pub(super) fn attributes(&self, state: QpState) -> io::Result<Attributes> {
        let mut out = Attributes::of(state);
        // SAFETY: the id lives, and there is room for attributes and mask.
        done(unsafe { rdma_init_qp_attr(self.as_ptr(), &raw mut out.raw, &raw mut out.mask) })?;
        // The structure that comes back is not that which went.
        out.raw.qp_state = state as u32;
        out.mask &= !STRAY_BITS;
        Ok(out)
    }

    /// Returns the device that it is on, once it is on one.
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
