//! Commands: from what librdmacm wrote to what it gets back.

use std::{os::fd::RawFd, time::Duration};

use roce_port::cm::{ConnTransport, cma::PortSpace};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{
    Errno, Result,
    abi::{self, Cmd, Number, option},
    addr::{self, Addr},
    backend::Backend,
    context::{Context, Service},
    event::Event,
    qp_attr, query,
    state::{Op, State},
    ucma::Ucma,
};

/// The most that a program may pass with SET_OPTION.
const MAX_OPTION: usize = 1 << 16;

/// Answer to a command: bytes, and the program's address for them.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) to: u64,
    pub(crate) bytes: Vec<u8>,
}

/// A command with its header taken off.
#[derive(Clone, Copy)]
pub(crate) struct Command<'a> {
    /// The channel that it was written to.
    pub(crate) fd: RawFd,
    pub(crate) cmd: Cmd,
    pub(crate) body: &'a [u8],
    /// Bytes that the program has room for.
    pub(crate) room: usize,
}

/// Reads memory that the program names: address and bytes.
pub(crate) type ReadUser<'a> = &'a dyn Fn(u64, usize) -> Result<Vec<u8>>;

impl<'a> Command<'a> {
    /// Splits what was written.
    ///
    /// # Errors
    /// EINVAL when it is too short or no command has this number.
    pub(crate) fn parse(fd: RawFd, written: &'a [u8]) -> Result<Self> {
        let (header, rest) = abi::Header::read_from_prefix(written).map_err(|_| Errno::INVAL)?;
        Ok(Self {
            fd,
            cmd: Cmd::from_code(header.cmd).ok_or(Errno::INVAL)?,
            body: rest.get(..usize::from(header.len)).ok_or(Errno::INVAL)?,
            room: header.out.into(),
        })
    }

    /// The command's structure.
    fn get<T: FromBytes + KnownLayout + Immutable>(&self) -> Result<T> {
        T::read_from_prefix(self.body).map(|(v, _)| v).map_err(|_| Errno::INVAL)
    }

    /// ENOSPC unless the program has room for so many bytes.
    pub(crate) fn need(&self, bytes: usize) -> Result<()> {
        match self.room >= bytes {
            true => Ok(()),
            false => Err(Errno(libc::ENOSPC)),
        }
    }

    /// The structure of a command that is answered by a number.
    fn numbered<T: FromBytes + KnownLayout + Immutable>(&self) -> Result<T> {
        self.need(size_of::<Number>())?;
        self.get()
    }

    fn answer<T: IntoBytes + Immutable>(&self, to: u64, value: &T) -> Answer {
        let bytes = value.as_bytes();
        Answer {
            to,
            bytes: bytes[..bytes.len().min(self.room)].to_vec(),
        }
    }

    fn number(&self, to: u64, n: u32) -> Answer {
        self.answer(to, &Number { id: n })
    }
}

/// The time that an address resolution may take; negative: any (`msecs_to_jiffies`).
fn timeout(ms: u32) -> Option<Duration> {
    let ms = u64::try_from(ms.cast_signed()).ok()?;
    Some(Duration::from_millis(ms))
}

fn done(result: Result<()>) -> Result<Answer> {
    result.map(|()| Answer::default())
}

impl<B: Backend> Ucma<B> {
    /// Executes any command but GET_EVENT, which may wait.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn execute(&mut self, c: &Command<'_>, read: ReadUser<'_>) -> Result<Answer> {
        match c.cmd {
            Cmd::CreateId => self.create_id(c),
            Cmd::DestroyId => {
                let cmd: abi::DestroyId = c.numbered()?;
                self.destroy(c.fd, cmd.id).map(|n| c.number(cmd.response, n))
            }
            Cmd::BindIp => {
                let cmd: abi::BindIp = c.get()?;
                done(self.bind(c.fd, cmd.id, Addr::parse(&cmd.addr)?, true))
            }
            Cmd::Bind => {
                let cmd: abi::Bind = c.get()?;
                done(self.bind(c.fd, cmd.id, Addr::parse_sized(&cmd.addr, cmd.addr_size)?, true))
            }
            Cmd::ResolveIp => {
                let cmd: abi::ResolveIp = c.get()?;
                let src = (addr::family(&cmd.src) != 0).then(|| Addr::parse(&cmd.src));
                let addrs = (src.transpose()?, Addr::parse(&cmd.dst)?);
                done(self.resolve_addr(c.fd, cmd.id, addrs, timeout(cmd.timeout_ms)))
            }
            Cmd::ResolveAddr => {
                let cmd: abi::ResolveAddr = c.get()?;
                let src = (cmd.src_size != 0).then(|| Addr::parse_sized(&cmd.src, cmd.src_size));
                let addrs = (src.transpose()?, Addr::parse_sized(&cmd.dst, cmd.dst_size)?);
                done(self.resolve_addr(c.fd, cmd.id, addrs, timeout(cmd.timeout_ms)))
            }
            Cmd::ResolveRoute => {
                let cmd: abi::IdValue = c.get()?;
                done(self.resolve_route(c.fd, cmd.id))
            }
            Cmd::QueryRoute => {
                c.need(abi::QUERY_ROUTE_MIN)?;
                let cmd: abi::Query = c.get()?;
                let route = query::route(self.get(c.fd, cmd.id)?);
                Ok(c.answer(cmd.response, &route))
            }
            Cmd::Query => self.query(c),
            Cmd::InitQpAttr => {
                c.need(size_of::<abi::QpAttrResp>())?;
                let cmd: abi::Query = c.get()?;
                let attr = qp_attr::attributes(self.get(c.fd, cmd.id)?, cmd.option)?;
                Ok(c.answer(cmd.response, &attr))
            }
            Cmd::SetOption => self.set_option(c, read),
            Cmd::JoinIpMcast | Cmd::JoinMcast => self.join_command(c),
            Cmd::LeaveMcast => {
                let cmd: abi::DestroyId = c.numbered()?;
                self.leave(c.fd, cmd.id).map(|n| c.number(cmd.response, n))
            }
            Cmd::MigrateId => {
                let cmd: abi::MigrateId = c.numbered()?;
                let from = RawFd::try_from(cmd.fd).map_err(|_| Errno::NOENT)?;
                self.migrate(c.fd, from, cmd.id).map(|n| c.number(cmd.response, n))
            }
            Cmd::Connect | Cmd::Listen | Cmd::Accept | Cmd::Reject | Cmd::Disconnect | Cmd::Notify => {
                done(self.connection_command(c))
            }
            // The kernel has none either.
            Cmd::GetOption | Cmd::GetEvent => Err(Errno::NOSYS),
        }
    }

    /// GET_EVENT: the oldest event, if there is one.
    ///
    /// # Errors
    /// EINVAL for a command that is cut short.
    pub(crate) fn event_answer(&mut self, c: &Command<'_>) -> Result<Option<Answer>> {
        let cmd: abi::GetEvent = c.get()?;
        Ok(self.take_event(c.fd).map(|event| c.answer(cmd.response, &event)))
    }

    fn create_id(&mut self, c: &Command<'_>) -> Result<Answer> {
        let cmd: abi::CreateId = c.numbered()?;
        let space = PortSpace::from_number(cmd.ps).ok_or(Errno::INVAL)?;
        let service = Service::choose(space, cmd.qp_type)?;
        let id = self.insert(Context::new(c.fd, cmd.uid, space, service));
        Ok(c.number(cmd.response, id))
    }

    fn connection_command(&mut self, c: &Command<'_>) -> Result<()> {
        let fd = c.fd;
        match c.cmd {
            Cmd::Connect => {
                let cmd: abi::Connect = c.get()?;
                self.connect(fd, cmd.id, &cmd.conn_param)
            }
            Cmd::Accept => {
                let cmd: abi::Accept = c.get()?;
                self.accept(fd, cmd.id, cmd.uid, &cmd.conn_param)
            }
            Cmd::Reject => {
                let cmd: abi::Reject = c.get()?;
                let data = &cmd.private_data[..usize::from(cmd.private_data_len)];
                self.reject(fd, cmd.id, cmd.reason, data)
            }
            Cmd::Disconnect => {
                let id: Number = c.get()?;
                self.disconnect(fd, id.id)
            }
            Cmd::Listen => {
                let cmd: abi::IdValue = c.get()?;
                self.listen(fd, cmd.id, cmd.value)
            }
            _ => {
                let cmd: abi::IdValue = c.get()?;
                self.notify(fd, cmd.id, cmd.value)
            }
        }
    }

    fn query(&mut self, c: &Command<'_>) -> Result<Answer> {
        let cmd: abi::Query = c.get()?;
        let ctx = self.get(c.fd, cmd.id)?;
        match cmd.option {
            option::USER_CM_QUERY_ADDR => {
                c.need(abi::QUERY_ADDR_MIN)?;
                Ok(c.answer(cmd.response, &query::addresses(ctx)))
            }
            option::USER_CM_QUERY_GID => {
                c.need(abi::QUERY_ADDR_MIN)?;
                Ok(c.answer(cmd.response, &query::gids(ctx)))
            }
            option::USER_CM_QUERY_PATH => {
                let (head, data) = query::paths(ctx, c.room)?;
                let mut answer = c.answer(cmd.response, &head);
                if let Some(data) = data {
                    answer.bytes.extend_from_slice(data.as_bytes());
                }
                Ok(answer)
            }
            _ => Err(Errno::NOSYS),
        }
    }

    fn set_option(&mut self, c: &Command<'_>, read: ReadUser<'_>) -> Result<Answer> {
        let cmd: abi::SetOption = c.get()?;
        let len = usize::try_from(cmd.optlen).map_err(|_| Errno::INVAL)?;
        if len > MAX_OPTION {
            return Err(Errno::INVAL);
        }
        let ctx = self.get(c.fd, cmd.id)?;
        let value = read(cmd.optval, len)?;
        let byte = || <[u8; 1]>::try_from(&value[..]).map(|[b]| b).map_err(|_| Errno::INVAL);
        let flag = || {
            <[u8; 4]>::try_from(&value[..])
                .map(|b| b != [0; 4])
                .map_err(|_| Errno::INVAL)
        };
        match (cmd.level, cmd.optname) {
            (option::OPTION_ID, option::OPTION_ID_TOS) => ctx.tos = byte()?,
            (option::OPTION_ID, option::OPTION_ID_ACK_TIMEOUT) => {
                let timeout = byte()?;
                let acknowledged = matches!(ctx.service, Service::Connected(ConnTransport::Rc | ConnTransport::Xrc));
                if timeout > 31 || !acknowledged {
                    return Err(Errno::INVAL);
                }
                ctx.ack_timeout = Some(timeout);
            }
            (option::OPTION_ID, option::OPTION_ID_REUSEADDR) => {
                let reuse = flag()?;
                // Once it is bound it can only be turned on, and a listener's port is its own (`rdma_set_reuseaddr`).
                if ctx.state != State::Idle && (!reuse || ctx.state == State::Listen) {
                    return Err(Errno::INVAL);
                }
                ctx.reuse = reuse;
            }
            (option::OPTION_ID, option::OPTION_ID_AFONLY) => {
                let afonly = flag()?;
                if !matches!(ctx.state, State::Idle | State::AddrBound) {
                    return Err(Errno::INVAL);
                }
                ctx.afonly = Some(afonly);
            }
            (option::OPTION_IB, option::OPTION_IB_PATH) => return self.set_path(c.fd, cmd.id, &value),
            _ => return Err(Errno::NOSYS),
        }
        self.update_owner(cmd.id);
        Ok(Answer::default())
    }

    /// A path that the program has found itself. There is only one way on RoCE, so it only has to be a path record.
    fn set_path(&mut self, fd: RawFd, id: u32, value: &[u8]) -> Result<Answer> {
        let records = <[abi::PathRecData]>::ref_from_bytes(value).map_err(|_| Errno::INVAL)?;
        if !records.iter().any(|r| r.flags == abi::PATH_FLAGS) {
            return Err(Errno::INVAL);
        }
        let ctx = self.get(fd, id)?;
        ctx.cma_dev()?;
        ctx.step(Op::ResolveRoute)?;
        self.report_event(id, &Event::new(abi::EventType::RouteResolved));
        Ok(Answer::default())
    }

    fn join_command(&mut self, c: &Command<'_>) -> Result<Answer> {
        c.need(size_of::<Number>())?;
        let (response, joined) = if c.cmd == Cmd::JoinIpMcast {
            let cmd: abi::JoinIpMcast = c.get()?;
            let group = Addr::parse(&cmd.addr)?;
            (cmd.response, self.join(c.fd, cmd.id, cmd.uid, group, 0))
        } else {
            let cmd: abi::JoinMcast = c.get()?;
            let group = Addr::parse_sized(&cmd.addr, cmd.addr_size)?;
            (cmd.response, self.join(c.fd, cmd.id, cmd.uid, group, cmd.join_flags))
        };
        joined.map(|member| c.number(response, member))
    }
}
