//! Values of requests and answers as JSON has them: texts as on the command line, seconds, and numbers.

use core::{fmt, str::FromStr, time::Duration};

use rnbd::{
    Errno,
    client::{OnLoss, state::DeviceState},
    proto::AccessMode,
};
use rtrs::{
    addr::{AddrError, PathAddr},
    admission::PathKey,
    client::{PathCounters, Policy, SessionConfig, state::PathState},
    proto::DEFAULT_PORT,
    server::{request::SessionKey, state::PathState as ServerPathState},
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use super::names::{Named, TaskState};

/// A value that JSON has in another form.
pub(super) trait Wire: Sized {
    /// This form.
    type Form: Serialize + for<'de> Deserialize<'de>;
    fn form(&self) -> Self::Form;
    /// # Errors
    /// Says what is wrong with the form.
    fn of(form: Self::Form) -> Result<Self, String>;
}

pub(super) fn serialize<T: Wire, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    value.form().serialize(serializer)
}

pub(super) fn deserialize<'de, T: Wire, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    T::of(Deserialize::deserialize(deserializer)?).map_err(D::Error::custom)
}

impl<T: Wire> Wire for Option<T> {
    type Form = Option<T::Form>;

    fn form(&self) -> Self::Form {
        self.as_ref().map(T::form)
    }

    fn of(form: Self::Form) -> Result<Self, String> {
        form.map(T::of).transpose()
    }
}

impl<T: Wire> Wire for Vec<T> {
    type Form = Vec<T::Form>;

    fn form(&self) -> Self::Form {
        self.iter().map(T::form).collect()
    }

    fn of(form: Self::Form) -> Result<Self, String> {
        form.into_iter().map(T::of).collect()
    }
}

/// Forms of types: how a value becomes its form, and a form the value.
macro_rules! wire {
    ($($type:ty as $form:ty: $to:expr, $of:expr;)*) => {
        $(impl Wire for $type {
            type Form = $form;

            fn form(&self) -> $form {
                $to(*self)
            }

            fn of(form: $form) -> Result<Self, String> {
                $of(form)
            }
        })*
    };
}

wire! {
    PathAddr as String: |path| path_text(&path), |text: String| read_path(&text, DEFAULT_PORT).map_err(|e| e.to_string());
    Policy as String: |policy: Self| policy.to_string(), read;
    AccessMode as String: |mode: Self| mode.to_string(), read;
    OnLoss as String: on_loss_text, |text: String| read_on_loss(&text);
    // In seconds.
    Duration as f64: |time: Self| time.as_secs_f64(), |s| Self::try_from_secs_f64(s).map_err(|e| format!("{s} s: {e}"));
    SessionKey as u64: |key: Self| key.0, |number| Ok(Self(number));
    PathKey as u64: PathKey::value, |number| Ok(PathKey::of(number));
    Errno as i32: Errno::raw, |number| Ok(Errno::from_wire(number));
    PathState as String: named, of_name;
    ServerPathState as String: named, of_name;
    DeviceState as String: named, of_name;
    PathCounters as String: named, of_name;
    TaskState as String: named, of_name;
}

fn read<T: FromStr<Err: fmt::Display>>(text: String) -> Result<T, String> {
    text.parse().map_err(|e: T::Err| e.to_string())
}

fn named<T: Named>(value: T) -> String {
    value.name().to_owned()
}

fn of_name<T: Named>(name: String) -> Result<T, String> {
    let found = T::ALL.iter().find(|value| value.name() == name);
    found.copied().ok_or_else(|| {
        let names: Vec<_> = T::ALL.iter().map(|value| value.name()).collect();
        format!("{name:?} is none of {}", names.join(", "))
    })
}

/// A path with the port of its destination, which its `Display` leaves out: `SRC,DST:PORT`.
pub fn path_text(path: &PathAddr) -> String {
    match path.src {
        Some(src) => format!("{src},{}", path.dst),
        None => path.dst.to_string(),
    }
}

/// Reads a path of addresses, to this port if its destination names none. A link-local address may name an interface of this host.
///
/// # Errors
/// Says which part is wrong.
pub fn read_path(text: &str, port: u16) -> Result<PathAddr, AddrError> {
    PathAddr::parse(text, port, &|name| nix::net::if_::if_nametoindex(name).ok())
}

/// Reconnect attempts as the kernel has them: -1 for no limit.
pub fn signed_attempts(attempts: u32) -> i64 {
    match attempts {
        SessionConfig::FOREVER => -1,
        attempts => i64::from(attempts),
    }
}

/// A loss policy as on the command line: `error`, `queue` or `queue=SECONDS`.
pub fn on_loss_text(on_loss: OnLoss) -> String {
    match on_loss {
        OnLoss::Error => "error".to_owned(),
        OnLoss::Queue(None) => "queue".to_owned(),
        OnLoss::Queue(Some(time)) => format!("queue={}", time.as_secs_f64()),
    }
}

/// Reads `error`, `queue` or `queue=SECONDS`.
///
/// # Errors
/// Says what it must be.
pub fn read_on_loss(text: &str) -> Result<OnLoss, String> {
    let seconds = |text: &str| Duration::try_from_secs_f64(text.parse().ok()?).ok();
    let on_loss = match text.split_once('=') {
        None if text == "error" => Some(OnLoss::Error),
        None if text == "queue" => Some(OnLoss::Queue(None)),
        Some(("queue", time)) => seconds(time)
            .filter(|time| !time.is_zero())
            .map(|time| OnLoss::Queue(Some(time))),
        _ => None,
    };
    on_loss.ok_or_else(|| format!("{text:?} must be error, queue or queue=SECONDS"))
}

/// Microseconds, in whole numbers.
pub(super) mod micros {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(time: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        time.map(|time| time.as_micros() as u64).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        Ok(Option::deserialize(deserializer)?.map(Duration::from_micros))
    }
}

/// Permissions in octal digits, as of `chmod`.
pub(super) mod octal {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(mode: &u32, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{mode:04o}"))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
        u32::from_str_radix(&String::deserialize(deserializer)?, 8).map_err(D::Error::custom)
    }
}

/// A path as it is listed: its name without the port, as in the kernel's tree, and the port.
pub(super) mod listed_path {
    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Listed {
        path: String,
        port: u16,
    }

    pub(crate) fn serialize<S: Serializer>(addr: &PathAddr, serializer: S) -> Result<S::Ok, S::Error> {
        let (path, port) = (addr.to_string(), addr.dst.port());
        Listed { path, port }.serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathAddr, D::Error> {
        let Listed { path, port } = Listed::deserialize(deserializer)?;
        PathAddr::parse(&path, port, &|_| None).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_policies_have_one_form() {
        for (text, on_loss) in [
            ("error", OnLoss::Error),
            ("queue", OnLoss::Queue(None)),
            ("queue=1.5", OnLoss::Queue(Some(Duration::from_millis(1500)))),
        ] {
            assert_eq!(read_on_loss(text), Ok(on_loss));
            assert_eq!(on_loss.form(), text);
        }
        for wrong in [
            "",
            "wait",
            "queue=",
            "queue=-1",
            "queue=0",
            "queue=NaN",
            "queue=1e300",
            "error=3",
        ] {
            assert!(read_on_loss(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_path_keeps_its_port_and_interface() {
        for text in [
            "192.0.2.7:99",
            "192.0.2.1,192.0.2.7:1234",
            "[2001:db8::7]:99",
            "fe80::1,[fe80::7%3]:1234",
        ] {
            let path = read_path(text, 1).unwrap();
            assert_eq!(path_text(&path), text);
        }
    }
}
