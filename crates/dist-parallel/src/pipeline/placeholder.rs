//! Placeholders for blocks of other ranks.

use crate::{Block, BoxError, Error, ParamInfo, Params, Ready, Saved, Values, ValuesMut};

/// A block of another rank: its parameters, without their memory.
///
/// With it, a rank can describe a model that is too large for its memory: its own stages in full, and all other
/// blocks as placeholders. Every call except the list of parameters returns an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placeholder {
    infos: Vec<ParamInfo>,
}

impl Placeholder {
    /// Returns a placeholder for a block with these parameters.
    pub const fn new(infos: Vec<ParamInfo>) -> Self {
        Self { infos }
    }
}

impl Params for Placeholder {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn read(&self, _: usize, _: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        Err(Error::Placeholder.into())
    }

    fn write(&mut self, _: usize, _: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        Err(Error::Placeholder.into())
    }
}

impl<A> Block<A> for Placeholder {
    fn forward(&mut self, _: A) -> Result<(A, Saved), BoxError> {
        Err(Error::Placeholder.into())
    }

    fn backward(&mut self, _: Saved, _: A, _: &mut Ready<'_>) -> Result<Option<A>, BoxError> {
        Err(Error::Placeholder.into())
    }
}
