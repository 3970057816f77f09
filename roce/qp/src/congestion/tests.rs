//! Tests of the congestion control.

use super::*;
use crate::window::Window;

#[test]
fn a_timeout_of_many_queue_pairs_counts_once_and_can_be_taken_back() {
    let mut w = Window::new(CONFIG);
    let mut now = 0;
    for _ in 0..8 {
        now = round(&mut w, now, 100);
    }
    let size = w.size();
    for _ in 0..100 {
        w.on_loss(at(now), Loss::Timeout, 0);
    }
    assert_eq!(w.size(), CONFIG.min);
    w.on_spurious_timeout();
    assert_eq!(w.size(), size);
}

const KB: usize = 1024;
const CONFIG: WindowConfig = WindowConfig {
    initial: 64 * KB,
    min: 16 * KB,
    max: 1024 * KB,
};

fn at(us: u64) -> Instant {
    Instant::from_nanos(us * 1000)
}

/// Sends a full window and has it acknowledged in pieces, `rtt` microseconds later; returns the new time.
fn round(w: &mut Window, mut now: u64, rtt: u64) -> u64 {
    let n = w.available();
    w.on_sent(n);
    now += rtt;
    for _ in 0..4 {
        w.on_acked(at(now), n / 4, Some(Duration::from_micros(rtt)));
    }
    w.forget(w.in_flight());
    now
}

#[test]
fn it_opens_to_the_limit_while_round_trips_stay_short() {
    let mut w = Window::new(CONFIG);
    let mut now = 0;
    for _ in 0..8 {
        now = round(&mut w, now, 100);
    }
    assert_eq!(w.size(), CONFIG.max);
}

#[test]
fn an_unused_window_does_not_grow() {
    let mut w = Window::new(CONFIG);
    for i in 0..1000 {
        w.on_sent(KB);
        w.on_acked(at(i * 100), KB, Some(Duration::from_micros(100)));
    }
    assert_eq!(w.size(), CONFIG.initial);
}

#[test]
fn long_round_trips_shrink_it_to_its_share_of_the_queue() {
    let mut w = Window::new(CONFIG);
    let mut now = 0;
    for _ in 0..8 {
        now = round(&mut w, now, 100);
    }
    for _ in 0..10 {
        now = round(&mut w, now, 20_000);
    }
    assert!(w.size() >= SHARE && w.size() < SHARE * 5 / 4, "{}", w.size());
    // When the queue is gone it grows again.
    for _ in 0..10 {
        now = round(&mut w, now, 100);
    }
    assert_eq!(w.size(), CONFIG.max);
}

#[test]
fn a_queue_that_nobody_else_fills_is_made_empty_now_and_then() {
    let mut w = Window::new(CONFIG);
    let mut now = 0;
    now = round(&mut w, now, 100);
    let (mut looks, begin) = (0, now);
    while now < begin + 5_000_000 {
        // A link of 100 bytes per microsecond.
        let rtt = 100 + w.available() as u64 / 100;
        let before = w.size();
        now = round(&mut w, now, rtt);
        looks += u32::from(w.size() < before / 2);
    }
    assert!((8..=11).contains(&looks), "{looks}");
}

/// A window that has never found the queue empty, and no longer gives way; and the time, microseconds.
fn beside_greedy() -> (Window, u64) {
    let mut w = Window::new(CONFIG);
    let mut now = round(&mut w, 0, 100);
    while now < 2_000_000 {
        now = round(&mut w, now, 8_000);
    }
    assert_eq!(w.size(), CONFIG.max, "it does not give way any more");
    (w, now)
}

#[test]
fn losses_count_beside_senders_that_leave_no_queue_empty() {
    let (mut w, mut now) = beside_greedy();
    let size = w.size();
    for _ in 0..3 {
        // All of one round trip are one loss.
        w.on_loss(at(now), Loss::Selective, KB);
    }
    assert!(w.size() < size * 3 / 4 && w.size() > size * 2 / 3);
    // And when the queue is found empty it gives way again.
    for _ in 0..3 {
        now = round(&mut w, now, 100);
    }
    let size = w.size();
    for _ in 0..5 {
        now = round(&mut w, now, 3_000);
    }
    assert!(w.size() < size, "{} of {size}", w.size());
}

#[test]
fn isolated_losses_do_not_starve_it() {
    let mut w = Window::new(CONFIG);
    let mut now = 0;
    for i in 0..400 {
        now = round(&mut w, now, 100);
        // One packet of 4 KiB in about two windows.
        if i % 2 == 0 {
            w.on_loss(at(now), Loss::Gap, 4 * KB);
        }
    }
    assert!(w.size() > CONFIG.max / 2, "{}", w.size());
}

#[test]
fn what_one_overflow_loses_shrinks_it_once() {
    let (mut w, now) = beside_greedy();
    let size = w.size();
    // What came last has waited in the full queue for longer than the rest. Heavy as it is, and told in pieces.
    w.on_acked(at(now), KB, Some(Duration::from_millis(30)));
    for i in 0..8 {
        w.on_loss(at(now + i * 3_000), Loss::Selective, 64 * KB);
    }
    assert!(w.size() > size * 2 / 3, "{} of {size}", w.size());
    w.on_loss(at(now + 31_000), Loss::Selective, KB);
    assert!(w.size() < size / 2, "{} of {size}", w.size());
}

#[test]
fn a_loss_during_a_look_is_one_of_the_whole_window() {
    let mut w = Window::new(CONFIG);
    let mut now = round(&mut w, 0, 100);
    let mut size = w.size();
    // It looks when it is much smaller all of a sudden.
    while w.size() > size / 2 || now < 2_000_000 {
        size = w.size();
        now = round(&mut w, now, 8_000);
    }
    w.on_loss(at(now), Loss::Selective, KB);
    assert!(w.size() > size * 2 / 3, "{} of {size}", w.size());
}

#[test]
fn one_long_round_trip_makes_no_loss_count() {
    // What a loss makes of a window after so many long rounds. All acknowledgements of a round but the first are the next one's.
    let lossy = |long: u32| {
        let mut w = Window::new(CONFIG);
        let now = (0..8).fold(0, |now, _| round(&mut w, now, 2_000));
        let now = (0..=long).fold(now, |now, _| round(&mut w, now, 7_000));
        let size = w.size();
        w.on_loss(at(now), Loss::Selective, 4 * KB);
        (size, w.size())
    };
    let (size, left) = lossy(1);
    assert_eq!(left, size, "somebody who carries packets did not run for a while");
    let (size, left) = lossy(2);
    assert_eq!(left, size / 10 * 7, "there is a queue");
}

#[test]
fn told_losses_shrink_it_only_when_they_are_heavy() {
    let lossy = |percent: usize| {
        let mut w = Window::new(CONFIG);
        let mut now = 0;
        for _ in 0..200 {
            let n = w.available();
            w.on_sent(n);
            now += 20_000;
            let lost = n * percent / 100;
            w.on_loss(at(now), Loss::Selective, lost);
            w.on_acked(at(now), n - lost, Some(Duration::from_millis(20)));
            w.forget(w.in_flight());
        }
        w.size()
    };
    assert_eq!((lossy(0), lossy(3), lossy(12)), (CONFIG.max, CONFIG.max, CONFIG.max));
    assert!(lossy(30) < SELECTIVE_LEAST * 2, "{}", lossy(30));
}

#[test]
fn a_receiver_that_holds_less_makes_it_shrink_to_about_that() {
    // The peer takes 100 KB of every burst and drops the rest.
    let room = 100 * KB;
    let mut w = Window::new(CONFIG);
    let (mut now, mut sizes) = (0, Vec::new());
    for _ in 0..200 {
        let n = w.available();
        w.on_sent(n);
        now += 100;
        w.on_acked(at(now), n.min(room), Some(Duration::from_micros(100)));
        if n > room {
            w.on_loss(at(now), Loss::Gap, 4 * KB);
            w.forget(w.in_flight());
        }
        sizes.push(w.size());
    }
    let late = &sizes[50..];
    assert!(late.iter().all(|s| *s <= 3 * room && *s >= room / 2), "{late:?}");
}

#[test]
fn a_timeout_starts_over_from_the_bottom_and_recovers_quickly() {
    let mut w = Window::new(CONFIG);
    let mut now = 0;
    for _ in 0..8 {
        now = round(&mut w, now, 100);
    }
    w.on_loss(at(now), Loss::Timeout, 0);
    assert_eq!(w.size(), CONFIG.min);
    for _ in 0..6 {
        now = round(&mut w, now, 100);
    }
    assert!(w.size() >= CONFIG.max / 2, "{}", w.size());
}

#[test]
fn limits_hold_whatever_happens() {
    let mut w = Window::new(CONFIG);
    for i in 0..100 {
        w.on_loss(at(i), Loss::Gap, 64 * KB);
        w.on_loss(at(i), Loss::Timeout, 0);
    }
    assert_eq!(w.size(), CONFIG.min);
    for i in 0..1000 {
        round(&mut w, i * 100, 100);
    }
    assert_eq!(w.size(), CONFIG.max);
}
