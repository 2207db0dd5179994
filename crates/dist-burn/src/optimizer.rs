//! The state of a burn optimizer, as tensors of a checkpoint.
//!
//! burn stores the state of an optimizer per parameter, under an identifier that is random in every process.
//! In a checkpoint the state has the parameter's name: `optimizer:layers.0.weight:momentum.moment_1`. The
//! names and shapes of the state are known only after a step. To find them, a copy of the optimizer makes one
//! step with gradients of zero, and is dropped.

use std::collections::{BTreeMap, HashMap};

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Bytes, Tensor, TensorData};
use burn_pack::{Reader, Scalar, Writer};
use dist_parallel::{BoxError, FloatType, ParamInfo};

use crate::walk::{Position, TensorVisitor, walk};
use crate::{BurnError, values};

/// The prefix of the names of an optimizer's tensors in a checkpoint. No field of a module has such a name.
pub(crate) const PREFIX: &str = "optimizer:";

/// The state of an optimizer for the parameters of a module.
pub(crate) struct OptimizerTensors {
    parameters: Vec<OfParameter>,
    /// The names of parameters in burn's own record, by their identifiers.
    paths: BTreeMap<String, String>,
}

/// The state for one parameter.
struct OfParameter {
    id: u64,
    name: String,
    /// `true` if the optimizer has state for it. If not, `fields` are those that it would have after a step.
    is_present: bool,
    fields: Fields,
}

type Fields = BTreeMap<String, Field>;

#[derive(Clone)]
enum Field {
    Tensor(TensorData),
    Scalar(Scalar),
}

impl OptimizerTensors {
    /// Returns the state of this optimizer for this module's parameters, or the state that it would have after a
    /// step.
    pub(crate) fn of<M: Module>(optimizer: &ModuleOptimizer, module: &M) -> Result<Self, BurnError> {
        let parameters = parameters(module);
        let Record { states: mut kept, mut paths } = read(optimizer.to_record())?;
        let is_trained = |(id, _, is_trained): &&(u64, String, bool)| *is_trained && !kept.contains_key(id);
        let mut probed = HashMap::new();
        if parameters.iter().any(|parameter| is_trained(&parameter)) {
            let mut gradients = GradientsParams::new();
            walk(module, &mut ZeroGradients(&mut gradients));
            let mut probe = optimizer.clone();
            drop(probe.step(0.0, module.clone(), gradients));
            let record = read(probe.to_record())?;
            probed = record.states;
            paths.extend(record.paths);
        }
        let parameters = parameters.into_iter().filter_map(|(id, name, _)| {
            let present = kept.remove(&id);
            let is_present = present.is_some();
            Some(OfParameter { id, name, is_present, fields: present.or_else(|| probed.remove(&id))? })
        });
        let parameters = parameters.collect();
        match kept.keys().min() {
            Some(&id) => Err(BurnError::ForeignState { id }),
            None => Ok(Self { parameters, paths }),
        }
    }

    /// Returns all state as tensors.
    pub(crate) fn tensors(&self) -> Result<Vec<(ParamInfo, TensorData)>, BurnError> {
        let mut tensors = Vec::new();
        for OfParameter { name, is_present, fields, .. } in &self.parameters {
            let name = |field: &str| format!("{PREFIX}{name}:{field}");
            tensors.push(number(name(PRESENT), f64::from(*is_present)));
            for (field, value) in fields {
                let name = name(field);
                tensors.push(match value {
                    Field::Tensor(data) => {
                        let dtype = values::float_type(&name, data.dtype())?;
                        (ParamInfo::new(name, data.shape().to_vec(), dtype), data.clone())
                    }
                    Field::Scalar(scalar) => {
                        let exact = to_number(*scalar);
                        let exact = exact.ok_or_else(|| BurnError::Inexact { name: name.clone() })?;
                        number(name, exact)
                    }
                });
            }
        }
        Ok(tensors)
    }

    /// Returns the optimizer with the state in these tensors, which are those of [`tensors`](Self::tensors) with
    /// other values.
    pub(crate) fn restore(
        self,
        optimizer: &ModuleOptimizer,
        tensors: Vec<TensorData>,
    ) -> Result<ModuleOptimizer, BurnError> {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().ok_or_else(|| failed("a tensor of its state is missing"));
        let (mut packed, mut scalars) = (Vec::new(), Vec::new());
        for OfParameter { id, fields, .. } in self.parameters {
            let is_present = from_data(&next()?) == Some(1.0);
            for (field, old) in fields {
                let (name, data) = (format!("{id}.{field}"), next()?);
                match old {
                    _ if !is_present => {}
                    Field::Tensor(_) => {
                        let (bytes, shape, dtype) = data.into_parts();
                        packed.push(burn_pack::Tensor::new(name, dtype, shape, Some(id), bytes));
                    }
                    Field::Scalar(old) => {
                        let scalar = from_data(&data).and_then(|number| from_number(number, old));
                        scalars.push((
                            name.clone(),
                            scalar.ok_or_else(|| failed(format!("{name} is no {old:?}")))?,
                        ));
                    }
                }
            }
        }
        let mut writer = Writer::new(packed);
        for (name, scalar) in scalars {
            writer = writer.with_scalar(&name, scalar);
        }
        for (id, path) in &self.paths {
            writer = writer.with_metadata(id, path);
        }
        let bytes: Bytes = writer.into_bytes().map_err(failed)?;
        let record = OptimizerRecord::from_bytes(bytes).map_err(failed)?;
        Ok(optimizer.clone().load_record(record))
    }
}

/// The field that is `true` if the optimizer has state for a parameter.
const PRESENT: &str = "is_present";

/// The contents of an optimizer's record.
struct Record {
    /// The state by the identifier of the parameter.
    states: HashMap<u64, Fields>,
    /// The names of parameters in the record, by their identifiers.
    paths: BTreeMap<String, String>,
}

fn read(record: OptimizerRecord) -> Result<Record, BurnError> {
    let reader = Reader::from_bytes(record.into_bytes().map_err(failed)?).map_err(failed)?;
    let paths = reader.metadata().clone();
    let mut states: HashMap<u64, Fields> = HashMap::new();
    let mut add = |name: &str, field: Field| {
        let (id, rest) = name.split_once('.').ok_or_else(|| failed(format!("{name} has no number")))?;
        let id = id.parse().map_err(failed)?;
        states.entry(id).or_default().insert(rest.to_owned(), field);
        Ok::<_, BurnError>(())
    };
    for (name, scalar) in reader.scalars() {
        add(name, Field::Scalar(*scalar))?;
    }
    for tensor in reader.into_tensors().map_err(failed)? {
        let (name, dtype, shape, _, bytes) = tensor.into_parts().map_err(failed)?;
        add(&name, Field::Tensor(TensorData::from_bytes(bytes, shape, dtype)))?;
    }
    Ok(Record { states, paths })
}

/// Returns for each float parameter its identifier, its name, and whether it is trained. A parameter in two fields is
/// listed once.
fn parameters<M: Module>(module: &M) -> Vec<(u64, String, bool)> {
    let mut found = Parameters(Vec::new());
    walk(module, &mut found);
    found.0
}

struct Parameters(Vec<(u64, String, bool)>);

impl TensorVisitor for Parameters {
    fn float<const D: usize>(&mut self, at: Position<'_>, param: &Param<Tensor<D>>) {
        let id = param.id.val();
        if self.0.iter().all(|(other, ..)| *other != id) {
            self.0.push((id, at.name(), param.is_require_grad()));
        }
    }
}

struct ZeroGradients<'a>(&'a mut GradientsParams);

impl TensorVisitor for ZeroGradients<'_> {
    fn float<const D: usize>(&mut self, _at: Position<'_>, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            self.0.register(param.id, param.val().inner().zeros_like());
        }
    }
}

fn number(name: String, number: f64) -> (ParamInfo, TensorData) {
    let scalar: [usize; 0] = [];
    (ParamInfo::new(name, scalar, FloatType::F64), TensorData::new(vec![number], scalar))
}

fn from_data(data: &TensorData) -> Option<f64> {
    data.as_slice::<f64>().ok()?.first().copied()
}

/// Converts a number to `f64`, if that is exact.
#[expect(clippy::cast_precision_loss, reason = "it is compared")]
fn to_number(scalar: Scalar) -> Option<f64> {
    let number = match scalar {
        Scalar::Int(number) => number as f64,
        Scalar::UInt(number) => number as f64,
        Scalar::Float(number) => number,
        Scalar::Bool(number) => f64::from(number),
    };
    let back = from_number(number, scalar)?;
    let is_exact = match (scalar, back) {
        (Scalar::Float(own), Scalar::Float(back)) => own.to_bits() == back.to_bits(),
        (own, back) => own == back,
    };
    is_exact.then_some(number)
}

/// Converts a number to a scalar of the same type as another, if it is a value of this type.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the number is in the range and has no fraction"
)]
fn from_number(number: f64, like: Scalar) -> Option<Scalar> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let is_integer = number.fract() == 0.0 && number.abs() <= EXACT;
    match like {
        Scalar::Int(_) => is_integer.then_some(Scalar::Int(number as i64)),
        Scalar::UInt(_) => (is_integer && number >= 0.0).then_some(Scalar::UInt(number as u64)),
        Scalar::Float(_) => Some(Scalar::Float(number)),
        Scalar::Bool(_) => (number == 0.0 || number == 1.0).then_some(Scalar::Bool(number == 1.0)),
    }
}

fn failed(source: impl Into<BoxError>) -> BurnError {
    BurnError::OptimizerRecord { source: source.into() }
}
