//! The position of a rank on its host, and of its host among all hosts.

use dist_transport::Rank;

use super::Steps;
use super::level::{ChunkMap, LevelRanks, LevelSchedule};
use crate::{Chunks, Hosts, Phases, Schedule};

/// The position of a rank.
pub(super) struct HostPosition<'a> {
    rank: Rank,
    hosts: &'a Hosts,
    /// The rank among the ranks of its host, as a rank of the level inside hosts.
    pub(super) inside: Rank,
    /// The host of the rank among all hosts, as a rank of the level between hosts.
    pub(super) across: Rank,
    pub(super) root: usize,
    /// The place of its host's leader on that host.
    pub(super) lead: usize,
}

impl<'a> HostPosition<'a> {
    /// Returns the position of a rank; `None` if the hosts belong to another world.
    pub(super) fn of(rank: Rank, hosts: &'a Hosts, root: usize) -> Option<Self> {
        if rank.world_size() != hosts.world_size() {
            return None;
        }
        let (host, root) = (hosts.of(rank.index()), root % rank.world_size());
        let inside = Rank::new(hosts.place(rank.index()), hosts.members(host).len())?;
        let across = Rank::new(host, hosts.count())?;
        let lead = if hosts.of(root) == host { hosts.place(root) } else { 0 };
        Some(Self { rank, hosts, inside, across, root, lead })
    }

    /// Returns the map of a level with one chunk, which is the whole buffer of this many chunks.
    pub(super) const fn whole(chunks: usize) -> ChunkMap {
        ChunkMap::Neighbours { first: 0, each: chunks }
    }

    /// Returns a schedule among the ranks of this rank's host.
    pub(super) fn among_members(&self, schedule: Schedule, chunk_map: ChunkMap) -> LevelSchedule<'a> {
        let ranks = LevelRanks::Members(self.hosts.members(self.across.index()));
        LevelSchedule { schedule, ranks, chunk_map }
    }

    /// Returns a schedule among the leaders of hosts. For other ranks it is empty.
    pub(super) fn among_leaders(&self, schedule: Schedule) -> LevelSchedule<'a> {
        let leads = self.inside.index() == self.lead;
        let schedule = if leads { schedule } else { Schedule::nothing(self.rank) };
        LevelSchedule {
            schedule,
            ranks: LevelRanks::Leaders { hosts: self.hosts, root: self.root },
            chunk_map: ChunkMap::SAME,
        }
    }

    /// Returns a schedule among the ranks at this rank's place on their hosts.
    pub(super) const fn among_places(&self, schedule: Schedule, chunk_map: ChunkMap) -> LevelSchedule<'a> {
        LevelSchedule {
            schedule,
            ranks: LevelRanks::Places { hosts: self.hosts, place: self.inside.index() },
            chunk_map,
        }
    }

    /// Returns an empty schedule.
    pub(super) const fn nothing(&self) -> LevelSchedule<'a> {
        self.among_places(Schedule::nothing(self.rank), ChunkMap::SAME)
    }

    /// Returns a schedule without a second phase.
    pub(super) const fn one_phase(&self, levels: [LevelSchedule<'a>; 3]) -> Phases<Steps<'a>> {
        let nothing = [self.nothing(), self.nothing(), self.nothing()];
        Phases { first: Steps::new(levels), owned: Chunks::NONE, second: Steps::new(nothing) }
    }
}
