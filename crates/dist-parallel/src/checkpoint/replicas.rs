//! What a rank of [`Ddp`] holds: everything, as every other rank does.

use super::{Holding, Piece, Shards, Slice};
use crate::{Communicator, Ddp, ParamInfo, Params, Result, Values, ValuesMut, params};

impl<M: Params> Shards for Ddp<M> {
    fn infos(&self) -> &[ParamInfo] {
        self.model().infos()
    }

    fn parameters(&self) -> Holding<Piece> {
        let pieces = stored(self.model().infos()).map(|(_, piece)| piece).collect();
        Holding { pieces, copy: self.rank(), copies: self.world_size() }
    }

    fn slices(&self) -> Holding<Slice> {
        let trained = stored(self.model().infos()).filter(|(info, _)| info.trainable);
        let pieces = trained.map(|(_, piece)| Slice { number: piece.parameter, piece }).collect();
        Holding { pieces, copy: self.rank(), copies: self.world_size() }
    }

    fn read(&self, piece: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<()> {
        let (_, Piece { parameter, .. }) = stored(self.model().infos()).nth(piece).expect(IN_THE_LIST);
        params::read(self.model(), parameter, f)
    }

    fn write(&mut self, piece: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<()> {
        let (_, Piece { parameter, .. }) = stored(self.model().infos()).nth(piece).expect(IN_THE_LIST);
        params::write(self.model_mut(), parameter, |values| {
            f(values);
            Ok(())
        })
    }

    fn loaded(&mut self) -> Result<()> {
        self.forget();
        Ok(())
    }

    fn communicator_mut(&mut self) -> &mut Communicator {
        self.communicator_mut()
    }
}

/// The parameters that have memory of their own, each as one piece.
fn stored(infos: &[ParamInfo]) -> impl Iterator<Item = (&ParamInfo, Piece)> {
    let all = infos.iter().enumerate();
    all.filter(|(_, info)| info.same_as.is_none())
        .map(|(parameter, info)| (info, Piece { parameter, offset: 0, len: info.len() }))
}

const IN_THE_LIST: &str = "a piece is named by its number in the list";
