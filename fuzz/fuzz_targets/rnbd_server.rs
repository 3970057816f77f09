//! See `ferroce_fuzz_targets::rnbd_server`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ferroce_fuzz_targets::rnbd_server::run(data));
