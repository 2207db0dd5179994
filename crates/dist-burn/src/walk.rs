//! Visits the tensors of a module in the order of their declaration.
//!
//! burn's identifiers of parameters are random in every process. Their order and their paths of field names are the
//! same in all processes.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bool, Int, Tensor};

/// The position of a tensor in its module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Position<'a> {
    /// The index of the tensor in the order of declaration.
    pub(crate) index: usize,
    fields: &'a [String],
}

impl Position<'_> {
    /// Returns the path of field names, joined by dots.
    pub(crate) fn name(self) -> String {
        self.fields.join(".")
    }
}

/// A visitor of all tensors of a module.
pub(crate) trait TensorVisitor {
    fn float<const D: usize>(&mut self, at: Position<'_>, param: &Param<Tensor<D>>);

    fn int<const D: usize>(&mut self, _at: Position<'_>, _param: &Param<Tensor<D, Int>>) {}

    fn bool<const D: usize>(&mut self, _at: Position<'_>, _param: &Param<Tensor<D, Bool>>) {}
}

/// Calls the visitor with every tensor of the module.
pub(crate) fn walk<M: Module>(module: &M, visitor: &mut impl TensorVisitor) {
    module.visit(&mut Walk { path: Path::default(), visitor });
}

/// The index and the field names of the next tensor.
#[derive(Debug, Default)]
pub(crate) struct Path {
    fields: Vec<String>,
    next: usize,
}

impl Path {
    pub(crate) fn enter(&mut self, name: &str) {
        self.fields.push(name.to_owned());
    }

    pub(crate) fn exit(&mut self) {
        self.fields.pop();
    }

    /// Returns the position of the next tensor, and moves on.
    pub(crate) fn advance(&mut self) -> Position<'_> {
        let index = self.next;
        self.next += 1;
        Position { index, fields: &self.fields }
    }
}

struct Walk<'a, V> {
    path: Path,
    visitor: &'a mut V,
}

impl<V: TensorVisitor> ModuleVisitor for Walk<'_, V> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.visitor.float(self.path.advance(), param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.visitor.int(self.path.advance(), param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.visitor.bool(self.path.advance(), param);
    }
}
