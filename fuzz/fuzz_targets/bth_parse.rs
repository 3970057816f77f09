//! See `ferroce_fuzz_targets::bth_parse`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ferroce_fuzz_targets::bth_parse::run(data));
