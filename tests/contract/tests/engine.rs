//! The suite over our engine.

use ferroce_contract::{
    Pair,
    halves::{Half, Halves},
    run_all,
    sockets::Sockets,
    wire::Wire,
};
use roce_port::fabric::FabricConfig;

fn passes(make: impl FnMut() -> Result<Box<dyn Pair>, String>) {
    assert_eq!(run_all(&[], make), 0, "cases have failed");
}

#[test]
fn without_io_and_with_keys_at_once() {
    passes(|| Ok(Box::new(Wire::new(FabricConfig::default()))));
}

#[test]
fn without_io_and_with_keys_by_work_requests() {
    let config = FabricConfig {
        instant_keys: false,
        ..FabricConfig::default()
    };
    passes(|| Ok(Box::new(Wire::new(config))));
}

#[test]
fn without_io_and_with_windows_alone() {
    let config = FabricConfig {
        instant_keys: false,
        fast_registration: false,
        windows: true,
        tells_invalidated: true,
    };
    passes(|| Ok(Box::new(Wire::new(config))));
}

#[test]
fn on_sockets() {
    passes(|| Ok(Box::new(Sockets::new()?)));
}

#[test]
fn on_a_software_device_beside_an_rdma_device() {
    passes(|| Ok(Box::new(Halves::new(FabricConfig::default(), Half::Soft))));
}

#[test]
fn on_an_rdma_device_beside_a_software_device() {
    passes(|| Ok(Box::new(Halves::new(FabricConfig::default(), Half::Hard))));
}

#[test]
fn on_an_rdma_device_with_windows_alone() {
    let config = FabricConfig {
        instant_keys: false,
        fast_registration: false,
        windows: true,
        tells_invalidated: true,
    };
    passes(|| Ok(Box::new(Halves::new(config, Half::Hard))));
}
