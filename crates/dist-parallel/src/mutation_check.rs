//! Finds parameters that a block changes by itself, before the change is lost.
//!
//! Where parameters are sharded, a block computes with copies that are freed or overwritten afterwards. Training changes
//! parameters only between steps, through the optimizer, and a block that changes its own state declares that as a buffer. So a
//! copy has to be the same after its use as before.

use crate::{Error, Params, Result, params};

/// Compares the checksums of one unit's parameters before and after their use.
///
/// Reading every parameter twice in every pass would be slow for large models. A unit is watched in its first uses, and from
/// then on now and then, so that also a block that begins to change its parameters later is found.
#[derive(Debug)]
pub(crate) struct MutationCheck {
    /// Moves the uses in which a unit is watched, so that not all units are watched in the same pass.
    phase: usize,
    period: usize,
    uses: usize,
    /// The checksums before the present use, if it is watched.
    before: Option<Vec<u32>>,
}

impl MutationCheck {
    /// For one of so many units.
    pub(crate) fn new(unit: usize, units: usize) -> Self {
        // It is odd, because a unit is often used twice in a pass: forward and backward get their turns.
        Self { phase: unit, period: PERIOD_MIN.max(2 * units + 1), uses: 0, before: None }
    }

    /// Begins a use of these parameters, whose values the model has.
    pub(crate) fn begin(
        &mut self,
        model: &impl Params,
        parameters: impl Iterator<Item = usize>,
    ) -> Result<()> {
        let is_watched = self.uses < FIRST_USES || (self.uses + self.phase).is_multiple_of(self.period);
        self.uses += 1;
        self.before = if is_watched {
            Some(parameters.map(|parameter| checksum(model, parameter)).collect::<Result<_>>()?)
        } else {
            None
        };
        Ok(())
    }

    /// Ends the use.
    ///
    /// # Errors
    /// [`Error::ChangedByBlock`] if it was watched and a parameter has changed.
    pub(crate) fn end(&mut self, model: &impl Params, parameters: impl Iterator<Item = usize>) -> Result<()> {
        let Some(before) = self.before.take() else { return Ok(()) };
        for (parameter, before) in parameters.zip(before) {
            if checksum(model, parameter)? != before {
                return Err(Error::ChangedByBlock { parameter: model.infos()[parameter].name.clone() });
            }
        }
        Ok(())
    }

    /// Forgets a use that has not ended.
    pub(crate) fn forget(&mut self) {
        self.before = None;
    }
}

/// Returns the CRC-32 of a parameter's values.
pub(crate) fn checksum(model: &impl Params, parameter: usize) -> Result<u32> {
    let mut checksum = 0;
    params::read(model, parameter, &mut |values| checksum = crc32fast::hash(values.as_bytes()))?;
    Ok(checksum)
}

/// A unit's uses that are watched at the beginning: forward and backward of two passes.
const FIRST_USES: usize = 4;

/// Afterwards at most one use in so many is watched.
const PERIOD_MIN: usize = 31;
