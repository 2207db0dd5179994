//! Measuring the costs of messages inside hosts and between them, for two-level algorithms.

use dist_algos::{CostModel, Hosts};

use crate::cost_cache::{CostCache, TopologyKey};
use crate::costs::{FOUND, SET, UNKNOWN};
use crate::{Communicator, ReduceOp, Result};

/// The costs of messages inside a host and between hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LevelModels {
    /// The costs between ranks of one host.
    pub inside: CostModel,
    /// The costs between ranks of different hosts.
    pub across: CostModel,
}

impl LevelModels {
    /// Returns the costs without a measurement: a message inside a host takes a quarter of the time of one between
    /// hosts.
    const fn fixed(across: CostModel) -> Self {
        let inside = CostModel { round_ps: across.round_ps / 4, byte_ps: across.byte_ps / 4, ..across };
        Self { inside, across }
    }

    const fn words(self) -> [u64; 6] {
        let Self { inside, across } = self;
        [
            inside.round_ps,
            inside.byte_ps,
            inside.reduced_byte_ps,
            across.round_ps,
            across.byte_ps,
            across.reduced_byte_ps,
        ]
    }

    const fn from_words(words: [u64; 6]) -> Self {
        let [round_ps, byte_ps, reduced_byte_ps, far_round_ps, far_byte_ps, far_reduced_byte_ps] = words;
        Self {
            inside: CostModel { round_ps, byte_ps, reduced_byte_ps },
            across: CostModel {
                round_ps: far_round_ps,
                byte_ps: far_byte_ps,
                reduced_byte_ps: far_reduced_byte_ps,
            },
        }
    }
}

/// The groups in which the costs of the two levels are measured. `None` on ranks that are not in the group, and for a
/// host with one rank.
struct LevelGroups {
    on_host: Option<Communicator>,
    leaders: Option<Communicator>,
}

/// Returns the hosts of the ranks if two-level algorithms exist for them: there are several hosts, and a host has
/// several ranks.
pub(crate) fn two_levels(hosts: &[u64]) -> Option<Hosts> {
    let hosts = Hosts::new(hosts);
    (hosts.count() > 1 && hosts.largest() > 1).then_some(hosts)
}

/// # Costs of the levels of a network
impl Communicator {
    /// Measures the costs of messages inside hosts and between the first ranks of the hosts, on all ranks at once.
    /// Every rank gets the same result, which is that of the slowest host. No setting changes. Returns `None` if all
    /// ranks share a host, or no two ranks do.
    ///
    /// # Errors
    /// Those of a collective.
    pub fn measure_level_costs(&mut self) -> Result<Option<LevelModels>> {
        let Some(hosts) = two_levels(&self.hosts()) else { return Ok(None) };
        self.internally(|comm| {
            let mut groups = comm.level_groups(&hosts)?;
            comm.measure_levels(&mut groups)
        })
        .map(Some)
    }

    /// Sets the costs of both levels, as [`tune`](Self::tune) does, and enables two-level algorithms.
    pub(crate) fn find_level_costs(
        &mut self,
        hosts: Hosts,
        cache: Option<&CostCache>,
        transport: &str,
    ) -> Result<CostModel> {
        let keys = TopologyKey::of_levels(transport, &self.hosts());
        let cache = cache.filter(|_| self.rank() == 0);
        let fixed = LevelModels::fixed(self.settings.model);
        let (word, mut costs) = match cache.map(|cache| keys.each_ref().map(|key| cache.find(key))) {
            None => (SET, fixed),
            Some([Some(inside), Some(across)]) => (FOUND, LevelModels { inside, across }),
            Some(_) => (UNKNOWN, fixed),
        };
        let mut words = [0; 7];
        words[0] = word;
        words[1..].copy_from_slice(&costs.words());
        self.broadcast(&mut words, 0)?;
        let [word, known @ ..] = words;
        costs = LevelModels::from_words(known);
        if word != SET {
            let mut groups = self.level_groups(&hosts)?;
            if word == UNKNOWN || self.are_levels_too_high(&mut groups, costs)? {
                costs = self.measure_levels(&mut groups)?;
                let [inside, across] = &keys;
                for (key, model) in [(inside, costs.inside), (across, costs.across)] {
                    let saved = cache.map_or(Ok(()), |cache| cache.save(key, model));
                    let _ = saved.inspect_err(|error| {
                        cache.iter().for_each(|cache| cache.log_failure("write", error));
                    });
                }
            }
        }
        self.settings.model = costs.across;
        self.set_topology(hosts, costs.inside)?;
        Ok(costs.across)
    }

    fn level_groups(&mut self, hosts: &Hosts) -> Result<LevelGroups> {
        let members = hosts.members(hosts.of(self.rank()));
        let on_host = self.subgroup(members)?.filter(|group| group.world_size() > 1);
        let leaders: Vec<usize> = hosts.leaders().collect();
        Ok(LevelGroups { on_host, leaders: self.subgroup(&leaders)? })
    }

    /// Measures both levels. Hosts measure at the same time, and the slowest host counts.
    fn measure_levels(&mut self, groups: &mut LevelGroups) -> Result<LevelModels> {
        const NOTHING: CostModel = CostModel { round_ps: 0, byte_ps: 0, reduced_byte_ps: 0 };
        let measured = |group: &mut Option<Self>| group.as_mut().map_or(Ok(NOTHING), Self::measure_costs);
        let (inside, across) = (measured(&mut groups.on_host)?, measured(&mut groups.leaders)?);
        let mut words = LevelModels { inside, across }.words();
        self.all_reduce(&mut words, ReduceOp::Max)?;
        Ok(LevelModels::from_words(words))
    }

    /// Returns `true` if messages of one of the levels take less than three quarters of their stored costs.
    fn are_levels_too_high(&mut self, groups: &mut LevelGroups, costs: LevelModels) -> Result<bool> {
        let check = |group: &mut Option<Self>, costs: &CostModel| {
            group.as_mut().map_or(Ok(true), |group| group.are_too_high(costs))
        };
        let inside = check(&mut groups.on_host, &costs.inside)?;
        let across = check(&mut groups.leaders, &costs.across)?;
        // The costs of the slowest host were stored, so all hosts must be faster than stored.
        let mut too_high = [u8::from(inside), u8::from(across)];
        self.all_reduce(&mut too_high, ReduceOp::Min)?;
        Ok(too_high != [0, 0])
    }
}
