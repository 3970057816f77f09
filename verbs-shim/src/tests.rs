//! Structures of programs at odd addresses, as within packed ones: work requests and their lists of elements,
//! completions, attributes.

mod forked;

use std::{env, mem, process::Command, ptr};

use libc::{c_int, c_void};

use crate::{
    abi::{
        IBV_QPT_RC, ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_data_buf, ibv_device, ibv_gid, ibv_mr,
        ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_ex, ibv_qp_init_attr, ibv_qp_init_attr_ex, ibv_recv_wr,
        ibv_send_wr, ibv_sge, ibv_srq, ibv_srq_attr, ibv_srq_init_attr, ibv_wc, op, qp_init,
    },
    cq, post, qp_verbs, srq,
};

#[expect(
    clashing_extern_declarations,
    reason = "what the table has of them is their addresses"
)]
unsafe extern "C" {
    fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device;
    fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context;
    fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, flags: c_int) -> *mut ibv_mr;
    fn ibv_create_cq(
        context: *mut ibv_context,
        entries: c_int,
        cookie: *mut c_void,
        channel: *mut ibv_comp_channel,
        vector: c_int,
    ) -> *mut ibv_cq;
    fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp;
    fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq;
    fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
    fn ibv_query_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int, init: *mut ibv_qp_init_attr) -> c_int;
    fn ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int;
}

/// Set for the process that has the device.
const CHILD: &str = "FERROCE_TEST_PROCESS";
const LOCAL_WRITE: c_int = 1;
/// `IBV_QP_EX_WITH_SEND`.
const EX_WITH_SEND: u64 = 1 << 2;
const SIGNALED: u32 = 2;
const INLINE: u32 = 8;
/// Of `ibv_qp_attr_mask`, from reset to RTS.
const INIT: c_int = 1 | 1 << 3 | 1 << 4 | 1 << 5;
const RTR: c_int = 1 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 15 | 1 << 17 | 1 << 20;
const RTS: c_int = 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16;

/// Values one after the other, from an odd address on.
struct Odd<T> {
    room: Vec<u64>,
    values: Vec<T>,
}

impl<T> Odd<T> {
    fn new(values: Vec<T>) -> Self {
        let room = vec![0; mem::size_of_val(&*values) / 8 + 2];
        let mut out = Self { room, values };
        let (from, to) = (out.values.as_ptr().cast::<u8>(), out.at(0).cast::<u8>());
        // SAFETY: the room has as many bytes, and eight more.
        unsafe { ptr::copy_nonoverlapping(from, to, mem::size_of_val(&*out.values)) };
        out
    }

    fn at(&mut self, n: usize) -> *mut T {
        assert!(n < self.values.len());
        self.room.as_mut_ptr().wrapping_byte_add(1).cast::<T>().wrapping_add(n)
    }

    fn get(&mut self, n: usize) -> T
    where
        T: Copy,
    {
        // SAFETY: plain data within the room.
        unsafe { self.at(n).read_unaligned() }
    }
}

fn odd<T>(value: T) -> Odd<T> {
    Odd::new(vec![value])
}

struct Program {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
    /// Memory: sent from the first half, received into the second.
    memory: Vec<u8>,
    lkey: u32,
}

const HALF: usize = 64;
const CAP: ibv_qp_cap = ibv_qp_cap {
    max_send_wr: 8,
    max_recv_wr: 8,
    max_send_sge: 2,
    max_recv_sge: 2,
    max_inline_data: 64,
};

impl Program {
    unsafe fn open() -> Self {
        let mut memory: Vec<u8> = (0..2 * HALF).map(|n| n as u8 + 1).collect();
        // SAFETY: objects of the library, one after the other.
        unsafe {
            let mut count = odd(0);
            let list = ibv_get_device_list(count.at(0));
            assert_eq!(count.get(0), 1);
            let context = ibv_open_device(*list);
            let pd = ibv_alloc_pd(context);
            let mr = ibv_reg_mr(pd, memory.as_mut_ptr().cast(), memory.len(), LOCAL_WRITE);
            let cq = ibv_create_cq(context, 16, ptr::null_mut(), ptr::null_mut(), 0);
            let lkey = (*mr).lkey;
            Self {
                context,
                pd,
                cq,
                memory,
                lkey,
            }
        }
    }

    fn init(&self, srq: *mut ibv_srq) -> ibv_qp_init_attr {
        ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: self.cq,
            recv_cq: self.cq,
            srq,
            cap: CAP,
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        }
    }

    /// Connects a queue pair with itself.
    unsafe fn connect(&self, qp: *mut ibv_qp) {
        // SAFETY: a queue pair and a context of the library.
        unsafe {
            let mut gid = odd(ibv_gid::default());
            assert_eq!(ibv_query_gid(self.context, 1, 0, gid.at(0)), 0);
            let modify = |attr: ibv_qp_attr, mask| assert_eq!(ibv_modify_qp(qp, odd(attr).at(0), mask), 0);
            let port_num = 1;
            modify(
                ibv_qp_attr {
                    qp_state: 1,
                    port_num,
                    ..ibv_qp_attr::default()
                },
                INIT,
            );
            let mut ah_attr = ibv_ah_attr {
                is_global: 1,
                port_num,
                ..ibv_ah_attr::default()
            };
            (ah_attr.grh.dgid, ah_attr.grh.hop_limit) = (gid.get(0), 64);
            let dest_qp_num = (*qp).qp_num;
            modify(
                ibv_qp_attr {
                    qp_state: 2,
                    path_mtu: 3,
                    dest_qp_num,
                    ah_attr,
                    ..ibv_qp_attr::default()
                },
                RTR,
            );
            modify(
                ibv_qp_attr {
                    qp_state: 3,
                    timeout: 14,
                    retry_cnt: 7,
                    rnr_retry: 7,
                    ..ibv_qp_attr::default()
                },
                RTS,
            );
            let (mut attr, mut init) = (odd(ibv_qp_attr::default()), odd(self.init(ptr::null_mut())));
            assert_eq!(ibv_query_qp(qp, attr.at(0), 1, init.at(0)), 0);
            assert_eq!((attr.get(0).qp_state, attr.get(0).dest_qp_num), (3, dest_qp_num));
            assert_eq!(init.get(0).cap.max_send_sge, CAP.max_send_sge);
        }
    }

    fn sge(&self, at: usize, length: u32) -> ibv_sge {
        let addr = self.memory.as_ptr() as u64 + at as u64;
        ibv_sge {
            addr,
            length,
            lkey: self.lkey,
        }
    }

    /// Returns the elements of a receive: the second half, its first `count` bytes apart from the rest.
    fn parts_of_receive(&self, count: u32) -> Odd<ibv_sge> {
        Odd::new(vec![self.sge(HALF, count), self.sge(HALF + 32, 32 - count)])
    }

    /// Waits for two completions and checks that these work requests have succeeded, in either order.
    unsafe fn completes(&self, mut wanted: [u64; 2]) {
        let mut wcs = Odd::new(vec![ibv_wc::default(); 2]);
        let mut seen = [0; 2];
        for slot in &mut seen {
            // SAFETY: a queue of the library, and room for two.
            while unsafe { cq::poll_cq(self.cq, 1, wcs.at(1)) } == 0 {
                std::thread::yield_now();
            }
            let wc = wcs.get(1);
            assert_eq!(wc.status, 0, "of work request {}", wc.wr_id);
            *slot = wc.wr_id;
        }
        seen.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(seen, wanted);
    }

    /// 20 bytes from 3 on, as two parts of 10 that lie 16 apart, came as `parts_of_receive(12)` has it.
    fn check(&mut self) {
        let came = [&self.memory[HALF..HALF + 12], &self.memory[HALF + 32..HALF + 40]].concat();
        let sent = [&self.memory[3..13], &self.memory[19..29]].concat();
        assert_eq!(came, sent);
        self.memory[HALF..].fill(0);
    }

    fn parts_of_send(&self) -> Odd<ibv_sge> {
        Odd::new(vec![self.sge(3, 10), self.sge(19, 10)])
    }
}

fn send(wr_id: u64, list: *mut ibv_sge, send_flags: u32) -> ibv_send_wr {
    // SAFETY: numbers and pointers, for which zero is a value.
    let none: ibv_send_wr = unsafe { mem::zeroed() };
    ibv_send_wr {
        wr_id,
        sg_list: list,
        num_sge: 2,
        opcode: op::SEND,
        send_flags,
        ..none
    }
}

fn receive(wr_id: u64, list: *mut ibv_sge) -> ibv_recv_wr {
    let next = ptr::null_mut();
    ibv_recv_wr {
        wr_id,
        next,
        sg_list: list,
        num_sge: 2,
    }
}

/// Chains of work requests, from registered memory and inline.
unsafe fn posts(p: &mut Program, qp: *mut ibv_qp) {
    // SAFETY: a connected queue pair; what is posted lives until the calls return.
    unsafe {
        let (mut into, mut from) = (p.parts_of_receive(12), p.parts_of_send());
        let mut receives = Odd::new(vec![receive(1, into.at(0)), receive(2, into.at(0))]);
        let second = receives.at(1);
        (&raw mut (*receives.at(0)).next).write_unaligned(second);
        let mut bad = odd(ptr::null_mut());
        assert_eq!(post::post_recv(qp, receives.at(0), bad.at(0)), 0);
        for (n, flags) in [SIGNALED, SIGNALED | INLINE].into_iter().enumerate() {
            let mut wr = odd(send(11, from.at(0), flags));
            assert_eq!(post::post_send(qp, wr.at(0), odd(ptr::null_mut()).at(0)), 0);
            p.completes([1 + n as u64, 11]);
            p.check();
        }
        // The second is not known.
        let mut sends = Odd::new(vec![send(21, from.at(0), 0), send(22, from.at(0), 0)]);
        let second = sends.at(1);
        (&raw mut (*sends.at(0)).next).write_unaligned(second);
        (&raw mut (*second).opcode).write_unaligned(99);
        assert_eq!(post::post_recv(qp, odd(receive(3, into.at(0))).at(0), bad.at(0)), 0);
        let mut refused = odd(ptr::null_mut());
        assert_eq!(post::post_send(qp, sends.at(0), refused.at(0)), libc::EINVAL);
        assert_eq!(refused.get(0), second);
        let mut last = receive(4, into.at(0));
        last.num_sge = 3;
        let mut last = odd(last);
        assert_eq!(post::post_recv(qp, last.at(0), bad.at(0)), libc::EINVAL);
        assert_eq!(bad.get(0), last.at(0));
        let mut wcs = odd(ibv_wc::default());
        while cq::poll_cq(p.cq, 1, wcs.at(0)) == 0 {
            std::thread::yield_now();
        }
        assert_eq!((wcs.get(0).wr_id, wcs.get(0).status), (3, 0), "the first was sent");
        p.check();
    }
}

/// The extended way, which receives from a shared queue.
unsafe fn posts_extended(p: &mut Program) {
    // SAFETY: as above.
    unsafe {
        let attr = ibv_srq_attr {
            max_wr: 4,
            max_sge: 2,
            srq_limit: 0,
        };
        let mut init = odd(ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr,
        });
        let srq = ibv_create_srq(p.pd, init.at(0));
        let mut init: ibv_qp_init_attr_ex = mem::zeroed();
        (init.send_cq, init.recv_cq, init.srq, init.pd) = (p.cq, p.cq, srq, p.pd);
        (init.cap, init.qp_type, init.comp_mask) = (CAP, IBV_QPT_RC, qp_init::PD | qp_init::SEND_OPS_FLAGS);
        init.send_ops_flags = EX_WITH_SEND;
        let qp = qp_verbs::create_qp_ex(p.context, odd(init).at(0));
        p.connect(qp);
        let ex: *mut ibv_qp_ex = qp.cast();
        let (mut into, mut from) = (p.parts_of_receive(12), p.parts_of_send());
        let buffer = |s: ibv_sge| ibv_data_buf {
            addr: s.addr as *mut c_void,
            length: s.length as usize,
        };
        let mut buffers = Odd::new(vec![buffer(from.get(0)), buffer(from.get(1))]);
        for inline in [false, true] {
            let mut bad = odd(ptr::null_mut());
            assert_eq!(srq::post_srq_recv(srq, odd(receive(5, into.at(0))).at(0), bad.at(0)), 0);
            ((*ex).wr_start)(ex);
            ((*ex).wr_id, (*ex).wr_flags) = (15, SIGNALED);
            ((*ex).wr_send)(ex);
            match inline {
                true => ((*ex).wr_set_inline_data_list)(ex, 2, buffers.at(0)),
                false => ((*ex).wr_set_sge_list)(ex, 2, from.at(0)),
            }
            assert_eq!(((*ex).wr_complete)(ex), 0);
            p.completes([5, 15]);
            p.check();
        }
    }
}

/// Runs a test in a process of its own, since the addresses of the library's devices are those of its process. Returns whether this is that
/// process.
fn in_process(name: &str) -> bool {
    if env::var_os(CHILD).is_some() {
        return true;
    }
    let out = Command::new(env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .env("FERROCE_ADDR", ferroce_loopback::address().to_string())
        .env("FERROCE_BROKER", "off")
        .output()
        .unwrap();
    let text = [out.stdout, out.stderr].concat();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&text));
    false
}

#[test]
fn whatever_programs_pass_may_lie_at_any_address() {
    if !in_process("tests::whatever_programs_pass_may_lie_at_any_address") {
        return;
    }
    // SAFETY: as a program does it, with structures of its own.
    unsafe {
        let mut program = Program::open();
        let qp = ibv_create_qp(program.pd, odd(program.init(ptr::null_mut())).at(0));
        program.connect(qp);
        posts(&mut program, qp);
        posts_extended(&mut program);
    }
}
