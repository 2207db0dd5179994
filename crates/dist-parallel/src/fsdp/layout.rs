//! The layout of a sharded model: pure data, the same on every rank.
//!
//! A unit's parameters of one type form one flat parameter, which is divided into one shard per rank. The last shards
//! can be padded, or be padding only. A parameter that blocks of different units use belongs to the root unit. The
//! root unit has no blocks and stays gathered from the first forward to the last backward. Buffers are in no flat
//! parameter, because every rank always has all of them.

use std::ops::Range;

use super::options::{Precision, Units};
use crate::{BucketPlace, Chunk, Error, FloatType, ParamInfo, Result, Values};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The units in the order of their blocks. The root unit, if any, is the last.
    pub(crate) units: Vec<Unit>,
    /// For each parameter of the model, its location, or `None` for a buffer. Tied parameters have one location.
    pub(crate) locations: Vec<Option<ParameterLocation>>,
    /// The number of ranks that share each flat parameter.
    pub(crate) shards: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unit {
    pub(crate) blocks: Range<usize>,
    pub(crate) flat_params: Vec<FlatParameter>,
    /// The buffers, without other names of earlier ones.
    pub(crate) buffers: Vec<ReplicatedParameter>,
    /// The number of parameters that can report a gradient to this unit. Tied parameters count once per name.
    pub(crate) reporters: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FlatParameter {
    pub(crate) dtype: FloatType,
    pub(crate) trainable: bool,
    pub(crate) places: Vec<BucketPlace>,
    /// The number of values in each rank's shard, padding included.
    pub(crate) shard_len: usize,
}

/// A parameter of which every rank's model always has all values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReplicatedParameter {
    pub(crate) parameter: usize,
    pub(crate) len: usize,
    pub(crate) dtype: FloatType,
}

/// The location of a parameter: its unit, its flat parameter there, and its place in that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ParameterLocation {
    pub(crate) unit: usize,
    pub(crate) flat_param: usize,
    pub(crate) place: usize,
}

/// The values of one parameter in one rank's shard of a flat parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ShardChunk {
    pub(crate) parameter: usize,
    /// The index of the first value in the parameter.
    pub(crate) offset: usize,
    pub(crate) len: usize,
    /// The index of the first value in the shard.
    pub(crate) at: usize,
}

impl Layout {
    /// Returns the layout of a model whose block `i` has the parameters from `starts[i]` up to `starts[i + 1]`.
    pub(crate) fn new(infos: &[ParamInfo], starts: &[usize], units: &Units, shards: usize) -> Result<Self> {
        let blocks = starts.len() - 1;
        let mut layout = Self { units: Vec::new(), locations: Vec::with_capacity(infos.len()), shards };
        let mut units_of = Vec::with_capacity(infos.len());
        for range in ranges(units, blocks)? {
            units_of.resize(starts[range.end], layout.units.len());
            layout.units.push(Unit::new(range));
        }
        let root = layout.units.len();
        for (parameter, info) in infos.iter().enumerate().filter(|(_, info)| info.buffer.is_none()) {
            if let Some(earlier) = info.same_as.filter(|&earlier| units_of[earlier] != units_of[parameter]) {
                units_of[earlier] = root;
            }
        }
        if units_of.contains(&root) {
            layout.units.push(Unit::new(blocks..blocks));
        }
        for (parameter, info) in infos.iter().enumerate() {
            let unit = units_of[parameter];
            let location = match info.same_as {
                Some(earlier) => layout.locations[earlier],
                None if info.buffer.is_some() => {
                    let (len, dtype) = (info.len(), info.dtype);
                    layout.units[unit].buffers.push(ReplicatedParameter { parameter, len, dtype });
                    None
                }
                None => Some(layout.place(unit, parameter, info)),
            };
            layout.locations.push(location);
            if let Some(location) = location {
                layout.units[location.unit].reporters += usize::from(info.trainable);
            }
        }
        for flat_param in layout.units.iter_mut().flat_map(|unit| &mut unit.flat_params) {
            flat_param.shard_len = flat_param.len().div_ceil(shards);
        }
        Ok(layout)
    }

    /// Appends a parameter to the flat parameter of its type in a unit.
    fn place(&mut self, unit: usize, parameter: usize, info: &ParamInfo) -> ParameterLocation {
        let flat_params = &mut self.units[unit].flat_params;
        let alike = |flat_param: &FlatParameter| {
            (flat_param.dtype, flat_param.trainable) == (info.dtype, info.trainable)
        };
        let index = flat_params.iter().position(alike).unwrap_or(flat_params.len());
        if index == flat_params.len() {
            let (dtype, trainable) = (info.dtype, info.trainable);
            flat_params.push(FlatParameter { dtype, trainable, places: Vec::new(), shard_len: 0 });
        }
        let flat_param = &mut flat_params[index];
        flat_param.places.push(BucketPlace { parameter, offset: flat_param.len(), len: info.len() });
        ParameterLocation { unit, flat_param: index, place: flat_param.places.len() - 1 }
    }

    /// Returns the root unit, if there is one.
    pub(crate) fn root(&self) -> Option<usize> {
        self.units.len().checked_sub(1).filter(|&last| self.units[last].is_root())
    }

    /// Returns the last unit with blocks.
    pub(crate) fn last_with_blocks(&self) -> usize {
        self.root().unwrap_or(self.units.len()).saturating_sub(1)
    }

    /// Returns all flat parameters, each with the numbers of its unit and of itself in the unit.
    pub(crate) fn flat_params(&self) -> impl Iterator<Item = ((usize, usize), &FlatParameter)> {
        let units = self.units.iter().enumerate();
        units.flat_map(|(unit, of)| {
            of.flat_params.iter().enumerate().map(move |(at, flat_param)| ((unit, at), flat_param))
        })
    }

    /// Returns everything that a rank holds of the parameters: its shard of each flat parameter, and all buffers.
    pub(crate) fn held_chunks(&self, rank: usize) -> Vec<Chunk> {
        let parts = self.flat_params().flat_map(|(_, flat_param)| flat_param.chunks(rank));
        let whole =
            |buffer: ReplicatedParameter| Chunk { parameter: buffer.parameter, offset: 0, len: buffer.len };
        parts.map(ShardChunk::in_parameter).chain(self.buffers().map(whole)).collect()
    }

    /// Returns the location of one of a rank's [chunks](Self::held_chunks): the position of its flat parameter and
    /// the chunk in the rank's shard. `None` for a buffer.
    ///
    /// # Errors
    /// The rank does not hold it.
    pub(crate) fn locate(&self, chunk: Chunk, rank: usize) -> Result<Option<((usize, usize), ShardChunk)>> {
        let index = chunk.parameter;
        let Some(location) = *self.locations.get(index).ok_or(Error::NoSlot { index })? else {
            return Ok(None);
        };
        let flat_param = &self.units[location.unit].flat_params[location.flat_param];
        let kept = flat_param.chunk(location.place, rank).filter(|kept| kept.in_parameter() == chunk);
        Ok(Some(((location.unit, location.flat_param), kept.ok_or(Error::Freed)?)))
    }

    /// Returns the buffers of all units.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = ReplicatedParameter> {
        self.units.iter().flat_map(|unit| &unit.buffers).copied()
    }
}

impl Unit {
    const fn new(blocks: Range<usize>) -> Self {
        Self { blocks, flat_params: Vec::new(), buffers: Vec::new(), reporters: 0 }
    }

    /// Returns the parameters that are in flat parameters.
    pub(crate) fn sharded(&self) -> impl Iterator<Item = usize> {
        self.flat_params.iter().flat_map(|flat_param| &flat_param.places).map(|place| place.parameter)
    }

    pub(crate) fn is_root(&self) -> bool {
        self.blocks.is_empty() && !self.flat_params.is_empty()
    }
}

impl ShardChunk {
    /// Returns the chunk of the parameter.
    pub(crate) const fn in_parameter(self) -> Chunk {
        Chunk { parameter: self.parameter, offset: self.offset, len: self.len }
    }

    /// Returns the chunk's values of those of its parameter. A parameter that is only counted has none.
    pub(crate) fn of(self, values: Values<'_>) -> Values<'_> {
        if values.is_empty() { values } else { values.part(self.offset..self.offset + self.len) }
    }
}

impl FlatParameter {
    /// Returns the number of values without padding.
    pub(crate) fn len(&self) -> usize {
        self.places.last().map_or(0, |place| place.offset + place.len)
    }

    /// Returns the number of values with padding.
    pub(crate) fn padded(&self, shards: usize) -> usize {
        self.shard_len * shards
    }

    /// Returns the type of mean gradients.
    pub(crate) fn reduce_dtype(&self, precision: Precision) -> FloatType {
        precision.reduce.unwrap_or(self.dtype)
    }

    /// Returns the type in which gradients are summed.
    pub(crate) fn sum_dtype(&self, precision: Precision) -> FloatType {
        self.reduce_dtype(precision).sum_dtype()
    }

    /// Returns the numbers of values without and with padding.
    pub(crate) fn lens(&self, shards: usize) -> (usize, usize) {
        (self.len(), self.padded(shards))
    }

    /// Returns the chunks of one rank's shard. A parameter has at most one.
    pub(crate) fn chunks(&self, shard: usize) -> impl Iterator<Item = ShardChunk> {
        (0..self.places.len()).filter_map(move |place| self.chunk(place, shard))
    }

    /// Returns the chunk of one parameter in one rank's shard, if there is one.
    pub(crate) fn chunk(&self, place: usize, shard: usize) -> Option<ShardChunk> {
        let part = shard * self.shard_len..(shard + 1) * self.shard_len;
        let place = self.places[place];
        let start = place.offset.max(part.start);
        let end = (place.offset + place.len).min(part.end);
        (start < end).then(|| ShardChunk {
            parameter: place.parameter,
            offset: start - place.offset,
            len: end - start,
            at: start - part.start,
        })
    }
}

/// Returns the blocks of each unit.
fn ranges(units: &Units, blocks: usize) -> Result<Vec<Range<usize>>> {
    let sizes = match units {
        Units::EachBlock => vec![1; blocks],
        Units::OneForAll => vec![blocks],
        Units::Blocks(sizes) => sizes.clone(),
    };
    let total = sizes.iter().fold(0, |total: usize, &size| total.saturating_add(size));
    if total != blocks || (sizes.contains(&0) && blocks > 0) {
        return Err(Error::Units { sizes, blocks });
    }
    let mut end = 0;
    let mut range = |size| {
        end += size;
        end - size..end
    };
    Ok(sizes.into_iter().map(&mut range).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns blocks with parameters of these lengths.
    fn model(blocks: &[&[usize]]) -> (Vec<ParamInfo>, Vec<usize>) {
        let mut starts = vec![0];
        let mut infos = Vec::new();
        for lens in blocks {
            let info =
                |(index, &len)| ParamInfo::new(format!("p{}.{index}", starts.len()), [len], FloatType::F32);
            infos.extend(lens.iter().enumerate().map(info));
            starts.push(infos.len());
        }
        (infos, starts)
    }

    #[test]
    fn units_are_runs_of_blocks() {
        let (infos, starts) = model(&[&[2, 3], &[], &[1], &[7]]);
        let blocks = |units: Units| {
            let layout = Layout::new(&infos, &starts, &units, 2)?;
            Ok::<_, Error>(layout.units.iter().map(|unit| unit.blocks.clone()).collect::<Vec<_>>())
        };
        assert_eq!(blocks(Units::EachBlock).unwrap(), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(blocks(Units::OneForAll).unwrap(), vec![0..4; 1]);
        assert_eq!(blocks(Units::Blocks(vec![1, 3])).unwrap(), [0..1, 1..4]);
        for wrong in [vec![1, 2], vec![4, 1], vec![0, 4], vec![usize::MAX, 5], vec![]] {
            assert!(matches!(blocks(Units::Blocks(wrong)), Err(Error::Units { blocks: 4, .. })));
        }
    }

    #[test]
    fn types_and_frozen_parameters_lie_apart() {
        let (mut infos, starts) = model(&[&[2, 3, 4, 5]]);
        infos[1].dtype = FloatType::Bf16;
        infos[3].trainable = false;
        let layout = Layout::new(&infos, &starts, &Units::EachBlock, 4).unwrap();
        let flat_params: Vec<(usize, usize)> =
            layout.flat_params().map(|(_, flat_param)| (flat_param.len(), flat_param.shard_len)).collect();
        assert_eq!(flat_params, [(6, 2), (3, 1), (5, 2)]);
        assert_eq!(layout.units[0].reporters, 3);
    }

    #[test]
    fn buffers_are_never_divided_and_never_held() {
        let (mut infos, starts) = model(&[&[2, 3, 4], &[5, 4]]);
        infos[1].trainable = false;
        infos[2] = ParamInfo::buffer("count", [4], FloatType::F64);
        infos[4] = ParamInfo { same_as: Some(2), ..ParamInfo::buffer("again", [4], FloatType::F64) };
        let layout = Layout::new(&infos, &starts, &Units::EachBlock, 2).unwrap();
        assert_eq!(layout.buffers().map(|whole| whole.parameter).collect::<Vec<_>>(), [2]);
        let sharded: Vec<usize> = layout.units.iter().flat_map(Unit::sharded).collect();
        assert_eq!(sharded, [0, 1, 3]);
        assert_eq!((layout.locations[2], layout.locations[4], layout.root()), (None, None, None));
        assert_eq!(layout.units.iter().map(|unit| unit.reporters).collect::<Vec<_>>(), [1, 1]);
    }

    #[test]
    fn parameters_of_several_units_belong_to_the_root_unit() {
        let (mut infos, starts) = model(&[&[4, 4], &[4], &[4]]);
        infos[1].same_as = Some(0);
        let layout = Layout::new(&infos, &starts, &Units::EachBlock, 2).unwrap();
        assert_eq!((layout.root(), layout.locations[1]), (None, layout.locations[0]));
        infos[3].same_as = Some(2);
        let layout = Layout::new(&infos, &starts, &Units::EachBlock, 2).unwrap();
        assert_eq!(layout.root(), Some(3));
        assert_eq!(layout.locations[2], Some(ParameterLocation { unit: 3, flat_param: 0, place: 0 }));
        assert_eq!(layout.units.iter().map(|unit| unit.reporters).collect::<Vec<_>>(), [2, 0, 0, 2]);
        let together = Layout::new(&infos, &starts, &Units::Blocks(vec![1, 2]), 2).unwrap();
        assert_eq!(together.root(), None);
    }

    proptest! {
        #[test]
        fn the_pieces_of_all_ranks_are_each_value_once(
            lens in prop::collection::vec(0..20_usize, 0..6),
            shards in 1..9_usize,
        ) {
            let (infos, starts) = model(&[&lens]);
            let layout = Layout::new(&infos, &starts, &Units::EachBlock, shards).unwrap();
            let mut seen: Vec<Vec<usize>> = lens.iter().map(|&len| vec![0; len]).collect();
            for (_, flat_param) in layout.flat_params() {
                prop_assert!(flat_param.padded(shards) - flat_param.len() < shards);
                for shard in 0..shards {
                    for ShardChunk { parameter, offset, len, at } in flat_param.chunks(shard) {
                        prop_assert!(len > 0 && at + len <= flat_param.shard_len);
                        seen[parameter][offset..offset + len].iter_mut().for_each(|times| *times += 1);
                        prop_assert_eq!(shard * flat_param.shard_len + at, flat_param.places[parameter].offset + offset);
                    }
                }
            }
            prop_assert!(seen.iter().flatten().all(|&times| times == 1));
        }
    }
}
