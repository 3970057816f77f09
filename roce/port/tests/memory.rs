//! Memory of a connected idle queue pair.

#[path = "../examples/idle.rs"]
mod idle;

#[test]
fn an_idle_connected_queue_pair_costs_no_more_than_4_kib() {
    let each = idle::bytes_each(1000);
    println!("{each} bytes for each queue pair with its connection");
    assert!(each <= 4 << 10, "{each} bytes");
}
