//! Counters of processes that have ended.

use roce_broker::{COUNTERS, proto::Ended};

use super::*;

const SENDS: &str = "rdma_sends";

/// Returns the SENDs of all processes of an address.
fn sends(place: &Place, addr: &str) -> u64 {
    place.statistics().sum(&[addr.parse().unwrap()], SENDS)
}

fn own_sends(process: &mut Process) -> u64 {
    process.ask("sends", "sends").parse().unwrap()
}

/// Waits until others see what the process has counted. Returns that.
fn published(place: &Place, process: &mut Process) -> u64 {
    let (pid, counted) = (process.pid(), own_sends(process));
    let shows = |s: &Statistics| {
        let report = s
            .processes
            .iter()
            .find(|p| p.pid == pid)
            .and_then(|p| p.report.as_ref());
        report.is_some_and(|report| report.counters[SENDS] >= counted)
    };
    place.until("it is published", shows);
    counted
}

fn signal(process: &Process, name: &str) {
    let pid = process.pid().to_string();
    assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
}

#[test]
fn a_process_that_exits_leaves_its_counters() {
    const ADDR: &str = "127.45.1.1";
    let place = Place::new();
    let (mut server, mut client) = pair(&place, ADDR, 7000);
    client.more_rounds(5);
    let counted = published(&place, &mut client);
    assert!(counted >= 5);
    client.quit();
    let now = place.statistics();
    let [gone] = now.ended.as_slice() else {
        panic!("{now:?}")
    };
    assert_eq!((gone.processes, now.ended_unknown), (1, 0));
    assert_eq!(gone.addrs, [ADDR.parse::<IpAddr>().unwrap()]);
    assert!(gone.counters[SENDS] >= counted, "{gone:?}, not {counted}");
    let both = gone.counters[SENDS] + published(&place, &mut server);
    assert!(sends(&place, ADDR) >= both);
    assert_eq!(sends(&place, "127.45.1.99"), 0, "of another address");
    // A second one is added.
    let mut client = open(&place, ADDR);
    client.ask(&format!("connect {ADDR} 7000"), "event Established");
    client.more_rounds(5);
    let second = published(&place, &mut client);
    client.quit();
    let now = place.statistics();
    assert_eq!(now.ended[0].processes, 2);
    assert!(now.ended[0].counters[SENDS] >= counted + second);
    server.quit();
}

#[test]
fn counters_do_not_go_back_when_a_process_stops_or_is_killed() {
    const ADDR: &str = "127.45.1.2";
    let place = Place::new();
    let (mut server, mut client) = pair(&place, ADDR, 7000);
    client.more_rounds(5);
    let counted = published(&place, &mut client);
    published(&place, &mut server);
    let running = sends(&place, ADDR);
    assert!(running >= 10);
    signal(&client, "-STOP");
    let now = place.statistics();
    let stopped = now.processes.iter().find(|p| p.pid == client.pid()).unwrap();
    assert!(stopped.report.as_ref().unwrap().counters[SENDS] >= counted);
    let stopped = sends(&place, ADDR);
    assert!(stopped >= running);
    client.kill();
    assert!(sends(&place, ADDR) >= stopped);
    server.quit();
}

/// The process can do nothing at its end.
#[test]
fn a_process_that_is_killed_leaves_its_counters() {
    const ADDR: &str = "127.45.1.4";
    let place = Place::new();
    let (server, mut client) = pair(&place, ADDR, 7000);
    client.more_rounds(5);
    let counted = published(&place, &mut client);
    assert!(counted >= 5);
    signal(&client, "-KILL");
    let now = place.until("it has ended", |s| s.processes.len() == 1);
    assert_eq!((now.ended.len(), now.ended[0].processes, now.ended_unknown), (1, 1, 0));
    assert!(now.ended[0].counters[SENDS] >= counted, "{now:?}, not {counted}");
    client.kill();
    server.quit();
}

/// Dropping the device reports its counters, with the packets that this sends.
#[test]
fn a_device_that_is_closed_leaves_its_counters() {
    let place = Place::new();
    let addr: IpAddr = [127, 45, 1, 3].into();
    let stays = place.join();
    let device = Device::open_shared(DeviceConfig::new(addr), &place.how()).unwrap();
    let qpn = device_numbers(&place, &stays);
    send_merged(addr, [qpn, qpn + 1]);
    wait_until("both packets are there", || device.stats().port.rx_packets == 2);
    assert_eq!(
        device.hw_counters().map(|(name, _)| name),
        COUNTERS[..15],
        "in this order"
    );
    let counted = device.hw_counters().into_iter().chain([("cm_drop_backlog", 0)]);
    let counted = counted.map(|(name, n)| (name.to_owned(), n));
    drop(device);
    let expected = Ended {
        addrs: vec![addr],
        processes: 1,
        counters: counted.collect(),
    };
    let now = place.until("it has left", |s| s.processes.len() == 1);
    assert_eq!(now.ended, [expected]);
}

/// A queue pair number of the member that is not `other`.
fn device_numbers(place: &Place, other: &Membership) -> u32 {
    let all = place.statistics().processes;
    let device = all.iter().find(|p| p.place != other.place()).unwrap();
    device.place.numbers().qpns().first
}

#[test]
fn whatever_a_member_writes_in_its_page_is_numbers_with_our_names() {
    let place = Place::new();
    let stays = place.join();
    let liar = Raw::at(&place.broker_dir());
    let (_, page) = liar.join(None);
    let cut = rustix::fs::ftruncate(&page.0, 0);
    assert_eq!(cut, Err(rustix::io::Errno::PERM));
    // Not UTF-8, and behind the counters what nobody reads.
    page.write(0, &[u64::MAX; 512]);
    let shown = |s: &Statistics| s.processes.iter().find(|p| p.name == "raw").unwrap().report.clone();
    assert_eq!(shown(&place.statistics()), None, "a path MTU that is none");
    page.write(0, &[1]);
    let report = shown(&place.statistics()).unwrap();
    assert!(report.counters.values().all(|n| *n == u64::MAX));
    let mut names: Vec<&str> = report.counters.keys().map(String::as_str).collect();
    let mut ours = COUNTERS.to_vec();
    names.sort_unstable();
    ours.sort_unstable();
    assert_eq!(names, ours);
    page.publish(&[u64::MAX]);
    liar.say(&ToBroker::Goodbye);
    let second = Raw::at(&place.broker_dir());
    second.join(None).1.publish(&[1]);
    second.say(&ToBroker::Goodbye);
    let now = place.until("both have left", |s| s.processes.len() == 1);
    assert_eq!((now.ended.len(), now.ended[0].processes), (1, 2));
    assert_eq!(now.ended[0].counters[COUNTERS[0]], u64::MAX, "it stops there");
    drop(stays);
}

#[test]
fn a_member_whose_connection_was_lost_is_not_counted_twice() {
    let place = Place::new();
    let stays = place.join();
    let first = Raw::at(&place.broker_dir());
    let (own, page) = first.join(None);
    page.publish(&[5]);
    drop(first);
    let now = place.until("it is lost", |s| s.processes.len() == 1);
    assert_eq!(now.sum(&[], COUNTERS[0]), 5);
    let again = Raw::at(&place.broker_dir());
    let (_, page) = again.join(Some(own));
    let now = place.statistics();
    assert_eq!((now.ended.len(), now.sum(&[], COUNTERS[0])), (0, 5));
    page.publish(&[6]);
    again.say(&ToBroker::Goodbye);
    let now = place.until("it has left", |s| s.processes.len() == 1);
    assert_eq!((now.ended[0].processes, now.sum(&[], COUNTERS[0])), (1, 6));
    drop(stays);
}
