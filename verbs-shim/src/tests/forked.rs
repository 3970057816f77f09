//! Objects of the parent process in a forked child: destroying one forgets it, and every other verb fails with EIO.

use std::ptr;

use libc::c_int;

use super::{
    CAP, EX_WITH_SEND, Program, ibv_create_cq, ibv_create_srq, ibv_modify_qp, ibv_query_gid, ibv_reg_mr, in_process,
};
use crate::{
    abi::{
        IBV_MW_TYPE_1, IBV_QPT_RC, ibv_ah, ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_gid,
        ibv_modify_cq_attr, ibv_mr, ibv_mw, ibv_parent_domain_init_attr, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_ex,
        ibv_qp_init_attr_ex, ibv_srq, ibv_srq_attr, ibv_srq_init_attr, ibv_td, ibv_xrcd, ibv_xrcd_init_attr, qp_init,
    },
    cq, mw, pd, qp_verbs, srq, xrc,
};

#[expect(
    clashing_extern_declarations,
    reason = "what the table has of them is their addresses"
)]
unsafe extern "C" {
    fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
    fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
    fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex;
    fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int;
    fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int;
    fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int;
    fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
    fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
    fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int;
    fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int;
}

/// An object of each kind. Later ones use earlier ones.
struct Objects {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    td: *mut ibv_td,
    parent_domain: *mut ibv_pd,
    channel: *mut ibv_comp_channel,
    cq: *mut ibv_cq,
    mr: *mut ibv_mr,
    mw: *mut ibv_mw,
    ah: *mut ibv_ah,
    xrcd: *mut ibv_xrcd,
    srq: *mut ibv_srq,
    qp: *mut ibv_qp,
}

impl Objects {
    unsafe fn create(p: &mut Program) -> Self {
        let (context, pd) = (p.context, p.pd);
        // SAFETY: objects of the library, and attributes of this frame.
        unsafe {
            let td = pd::alloc_td(context, &mut 0);
            let channel = ibv_create_comp_channel(context);
            let cq = ibv_create_cq(context, 16, ptr::null_mut(), channel, 0);
            let mut gid = ibv_gid::default();
            assert_eq!(ibv_query_gid(context, 1, 0, &raw mut gid), 0);
            let mut to = ibv_ah_attr {
                is_global: 1,
                port_num: 1,
                ..ibv_ah_attr::default()
            };
            to.grh.dgid = gid;
            let attr = ibv_srq_attr {
                max_wr: 4,
                max_sge: 2,
                srq_limit: 0,
            };
            let mut init = ibv_srq_init_attr {
                srq_context: ptr::null_mut(),
                attr,
            };
            let mut domain = ibv_xrcd_init_attr {
                comp_mask: 3,
                fd: -1,
                oflags: libc::O_CREAT,
            };
            let srq = ibv_create_srq(pd, &raw mut init);
            let mut extended: ibv_qp_init_attr_ex = std::mem::zeroed();
            (extended.send_cq, extended.recv_cq, extended.srq, extended.pd) = (cq, cq, srq, pd);
            (extended.cap, extended.qp_type) = (CAP, IBV_QPT_RC);
            extended.comp_mask = qp_init::PD | qp_init::SEND_OPS_FLAGS;
            extended.send_ops_flags = EX_WITH_SEND;
            let this = Self {
                context,
                pd,
                td,
                parent_domain: parent_domain(context, pd, td),
                channel,
                cq,
                mr: ibv_reg_mr(pd, p.memory.as_mut_ptr().cast(), p.memory.len(), 0),
                mw: mw::alloc_mw(pd, IBV_MW_TYPE_1),
                ah: ibv_create_ah(pd, &raw mut to),
                xrcd: xrc::open_xrcd(context, &raw mut domain),
                srq,
                qp: qp_verbs::create_qp_ex(context, &raw mut extended),
            };
            assert!(!this.parent_domain.is_null() && !this.mr.is_null() && !this.mw.is_null());
            assert!(!this.ah.is_null() && !this.xrcd.is_null() && !this.srq.is_null() && !this.qp.is_null());
            assert!(!ibv_qp_to_qp_ex(this.qp).is_null());
            this
        }
    }

    /// Returns the errors of destroying all objects, from the last to the first.
    unsafe fn destroy(&self) -> [c_int; 10] {
        // SAFETY: objects of the library, which are not used again.
        unsafe {
            [
                ibv_destroy_qp(self.qp),
                ibv_destroy_srq(self.srq),
                xrc::close_xrcd(self.xrcd),
                ibv_destroy_ah(self.ah),
                mw::dealloc_mw(self.mw),
                ibv_dereg_mr(self.mr),
                ibv_destroy_cq(self.cq),
                ibv_destroy_comp_channel(self.channel),
                ibv_dealloc_pd(self.parent_domain),
                pd::dealloc_td(self.td),
            ]
        }
    }

    /// Uses objects of the parent process, and destroys used ones before their users.
    unsafe fn in_child(&self) {
        // SAFETY: objects of the library, and attributes of this frame.
        unsafe {
            let mut attr = ibv_qp_attr::default();
            assert_eq!(ibv_modify_qp(self.qp, &raw mut attr, 1), libc::EIO);
            assert!(ibv_qp_to_qp_ex(self.qp).is_null());
            assert_eq!(srq::get_srq_num(self.srq, &mut 0), libc::EIO);
            let mut nothing: ibv_modify_cq_attr = std::mem::zeroed();
            assert_eq!(cq::modify_cq(self.cq, &raw mut nothing), libc::EIO);
            assert!(parent_domain(self.context, self.pd, self.td).is_null());
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EIO));
            assert_eq!(ibv_destroy_comp_channel(self.channel), 0);
            assert_eq!(pd::dealloc_td(self.td), 0);
            assert_eq!(ibv_dealloc_pd(self.pd), 0);
            let again = self.destroy();
            assert_eq!(again, [0, 0, 0, 0, 0, 0, 0, libc::ENOENT, 0, libc::ENOENT]);
        }
    }
}

unsafe fn parent_domain(context: *mut ibv_context, pd: *mut ibv_pd, td: *mut ibv_td) -> *mut ibv_pd {
    // SAFETY: zeroes are attributes.
    let mut attr: ibv_parent_domain_init_attr = unsafe { std::mem::zeroed() };
    (attr.pd, attr.td) = (pd, td);
    // SAFETY: objects of the library, and attributes of this frame.
    unsafe { pd::alloc_parent_domain(context, &raw mut attr) }
}

#[test]
fn a_forked_child_forgets_objects_and_uses_none() {
    if !in_process("tests::forked::a_forked_child_forgets_objects_and_uses_none") {
        return;
    }
    // SAFETY: as a program does it. The child calls this library, and ends.
    unsafe {
        let mut program = Program::open();
        let objects = Objects::create(&mut program);
        let child = libc::fork();
        if child == 0 {
            let done = std::panic::catch_unwind(|| objects.in_child());
            libc::_exit(c_int::from(done.is_err()));
        }
        let mut status = -1;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        assert_eq!(status, 0, "the child says why");
        assert_eq!(objects.destroy(), [0; 10], "the parent's are not the child's");
    }
}
