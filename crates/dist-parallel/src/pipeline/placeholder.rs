//! Blocks that another rank has.

use crate::{Block, BoxError, Error, ParamInfo, Params, Ready, Saved, Values, ValuesMut};

/// What a rank has to know of a block that it does not have: the parameters, without their memory.
///
/// With it, a rank describes a model that is too large for its memory: its own stages as they are, and everything else
/// elsewhere. Whatever is asked of it but the list of parameters is an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placeholder {
    infos: Vec<ParamInfo>,
}

impl Placeholder {
    /// A block with these parameters, on another rank.
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
