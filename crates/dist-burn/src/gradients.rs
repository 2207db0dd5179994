//! burn's container of gradients, read and filled in the order of a module's parameters.

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};
use dist_parallel::model::Ready;
use dist_parallel::{BoxError, ParamInfo};

use crate::walk::{Position, TensorVisitor, walk};
use crate::{BurnError, values};

/// Reports the gradients of all trained parameters.
///
/// # Errors
/// If `ready` rejects a gradient, or a gradient belongs to no trained parameter.
pub(crate) fn report<M: Module>(
    infos: &[ParamInfo],
    module: &M,
    gradients: GradientsParams,
    ready: &mut Ready<'_>,
) -> Result<(), BoxError> {
    let mut report = Report { infos, gradients, ready, outcome: Ok(()) };
    walk(module, &mut report);
    report.outcome?;
    match report.gradients.len() {
        0 => Ok(()),
        count => Err(BurnError::ForeignGradients { count }.into()),
    }
}

struct Report<'a, 'r> {
    infos: &'a [ParamInfo],
    gradients: GradientsParams,
    ready: &'a mut Ready<'r>,
    outcome: Result<(), BoxError>,
}

impl TensorVisitor for Report<'_, '_> {
    fn float<const D: usize>(&mut self, at: Position<'_>, param: &Param<Tensor<D>>) {
        let info = &self.infos[at.index];
        if self.outcome.is_err() || !info.trainable {
            return;
        }
        let Some(gradient) = self.gradients.remove::<D>(param.id) else { return };
        self.outcome = read(&info.name, gradient).map_err(BoxError::from).and_then(|data| {
            let values = values::values(&info.name, &data)?;
            (self.ready)(at.index, values)
        });
    }
}

/// Returns the container with the gradients that `gradient` returns.
pub(crate) fn register<M: Module>(
    module: &M,
    gradients: &mut GradientsParams,
    gradient: impl FnMut(usize) -> Option<TensorData>,
) {
    walk(module, &mut Register { gradients, gradient });
}

struct Register<'a, F> {
    gradients: &'a mut GradientsParams,
    gradient: F,
}

impl<F: FnMut(usize) -> Option<TensorData>> TensorVisitor for Register<'_, F> {
    fn float<const D: usize>(&mut self, at: Position<'_>, param: &Param<Tensor<D>>) {
        if let Some(data) = (self.gradient)(at.index) {
            // Gradients are tensors without autodiff, on the parameter's device.
            let device = param.val().inner().device();
            let dtype = data.dtype();
            self.gradients.register(param.id, Tensor::<D>::from_data(data, (&device, dtype)));
        }
    }
}

/// Returns the gradients of all trained parameters, by the indices of the parameters.
pub(crate) fn collect<M: Module>(
    infos: &[ParamInfo],
    module: &M,
    gradients: &GradientsParams,
) -> Result<Vec<(usize, TensorData)>, BurnError> {
    let mut collect = GradientCollector { infos, gradients, data: Vec::new(), outcome: Ok(()) };
    walk(module, &mut collect);
    collect.outcome.map(|()| collect.data)
}

struct GradientCollector<'a> {
    infos: &'a [ParamInfo],
    gradients: &'a GradientsParams,
    data: Vec<(usize, TensorData)>,
    outcome: Result<(), BurnError>,
}

impl TensorVisitor for GradientCollector<'_> {
    fn float<const D: usize>(&mut self, at: Position<'_>, param: &Param<Tensor<D>>) {
        let info = &self.infos[at.index];
        let Some(gradient) = self.gradients.get::<D>(param.id).filter(|_| info.trainable) else { return };
        match read(&info.name, gradient) {
            Ok(data) => self.data.push((at.index, data)),
            Err(error) => self.outcome = Err(error),
        }
    }
}

fn read<const D: usize>(name: &str, gradient: Tensor<D>) -> Result<TensorData, BurnError> {
    let unread = |source| BurnError::Unread { name: format!("the gradient of {name}"), source };
    gradient.try_into_data().map_err(|error| unread(error.into()))
}
