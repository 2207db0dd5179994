//! What a rank of [`Fsdp`] holds, for checkpoints: its part of every strip, as the optimizer changes it.

use super::{Fsdp, layout};
use crate::checkpoint::accumulated;
use crate::{Communicator, Error, Holding, ParamInfo, Piece, Result, Shards, Slice, Values, ValuesMut};

impl<A> Shards for Fsdp<A> {
    fn infos(&self) -> &[ParamInfo] {
        &self.kept
    }

    fn parameters(&self) -> Holding<Piece> {
        self.held(self.pieces().into_iter().map(|(_, piece)| outside(piece)).collect())
    }

    fn slices(&self) -> Holding<Slice> {
        let trained = self.pieces().into_iter().filter(|(_, piece)| self.kept[piece.parameter].trainable);
        let slice = |(_, piece): (_, layout::Piece)| Slice { number: piece.parameter, piece: outside(piece) };
        self.held(trained.map(slice).collect())
    }

    fn unsaved(&self) -> Option<String> {
        accumulated(self.micro_batches)
    }

    fn read(&self, piece: Piece, f: &mut dyn FnMut(Values<'_>)) -> Result<()> {
        let (place, piece) = self.kept_piece(piece)?;
        self.parameters.read(place, piece, &self.model, f)
    }

    fn write(&mut self, piece: Piece, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<()> {
        let (place, piece) = self.kept_piece(piece)?;
        self.parameters.change(place, piece, &mut self.model, |values| {
            f(values);
            Ok(())
        })
    }

    fn loaded(&mut self) -> Result<()> {
        self.forget();
        self.tell(|_| true)
    }

    fn communicator_mut(&mut self) -> &mut Communicator {
        self.communicator_mut()
    }
}

impl<A> Fsdp<A> {
    fn held<T>(&self, pieces: Vec<T>) -> Holding<T> {
        let replicas = &self.groups.replicas;
        Holding { pieces, copy: replicas.rank(), copies: replicas.world_size() }
    }

    /// Where this rank keeps a piece: the place of its strip, and the piece with its offset in this rank's part.
    fn kept_piece(&self, piece: Piece) -> Result<((usize, usize), layout::Piece)> {
        let home = self.plan.layout.homes.get(piece.parameter);
        let home = *home.ok_or(Error::NoSlot { index: piece.parameter })?;
        let strip = &self.plan.layout.units[home.unit].strips[home.strip];
        let kept = strip.piece(home.place, self.groups.shards.rank());
        let kept = kept.filter(|kept| outside(*kept) == piece).ok_or(Error::Freed)?;
        Ok(((home.unit, home.strip), kept))
    }
}

/// A piece as others see it.
const fn outside(piece: layout::Piece) -> Piece {
    Piece { parameter: piece.parameter, offset: piece.offset, len: piece.len }
}
