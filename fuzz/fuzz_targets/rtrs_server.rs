//! See `ferroce_fuzz_targets::rtrs_server`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ferroce_fuzz_targets::rtrs_server::run(data));
