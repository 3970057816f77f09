//! NBD connections, and the messages of RNBD.

mod errno;
mod nbd_bytes;
mod nbd_chunks;
mod nbd_lost;
mod nbd_negotiation;
mod nbd_tls;
mod nbd_transmission;
mod proto;
mod support;
