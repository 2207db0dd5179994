//! Files with a model of a measured network.

use std::fs;
use std::path::Path;

use dist_collectives::tuning::{CostCache, TopologyKey};
use dist_predict::{LinkModel, MessageCosts};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::quantity::rounded;

/// A network with equal links and equal ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Model {
    pub(super) link: LinkModel,
    pub(super) work: MessageCosts,
    /// Factor of the time to send or receive a byte that is in no cache.
    pub(super) far: f64,
    /// Time of a collective on every rank in addition to its messages, in seconds.
    pub(super) call: f64,
    /// Number of bytes that a send leaves in its socket buffer.
    pub(super) window: u64,
    /// Number of cores that the ranks share, if they are on one host.
    pub(super) cores: Option<usize>,
}

/// A [`Model`] in a file: one JSON object.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelFile {
    latency_us: f64,
    byte_ns: f64,
    send_us: f64,
    #[serde(default)]
    sent_us: f64,
    receive_us: f64,
    copy_byte_ns: f64,
    reduce_byte_ns: f64,
    #[serde(default)]
    call_us: f64,
    #[serde(default)]
    twice_bytes: u64,
    #[serde(default)]
    shared: bool,
    #[serde(default = "near")]
    far: f64,
    #[serde(default)]
    window_bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cores: Option<usize>,
}

impl Model {
    /// Reads a file with a fitted model, or with the costs that `distctl tune` has stored for this number of
    /// ranks.
    pub(super) fn read(path: &Path, ranks: usize) -> Result<Self, Error> {
        let text =
            fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        let wrong = |reason: String| Error::Model { path: path.to_owned(), reason };
        if text.trim_start().starts_with('{') {
            let fields = serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?;
            return Self::from_fields(fields).map_err(wrong);
        }
        let kept = CostCache::at(path).read().map_err(|e| wrong(e.to_string()))?;
        let fitting: Vec<_> = kept.iter().filter(|(world, _)| world.ranks() == ranks).collect();
        let listed = |worlds: &mut dyn Iterator<Item = &TopologyKey>| {
            worlds.map(|world| format!("\"{world}\"")).collect::<Vec<_>>().join(", ")
        };
        let costs = match fitting[..] {
            [(_, costs)] => costs,
            [] => {
                let known = listed(&mut kept.keys());
                return Err(wrong(format!("it has no costs for {ranks} ranks, only for {known}")));
            }
            _ => {
                let all = listed(&mut fitting.iter().map(|(world, _)| *world));
                return Err(wrong(format!(
                    "{all} all have {ranks} ranks: use a file with only one of these lines"
                )));
            }
        };
        let seconds = |picoseconds: u64| picoseconds as f64 * 1e-12;
        Ok(Self {
            link: LinkModel { latency: seconds(costs.round_ps), byte: seconds(costs.byte_ps) },
            work: MessageCosts { reduce: seconds(costs.reduced_byte_ps), ..MessageCosts::NONE },
            far: near(),
            call: 0.0,
            window: 0,
            cores: None,
        })
    }

    /// Returns the content of a file with this model.
    pub(super) fn json(&self) -> String {
        let Self { link, work, far, call, window, cores } = *self;
        let fields = ModelFile {
            latency_us: rounded(link.latency * 1e6, 4),
            byte_ns: rounded(link.byte * 1e9, 6),
            send_us: rounded(work.send * 1e6, 4),
            sent_us: rounded(work.sent * 1e6, 4),
            receive_us: rounded(work.receive * 1e6, 4),
            copy_byte_ns: rounded(work.byte * 1e9, 6),
            reduce_byte_ns: rounded(work.reduce * 1e9, 6),
            call_us: rounded(call * 1e6, 4),
            twice_bytes: work.twice,
            shared: work.shared,
            far: rounded(far, 4),
            window_bytes: window,
            cores,
        };
        serde_json::to_string(&fields).expect("a model has only numbers") + "\n"
    }

    fn from_fields(fields: ModelFile) -> Result<Self, String> {
        let ModelFile {
            latency_us,
            byte_ns,
            send_us,
            sent_us,
            receive_us,
            copy_byte_ns,
            reduce_byte_ns,
            call_us,
            twice_bytes,
            shared,
            far,
            window_bytes,
            cores,
        } = fields;
        for (name, value) in [
            ("latency_us", latency_us),
            ("byte_ns", byte_ns),
            ("send_us", send_us),
            ("sent_us", sent_us),
            ("receive_us", receive_us),
            ("copy_byte_ns", copy_byte_ns),
            ("reduce_byte_ns", reduce_byte_ns),
            ("call_us", call_us),
            ("far", far),
        ] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(format!("{name} is {value}, which is not a time"));
            }
        }
        if cores == Some(0) {
            return Err("cores is 0".to_owned());
        }
        Ok(Self {
            link: LinkModel { latency: latency_us * 1e-6, byte: byte_ns * 1e-9 },
            work: MessageCosts {
                send: send_us * 1e-6,
                sent: sent_us * 1e-6,
                receive: receive_us * 1e-6,
                byte: copy_byte_ns * 1e-9,
                reduce: reduce_byte_ns * 1e-9,
                twice: twice_bytes,
                shared,
            },
            far,
            call: call_us * 1e-6,
            window: window_bytes,
            cores,
        })
    }
}

/// Approximate values for ranks on one host over TCP.
impl Default for Model {
    fn default() -> Self {
        Self {
            link: LinkModel { latency: 5e-6, byte: 0.1e-9 },
            work: MessageCosts {
                send: 2e-6,
                sent: 0.0,
                receive: 2e-6,
                byte: 0.2e-9,
                reduce: 0.1e-9,
                ..MessageCosts::NONE
            },
            far: near(),
            call: 0.0,
            window: 0,
            cores: None,
        }
    }
}

impl Model {
    /// Returns the work of `ranks` ranks on a host, each with a working set of `memory` bytes. Reduced bytes
    /// have just been received, and are in a cache in any case.
    pub(super) fn work_with(&self, memory: usize, ranks: usize) -> MessageCosts {
        let times = 1.0 + (self.far - 1.0) * missed(memory, ranks);
        MessageCosts { byte: self.work.byte * times, ..self.work }
    }

    /// Returns the additional time for loading a byte of the working set into a cache.
    pub(super) fn byte_fetch_time(&self, memory: usize, ranks: usize) -> f64 {
        (self.work_with(memory, ranks).byte - self.work.byte).max(0.0)
    }
}

/// Returns the fraction of the ranks' memory that has left the cache before it is used again.
fn missed(memory: usize, ranks: usize) -> f64 {
    let all = memory as f64 * ranks as f64;
    if all > CACHE { 1.0 - CACHE / all } else { 0.0 }
}

/// Bytes that stay in a cache from one call to the next: three quarters of 32 MiB. The kernel's copies take
/// the rest.
const CACHE: f64 = (24 << 20) as f64;

const fn near() -> f64 {
    1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fitted_models_and_stored_costs_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model");
        fs::write(
            &path,
            r#"{"latency_us":5,"byte_ns":0.1,"send_us":2,"receive_us":1,"copy_byte_ns":0.2,"reduce_byte_ns":0.05,"cores":2}"#,
        )
        .unwrap();
        let model = Model::read(&path, 4).unwrap();
        assert_eq!((model.link.latency, model.work.send, model.cores), (5.0 * 1e-6, 2.0 * 1e-6, Some(2)));
        fs::write(&path, model.json()).unwrap();
        assert_eq!(Model::read(&path, 4).unwrap(), model);
        let lines = "shm 2 1 500000 120 320\ntcp 2 1 9000000 100 50\ntcp 4 1 31000000 190 55\n";
        fs::write(&path, lines).unwrap();
        assert_eq!(Model::read(&path, 4).unwrap().link.latency, 31e6 * 1e-12);
        let error = |ranks| Model::read(&path, ranks).unwrap_err().to_string();
        let none = "it has no costs for 8 ranks, only for \"shm 2 1\", \"tcp 2 1\", \"tcp 4 1\"";
        assert!(error(8).ends_with(none), "{}", error(8));
        let two = "\"shm 2 1\", \"tcp 2 1\" all have 2 ranks: use a file with only one of these lines";
        assert!(error(2).ends_with(two), "{}", error(2));
    }

    #[test]
    fn a_fraction_of_memory_beyond_the_cache_is_loaded() {
        let model = Model { far: 3.0, ..Model::default() };
        let byte = |memory: usize| model.work_with(memory << 20, 2).byte / model.work.byte;
        assert_eq!([byte(1), byte(12)], [1.0, 1.0]);
        // Two ranks with 24 MiB each miss half of their 48 MiB.
        assert!((byte(24) - 2.0).abs() < 1e-9 && (byte(48) - 2.5).abs() < 1e-9);
        assert!((model.byte_fetch_time(24 << 20, 2) / model.work.byte - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_file_that_is_not_a_model_is_named_with_the_reason() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model");
        let negative = r#"{"latency_us":-5,"byte_ns":0.1,"send_us":2,"receive_us":2,"copy_byte_ns":0.2,"reduce_byte_ns":0.05}"#;
        for (text, reason) in [(negative, "latency_us is -5"), ("{}", "missing field"), ("10 GbE", "line 1")]
        {
            fs::write(&path, text).unwrap();
            let error = Model::read(&path, 4).unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("model"), "{error}");
        }
        assert!(matches!(Model::read(&directory.path().join("none"), 4), Err(Error::Read { .. })));
    }
}
