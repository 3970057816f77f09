//! Running mappings and servers as a tree of attributes: what `rtrs` and `rnbd` of Linux have in sysfs, with the same relative paths,
//! file texts, modes and error numbers.
//!
//! A [`Registry`] is made of a [`Host`], which says what runs, and has four calls: [`list`](Registry::list), [`stat`](Registry::stat),
//! [`read`](Registry::read) and [`write`](Registry::write). It knows nothing of sockets or of file systems; each of these is a view of it.
//!
//! ```text
//! class/rtrs-client/SESSION/{add_path,max_reconnect_attempts,mpath_policy}
//! class/rtrs-client/SESSION/paths/ip:SRC@ip:DST/{hca_name,hca_port,src_addr,dst_addr,state,cur_latency}
//! class/rtrs-client/SESSION/paths/ip:SRC@ip:DST/{reconnect,disconnect,remove_path}
//! class/rtrs-client/SESSION/paths/ip:SRC@ip:DST/stats/{rdma,reconnects,cpu_migration_from,cpu_migration_to,reset_all}
//! class/rtrs-server/SESSION/paths/ip:CLIENT@ip:SERVER/{hca_name,hca_port,src_addr,dst_addr,disconnect}
//! class/rtrs-server/SESSION/paths/ip:CLIENT@ip:SERVER/stats/rdma
//! class/rnbd-client/ctl/map_device
//! class/rnbd-client/ctl/devices/DEVICE@SESSION -> ../../../../block/rnbdN
//! class/rnbd-server/ctl/devices/EXPORT/block_dev -> ../../../../../block/EXPORT
//! class/rnbd-server/ctl/devices/EXPORT/sessions/SESSION/{access_mode,read_only,mapping_path,force_close}
//! block/rnbdN/{size,ro,stat}
//! block/rnbdN/rnbd/{state,session,mapping_path,access_mode,nr_poll_queues,resize,remap_device,unmap_device}
//! block/EXPORT/{size,ro}
//! module/rtrs_server/parameters/{max_chunk_size,sess_queue_depth,always_invalidate}
//! module/rnbd_server/parameters/{dev_search_path,port_nr}
//! ```
//!
//! With [`Names::All`] there are also names that only the documents have: `mp_policy` (a link to `mpath_policy`), `stats/cpu_migration`
//! (both tables in one) of a client's path, and `stats/reset_all` of a server's. A reset is a written `1`, as the kernel's code has it; the documents'
//! `0` is refused as there. What the documents name and nothing counts (`sg_entries`, `rdma_lat`, `wc_completion`) is left out.

mod client;
mod device;
mod host;
mod order;
mod registry;
mod server;
#[cfg(test)]
mod tests;
mod text;
mod tree;

pub use host::{Client, Host, Names, Parameters, Server};
pub use registry::{MAX_WRITE, Registry};
