//! A program on another host, run by `host-agent` there: its output and exit code become ours.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use crate::Error;

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Where host-agent listens (TCP).
    #[arg(long)]
    at: SocketAddr,
    /// Longest time that the program gets.
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    program: Vec<String>,
}

/// Runs the program; an error unless it exits with 0. When this process ends, so does the program.
pub(crate) fn run(args: &Args) -> Result<(), Error> {
    let stream = TcpStream::connect_timeout(&args.at, Duration::from_secs(20))?;
    (&stream).write_all(format!("exec {} {}\n", args.seconds, args.program.join(" ")).as_bytes())?;
    let mut from = BufReader::new(stream);
    let mut out = std::io::stdout();
    loop {
        let mut line = String::new();
        from.read_line(&mut line)?;
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["out", n] => {
                let mut bytes = Vec::new();
                from.by_ref().take(n.parse()?).read_to_end(&mut bytes)?;
                out.write_all(&bytes)?;
                out.flush()?;
            }
            ["exit", "0"] => return Ok(()),
            ["exit", "124"] => return Err(format!("it still ran after {} s", args.seconds).into()),
            ["exit", code] => return Err(format!("it exited with {code}").into()),
            _ => return Err(format!("host-agent answered {line:?}").into()),
        }
    }
}
