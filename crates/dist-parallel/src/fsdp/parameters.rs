//! A rank's part of the parameters: gathering it with the others' before use, freeing it after, changing it.

use std::sync::Arc;

use super::groups::Groups;
use super::layout::{Layout, Piece, Strip};
use super::options::{Degrees, Precision};
use super::spare::Spare;
use crate::flat::{Flat, PendingFlat};
use crate::{Error, FloatType, Lent, Params, Result, Values, ValuesMut, params};

#[derive(Debug)]
pub(crate) struct Parameters {
    /// As the layout's strips, by unit.
    shards: Vec<Vec<Shard>>,
    /// This rank's number among those that share a copy.
    rank: usize,
    /// What the next strip is gathered into.
    spare: Spare,
}

/// What one rank has of a strip.
#[derive(Debug, Default)]
struct Shard {
    /// The own part, padding included; `None` if the model has it.
    master: Option<Flat>,
    /// What a smaller group keeps between forward and backward.
    kept: Option<Flat>,
    /// The whole strip, on its way.
    arriving: Option<PendingFlat>,
    /// The whole strip, while the model is lent it.
    whole: Option<Arc<Flat>>,
}

impl Strip {
    /// The type that the optimizer changes.
    pub(crate) fn master_dtype(&self, precision: Precision) -> FloatType {
        precision.master.filter(|_| self.trainable).unwrap_or(self.dtype)
    }
}

impl Parameters {
    /// Divides the model's first values, strip by strip: `fill` is given each whole strip, of the type that the
    /// optimizer changes, to put them there.
    pub(crate) fn new<M: Params>(
        layout: &Layout,
        degrees: Degrees,
        precision: Precision,
        rank: usize,
        model: &mut M,
        mut fill: impl FnMut(&mut M, &Strip, &mut Flat) -> Result<()>,
    ) -> Result<Self> {
        let mut shards = Vec::with_capacity(layout.units.len());
        for unit in &layout.units {
            let mut of_unit = Vec::with_capacity(unit.strips.len());
            for strip in &unit.strips {
                let dtype = strip.master_dtype(precision);
                let mut whole = Flat::zeros(dtype, strip.padded(layout.shards));
                fill(model, strip, &mut whole)?;
                let outside = degrees.frees || dtype != strip.dtype;
                let master = outside.then(|| whole.part(dtype, rank * strip.part, strip.part));
                if degrees.frees {
                    unload(strip, model)?;
                } else {
                    install(strip, &whole, model)?;
                }
                of_unit.push(Shard { master, ..Shard::default() });
            }
            shards.push(of_unit);
        }
        Ok(Self { shards, rank, spare: Spare::default() })
    }

    /// Begins to gather a unit, among those that kept it if some did.
    pub(crate) fn gather(&mut self, layout: &Layout, unit: usize, groups: &mut Groups) -> Result<()> {
        for (shard, strip) in self.shards[unit].iter_mut().zip(&layout.units[unit].strips) {
            let mut whole = self.spare.take(&mut groups.shards, strip, strip.dtype, layout.shards)?;
            let kept = shard.kept.take();
            let (part, comm) = match (&kept, &mut groups.keepers) {
                (Some(kept), Some(keepers)) => (kept, keepers),
                _ => (shard.master.as_ref().expect(DIVIDED), &mut groups.shards),
            };
            let len = part.len();
            whole.slice_mut(comm.rank() * len, len).convert_from(part.slice(0, len));
            drop(kept);
            shard.arriving = Some(whole.start_gather(comm));
        }
        Ok(())
    }

    /// Waits for a unit and lends it to the model. With `keep`, this rank's group keeps it until it is gathered again.
    pub(crate) fn load(
        &mut self,
        layout: &Layout,
        unit: usize,
        groups: &mut Groups,
        keep: bool,
        model: &mut impl Params,
    ) -> Result<()> {
        for (shard, strip) in self.shards[unit].iter_mut().zip(&layout.units[unit].strips) {
            let whole = groups.wait(shard.arriving.take().expect("a unit is gathered before it is used"))?;
            if let Some(keepers) = groups.keepers.as_ref().filter(|_| keep) {
                let len = whole.len() / keepers.world_size();
                shard.kept = Some(whole.part(strip.dtype, keepers.rank() * len, len));
            }
            let whole = Arc::new(whole);
            for place in &strip.places {
                let lent = Lent::new(Arc::clone(&whole), place.offset, place.len);
                model.load(place.parameter, lent).map_err(|source| {
                    let parameter = model.infos()[place.parameter].name.clone();
                    Error::Model { parameter, source }
                })?;
            }
            match Arc::try_unwrap(whole) {
                Ok(copied) => self.spare.give(copied),
                Err(lent) => shard.whole = Some(lent),
            }
        }
        Ok(())
    }

    /// Frees a unit.
    pub(crate) fn free(&mut self, layout: &Layout, unit: usize, model: &mut impl Params) -> Result<()> {
        for (shard, strip) in self.shards[unit].iter_mut().zip(&layout.units[unit].strips) {
            unload(strip, model)?;
            // Unless somebody still has a part of it.
            if let Some(whole) = shard.whole.take().and_then(Arc::into_inner) {
                self.spare.give(whole);
            }
        }
        Ok(())
    }

    /// This rank's part of a strip, padding included, if it is kept outside the model.
    #[cfg(test)]
    pub(crate) fn part(&self, unit: usize, strip: usize) -> Option<&Flat> {
        self.shards[unit][strip].master.as_ref()
    }

    /// Frees what is kept for the units to come.
    pub(crate) fn rest(&mut self) {
        self.spare.clear();
    }

    /// Waits for what is on its way and frees it.
    pub(crate) fn forget(&mut self) {
        for shard in self.shards.iter_mut().flatten() {
            (shard.arriving, shard.kept, shard.whole) = (None, None, None);
        }
        self.spare.clear();
    }

    /// Calls `f` with the memory of a piece of a strip's own part, wherever it is.
    pub(crate) fn change(
        &mut self,
        (unit, index): (usize, usize),
        piece: Piece,
        model: &mut impl Params,
        mut f: impl FnMut(ValuesMut<'_>) -> Result<()>,
    ) -> Result<()> {
        match &mut self.shards[unit][index].master {
            Some(master) => f(master.slice_mut(piece.at, piece.len)),
            None => params::write(model, piece.parameter, |values| {
                f(values.part(piece.offset..piece.offset + piece.len))
            }),
        }
    }

    /// Calls `f` with a piece of a strip's own part, wherever it is.
    pub(crate) fn read(
        &self,
        (unit, index): (usize, usize),
        piece: Piece,
        model: &impl Params,
        mut f: impl FnMut(Values<'_>),
    ) -> Result<()> {
        match &self.shards[unit][index].master {
            Some(master) => {
                f(master.slice(piece.at, piece.len));
                Ok(())
            }
            None => params::read(model, piece.parameter, &mut |values| {
                f(values.part(piece.offset..piece.offset + piece.len));
            }),
        }
    }

    /// Begins to tell the other ranks the own part of a strip of which every rank's model has the whole.
    pub(crate) fn start_telling(
        &mut self,
        layout: &Layout,
        place: (usize, usize),
        groups: &mut Groups,
        model: &impl Params,
    ) -> Result<()> {
        let strip = &layout.units[place.0].strips[place.1];
        let mut whole = self.spare.take(&mut groups.shards, strip, strip.dtype, layout.shards)?;
        let start = self.rank * strip.part;
        for piece in strip.pieces(self.rank) {
            self.read(place, piece, model, |values| {
                whole.slice_mut(start + piece.at, piece.len).convert_from(values);
            })?;
        }
        self.shards[place.0][place.1].arriving = Some(whole.start_gather(&mut groups.shards));
        Ok(())
    }

    /// Waits for a whole strip and copies it into the model.
    pub(crate) fn finish_telling(
        &mut self,
        layout: &Layout,
        (unit, index): (usize, usize),
        groups: &mut Groups,
        model: &mut impl Params,
    ) -> Result<()> {
        let arriving = self.shards[unit][index].arriving.take();
        let whole = groups.wait(arriving.expect("a strip is told before it is copied"))?;
        install(&layout.units[unit].strips[index], &whole, model)?;
        self.spare.give(whole);
        Ok(())
    }
}

/// Copies a whole strip into the model.
fn install(strip: &Strip, whole: &Flat, model: &mut impl Params) -> Result<()> {
    strip.places.iter().try_for_each(|place| {
        params::write(model, place.parameter, |mut values| {
            values.convert_from(whole.slice(place.offset, place.len));
            Ok(())
        })
    })
}

fn unload(strip: &Strip, model: &mut impl Params) -> Result<()> {
    for place in &strip.places {
        model.unload(place.parameter).map_err(|source| {
            let parameter = model.infos()[place.parameter].name.clone();
            Error::Model { parameter, source }
        })?;
    }
    Ok(())
}

const DIVIDED: &str = "what is freed between its uses was divided";
