//! What a rank of [`Fsdp`] holds, for checkpoints: its part of every strip, as the optimizer changes it.

use super::layout::Strip;
use super::{Fsdp, layout};
use crate::{Communicator, Holding, ParamInfo, Piece, Result, Shards, Slice, Values, ValuesMut};

impl<A> Shards for Fsdp<A> {
    fn infos(&self) -> &[ParamInfo] {
        &self.kept
    }

    fn parameters(&self) -> Holding<Piece> {
        self.held(self.parts().map(|(_, _, piece)| piece).collect())
    }

    fn slices(&self) -> Holding<Slice> {
        let trained = self.parts().filter(|(_, strip, _)| strip.trainable);
        self.held(trained.map(|(_, _, piece)| Slice { number: piece.parameter, piece }).collect())
    }

    fn read(&self, piece: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<()> {
        let (place, strip, wanted) = self.parts().nth(piece).expect(IN_THE_LIST);
        self.parameters.read(strip, place, &self.model, |piece, values| {
            if piece.parameter == wanted.parameter {
                f(values);
            }
        })
    }

    fn write(&mut self, piece: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<()> {
        let (place, _, wanted) = self.parts().nth(piece).expect(IN_THE_LIST);
        let Self { parameters, model, plan, .. } = self;
        let strip = &plan.layout.units[place.0].strips[place.1];
        parameters.change(strip, place, model, |piece, values| {
            if piece.parameter == wanted.parameter {
                f(values);
            }
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
    /// This rank's part of each parameter, strip by strip, with the strip's place.
    fn parts(&self) -> impl Iterator<Item = ((usize, usize), &Strip, Piece)> {
        let rank = self.groups.shards.rank();
        self.plan.layout.strips().flat_map(move |(place, strip)| {
            let piece = |layout::Piece { parameter, offset, len, .. }| Piece { parameter, offset, len };
            strip.pieces(rank).map(move |part| (place, strip, piece(part)))
        })
    }

    fn held<T>(&self, pieces: Vec<T>) -> Holding<T> {
        let replicas = &self.groups.replicas;
        Holding { pieces, copy: replicas.rank(), copies: replicas.world_size() }
    }
}

const IN_THE_LIST: &str = "a piece is named by its number in the list";
