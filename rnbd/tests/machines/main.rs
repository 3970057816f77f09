//! The client's and the server's state machines: each by itself, and one against the other.

mod bench;
mod block_status;
mod client;
mod client_bench;
mod client_closed;
mod client_lent;
mod client_loss;
mod lost;
#[path = "../../../rtrs/tests/support/provider.rs"]
mod provider;
#[path = "../support/served.rs"]
mod served;
mod server;
mod server_admin;
mod together;
