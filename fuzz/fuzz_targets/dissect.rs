//! See `ferroce_fuzz_targets::dissect`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ferroce_fuzz_targets::dissect::run(data));
