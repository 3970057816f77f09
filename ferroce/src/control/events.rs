//! Events of a process, for its subscribers.

use std::sync::{
    Arc,
    mpsc::{SyncSender, TrySendError},
};

use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::output::escape_json;

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

    /// Sends an event to all subscribers; `text` describes it for people.
    pub(crate) fn publish(&self, event: &Map<String, Value>, text: &str) {
        let subscribers = &mut self.0.lock().all;
        if subscribers.is_empty() {
            return;
        }
        let mut event = event.clone();
        event.insert("text".into(), text.into());
        let line = as_line(&event);
        subscribers.retain_mut(|subscriber| subscriber.send(&line));
    }
}

impl Subscriber {
    /// Sends a line; false: the subscriber is gone.
    fn send(&mut self, line: &str) -> bool {
        if self.lost > 0 {
            let text = format!("{} events were lost, as they were not read", self.lost);
            let notice = as_line(&json!({ "event": "events_lost", "events": self.lost, "text": text }));
            match self.lines.try_send(notice) {
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

/// A value as a line of JSON.
pub(super) fn as_line(value: &impl Serialize) -> String {
    let json = serde_json::to_string(value).unwrap_or_else(|e| {
        // Only of maps whose keys are no strings.
        tracing::error!("a line has no JSON: {e}");
        String::new()
    });
    escape_json(&json).into_owned() + "\n"
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    #[test]
    fn a_subscriber_that_does_not_read_gets_the_number_of_lost_events() {
        let events = Events::default();
        let (send, receive) = sync_channel(2);
        let subscription = events.subscribe(send);
        let tell = |n: u64| {
            let Value::Object(event) = json!({ "event": "stats", "n": n }) else {
                unreachable!()
            };
            events.publish(&event, "text");
        };
        let next = || serde_json::from_str::<Value>(&receive.recv().unwrap()).unwrap();
        (0..5).for_each(tell);
        assert_eq!((next()["n"].clone(), next()["n"].clone()), (json!(0), json!(1)));
        tell(5);
        let lost = next();
        assert_eq!((&lost["event"], &lost["events"]), (&json!("events_lost"), &json!(3)));
        assert_eq!(next()["n"], 5);
        drop(subscription);
        tell(6);
        assert!(receive.recv().is_err());
    }
}
