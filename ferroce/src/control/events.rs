//! Events of a process, for its subscribers.

use std::sync::{
    Arc,
    mpsc::{SyncSender, TrySendError},
};

use parking_lot::Mutex;

use crate::event::Event;

/// The subscribers.
#[derive(Clone, Default)]
pub(crate) struct Events(Arc<Mutex<Subscribers>>);

#[derive(Default)]
struct Subscribers {
    all: Vec<Subscriber>,
    /// Subscriptions so far.
    count: u64,
}

/// A subscription, until it is dropped.
pub(crate) struct Subscription {
    events: Events,
    number: u64,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.events.0.lock().all.retain(|s| s.number != self.number);
    }
}

struct Subscriber {
    number: u64,
    lines: SyncSender<String>,
    /// Events without room since the last notice of that.
    lost: u64,
}

impl Events {
    /// Sends all events from here on, as lines. A subscriber that does not read them loses some, and is notified how many.
    pub(crate) fn subscribe(&self, lines: SyncSender<String>) -> Subscription {
        let mut subscribers = self.0.lock();
        subscribers.count += 1;
        let number = subscribers.count;
        let subscriber = Subscriber { number, lines, lost: 0 };
        subscribers.all.push(subscriber);
        Subscription {
            events: self.clone(),
            number,
        }
    }

    /// Sends an event to all subscribers; `task`: the daemon's task that reports it.
    pub(crate) fn publish(&self, event: &Event, task: Option<&str>) {
        let subscribers = &mut self.0.lock().all;
        if !subscribers.is_empty() {
            let line = event.json(task, true) + "\n";
            subscribers.retain_mut(|subscriber| subscriber.send(&line));
        }
    }
}

impl Subscriber {
    /// Sends a line; false: the subscriber is gone.
    fn send(&mut self, line: &str) -> bool {
        if self.lost > 0 {
            let notice = Event::EventsLost { events: self.lost };
            match self.lines.try_send(notice.json(None, true) + "\n") {
                Ok(()) => self.lost = 0,
                Err(TrySendError::Full(_)) => {
                    self.lost += 1;
                    return true;
                }
                Err(TrySendError::Disconnected(_)) => return false,
            }
        }
        match self.lines.try_send(line.to_owned()) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                self.lost += 1;
                true
            }
            Err(TrySendError::Disconnected(_)) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_subscriber_that_does_not_read_gets_the_number_of_lost_events() {
        let events = Events::default();
        let (send, receive) = sync_channel(2);
        let subscription = events.subscribe(send);
        let tell = |n: u64| {
            let task = n.to_string();
            events.publish(&Event::TaskStarted { task }, None);
        };
        let next = || serde_json::from_str::<Value>(&receive.recv().unwrap()).unwrap();
        (0..5).for_each(tell);
        assert_eq!(
            (next()["task"].clone(), next()["task"].clone()),
            (json!("0"), json!("1"))
        );
        tell(5);
        let lost = next();
        assert_eq!((&lost["event"], &lost["events"]), (&json!("events_lost"), &json!(3)));
        assert_eq!(next()["task"], "5");
        drop(subscription);
        tell(6);
        assert!(receive.recv().is_err());
    }
}
