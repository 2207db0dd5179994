//! The history of a rank's updates, which must be equal on all ranks.
//!
//! Every rank hashes the settings of its updates and, if requested, the checksums of its parameters. The hash is sent
//! with the counts of every step. The settings and checksums themselves are sent only if the hashes differ.

use dist_collectives::Communicator;

use crate::agreement::{self, Difference, Setting, hash, hash_more};
use crate::optim::name_of;
use crate::{Error, Optimizer, OptimizerSetting, ParamInfo, Result};

/// The history of one rank's updates.
#[derive(Debug)]
pub(crate) struct Updates {
    /// The hash of all updates since the training began or a checkpoint was loaded.
    hash: u64,
    /// The changes since the last step.
    latest: Vec<ParameterChange>,
    /// `true` if a step was taken since.
    is_over: bool,
}

/// A change of gradients or parameters between steps.
#[derive(Debug)]
enum ParameterChange {
    Clipped {
        max: f64,
    },
    Scaled {
        factor: f64,
    },
    Updated {
        optimizer: &'static str,
        settings: Vec<OptimizerSetting>,
    },
    /// The checksums of parameters that ranks compare.
    Compared {
        checksums: Vec<(usize, u32)>,
    },
    /// A batch that every rank must hold whole.
    Batch {
        digest: u64,
    },
}

impl Updates {
    pub(crate) fn new() -> Self {
        Self { hash: hash([]), latest: Vec::new(), is_over: false }
    }

    /// Records that gradients are clipped to this norm.
    pub(crate) fn record_clipping(&mut self, max: f64) {
        self.record(ParameterChange::Clipped { max });
    }

    /// Records that gradients are scaled by this factor.
    pub(crate) fn record_scaling(&mut self, factor: f64) {
        self.record(ParameterChange::Scaled { factor });
    }

    /// Records an update with this optimizer.
    pub(crate) fn record_update(&mut self, optimizer: &dyn Optimizer) {
        self.record(ParameterChange::Updated {
            optimizer: name_of(optimizer),
            settings: optimizer.settings(),
        });
    }

    /// Records the checksums of parameters that must be equal on all ranks.
    pub(crate) fn record_parameters(&mut self, checksums: Vec<(usize, u32)>) {
        self.record(ParameterChange::Compared { checksums });
    }

    /// Records the digest of a batch that all ranks must hold alike.
    pub(crate) fn record_batch(&mut self, digest: u64) {
        self.record(ParameterChange::Batch { digest });
    }

    fn record(&mut self, change: ParameterChange) {
        if std::mem::take(&mut self.is_over) {
            self.latest.clear();
        }
        self.hash = change.hash(self.hash);
        self.latest.push(change);
    }

    /// Records a step on which the ranks agree.
    pub(crate) const fn record_step(&mut self) {
        self.is_over = true;
    }

    /// Clears the history, as at the start of the training.
    pub(crate) fn forget(&mut self) {
        *self = Self::new();
    }

    /// Returns the hash, which is equal on ranks with equal updates.
    pub(crate) const fn hash(&self) -> u64 {
        self.hash
    }

    /// Returns a number below 2²² that is equal on ranks with equal updates. It changes with every update, so a
    /// difference that it hides at one step appears at the next.
    pub(crate) const fn number(&self) -> i64 {
        (self.hash >> 42).cast_signed()
    }

    /// Returns the error of ranks whose numbers differ. All ranks of these groups call this, as for
    /// [`agreement::first_difference`].
    pub(crate) fn differ(&self, groups: &mut [&mut Communicator], infos: &[ParamInfo]) -> Error {
        let number = match groups {
            [group] => group.rank(),
            [group, ..] => group.members_in_world()[group.rank()],
            [] => 0,
        };
        let settings: Vec<Setting> = self.latest.iter().flat_map(|change| change.texts(infos)).collect();
        match agreement::first_difference(groups, number, &settings) {
            Err(error) => error,
            Ok(Some(Difference { rank, setting, .. })) if setting == BATCH => Error::BatchesDiffer { rank },
            Ok(Some(Difference { rank, setting, there, on_first })) => match setting.strip_suffix(CHECKSUM) {
                Some(parameter) => Error::ParametersDiffer { rank, parameter: parameter.to_owned() },
                None => Error::SettingsDiffer { rank, setting, there, on_rank_0: on_first },
            },
            Ok(None) => Error::EarlierSettingsDiffer,
        }
    }

    /// Returns the error of [`differ`](Self::differ) unless the updates of all ranks of these groups are equal.
    pub(crate) fn check(&self, groups: &mut [&mut Communicator], infos: &[ParamInfo]) -> Result<()> {
        let all = agreement::gather_over(groups.iter_mut().map(|group| &mut **group), vec![self.hash])?;
        if all.iter().all(|hash| *hash == all[0]) { Ok(()) } else { Err(self.differ(groups, infos)) }
    }
}

impl ParameterChange {
    fn hash(&self, before: u64) -> u64 {
        let number = |hash, number: u64| hash_more(hash, number.to_le_bytes());
        match self {
            Self::Clipped { max } => number(hash_more(before, *b"clipped"), max.to_bits()),
            Self::Scaled { factor } => number(hash_more(before, *b"scaled"), factor.to_bits()),
            Self::Updated { optimizer, settings } => {
                let begun = hash_more(before, optimizer.bytes().chain(*b" updated"));
                settings.iter().fold(begun, |hash, setting| {
                    let of_name = hash_more(hash, setting.name.bytes());
                    let parameter = setting.parameter.map_or(u64::MAX, |parameter| parameter as u64);
                    number(number(of_name, parameter), setting.value.to_bits())
                })
            }
            Self::Compared { checksums } => {
                let begun = hash_more(before, *b"compared");
                checksums.iter().fold(begun, |hash, &(_, checksum)| number(hash, checksum.into()))
            }
            Self::Batch { digest } => number(hash_more(before, *b"batch"), *digest),
        }
    }

    fn texts(&self, infos: &[ParamInfo]) -> Vec<Setting> {
        match self {
            Self::Clipped { max } => vec![agreement::setting("the norm that gradients are clipped to", max)],
            Self::Scaled { factor } => {
                vec![agreement::setting("the factor that gradients are scaled by", factor)]
            }
            Self::Updated { optimizer, settings } => {
                let kind = ("the optimizer of the update".to_owned(), (*optimizer).to_owned());
                let text = |setting: &OptimizerSetting| {
                    let parameter = setting.parameter.and_then(|parameter| infos.get(parameter));
                    let of = parameter.map_or_else(String::new, |info| format!(" of {}", info.name));
                    (format!("{}{of}", setting.name), setting.value.to_string())
                };
                std::iter::once(kind).chain(settings.iter().map(text)).collect()
            }
            Self::Compared { checksums } => {
                let text = |&(parameter, checksum): &(usize, u32)| {
                    let name = infos.get(parameter).map_or("", |info| &info.name);
                    (format!("{name}{CHECKSUM}"), format!("{checksum:08x}"))
                };
                checksums.iter().map(text).collect()
            }
            Self::Batch { digest } => vec![(BATCH.to_owned(), format!("{digest:016x}"))],
        }
    }
}

/// The name of a batch's digest among the settings.
const BATCH: &str = "the batch";

/// The suffix of a parameter's name if its checksum differs.
const CHECKSUM: &str = ": the checksum of its values";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FloatType, ParamGroups, Sgd, SgdOptions};

    fn sgd(learning_rate: f64) -> Sgd {
        Sgd::new(SgdOptions { learning_rate, ..SgdOptions::default() }).unwrap()
    }

    #[test]
    fn numbers_are_alike_if_and_only_if_updates_are() {
        let number = |changes: &dyn Fn(&mut Updates)| {
            let mut updates = Updates::new();
            changes(&mut updates);
            assert!((0..1 << 22).contains(&updates.number()));
            updates.number()
        };
        let once = number(&|updates| updates.record_update(&sgd(0.1)));
        assert_eq!(number(&|updates| updates.record_update(&sgd(0.1))), once);
        let infos = [ParamInfo::new("a", [1], FloatType::F32)];
        let mut groups = ParamGroups::new(&infos).unwrap();
        groups.named("a").unwrap().weight_decay = Some(0.5);
        let grouped = sgd(0.1).with_groups(groups).unwrap();
        let others: [&dyn Fn(&mut Updates); 9] = [
            &|_| (),
            &|updates| updates.record_update(&sgd(0.2)),
            &|updates| updates.record_update(&grouped),
            &|updates| [0.1, 0.1].iter().for_each(|&rate| updates.record_update(&sgd(rate))),
            &|updates| {
                updates.record_clipping(0.1);
                updates.record_update(&sgd(0.1));
            },
            &|updates| updates.record_parameters(vec![(0, 1)]),
            &|updates| updates.record_parameters(vec![(0, 2)]),
            &|updates| updates.record_batch(1),
            &|updates| updates.record_batch(2),
        ];
        for other in others {
            assert_ne!(number(other), once);
        }
        assert_ne!(number(others[5]), number(others[6]));
        assert_ne!(number(others[7]), number(others[8]));
    }

    #[test]
    fn only_changes_since_the_last_step_are_reported() {
        let mut updates = Updates::new();
        updates.record_clipping(1.0);
        updates.record_update(&sgd(0.1));
        updates.record_step();
        updates.record_clipping(2.0);
        assert_eq!(updates.latest.len(), 1);
        updates.record_update(&sgd(0.1));
        assert_eq!(updates.latest.len(), 2);
    }
}
