//! A session of the kernel's client gets a path to another server than its own.

use std::fs;

use serde_json::Value;

use super::{
    super::{
        Ctx, Direction, Scenario,
        faults::same_on_image,
        rnbd::{self, Orders, RMMOD_SERVER, Server, image},
    },
    kernel_client::{CLIENT_UP, client_down, head},
    script,
};
use crate::{Error, far::Ip, lab::HOST_V4};

pub(super) fn list() -> Vec<Scenario> {
    let new = |name: &str, guests, run: fn(&mut Ctx<'_>) -> Result<String, Error>| {
        let s = Scenario::new(10, name, Direction::KernelToOurs, run);
        s.nets(2).guests(guests)
    };
    vec![
        new("paths-wrong-server-kernel-client", 1, beside_ours),
        new("paths-wrong-server-kernel-client-of-kernel", 2, beside_the_kernels),
    ]
}

/// The path is refused with ENXIO and not listed; the session goes on with the one that it has.
const ADD: &str = "\
    map_by path=$P0; up 1 100; head -c 1048576 /dev/urandom > /tmp/a\n\
    (while [ ! -e /tmp/stop ]; do dd if=/tmp/a of=/dev/rnbd0 bs=64k oflag=direct status=none || echo failed; done) \
        >/tmp/writer 2>&1 &\n\
    for i in 1 2 3; do refused 'No such device or address' $P1 $C/add_path; [ \"$(ls $S)\" = $P0 ]; done\n\
    touch /tmp/stop; wait; cat /tmp/writer; [ ! -s /tmp/writer ]; rm -f /tmp/stop\n\
    cmp -n 1048576 /tmp/a /dev/rnbd0; paths; up 1 0; sum 16; echo normal > $B/unmap_device\n";

/// Our server on the second network, which is not the session's.
struct Wrong {
    server: Server,
}

impl Wrong {
    fn start(c: &Ctx<'_>) -> Result<Self, Error> {
        image(c, "wrong", 16)?;
        let orders = Orders::new(HOST_V4[1], &["wrong"], "on").named("serve-wrong");
        let server = Server::start_as(c, orders)?;
        Ok(Self { server })
    }

    /// Nobody was let in, and nothing was written.
    fn untouched(self, c: &Ctx<'_>) -> Result<(), Error> {
        let opened = self.server.count("session_opened");
        let summary: Value = self.server.end()?;
        if opened != 0 || summary["connections_refused"] != 3 || summary["requests"] != 0 {
            return Err(format!("the wrong server opened {opened} sessions, and counted {summary}").into());
        }
        if fs::read(c.path("wrong.img"))?.iter().any(|byte| *byte != 0) {
            return Err("the wrong server's image has changed".into());
        }
        Ok(())
    }
}

fn add_path(c: &mut Ctx<'_>, head: &str) -> Result<String, Error> {
    let text = format!("{}{head}{CLIENT_UP}{ADD}", rnbd::INSMOD_CLIENT);
    let result = script(c, &text, 120);
    client_down(c)?;
    result
}

const PASSED: &str = "three times refused with ENXIO and not listed; nothing written to the wrong server: passed";

/// The session is with another server of ours.
fn beside_ours(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let server = Server::start_at(c, HOST_V4[0], &["disk"], "on")?;
    let wrong = Wrong::start(c)?;
    let head = head(c, Ip::V4)?;
    let out = add_path(c, &head)?;
    server.stop()?;
    same_on_image(c, &out, 1 << 20)?;
    wrong.untouched(c)?;
    Ok(PASSED.to_owned())
}

/// The session is with the kernel's server, in the second guest.
fn beside_the_kernels(c: &mut Ctx<'_>) -> Result<String, Error> {
    let wrong = Wrong::start(c)?;
    let second = c.second.as_deref().ok_or("needs a second guest")?;
    let right = second.addr(0, Ip::V4);
    second.run(&rnbd::server_modules("Y"), 120)?;
    let head = head(c, Ip::V4)?.replacen(&format!("@ip:{}", HOST_V4[0]), &format!("@ip:{right}"), 1);
    let result = add_path(c, &head.replacen("DISK=disk", "DISK=newroot/dev/ram0", 1));
    c.second
        .as_deref()
        .ok_or("needs a second guest")?
        .try_run(RMMOD_SERVER, 120)?;
    result?;
    wrong.untouched(c)?;
    Ok(PASSED.to_owned())
}
