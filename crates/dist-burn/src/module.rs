//! A burn module as a list of named tensors.

use std::any::Any;
use std::fmt;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use dist_parallel::model::BufferSync;
use dist_parallel::{BoxError, Error, FloatType, ParamInfo, Params, Values, ValuesMut};

use crate::walk::{Path, Position, TensorVisitor, walk};
use crate::{BurnError, values};

/// The tensors of a burn module as [`Params`], which dist-parallel broadcasts, synchronises, saves and loads.
///
/// It holds handles to the module's tensors at the time of the call. Values are copied only when they are read.
/// burn's modules are values, so a write does not change a module: [`install`](Self::install) returns a module with
/// the written values.
///
/// | in the module | here |
/// |---|---|
/// | a float tensor that requires a gradient | a trainable parameter |
/// | a float tensor that does not | a frozen parameter |
/// | state that a forward pass changes, such as burn's `RunningState` in a batch norm | a [buffer](ParamInfo::buffer) |
/// | an integer or boolean tensor | a frozen parameter of `f64`; an error if a value is not exact as `f64` |
///
/// The name of a tensor is its path of field names, joined by dots: `layers.0.weight`.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use dist_burn::ModuleParams;
/// use dist_parallel::Params;
///
/// let linear = LinearConfig::new(2, 1).init(&Device::flex().autodiff());
/// let mut params = ModuleParams::new(&linear)?;
/// let names: Vec<&str> = params.infos().iter().map(|info| &*info.name).collect();
/// assert_eq!(names, ["weight", "bias"]);
/// params.write(1, &mut |mut bias| bias.copy_from([0.5_f32][..].into()).unwrap())?;
/// let linear = params.install(linear)?;
/// assert_eq!(linear.bias.unwrap().val().into_scalar::<f32>(), 0.5);
/// # Ok::<(), dist_parallel::BoxError>(())
/// ```
pub struct ModuleParams {
    infos: Vec<ParamInfo>,
    held: Vec<Held>,
}

/// The values of one tensor.
enum Held {
    Nothing,
    /// The module's values.
    Shared(Box<ReadTensor>),
    /// Written values.
    Written(TensorData),
}

/// A function that reads the values of a tensor. It hides the tensor's number of dims.
type ReadTensor = dyn Fn() -> Result<TensorData, BurnError> + Send;

impl ModuleParams {
    /// Lists the tensors of this module.
    ///
    /// # Errors
    /// If a tensor has a type that cannot be trained, or an integer that is not exact as `f64`.
    pub fn new<M: Module>(module: &M) -> Result<Self, BurnError> {
        settle(module);
        let mut collected = ParameterCollector::default();
        walk(module, &mut collected);
        if let Some(error) = collected.error {
            return Err(error);
        }
        let ParameterCollector { infos, held, parameters, .. } = collected;
        let mut buffers = MarkBuffers { infos, parameters: &parameters };
        walk(module, &mut buffers);
        Ok(Self { infos: buffers.infos, held })
    }

    /// Sets how the ranks synchronise one buffer after every step.
    ///
    /// # Errors
    /// If there is no buffer of this name.
    pub fn sync_buffer(mut self, name: &str, sync: BufferSync) -> Result<Self, BurnError> {
        let buffers = self.infos.iter_mut().filter(|info| info.buffer.is_some());
        let buffer = buffers.into_iter().find(|info| info.name == name);
        buffer.ok_or_else(|| BurnError::UnknownName { name: name.to_owned() })?.buffer = Some(sync);
        Ok(self)
    }

    /// Sets how the ranks synchronise all buffers after every step.
    #[must_use]
    pub fn sync_buffers(mut self, sync: BufferSync) -> Self {
        let buffers = self.infos.iter_mut().filter_map(|info| info.buffer.as_mut());
        buffers.for_each(|own| *own = sync);
        self
    }

    /// Returns the module with all values that were written.
    ///
    /// burn's running states are shared between clones of a module, so they change in all clones.
    ///
    /// # Errors
    /// If the module has other tensors, or a written value does not fit an integer or boolean tensor.
    pub fn install<M: Module>(&self, module: M) -> Result<M, BurnError> {
        check(&self.infos, &module)?;
        let mut install = Install { path: Path::default(), params: self, error: None };
        let module = module.map(&mut install);
        install.error.map_or(Ok(module), Err)
    }

    /// Appends tensors, whose names must be new.
    pub(crate) fn with_tensors(mut self, more: impl IntoIterator<Item = (ParamInfo, TensorData)>) -> Self {
        for (info, data) in more {
            self.infos.push(info);
            self.held.push(Held::Written(data));
        }
        self
    }

    /// Drops all values, except for those from index `from` on, which are removed from the list and returned.
    pub(crate) fn split_off(mut self, from: usize) -> (Self, Vec<TensorData>) {
        self.infos.truncate(from);
        let rest = self.held.split_off(from).into_iter();
        let written = rest.filter_map(|held| if let Held::Written(data) = held { Some(data) } else { None });
        let written = written.collect();
        (self, written)
    }

    /// Drops all values.
    pub(crate) fn release(&mut self) {
        self.held.iter_mut().for_each(|held| *held = Held::Nothing);
    }

    /// Takes handles to the values of this module, which must have the same tensors.
    pub(crate) fn hold<M: Module>(&mut self, module: &M) -> Result<(), BurnError> {
        check(&self.infos, module)?;
        settle(module);
        let mut collected = ParameterCollector::default();
        walk(module, &mut collected);
        match collected.error {
            None => self.held = collected.held,
            Some(error) => return Err(error),
        }
        Ok(())
    }

    /// Returns `true` if any buffer is synchronised between ranks.
    pub(crate) fn has_synchronised_buffers(&self) -> bool {
        self.infos.iter().any(|info| info.buffer.is_some_and(|sync| sync != BufferSync::Local))
    }
}

impl Params for ModuleParams {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn read(&self, index: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        let (info, held) = self.infos.get(index).zip(self.held.get(index)).ok_or(Error::NoSlot { index })?;
        match held {
            Held::Nothing => return Err(Error::Freed.into()),
            Held::Shared(read) => f(values::values(&info.name, &read()?)?),
            Held::Written(data) => f(values::values(&info.name, data)?),
        }
        Ok(())
    }

    fn write(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        let of = self.infos.get(index).zip(self.held.get_mut(index));
        let (info, held) = of.ok_or(Error::NoSlot { index })?;
        let mut data = match std::mem::replace(held, Held::Nothing) {
            Held::Nothing => return Err(Error::Freed.into()),
            Held::Shared(read) => read()?,
            Held::Written(data) => data,
        };
        f(values::values_mut(&info.name, &mut data)?);
        *held = Held::Written(data);
        Ok(())
    }
}

impl fmt::Debug for ModuleParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ModuleParams({} tensors)", self.infos.len())
    }
}

/// Applies pending updates of running states by this thread's forward passes. burn otherwise applies them at the next
/// forward pass.
fn settle<M: Module>(module: &M) {
    drop(module.valid());
}

/// Checks that a module has tensors of these names and shapes.
pub(crate) fn check<M: Module>(infos: &[ParamInfo], module: &M) -> Result<(), BurnError> {
    let mut check = Check { infos, count: 0, found: None };
    walk(module, &mut check);
    let missing = || infos.get(check.count).map(|_| (check.count, "missing".to_owned()));
    match check.found.clone().or_else(missing) {
        None => Ok(()),
        Some((index, found)) => {
            let expected = infos.get(index);
            let expected =
                expected.map_or_else(|| "missing".to_owned(), |info| look(&info.name, &info.shape));
            Err(BurnError::ModelChanged { index, expected, found })
        }
    }
}

fn look(name: &str, shape: &[usize]) -> String {
    format!("{name} {shape:?}")
}

/// A visitor that compares the tensors of a module with a list.
struct Check<'a> {
    infos: &'a [ParamInfo],
    count: usize,
    /// The first tensor that differs.
    found: Option<(usize, String)>,
}

impl Check<'_> {
    fn compare(&mut self, at: Position<'_>, shape: &[usize]) {
        self.count += 1;
        let name = at.name();
        let is_same = self.infos.get(at.index).is_some_and(|info| info.name == name && info.shape == shape);
        if !is_same && self.found.is_none() {
            self.found = Some((at.index, look(&name, shape)));
        }
    }
}

impl TensorVisitor for Check<'_> {
    fn float<const D: usize>(&mut self, at: Position<'_>, param: &Param<Tensor<D>>) {
        self.compare(at, &param.dims());
    }

    fn int<const D: usize>(&mut self, at: Position<'_>, param: &Param<Tensor<D, Int>>) {
        self.compare(at, &param.dims());
    }

    fn bool<const D: usize>(&mut self, at: Position<'_>, param: &Param<Tensor<D, Bool>>) {
        self.compare(at, &param.dims());
    }
}

/// A visitor that collects all tensors of a module.
#[derive(Default)]
struct ParameterCollector {
    infos: Vec<ParamInfo>,
    held: Vec<Held>,
    /// The parameters, each with the address of its value.
    parameters: Vec<(usize, Box<dyn Any>)>,
    error: Option<BurnError>,
}

impl ParameterCollector {
    fn constant(
        &mut self,
        at: Position<'_>,
        shape: &[usize],
        data: impl FnOnce() -> Result<TensorData, BoxError>,
    ) {
        let name = at.name();
        let unread = |source| BurnError::Unread { name: name.clone(), source };
        match data().map_err(unread).and_then(|data| values::exact(&name, &data)) {
            Ok(data) => {
                // Values are converted back only if they are written.
                self.held.push(Held::Shared(Box::new(move || Ok(data.clone()))));
            }
            Err(error) => self.fail(error),
        }
        let info = ParamInfo::new(name, shape, FloatType::F64);
        self.infos.push(ParamInfo { trainable: false, ..info });
        self.parameters.push((0, Box::new(())));
    }

    fn fail(&mut self, error: BurnError) {
        self.held.push(Held::Nothing);
        self.error.get_or_insert(error);
    }
}

impl TensorVisitor for ParameterCollector {
    fn float<const D: usize>(&mut self, at: Position<'_>, param: &Param<Tensor<D>>) {
        let name = at.name();
        let tensor = param.val().inner();
        let dtype = values::float_type(&name, tensor.dtype());
        match &dtype {
            Ok(_) => {
                let name = name.clone();
                self.held.push(Held::Shared(Box::new(move || {
                    let unread = |source: BoxError| BurnError::Unread { name: name.clone(), source };
                    tensor.try_to_data().map_err(|error| unread(error.into()))
                })));
            }
            Err(BurnError::Type { name, dtype }) => {
                self.fail(BurnError::Type { name: name.clone(), dtype: *dtype });
            }
            Err(_) => unreachable!("a type is known or not"),
        }
        let info = ParamInfo::new(name, param.dims(), dtype.unwrap_or(FloatType::F32));
        self.infos.push(ParamInfo { trainable: param.is_require_grad(), ..info });
        self.parameters.push((address(param), Box::new(param.clone())));
    }

    fn int<const D: usize>(&mut self, at: Position<'_>, param: &Param<Tensor<D, Int>>) {
        self.constant(at, &param.dims(), || Ok(param.val().try_into_data()?));
    }

    fn bool<const D: usize>(&mut self, at: Position<'_>, param: &Param<Tensor<D, Bool>>) {
        self.constant(at, &param.dims(), || Ok(param.val().try_into_data()?));
    }
}

/// Returns the address of a parameter's value.
fn address<const D: usize>(param: &Param<Tensor<D>>) -> usize {
    let value: &Tensor<D> = param;
    std::ptr::from_ref(value).addr()
}

/// A visitor that marks the tensors that are buffers.
///
/// burn does not report which tensors a forward pass changes. But a parameter's value has the same address
/// for every visitor while a clone of it lives. State behind a lock, such as burn's `RunningState`, creates a
/// new parameter for every visitor.
struct MarkBuffers<'a> {
    infos: Vec<ParamInfo>,
    parameters: &'a [(usize, Box<dyn Any>)],
}

impl TensorVisitor for MarkBuffers<'_> {
    fn float<const D: usize>(&mut self, at: Position<'_>, param: &Param<Tensor<D>>) {
        let (Some(info), Some((before, _))) = (self.infos.get_mut(at.index), self.parameters.get(at.index))
        else {
            return;
        };
        if !info.trainable && address(param) != *before {
            info.buffer = Some(BufferSync::default());
        }
    }
}

/// A mapper that writes the written values to a module.
struct Install<'a> {
    path: Path,
    params: &'a ModuleParams,
    error: Option<BurnError>,
}

impl<'a> Install<'a> {
    /// Returns the value that was written to the next tensor.
    fn written(&mut self) -> Option<(&'a ParamInfo, &'a TensorData)> {
        let index = self.path.advance().index;
        match (self.params.infos.get(index)?, self.params.held.get(index)?) {
            (info, Held::Written(data)) => Some((info, data)),
            _ => None,
        }
    }

    /// Returns the value that was written to the next tensor, which is of integers or booleans of this type.
    fn written_as(&mut self, dtype: DType) -> Option<TensorData> {
        let (info, data) = self.written()?;
        match values::back(&info.name, data, dtype) {
            Ok(data) => Some(data),
            Err(error) => {
                self.error.get_or_insert(error);
                None
            }
        }
    }
}

impl ModuleMapper for Install<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some((_, data)) = self.written() else { return param };
        let (id, old, mapper) = param.consume();
        let new = Tensor::from_data(data.clone(), (&old.device(), data.dtype()));
        Param::from_mapped_value(id, new.set_require_grad(old.is_require_grad()), mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let dtype = param.dtype();
        let Some(data) = self.written_as(dtype) else { return param };
        let (id, old, mapper) = param.consume();
        Param::from_mapped_value(id, Tensor::from_data(data, (&old.device(), dtype)), mapper)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        let Some(data) = self.written_as(param.dtype()) else { return param };
        let (id, old, mapper) = param.consume();
        Param::from_mapped_value(id, Tensor::from_data(data, &old.device()), mapper)
    }
}
