//! The broker as a program of its own, for tests: `ferroce broker` is what users have.

use std::{ffi::OsString, io, process::ExitCode};

use roce_broker::server::{Config, Quotas, run};

/// Reads `broker --dir DIR [--shared [--trust-domain]] [--max-… N] [--detach] [--announce]`, and runs.
fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let has = |name: &str| args.iter().any(|a| a == name);
    let dir = args.iter().skip_while(|a| *a != "--dir").nth(1);
    let Some(dir) = dir.filter(|_| args.first().is_some_and(|a| a == "broker")) else {
        eprintln!("usage: roce-broker broker --dir DIR [--shared] [--detach] [--announce]");
        return ExitCode::from(2);
    };
    let mut config = Config::new(dir.into());
    config.detach = has("--detach");
    config.announce = has("--announce");
    if has("--shared") {
        config.shared = Some(0o666);
        config.linger = None;
        config.quotas = Quotas::SHARED;
        config.isolate = !has("--trust-domain");
    }
    let number = |name: &str| {
        let value = args.iter().skip_while(|a| *a != name).nth(1);
        value.and_then(|v| v.to_str()?.parse::<usize>().ok())
    };
    let quotas = &mut config.quotas;
    for (name, quota) in [
        ("--max-places", &mut quotas.places),
        ("--max-addresses", &mut quotas.addresses),
        ("--max-ports", &mut quotas.ports),
        ("--max-connections", &mut quotas.connections),
    ] {
        *quota = number(name).unwrap_or(*quota);
    }
    tracing_subscriber::fmt().with_writer(io::stderr).init();
    match run(&config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
