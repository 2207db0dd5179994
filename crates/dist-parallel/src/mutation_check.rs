//! A check for blocks that change parameters by themselves.
//!
//! Blocks compute with copies of sharded parameters, which are freed or overwritten afterwards. Training changes
//! parameters only between steps, through the optimizer. State that a block changes is declared as a buffer. A copy
//! must therefore be unchanged after its use.

use crate::{Error, Params, Result, params};

/// A comparison of the checksums of one unit's parameters before and after their use.
///
/// Reading every parameter twice in every pass would be slow for large models. A unit is checked in its first uses
/// and periodically afterwards, to find a block that starts to change its parameters later.
#[derive(Debug)]
pub(crate) struct MutationCheck {
    /// Shifts the uses in which a unit is checked, so that not all units are checked in the same pass.
    phase: usize,
    period: usize,
    uses: usize,
    /// The checksums before the current use, if it is checked.
    before: Option<Vec<u32>>,
}

impl MutationCheck {
    /// Returns the check for unit `unit` of `units`.
    pub(crate) fn new(unit: usize, units: usize) -> Self {
        // It is odd, because a unit is often used twice in a pass: both forward and backward are checked.
        Self { phase: unit, period: PERIOD_MIN.max(2 * units + 1), uses: 0, before: None }
    }

    /// Starts a use of these parameters, whose values the model has.
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
    /// [`Error::ChangedByBlock`] if the use was checked and a parameter has changed.
    pub(crate) fn end(&mut self, model: &impl Params, parameters: impl Iterator<Item = usize>) -> Result<()> {
        let Some(before) = self.before.take() else { return Ok(()) };
        for (parameter, before) in parameters.zip(before) {
            if checksum(model, parameter)? != before {
                return Err(Error::ChangedByBlock { parameter: model.infos()[parameter].name.clone() });
            }
        }
        Ok(())
    }

    /// Forgets an unfinished use.
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

/// The number of first uses of a unit that are checked: forward and backward of two passes.
const FIRST_USES: usize = 4;

/// The minimum period of the later checks, in uses.
const PERIOD_MIN: usize = 31;
