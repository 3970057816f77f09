//! See `ferroce_fuzz_targets::script`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ferroce_fuzz_targets::script::run(data));
