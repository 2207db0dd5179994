//! A warning about trained parameters that never have a gradient, which is a mistake of a block.

use crate::ParamInfo;

/// A warning about trained parameters without a gradient, which is shown once, after the first step of a
/// training.
#[derive(Debug, Default)]
pub(crate) struct Unreported {
    is_told: bool,
}

impl Unreported {
    /// Logs a warning with these names, if this is the first step and there are any.
    pub(crate) fn warn_once<'a>(&mut self, names: impl FnOnce() -> Vec<&'a str>) {
        if std::mem::replace(&mut self.is_told, true) {
            return;
        }
        let names = names();
        if !names.is_empty() {
            tracing::warn!(
                parameters = names.join(", "),
                "no micro-batch of the first step had a gradient for these parameters, so they are not trained; does a block forget to report them?"
            );
        }
    }
}

/// Returns the names of the trained parameters without a gradient.
pub(crate) fn without_gradient(infos: &[ParamInfo], has_gradient: impl Fn(usize) -> bool) -> Vec<&str> {
    let trained = infos.iter().enumerate().filter(|(_, info)| info.trainable && info.same_as.is_none());
    trained.filter(|(parameter, _)| !has_gradient(*parameter)).map(|(_, info)| &*info.name).collect()
}
