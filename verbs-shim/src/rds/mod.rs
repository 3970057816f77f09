//! `AF_RDS` for programs that know nothing of ferroce.
//!
//! An RDS socket of a program is one end of a `SOCK_SEQPACKET` pair whose other end the node of the user has ([`rds_local`]). So polling,
//! copies of descriptors, `fork`, `exec`, passing on, time-outs and signals are the kernel's. What is different for RDS goes through the
//! calls here: [`calls`] and [`transfer`] stand in front of the C library's, [`fds`] says for which descriptors.

mod address;
mod calls;
mod cmsg;
mod control;
mod fds;
mod info;
mod ioctls;
mod names;
mod node;
mod operation;
mod options;
mod real;
mod receive;
mod send;
mod socket;
mod transfer;
mod user;

pub(crate) use fds::{key, was_socket};
pub(crate) use socket::closing;
pub(crate) use transfer::write;
