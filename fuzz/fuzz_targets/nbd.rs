//! See `ferroce_fuzz_targets::nbd`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ferroce_fuzz_targets::nbd::run(data));
