//! What is looked at and tried of the attributes of sessions, paths and devices, to compare those of Linux's kernel with ours.

/// Where attributes are.
pub const ROOTS: [&str; 8] = [
    "class/rtrs-client/$S",
    "class/rtrs-server/$S",
    "class/rnbd-client/ctl",
    "class/rnbd-server/ctl",
    "block/rnbd0/rnbd",
    "block/rnbd0/size",
    "module/rtrs_server/parameters",
    "module/rnbd_server/parameters",
];

/// What is written, and refused unless it is one of the last.
pub const WRITES: [(&str, &str); 50] = [
    ("$C/mpath_policy", ""),
    ("$C/mpath_policy", "3"),
    ("$C/mpath_policy", "-1"),
    ("$C/mpath_policy", "r"),
    ("$C/mpath_policy", "rrr"),
    ("$C/mpath_policy", "best"),
    ("$C/mpath_policy", "99999999999"),
    ("$C/max_reconnect_attempts", ""),
    ("$C/max_reconnect_attempts", "x"),
    ("$C/max_reconnect_attempts", "-2"),
    ("$C/max_reconnect_attempts", "10000"),
    ("$C/max_reconnect_attempts", "0x10"),
    ("$C/max_reconnect_attempts", "1 "),
    ("$C/max_reconnect_attempts", "99999999999"),
    ("$C/add_path", "nowhere"),
    ("$C/add_path", "ip:300.0.0.1"),
    ("$C/add_path", "$P"),
    ("$C/paths/$P/reconnect", "0"),
    ("$C/paths/$P/reconnect", "11"),
    ("$C/paths/$P/reconnect", "x"),
    ("$C/paths/$P/disconnect", "0"),
    ("$C/paths/$P/disconnect", " 1"),
    ("$C/paths/$P/remove_path", "2"),
    ("$C/paths/$P/remove_path", "yes"),
    ("$C/paths/$P/state", "1"),
    ("$C/paths/$P/cur_latency", "1"),
    ("$C/paths/$P/hca_name", "x"),
    ("$C/paths/$P/stats/rdma", "0"),
    ("$C/paths/$P/stats/rdma", "2"),
    ("$C/paths/$P/stats/reconnects", "x"),
    ("$C/paths/$P/stats/cpu_migration_from", "0"),
    ("$C/paths/$P/stats/cpu_migration_to", "11"),
    ("$C/paths/$P/stats/reset_all", "0"),
    ("class/rnbd-client/ctl/map_device", ""),
    ("class/rnbd-client/ctl/map_device", "disk"),
    ("class/rnbd-client/ctl/map_device", "sessname=$S"),
    (
        "class/rnbd-client/ctl/map_device",
        "sessname=$S device_path=x access_mode=wr",
    ),
    (
        "class/rnbd-client/ctl/map_device",
        "sessname=$S device_path=x surprise=1",
    ),
    (
        "class/rnbd-client/ctl/map_device",
        "sessname=$S path=nowhere device_path=x",
    ),
    ("class/rnbd-client/ctl/map_device", "sessname=$S device_path=$D"),
    ("class/rnbd-client/ctl/map_device", "sessname=other device_path=x"),
    ("block/rnbd0/rnbd/resize", "x"),
    ("block/rnbd0/rnbd/resize", "1K"),
    ("block/rnbd0/rnbd/resize", "99999999999999999999"),
    ("block/rnbd0/rnbd/remap_device", "0"),
    ("block/rnbd0/rnbd/remap_device", "1"),
    ("block/rnbd0/rnbd/unmap_device", "maybe"),
    ("$V/paths/$Q/disconnect", "0"),
    ("$V/paths/$Q/stats/rdma", "0"),
    ("class/rnbd-server/ctl/devices/$E/sessions/$T/force_close", "0"),
];

/// What is written and taken, and the file in which that shows.
pub const TAKEN: [(&str, &str); 12] = [
    ("$C/mpath_policy", "round-robin"),
    ("$C/mpath_policy", "MI"),
    ("$C/mpath_policy", "ml"),
    ("$C/mpath_policy", "0"),
    ("$C/mpath_policy", "Min-Latency"),
    ("$C/mpath_policy", "1"),
    ("$C/max_reconnect_attempts", "0"),
    ("$C/max_reconnect_attempts", "9999"),
    ("$C/max_reconnect_attempts", "-1"),
    ("$C/paths/$P/stats/reconnects", "1"),
    ("$C/paths/$P/stats/reset_all", "1"),
    ("$V/paths/$Q/stats/rdma", "1"),
];

/// Differences that are meant: the beginning of a line of either side, and why.
const KNOWN: [(&str, &str); 3] = [
    (
        "text module/rnbd_server/parameters/dev_search_path",
        "ours is a folder of images, and there is none",
    ),
    (
        "file link class/rnbd-client/ctl/devices/",
        "the kernel's `ctl` stands below /sys/devices, and its links lead from there",
    ),
    ("file link class/rnbd-server/ctl/devices/", "likewise"),
];

/// Whether a line is a difference that is meant.
pub fn is_known(line: &str) -> bool {
    KNOWN.iter().any(|(begin, _)| line.starts_with(begin))
}

/// What is called how on one side.
pub struct Names {
    /// The client's session.
    pub session: &'static str,
    /// Its path.
    pub path: String,
    /// Its device.
    pub device: &'static str,
    /// The server's session.
    pub served: &'static str,
    /// Its path.
    pub served_path: String,
    /// Its device, by its own name.
    pub export: &'static str,
    /// The same by the name under which the client asks for it.
    pub asked: &'static str,
}

impl Names {
    /// What stands for names becomes these.
    pub fn fill(&self, text: &str) -> String {
        text.replace("$C", "class/rtrs-client/$S")
            .replace("$V", "class/rtrs-server/$T")
            .replace("class/rtrs-server/$S", "class/rtrs-server/$T")
            .replace("$S", self.session)
            .replace("$P", &self.path)
            .replace("$D", self.device)
            .replace("$T", self.served)
            .replace("$Q", &self.served_path)
            .replace("$E", self.export)
    }

    /// A line without the names, so that both sides have the same.
    pub fn plain(&self, line: &str) -> String {
        let escaped = |device: &str| device.replace('/', "!");
        let names = [
            (self.path.clone(), "PATH"),
            (self.served_path.clone(), "PATH"),
            (escaped(self.device), "DEVICE"),
            (self.device.to_owned(), "DEVICE"),
            (self.asked.to_owned(), "DEVICE"),
            (format!("devices/{}", self.export), "devices/DEVICE"),
            (format!("block/{}", self.export), "block/DEVICE"),
            (format!("rtrs-client/{}", self.session), "rtrs-client/SESSION"),
            (format!("rtrs-server/{}", self.served), "rtrs-server/SESSION"),
            (format!("sessions/{}", self.served), "sessions/SESSION"),
            (format!("@{}", self.session), "@SESSION"),
            (format!("sessname={}", self.session), "sessname=SESSION"),
            (format!("session {}|", self.session), "session SESSION|"),
        ];
        let mut line = line.to_owned();
        for (name, plain) in names {
            line = line.replace(&name, plain);
        }
        line
    }
}

/// Counters, addresses and sizes are each side's own, and so are the names of adapters and the number of processors.
pub fn without_numbers(line: &str) -> String {
    let Some(("text", rest)) = line.split_once(' ') else {
        return line.to_owned();
    };
    let (file, text) = rest.split_once(' ').unwrap_or((rest, ""));
    let name = file.rsplit('/').next().unwrap_or_default();
    let text = match name {
        "hca_name" => "NAME|".to_owned(),
        "src_addr" | "dst_addr" => "ADDRESS|".to_owned(),
        "cpu_migration_from" | "cpu_migration_to" => numbers_as_n(text).replace("N N", "N").replace("N N", "N"),
        "rdma" | "reconnects" | "cur_latency" | "size" => numbers_as_n(text),
        _ => text.to_owned(),
    };
    format!("text {file} {text}")
}

/// Each number is an N.
fn numbers_as_n(text: &str) -> String {
    let mut plain = String::new();
    let mut in_number = false;
    for c in text.chars() {
        match (c.is_ascii_digit(), in_number) {
            (true, false) => plain.push('N'),
            (true, true) => {}
            (false, _) => plain.push(c),
        }
        in_number = c.is_ascii_digit();
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_each_sides_own_is_left_out() {
        let ours = "text class/rtrs-client/SESSION/paths/PATH/stats/cpu_migration_to 0 12 3 |";
        assert!(
            without_numbers(ours).ends_with("cpu_migration_to N |"),
            "{}",
            without_numbers(ours)
        );
        let kernel = "text class/rtrs-client/SESSION/paths/PATH/stats/cpu_migration_to 0 |";
        assert_eq!(without_numbers(ours), without_numbers(kernel));
        assert_eq!(without_numbers("text a/rdma 1 22 3 0|"), "text a/rdma N N N N|");
        assert_eq!(without_numbers("text a/hca_port 1|"), "text a/hca_port 1|");
        assert_eq!(without_numbers("file 644 a/rdma"), "file 644 a/rdma");
    }
}
