//! The kernel's server is unloaded and loaded again in the middle of a copy to our mapping of it.

use std::{process::Command, time::Duration};

use serde_json::Value;

use super::{
    super::{
        Ctx, Direction, Scenario,
        rnbd::{self, Mapping, RMMOD_SERVER, checksum_here, checksum_in_guest, random_file},
    },
    our_client::{DISK, map, server_down, server_up},
    script,
};
use crate::{Error, far::Ip, lab::Proc};

pub(super) fn list() -> Vec<Scenario> {
    let new = |name: &str, ci, then: &'static str| {
        let s = Scenario::new(10, name, Direction::OursToKernel, move |c| restart(c, then));
        s.nets(2).waits().ci_if(ci)
    };
    vec![
        new("restart-kernel-server-our-client", false, "N"),
        // Fewer and smaller chunks, with keys that are good for one request each.
        new(
            "restart-kernel-server-smaller-our-client",
            true,
            "Y sess_queue_depth=32 max_chunk_size=8192",
        ),
    ]
}

/// What is copied, bytes.
const SIZE: usize = 24 << 20;

/// `then` is what the server's module is loaded with the second time: a value of `always_invalidate`, and other parameters.
fn restart(c: &mut Ctx<'_>, then: &str) -> Result<String, Error> {
    server_up(c)?;
    let result = copy(c, then);
    server_down(c)?;
    result
}

fn copy(c: &mut Ctx<'_>, then: &str) -> Result<String, Error> {
    let mut mapping = map(
        c,
        Ip::V4,
        &[
            "--on-loss",
            "queue",
            "--policy",
            "round-robin",
            "--stats-interval",
            "0.2",
        ],
    )?;
    let from = c.path("from.img");
    random_file(from.as_ref(), SIZE, 88_172_645_463_325_252)?;
    let mut copy = Command::new("qemu-img");
    copy.args([
        "convert",
        "-n",
        "-f",
        "raw",
        "-O",
        "raw",
        "-r",
        "2M",
        &from,
        &mapping.url,
    ]);
    let mut copy = Proc::spawn("copy", &mut copy, &c.dir)?;
    copy.wait_until(Duration::from_secs(60), || written(&mapping) > 4 << 20)?;
    let load = rnbd::server_modules(then);
    script(c, &format!("{RMMOD_SERVER}\nsleep 1\n{load}"), 120)?;
    let before = written(&mapping);
    copy.still_runs()?;
    copy.finish(Duration::from_secs(180))?;
    for event in ["session_lost", "session_back", "remapped"] {
        mapping.wait_more(event, 0, Duration::from_secs(30))?;
    }
    mapping.io(c, "flush", &["flush", "read 0 4M"], 60)?;
    let (here, there) = (checksum_here(c, &from)?, checksum_in_guest(c, DISK, SIZE)?);
    let back = mapping.events("session_back").pop().unwrap_or_default();
    let pause = longest_pause(&mapping.events("stats"));
    mapping.stop()?;
    std::fs::remove_file(&from)?;
    if here != there {
        return Err(format!("copied were {SIZE} bytes of MD5 {here}, the kernel's {DISK} has {there}").into());
    }
    Ok(format!(
        "the copy went on ({} of {} MiB were written by then), queue depth {}, at most {} bytes a request, image equal; its longest \
         pause was {pause:.1} s: passed",
        before >> 20,
        SIZE >> 20,
        back["queue_depth"],
        back["max_io_bytes"]
    ))
}

/// What the copy has written so far, bytes.
fn written(mapping: &Mapping) -> u64 {
    let last = mapping.events("stats").pop().unwrap_or_default();
    last["bytes_written"].as_u64().unwrap_or_default()
}

/// The longest time between the first and the last request in which none was answered, s, by reports of statistics.
fn longest_pause(stats: &[Value]) -> f64 {
    let times = stats
        .iter()
        .filter_map(|s| Some((s["seconds"].as_f64()?, s["requests"].as_u64()?)));
    let mut longest = 0.0_f64;
    // Since when there have been so many.
    let mut since: Option<(f64, u64)> = None;
    for (at, requests) in times {
        match since {
            Some((then, before)) if requests > before => {
                if before > 0 {
                    longest = longest.max(at - then);
                }
                since = Some((at, requests));
            }
            None => since = Some((at, requests)),
            _ => {}
        }
    }
    longest
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::longest_pause;

    #[test]
    fn pauses_lie_between_requests() {
        let stats = |all: &[(f64, u64)]| {
            all.iter()
                .map(|(at, n)| json!({ "seconds": at, "requests": n }))
                .collect::<Vec<_>>()
        };
        let all = stats(&[(0.0, 0), (5.0, 1), (5.5, 3), (6.0, 3), (9.0, 3), (9.5, 4), (20.0, 4)]);
        assert_eq!(longest_pause(&all), 4.0);
        assert_eq!(longest_pause(&[]), 0.0);
    }
}
