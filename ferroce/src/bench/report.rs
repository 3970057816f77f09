//! Result of a measurement, as text and as JSON.

use std::{fmt, time::Duration};

use roce::Mtu;
use serde::Serialize;

use super::ceiling::Ceiling;
use crate::output;

/// Microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Latency {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
}

impl Latency {
    /// Returns percentiles of samples in nanoseconds.
    pub(crate) fn of(samples: &mut [u64]) -> Self {
        samples.sort_unstable();
        let at = |permille: usize| {
            let i = (samples.len() * permille / 1000).min(samples.len().saturating_sub(1));
            samples.get(i).map_or(0.0, |ns| *ns as f64 / 1000.0)
        };
        Self {
            p50: at(500),
            p99: at(990),
        }
    }
}

/// Result of a measurement. Field names are stable.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Measurement {
    pub(crate) op: &'static str,
    /// RDMA device of the host; none in software.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<String>,
    /// Bytes of a message.
    pub(crate) bytes: u32,
    pub(crate) depth: u32,
    pub(crate) qps: u32,
    /// Path MTU.
    pub(crate) mtu: usize,
    pub(crate) seconds: f64,
    pub(crate) messages: u64,
    /// 10^9 payload bytes per second.
    pub(crate) gbytes_per_s: f64,
    pub(crate) msgs_per_s: f64,
    /// Time from posting to completion; round trip of ping-pongs.
    pub(crate) latency_us: Latency,
    /// Packets sent by this side.
    pub(crate) packets: u64,
    /// Packets that this side sent more than once.
    pub(crate) retransmits: u64,
    pub(crate) icrc_errors: u64,
    /// Mean of the ceiling's rounds in the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ceiling_gbytes_per_s: Option<f64>,
    /// Best round of the ceiling.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ceiling_best_gbytes_per_s: Option<f64>,
    /// Bandwidth divided by the mean ceiling.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ratio_to_ceiling: Option<f64>,
    /// Bandwidth or median round trip of an RDMA device divided by that in software between addresses of this host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ratio_to_software: Option<f64>,
}

/// Messages completed, and the time it took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Work {
    pub(crate) messages: u64,
    pub(crate) time: Duration,
}

impl Measurement {
    pub(crate) fn new(op: &'static str, bytes: u32, mtu: usize, work: Work, samples: &mut [u64]) -> Self {
        let seconds = work.time.as_secs_f64();
        let rate = work.messages as f64 / seconds.max(1e-9);
        Self {
            op,
            bytes,
            depth: 1,
            qps: 1,
            mtu,
            seconds,
            messages: work.messages,
            gbytes_per_s: rate * f64::from(bytes) / 1e9,
            msgs_per_s: rate,
            latency_us: Latency::of(samples),
            ..Self::default()
        }
    }

    pub(crate) fn of_ceiling(bytes: u32, mtu: Mtu, c: &Ceiling) -> Self {
        let seconds = c.time.as_secs_f64();
        Self {
            seconds,
            messages: (c.msgs_per_s * seconds) as u64,
            gbytes_per_s: c.gbytes_per_s,
            msgs_per_s: c.msgs_per_s,
            packets: c.packets + c.lost,
            icrc_errors: c.icrc_errors,
            ..Self::new("ceiling", bytes, mtu.bytes(), Work::default(), &mut [])
        }
    }

    pub(crate) fn set_ceiling(&mut self, mean: f64, best: f64) {
        self.ceiling_gbytes_per_s = Some(mean);
        self.ceiling_best_gbytes_per_s = Some(best);
        self.ratio_to_ceiling = Some(self.gbytes_per_s / mean.max(1e-9));
    }
}

impl fmt::Display for Measurement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<12} {:>9}  depth {:<3} qps {:<2} mtu {:<4}  {:7.3} GB/s {:>11.0} msg/s",
            self.op,
            output::bytes(self.bytes.into()),
            self.depth,
            self.qps,
            self.mtu,
            self.gbytes_per_s,
            self.msgs_per_s,
        )?;
        let Latency { p50, p99 } = self.latency_us;
        if p50 > 0.0 {
            write!(f, "  p50 {p50:.1} us  p99 {p99:.1} us")?;
        }
        match &self.device {
            // Its packets are not counted here.
            Some(device) => write!(f, "  on {device}")?,
            None => write!(
                f,
                "  retransmits {}  ICRC errors {}",
                self.retransmits, self.icrc_errors
            )?,
        }
        if let Some(ratio) = self.ratio_to_software {
            write!(f, ", {ratio:.2} of software here")?;
        }
        if let (Some(ceiling), Some(ratio)) = (self.ceiling_gbytes_per_s, self.ratio_to_ceiling) {
            write!(f, "  {ratio:.2} of the ceiling ({ceiling:.3} GB/s)")?;
        }
        Ok(())
    }
}
