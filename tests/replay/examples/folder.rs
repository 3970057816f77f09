//! Replays a folder of new captures: `cargo run -p ferroce-replay --example folder -- target/lab/captures`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(dir) = std::env::args_os().nth(1) else {
        eprintln!("which folder?");
        return ExitCode::from(2);
    };
    let verdict = match ferroce_replay::replay_folder(dir.as_ref()) {
        Ok(verdict) => verdict,
        Err(e) => {
            eprintln!("{e}");
            return ExitCode::FAILURE;
        }
    };
    let (seen, wrong) = (&verdict.seen, &verdict.wrong);
    println!("{}\n{}", seen.join("\n"), wrong.join("\n"));
    println!("{} sides replayed, {} findings", seen.len(), wrong.len());
    match wrong.is_empty() && !seen.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
