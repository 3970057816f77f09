//! Runs scripts that come over TCP: how the lab drives a guest.
//!
//! A request is `run SECONDS LENGTH\n` and the script's bytes. The answer is any number of `out LENGTH\n` with bytes of
//! its output, then `exit CODE\n` (124 when the time ran out).

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Ipv6Addr, TcpListener, TcpStream},
    process::{Command, Stdio},
};

use crate::Error;

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// TCP port.
    #[arg(long, default_value_t = 7001)]
    port: u16,
}

const MAX_SCRIPT: usize = 1 << 20;

fn serve(stream: TcpStream) -> Result<(), Error> {
    let mut lines = BufReader::new(stream.try_clone()?);
    let mut out = stream;
    let mut line = String::new();
    while lines.read_line(&mut line)? > 0 {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["run", seconds, len] = words[..] else {
            return Err("not a run request".into());
        };
        let len: usize = len.parse()?;
        if len > MAX_SCRIPT {
            return Err("script too long".into());
        }
        let mut script = vec![0; len];
        lines.read_exact(&mut script)?;
        let script = format!("exec 2>&1 </dev/null\n{}", String::from_utf8(script)?);
        let mut child = Command::new("timeout")
            .args(["-k", "5", seconds, "bash", "-c", &script])
            .stdout(Stdio::piped())
            .spawn()?;
        let mut from = child.stdout.take().ok_or("no pipe")?;
        let mut buf = [0; 4096];
        loop {
            let n = from.read(&mut buf)?;
            if n == 0 {
                break;
            }
            out.write_all(format!("out {n}\n").as_bytes())?;
            out.write_all(&buf[..n])?;
        }
        let code = child.wait()?.code().unwrap_or(255);
        out.write_all(format!("exit {code}\n").as_bytes())?;
        line.clear();
    }
    Ok(())
}

/// Serves until the machine goes down.
pub(crate) fn run(args: &Args) -> Result<(), Error> {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, args.port))?;
    for stream in listener.incoming() {
        let stream = stream?;
        stream.set_nodelay(true)?;
        std::thread::spawn(move || {
            if let Err(e) = serve(stream) {
                eprintln!("guestd: {e}");
            }
        });
    }
    Ok(())
}
