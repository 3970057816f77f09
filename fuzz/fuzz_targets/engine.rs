//! See `ferroce_fuzz_targets::engine`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ferroce_fuzz_targets::engine::run(data));
