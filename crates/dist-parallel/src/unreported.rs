//! Parameters that should be trained and never have a gradient: a mistake of a block that nothing else shows.

use crate::ParamInfo;

/// Tells once, after the first step of a training, which of the parameters that should be trained have had no gradient.
#[derive(Debug, Default)]
pub(crate) struct Unreported {
    is_told: bool,
}

impl Unreported {
    /// Logs a warning with these names, if this is the first step and there are some.
    pub(crate) fn warn_once<'a>(&mut self, names: impl FnOnce() -> Vec<&'a str>) {
        if std::mem::replace(&mut self.is_told, true) {
            return;
        }
        let names = names();
        if !names.is_empty() {
            tracing::warn!(
                parameters = names.join(", "),
                "no micro-batch of the first step had a gradient for these parameters, which are therefore not trained"
            );
        }
    }
}

/// The names of the parameters that should be trained and for which this is false.
pub(crate) fn without_gradient(infos: &[ParamInfo], has_gradient: impl Fn(usize) -> bool) -> Vec<&str> {
    let trained = infos.iter().enumerate().filter(|(_, info)| info.trainable && info.same_as.is_none());
    trained.filter(|(parameter, _)| !has_gradient(*parameter)).map(|(_, info)| &*info.name).collect()
}
