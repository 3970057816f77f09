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

fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

/// A state with round trips of 1600 us without a queue.
fn usual(size: usize) -> DelayAware {
    DelayAware {
        size,
        threshold: size,
        shortest: [Some(us(1600)), None],
        rtt: us(1600),
        ..DelayAware::new(CONFIG)
    }
}

#[test]
fn a_queue_is_some_beyond_a_sixteenth_and_long_beyond_a_quarter_of_the_shortest_round_trip() {
    for (rtt, queue) in [
        (us(2200), Queue::Empty),
        (us(2200) + Duration::from_nanos(1), Queue::Some),
        (us(2500), Queue::Some),
        (us(2500) + Duration::from_nanos(1), Queue::Long),
    ] {
        assert_eq!(usual(64 * KB).judge(rtt), queue, "{rtt:?}");
    }
}

#[test]
fn the_shortest_round_trip_is_forgotten_after_one_to_two_epochs() {
    let mut control = usual(64 * KB);
    for (s, shortest) in [(30, 1600), (31, 1600), (60, 1600), (61, 1600), (62, 2000), (92, 2000)] {
        control.on_round_trip(at(s * 1_000_000), us(2000), false);
        assert_eq!(control.shortest_rtt(), Some(us(shortest)), "after {s} s");
    }
    // The first round trip after an epoch begins the next one.
    control.on_round_trip(at(93_000_000), us(1900), false);
    assert_eq!(control.shortest, [Some(us(1900)), Some(us(2000))]);
}

#[test]
fn only_a_probe_finds_a_shorter_round_trip_by_more_than_a_sixteenth() {
    for (probed, before, least, shorter) in [
        (true, 851, 800, true),
        (true, 850, 800, false),
        (true, 900, 860, false),
        (true, 700, 800, false),
        (false, 2000, 800, false),
    ] {
        let mut control = DelayAware {
            shortest: [Some(us(least)), None],
            probe: probed.then_some((1, 64 * KB)),
            rtt_before: us(before),
            ..usual(64 * KB)
        };
        control.end_round(at(1000), us(least), false);
        assert_eq!(control.queue, Queue::Empty);
        assert_eq!(control.found_shorter, shorter, "{least} us, {before} us before");
    }
}

#[test]
fn after_competition_one_failed_probe_shows_it_again_for_a_while() {
    for (since, competition) in [(WARY - us(1), Competition::LossBased), (WARY, Competition::DelayBased)] {
        let competed = at(1_000_000);
        let mut control = DelayAware {
            competition: Competition::LossBased,
            failed_probes: 9,
            competed: Some((competed, 200 * KB)),
            ..usual(100 * KB)
        };
        control.end_round(competed + since, us(1600), false);
        assert_eq!(control.competition, Competition::DelayBased, "the queue is empty");
        control.on_failed_probe(competed + since, 100 * KB);
        assert_eq!(control.competition, competition, "{since:?}");
    }
}

#[test]
fn probes_are_due_after_their_intervals() {
    use Competition::*;
    for (competition, falls, failed_probes, found_shorter, shortest, ms) in [
        (DelayBased, false, 0, false, us(1600), 500),
        (DelayBased, false, 0, true, us(1600), 100),
        (DelayBased, false, 1, false, us(1600), 100),
        (DelayBased, true, 0, false, us(1600), 100),
        (LossBased, false, 4, false, us(1600), 1000),
        (LossBased, true, 4, false, us(1600), 250),
        // Ten round trips.
        (DelayBased, true, 0, false, us(20_000), 200),
        (LossBased, false, 4, false, us(150_000), 1500),
    ] {
        let control = DelayAware {
            competition,
            failed_probes,
            found_shorter,
            shortest: [Some(shortest), None],
            probed: at(1000),
            ..usual(64 * KB)
        };
        let due = at(1000) + Duration::from_millis(ms);
        assert!(!control.is_probe_due(due, falls), "{competition:?} {ms} ms");
        assert!(
            control.is_probe_due(due + Duration::from_nanos(1), falls),
            "{competition:?} {ms} ms"
        );
    }
}

/// Another sender may be probing.
#[test]
fn the_queue_falls_when_less_than_three_quarters_are_left() {
    for (delay, probes) in [(3000, false), (2999, true)] {
        let mut control = DelayAware {
            competition: Competition::LossBased,
            delays: [us(4000), us(5000)],
            ..usual(400 * KB)
        };
        control.end_round(at(300_000), us(1600 + delay), false);
        assert_eq!(control.probe.is_some(), probes, "{delay} us");
    }
}

#[test]
fn a_probe_leaves_three_quarters_of_what_fills_no_queue_and_two_of_the_least_windows() {
    for (size, rtt, left) in [
        // Half of the window waits in the queue.
        (400 * KB, 3200, 150 * KB),
        (400 * KB, 1600, 300 * KB),
        (400 * KB, 160_000, 32 * KB),
        (20 * KB, 3200, 20 * KB),
    ] {
        let mut control = DelayAware {
            rtt: us(rtt),
            ..usual(size)
        };
        control.begin_probe(at(1000));
        assert_eq!((control.size, control.full()), (left, size), "{size} {rtt} us");
    }
}

#[test]
fn beside_loss_based_senders_the_window_grows_by_a_step_when_all_of_it_was_delivered() {
    let mut control = DelayAware {
        competition: Competition::LossBased,
        threshold: 100 * KB,
        ..usual(90 * KB)
    };
    let step = 4 * KB + 4 * 1600;
    let sizes: Vec<usize> = (0..6)
        .map(|_| {
            control.grow(50 * KB);
            control.size
        })
        .collect();
    // First to the threshold. A step is due when as much as the window was delivered.
    let once = 100 * KB + step;
    assert_eq!(sizes[..3], [100 * KB, 100 * KB, once]);
    assert_eq!(sizes[3..], [once, once, once + step]);
}

#[test]
fn steps_are_longer_on_long_paths() {
    use Competition::*;
    for (competition, shortest, step) in [
        (DelayBased, 50, STEP),
        (DelayBased, 3999, STEP),
        (DelayBased, 6000, 3 * STEP),
        (DelayBased, 100_000, 16 * STEP),
        (LossBased, 0, 4 * KB),
        (LossBased, 1000, 4 * KB + 4000),
        (LossBased, 100_000, 128 * KB),
    ] {
        let control = DelayAware {
            competition,
            shortest: [Some(us(shortest)), None],
            ..usual(64 * KB)
        };
        assert_eq!(control.step(), step, "{competition:?} {shortest} us");
    }
}

#[test]
fn a_gap_counts_after_less_than_half_a_window_or_if_it_is_heavy() {
    let size = 140 * KB;
    for (run, bytes, left) in [
        (70 * KB, 4 * KB, size),
        (70 * KB - 1, 4 * KB, size / 4 * 3),
        (0, 4 * KB, size / 4 * 3),
        (200 * KB, 20 * KB, size),
        (200 * KB, 20 * KB + 1, size / 4 * 3),
        (200 * KB, 100 * KB, size / 4 * 3),
    ] {
        let mut control = DelayAware { run, ..usual(size) };
        control.on_gap(bytes);
        assert_eq!((control.size, control.threshold), (left, left), "{run} {bytes}");
        assert!(control.go_back_n);
        // The run begins again.
        assert_eq!(control.run, 0);
    }
}

#[test]
fn a_reported_loss_with_a_long_queue_leaves_seven_tenths_and_no_less_than_four_of_the_least_windows() {
    for (size, left) in [
        (200 * KB, 200 * KB / 10 * 7),
        (90 * KB, 64 * KB),
        (70 * KB, 64 * KB),
        (50 * KB, 50 * KB),
    ] {
        let long = DelayAware {
            queue: Queue::Long,
            queue_before: Queue::Long,
            shrunk_until: at(1000),
            ..usual(size)
        };
        let after = |us| {
            let mut control = DelayAware { ..long };
            control.on_selective(at(us), KB);
            control.size
        };
        assert_eq!(after(999), size, "it is one of those that count already");
        assert_eq!(after(1000), left);
    }
}

#[test]
fn a_sixth_of_what_was_sent_is_a_heavy_loss() {
    for (delivered, lost, size, left) in [
        (250 * KB, 50 * KB, 200 * KB, 200 * KB),
        (250 * KB, 50 * KB + 6, 200 * KB, 150 * KB),
        // Too little to judge by.
        (20 * KB, 100 * KB, 64 * KB, 64 * KB),
        (30 * KB, 100 * KB, 64 * KB, 48 * KB),
        (90 * KB, 100 * KB, 200 * KB, 200 * KB),
    ] {
        let mut control = DelayAware {
            selective: (delivered, lost),
            ..usual(size)
        };
        control.judge_selective(at(1000));
        assert_eq!(control.size, left, "{lost} beside {delivered} of {size}");
    }
}

#[test]
fn after_a_timeout_the_window_doubles_up_to_half_of_what_it_was() {
    for (size, threshold) in [(200 * KB, 100 * KB), (201 * KB, 100 * KB + 512), (40 * KB, 32 * KB)] {
        let mut control = usual(size);
        control.on_timeout();
        assert_eq!((control.size, control.threshold), (CONFIG.min, threshold), "{size}");
    }
}
