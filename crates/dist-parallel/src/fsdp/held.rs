//! What a rank of [`Fsdp`] holds, for checkpoints: its part of every strip, as the optimizer changes it, and all buffers.

use super::options::Degrees;
use super::{Fsdp, layout};
use crate::checkpoint::accumulated;
use crate::{
    Communicator, Error, Holding, ParamInfo, Piece, Result, Shards, Slice, Values, ValuesMut, params,
};

impl<A> Shards for Fsdp<A> {
    fn infos(&self) -> &[ParamInfo] {
        &self.kept
    }

    fn parameters(&self) -> Holding<Piece> {
        self.held(self.held_pieces().into_iter().map(Held::piece).collect())
    }

    fn slices(&self) -> Holding<Slice> {
        let trained = self.pieces().into_iter().filter(|(_, piece)| self.kept[piece.parameter].trainable);
        let slice = |(_, piece): (_, layout::Piece)| Slice { number: piece.parameter, piece: outside(piece) };
        self.held(trained.map(slice).collect())
    }

    fn untrained_to_save(&self) -> Vec<Piece> {
        let saves = |held: &Held| match held {
            Held::Part(_, piece) => self.groups.replicas.rank() == 0 && !self.kept[piece.parameter].trainable,
            Held::Whole(_) => self.rank() == 0,
        };
        self.held_pieces().into_iter().filter(saves).map(Held::piece).collect()
    }

    fn unsaved(&self) -> Option<String> {
        accumulated(self.micro_batches)
    }

    fn read(&self, piece: Piece, f: &mut dyn FnMut(Values<'_>)) -> Result<()> {
        match self.kept_piece(piece)? {
            Held::Part(place, piece) => self.parameters.read(place, piece, &self.model, f),
            Held::Whole(whole) => params::read(&self.model, whole.parameter, f),
        }
    }

    fn write(&mut self, piece: Piece, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<()> {
        let change = |values: ValuesMut<'_>| {
            f(values);
            Ok(())
        };
        match self.kept_piece(piece)? {
            Held::Part(place, piece) => self.parameters.change(place, piece, &mut self.model, change),
            Held::Whole(whole) => params::write(&mut self.model, whole.parameter, change),
        }
    }

    fn updates(&self) -> u64 {
        self.updates.hash()
    }

    fn check_alike(&mut self) -> Result<()> {
        let Self { updates, world, kept, .. } = self;
        updates.check(&mut [world], kept)?;
        let same = self.check_frozen();
        self.or_abort(same)
    }

    fn loaded(&mut self) -> Result<()> {
        self.forget();
        self.updates.forget();
        self.computes = false;
        self.all_gather_updates(|_| true)
    }

    fn communicator_mut(&mut self) -> &mut Communicator {
        self.communicator_mut()
    }
}

/// What a rank holds of one parameter.
#[derive(Clone, Copy)]
enum Held {
    /// A piece of its part of a strip, and the strip's place.
    Part((usize, usize), layout::Piece),
    /// All of a buffer.
    Whole(layout::Whole),
}

impl Held {
    const fn piece(self) -> Piece {
        match self {
            Self::Part(_, piece) => outside(piece),
            Self::Whole(layout::Whole { parameter, len, .. }) => Piece { parameter, offset: 0, len },
        }
    }
}

impl<A> Fsdp<A> {
    /// Everything that this rank holds, in the order in which checkpoints number it.
    fn held_pieces(&self) -> Vec<Held> {
        let parts = self.pieces().into_iter().map(|(place, piece)| Held::Part(place, piece));
        parts.chain(self.plan.layout.buffers().map(Held::Whole)).collect()
    }

    /// That all ranks have the same frozen parameters, where each has all of them and saves a part.
    fn check_frozen(&mut self) -> Result<()> {
        let Degrees { shards, frees, .. } = self.plan.degrees;
        if frees || shards == 1 {
            return Ok(());
        }
        let mut checksums = Vec::new();
        let frozen = self.plan.layout.flat_params().map(|(_, flat_param)| flat_param).filter(|flat_param| !flat_param.trainable);
        let frozen: Vec<usize> =
            frozen.flat_map(|flat_param| &flat_param.places).map(|place| place.parameter).collect();
        for &parameter in &frozen {
            let mut checksum = 0;
            params::read(&self.model, parameter, &mut |values| {
                checksum = crc32fast::hash(values.as_bytes())
            })?;
            checksums.push(checksum);
        }
        let shards = &mut self.groups.shards;
        let mut all = vec![0; checksums.len() * shards.world_size()];
        shards.all_gather(&checksums, &mut all).map_err(Error::communication)?;
        match (0..all.len()).find(|&at| all[at] != all[at % frozen.len()]) {
            Some(at) => {
                let parameter = self.kept[frozen[at % frozen.len()]].name.clone();
                Err(Error::FrozenDiffers { rank: at / frozen.len(), parameter })
            }
            None => Ok(()),
        }
    }

    fn held<T>(&self, pieces: Vec<T>) -> Holding<T> {
        let replicas = &self.groups.replicas;
        Holding { pieces, copy: replicas.rank(), copies: replicas.world_size() }
    }

    /// Where this rank keeps a piece: the place of its strip, and the piece with its offset in this rank's part; or a buffer.
    fn kept_piece(&self, piece: Piece) -> Result<Held> {
        let index = piece.parameter;
        let Some(location) = *self.plan.layout.locations.get(index).ok_or(Error::NoSlot { index })? else {
            let dtype = self.kept[index].dtype;
            return Ok(Held::Whole(layout::Whole { parameter: index, len: piece.len, dtype }));
        };
        let flat_param = &self.plan.layout.units[location.unit].flat_params[location.flat_param];
        let kept = flat_param.piece(location.place, self.groups.shards.rank());
        let kept = kept.filter(|kept| outside(*kept) == piece).ok_or(Error::Freed)?;
        Ok(Held::Part((location.unit, location.flat_param), kept))
    }
}

/// A piece as others see it.
const fn outside(piece: layout::Piece) -> Piece {
    Piece { parameter: piece.parameter, offset: piece.offset, len: piece.len }
}
